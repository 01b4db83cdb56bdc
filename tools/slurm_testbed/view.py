"""Gives a node its own view of this machine: empty private folders, and within them this checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote

CLONE = Path(__file__).resolve().parents[2]


def code() -> list[Path]:
    """Return the folders of the checkout and its interpreter, also under the names of links to them."""
    named = [CLONE, Path(sys.prefix), Path(sys.base_prefix)]
    return _outermost([*named, *(path.resolve() for path in named)])


def closed(paths: Iterable[Path]) -> list[Path]:
    """Return the outermost parents of ``paths`` that other users may not enter, such as root's home."""
    ways = [[*reversed(path.parents)] for path in paths]
    first = [next((folder for folder in way if not folder.stat().st_mode & 0o001), None) for way in ways]
    return [folder for folder in first if folder]


def script(private: Iterable[Path], shared: Sequence[Path], read_only: Sequence[Path]) -> str:
    """Return shell commands that mount empty folders over ``private``, and show ``shared`` and ``read_only``.

    A path to show is opened before it is hidden, and mounted again by its descriptor.
    """
    seen = list(enumerate(sorted({*shared, *read_only}), 3))
    lines = [f"exec {number}<{quote(str(path))}" for number, path in seen]
    for folder in _outermost(private):
        mode = folder.stat().st_mode & 0o1777 | 0o755
        lines.append(f"mount -t tmpfs -o mode={mode:o} tmpfs {quote(str(folder))}")
    for number, path in seen:
        place = quote(str(path))
        lines += [f"mkdir -p {place}", f"mount --no-canonicalize --rbind /proc/self/fd/{number} {place}"]
        lines += [f"mount -o remount,bind,ro {place}"] if path in read_only else []
    lines += [f"exec {number}<&-" for number, _ in seen]
    return "umask 022\n" + "".join(f"{line} || exit 1\n" for line in lines)


def _outermost(paths: Iterable[Path]) -> list[Path]:
    unique = sorted({*paths})
    return [path for path in unique if not any(other in path.parents for other in unique)]
