"""Folder where engines and compilers cache code on a node. It is executed, so only its owner may write it."""

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
"""Environment variable that names the folder. In batch scripts libraries' variables name paths in it."""

DATA_ALONE: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Makes tarfile refuse devices and links out of the folder. Python 3.11.3 cannot; the archive is our own."""

ARCHIVE = "TBA_COMPILED"
"""Environment variable that names the run's archive of the folder. Nodes without the folder unpack it."""


def keep_caches_private(environment: MutableMapping[str, str]) -> None:
    """Make the folder of CACHES, or verify that it is ours; otherwise have the variables name a new folder.

    Its parent may be writable by everybody, and its name is known, so that somebody else may have made it.
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
    """Archive what this node has compiled, for the run's other nodes and restarts, unless one exists.

    vLLM's compiled models keep their place and name in the archive, as its documentation allows. Nothing is
    archived without a batch script, or if the engine has compiled nothing.
    """
    folder, archive = Path(environment.get(CACHES, "")), Path(environment.get(ARCHIVE, ""))
    if archive.exists() or not (folder / "VLLM_CACHE_ROOT/torch_compile_cache").is_dir():
        return
    descriptor, temporary = tempfile.mkstemp(dir=archive.parent)  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(folder, ".")
        Path(temporary).rename(archive)
    except OSError as error:  # a full disk, or a compiler at work has deleted files meanwhile
        log.warning("cannot keep what was compiled in %s: %s", archive, error)
        Path(temporary).unlink()


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive as ``folder`` if it is ours; atomically, as other ranks of the node start too."""
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
    """Make the folder if it is missing; return whether it is this user's and closed to all others."""
    with suppress(OSError):  # a folder of another node
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
