"""The inventory of a folder: size and checksum of every file in it, in its last one, COMPLETE.

The first line of an inventory has a checksum of all its other lines; these have checksum, bytes and path of a
file each. A checksum is BLAKE3, which finds accidents and sums several GB a second.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from blake3 import blake3

COMPLETE = "COMPLETE"
"""Name of the file that holds the inventory."""

READ_BYTES = 8 << 20
"""One read of a file that is summed up: enough for all cores to share."""

READERS = 8
"""Most files that are read at once."""

_TITLE = "tba-hpc inventory blake3="
_LINE = re.compile(r"([0-9a-f]{32}) (\d+) (.+)")


class _File(NamedTuple):
    """A line."""

    checksum: str
    size: int
    path: str


class SummedFile:
    """A new file that is summed up while it is written, so that nobody has to read it back.

    A context manager: the file is durable when the block has ended. ``size`` is in bytes.
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
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Append; returns how many bytes that were."""
        left = memoryview(data).cast("B")
        written = len(left)
        self._sum.update(left)
        while left:
            left = left[self._file.write(left) :]
        self.size += written
        return written

    def flush(self) -> None:
        """Nothing is held back; libraries that write files call it."""

    def line(self, folder: Path) -> str:
        """The file's line in the inventory of ``folder``."""
        return _line(_File(_text(self._sum), self.size, str(self.path.relative_to(folder))))


def inventory(folder: Path, *names: str, known: str = "") -> str:
    """Lines of these files of ``folder``, or of all but COMPLETE, those in its folders too.

    known: lines of files that are summed up already, which are not read again.
    """
    summed_up = {line.split(" ", 2)[2] for line in known.splitlines()}
    everything = (path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    files = [folder / name for name in names] or sorted(everything)
    found = ((path, str(path.relative_to(folder))) for path in files)
    left = {path: name for path, name in found if name not in summed_up}
    sums = zip(checksums(list(left)), left.items(), strict=True)
    return known + "".join(_line(_File(summed, path.stat().st_size, name)) for summed, (path, name) in sums)


def with_checksum(lines: str) -> str:
    """The whole of an inventory, for COMPLETE."""
    return f"{_TITLE}{_text(blake3(lines.encode()))}\n{lines}"


def damage(folder: Path, *only: str) -> str:
    """What is wrong with the files of a folder, or with these alone, in a few words; empty if nothing is.

    Files that COMPLETE does not name are left alone. Raises OSError if the file system does not answer.
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


def _line(file: _File) -> str:
    return f"{file.checksum} {file.size} {file.path}\n"


def _parse(data: bytes) -> list[_File]:
    """The lines of COMPLETE; none if it is damaged."""
    text = data.decode(errors="replace")
    lines = text.partition("\n")[2]
    if text != with_checksum(lines):
        return []
    found = (_LINE.fullmatch(line) for line in lines.splitlines())
    return [_File(line[1], int(line[2]), line[3]) for line in found if line]


def checksums(paths: Sequence[Path]) -> list[str]:
    """A checksum of each file, in hexadecimal. Several files are read at once, in bounded memory."""
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
