"""What ``tba status`` makes of a job of two components, as a real queue shows it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recorded import happen, new_run
from slurm_testbed.cluster import Cluster
from waiting import until

from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.report.status import facts
from tba_hpc.run.directory import RunDir
from tba_hpc.run.slurm_queue import job_states

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --comment={run} --output=/dev/null --requeue --hold --nodes=1
#SBATCH hetjob
#SBATCH --nodes=2
sleep 300
"""


def look(run: RunDir) -> RunMonitor:
    monitor = RunMonitor(run, job_states)
    monitor.update()
    return monitor


def test_a_job_that_is_too_long_for_its_partition_will_never_start(cluster: Cluster, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.path / "slurm").mkdir()
    script = f"#!/bin/bash\n#SBATCH --comment={run.path} --output=/dev/null --time=20 --hold\nsleep 300\n"
    job = cluster.submit(script)
    (run.path / "slurm/job").write_text(f"{job}\n")
    cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=10")
    try:
        cluster.run("scontrol", "release", str(job))
        until(lambda: job_states(run)[0]["reason"] == "PartitionTimeLimit", "Slurm's reason")
        found = run_state(look(run))
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=UNLIMITED")
        cluster.run("scancel", str(job))
    assert found.command == f"tba stop {run.path}" and "the job will never start" in found.words


def test_a_job_from_submission_to_end(cluster: Cluster, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_state(look(run)).state == "created"
    job = cluster.submit(SCRIPT.format(run=run.path))
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text(f"{job}\n")
    held = run_state(look(run))
    assert (held.state, held.command) == ("queued", f"scontrol release {job}")

    cluster.run("scontrol", "release", str(job))
    cluster.wait(job, "RUNNING")
    happen(run, time.time(), "allocated", job=str(job), nodes="node1,node2,node3")
    monitor = look(run)
    shown = facts(monitor, run_state(monitor))
    assert run_state(monitor).state == "starting" and shown["job"] == f"{job}, restarts: 0"
    assert shown["trainers"].startswith("RUNNING node") and shown["searchers"].startswith("RUNNING node[")

    cluster.run("scontrol", "requeue", str(job))
    cluster.wait(job, "PENDING")
    why = "ended by Slurm (requeued, preempted or a node lost)"
    assert run_state(look(run)).words.startswith(f"{why}, back in the queue at step 0 (")

    cluster.run("scancel", str(job))
    cluster.wait(job, "CANCELLED")
    over = run_state(look(run))
    assert (over.state, over.words) == ("gone", f"job {job} is gone (cancelled), the run is at step 0")
    assert over.command == f"tba submit --config {run.path} --nodes 3"

    (run.path / "slurm/job").write_text("4711\n")
    assert run_state(look(run)).words == "job 4711 is gone, the run is at step 0"  # Slurm knows no such job
