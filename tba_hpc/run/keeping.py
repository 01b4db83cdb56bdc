"""Shards that no resume needs any more and that are kept all the same, for people: a share, in bounded room.

It must not know what is in them. Which are kept follows from searcher and index alone, evenly over the run;
where they take too much room, every second of them goes, the older ones as well as the newer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tba_hpc.run.bundles import BundleError, Key, Place, contents, pack
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import make_folder, publish

log = logging.getLogger(__name__)

GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927
"""Multiples of them, modulo 1, lie evenly in 0…1, however many they are."""

SMALLEST_SHARE = 2.0**-20
"""Below it nothing more is thinned out: a single shard may be larger than the room."""


def place_of(key: Key) -> float:
    """Where in 0…1 a shard is: those below a share are the ones kept. The very first of a run is at 0."""
    searcher, index = key
    return (index * GOLDEN + searcher * PLASTIC) % 1.0


class ShardKeeper:
    """Keeps shards in RUN/kept, in bundles that are never written to again, but for thinning out.

    share: of all, 0…1. most_bytes: that they take together, None for no bound. A shard may be in two of them
    where a kill came between keeping and deleting it. How far the share was halved is not remembered: after
    a new start more is kept of what comes, until there is no room again.
    """

    def __init__(self, run: RunDir, share: float, most_bytes: int | None) -> None:
        self._run = run
        self._share = share
        self._most_bytes = most_bytes
        for left in run.kept.glob(".*.tmp"):  # of a writer that was killed
            left.unlink(missing_ok=True)

    def wants(self, key: Key) -> bool:
        """Whether a shard is one of those to keep."""
        return place_of(key) < self._share

    def keep(self, files: Mapping[Key, bytes]) -> None:
        """Keep the files of shards; without room on the disk they are not kept, as the log says."""
        if not files:
            return
        try:
            make_folder(self._run.kept)
            number = max(self._run.kept_files(), default=-1) + 1
            publish(self._run.kept / f"{number:06d}.bundle", pack(files), replace=False)
            self._thin_out()
        except OSError as error:
            log.warning("%d merged shards could not be kept: %s", len(files), error)

    def _thin_out(self) -> None:
        """Halve the share until what is kept has room."""
        while self._most_bytes is not None and self._size() > self._most_bytes:
            if self._share < SMALLEST_SHARE:
                return
            self._share /= 2
            for bundle in self._run.kept_files().values():
                self._rewrite(bundle)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._run.kept_files().values())

    def _rewrite(self, bundle: Path) -> None:
        """Leave out of a bundle what is not wanted any more."""
        places = kept_contents(bundle)
        wanted = {key: place for key, place in places.items() if self.wants(key)}
        if not wanted:
            bundle.unlink()
        elif len(wanted) < len(places):
            publish(bundle, pack({key: place.read() for key, place in wanted.items()}))


def kept_contents(bundle: Path) -> dict[Key, Place]:
    """Where each shard of a bundle lies; nothing where it is damaged or gone."""
    try:
        return contents(bundle)
    except (BundleError, FileNotFoundError):
        return {}


def sealed_files(run: RunDir) -> dict[Key, Path | Place]:
    """Where every shard that is still there lies, waiting, merged or kept, by searcher and index, ascending.

    At any moment of a run: what leaves its folder is in a bundle first, and what leaves that in RUN/kept. Who
    reads them later looks again where a file is gone by then.
    """
    files: dict[Key, Path | Place] = dict(run.shard_files())
    for bundle in [*run.bundle_files().values(), *run.kept_files().values()]:
        for key, place in kept_contents(bundle).items():
            files.setdefault(key, place)
    return dict(sorted(files.items()))
