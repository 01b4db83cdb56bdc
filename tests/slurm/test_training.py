"""The main job on the cluster: stories of what users and sites do to a run.

One of them has a language model, real engines and a real trainer, the others the enumerable one. Faults are
``test_storms.py``'s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lab.tabular import Table
from slurm_testbed.cluster import Cluster
from slurm_testbed.faults import held_leader, preempt

from tba_hpc.config import Config, differences, dump_config, load_config
from tba_hpc.core.prompts import prompt_of
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import PER_START, RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics
from tests.system import test_engines
from tests.system.test_run import CONFIG, assert_whole

pytestmark = [pytest.mark.mpi, pytest.mark.slurm, pytest.mark.system]

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
SITE = {
    "partition": "low",
    "gpus_per_node": 1,
    "cpus_per_node": 2,
    "memory": "3000",
    "time": "20",
    "signal_seconds": 60,
}
TABULAR, STEPS = "tabular-seed0", 200
SETTINGS = (f"train.steps={STEPS}", "exchange.keep_shards=1")
"""What was generated is read from the shards: how far searchers run ahead hangs on timing."""
START_SECONDS = 240
"""Longest wait for engines on a busy machine."""


# --- What a user types ---


def submit(cluster: Cluster, root: Path, *options: str, nodes: int = 3) -> tuple[RunDir, int]:
    """Type tools/submit.py; the run and its job."""
    (root / "site.yaml").write_text(yaml.safe_dump(SITE))
    command = [
        *(sys.executable, "tools/submit.py", "--config", str(CONFIG), "--nodes", str(nodes), "--json"),
        *("--site", f"{root}/site.yaml", "--run-root", str(root)),
        *(word for setting in SETTINGS for word in ("--set", setting)),
        *options,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, env=cluster.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return RunDir(root / TABULAR), int(json.loads(done.stdout)["job"])


def checkout(folder: Path, config: Config, *, time: str = "00:10:00") -> RunDir:
    """What sbatch needs of the repository, script and site edited; the run that will be there."""
    edits = {
        "--time=24:00:00": f"--time={time}",
        "USR1@300": "USR1@60",
        "--nodes=1": "--nodes=2",
        "--exclusive": "--gres=gpu:1\n#SBATCH --cpus-per-task=2",
        "--mem=0": "--mem=3000",
    }
    shutil.copytree(REPOSITORY / "slurm", folder / "slurm")
    (folder / "tba_hpc").symlink_to(REPOSITORY / "tba_hpc")
    script = folder / "slurm" / "tba_math.sbatch"
    text = script.read_text()
    for old, new in edits.items():
        assert old in text, f"{script.name} no longer says {old}"
        text = text.replace(old, new)
    script.write_text(text)
    (folder / "site.yaml").write_text(yaml.safe_dump(SITE))
    (folder / "mine.yaml").write_text(dump_config(config))
    return RunDir(folder / config.run_dir)


def sbatch(cluster: Cluster, folder: Path, **environment: str) -> int:
    """Type sbatch in a checkout, beside whose config the enumerable model does not lie; the job."""
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    environment |= {"PATH": path, "PYTHONPATH": str(REPOSITORY / "tools"), "SITE": "site.yaml"}
    done = subprocess.run(
        ["sbatch", "--parsable", "slurm/tba_math.sbatch"],
        cwd=folder,
        env={**cluster.environment, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# --- What is seen of a run ---


def said(run: RunDir) -> str:
    """The ends of all logs of the job and its ranks."""
    of_job = [*run.path.glob("slurm/*.log"), *run.path.parents[1].glob("tba-math-*.log")]
    logs = sorted([*of_job, *run.logs.glob("attempt-*/*.*")])
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def steps(run: RunDir) -> int:
    """Optimizer steps so far."""
    return len(History.read(run).steps)


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    """What batch scripts and launchers noted under a name."""
    return [event for event in read_events(run) if event["event"] == name]


def reach(cluster: Cluster, run: RunDir, step: int) -> None:
    """Wait until the run has taken ``step`` steps."""
    cluster.until(
        lambda: steps(run) >= step, f"step {step}", START_SECONDS, seen=lambda: said(run), by_jobs=True
    )


def finish(cluster: Cluster, run: RunDir, job: int) -> None:
    """Wait for the end of the job; the run must be finished."""
    assert cluster.wait(job, seconds=START_SECONDS) == "COMPLETED", said(run)
    found = audit(run)
    assert found.finished and found.clean, "\n".join([*found.problems, said(run)])


def left_behind(cluster: Cluster) -> list[str]:
    """Command lines of what jobs have started and is still there: ranks, engines, batch scripts."""
    words = ("tba_hpc", "slurm_script", "srun")
    return [line for line in cluster.processes() if any(word in line for word in words)]


def reach_the_wall_time(cluster: Cluster, run: RunDir) -> None:
    """Wait until the run stops since its time is over: after three steps, or on a slow machine before."""

    def over() -> bool:
        return bool(events(run, "signal") or events(run, "stopped"))

    cluster.until(lambda: steps(run) >= 3 or over(), "three steps", 120, seen=lambda: said(run), by_jobs=True)
    if not over():
        with held_leader(cluster, run):
            cluster.until(over, "the end of the wall time", 120, seen=lambda: said(run), by_jobs=True)


# --- What must not depend on what happened to a run ---


def schedule(run: RunDir) -> list[tuple[float, ...]]:
    """Step, learning rate and β of all steps."""
    records = History.read(run).steps
    return [tuple(record[key] for key in ("step", "train/learning_rate", "train/beta")) for record in records]


def prompts(run: RunDir) -> dict[int, int]:
    """Prompt by its request_id in the run's sequence, of all shards, which the run keeps."""
    files = [path for folder in ("kept", "shards") for path in run.path.glob(f"{folder}/searcher-*/*.h5")]
    records = [read_shard(path).trajectories.record[["request_id", "prompt_id"]] for path in files]
    return dict(pair for record in records for pair in record.tolist())


def held_out(run: RunDir) -> dict[str, int]:
    """How many prompts each evaluation on the test split has answered."""
    files = run.evaluations.glob("test-*.json")
    return {path.stem: json.loads(path.read_text())["total"] for path in files}


def assert_trained_as_planned(run: RunDir, steps: int = STEPS) -> None:
    """All that does not hang on timing is what the config says: steps, rates, prompts, evaluations."""
    keys = differences(run.config(), load_config(CONFIG, [*SETTINGS, f"train.steps={steps}"]))
    assert all(key.startswith((*PER_START, "run.notify")) for key in keys), keys
    train, seed = run.config().train, run.config().run.seed
    rates = [train.learning_rate.peak * (1 - done / steps) for done in range(steps)]
    planned = [(done + 1, rate, train.beta[0][1]) for done, rate in enumerate(rates)]
    np.testing.assert_allclose(schedule(run), planned, rtol=1e-12)
    asked = prompts(run)
    assert asked and asked == {
        request: prompt_of(request, seed=seed, prompts=Table().prompts) for request in asked
    }
    assert held_out(run) == {"test-step-000000": 4, f"test-step-{steps:06}": 4}


# --- Stories ---


def test_engines_and_learner_make_one_world(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Of MPI, by the script edited by hand: what a rank has of Slurm and MPI, its engine must not inherit."""
    bounded = "exchange.max_staleness=8"  # an engine that waits for the trainer leaves the processor alone
    settings = [*test_engines.SETTINGS, bounded, "train.steps=6"]
    config = load_config(QUICKSTART, [f"model.path={model}", *settings])
    run = checkout(tmp_path, config)
    finish(cluster, run, sbatch(cluster, tmp_path, CONFIG="mine.yaml"))
    assert_whole(run, 6, test_engines.SAMPLES)


def test_the_script_edited_by_hand_outlives_its_wall_time(cluster: Cluster, tmp_path: Path) -> None:
    """Two minutes are too short for the run: what was done is kept, and the job goes on by itself."""
    patient = f"launch.timeout_seconds={START_SECONDS}"  # the leader is held until the signal comes
    run = checkout(tmp_path, load_config(CONFIG, [patient]), time="00:02:00")
    job = sbatch(cluster, tmp_path, CONFIG="mine.yaml")
    reach_the_wall_time(cluster, run)
    cluster.wait(job, "PENDING")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    finish(cluster, run, job)
    assert_whole(run)

    first, second = events(run, "allocated")
    (stopped,) = events(run, "stopped")
    assert stopped["time"] < first["time"] + 120, "it checkpointed within the wall time"
    assert second["restarts"] == 1 and len(events(run, "start")) == 2

    again = sbatch(cluster, tmp_path, RUN=str(run.path))
    assert cluster.wait(again) == "COMPLETED"
    assert "the run is finished already" in said(run)


def test_preempted_cancelled_and_submitted_again_in_another_shape(cluster: Cluster, tmp_path: Path) -> None:
    """One trainer and two searchers, and in the end two trainers and one: still the training of its config.

    Its user is told of all that happens to it.
    """
    told = tmp_path / "told"
    command = json.dumps(["sh", "-c", f'echo "$1" >> {told}', "told"])
    notify = ("--set", f"run.notify={{command: {command}}}")
    run, job = cancelled = submit(cluster, tmp_path, *notify)
    reach(cluster, run, 5)
    preempt(cluster)
    assert events(run, "stopped") and events(run, "requeue"), f"no stop within the grace time:\n{said(run)}"
    reach(cluster, run, steps(run) + 1)
    cluster.run("scancel", str(job))
    cluster.until(lambda: not left_behind(cluster), "no process", 60, seen=lambda: left_behind(cluster))
    assert cluster.wait(job) == "CANCELLED" and cluster.jobs(job)[0]["Restarts"] == "1"
    assert not audit(run).problems

    run, job = submit(cluster, tmp_path, "--homogeneous", "--trainer-nodes", "2", *notify)
    finish(cluster, run, job)
    assert_whole(run, STEPS)
    lines = [line.removeprefix(f"{TABULAR}: ") for line in told.read_text().splitlines()]
    lines = [line for line in lines if not line.startswith("alert")]
    lost = f"job {cancelled[1]} is gone"
    left = "preempted or out of time: leaves its nodes"
    kinds = ["started at", left, "started again", lost, "started again", "finished"]
    assert [line[: len(kind)] for line, kind in zip(lines, kinds, strict=False)] == kinds, lines
    assert len(lines) == len(kinds), lines
    shapes = [(event["trainers"], event["searchers"]) for event in events(run, "start")]
    assert shapes == [(1, 2), (1, 2), (2, 1)], said(run)
    assert_trained_as_planned(run)


def test_a_job_of_a_trainer_alone_is_fed_by_an_elastic_node(cluster: Cluster, tmp_path: Path) -> None:
    """The elastic node searches, evaluates, and ends by itself once the run is finished."""
    places = ("--trainer-nodes", "1", "--set", "launch.elastic=1")
    timeout = ("--set", f"launch.timeout_seconds={START_SECONDS}")
    run, job = submit(cluster, tmp_path, *places, *timeout, nodes=1)
    words = [sys.executable, "tools/submit.py", "--elastic", str(run.path), "--nodes", "1", "--json"]
    elastic = subprocess.run(
        [*words, "--site", f"{tmp_path}/site.yaml"],
        cwd=REPOSITORY,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert elastic.returncode == 0, elastic.stderr
    finish(cluster, run, job)
    assert cluster.wait(int(json.loads(elastic.stdout)["job"])) == "COMPLETED", said(run)
    merged = [r["searcher"] for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == "merged"]
    assert set(merged) == {5000}
