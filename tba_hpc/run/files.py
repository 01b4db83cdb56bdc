"""Files that become visible whole and durable or not at all, and files of JSON lines.

It must not know what they hold. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system that say that there is no room."""


class DiskFullError(OSError, ValueError):
    """No space for a file; nothing of it is visible, and nothing sealed before is lost."""


def publish(path: Path, data: bytes | memoryview) -> None:
    """Make ``data`` visible as ``path``, whole and durable, or not at all.

    Temporary file, fsync, rename, fsync of the folder. Raises DiskFullError where there is no room
    (disk, quota or file size limit).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DiskFullError(
            f"cannot write {path} ({len(data)} bytes): {os.strerror(error.errno)}; free space or raise the "
            "quota, then start the same run again: nothing sealed before is lost"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """``publish`` for text."""
    publish(path, text.encode())


def fsync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Flush everything in ``folder`` to the disk."""
    for path in folder.rglob("*"):
        fsync(path)


def parse_json_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a file with one a line, in order; a line torn by a crash is left out."""
    return [found for line in data.splitlines() if (found := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
