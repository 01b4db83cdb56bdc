"""Files that become visible whole and durable or not at all, and files of JSON lines.

It must not know what they hold. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system that say that there is no room."""


NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a file system that gives a file no second name."""


class DiskFullError(OSError, ValueError):
    """No space for a file; nothing of it is visible, and nothing sealed before is lost."""


def publish(path: Path, data: bytes | memoryview, *, replace: bool = True) -> None:
    """Make ``data`` visible as ``path``, whole and durable, or not at all.

    Temporary file, fsync, rename, fsync of the folder. replace: whether ``path`` may exist; where it must
    not, FileExistsError is raised to all but one of any number of writers, on whatever hosts. Raises
    DiskFullError where there is no room (disk, quota or file size limit).
    """
    # Process numbers come twice on two hosts.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            _name_once(temporary, path)
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


def _name_once(temporary: Path, path: Path) -> None:
    """Give a file its lasting name. Raises FileExistsError where that is taken; rename would replace it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # else it was linked, and NFS repeated a request already served
            raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():  # the best that is left; that two writers meet here is up to run.owners
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)


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


def remove(path: Path) -> None:
    """Delete a folder with all in it, or a file; of a link the link alone, whatever it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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
