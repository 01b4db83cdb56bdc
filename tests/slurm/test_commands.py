"""What people type about a run that is a Slurm job: its end, its followers, its ranks without MPI."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from known_models import make_empty_model
from slurm_testbed.cluster import Cluster
from typed import tba
from waiting import until

from tba_hpc.config import Config, parse_config
from tba_hpc.launch import LaunchError, slurm, stop
from tba_hpc.launch.plan import Plan, Site, plan, searchers_of_a_node
from tba_hpc.launch.sbatch import Job, batch_script, elastic_script
from tba_hpc.report.audit import audit
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event, read_events
from tba_hpc.run.history import History
from tests.slurm.test_submit import (
    HELLO,
    REPOSITORY,
    _config,
    _events,
    _finished,
    _log,
    _ranks,
    _run,
    _site,
    _starts,
    _working,
)

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]

RANK = """
import json, os, sys
from pathlib import Path
from tba_hpc.launch.placement import Placement
from tba_hpc.run.directory import RunDir
run = RunDir.open(Path(sys.argv[2]))
role = {"train": "trainer", "search": "searcher"}[sys.argv[1]]
rank = Placement.join(run.config(), role, None)
text = json.dumps([role, rank.index, rank.first_gpu, os.uname().nodename])
(run.path / f"placed-{role}-{rank.index}").write_text(text)
(run.path / "summary.json").write_text('{"finished": true}')
run.mark_finished()
"""
"""A rank that says where it sits."""

SEARCHER = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[1] == "supervise":
    from tba_hpc.launch import supervise
    sys.exit(supervise.main(sys.argv[2:]))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
Path(sys.argv[2], f"joined-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', 0)}").touch()
time.sleep(600)
"""
"""A searcher that is there until it is asked to go."""


def test_a_stopped_job_saves_and_ends_instead_of_going_back_to_the_queue(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, script = _run(tmp_path, _site(10_000))
    job = slurm.submit(run, script)
    log_event(run, "prepared", job="", restarts=0, command="tba submit --config it")
    _working(cluster, run, 1)
    said = f"job {job} is asked to checkpoint and end, not to requeue; to resume then: "
    assert stop.stop(run) == f"{said}tba submit --config it"
    stop.await_end(run, seconds=60)
    assert cluster.wait(int(job)) == "COMPLETED", _log(run)
    assert "stopped for good, as asked" in _log(run) and "back to the queue" not in _log(run)
    assert not json.loads(run.summary.read_text())["finished"], "the ranks have ended by themselves"
    assert _events(run) == ["prepared", "allocated", "signal", "stopped"]
    assert stop.stop(run) == f"nobody is at work on {run.path}; to resume it: tba submit --config it"
    # Another job of the run is not concerned.
    _finished(cluster, run, slurm.submit(run, _run(tmp_path, _site(3))[1]))


def test_a_waiting_job_is_stopped_at_once_and_never_trains(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(3))
    held = script.replace("#SBATCH --time", "#SBATCH --hold\n#SBATCH --time", 1)
    job = slurm.submit(run, held)
    with pytest.raises(LaunchError, match=rf"job {job} \(pending\) is still at work on .* tba cancel"):
        stop.await_end(run, seconds=0)
    assert stop.stop(run).startswith(f"job {job} was waiting in the queue, and is cancelled; to resume: ")
    assert cluster.wait(int(job)) == "CANCELLED"
    # One that gets its nodes in the very moment reads that it is not wanted.
    job = slurm.submit(run, held)
    (run.path / "slurm/stop").write_text(f"{job}\n")
    cluster.run("scontrol", "release", job)
    assert cluster.wait(int(job)) == "COMPLETED"
    assert _events(run) == ["allocated", "stopped"] and not _starts(run)


def test_a_cancelled_job_ends_at_once(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(10_000))
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    said = stop.cancel(run)
    assert said.startswith(f"job {job} is cancelled; nothing sealed is lost")
    assert "starts from step 0, as it has no checkpoint yet, or from one that its ranks still save: " in said
    assert said.endswith(f"tba submit --config {run.path} --nodes 3")
    stop.await_end(run, seconds=60)
    assert cluster.wait(int(job)) == "CANCELLED"
    assert "requeue" not in _events(run)


def test_a_job_that_ends_already_is_not_asked_to(cluster: Cluster, tmp_path: Path) -> None:
    run = RunDir.create(_config(tmp_path))
    (run.path / "slurm").mkdir()
    script = f"#!/bin/bash\n#SBATCH --comment={run.path}\ntrap : TERM\nwhile :; do sleep 1; done\n"
    first = cluster.submit(script)
    second = cluster.submit(script, f"--dependency=afterany:{first}")
    (run.path / "slurm/job").write_text(f"{first}\n")
    (run.path / "slurm/chain").write_text(f"{first}\n{second}\n")
    cluster.wait(first, "RUNNING")
    time.sleep(0.5)  # until the script ignores Slurm's request to end
    assert stop.cancel(run).startswith(f"job {first} is cancelled; ")
    cluster.wait(first, "COMPLETING")
    done = tba("stop", run.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"job {first} is ending already, and will not train again; to resume then")


def test_a_job_waits_for_another_through_its_requeues(cluster: Cluster, tmp_path: Path) -> None:
    first, script = _run(tmp_path / "first", _site(20))
    job = slurm.submit(first, script)
    _working(cluster, first, 1)
    second = RunDir.create(_config(tmp_path / "second"))
    (second.path / "slurm").mkdir()
    order = Job(name="second", run=second.path, after=job, rank=HELLO, tba=HELLO)
    waiting = slurm.submit(second, batch_script(order, plan(second.config(), _site(3), 3), _site(3)))
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(int(job), "PENDING")
    assert {part["Reason"] for part in cluster.jobs(int(waiting))} >= {"Dependency"}
    _working(cluster, first, 2)
    assert not _ranks(second, 1), "the first job was only back in the queue"
    _finished(cluster, first, job)
    _finished(cluster, second, waiting)


def _placed(
    cluster: Cluster, folder: Path, split: Callable[[Config, Site], Plan], *settings: str
) -> list[Any]:
    """Role, index, first GPU and host of each rank of a job whose ranks have no MPI to number them."""
    program = folder / "rank.py"
    program.write_text(RANK)
    config = parse_config(_config(folder).model_dump(), settings)
    assert not config.one_world
    run = RunDir.create(config)
    (run.path / "slurm").mkdir()
    site = _site().model_copy(update={"mpi": "none"})
    order = Job(name="placed", run=run.path, rank=(sys.executable, str(program)), tba=HELLO)
    job = slurm.submit(run, batch_script(order, split(config, site), site))
    assert cluster.wait(int(job)) == "COMPLETED", _log(run)
    assert _starts(run) == [(config.launch.trainers, config.launch.searchers)]
    return [json.loads(file.read_text()) for file in sorted(run.path.glob("placed-*"))]


@pytest.mark.parametrize(
    "form", ["het", pytest.param("het, searchers first", marks=pytest.mark.nightly), "homogeneous"]
)
def test_ranks_without_mpi_are_numbered_by_slurm(cluster: Cluster, tmp_path: Path, form: str) -> None:
    def split(config: Config, site: Site) -> Plan:
        made = plan(config, site, 3, homogeneous=form == "homogeneous")
        return replace(made, first="searcher") if form == "het, searchers first" else made

    settings = ["exchange.transport=files", "launch.trainers=2", "launch.searchers=4"]
    placed = _placed(cluster, tmp_path, split, *settings)
    assert [(role, index, gpu) for role, index, gpu, _ in placed] == [
        *(("searcher", 0, 0), ("searcher", 1, 1), ("searcher", 2, 0), ("searcher", 3, 1)),
        *(("trainer", 0, 0), ("trainer", 1, 1)),
    ]
    hosts = [host for *_, host in placed]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3] and hosts[4] == hosts[5] and len(set(hosts)) == 3


def test_all_nodes_train_if_all_searchers_are_elastic(cluster: Cluster, tmp_path: Path) -> None:
    """Then ranks meet over files, and Slurm numbers them."""
    settings = ["launch.elastic=4", "launch.trainers=4", "launch.searchers=0", "train.prompts_per_step=4"]
    placed = _placed(cluster, tmp_path, lambda config, site: plan(config, site, 2, 2), *settings)
    assert [(role, index, gpu) for role, index, gpu, _ in placed] == [
        ("trainer", index, index % 2) for index in range(4)
    ]
    hosts = [host for *_, host in placed]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_one_preempted_job_of_elastic_searchers_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    """The last job of an array to start has the array's own number, which stands for all of them."""
    run, _, array = _elastic(tmp_path, nodes=2)
    cluster.until(lambda: len([*run.path.glob("joined-*-0")]) == 2, "both to be there", 60, by_jobs=True)
    (last,) = (part for part in cluster.jobs(array) if part["JobId"] == str(array))
    name = f"{array}_{last['ArrayTaskId']}"
    cluster.run("scancel", "--batch", "--signal=USR1", name)
    cluster.until(lambda: (run.path / f"joined-{array}-1").exists(), f"{name} to be back", 120, by_jobs=True)
    restarts = {part["ArrayTaskId"]: part["Restarts"] for part in cluster.jobs(array)}
    assert restarts.pop(last["ArrayTaskId"]) == "1" and set(restarts.values()) == {"0"}, restarts


def test_queued_elastic_searchers_are_named_when_their_run_is_stopped(
    cluster: Cluster, tmp_path: Path
) -> None:
    """They would hold nodes, and wait for a trainer that does not come."""
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    cluster.submit(f"#!/bin/bash\n#SBATCH --array=0-1 --output=/dev/null --comment={'x' * 300}\nsleep 1\n")
    run, _, array = _elastic(tmp_path, nodes=2)
    queued = f"elastic searchers are queued as job {array}_[0-1]"
    assert stop.stop(run).endswith(f"; {queued}; to end them: scancel '{array}_[0-1]'")
    cluster.run("scancel", f"{array}_[0-1]")
    assert "are queued" not in stop.stop(run)


def test_elastic_searchers_leave_a_node_that_their_run_waits_for(cluster: Cluster, tmp_path: Path) -> None:
    run, _, array = _elastic(tmp_path, nodes=1, watch_seconds=2)
    cluster.until(lambda: [*run.path.glob("joined-*-0")] != [], "it to be there", 60, by_jobs=True)
    own = cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    (run.path / "slurm/job").write_text(f"{own}\n")
    cluster.wait(own, "RUNNING")
    (waiting,) = cluster.jobs(array)
    assert (waiting["JobState"], waiting["Restarts"]) == ("PENDING", "1")
    (log,) = (run.path / "slurm").glob("searchers-*.log")
    assert f"job {own} of this run waits for nodes, and may need " in log.read_text()
    assert (run.path / f"slurm/left-{array}_0").read_text() == "none\n", "once before the next start"


def test_an_elastic_searcher_that_dies_is_restarted_alone(cluster: Cluster, tmp_path: Path) -> None:
    run, program, array = _elastic(tmp_path, nodes=1)

    def there() -> set[int]:
        return {pid for node in cluster.up for pid in cluster.pids(node) if _command(pid)[1:] == wanted}

    wanted = [str(program), "search", str(run.path)]
    cluster.until(lambda: len(there()) == 2, "both to be there", 60, by_jobs=True)
    time.sleep(0.5)  # until they listen
    victim, neighbour = there()
    os.kill(victim, signal.SIGKILL)
    cluster.until(lambda: len(there() - {victim}) == 2, "another in its place", 60, by_jobs=True)
    assert neighbour in there()
    time.sleep(0.5)
    cluster.run("scancel", "--batch", "--signal=USR1", str(array))
    back = run.path / f"joined-{array}-1"
    cluster.until(lambda: back.exists() and len(there()) == 2, "both to be back", 120, by_jobs=True)
    said = "".join(file.read_text() for file in (run.path / "slurm").glob("searchers-*.log"))
    assert said.count("ended with status 137 (failure 1 in a row): starting it again") == 1, said
    assert said.count("back to the queue") == 1 and "the searchers ended with status" not in said, said


def _elastic(folder: Path, *, nodes: int, watch_seconds: int = 60) -> tuple[RunDir, Path, int]:
    """A run with elastic searchers on so many nodes; their program, and the array of jobs."""
    run = RunDir.create(parse_config(_config(folder).model_dump(), ["launch.elastic=4"]))
    program = folder / "searcher.py"
    program.write_text(SEARCHER)
    site = _site(requeue=True)
    tba = (sys.executable, str(program))
    job = Job(name="searchers", run=run.path, rank=tba, tba=tba)
    script = elastic_script(job, nodes, searchers_of_a_node(run.config(), site), site)
    script = script.replace("search_for_a_while", f"WATCH_SECONDS={watch_seconds}; search_for_a_while")
    return run, program, int(slurm.send(run, script))


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:  # gone by now
        return []


def _own_script(cluster: Cluster, folder: Path, time: str) -> tuple[RunDir, int, Path]:
    """Submit the batch script that docs/slurm.md shows; the run, its job and the job's log.

    Messages about the run are written to the file ``told`` in the folder.
    """
    (folder / "tell.sh").write_text(f'#!/bin/sh\necho "$1" >> {folder}/told\n')
    (folder / "tell.sh").chmod(0o700)
    page = (REPOSITORY / "docs/slurm.md").read_text()
    script = textwrap.dedent(page.partition("## A batch script of your own\n")[2].partition("\n\n")[0])
    settings = [f"run.root={folder}", "train.steps=10000", "model.path=lab.tabular:Slow"]
    settings.append(f"run.notify.command={folder}/tell.sh")
    edits = {
        "--time=12:00:00": f"--time={time} --output={folder}/log",
        ".venv/bin/activate": f"{Path(sys.executable).parent}/activate",
        "configs/math_gsm8k_one_gpu.yaml": " --set ".join(["tools/tabular.yaml", *settings]),
    }
    for old, new in edits.items():
        assert old in script
        script = script.replace(old, new)
    around = {**cluster.environment, "PYTHONPATH": str(REPOSITORY / "tools")}
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, cwd=REPOSITORY, env=around, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "tabular-seed0"), int(done.stdout), folder / "log"


def test_a_batch_script_of_ones_own_goes_on_after_its_time_limit_and_ends_if_asked(
    cluster: Cluster, tmp_path: Path
) -> None:
    """In its two minutes a trainer takes steps even if its start is slow."""
    run, job, log = _own_script(cluster, tmp_path, "0:02:00")

    def started_again() -> bool:
        return [event["restarts"] for event in read_events(run) if event["event"] == "start"] == [0, 1]

    until(started_again, "the second start", 300)
    assert _events(run) == ["stopped", "preempted"], log.read_text()
    assert "stopped in time for the job's end" in log.read_text()
    until(lambda: History.read(run).starts == 2, "the second loop")
    said = stop.stop(run)
    assert f"of Slurm job {job}" in said and said.endswith(f"to resume then: tba run {run.path}")
    stop.await_end(run, seconds=120)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert started_again() and latest_checkpoint(run)
    assert not audit(run).violations


def test_a_cancelled_batch_script_of_ones_own_saves_and_does_not_queue_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, job, log = _own_script(cluster, tmp_path, "0:10:00")
    until(lambda: History.read(run).steps, "a step")
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED", log.read_text()
    until(lambda: _events(run) == ["signal", "stopped", "preempted"], "the end of tba run", 60)
    assert latest_checkpoint(run) and stop.stop(run).startswith(f"nobody is at work on {run.path}; to resume")
    started, ended = (tmp_path / "told").read_text().splitlines()
    assert started.startswith("tabular-seed0: started at step 0")
    assert ended.startswith("tabular-seed0: stopped at step ") and ended.endswith(f"| tba run {run.path}")


def test_seeds_become_a_job_each_after_another_run(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    (tmp_path / "model").mkdir()
    make_empty_model(tmp_path / "model")
    (tmp_path / "it.yaml").write_text(
        f"{{run: {{name: it}}, model: {{path: {tmp_path}/model}}, task: {{name: arithmetic}}}}"
    )
    (tmp_path / "site.yaml").write_text("{gpus_per_node: 1, cpus_per_node: 2, memory: '1000', time: '10'}")
    submit = partial(tba, "submit", "--config", "it.yaml", "--site", "site.yaml", "--nodes", 2)
    table = submit("--seeds", "0-1")
    assert table.returncode == 0, table.stderr
    head, *rows = table.stdout.splitlines()
    assert head.split() == ["job", "run"]
    assert [row.split()[1] for row in rows] == [f"{tmp_path}/runs/it-seed{seed}" for seed in (0, 1)]
    jobs = [row.split()[0] for row in rows]
    assert f"queue   squeue --jobs {','.join(jobs)}\n" in table.stderr
    assert f"compare tba compare {tmp_path}/runs/it-seed0 {tmp_path}/runs/it-seed1\n" in table.stderr
    answers = json.loads(submit("--seeds", "2,3", "--after", "runs/it-seed1", "--json").stdout)
    assert [answer["run"][-1] for answer in answers] == ["2", "3"]
    for answer in answers:
        assert cluster.jobs(int(answer["job"]))[0]["Dependency"].startswith(f"afterany:{jobs[1]}")
    twice = submit("--seeds", "4", "--config", "it.yaml")
    assert twice.returncode == 2 and f"two of these would be the run {tmp_path}/runs/it-seed4" in twice.stderr
    assert not (tmp_path / "runs/it-seed4").exists()
    cluster.run("scancel", jobs[1])
    late = submit("--seeds", "4", "--after", "runs/it-seed1")
    assert "no job of that run is queued or running" in late.stderr
