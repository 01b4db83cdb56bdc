"""What make would do, by ``make -n``: which stack is installed, where from, and into which environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "TARGET", "PYTHON")
    }
    inherited["PATH"] = f"{path}:{inherited['PATH']}" if path else inherited["PATH"]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited, timeout=60)
    assert done.returncode == status, done
    return done.stdout + done.stderr


def installs(text: str) -> str:
    """Which of the two stacks is installed."""
    if "'.[gpu,wandb]'" in text:
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


GROUPS = {
    **{goal: [] for goal in ("quickstart", "install")},
    **{goal: ["test"] for goal in ("test", "nightly", "check", "storm", "lint", "format")},
    "docs": ["docs"],
}
"""Goal → what it installs beside the stack."""


@pytest.mark.parametrize("goal", GROUPS)
def test_each_goal_installs_first_what_it_needs(venv: Path, goal: str) -> None:
    text = make(venv, goal, "TARGET=gpu")
    assert installs(text) == "gpu" and text.index("-m venv") < text.index("'.[gpu,wandb]'")
    asked = [name for name in ("test", "docs") if f"tools/requirements-{name}.lock | " in text]
    assert asked == GROUPS[goal]


def test_a_group_is_added_to_what_is_there(venv: Path) -> None:
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/pip", "installed-cpu"):
        (venv / name).touch()
    text = make(venv, "lint")
    assert installs(text) == "" and text.count("pip install") == 1
    assert "tools/requirements-test.lock | " in text
    (venv / "with-test").touch()
    assert "pip install" not in make(venv, "lint")


def test_another_build_of_torch_is_taken_where_it_is_named(venv: Path) -> None:
    text = make(venv, "install", "TARGET=cpu", "TORCH=torch==2.13.0")
    asked = [line for line in text.splitlines() if "pip install" in line]
    assert asked[0].endswith("--constraint /dev/stdin 'torch==2.13.0'") and "/whl/cpu" not in text
    assert "grep -v '^torch=='" in asked[1]


def test_the_machine_is_asked_before_anything_is_downloaded_unless_this_is_declined(venv: Path) -> None:
    text = make(venv, "install", "TARGET=cpu")
    first = f'preflight.sh cpu {venv} ""'
    assert text.index(first) < text.index("-m venv") < text.index("pip install") and text.count(first) == 2
    assert "preflight.sh cpu" not in make(venv, "install", "TARGET=cpu", "CHECKS=")


def test_torch_for_cpus_is_refused_where_gpus_are_meant(venv: Path) -> None:
    """The environment's programs do nothing here; what pip would have left is there already."""
    version = venv / "lib/python3.11/site-packages/torch/version.py"
    version.parent.mkdir(parents=True)
    (venv / "bin").mkdir()
    for name in ("pip", "python"):
        (venv / "bin" / name).write_text("#!/bin/sh\n")
        (venv / "bin" / name).chmod(0o755)
    command = ["make", "--directory", str(REPOSITORY), "install", "TARGET=gpu", f"VENV={venv}", "CHECKS="]
    for build, status in (("None", 2), ("'13.0'", 0)):
        version.write_text(f"cuda: Optional[str] = {build}\nhip: Optional[str] = None\n")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done
        assert ("is a build for CPUs" in done.stderr) == (status == 2)
        assert (venv / "installed-gpu").exists() == (status == 0)


def test_the_constraints_for_gpus_leave_out_torch_for_cpus(venv: Path) -> None:
    text = make(venv, "install", "TARGET=gpu")
    (command,) = [line for line in text.splitlines() if line.startswith("sed ")]
    words = ["bash", "-c", command.partition(" > ")[0]]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    pins = done.stdout.splitlines()
    assert "torch!=2.13.0+cpu" in pins and "--hash" not in done.stdout and len(pins) > 150
    assert not any(pin.startswith(("vllm", "torch==", "intel")) for pin in pins)


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
