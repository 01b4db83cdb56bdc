"""Verifies and reads torch files that hold only tensors, plain values and instances of a few named classes.

torch's format is a pickle. Reading a file through this module never executes code that the file contains.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path
from pickle import UnpicklingError

import torch

from tba_hpc.run.checkpoints import StateError

ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable that makes torch.load read only data, whatever its arguments say."""


def require_readable(paths: Iterable[Path], classes: list[type]) -> None:
    """Read back files that were just written, without the values of their tensors.

    classes: as for ``only_data``. Raises StateError for anything that a resume would refuse; it reads the
    files with the same code.
    """
    for path in paths:
        try:
            with _only_data(classes):
                torch.load(path, map_location="meta")
        except (UnpicklingError, RuntimeError) as error:
            raise StateError(
                f"{path} was written, but a resume could not read it: it holds {_what(error)}; the "
                "previous checkpoint is kept: install the pinned versions (make install), then start the "
                "same run again"
            ) from None


@contextmanager
def only_data(folder: Path, classes: list[type]) -> Iterator[None]:
    """Make every torch.load within the block accept only data and instances of ``classes``.

    This includes calls by libraries. Raises StateError, which names the type, if a file holds anything else.
    folder: the checkpoint, for errors.
    """
    try:
        with _only_data(classes):
            yield
    except UnpicklingError as error:
        raise StateError(
            f"{folder} holds more than the data of a checkpoint, and none of it was executed "
            f"({_what(error)}): resume from another one"
        ) from None


@contextmanager
def _only_data(classes: list[type]) -> Iterator[None]:
    before = os.environ.get(ONLY_WEIGHTS)
    os.environ[ONLY_WEIGHTS] = "1"
    try:
        with torch.serialization.safe_globals([*classes, (_member, "builtins.getattr")]):
            yield
    finally:
        os.environ.pop(ONLY_WEIGHTS) if before is None else os.environ.update({ONLY_WEIGHTS: before})


def _member(owner: object, name: object) -> Enum:
    """Return a member of an Enum by its name, in place of the built-in getattr.

    Python 3.11.0 to 3.11.4 pickle a member as ``getattr(class, name)`` (CPython issue 105332). Raises
    UnpicklingError if ``owner`` is not an Enum class, or has no such member.
    """
    if isinstance(owner, EnumType) and name in owner.__members__:
        return owner.__members__[str(name)]
    raise UnpicklingError(f"GLOBAL getattr({owner!r}, {name!r})")


def _what(error: Exception) -> str:
    """Return the name of the type that torch refused, or torch's message if it has none."""
    text = " ".join(str(error).split())
    refused = re.search(r"GLOBAL (getattr\(.*?\)|\S+)", text)
    return refused[1] if refused else text.partition("WeightsUnpickler error: ")[2] or text
