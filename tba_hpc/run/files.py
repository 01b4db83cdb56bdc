"""Files that become visible whole and durable or not at all, and files of JSON lines."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

log = logging.getLogger(__name__)

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system that say that there is no room."""

AWAY = frozenset(
    {
        *(errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.EROFS),
    }
)
"""Errors of a file system whose server is away for a while, or that takes no writes until it is mended."""

AGAIN_SECONDS = 0.5
"""Pause before a retry."""

Result = TypeVar("Result")


class DiskFullError(OSError, ValueError):
    """No space for a file; nothing of it is visible, and nothing sealed before is lost."""


def is_for_room(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that there is no room."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def refused_file(error: OSError) -> str:
    """Say in a sentence which file has no room, or is not the user's; empty for other errors, or no file."""
    name, reason = error.filename2 or error.filename, error.strerror
    if name and error.errno in FULL_DISK:
        return f"{name} cannot be written ({reason}): free space, or raise the quota or the limit (ulimit -f)"
    if name and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{name} is not to be used here ({reason}): ask its owner for the right to, or name another place"
        )
    return ""


def publish(path: Path, *pieces: bytes | memoryview, replace: bool = True) -> None:
    """Make ``pieces`` visible as ``path``, whole and durable, or not at all.

    Temporary file, fsync, rename, fsync of the folder. replace: whether ``path`` may exist; if it must not,
    FileExistsError is raised to all but one of any number of writers, on whatever hosts. Raises DiskFullError
    if there is no room (disk, quota or file size limit).
    """
    # Process numbers come twice on two hosts.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
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
            f"cannot write {path} ({sum(map(len, pieces))} bytes): {os.strerror(error.errno)}; free space or "
            "raise the quota, then start the same run again: nothing sealed before is lost"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _name_once(temporary: Path, path: Path) -> None:
    """Give a file its lasting name. Raises FileExistsError if that is taken; rename would replace it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # else it was linked, and NFS repeated a request already served
            raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are missing; their names are durable then."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def listing(folder: Path) -> list[str]:
    """Names of what a folder holds, in any order; a tenth of the time that ``Path.glob`` takes."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def passes(error: OSError) -> bool:
    """Whether a retry may succeed: the disk is full, or its server away."""
    return isinstance(error, DiskFullError) or error.errno in AWAY | FULL_DISK


def insist(do: Callable[[], Result], *, seconds: float) -> Result:
    """``do()``, retried for ``seconds`` while the disk is full or its server away. Raises its last error."""
    give_up = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return do()
        except OSError as error:
            if not passes(error) or time.monotonic() >= give_up:
                raise
            if not warned:
                log.warning("%s; retried for %g s", error, seconds)
            warned = True
        time.sleep(AGAIN_SECONDS)


def unless_away(do: Callable[[], Result], *, otherwise: Result) -> Result:
    """``do()``, or ``otherwise`` if the disk is full or its server away just now."""
    try:
        return do()
    except OSError as error:
        if not passes(error):
            raise
        return otherwise


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


def require_regular(path: Path) -> None:
    """Raise ConfigError for a folder, a pipe or a device: to open it may fail, or never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        from tba_hpc.config import (
            ConfigError,  # batch scripts import this module often, and do without configs
        )

        raise ConfigError(f"{path} is no regular file: whoever made it, remove it")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises ConfigError for a folder, a pipe or a device."""
    require_regular(path)
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """The bytes of a file. Raises ConfigError for a folder, a pipe or a device."""
    with open_regular(path) as file:
        return file.read()


def parse_json_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a file with one a line, in order; a line torn by a crash is left out."""
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
