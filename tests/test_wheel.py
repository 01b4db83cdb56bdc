"""The wheel, used as people do who have no clone: in an environment of its own, in an empty folder.

It is built from what the image's definition copies, so that an image's package is whole, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from shlex import quote

import pytest
from test_images import lay_out

REPOSITORY = Path(__file__).parents[1]
CONFIG = "{run: {name: mine}, model: {path: org/model}, exchange: {transport: files}}\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds the wheel, and sees the other packages of this one.

    It finds these by a path file. The path files beside them are not read, and so the clone stays out,
    which is installed here as editable.
    """
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    source = lay_out(folder / "source")  # setuptools leaves things behind where it builds
    _do(*_pip("wheel"), "--no-build-isolation", "--wheel-dir", folder, source)
    _do(sys.executable, "-m", "venv", "--without-pip", environment)
    _do(
        *_pip("--python", environment / "bin/python", "install"),
        "--no-index",
        "--no-compile",
        *folder.glob("*.whl"),
    )
    (packages,) = environment.glob("lib/python3*/site-packages")
    # Code and not a line of its own, which Python 3.11 reads in the encoding of the locale.
    (packages / "others.pth").write_text(f"import sys; sys.path.append({sysconfig.get_path('purelib')!a})\n")
    return environment / "bin/python"


def _pip(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, "--no-deps"]


def _do(
    *command: str | Path, folder: Path | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command, which must end with that status, without the path that may lead to the clone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and "Traceback" not in done.stderr, (
        f"{words}: {done.stdout}{done.stderr}"
    )
    return done


def _package(python: Path, folder: Path) -> Path:
    """Where this Python finds the package."""
    return Path(_do(python, "-c", "import tba_hpc; print(*tba_hpc.__path__)", folder=folder).stdout.strip())


def _files(package: Path) -> set[str]:
    """Names of its files, below links, too."""
    folders = os.walk(package, followlinks=True)
    paths = {os.path.relpath(Path(folder, name), package) for folder, _, names in folders for name in names}
    return {path for path in paths if "__pycache__" not in path}


def test_the_wheel_has_every_file_of_the_package(python: Path, tmp_path: Path) -> None:
    package = _package(python, tmp_path)
    assert package.is_relative_to(python.parents[1]), "the clone, or another installation, is in the way"
    assert _files(package) == _files(REPOSITORY / "tba_hpc")


def test_submit_makes_a_script_that_nodes_can_run(python: Path, tmp_path: Path) -> None:
    done = _do(python.with_name("tba"), "submit", "--nodes", "8", "--dry-run", folder=tmp_path)
    package = _package(python, tmp_path)
    assert [line.split(", using ")[1] for line in done.stderr.splitlines()[:2]] == [
        f"{package}/configs/math_gsm8k.yaml",
        f"{package}/sites/generic.yaml",
    ]
    assert f"\nsource {quote(f'{package}/launch/job_supervisor.sh')} ||" in done.stdout
    script = tmp_path / "job.sbatch"
    script.write_text(done.stdout)
    _do("bash", "-n", script)
    # All but its last line, which starts the ranks; in its place, what makes a run.
    head = done.stdout[: done.stdout.index("run_to_the_end")]
    (tmp_path / "mine.yaml").write_text(CONFIG)
    made = _do("bash", "-c", f'{head}\n"${{TBA[@]}}" create mine.yaml', folder=tmp_path)
    assert made.stdout == f"{tmp_path}/runs/mine-seed0\n" and Path(made.stdout.strip()).is_dir()
    assert f"\nRANK=({python} -P -m mpi4py -m tba_hpc)\n" in done.stdout


def test_doctor_examines_without_a_clone(python: Path, tmp_path: Path) -> None:
    tba = python.with_name("tba")
    done = _do("bash", "-c", f"{tba} doctor --json || [ $? = 1 ]", folder=tmp_path)  # 1: it found problems
    assert {"Slurm", "run root"} <= {finding["name"] for finding in json.loads(done.stdout)}


def test_run_starts_the_installed_package(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    tba = python.with_name("tba")
    done = _do(tba, "run", "mine.yaml", "--dry-run", folder=tmp_path)
    assert f"# {python} -P -m tba_hpc train {tmp_path}/runs/mine-seed0 --index 0\n" in done.stdout
    refused = _do(tba, "run", "quickstart", folder=tmp_path, status=2)
    assert "model.path=.cache/tiny-model-seed0 does not exist" in refused.stderr
