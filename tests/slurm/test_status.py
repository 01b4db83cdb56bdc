"""What ``tba status`` makes of a job of two components, as a real queue shows it."""

from __future__ import annotations

import time
from pathlib import Path

from recorded import happen, new_run

from tba_hpc.launch.slurm import job_states
from tba_hpc.report.standing import standing
from tba_hpc.report.status import facts
from tba_hpc.report.view import RunView
from tba_hpc.state import RunDir
from tests.slurm.cluster import Cluster

SCRIPT = """#!/bin/bash
#SBATCH --comment={run} --output=/dev/null --requeue --hold --nodes=1
#SBATCH hetjob
#SBATCH --nodes=2
sleep 300
"""


def look(run: RunDir) -> RunView:
    view = RunView(run, run.config(), job_states)
    view.update()
    return view


def test_the_life_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert standing(look(run)).state == "created"
    job = cluster.submit(SCRIPT.format(run=run.path))
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text(f"{job}\n")
    held = standing(look(run))
    assert (held.state, held.command) == ("queued", f"scontrol release {job}")

    cluster.run("scontrol", "release", str(job))
    cluster.wait(job, "RUNNING")
    happen(run, time.time(), "life", job=str(job), nodes="node1,node2,node3")
    view = look(run)
    shown = facts(view, standing(view))
    assert standing(view).state == "starting" and shown["job"] == f"{job}, life 0"
    assert shown["trainers"].startswith("RUNNING node") and shown["searchers"].startswith("RUNNING node[")

    cluster.run("scontrol", "requeue", str(job))
    cluster.wait(job, "PENDING")
    assert standing(look(run)).words.startswith("preempted or a node lost, back in the queue at step 0 (")

    cluster.run("scancel", str(job))
    cluster.wait(job, "CANCELLED")
    over = standing(look(run))
    assert (over.state, over.words) == ("gone", f"job {job} is gone (cancelled), the run is at step 0")
    assert over.command == f"python tools/submit.py --config {run.path} --nodes 3"

    (run.path / "slurm/job").write_text("4711\n")
    assert standing(look(run)).words == "job 4711 is gone, the run is at step 0"  # Slurm knows no such job
