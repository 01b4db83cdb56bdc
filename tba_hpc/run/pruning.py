"""Bundles merged shards, and deletes them, beside the trainer's loop, which must not wait for a file system.

It must not know what a checkpoint needs: it is told how far the shards of each searcher may go. Nor what is
in their files: it is told which are whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from tba_hpc.run.bundles import BundleError, Key, contents, pack
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import make_folder, publish
from tba_hpc.run.keeping import ShardKeeper, kept_contents

log = logging.getLogger(__name__)

LOOSE = 4096
"""Merged shards that stay files of their own: runs of a few searchers have fewer, and never a bundle."""

BUNDLED = 256
"""Shards in a bundle, unless they are larger than BUNDLE_BYTES together."""

BUNDLE_BYTES = 64 << 20
"""About the size of a bundle, which is held in memory while it is written."""

AGAIN_SECONDS = 60.0
"""Pause before a bundle is tried again that could not be written."""

IsWhole = Callable[[bytes], bool]
"""Whether these are all the bytes of a file as it was sealed."""


class ShardPruner:
    """Bundles and deletes merged shards on a thread of its own, in the order of their indices.

    A process that ends does not wait for it. What a kill or an error leaves goes with the next call, or that
    of the next start: only that lists what is there, since 100,000 names take seconds of the interpreter.
    is_whole: None for a run without bundles. keeper: gets what is to be deleted, and may want some of it.
    """

    def __init__(
        self, run: RunDir, is_whole: IsWhole | None = None, keeper: ShardKeeper | None = None
    ) -> None:
        self._run = run
        self._is_whole = is_whole
        self._keeper = keeper
        self._merged: Mapping[int, int] = {}
        self._ends: dict[int, int] = {}  # per searcher: the shards before are known
        self._loose: dict[Key, None] = {}  # may be bundled, oldest first
        # May not: those that have a copy in a bundle, are not whole, or not to be seen.
        self._left: dict[Key, None] = {}
        # Per searcher: the index after its last there.
        self._bundles: dict[Path, dict[int, int]] | None = None
        self._number = 0
        self._not_before = 0.0
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # One for all calls: where every core is busy, the start of a thread may take half a second.
        threading.Thread(target=self._work, name="pruner", daemon=True).start()

    def merged(self, cursors: Mapping[int, int]) -> None:
        """Shards before these indices, by searcher, are merged: bundle the oldest where there are many.

        Returns at once. A bundle is durable before the files in it are deleted.
        """
        self._merged = cursors
        if self._is_whole and self._asked.empty():
            self._asked.put(self._bundle)

    def prune(self, cursors: Mapping[int, int]) -> None:
        """Delete the shards before these indices, by searcher; returns at once. Files set aside stay.

        What cannot be deleted is told in the log.
        """
        self._asked.put(partial(self._delete, dict(cursors)))

    def finish(self, seconds: float) -> bool:
        """Wait for what was asked for, no longer than ``seconds``; whether all of it was done.

        But for bundles: there will be none any more.
        """
        done = threading.Event()
        self._is_whole = None
        self._asked.put(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            task = self._asked.get()
            try:
                task()
            except OSError as error:
                self._not_before = time.monotonic() + AGAIN_SECONDS
                log.warning("merged shards stay as they are (%s): they are looked at again later", error)

    # --- What there is ---

    def _learn(self, cursors: Mapping[int, int]) -> None:
        """Note the shards before ``cursors``; at first those that a start finds. Raises OSError."""
        if self._bundles is None:
            self._bundles = self._find_bundles()
        for searcher, end in cursors.items():
            first = self._ends[searcher] if searcher in self._ends else self._lowest(searcher, end)
            self._loose.update(dict.fromkeys((searcher, index) for index in range(first, end)))
            self._ends[searcher] = max(first, end)

    def _lowest(self, searcher: int, end: int) -> int:
        """The first shard of a searcher that is a file of its own, or ``end``."""
        return min([*self._run.shard_indices(searcher)[:1], end])

    def _find_bundles(self) -> dict[Path, dict[int, int]]:
        """Those of earlier starts; what a kill left of one goes."""
        for left in self._run.bundles.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        files = self._run.bundle_files()
        self._number = max(files, default=-1) + 1
        return {path: ends for path in files.values() if (ends := _ends_of(path)) is not None}

    # --- Bundle ---

    def _bundle(self) -> None:
        """Make one bundle, and ask for the next, while there are too many files."""
        if time.monotonic() < self._not_before or not self._is_whole:
            return
        self._learn(self._merged)
        if len(self._loose) < LOOSE + BUNDLED:
            return
        files = self._read_oldest(self._is_whole)
        if files:
            make_folder(self._run.bundles)
            path, self._number = self._run.bundle_file(self._number), self._number + 1
            publish(path, pack(files), replace=False)
            assert self._bundles is not None
            self._bundles[path] = _ends(files)
            self._unlink(files)
        self._asked.put(self._bundle)

    def _read_oldest(self, is_whole: IsWhole) -> dict[Key, bytes]:
        """The files that a bundle is made of. Those that are not whole, or not to be seen, are left out."""
        files: dict[Key, bytes] = {}
        size = 0
        for key in list(islice(self._loose, BUNDLED)):
            if size >= BUNDLE_BYTES:
                break
            data = _read(self._run.shard_file(*key))
            if is_whole(data):
                files[key], size = data, size + len(data)
            else:
                self._leave(key)
        return files

    def _leave(self, key: Key) -> None:
        self._left[key] = self._loose.pop(key)

    def _unlink(self, keys: Iterable[Key]) -> list[OSError]:
        """Delete files; returns what was in the way, of files that will not be bundled then."""
        errors = []
        for key in keys:
            error = _unlink(self._run.shard_file(*key))
            if error:
                self._left[key] = None
                errors.append(error)
            else:
                self._left.pop(key, None)
            self._loose.pop(key, None)
        return errors

    # --- Delete ---

    def _delete(self, cursors: Mapping[int, int]) -> None:
        self._learn(cursors)
        known = [*self._left, *self._loose]
        merged = [key for key in known if key[1] < cursors.get(key[0], 0)]
        self._keep_some(merged)
        errors = self._unlink(merged)
        errors += self._unlink_bundles(cursors)
        if errors:
            log.warning(
                "cannot delete %d of the merged shards (%s): they take room until the next checkpoint, which "
                "tries again",
                len(errors),
                errors[0],
            )

    def _keep_some(self, merged: Iterable[Key]) -> None:
        """Keep those of these files that are wanted."""
        if self._keeper is None:
            return
        files: dict[Key, bytes] = {}
        for key in filter(self._keeper.wants, merged):
            if data := _read(self._run.shard_file(*key)):
                files[key] = data
            if sum(map(len, files.values())) >= BUNDLE_BYTES:
                self._keeper.keep(files)
                files = {}
        self._keeper.keep(files)

    def _keep_some_of(self, bundle: Path) -> None:
        """The same of a bundle."""
        if self._keeper is not None:
            places = kept_contents(bundle)
            self._keeper.keep({key: place.read() for key, place in places.items() if self._keeper.wants(key)})

    def _unlink_bundles(self, cursors: Mapping[int, int]) -> list[OSError]:
        """Delete the bundles of which nothing is needed."""
        assert self._bundles is not None
        errors = []
        for path, ends in list(self._bundles.items()):
            if all(end <= cursors.get(searcher, 0) for searcher, end in ends.items()):
                self._keep_some_of(path)
                if error := _unlink(path):
                    errors.append(error)
                else:
                    del self._bundles[path]
        return errors


def _ends(keys: Iterable[Key]) -> dict[int, int]:
    """Per searcher, the index after its last."""
    ends: dict[int, int] = {}
    for searcher, index in keys:
        ends[searcher] = max(index + 1, ends.get(searcher, 0))
    return ends


def _ends_of(bundle: Path) -> dict[int, int] | None:
    """Of what is in a bundle; None where it cannot be told."""
    try:
        return _ends(contents(bundle))
    except (BundleError, FileNotFoundError):
        return None


def _read(path: Path) -> bytes:
    """Nothing of what cannot be read: it was set aside, or the disk is at fault."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _unlink(path: Path) -> OSError | None:
    """Delete a file if it is there; returns what went wrong."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None
