"""Deletes shards that no resume needs any more, except a share that is kept for inspection.

Searcher and index alone decide which shards are kept, evenly over the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.files import make_folder

log = logging.getLogger(__name__)

GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927
"""Numbers whose multiples modulo 1 are spread evenly over 0…1, for any count."""


def place_of(key: ShardKey) -> float:
    """Return a shard's place in 0…1: it is kept if that lies below the share. A run's first shard is at 0."""
    searcher, index = key
    return (index * GOLDEN + searcher * PLASTIC) % 1.0


def prune(run: RunDir, cursors: Mapping[int, int], share: float = 0.0) -> None:
    """Drop each searcher's shards before its cursor, in ascending order of index; refused files stay.

    share: the share of all shards that is kept, 0…1. Shards that cannot be dropped are left to the next call,
    perhaps that of the next start.
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
                _drop(run, (searcher, index), share)
            except OSError as error:
                errors.append(error)
    if errors:
        log.warning(
            "cannot delete %d of the merged shards (%s); the next checkpoint tries again",
            len(errors),
            errors[0],
        )


def _drop(run: RunDir, key: ShardKey, share: float) -> None:
    """Move a shard's file to RUN/kept if it is in the kept share, or delete it."""
    file, kept = run.shard_file(*key), run.kept_file(*key)
    if place_of(key) < share:
        if not kept.parent.is_dir():
            make_folder(kept.parent)
        file.rename(kept)
    else:
        file.unlink(missing_ok=True)
