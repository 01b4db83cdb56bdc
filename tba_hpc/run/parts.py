"""Files of lines that go on in a new one at some size: the finished parts are compressed, and read as one.

It must not know what the lines say. Parts of ``trainer.jsonl`` are ``trainer.jsonl.000000`` …, with ``.gz``
once they are compressed; the one that is written has the name itself.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO, cast

from tba_hpc.run.files import fsync

log = logging.getLogger(__name__)

COMPRESSING = threading.Lock()
"""Held by the thread that compresses: two at one part would write to one temporary file."""

LEVEL = 3
"""Of gzip: lines of metrics become a seventh of their size or less."""


def finished_part(path: Path, number: int) -> Path:
    """Where a finished part lies until it is compressed."""
    return path.with_name(f"{path.name}.{number:06d}")


def _compressed(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}.gz")


def is_finished(path: Path, number: int) -> bool:
    """Whether nothing comes to a part any more."""
    # In this order, as the first goes once the second is there.
    return finished_part(path, number).exists() or _compressed(path, number).exists()


def finished_parts(path: Path) -> int:
    """How many are finished: the number of the one that is written, or comes next."""
    number = 0
    while is_finished(path, number):
        number += 1
    return number


def open_part(path: Path, number: int) -> tuple[BinaryIO, bool] | None:
    """A part for reading, and whether it is finished; None where there is none yet."""
    while True:
        if file := _open(finished_part(path, number)) or _open(_compressed(path, number)):
            return file, True
        file = _open(path)
        if not is_finished(path, number):  # else it was finished just now, and the file is the next one
            return (file, False) if file else None
        if file:
            file.close()


def _open(path: Path) -> BinaryIO | None:
    """A file for reading, if it is there."""
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except FileNotFoundError:
        return None


def finish_part(path: Path, number: int) -> None:
    """Finish the part that is written, which is durable; there is none of its name then."""
    path.rename(finished_part(path, number))
    fsync(path.parent)


def compress_parts(path: Path) -> None:
    """Compress the finished parts that are not; what the disk has no room for stays as it is.

    Threads of this process take turns; no other process writes the files of a rank while one does.
    """
    with COMPRESSING:
        for number in range(finished_parts(path)):
            if finished_part(path, number).exists():
                _compress(path, number)


def _compress(path: Path, number: int) -> None:
    part = finished_part(path, number)
    temporary = path.with_name(f".{part.name}.gz.tmp")
    try:
        with part.open("rb") as lines, temporary.open("wb") as file:
            with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as packed:
                shutil.copyfileobj(lines, packed, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(_compressed(path, number))
        fsync(path.parent)
        part.unlink()
    except OSError as error:
        temporary.unlink(missing_ok=True)
        log.warning("%s is not compressed: %s", part, error)
