"""The inventory of a folder: size and checksum of every file in it, in its last one, COMPLETE.

The first line of an inventory has a checksum of all its other lines; these have checksum, bytes and path of a
file each.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

COMPLETE = "COMPLETE"
"""Name of the file that holds the inventory."""

PART_BYTES = 64 << 20
"""What each part of a checksum is of: the parts are read beside one another, also those of one large file."""

READ_BYTES = 1 << 20
"""One read: it stays in the cache of the core that sums it up."""

_TITLE = "tba-hpc inventory crc32="
_LINE = re.compile(r"([0-9a-f]{8,}) (\d+) (.+)")


class _File(NamedTuple):
    """A line."""

    checksum: str
    size: int
    path: str


class SummedFile:
    """A new file that is summed up while it is written, so that nobody has to read it back.

    A context manager: the file is durable when the block has ended. ``checksum`` is then as of ``checksums``,
    ``size`` in bytes. Large writes are summed up, and parts that are whole go to the disk, in threads of its
    own meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.checksum = ""
        self._part = 0  # CRC-32 of the part that is being written
        self._file = path.open("wb", buffering=0)
        self._beside = ThreadPoolExecutor(2)  # a checksum and a flush
        self._flush: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self.size % PART_BYTES or not self.size:
                    self._end_part()
                os.fsync(self._file.fileno())
                if self._flush:
                    self._flush.result()  # the system tells one of two callers that a write failed
        finally:
            self._beside.shutdown()
            self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Append; returns how many bytes that were."""
        left = memoryview(data).cast("B")
        written = len(left)
        while left:
            piece = left[: PART_BYTES - self.size % PART_BYTES]
            self._append(piece)
            left = left[len(piece) :]
        return written

    def flush(self) -> None:
        """Nothing is held back; libraries that write files call it."""

    def line(self, folder: Path) -> str:
        """The file's line in the inventory of ``folder``."""
        return f"{self.checksum} {self.size} {self.path.relative_to(folder)}\n"

    def _append(self, piece: memoryview) -> None:
        """Write what lies within one part."""
        if len(piece) < READ_BYTES:
            self._part = zlib.crc32(piece, self._part)
            self._to_file(piece)
        else:  # both let other threads run
            summed = self._beside.submit(zlib.crc32, piece, self._part)
            self._to_file(piece)
            self._part = summed.result()
        self.size += len(piece)
        if self.size % PART_BYTES == 0:
            self._end_part()

    def _to_file(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece) :]

    def _end_part(self) -> None:
        self.checksum += f"{self._part:08x}"
        self._part = 0
        if self._flush is None or self._flush.done():
            if self._flush:
                self._flush.result()
            self._flush = self._beside.submit(os.fdatasync, self._file.fileno())


def inventory(folder: Path, *names: str, known: str = "") -> str:
    """Lines of these files of ``folder``, or of all but COMPLETE, those in its folders too.

    known: lines of files that are summed up already, which are not read again.
    """
    summed_up = {line.split(" ", 2)[2] for line in known.splitlines()}
    everything = (path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    files = [folder / name for name in names] or sorted(everything)
    files = [file for file in files if str(file.relative_to(folder)) not in summed_up]
    lines = zip(checksums(files), files, strict=True)
    return known + "".join(
        f"{summed} {file.stat().st_size} {file.relative_to(folder)}\n" for summed, file in lines
    )


def with_checksum(lines: str) -> str:
    """The whole of an inventory, for COMPLETE."""
    return f"{_TITLE}{zlib.crc32(lines.encode()):08x}\n{lines}"


def damage(folder: Path, *only: str) -> str:
    """What is wrong with the files of a folder, or with these alone, in a few words; empty where nothing is.

    Files that COMPLETE does not name are left alone. Raises OSError where the file system does not answer.
    """
    try:
        return _damage(folder, only)
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        if error.errno != errno.EIO:  # the others may pass
            raise
        return f"the disk cannot read it: {error}"


def _damage(folder: Path, only: Sequence[str]) -> str:
    files = [file for file in _parse((folder / COMPLETE).read_bytes()) if not only or file.path in only]
    if not files:
        return f"{COMPLETE} is corrupt"
    for file in files:
        if (size := (folder / file.path).stat().st_size) != file.size:
            return f"{file.path} has {size} bytes, not {file.size}"
    now = checksums([folder / file.path for file in files])
    wrong = [file.path for file, summed in zip(files, now, strict=True) if file.checksum != summed]
    return f"{wrong[0]} is corrupt: its checksum does not match" if wrong else ""


def _parse(data: bytes) -> list[_File]:
    """The lines of COMPLETE; none if it is damaged."""
    text = data.decode(errors="replace")
    lines = text.partition("\n")[2]
    if text != with_checksum(lines):
        return []
    found = (_LINE.fullmatch(line) for line in lines.splitlines())
    return [_File(line[1], int(line[2]), line[3]) for line in found if line]


def checksums(paths: Sequence[Path]) -> list[str]:
    """A checksum of each file: CRC-32 of every 64 MiB of it, in hexadecimal, one after the other.

    It tells accidents, not forgery. All cores that this process may use read at once, in bounded memory.
    """
    parts = [(path, start) for path in paths for start in range(0, path.stat().st_size or 1, PART_BYTES)]
    sums = dict.fromkeys(paths, "")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (path, _), part in zip(parts, pool.map(lambda part: _crc32(*part), parts), strict=True):
            sums[path] += f"{part:08x}"
    return list(sums.values())


def _crc32(path: Path, start: int) -> int:
    """Of at most PART_BYTES from ``start``."""
    total, left, buffer = 0, PART_BYTES, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (got := file.readinto(buffer[:left])):
            total, left = zlib.crc32(buffer[:got], total), left - got
    return total
