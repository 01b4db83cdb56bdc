"""Deletes merged shards beside the trainer's loop, which must not wait for a file system.

It must not know what a checkpoint needs: it is told how far the shards of each searcher may go.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tba_hpc.run.directory import RunDir

log = logging.getLogger(__name__)


class ShardPruner:
    """Deletes shards on a thread of its own, in the order of their indices.

    A process that ends does not wait for it. What a kill or an error leaves goes with the next call, or that
    of the next start: only that lists what is there, since 100,000 names take seconds of the interpreter.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._first: dict[int, int] = {}  # per searcher: none of its shards before is there
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # One for all calls: where every core is busy, the start of a thread may take half a second.
        threading.Thread(target=self._work, name="pruner", daemon=True).start()

    def prune(self, cursors: Mapping[int, int]) -> None:
        """Delete the shards before these indices, by searcher; returns at once. Files set aside stay.

        What cannot be deleted is told in the log.
        """
        self._asked.put(partial(self._delete, dict(cursors)))

    def finish(self, seconds: float) -> bool:
        """Wait for what was asked for, no longer than ``seconds``; whether all of it was done."""
        done = threading.Event()
        self._asked.put(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            self._asked.get()()

    def _delete(self, cursors: Mapping[int, int]) -> None:
        errors = [error for searcher, end in cursors.items() for error in self._delete_of(searcher, end)]
        if errors:
            log.warning(
                "cannot delete %d of the merged shards (%s): they take room until the next checkpoint, which "
                "tries again",
                len(errors),
                errors[0],
            )

    def _delete_of(self, searcher: int, end: int) -> list[OSError]:
        """Delete the shards of a searcher before ``end``; returns what was in the way."""
        first = self._first[searcher] if searcher in self._first else self._lowest(searcher, end)
        failed = {
            index: error
            for index in range(first, end)
            if (error := _unlink(self._run.shard_file(searcher, index)))
        }
        self._first[searcher] = min(failed, default=max(first, end))
        return list(failed.values())

    def _lowest(self, searcher: int, end: int) -> int:
        """The first shard of a searcher that is there, or ``end``."""
        names = (path.stem for path in self._run.shard_folder(searcher).glob("*.h5"))
        return min((int(name) for name in names if name.isdecimal()), default=end)


def _unlink(path: Path) -> OSError | None:
    """Delete a file if it is there; returns what went wrong."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None
