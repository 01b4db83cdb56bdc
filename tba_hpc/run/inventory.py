"""Inventory of a folder in a file COMPLETE, written last: checksum, size and path of every other file.

The first line of COMPLETE is a checksum of its other lines. Checksums are BLAKE3 of 128 bits. They reveal
accidental damage only, because whoever can write to the folder can also write a matching COMPLETE.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

COMPLETE = "COMPLETE"
"""Name of the file that holds the inventory."""

READ_BYTES = 8 << 20
"""Number of bytes that are read and checksummed at once, enough to keep all cores busy."""

READERS = 8
"""Maximum number of files read at once."""

_LINE = re.compile(r"([0-9a-f]{32}) (\d+) (.+)")


class SummedFile:
    """New file whose checksum is computed while it is written, which saves reading it afterwards.

    Use it as a context manager; the file is durable when the block has ended. ``size``: bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._sum = blake3(max_threads=blake3.AUTO)
        self._file = path.open("wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Append all of ``data``, and return its number of bytes."""
        left = memoryview(data).cast("B")
        written = len(left)
        self._sum.update(left)
        while left:
            left = left[self._file.write(left) :]
        self.size += written
        return written

    def flush(self) -> None:
        """Do nothing, because writes are unbuffered. Libraries that write to a file object call this."""

    def line(self, folder: Path) -> str:
        """Return the file's line in the inventory of ``folder``, which contains it."""
        return _line(_text(self._sum), self.size, str(self.path.relative_to(folder)))


def inventory(folder: Path, *names: str, known: str = "") -> str:
    """Return the inventory lines of the named files of ``folder``; without names, of all files at any depth.

    COMPLETE is left out. known: lines of files whose checksums are known; they are returned first, and these
    files are not read.
    """
    summed_up = {line.split(" ", 2)[2] for line in known.splitlines()}
    everything = (path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    files = [folder / name for name in names] or sorted(everything)
    left = [path for path in files if str(path.relative_to(folder)) not in summed_up]
    sums = zip(_checksums(left), left, strict=True)
    return known + "".join(
        _line(checksum, path.stat().st_size, str(path.relative_to(folder))) for checksum, path in sums
    )


def with_checksum(lines: str) -> str:
    """Return the content of COMPLETE: a line with a checksum of inventory ``lines``, then these lines."""
    return f"tba-hpc inventory blake3={_text(blake3(lines.encode()))}\n{lines}"


def damage(folder: Path, *only: str) -> str:
    """Compare a folder's files, or only those named in ``only``, with COMPLETE; describe the first fault.

    Returns "" if all are intact. Files that COMPLETE does not name are ignored. Raises OSError if the file
    system does not answer.
    """
    try:
        if (folder / COMPLETE).exists() and not (folder / COMPLETE).is_file():
            return f"{COMPLETE} is not a file"
        text = (folder / COMPLETE).read_bytes().decode(errors="replace")
        lines = text.partition("\n")[2]
        found = [match.groups() for line in lines.splitlines() if (match := _LINE.fullmatch(line))]
        files = [(folder / name, int(size), checksum) for checksum, size, name in found]
        if only:
            files = [file for file in files if file[0].name in only]
        if text != with_checksum(lines) or not files:
            return f"{COMPLETE} is corrupt"
        for path, size, _ in files:
            if (now := path.stat().st_size) != size:
                return f"{path.relative_to(folder)} has {now} bytes, not {size}"
        now_sums = _checksums([path for path, *_ in files])
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        if error.errno != errno.EIO:  # other errors may be temporary
            raise
        return f"a file cannot be read from the disk: {error}"
    for (path, _, checksum), now_sum in zip(files, now_sums, strict=True):
        if checksum != now_sum:
            return f"{path.relative_to(folder)} is corrupt: its checksum does not match"
    return ""


def _line(checksum: str, size: int, name: str) -> str:
    return f"{checksum} {size} {name}\n"


def _checksums(paths: Sequence[Path]) -> list[str]:
    """Return the hexadecimal checksum of each file. Up to READERS files are read at once, piece by piece."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> str:
    summed = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(min(READ_BYTES, 1 + path.stat().st_size)))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            summed.update(buffer[:got])
    return _text(summed)


def _text(summed: blake3) -> str:
    return summed.hexdigest(length=16)
