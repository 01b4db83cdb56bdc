"""What make installs: the Makefile runs over an environment whose pip only notes what it is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LOCK = [line.partition("  #")[0] for line in (REPOSITORY / "tools/requirements-cpu.lock").open()]
PIP = f"""#!{sys.executable}
import json, os, sys
pins = sys.stdin.read().splitlines() if "/dev/stdin" in sys.argv else []
with open(__file__ + ".asked", "a") as file:
    print(json.dumps({{"words": sys.argv[1:-3], "pins": pins}}), file=file)  # the last are progress.py's
elsewhere = os.environ.get("TORCH_IS_ELSEWHERE") and "--index-url" not in sys.argv
sys.exit(bool(elsewhere and any(pin.startswith("torch==") for pin in pins)))
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@dataclass(frozen=True)
class Asked:
    """A call of pip: its words, and the lines that it read."""

    words: list[str]
    pins: list[str]


class Environment:
    """An environment that is there already, in which a CUDA build of torch lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torch = folder / "lib/python3.11/site-packages/torch/version.py"
        self.torch.parent.mkdir(parents=True)
        self.torch.write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
        programs = {"pip": PIP, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
        for name, text in programs.items():
            put_program(folder / "bin" / name, text)

    def make(self, *words: str, source: Path = REPOSITORY, status: int = 0, **variables: str) -> list[Asked]:
        """What pip is asked for by ``make VENV=… WORDS``, which must end with that status."""
        noted = self.folder / "bin/pip.asked"
        noted.unlink(missing_ok=True)
        command = ["make", "--directory", str(source), f"VENV={self.folder}", *words]
        inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "TARGET", "PYTHON")}
        done = subprocess.run(command, capture_output=True, text=True, env=inherited | variables, timeout=60)
        assert done.returncode == status, done
        self.said = done.stdout + done.stderr
        return [Asked(**json.loads(line)) for line in noted.open()] if noted.exists() else []

    @property
    def installed(self) -> str:
        """Which of the two stacks is noted as installed."""
        (stamp,) = self.folder.glob("installed-*")
        return stamp.name.removeprefix("installed-")


def put_program(path: Path, text: str) -> str:
    """Write a program; returns its folder, to be put first on PATH."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


@pytest.fixture
def machines(tmp_path: Path) -> tuple[str, str]:
    """PATH of a machine with a GPU, and of a login node, whose nvidia-smi finds none."""
    answers = {
        "gpu": "echo 'GPU 0: NVIDIA A100 (UUID: GPU-0)'",
        "login": "echo 'No devices were found'; exit 6",
    }
    with_gpu, login = (
        put_program(tmp_path / name / "nvidia-smi", f"#!/bin/sh\n{text}\n") for name, text in answers.items()
    )
    return with_gpu, login


def test_the_target_that_is_named_counts_more_than_the_machine(
    environment: Environment, machines: tuple[str, str]
) -> None:
    with_gpu, login = machines
    for words, path, target in (
        ([], with_gpu, "gpu"),
        (["TARGET=cpu"], with_gpu, "cpu"),
        (["TARGET=gpu"], login, "gpu"),
    ):
        environment.make("install", "CHECKS=", *words, PATH=path)
        assert environment.installed == target
        (environment.folder / f"installed-{target}").unlink()
    assert environment.make("install", "TARGET=rocm", status=2) == []
    assert "TARGET=rocm is neither cpu nor gpu" in environment.said


def test_what_is_installed_stays_and_what_tests_need_is_added(
    environment: Environment, machines: tuple[str, str]
) -> None:
    """Although this machine has no GPU, as the login nodes of clusters."""
    environment.make("install", "CHECKS=", "TARGET=gpu")
    goal = f"{environment.folder}/with-test"
    (added,) = environment.make(goal, "CHECKS=", PATH=machines[1])
    assert environment.installed == "gpu" and any(pin.startswith("pytest==") for pin in added.pins)
    assert environment.make(goal, "CHECKS=", PATH=machines[1]) == []


def test_the_cpu_stack_is_the_lock_to_the_digest(environment: Environment) -> None:
    torch, rest, package = environment.make("install", "CHECKS=", "TARGET=cpu")
    pins = [pin.partition("  #")[0] for pin in torch.pins + rest.pins]
    assert sorted(pins) == sorted(map(str.strip, LOCK)) and torch.pins[0].startswith("torch==2")
    assert all({"--no-deps", "--require-hashes"} <= {*asked.words} for asked in (torch, rest))
    assert package.words[-2:] == ["--editable", "."] and "--no-deps" in package.words


@pytest.mark.parametrize("how", ["HASHES=", "WHEELHOUSE=/site/wheels"])
def test_wheels_that_a_site_has_built_are_taken_without_digests(environment: Environment, how: str) -> None:
    for asked in environment.make("install", "CHECKS=", "TARGET=cpu", how):
        assert "--require-hashes" not in asked.words and "--hash" not in "".join(asked.pins)
        offline = ["--no-index", "--find-links", "/site/wheels"]
        assert (asked.words[1:4] == offline) == how.startswith("WHEELHOUSE")


def test_torch_comes_from_its_own_index_if_need_be_or_as_it_is_named(environment: Environment) -> None:
    words = ("install", "CHECKS=", "TARGET=cpu")
    refused, torch, *_ = environment.make(*words, TORCH_IS_ELSEWHERE="yes")
    assert torch.pins == refused.pins and "https://download.pytorch.org/whl/cpu" in torch.words
    (environment.folder / "installed-cpu").unlink()
    named, rest, _ = environment.make(*words, "TORCH=torch==2.13.0", TORCH_IS_ELSEWHERE="yes")
    assert named.words[-1] == "torch==2.13.0" and "--constraint" in named.words
    assert not any(pin.startswith("torch==") for pin in named.pins + rest.pins)


def test_the_gpu_stack_has_the_versions_of_the_lock_but_for_torch_and_vllm(environment: Environment) -> None:
    (asked,) = environment.make("install", "CHECKS=", "TARGET=gpu")
    constraints = environment.folder / "constraints.txt"
    assert asked.words[-4:] == ["--constraint", str(constraints), "--editable", ".[gpu,wandb]"]
    pins = constraints.read_text().splitlines()
    assert "torch!=2.13.0+cpu" in pins and "--hash" not in "".join(pins) and len(pins) > 150
    assert not any(pin.startswith(("vllm", "torch==", "intel")) for pin in pins)


def test_torch_for_cpus_is_refused_where_gpus_are_meant(environment: Environment) -> None:
    environment.torch.write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    environment.make("install", "CHECKS=", "TARGET=gpu", status=2)
    assert "is a build for CPUs" in environment.said
    assert not [*environment.folder.glob("installed-*")]


def test_a_machine_that_lacks_something_is_told_before_anything_is_downloaded(
    environment: Environment, tmp_path: Path
) -> None:
    path = put_program(tmp_path / "other/uname", "#!/bin/sh\necho Darwin\n")
    assert environment.make("install", "TARGET=cpu", status=2, PATH=path) == []
    assert "This is Darwin" in environment.said


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_wheelhouse_is_filled_without_an_environment(tmp_path: Path, target: str) -> None:
    """Only the commands are looked at: wheels come from a network."""
    words = ["make", "--dry-run", "wheelhouse", f"TARGET={target}", f"VENV={tmp_path}"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    filling = [line for line in done.stdout.splitlines() if "pip wheel" in line]
    assert done.returncode == 0 and len(filling) >= 2
    assert all(f" -m pip wheel --wheel-dir wheelhouse-{target} " in line for line in filling)


# --- What is shown while pip works ---


def progress(*words: str, pins: str = "") -> subprocess.CompletedProcess[str]:
    """The whole program, over something that is no pip."""
    command = [sys.executable, str(REPOSITORY / "tools/progress.py"), *words]
    return subprocess.run(command, input=pins, capture_output=True, text=True, timeout=60)


def test_pip_is_silent_unless_it_fails() -> None:
    told = "echo WARNING: a folder; cat; echo ERROR: No matching distribution; echo more"
    done = progress("sh", "-c", told + "; exit 3", "--requirement", "/dev/stdin", pins="mypy==1\n")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "ERROR: No matching distribution\nmore\n"
    done = progress("sh", "-c", told)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_pip_does_is_counted() -> None:
    import progress as program

    said = "Collecting torch\n  Downloading torch.whl (191.4 MB)\n"
    assert program.progress("", " of 9", 0) == "fetched 0 of 9 packages: asking the index"
    assert program.progress(said, " of 9", 0) == "fetched 0 of 9 packages: Downloading torch.whl (191.4 MB)"
    said += "Requirement already satisfied: a\nCollecting numpy\nWARNING: odd\n"
    assert program.progress(said, "", 0) == "fetched 2 packages: Collecting numpy"
    said += "Installing collected packages: torch, numpy\n"
    assert program.progress(said, "", 1) == "unpacking and compiling: 1 of 2 packages"
    assert program.failure("1\n  error: it broke\nERROR: build") == "  error: it broke\nERROR: build"
