"""Deletes shards that no resume needs any more, or keeps a share of them for people.

Which shards are kept follows from searcher and index alone, evenly over the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.files import make_folder

log = logging.getLogger(__name__)

GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927
"""Multiples of them, modulo 1, lie evenly in 0…1, however many they are."""


def place_of(key: ShardKey) -> float:
    """Where in 0…1 a shard is: those below a share are kept. The very first of a run is at 0."""
    searcher, index = key
    return (index * GOLDEN + searcher * PLASTIC) % 1.0


def prune(run: RunDir, cursors: Mapping[int, int], share: float = 0.0) -> None:
    """Drop the shards before these indices, by searcher, in the order of their indices; refused files stay.

    share: of all shards that are kept, 0…1. What cannot be dropped is left to the next call, maybe of the
    next start.
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
    """Move the file of a shard to RUN/kept, or delete it if it is not to be kept."""
    file, kept = run.shard_file(*key), run.kept_file(*key)
    if place_of(key) < share:
        if not kept.parent.is_dir():
            make_folder(kept.parent)
        file.rename(kept)
    else:
        file.unlink(missing_ok=True)
