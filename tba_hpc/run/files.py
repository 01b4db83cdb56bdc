"""Writes files atomically and durably, retries while a disk is full or unreachable, and parses JSON lines."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

log = logging.getLogger(__name__)

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that a disk or quota is full, or that a file would exceed its size limit."""

UNAVAILABLE = frozenset(
    {
        *(errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.EROFS),
    }
)
"""Error numbers of a file system whose server does not answer, or that is read-only until it is repaired."""

FULL_BYTES = 1 << 20
"""Free space below which a disk counts as full, in bytes."""

DISK_RETRY_SECONDS = 0.5
"""Pause before a retry, in seconds."""

Result = TypeVar("Result")


class DiskFullError(OSError, ValueError):
    """Error for a file that cannot be written for lack of space. No part of it is left under its name."""


def is_full(folder: Path) -> bool:
    """Return whether a folder's file system is full; False if it reports a size of 0, which means unknown."""
    disk = shutil.disk_usage(folder)
    return disk.free < FULL_BYTES and disk.total > 0


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one in its chain of causes, means that a disk or quota is full."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def refused_file(error: OSError) -> str:
    """Return a sentence for the user if an error means a lack of space or permission; "" for other errors."""
    name, reason = error.filename2 or error.filename, error.strerror
    if name and error.errno in FULL_DISK:
        return f"{name} cannot be written ({reason}): free space, or raise the quota or the limit (ulimit -f)"
    if name and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{name} cannot be used ({reason}): ask its owner for permission, or name another place"
    return ""


def publish(path: Path, *pieces: bytes | memoryview, replace: bool = True) -> None:
    """Write ``pieces``, one after another, to ``path``: whole and durable, or not at all.

    Writes a temporary file beside it, calls fsync, renames the file, and calls fsync on the folder.

    replace: whether ``path`` may exist. If False, exactly one of any number of writers succeeds, on whatever
    hosts they are, and the others get FileExistsError. Raises DiskFullError if there is no space.
    """
    # The random part is needed because two hosts may use the same process number.
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
    """Link ``temporary`` to ``path``. Unlike a rename, this raises FileExistsError if ``path`` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # if 2, the link was made, but NFS sent the request twice
            raise


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that durably replaces ``folder`` when the block ends without an error.

    ``folder`` is missing for a moment, between two renames. Leftovers of killed processes are deleted first.
    On NFS this may fail while a file in them is open, so each temporary folder has a unique name.
    """
    for left in folder.parent.glob(f".{folder.name}.*tmp"):
        shutil.rmtree(left, ignore_errors=True)
    unique = secrets.token_hex(4)
    temporary = folder.with_name(f".{folder.name}.{unique}.tmp")
    old = folder.with_name(f".{folder.name}.{unique}.old.tmp")
    temporary.mkdir(parents=True)
    yield temporary
    make_durable(temporary)
    fsync(temporary)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def listing(folder: Path) -> list[str]:
    """List the names in a folder, in any order. This is about ten times as fast as ``Path.glob``."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def is_temporary(error: OSError) -> bool:
    """Return whether a retry may succeed, because the disk is full or its server does not answer."""
    return isinstance(error, DiskFullError) or error.errno in UNAVAILABLE | FULL_DISK


def retry(do: Callable[[], Result], *, seconds: float) -> Result:
    """Call ``do`` for up to ``seconds`` until it raises no temporary error, and return its result.

    An error is temporary if the disk is full or its server does not answer. Raises the last error.
    """
    give_up = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return do()
        except OSError as error:
            if not is_temporary(error) or time.monotonic() >= give_up:
                raise
            if not warned:
                log.warning("%s; trying again for up to %g s", error, seconds)
            warned = True
        time.sleep(DISK_RETRY_SECONDS)


def if_available(do: Callable[[], Result], *, otherwise: Result) -> Result:
    """Return ``do()``, or ``otherwise`` if the disk is full or its server does not answer at the moment."""
    try:
        return do()
    except OSError as error:
        if not is_temporary(error):
            raise
        return otherwise


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole and durable, or leave the old file unchanged; see ``publish``."""
    publish(path, text.encode())


def fsync(path: Path) -> None:
    """Make the content of a file, or the list of names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents. Of a link only the link is deleted, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_durable(folder: Path) -> None:
    """Call fsync on everything inside ``folder``, at any depth, but not on ``folder`` itself."""
    for path in folder.rglob("*"):
        fsync(path)


def require_regular(path: Path) -> None:
    """Raise ConfigError for a folder, a pipe or a device, because opening one may fail or never return."""
    if not stat.S_ISREG(path.stat().st_mode):
        from tba_hpc.config import ConfigError  # slow to import, and batch scripts call this module often

        raise ConfigError(f"{path} is not a regular file but a folder, pipe or device: remove it")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading its bytes. Raises ConfigError for a folder, a pipe or a device."""
    require_regular(path)
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """Read the bytes of a file. Raises ConfigError for a folder, a pipe or a device."""
    with open_regular(path) as file:
        return file.read()


def parse_json_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse the bytes of a file with one JSON object per line. A line that a crash cut short is left out."""
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
