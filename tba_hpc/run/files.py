"""Atomic, durable writes of files, retries while a disk is full or away, and files of JSON lines."""

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
"""Error numbers that mean that a disk or quota is full."""

UNAVAILABLE = frozenset(
    {
        *(errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.EROFS),
    }
)
"""Error numbers of a file system whose server is away for a while, or that is read-only until repaired."""

DISK_RETRY_SECONDS = 0.5
"""Pause before a retry, in seconds."""

Result = TypeVar("Result")


class DiskFullError(OSError, ValueError):
    """Error for a file without space. Nothing of it is visible, and nothing sealed before is lost."""


def is_for_room(error: BaseException | None) -> bool:
    """Return whether an error, or one in its chain of causes, means that there is no room."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def refused_file(error: OSError) -> str:
    """Return a sentence about a file without disk space or permission; empty for other errors."""
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

    Writes a temporary file, calls fsync, renames it and calls fsync on the folder. replace: whether ``path``
    may exist. If it must not, exactly one of any number of writers on any hosts succeeds; the others get
    FileExistsError. Raises DiskFullError if there is no room (disk, quota or file size limit).
    """
    # Two hosts may use the same process number.
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
    """Link a file to its final name. Raises FileExistsError if that is taken; a rename would replace it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # otherwise the link succeeded, and NFS repeated the request
            raise


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and make their names durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def listing(folder: Path) -> list[str]:
    """List the names in a folder, in any order. Takes a tenth of the time of ``Path.glob``."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def is_temporary(error: OSError) -> bool:
    """Return whether a retry may succeed, because the disk is full or its server is away."""
    return isinstance(error, DiskFullError) or error.errno in UNAVAILABLE | FULL_DISK


def retry(do: Callable[[], Result], *, seconds: float) -> Result:
    """Call ``do``; retry for ``seconds`` while the disk is full or its server away. Raises the last error."""
    give_up = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return do()
        except OSError as error:
            if not is_temporary(error) or time.monotonic() >= give_up:
                raise
            if not warned:
                log.warning("%s; retried for %g s", error, seconds)
            warned = True
        time.sleep(DISK_RETRY_SECONDS)


def if_available(do: Callable[[], Result], *, otherwise: Result) -> Result:
    """Return ``do()``, or ``otherwise`` if the disk is full or its server is unreachable at the moment."""
    try:
        return do()
    except OSError as error:
        if not is_temporary(error):
            raise
        return otherwise


def write_atomic(path: Path, text: str) -> None:
    """Publish ``text`` as ``path``, see ``publish``."""
    publish(path, text.encode())


def fsync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents. A link is deleted itself, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_durable(folder: Path) -> None:
    """Flush everything in ``folder`` to the disk."""
    for path in folder.rglob("*"):
        fsync(path)


def require_regular(path: Path) -> None:
    """Raise ConfigError for a folder, a pipe or a device: opening one may fail or never return."""
    if not stat.S_ISREG(path.stat().st_mode):
        from tba_hpc.config import (
            ConfigError,  # imported late: batch scripts use this module and need no config
        )

        raise ConfigError(f"{path} is no regular file: whoever made it, remove it")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises ConfigError for a folder, a pipe or a device."""
    require_regular(path)
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """Read the bytes of a file. Raises ConfigError for a folder, a pipe or a device."""
    with open_regular(path) as file:
        return file.read()


def parse_json_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse a file with one JSON object per line, in order. A line torn by a crash is left out."""
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
