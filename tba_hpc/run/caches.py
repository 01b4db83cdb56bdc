"""Where engines and compilers keep what they make on a node: code that is run, so it must be ours alone."""

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
    """Make the folder of CACHES, or see that it is ours; else lead all that leads there into a new one.

    Its name is the same on every node and may be read in a folder that is everybody's: somebody else may have
    made it on this node before.
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
    """Whether the folder, made here and now if there was none, is this user's, who alone may enter it."""
    with suppress(OSError):  # a folder of another node
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
