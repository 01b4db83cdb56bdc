"""``tba stop`` and ``tba cancel`` of runs on this machine, with real launchers.

Of Slurm jobs: slurm/test_commands.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tabular_run
from recorded import happen
from typed import tba
from waiting import until

from tba_hpc.launch import LaunchError, stop
from tba_hpc.run import owners
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.notes import at_work
from tba_hpc.run.owners import Owner, take_lease
from tests.test_local_launch import Launched, alive, config_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(config_of(tmp_path, "files"))


def up(run: RunDir, mode: str, *, interruptible: bool = True) -> Launched:
    """A launcher of three ranks that behave as ``mode`` says, and are at work."""
    launched = Launched(run.path.parent, mode, "files", interruptible=interruptible)
    launched.wait_for_ranks()
    until(lambda: (run.logs / "latest/at-work").exists())
    return launched


@pytest.fixture
def launched(run: RunDir) -> Iterator[list[Launched]]:
    """Those that a test has started; none outlives it."""
    made: list[Launched] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()


def events(run: RunDir) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_nobody_at_work_is_said_with_what_goes_on(run: RunDir) -> None:
    said = f"nobody is at work on {run.path}; to resume it: tba run {run.path}"
    assert stop.stop(run) == stop.cancel(run) == said
    happen(run, time.time(), "prepared", command="tba submit --config it --nodes 2")
    assert stop.cancel(run).endswith("to resume it: tba submit --config it --nodes 2"), "refused by Slurm"
    happen(run, time.time(), "prepared", command="tba submit --config it --nodes 3")
    happen(run, time.time(), "submitted", job="7")
    assert stop.stop(run).endswith("to resume it: tba submit --config it --nodes 3")
    run.mark_finished()
    assert stop.stop(run) == f"nobody is at work on {run.path}; it is finished"
    assert not list(run.owners.glob("*")), "a question leaves nothing behind"


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED"])
def test_a_batch_script_of_ones_own_that_is_queued_again_is_named(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Nothing but its events says that such a job is of this run."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '46|{state}|BeginTime|||12:00:00|0:00|(null)'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    happen(run, time.time(), "preempted", job="46")
    queued = stop.stop(run).endswith("; job 46 is queued, and goes on unless you type scancel 46")
    assert queued == (state == "PENDING")


def test_elastic_searchers_that_keep_their_nodes_are_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = take_lease(run, ["searcher-1000"])
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    of_job = [take_lease(run, [f"searcher-{place}"]) for place in (1001, 1002)]
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "49")
    of_array = []
    for task, job in (("10", "49"), ("9", "52")):  # the last task to start has the number of the array
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        monkeypatch.setenv("SLURM_JOB_ID", job)
        of_array.append(take_lease(run, [f"searcher-{1003 + int(task)}"]))
    leases = [lease for lease in (lone, *of_job, *of_array) if lease]
    ends = f"scancel 13 49_9 49_10; kill -USR1 {os.getpid()} (on {socket.gethostname()})"
    said = f"; 5 elastic searchers will stay and wait for that; to end them: {ends}"
    assert stop.stop(run).endswith(f"to resume it: tba run {run.path}{said}")
    run.mark_finished()
    assert stop.stop(run) == f"nobody is at work on {run.path}; it is finished", "they leave by themselves"
    for lease in leases:
        lease.release()
    assert len(leases) == 5


def test_stop_lets_a_run_here_checkpoint_and_end(run: RunDir, launched: list[Launched]) -> None:
    launched.append(up(run, "wait"))
    pid = launched[0].process.pid
    said = stop.stop(run)
    assert said.startswith(f"process {pid} on ") and said.endswith(f"to resume then: tba run {run.path}")
    assert stop.await_end(run, seconds=30) == f"{run.path} has ended: stopped at step 0"
    assert stop.await_end(run, seconds=30) == "", "nobody was at work"
    assert launched[0].process.wait(5) == 0
    assert events(run) == ["start", "signal", "stopped"]
    assert run.summary.exists(), "the trainer had the time to write"


@pytest.mark.parametrize("here", [True, False])
def test_a_run_in_a_job_is_stopped_for_good_from_any_machine(
    run: RunDir, launched: list[Launched], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """A signal would be Slurm's, after which its script queues it again. A second request does no harm."""
    with monkeypatch.context() as inside:
        inside.setenv("SLURM_JOB_ID", "46")
        launched.append(up(run, "wait"))
    if not here:
        monkeypatch.setattr(owners, "_machine", lambda: "another")
        with pytest.raises(LaunchError, match=r"log in to .* and type the same there$"):
            stop.cancel(run)
    for _ in range(2):
        assert f"process {launched[0].process.pid} on " in stop.stop(run)
    assert launched[0].process.wait(30) == 0
    assert events(run) == ["start", "signal", "stopped"] and run.summary.exists()
    assert not list(run.owners.glob("stop.*"))


def test_a_request_that_came_too_late_stops_no_later_start(run: RunDir, launched: list[Launched]) -> None:
    (run.owners).mkdir()
    (run.owners / "stop.000001").touch()
    with owners.owned(run):
        assert owners.is_asked_to_end(run)
    (run.owners / "stop.000001").touch()
    with owners.owned(run):
        assert not owners.is_asked_to_end(run)


def test_a_deadline_names_who_has_not_ended(run: RunDir, launched: list[Launched]) -> None:
    launched.append(up(run, "stubborn"))
    stop.stop(run)
    pid = launched[0].process.pid
    with pytest.raises(LaunchError, match=rf"process {pid} on .* after 0.3 s: .*: tba cancel {run.path}"):
        stop.await_end(run, seconds=0.3)


def test_cancel_ends_a_run_here_at_once(run: RunDir, launched: list[Launched]) -> None:
    launched.append(up(run, "wait"))
    ranks = launched[0].pids()
    said = stop.cancel(run)
    nothing = "nothing sealed is lost, and the run starts from step 0, as it has no checkpoint yet"
    assert said.endswith(f"{nothing}: tba run {run.path}")
    assert stop.at_work(run) is None and alive(ranks) == []
    assert events(run)[-1] == "aborted"
    assert not run.summary.exists(), "nobody had the time to write"


def test_cancel_kills_a_launcher_that_does_not_listen(
    run: RunDir, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "LAUNCHER_END_SECONDS", 0.5)
    launched.append(up(run, "stubborn", interruptible=False))
    ranks = launched[0].pids()
    stop.cancel(run)
    assert launched[0].process.wait(5) == -signal.SIGKILL
    until(lambda: alive(ranks) == [])
    assert events(run) == ["start", "aborted"]


def test_a_process_that_is_not_of_the_run_gets_no_signal(run: RunDir) -> None:
    """A file of a stranger's run directory may name any process of ours."""
    run.owners.mkdir()
    claim = run.owners / "launch.000001"
    with subprocess.Popen(["sleep", "60"]) as stranger:
        claim.write_text(replace(Owner.this(stranger.pid), holds=False).to_json())
        for ask in (stop.stop, stop.cancel):
            with pytest.raises(
                LaunchError, match=rf"process {stranger.pid} on .* does not seem to be at work"
            ):
                ask(run)
        claim.write_text(Owner.this(stranger.pid).to_json())
        for ask in (stop.stop, stop.cancel):
            assert ask(run).startswith("nobody is at work")
        assert stranger.poll() is None
        stranger.kill()


def test_the_launcher_of_a_run_is_not_that_of_a_copy(run: RunDir, launched: list[Launched]) -> None:
    """A copy made while the run is at work holds its claims, and is resumed beside it."""
    launched.append(up(run, "wait"))
    copy = RunDir(shutil.copytree(run.path, run.path.with_name("copy"), symlinks=True))
    for ask in (stop.stop, stop.cancel):
        assert ask(copy).startswith(f"nobody is at work on {copy.path}; to resume it: ")
    assert launched[0].process.poll() is None and stop.at_work(run)


def test_a_run_at_work_elsewhere_is_not_touched(run: RunDir) -> None:
    run.owners.mkdir()
    claim = run.owners / "launch.000001"
    claim.write_text(Owner(host="node7", machine="another", pid=4711, began=1, since=time.time()).to_json())
    for ask in (stop.stop, stop.cancel):
        with pytest.raises(
            LaunchError, match=r"process 4711 on node7, .*: log in to node7 and type the same"
        ):
            ask(run)


def test_a_job_that_nobody_here_knows_of_is_said_so(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text("7\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"job 7 may be at work on .* squeue does not answer here"):
        stop.stop(run)


def test_a_trainer_that_a_request_ends_before_it_obeys_leaves_no_mark_that_it_does(tmp_path: Path) -> None:
    """The launcher tells by the mark that such a trainer has not failed."""
    run = RunDir.create(tabular_run.make_config(tmp_path))
    process = tabular_run.start(run, searchers=1, sent=signal.SIGTERM, nth=12)
    process.join(240)
    assert process.exitcode == 0 and at_work(run.attempt)
    process = tabular_run.start(run, searchers=1, sent=signal.SIGTERM, nth=0)
    process.join(240)
    assert process.exitcode == -signal.SIGTERM and not at_work(run.attempt)


def test_the_commands_print_one_sentence(run: RunDir) -> None:
    for verb in ("stop", "cancel"):
        done = tba(verb, run.path, "--wait", 1)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("nobody is at work on ")
