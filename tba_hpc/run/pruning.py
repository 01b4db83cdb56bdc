"""Deletes shards that no resume needs any more, except a share that is kept for inspection.

Which shards are kept depends only on their searcher and index. They are spread evenly over the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.files import make_folder

log = logging.getLogger(__name__)

GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927
"""Numbers whose first n multiples, modulo 1, are spread evenly over 0…1, for any n."""


def position(key: ShardKey) -> float:
    """Return a number in 0…1 for a shard. The shard is kept if the number is below the share to keep.

    The number is 0 for the first shard of searcher 0, so that a share above 0 keeps at least this shard.
    """
    searcher, index = key
    return (index * GOLDEN + searcher * PLASTIC) % 1.0


def prune(run: RunDir, cursors: Mapping[int, int], share: float = 0.0) -> None:
    """Delete or keep each searcher's shards before its cursor, in ascending order of index.

    share: share of all shards to keep, 0…1. Shards that were set aside stay where they are. Shards that
    cannot be deleted now are left to a later call, with a warning.
    """
    errors: list[OSError] = []
    for searcher, end in cursors.items():
        try:
            indices = run.shard_indices(searcher)
        except OSError as error:
            errors.append(error)
            continue
        for index in (index for index in indices if index < end):
            try:
                _delete_or_keep(run, (searcher, index), share)
            except OSError as error:
                errors.append(error)
    if errors:
        log.warning(
            "cannot delete %d of the merged shards (%s); the next checkpoint tries again",
            len(errors),
            errors[0],
        )


def _delete_or_keep(run: RunDir, key: ShardKey, share: float) -> None:
    """Move a shard's file to RUN/kept if it belongs to the share to keep; otherwise delete it."""
    file, kept = run.shard_file(*key), run.kept_file(*key)
    if position(key) < share:
        if not kept.parent.is_dir():
            make_folder(kept.parent)
        file.rename(kept)
    else:
        file.unlink(missing_ok=True)
