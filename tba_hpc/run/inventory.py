"""The inventory of a folder: size and checksum of every file in it, in its last one, COMPLETE.

It must not know what the files hold. The first line of an inventory has a checksum of all its other lines;
these have checksum, bytes and path of a file each.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
"""Name of the file that holds the inventory."""

PART_BYTES = 64 << 20
"""What each part of a checksum is of: the parts are read beside one another, also those of one large file."""

READ_BYTES = 1 << 20
"""One read: it stays in the cache of the core that sums it up."""

_TITLE = "tba-hpc inventory crc32="
_LINE = re.compile(r"(?:([0-9a-f]{8,}) )?(\d+) (.+)")


class _File(NamedTuple):
    """A line. checksum: empty in an inventory of an earlier version, which has no first line either."""

    checksum: str
    size: int
    path: str


def inventory(folder: Path, *names: str) -> str:
    """Lines of these files of ``folder``, or of all but COMPLETE, those in its folders too."""
    everything = (path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    files = [folder / name for name in names] or sorted(everything)
    lines = zip(checksums(files), files, strict=True)
    return "".join(f"{summed} {file.stat().st_size} {file.relative_to(folder)}\n" for summed, file in lines)


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
    if not files[0].checksum:
        log.warning("%s is of an earlier version and has no checksums: it is not verified", folder)
        return ""
    now = checksums([folder / file.path for file in files])
    wrong = [file.path for file, summed in zip(files, now, strict=True) if file.checksum != summed]
    return f"{wrong[0]} is corrupt: its checksum does not match" if wrong else ""


def _parse(data: bytes) -> list[_File]:
    """The lines of COMPLETE; none where it is damaged."""
    text = data.decode(errors="replace")
    lines = text.partition("\n")[2] if text.startswith(_TITLE[:4]) else text
    found = [_LINE.fullmatch(line) for line in lines.removesuffix("\n").split("\n")]
    files = [_File(line[1] or "", int(line[2]), line[3]) for line in found if line]
    whole = text == with_checksum(lines) or not any(file.checksum for file in files)
    return files if whole and len(files) == len(found) else []


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
