"""What a user gets wrong is answered by one sentence and a non-zero exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_random_model
from typed import tba

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    """One sentence."""
    assert done.returncode == 2, done
    assert sentence in done.stderr.replace("\n", " "), done.stderr


def settings(**values: object) -> list[str]:
    """``--set`` words; ``__`` stands for the dot."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random model."""
    return make_random_model(tmp_path / "model", tied=False)


def test_a_run_directory_of_another_config_or_of_somebody_else(tmp_path: Path, model: Path) -> None:
    common = settings(model__path=model, run__root=tmp_path / "runs")
    folder = tmp_path / "runs" / "quickstart-seed0"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()
    for only in ((), ("--dry-run",)):
        refused(tba("run", CONFIG, *common, *only), "is not empty and holds no run (found thesis.tex)")
    (folder / "thesis.tex").unlink()
    planned = tba("run", CONFIG, *common, "--dry-run")
    assert planned.returncode == 0 and "mpiexec" in planned.stdout
    assert tba("create", CONFIG, *common).stdout.strip() == str(folder)
    (folder / "metrics" / "trainer.jsonl").write_text('{"step": 1}\n')  # it came to something
    for only in ((), ("--dry-run",)):
        changed = tba("run", CONFIG, *common, *settings(train__prompts_per_step=4, run__seed=0), *only)
        refused(changed, "a resume may not change it to train.prompts_per_step=4: resume with train.prom")


def test_a_read_only_place(model: Path) -> None:
    for only in ((), ("--dry-run",)):
        refused(
            tba("run", CONFIG, *settings(model__path=model, run__root="/proc"), *only),
            "cannot write to the run dir",
        )


@pytest.mark.mpi
def test_too_few_ranks(tmp_path: Path, model: Path) -> None:
    """A launcher that starts every rank alone must not run N singletons.

    One that a user starts so beside a run at work is told the same, and leaves that run no note to end by.
    """
    common = settings(model__path=model, run__root=tmp_path)
    folder = Path(tba("create", CONFIG, *common).stdout.strip())
    assert tba("prepare", str(folder)).returncode == 0
    command = [sys.executable, "-m", "mpi4py", "-m", "tba_hpc", "train", str(folder)]
    note = folder / "logs" / "attempt-001" / "refused-trainer-0000.txt"
    for launched in ({}, {"TBA_ATTEMPT": "attempt-001"}):
        environment = {**os.environ, **launched}
        alone = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert alone.returncode == 2 and note.exists() == bool(launched)
        sentence = note.read_text() if launched else alone.stderr
        assert "alone in its MPI world, but 3 ranks were expected" in sentence and "--mpi=pmix" in sentence
