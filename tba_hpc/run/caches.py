"""The folder of a node where engines and compilers keep compiled code, and its archive in the run.

Whoever can write compiled code can run programs as this user, so the folder must be closed to all others.
"""

from __future__ import annotations

import logging
import os
import stat
import tarfile
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

CACHES = "TBA_CACHES"
"""Environment variable that names the folder of compiled code. Batch scripts set it, and point
VLLM_CACHE_ROOT, TRITON_CACHE_DIR and similar variables to folders inside that folder."""

DATA_ALONE: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Arguments that make ``extractall`` refuse device files and links that lead out of the folder.

Python 3.11.3 and older lack this filter. Archives are safe without it, since only this user wrote them.
"""

ARCHIVE = "TBA_COMPILED"
"""Environment variable that names the archive, a tar file in the run directory.

The archive holds what one node has compiled, for the run's other nodes and for restarts.
"""


def keep_caches_private(environment: MutableMapping[str, str]) -> None:
    """Make the folder that CACHES names, from the archive if there is one.

    If the folder cannot be made, or exists and is not this user's alone, a new temporary folder is used, and
    all variables of ``environment`` with paths in the old one are changed. Another user may have made the old
    one, because its name can be guessed and its parent, such as /tmp, may be open to all.
    """
    folder = environment.get(CACHES)
    if folder and (archive := environment.get(ARCHIVE)):
        _unpack(Path(archive), Path(folder))
    if not folder or _is_ours(Path(folder)):
        return
    fresh = tempfile.mkdtemp(prefix="tba-")
    log.warning("%s cannot be made, or is open to other users: caches are in %s instead", folder, fresh)
    for name, value in environment.items():
        if value == folder or value.startswith(f"{folder}/"):
            environment[name] = fresh + value.removeprefix(folder)


def pack_caches(environment: Mapping[str, str]) -> None:
    """Write the archive of what this node has compiled, for other nodes of the run and for restarts.

    Does nothing if ``environment`` lacks CACHES or ARCHIVE, because no batch script has set them; if the
    archive exists already; or if vLLM has compiled nothing. vLLM's documentation allows copying compiled
    models if their paths stay the same.
    """
    folder, archive = Path(environment.get(CACHES, "")), Path(environment.get(ARCHIVE, ""))
    if archive.exists() or not (folder / "VLLM_CACHE_ROOT/torch_compile_cache").is_dir():
        return
    descriptor, temporary = tempfile.mkstemp(dir=archive.parent)  # readable by this user alone
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(folder, ".")
        Path(temporary).rename(archive)
    except OSError as error:  # the disk is full, or a compiler has just deleted one of the files
        log.warning("cannot write the archive of compiled code %s: %s", archive, error)
        Path(temporary).unlink()


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive as ``folder``, unless that exists or another user may have written the archive.

    The folder appears only when it is complete, because other ranks of the node may unpack at the same time.
    """
    if folder.exists() or not _is_written_by_us_alone(archive):
        return
    with suppress(OSError, tarfile.TarError):  # another rank was faster, or there is no space
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tba-", dir=folder.parent) as fresh:
            whole = Path(fresh, "all")
            whole.mkdir(mode=0o700)
            with tarfile.open(archive) as tar:
                tar.extractall(whole, **DATA_ALONE)
            whole.rename(folder)


def _is_written_by_us_alone(file: Path) -> bool:
    with suppress(OSError):
        found = file.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return False


def _is_ours(folder: Path) -> bool:
    """Make the folder if it is missing, and return whether it is this user's and closed to all others."""
    with suppress(OSError):  # its parent does not exist on this node and cannot be made
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
