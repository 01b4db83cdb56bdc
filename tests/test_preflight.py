"""What installing asks of a machine first: one sentence for each lack, and the interpreter that is taken.

Machines of other kinds are played by programs of their names, first on PATH: the script asks nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools/preflight.sh"
TOOLS = (
    "awk",
    "cut",
    "df",
    "dirname",
    "getconf",
    "grep",
    "head",
    "paste",
    "sed",
    "sh",
    "sort",
    "tail",
    "uname",
)


class Machine:
    """A machine whose PATH is one folder, with a compiler and, unless it is taken away, this interpreter."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.path.mkdir()
        for name in TOOLS:
            (self.path / name).symlink_to(str(shutil.which(name)))
        self.has(gcc="", python3=f'exec {sys.executable} "$@"')

    def has(self, **programs: str) -> None:
        for name, text in programs.items():
            (self.path / name).unlink(missing_ok=True)
            (self.path / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.path / name).chmod(0o755)

    def has_python(self, name: str, version: str, *lacks: str) -> Path:
        """An interpreter of that version, without these modules or libraries."""
        major, minor, patch = version.split(".")
        python = self.path / name
        without = "".join(f"*{lack}*) exit 1;; " for lack in lacks if lack.startswith("lib"))
        module = next(
            (f"has no {lack} of Python {major}.{minor}" for lack in lacks if not lack.startswith("lib")), ""
        )
        wrong = module or ("" if major == "3" and 11 <= int(minor) <= 13 else f"is Python {version}")
        answer = f"echo '{wrong}' >&2; exit 1" if wrong else f"echo {major} {minor} {patch} {python}"
        self.has(**{name: f'case "$*" in {without}*"version_info["*) {answer};; esac'})
        return python

    def asks(self, *words: str | Path) -> tuple[str, list[str]]:
        """The interpreter that it takes, and its sentences."""
        environment = {"PATH": str(self.path), "HOME": os.environ.get("HOME", "/")}
        command = [shutil.which("sh") or "/bin/sh", str(SCRIPT), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert (done.returncode == 0) == (done.stderr == ""), done
        return done.stdout.strip(), done.stderr.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only(sentences: list[str]) -> str:
    (sentence,) = sentences
    return sentence


def test_the_newest_interpreter_that_can_make_an_environment_is_taken(machine: Machine) -> None:
    machine.has_python("python3", "3.11.2")
    newest = machine.has_python("python3.11", "3.11.7")
    machine.has_python("python3.12", "3.12.9", "ensurepip")
    machine.has(**{"python3.13": "echo 'pyenv: python3.13: command not found' >&2; exit 127"})
    assert machine.asks("python") == (str(newest), [])
    assert machine.asks("python", newest.with_name("python3"))[0].endswith("python3"), "PYTHON is obeyed"
    newest.unlink()
    assert machine.asks("python")[0].endswith("python3")


def test_this_interpreter_is_seen_as_what_it_is(machine: Machine) -> None:
    found, sentences = machine.asks("python")
    if sys.version_info[:2] in ((3, 11), (3, 12), (3, 13)):
        assert Path(found).resolve() == Path(sys.executable).resolve() and sentences == []
    else:
        assert f"is Python {sys.version.split()[0]}" in only(sentences)


@pytest.mark.parametrize("version", ["2.7.18", "3.10.13", "3.14.0"])
def test_an_interpreter_without_wheels_is_refused(machine: Machine, version: str) -> None:
    python = machine.has_python("python3", version)
    for words in (["python"], ["python", python]):
        found, sentences = machine.asks(*words)
        assert found == "" and f"{python} is Python {version}" in only(sentences)
        assert "apt-get install python3" in sentences[0] and "PYTHON=/path/to/" in sentences[0]


def test_without_any_interpreter_one_sentence_says_so(machine: Machine) -> None:
    (machine.path / "python3").unlink()
    _, sentences = machine.asks("cpu", machine.path / "venv")
    assert only(sentences).startswith("No suitable interpreter is on PATH: install Python 3.11, 3.12 or 3.13")
    assert "does not run" in only(machine.asks("python", "/nowhere/python3.11")[1])


def test_debians_python_without_venv_names_the_package(machine: Machine) -> None:
    machine.has_python("python3", "3.11.2", "ensurepip")
    assert only(machine.asks("cpu", "/nowhere")[1]).endswith(": apt-get install python3.11-venv")


def test_a_missing_libnuma_is_told_with_a_way_without_root(machine: Machine, tmp_path: Path) -> None:
    machine.has_python("python3", "3.11.2", "libnuma.so.1")
    sentence = only(machine.asks("cpu", tmp_path / "venv")[1])
    assert "needs libnuma.so.1" in sentence and "apt-get install libnuma1" in sentence
    assert "without root: apt-get download libnuma1 && dpkg -x" in sentence
    assert "libnuma" not in " ".join(machine.asks("gpu", tmp_path / "venv")[1])


@pytest.mark.parametrize(
    ("system", "processor", "target", "says"),
    [
        ("Darwin", "x86_64", "cpu", "This is Darwin"),
        ("Linux", "aarch64", "cpu", "TARGET=cpu are not pinned for a processor of type aarch64"),
        ("Linux", "riscv64", "gpu", "TARGET=gpu are not pinned for a processor of type riscv64"),
        ("Linux", "aarch64", "gpu", ""),
    ],
)
def test_another_system_or_processor(
    machine: Machine, tmp_path: Path, system: str, processor: str, target: str, says: str
) -> None:
    machine.has(uname=f"[ $1 = -s ] && echo {system} || echo {processor}")
    machine.has_python("python3", "3.12.3")
    sentences = machine.asks(target, tmp_path / "venv")[1]
    assert (says in only(sentences)) if says else sentences == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [("exit 1", "musl or another C library"), ("echo glibc 2.28", "glibc 2.28"), ("echo glibc 2.31", "")],
)
def test_another_c_library(machine: Machine, tmp_path: Path, answer: str, says: str) -> None:
    machine.has(getconf=answer)
    machine.has_python("python3", "3.12.3")
    sentences = machine.asks("cpu", tmp_path / "venv")[1]
    assert (f"this system has {says}:" in only(sentences)) if says else sentences == []


def test_too_little_space_for_a_new_environment(machine: Machine, tmp_path: Path) -> None:
    machine.has_python("python3", "3.12.3")
    machine.has(df=f"echo Filesystem; echo /dev/x 9 9 {3 * 2**20} 9% /")
    assert "takes about 4 GB and" in only(machine.asks("cpu", tmp_path / "a/b")[1])
    machine.has(df=f"echo Filesystem; echo /dev/x 9 9 {5 * 2**20} 9% /")
    assert machine.asks("cpu", tmp_path / "a/b")[1] == []
    assert "has 5 GB left" in only(machine.asks("gpu", tmp_path / "a/b")[1])


def test_kernels_of_a_gpu_need_a_compiler_and_pythons_headers(machine: Machine, tmp_path: Path) -> None:
    machine.has_python("python3", "3.12.3")
    machine.has(gcc="")
    assert machine.asks("gpu", tmp_path / "venv")[1] == []
    (machine.path / "gcc").unlink()
    assert "apt-get install gcc libc6-dev" in only(machine.asks("gpu", tmp_path / "venv")[1])
    assert machine.asks("cpu", tmp_path / "venv")[1] == [], "nothing is compiled for a CPU"
    machine.has(gcc="")
    script = (machine.path / "python3").read_text()
    machine.has(python3=script.replace('" in ', '" in *Python.h*) exit 1;; '))
    assert "compiled against Python.h" in only(machine.asks("gpu", tmp_path / "venv")[1])


def test_an_environment_that_is_there_brings_its_interpreter(machine: Machine, tmp_path: Path) -> None:
    """It needs no ensurepip, and no interpreter on PATH."""
    python = machine.has_python("python", "3.12.3")
    (machine.path / "python3").unlink()
    (machine.path / "pip").touch()
    assert machine.asks("cpu", tmp_path) == (str(python), [])
    machine.has_python("python", "3.9.2")
    assert "is Python 3.9.2" in only(machine.asks("cpu", tmp_path)[1])


def test_everything_that_lacks_is_told_at_once(machine: Machine, tmp_path: Path) -> None:
    machine.has_python("python3", "3.11.2", "libnuma.so.1")
    machine.has(uname="[ $1 = -s ] && echo Linux || echo ppc64le", getconf="exit 1")
    assert len(machine.asks("cpu", tmp_path / "venv")[1]) == 3
