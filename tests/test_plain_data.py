"""The pickles of a checkpoint: every Python writes the same, and what is no data is refused by name."""

from __future__ import annotations

import os
import pickle
import pickletools
import shutil
import subprocess
import sys
from collections import OrderedDict
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba_hpc.learner import plain_pickle
from tba_hpc.learner.plain_data import only_data, require_readable, save
from tba_hpc.run.checkpoints import StateError

# --- Several Pythons ---

KINDS = """
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum

class Plain(Enum):
    ONE = "one"

class Number(IntEnum):
    TWO = 2

class Mixed(int, Enum):
    THREE = 3

class Flags(Flag):
    READ = 1
    WRITE = 2

@dataclass
class Address:
    numel: int
    start: int

class Scaler:
    def __init__(self):
        self.scale = 1.5

def state():
    return {
        "stages": [Plain.ONE, Number.TWO, Mixed.THREE, Flags.READ, Flags.READ | Flags.WRITE],
        "addresses": OrderedDict(weight=Address(4, 0), bias=Address(2, 4)),
        "scaler": Scaler(),
        "plain": (1, 2.5, None, True, "text", b"bytes", {3}, [10**30]),
    }
"""
"""All that a state may be made of, but for tensors: one kind of Enum is in DeepSpeed's."""

WRITE = """
import io, sys, kinds, plain_pickle
file = io.BytesIO()
plain_pickle.Pickler(file, protocol=2).dump(kinds.state())
sys.stdout.buffer.write(file.getvalue())
"""

READ = """
import pickle, sys, kinds
read, made = pickle.load(sys.stdin.buffer), kinds.state()
assert read["stages"] == made["stages"] and read["addresses"] == made["addresses"], read
assert read["plain"] == made["plain"] and vars(read["scaler"]) == vars(made["scaler"]), read
"""


def pythons() -> dict[str, str]:
    """Every supported Python that this machine has, a path by its version, the oldest first."""
    named = [f"python3.{minor}" for minor in (11, 12, 13)]
    folders = [*os.get_exec_path(), "/usr/bin", *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = {sys.version.split()[0]: sys.executable}
    for path in dict.fromkeys(filter(None, (shutil.which(n, path=f) for f in folders for n in named))):
        version = subprocess.run(
            [path, "-c", "import sys; print(sys.version.split()[0])"], capture_output=True
        )
        if version.returncode == 0:  # a shim of a version that is not there fails
            found.setdefault(version.stdout.decode().strip(), path)
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def test_every_python_writes_the_same_and_reads_it(tmp_path: Path) -> None:
    """Debian 12's own, 3.11.2, among them: it pickles a member of an Enum through getattr."""
    if len(interpreters := pythons()) < 2:
        pytest.skip("this machine has one Python: install another of 3.11 to 3.13, such as Debian's python3")
    shutil.copy(plain_pickle.__file__, tmp_path)
    (tmp_path / "kinds.py").write_text(KINDS)
    work = partial(subprocess.run, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    written = {version: work([path, "-c", WRITE]).stdout for version, path in interpreters.items()}
    (bytes_of_all,) = set(written.values())
    named = {arg for op, arg, _ in pickletools.genops(bytes_of_all) if op.name == "GLOBAL"}
    assert {name for name in named if not name.startswith("kinds ")} == {
        "collections OrderedDict",
        "_codecs encode",  # bytes, in protocol 2
        "__builtin__ set",
    }
    for path in interpreters.values():
        work([path, "-c", READ], input=bytes_of_all)


# --- What is read ---


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


@pytest.mark.parametrize("module", [plain_pickle, SimpleNamespace(__name__="old", Pickler=OldPickler)])
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
        save(state, file)
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
        save({"weight": whole}, str(tmp_path / "large.pt"))
    assert (tmp_path / "large.pt").stat().st_size > 1 << 36
    require_readable([tmp_path / "large.pt"], [])
