"""The pickles of a checkpoint: those of every Python are read, and what is no data is refused by name."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba_hpc.learner.plain_data import only_data, require_readable
from tba_hpc.run.checkpoints import StateError


class Stage(IntEnum):
    GRADIENTS = 2


class Scaler:
    scale = 1.0

    def run(self) -> None: ...


class OldPickler(pickle.Pickler):
    """Writes an Enum as Python 3.11.0 to 3.11.4 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Call:
    """What a stranger's file has a reader do."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


STATE = {"stage": Stage.GRADIENTS, "of": OrderedDict(weight=torch.arange(6.0)), "scaler": Scaler()}


@pytest.mark.parametrize("module", [pickle, SimpleNamespace(__name__="old", Pickler=OldPickler)])
def test_a_checkpoint_of_an_old_python_is_read_as_others_are(tmp_path: Path, module: object) -> None:
    torch.save(STATE, tmp_path / "state.pt", pickle_module=module)
    with only_data(tmp_path, [Stage, Scaler]):
        read = torch.load(tmp_path / "state.pt", weights_only=False)  # as a library asks
    assert read["stage"] is Stage.GRADIENTS and torch.equal(read["of"]["weight"], torch.arange(6.0))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Call(getattr, Scaler, "run"), r"getattr\(<class .*Scaler'>, 'run'\)"),
        (Call(getattr, Stage, "__class__"), r"getattr\(<enum 'Stage'>, '__class__'\)"),
        (Call(getattr, Stage, "mro"), r"getattr\(<enum 'Stage'>, 'mro'\)"),
        (Call(getattr, "{}", "format"), r"getattr\('\{\}', 'format'\)"),
        (Call(eval, "1"), r"eval"),
        (Call(os.system, "true"), r"(posix|nt)\.system"),
        (Path("file"), r"pathlib\.\w+"),
    ],
)
def test_what_is_no_data_is_refused_by_name_and_not_executed(
    tmp_path: Path, call: object, named: str
) -> None:
    torch.save({**STATE, "more": call}, tmp_path / "state.pt")
    refused = rf"more than the data of a checkpoint, and none of it was executed \({named}\): resume from"
    with pytest.raises(StateError, match=refused), only_data(tmp_path, [Stage, Scaler]):
        torch.load(tmp_path / "state.pt", weights_only=False)


def test_what_a_resume_would_refuse_is_refused_when_it_is_written(tmp_path: Path) -> None:
    files = [tmp_path / "good.pt", tmp_path / "bad.pt"]
    for file, state in zip(files, [STATE, {**STATE, "more": Path("file")}], strict=True):
        torch.save(state, file)
    require_readable(files[:1], [Stage, Scaler])
    with pytest.raises(
        StateError, match=r"bad.pt was written, but a resume could not .* holds pathlib\.\w+;"
    ):
        require_readable(files, [Stage, Scaler])
    with pytest.raises(
        StateError, match=r"good.pt was written, but .* holds test_plain_data.Stage; the previous"
    ):
        require_readable(files, [Scaler])
    files[0].write_bytes(files[0].read_bytes()[:-30])
    with pytest.raises(StateError, match=r"good.pt was written, but .*zip"):
        require_readable(files, [Stage, Scaler])


def test_reading_back_reads_no_tensor(tmp_path: Path) -> None:
    """A file of 64 GB, a hole but for its end, is read back at once and takes no memory."""
    whole = torch.from_file(str(tmp_path / "hole"), shared=True, size=1 << 34)
    with torch.serialization.skip_data():
        torch.save({"weight": whole}, str(tmp_path / "large.pt"))
    assert (tmp_path / "large.pt").stat().st_size > 1 << 36
    require_readable([tmp_path / "large.pt"], [])
