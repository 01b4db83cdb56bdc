"""What make would do, by ``make -n``: which stack is installed, where from, and into which environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Where there is no environment yet."""
    return tmp_path / "venv"


def make(venv: Path, *words: str, status: int = 0, path: Path | None = None) -> str:
    """What it would run."""
    command = ["make", "--dry-run", "--directory", str(REPOSITORY), f"VENV={venv}", *words]
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "TARGET")}
    inherited["PATH"] = f"{path}:{inherited['PATH']}" if path else inherited["PATH"]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited, timeout=60)
    assert done.returncode == status, done
    return done.stdout + done.stderr


def installs(text: str) -> str:
    """Which of the two stacks is installed."""
    if "'.[gpu,dev]'" in text:
        return "gpu"
    return "cpu" if "tools/requirements-cpu.lock | " in text else ""


@pytest.fixture
def with_gpu(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi, as machines with a GPU have it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100 (UUID: GPU-0)'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


@pytest.fixture
def without_gpu(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi, as login nodes have it."""
    folder = tmp_path / "login"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def test_the_target_that_is_named_counts_more_than_the_machine(
    venv: Path, with_gpu: Path, without_gpu: Path
) -> None:
    assert installs(make(venv, "install", path=with_gpu)) == "gpu"
    assert installs(make(venv, "install", path=without_gpu)) == "cpu"
    assert installs(make(venv, "install", "TARGET=cpu", path=with_gpu)) == "cpu"
    assert installs(make(venv, "install", "TARGET=gpu", path=without_gpu)) == "gpu"
    assert "TARGET=rocm is neither cpu nor gpu" in make(venv, "install", "TARGET=rocm", status=2)


@pytest.mark.parametrize("goal", ["quickstart", "test", "check", "storm", "lint", "format"])
def test_every_goal_installs_first(venv: Path, goal: str) -> None:
    text = make(venv, goal, "TARGET=gpu")
    assert installs(text) == "gpu" and text.index("-m venv") < text.index("'.[gpu,dev]'")


def test_what_is_installed_stays_although_the_machine_has_another(
    venv: Path, with_gpu: Path, without_gpu: Path
) -> None:
    for target, path in (("gpu", without_gpu), ("cpu", with_gpu)):
        stamp = venv / f"installed-{target}"
        stamp.parent.mkdir(exist_ok=True)
        stamp.touch()
        assert installs(make(venv, "lint", path=path)) == ""
        stamp.unlink()


def test_an_environment_that_is_there_is_taken_as_it_is(venv: Path) -> None:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/pip").touch()
    text = make(venv, "install", "TARGET=gpu")
    assert "-m venv" not in text and f"{venv}/bin/pip install" in text


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_wheelhouse_is_filled_here_and_installed_from_without_a_network(venv: Path, target: str) -> None:
    filled = make(venv, "wheelhouse", f"TARGET={target}")
    assert f"pip wheel --wheel-dir wheelhouse-{target} " in filled and str(venv) not in filled
    text = make(venv, "install", f"TARGET={target}", "WHEELHOUSE=/site/wheels")
    asked = [line for line in text.splitlines() if "pip install" in line]
    assert asked and all("pip install --no-index --find-links /site/wheels " in line for line in asked)
    assert "--no-index" not in make(venv, "install", f"TARGET={target}")


def test_digests_are_compared_unless_the_wheels_are_a_sites_own(venv: Path) -> None:
    text = make(venv, "install", "TARGET=cpu")
    assert text.count("--no-deps --require-hashes") == 3, "torch from either index, and the rest"
    for words in (["HASHES="], ["WHEELHOUSE=/site/wheels"]):
        text = make(venv, "install", "TARGET=cpu", *words)
        assert "--require-hashes" not in text and "sed 's/ --hash=.*//'" in text
    filled = make(venv, "wheelhouse", "TARGET=cpu", "WHEELHOUSE=/site/wheels")
    assert filled.count("--no-deps --require-hashes") == 3


def test_every_pin_has_digests() -> None:
    lock = (REPOSITORY / "tools/requirements-cpu.lock").read_text().splitlines()
    assert len(lock) > 200
    pin = re.compile(r"[\w.-]+==[\w.+]+( --hash=sha256:[0-9a-f]{64})+")
    assert [line for line in lock if not pin.fullmatch(line)] == []
