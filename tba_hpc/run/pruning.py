"""Deletes shards that no resume needs any more, or keeps a share of them for people.

It happens beside the trainer's loop, which does not wait for a file system. Which shards are kept follows
from searcher and index alone, evenly over the run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.files import is_for_room, make_folder

log = logging.getLogger(__name__)

GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927
"""Multiples of them, modulo 1, lie evenly in 0…1, however many they are."""


def place_of(key: ShardKey) -> float:
    """Where in 0…1 a shard is: those below a share are kept. The very first of a run is at 0."""
    searcher, index = key
    return (index * GOLDEN + searcher * PLASTIC) % 1.0


class ShardPruner:
    """Deletes merged shards on a thread of its own, in the order of their indices, or moves them to RUN/kept.

    A process that ends does not wait for it; the next call, maybe of the next start, deletes what is left.
    share: of all shards that are kept, 0…1.
    """

    def __init__(self, run: RunDir, share: float = 0.0) -> None:
        self._run = run
        self._share = share
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # One for all calls: if every core is busy, the start of a thread may take half a second.
        threading.Thread(target=self._work, name="pruner", daemon=True).start()

    def prune(self, cursors: Mapping[int, int]) -> None:
        """Drop the shards before these indices, by searcher; returns at once. Refused files stay."""
        self._asked.put(partial(self._prune, dict(cursors)))

    def finish(self, seconds: float) -> bool:
        """Wait for what was asked for, no longer than ``seconds``; whether all of it was done."""
        done = threading.Event()
        self._asked.put(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            task = self._asked.get()
            try:
                task()
            except OSError as error:
                log.warning("merged shards stay until the next checkpoint: %s", error)

    def _prune(self, cursors: Mapping[int, int]) -> None:
        errors: list[OSError] = []
        for searcher, end in cursors.items():
            for index in self._run.shard_indices(searcher):
                if index < end:
                    try:
                        self._drop((searcher, index))
                    except OSError as error:
                        errors.append(error)
        if errors:
            log.warning(
                "cannot delete %d of the merged shards (%s); the next checkpoint tries again",
                len(errors),
                errors[0],
            )

    def _drop(self, key: ShardKey) -> None:
        """Move the file of a shard to RUN/kept, or delete it if it is not to be kept or the disk is full."""
        file, kept = self._run.shard_file(*key), self._run.kept_file(*key)
        if place_of(key) < self._share:
            try:
                if not kept.parent.is_dir():
                    make_folder(kept.parent)
                file.rename(kept)
                return
            except OSError as error:
                if not is_for_room(error):
                    raise
        file.unlink(missing_ok=True)


def sealed_files(run: RunDir) -> dict[ShardKey, Path]:
    """Files of all shards that are still there, waiting, merged or kept, by searcher and index, ascending.

    A file may move to RUN/kept before it is read: look again then.
    """
    waiting = run.shard_files()
    return dict(sorted({**waiting, **run.kept_files()}.items()))
