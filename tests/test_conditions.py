"""Tests that broke where a machine differs from those that they were written on, run once more there."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info", "wheelhouse*")

BROKE = (
    "test_cli.py::test_submit_needs_no_more_than_nodes_and_says_what_it_takes",
    "test_submission.py::test_script_in_a_job_takes_what_the_job_has",
    "test_sbatch.py::test_awaiting_survives_signals_and_returns_the_childs_status",
    "test_sbatch.py::test_caches_lie_on_the_node_where_one_can_write",
    "test_submit.py::test_what_submits_a_run_again_is_what_was_typed",
)


@pytest.mark.nightly
def test_a_blank_and_an_umlaut_in_the_path_and_no_locale_break_nothing(tmp_path: Path) -> None:
    """With files for their owner alone, in the first time zone of all to have a new day."""
    home = tmp_path / "Jörg B"
    clone = Path(shutil.copytree(REPOSITORY, home / "tba hpc", symlinks=True, ignore=LEFT_OUT))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    (packages,) = home.glob("venv/lib/python3*/site-packages")
    (packages / "others.pth").write_text(f"import sys; sys.path.append({sysconfig.get_path('purelib')!a})\n")
    conditions = {"LC_ALL": "C", "TZ": "Pacific/Kiritimati", "PYTHONPATH": str(clone)}
    tests = [f"tests/{name}" for name in BROKE]
    done = subprocess.run(
        [str(home / "venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=clone,
        env={**os.environ, **conditions},
        umask=0o077,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
