"""Bundles: the files of many merged shards in one, so that a run of a thousand searchers keeps few files.

It must not know what the files hold, which lie in a bundle as they were, one after the other. Their table is
at both of its ends, a line of text and one of JSON with a checksum: a damaged block costs the shard in which
it lies, and no more. ``head -2`` shows it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from tba_hpc.run.directory import REFUSED, RunDir
from tba_hpc.run.files import passes

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""Searcher and index of a shard."""

LINE_BYTES = 47
_LINE = re.compile(rb"tba-hpc bundle table=(\d{10}) crc32=([0-9a-f]{8})\n")


class BundleError(ValueError):
    """The table of a bundle cannot be read; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the file of a shard lies in a bundle, bytes."""

    bundle: Path
    start: int
    size: int

    def read(self) -> bytes:
        """The file as it was; less of it where the bundle is truncated. Raises OSError."""
        with self.bundle.open("rb") as file:
            return _read(file, self.start, self.size)


def pack(files: Mapping[Key, bytes]) -> bytes:
    """The bytes of a bundle."""
    table = json.dumps([[*key, len(data)] for key, data in files.items()]).encode() + b"\n"
    line = b"tba-hpc bundle table=%010d crc32=%08x\n" % (len(table), zlib.crc32(table))
    return b"".join([line, table, *files.values(), table, line])


def contents(bundle: Path) -> dict[Key, Place]:
    """Where each shard of a bundle lies. Raises BundleError, OSError."""
    with bundle.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        table = _table(file, end, at_end=False) or _table(file, end, at_end=True)
    if not table:
        raise BundleError(f"{bundle} is damaged: neither of its two tables is whole")
    rows = json.loads(table)
    starts = accumulate((size for _, _, size in rows), initial=LINE_BYTES + len(table))
    return {(rank, i): Place(bundle, start, size) for (rank, i, size), start in zip(rows, starts)}  # noqa: B905


def _table(file: BinaryIO, end: int, *, at_end: bool) -> bytes:
    """One of the two tables of a file that ends there; nothing where it is damaged."""
    found = _LINE.fullmatch(_read(file, end - LINE_BYTES if at_end else 0, LINE_BYTES))
    if not found:
        return b""
    size = int(found[1])
    table = _read(file, end - LINE_BYTES - size if at_end else LINE_BYTES, size)
    return table if zlib.crc32(table) == int(found[2], 16) else b""


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(max(0, start))
    return file.read(size)


class Bundles:
    """What lies in the bundles of a run, as far as a start needs it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._read: set[int] = set()
        self._places: dict[Key, Place] = {}
        self._ends: dict[int, int] = {}

    def look(self, cursors: Mapping[int, int]) -> None:
        """Read the tables that are new; of shards before these indices, by searcher, nothing is kept.

        A bundle without a table is set aside; what a file server has not at hand comes with the next look.
        """
        try:
            there = self._run.bundle_files()
        except OSError as error:
            if not passes(error):
                raise
            return
        for number in there.keys() - self._read:
            self._look_at(number, there[number], cursors)

    def _look_at(self, number: int, bundle: Path, cursors: Mapping[int, int]) -> None:
        try:
            found = contents(bundle)
        except BundleError as error:
            aside = bundle.rename(bundle.with_name(bundle.name + REFUSED))
            log.warning("%s; set aside as %s", error, aside.name)
            return
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and not passes(error):
                raise
            return
        self._read.add(number)
        for (searcher, index), place in found.items():
            if index >= cursors.get(searcher, 0):
                self._places[searcher, index] = place
                self._ends[searcher] = max(index + 1, self._ends.get(searcher, 0))

    def find(self, searcher: int, index: int) -> Place | None:
        """Where the copy of a shard's file is, if there is one."""
        return self._places.get((searcher, index))

    def end(self, searcher: int) -> int:
        """The index after the last shard of a searcher; 0 where there is none."""
        return self._ends.get(searcher, 0)
