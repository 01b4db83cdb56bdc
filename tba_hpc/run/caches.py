"""Where engines and compilers cache code on a node: it is run, so nobody else may write it."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

CACHES = "TBA_CACHES"
"""The variable that names the folder, set by batch scripts; the libraries' own variables lead into it."""


def keep_caches_private(environment: MutableMapping[str, str]) -> None:
    """Make the folder of CACHES, or verify that it is ours; else point all that points there to a new one.

    Its parent may be writable by everybody, and its name is known: somebody else may have made it.
    """
    folder = environment.get(CACHES)
    if not folder or _is_ours(Path(folder)):
        return
    fresh = tempfile.mkdtemp(prefix="tba-")
    log.warning("%s is not ours alone, or not to be had: caches are in %s instead", folder, fresh)
    for name, value in environment.items():
        if value == folder or value.startswith(f"{folder}/"):
            environment[name] = fresh + value.removeprefix(folder)


def _is_ours(folder: Path) -> bool:
    """Whether the folder, which is made if there is none, is this user's, and nobody else's to enter."""
    with suppress(OSError):  # a folder of another node
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
