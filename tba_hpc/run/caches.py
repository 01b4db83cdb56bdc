"""Where engines and compilers cache code on a node: it is run, so nobody else may write it."""

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
"""The variable that names the folder, set by batch scripts; the libraries' own variables lead into it."""

DATA_ALONE: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""No links out of the folder, no devices. Python 3.11.0 to 3.11.3 cannot be told so; the archive is ours."""

ARCHIVE = "TBA_COMPILED"
"""The variable that names the run's archive of such a folder, with which nodes begin that have none."""


def keep_caches_private(environment: MutableMapping[str, str]) -> None:
    """Make the folder of CACHES, or verify that it is ours; else point all that points there to a new one.

    Its parent may be writable by everybody, and its name is known: somebody else may have made it.
    """
    folder = environment.get(CACHES)
    if folder and (archive := environment.get(ARCHIVE)):
        _unpack(Path(archive), Path(folder))
    if not folder or _is_ours(Path(folder)):
        return
    fresh = tempfile.mkdtemp(prefix="tba-")
    log.warning("%s is not ours alone, or not to be had: caches are in %s instead", folder, fresh)
    for name, value in environment.items():
        if value == folder or value.startswith(f"{folder}/"):
            environment[name] = fresh + value.removeprefix(folder)


def pack_caches(environment: Mapping[str, str]) -> None:
    """Archive what this node has compiled, for the run's other nodes and restarts; whoever is first does it.

    vLLM's compiled models keep their place and name in it, as its documentation allows. Nothing is archived
    without a batch script, or by an engine that compiles nothing.
    """
    folder, archive = Path(environment.get(CACHES, "")), Path(environment.get(ARCHIVE, ""))
    if archive.exists() or not (folder / "VLLM_CACHE_ROOT/torch_compile_cache").is_dir():
        return
    descriptor, temporary = tempfile.mkstemp(dir=archive.parent)  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(folder, ".")
        Path(temporary).rename(archive)
    except OSError as error:  # a full disk, or files of a compiler at work that are gone again
        log.warning("cannot keep what was compiled in %s: %s", archive, error)
        Path(temporary).unlink()


def _unpack(archive: Path, folder: Path) -> None:
    """Make the folder from the archive if that is ours; all at once, as other ranks of the node start too."""
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
    """Whether the folder, which is made if there is none, is this user's, and nobody else's to enter."""
    with suppress(OSError):  # a folder of another node
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
