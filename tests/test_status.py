"""How a run stands, as queue, events and metrics tell it, and how that is shown, on runs of a known past."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from recorded import evaluate, happen, new_run, resumed_run, save, search, step, write
from rich.console import Console
from typed import tba

from tba_hpc.config import FIRST_ELASTIC, ConfigError, parse_config
from tba_hpc.launch import stop
from tba_hpc.report.run_state import Queue, QueueEntry, RunMonitor, run_state
from tba_hpc.report.status import LiveDisplay, cells, facts, follow, panel, plain_line, print_status
from tba_hpc.report.summary import summary_of
from tba_hpc.report.tables import NOTHING
from tba_hpc.run import slurm_queue
from tba_hpc.run.directory import RunDir
from tba_hpc.run.owners import Owner, owned


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def no_job(_: RunDir) -> list[QueueEntry]:
    return []


def queue(*states: str, job: str = "7", reason: str = "Resources") -> Queue:
    """What squeue says of a job, a state per component."""
    plain = {"job": job, "reason": reason, "nodes": "node1", "start": "N/A", "left": "9:00"}
    return lambda _: [{**plain, "id": f"{job}+{i}", "state": state} for i, state in enumerate(states)]


def look(run: RunDir, asked: Queue = no_job) -> RunMonitor:
    """A monitor that has looked once."""
    monitor = RunMonitor(run, asked)
    monitor.update()
    return monitor


# --- How a run stands ---


def allocation(run: RunDir, *kinds: str, job: str = "7", restarts: int = 0, ago: float = 50.0) -> None:
    """Events of an allocation of a job, a second apart, the first of them ``ago`` seconds ago."""
    extras: dict[str, dict[str, object]] = {
        "allocated": {"nodes": "node1,node2,node3"},
        "start": {"attempt": f"attempt-{restarts + 1:03d}", "trainers": 1, "searchers": 2},
        "failed": {"code": 137},
        "refused": {"sentence": "the model is too large: take a smaller one"},
    }
    first = time.time() - ago
    for i, kind in enumerate(kinds):
        happen(run, first + i, kind, job=job, restarts=restarts, **extras.get(kind, {}))


def trained(run: RunDir, *, ago: float = 1.0) -> None:
    """Four optimizer steps, a second apart, the last of them ``ago`` seconds ago."""
    started = time.time() - ago - 4
    write(run.metrics_file("trainer"), [{"time": started, "event": "started", "step": 0}])
    write(run.metrics_file("trainer"), [step(s, started + s, seconds=1.0) for s in range(1, 5)])


TBA_RUN = "tba run {run}"
SUBMIT = "tba submit --config {run} --nodes 3"
STARTED = ("allocated", "start")


@pytest.mark.parametrize(
    ("asked", "kinds", "steps", "state", "words", "command"),
    [
        (no_job, (), False, "created", "not started yet", TBA_RUN),
        (queue("PENDING", "PENDING"), (), False, "queued", "queued (Resources)", ""),
        (queue("PENDING", reason="JobHeldUser"), (), False, "queued", "(JobHeldUser)", "scontrol release 7"),
        (queue("UNKNOWN"), (), False, "queued", "submitted as job 7", ""),
        (queue("RUNNING", "RUNNING"), (), False, "starting", "job 7 has its nodes, no word", ""),
        (queue("CANCELLED"), (), False, "gone", "job 7 is gone (cancelled)", "--nodes N"),
        (queue("FAILED"), (), False, "gone", "job 7 failed without a word: do its nodes see /", "--nodes N"),
        (queue("RUNNING"), ("allocated",), False, "starting", "checking which nodes", ""),
        (queue("RUNNING"), ("allocated", "unreachable"), False, "starting", "checking which nodes", ""),
        (queue("RUNNING"), ("allocated", "unhealthy"), False, "starting", "checking which nodes", ""),
        (queue("RUNNING"), STARTED, False, "starting", "starting ranks", ""),
        (queue("RUNNING", "RUNNING"), STARTED, True, "training", "training", ""),
        (queue("UNKNOWN"), STARTED, True, "training", "training", ""),
        (queue("SUSPENDED"), STARTED, True, "suspended", "suspended by Slurm at step 4", ""),
        (queue("RUNNING"), (*STARTED, "signal"), True, "stopping", "asked to stop", ""),
        (queue("RUNNING"), (*STARTED, "signal", "stopped"), True, "stopping", "leaving its nodes", ""),
        (
            *(queue("PENDING", "PENDING"), (*STARTED, "signal", "stopped", "requeue"), True, "requeued"),
            *("preempted or out of time, back in the queue at step 4 (Resources)", ""),
        ),
        (
            *(queue("PENDING"), (*STARTED, "stopped", "requeue"), True, "requeued"),
            *("the ranks were asked to stop, or out of time, back in the queue at step 4 (Resources)", ""),
        ),
        (
            *(queue("PENDING", "RUNNING"), STARTED, True, "requeued"),
            *("ended by Slurm (requeued, preempted or a node lost), back in the queue at step 4", ""),
        ),
        (
            queue("PENDING"),
            ("allocated", "unreachable", "requeue"),
            False,
            "requeued",
            "nodes unreachable, back in",
            "",
        ),
        (queue("RUNNING"), (*STARTED, "failed"), True, "relaunching", "failed after step 4", ""),
        (
            *(queue("FAILED"), ("allocated", *("start", "failed") * 3), True, "failed"),
            *("gave up: the ranks failed 3 times in a row, exit status 137; see", SUBMIT),
        ),
        (queue("FORGOTTEN"), (*STARTED, "refused"), False, "refused", "the model is too large", SUBMIT),
        (queue("TIMEOUT"), STARTED, True, "gone", "job 7 is gone (timeout), the run is at step 4", SUBMIT),
        (queue("FORGOTTEN"), STARTED, True, "gone", "job 7 is gone, the run", SUBMIT),
        (queue("COMPLETED"), (*STARTED, "signal", "stopped"), True, "stopped", "stopped at step 4", SUBMIT),
        (
            queue("COMPLETED"),
            ("allocated", "stopped", "signal"),
            False,
            "stopped",
            "as asked, at step 0",
            SUBMIT,
        ),
        (
            queue("COMPLETING"),
            (*STARTED, "finished"),
            True,
            "finished",
            "finished at step 4",
            "tba report {run}",
        ),
    ],
)
def test_how_a_submitted_run_stands(
    run: RunDir, asked: Queue, kinds: tuple[str, ...], steps: bool, state: str, words: str, command: str
) -> None:
    allocation(run, *kinds)
    if steps:
        trained(run)
    found = run_state(look(run, asked))
    assert found.state == state and words in found.words
    assert command.format(run=run.path) in found.command and bool(command) == bool(found.command)
    assert found.over == (state in ("created", "gone", "failed", "refused", "stopped", "aborted", "finished"))


def test_a_run_in_a_batch_script_of_ones_own_goes_on_if_that_queues_again(run: RunDir) -> None:
    happen(run, time.time() - 60, "start", job="7", attempt="attempt-001", trainers=1, searchers=1)
    trained(run)
    happen(run, time.time(), "stopped", job="7")
    happen(run, time.time(), "preempted", job="7")
    found = run_state(look(run, lambda _: []))
    why = "its job was preempted, cancelled or out of time"
    assert found.words == f"stopped at step 4, as {why}: unless that job is queued again, resume it"
    assert (found.state, found.command) == ("stopped", f"tba run {run.path}")


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        *[("PartitionTimeLimit", True), ("PartitionNodeLimit", True), ("QOSMaxNodePerJobLimit", True)],
        *[("AssocMaxWallDurationPerJobLimit", True), ("DependencyNeverSatisfied", True)],
        *[("QOSMaxNodePerUserLimit", False), ("AssocMaxJobsLimit", False), ("Priority", False)],
        *[("Dependency", False), ("ReqNodeNotAvail", False)],
    ],
)
def test_a_job_that_can_never_start_is_to_be_stopped(run: RunDir, reason: str, never: bool) -> None:
    found = run_state(look(run, queue("PENDING", reason=reason)))
    assert found.command == (f"tba stop {run.path}" if never else "")
    assert found.words.startswith(f"queued ({reason})") and ("will never start" in found.words) == never


def test_a_component_that_can_never_start_is_told_though_another_waits(run: RunDir) -> None:
    rows = queue("PENDING", "PENDING")(run)
    rows[1]["reason"] = "PartitionNodeLimit"
    assert run_state(look(run, lambda _: rows)).words.startswith(
        "queued (PartitionNodeLimit): the job will ne"
    )


def test_a_run_that_waits_for_a_reason_yet_unknown_names_none(run: RunDir) -> None:
    assert run_state(look(run, queue("PENDING", reason="None"))).words == "queued"


def test_a_run_whose_own_code_was_refused_is_not_started_with_its_copy(run: RunDir) -> None:
    """Its sentence says to start from the config, which takes the code as it is now."""
    allocation(run, *STARTED, "refused")
    assert run_state(look(run, queue("FORGOTTEN"))).command
    run.modules.mkdir()
    found = run_state(look(run, queue("FORGOTTEN")))
    assert (found.state, found.command) == ("refused", "")


@pytest.mark.parametrize(
    ("kinds", "state", "command"),
    [
        (("start",), "training", ""),
        (("start", "signal", "stopped"), "stopped", TBA_RUN),
        (("start", "signal", "stopped", "preempted"), "stopped", TBA_RUN),
        (("start", "signal", "aborted"), "aborted", TBA_RUN),
        (("start", "failed"), "failed", TBA_RUN),
        (("start", "finished"), "finished", "tba report {run}"),
    ],
)
def test_a_run_on_this_machine_is_not_judged_by_an_older_job(
    run: RunDir, kinds: tuple[str, ...], state: str, command: str
) -> None:
    allocation(run, "allocated", "start", "failed", ago=500.0)
    allocation(run, *kinds, job="")
    trained(run)
    monitor = look(run, queue("FAILED"))
    found = run_state(monitor)
    assert (found.state, found.command) == (state, command.format(run=run.path))
    assert "job" not in facts(monitor, found)


def test_a_job_of_the_tool_is_submitted_again_as_it_was(run: RunDir) -> None:
    again = "python tools/submit.py --config '/my runs/known' --nodes 3 --homogeneous"
    happen(run, time.time() - 5000, "prepared", command=again)
    happen(run, time.time() - 5000, "submitted", job="7")
    for state in ("PENDING", "UNKNOWN"):
        waiting = run_state(look(run, queue(state)))
        assert waiting.state == "queued" and "nothing heard" not in waiting.words, "no rank was started yet"
    assert run_state(look(run, queue("CANCELLED"))).command == again
    allocation(run, *STARTED)
    assert run_state(look(run, queue("TIMEOUT"))).command == again
    allocation(run, *STARTED, job="8")  # by hand
    assert run_state(look(run, queue("TIMEOUT", job="8"))).command == again


def test_the_last_failure_is_shown_with_its_reason_once_the_ranks_were_started_again(run: RunDir) -> None:
    happen(run, time.time() - 60, "start", attempt="attempt-001", trainers=1, searchers=2)
    happen(run, time.time() - 30, "failed", code=1, sentence="searcher 1 is silent")
    monitor = look(run)
    assert "last failure" not in facts(monitor, run_state(monitor)), "the state says it"
    monitor = look(run, queue("RUNNING"))
    assert facts(monitor, run_state(monitor))["last failure"].endswith("searcher 1 is silent")
    happen(run, time.time() - 20, "start", attempt="attempt-002", trainers=1, searchers=2)
    monitor = look(run)
    assert facts(monitor, run_state(monitor))["last failure"] == "attempt-001: searcher 1 is silent"
    run.mark_finished()
    assert "last failure" not in facts(look(run), run_state(look(run)))


def test_when_slurm_expects_a_job_to_start_is_shown(run: RunDir) -> None:
    asked = queue("PENDING")
    monitor = look(run, lambda of: [{**entry, "start": "2026-12-01T08:00:00"} for entry in asked(of)])
    assert facts(monitor, run_state(monitor))["trainers"] == "PENDING node1, expected by 2026-12-01 08:00:00"


def test_a_new_job_is_not_judged_by_what_befell_the_one_before(run: RunDir) -> None:
    allocation(run, "allocated", "start", "failed")
    monitor = look(run, queue("PENDING", job="8"))
    assert run_state(monitor).state == "queued" and facts(monitor, run_state(monitor))["job"] == "8"
    found = run_state(look(run, queue("CANCELLED", job="8")))
    assert (found.state, found.words) == ("gone", "job 8 is gone (cancelled), the run is at step 0")


def test_a_job_that_failed_on_a_full_disk_is_told_so(run: RunDir) -> None:
    monitor = look(run, queue("FAILED"))
    monitor.full = True
    assert run_state(monitor).words == "job 7 is gone (failed), the run is at step 0; the disk is full"


def test_silence_beyond_every_deadline_is_a_hint(run: RunDir) -> None:
    allocation(run, "allocated", "start", ago=800.0)
    trained(run, ago=700.0)
    found = run_state(look(run, queue("RUNNING")))
    assert (found.state, found.words) == ("training", "training; nothing heard for 12 min: was it killed?")
    assert found.command == f"tail {run.logs}/latest/*.log"


def test_a_trainer_that_stands_still_while_searchers_work_is_told(run: RunDir) -> None:
    allocation(run, "allocated", "start", ago=800.0)
    trained(run, ago=700.0)
    searched = {"search/version": 4, "search/trajectories": 8, "search/reward": 0.5}
    write(run.metrics_file("searcher", 0), [{**searched, "time": time.time() - 400}])
    assert not look(run, queue("RUNNING")).standstill, "the searcher is as silent"
    write(run.metrics_file("searcher", 0), [{**searched, "time": time.time()}])
    monitor = look(run, queue("RUNNING"))
    found = run_state(monitor)
    assert (found.state, found.words) == ("training", "training, but no step has ended for 12 min")
    assert found.command == f"tail {run.logs}/latest/*.log" and monitor.is_silent
    write(run.metrics_file("trainer"), [step(10, time.time() - 700.0)])
    assert not look(run, queue("RUNNING")).standstill, "no step is left"
    trained(run, ago=100.0)
    assert run_state(look(run, queue("RUNNING"))).words == "training"


def test_a_lack_of_space_is_said_with_the_end_of_the_wait_until_a_checkpoint_is_complete(run: RunDir) -> None:
    happen(run, time.time() - 9, "start", attempt="attempt-001", trainers=1, searchers=2)
    trained(run)
    left_out = {"event": "postponed", "step": 4, "fault": "No space left on device"}
    write(run.metrics_file("trainer"), [{**left_out, "time": time.time()}])
    assert run_state(look(run)).words == "training; no space for the checkpoint of step 4"
    until = time.time() + 30
    write(run.metrics_file("trainer"), [{**left_out, "time": time.time(), "until": until}])
    clock = time.strftime("%H:%M:%S", time.localtime(until))
    found = run_state(look(run))
    assert (found.state, found.words) == (
        "training",
        f"training; the disk is full, and the trainer waits for space until {clock} at the latest",
    )
    assert f"waits for space until {clock} at the latest · step 4/10" in plain_line(look(run))
    save(run, time.time(), 4)
    assert run_state(look(run)).words == "training"
    write(run.metrics_file("trainer"), [{**left_out, "time": time.time()}])
    happen(run, time.time() + 1, "start", attempt="attempt-002", trainers=1, searchers=2)
    assert "space" not in run_state(look(run)).words, "that was the attempt before"
    write(run.metrics_file("trainer"), [{"time": time.time() + 2, "event": "resumed", "step": 2}])
    assert "postponed" not in facts(look(run), run_state(look(run)))


def test_an_extended_run_shows_its_newest_evaluation_and_older_scores_with_their_step(run: RunDir) -> None:
    """The first end was at step 4; answers have 18 tokens in each evaluation."""
    for at, ref_logprob in ((0, -9.0), (4, -4.5)):
        evaluate(run, "test", at, (20, 21), ref_logprob=ref_logprob)
    evaluate(run, "validation", 6, (30, 30), ref_logprob=-1.8)
    write(run.metrics_file("trainer"), [step(8, time.time())])
    shown = cells(look(run))
    assert shown["validation win rate"] == "60.0 % (step 6)" and shown["test"] == "41.0 % → 41.0 % (step 4)"
    assert shown["perplexity"] == "1.221"  # exp(2 · 1.8 / 18)
    evaluate(run, "test", 8, (40, 40), ref_logprob=-0.9)
    shown = cells(look(run))
    assert (shown["test"], shown["perplexity"]) == ("41.0 % → 80.0 %", "1.105")


# --- What is folded from growing files ---


def test_the_view_follows_a_run_through_its_phases(run: RunDir) -> None:
    now = time.time()
    happen(run, now - 65, "start", attempt="attempt-001", trainers=1, searchers=2)
    monitor = look(run)
    trainer = run.metrics_file("trainer")
    assert run_state(monitor).words == "starting ranks, which import their libraries"
    write(trainer, [{"time": now - 40, "event": "filling", "step": 0, "buffer/size": 312}])
    monitor.update()
    assert plain_line(monitor).endswith("] filling the buffer 312/500")
    write(trainer, [{"time": now - 40, "event": "filling", "step": 0, "buffer/size": 520}])
    monitor.update()
    filled = run_state(monitor).words
    assert re.fullmatch(r"the buffer is filled, first optimizer step \((40|41|42) s\)", filled), filled
    evaluate(run, "test", 0, (20, 21))
    write(trainer, [step(s, now - 40 + 10 * s, loss=0.25, seconds=10.0) for s in (1, 2, 3)])
    write(run.metrics_file("searcher", 1), [search(now, 5, 1234.0)])
    write(run.metrics_file("searcher", 0), [search(now, 5, 2345.0)])
    monitor.update()
    assert (monitor.step, monitor.eta) == (3, pytest.approx(70.0))
    line = plain_line(monitor)
    assert "] training · step 3/10 · test before 41.0 % · reward 0.500 · loss 0.2500 · staleness 2.0" in line
    assert line.endswith("tokens/s 2,345 + 1,234")
    write(trainer, [{"time": now, "event": "waiting", "step": 3}])
    monitor.update()
    assert plain_line(monitor).partition("] ")[2].startswith("training waits for completions: none came for")
    write(trainer, [{"time": now, "event": "finished", "step": 10}])
    monitor.update()
    assert run_state(monitor).words == "last step done, final evaluation"
    evaluate(run, "test", 10, (45, 45))
    monitor.update()
    assert run_state(monitor).words == "last step done, writing the results"
    run.mark_finished()
    assert run_state(monitor).words.startswith("finished at step 10")
    assert "test 41.0 % → 90.0 %" in plain_line(monitor)


def test_runs_of_a_folder_have_a_line_each(tmp_path: Path) -> None:
    """One trains, one has finished, one is of a version to come."""
    runs = [new_run(tmp_path, seed=seed) for seed in range(3)]
    evaluate(runs[0], "test", 0, (20, 21))
    happen(runs[0], time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
    write(runs[0].metrics_file("trainer"), [step(s, time.time(), seconds=1.0) for s in (1, 2, 3)])
    evaluate(runs[1], "test", 0, (20, 21))
    evaluate(runs[1], "test", 10, (45, 45))
    runs[1].mark_finished()
    (runs[2].path / "format").write_text("99\n")
    training, finished, other = tba("status", tmp_path).stdout.splitlines()
    assert training == "known-seed0: training · step 3/10 · test before 41.0 %"
    assert finished == "known-seed1: finished at step 0 · test 41.0 % → 90.0 %"
    assert other.startswith("known-seed2: ") and "99" in other


def test_a_clock_that_was_set_back_changes_no_word_and_no_rate(run: RunDir) -> None:
    """By an hour, ten steps of a second into the run, which had begun a minute before them."""
    before = time.time() + 3600 - 30  # as the clock was
    happen(run, before - 60, "start", attempt="attempt-001", trainers=1, searchers=2)
    ticks = [*(before + s for s in range(10)), *(time.time() - 10 + s for s in range(10))]
    started = {"event": "started", "step": 0}
    write(run.metrics_file("trainer"), [{**started, "time": before - 1}])
    write(run.metrics_file("trainer"), [step(s, at, seconds=1.0) for s, at in enumerate(ticks, start=1)])
    for index in (0, 1):
        write(run.metrics_file("searcher", index), [{**started, "time": before - 1}])
        write(run.metrics_file("searcher", index), [search(at, 50, 50.0) for at in ticks])
    monitor = look(run)
    assert run_state(monitor).words == "training" and monitor.rates == [50.0, 50.0]
    found = summary_of(monitor)
    assert found.searcher_seconds == pytest.approx(2 * 19, abs=0.1)  # the second of the jump is unknown
    assert found.train_seconds == pytest.approx(19, abs=0.1) and found.goodput == 0
    happen(run, time.time(), "finished")
    assert summary_of(look(run)).ettr is None


def test_a_run_whose_launcher_was_killed_is_over_at_once(run: RunDir) -> None:
    happen(run, time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
    write(run.metrics_file("trainer"), [step(3, time.time())])
    with owned(run):
        assert run_state(look(run)).state == "training"
    gone = subprocess.Popen(["true"])
    gone.wait()
    (claim,) = run.owners.iterdir()
    claim.write_text(Owner.this(gone.pid).to_json())
    found = run_state(look(run))
    assert (found.state, found.over, found.command) == ("gone", True, f"tba run {run.path}")
    killed = "killed at step 3, or its machine was lost"
    assert found.words == f"{killed}; to start again from step 0: {found.command}"
    save(run, time.time(), 3)
    assert run_state(look(run)).words == f"{killed}; to resume from the last checkpoint: {found.command}"
    assert run_state(look(run, queue("RUNNING"))).state != "gone", "it has a job now"


def test_a_run_that_was_made_for_sbatch_is_not_to_train_here(run: RunDir) -> None:
    happen(run, time.time(), "prepared", command="tba submit --config it")
    found = run_state(look(run))
    assert (found.state, found.command) == ("created", "tba submit --config it")


def test_the_wait_after_a_start_is_told_from_one_amid_steps(run: RunDir) -> None:
    resumed_run(run)
    write(
        run.metrics_file("trainer"),
        [{"time": 5000.0 + i, "event": kind, "step": 10} for i, kind in enumerate(("resumed", "waiting"))],
    )
    assert run_state(look(run)).words.startswith("training waits for completions: the first since the start")


def test_an_attempt_starts_with_the_step_and_the_pace_of_the_steps_that_count(run: RunDir) -> None:
    resumed_run(run)
    save(run, 4700.0, 10)
    happen(run, 5000.0, "start", attempt="attempt-003", trainers=1, searchers=2)
    monitor = look(run)
    assert (monitor.phase, monitor.step, monitor.eta, monitor.rates) == ("", 10, None, [])
    write(
        run.metrics_file("trainer"),
        [{"time": 5001.0, "event": "resumed", "step": 4}, step(5, 5002.0, seconds=15.0)],
    )
    monitor.update()
    assert (monitor.phase, monitor.step, monitor.eta) == ("training", 5, 5 * 55 / 5)


def test_after_a_crash_a_run_is_at_its_last_checkpoint_once_it_starts_again(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(run)
    save(run, time.time() - 2, 3)

    def shown() -> tuple[int, str]:
        print_status(run, no_job, as_json=True)
        print_status(run, no_job, console=Console(width=200))
        figures, _, lines = capsys.readouterr().out.partition("\n}\n")
        found = re.search(r"^step +(\d+/\d+)", lines, re.MULTILINE)
        return json.loads(figures + "}")["step"], found[1] if found else lines

    assert shown() == (4, "4/10"), "the checkpoint took a step to write"
    happen(run, time.time() - 1, "failed", code=137)
    assert shown() == (4, "4/10")
    happen(run, time.time(), "start", attempt="attempt-002", trainers=1, searchers=2)
    assert shown() == (3, "3/10")
    save(run, time.time(), 4, recorded=False)
    assert shown() == (4, "4/10"), "the trainer was killed before it could record this checkpoint"
    assert (look(run).repeated, facts(look(run), run_state(look(run)))["checkpoint"]) == (0, "step 4")


@pytest.mark.parametrize(
    ("start", "words"),
    [(10, "job 7 has its nodes again, no word from it yet"), (-60, "stopped at step 4, leaving its nodes")],
)
def test_a_job_that_leaves_its_nodes_is_told_from_one_that_has_them_again(
    run: RunDir, start: int, words: str
) -> None:
    """start: seconds from the last event until Slurm started the job."""
    allocation(run, *STARTED, "signal", "stopped", "requeue", ago=60.0)
    trained(run, ago=59.0)
    last = look(run).events[-1]["time"]
    began = {"start": datetime.fromtimestamp(last + start).isoformat(timespec="seconds")}
    asked = [component | began for component in queue("RUNNING", "RUNNING")(run)]
    assert run_state(look(run, lambda _: asked)).words == words


def test_an_elastic_searcher_that_has_left_shows_no_speed(run: RunDir) -> None:
    happen(run, time.time() - 65, "start", attempt="attempt-001", trainers=1, searchers=2)
    for index, rate in ((0, 197.0), (FIRST_ELASTIC, 0.0)):
        write(run.metrics_file("searcher", index), [search(time.time(), 5, rate)])
    monitor = look(run)
    assert monitor.rates == [197.0]
    monitor.elastic = {FIRST_ELASTIC: Owner(pid=1)}
    assert monitor.rates == [197.0, 0.0]


def test_an_elastic_searcher_that_has_just_come_has_no_speed_yet(run: RunDir) -> None:
    write(run.metrics_file("searcher", FIRST_ELASTIC), [search(time.time() - 20, 5, 2916.0)])
    monitor = look(run)
    monitor.elastic = {FIRST_ELASTIC: Owner(pid=1, host="n4", since=time.time() - 30)}
    assert facts(monitor, run_state(monitor))["elastic"].endswith(", 2,916 tokens/s")
    monitor.elastic = {FIRST_ELASTIC: Owner(pid=2, host="n4", since=time.time() - 5)}
    assert facts(monitor, run_state(monitor))["elastic"] == "searcher 5000 on n4 for 0:05"
    assert monitor.rates == []
    engine = {"time": time.time() - 2, "event": "engine", "stage": "importing"}
    write(run.metrics_file("searcher", FIRST_ELASTIC), [engine])
    monitor.update()
    assert facts(monitor, run_state(monitor))["elastic"].endswith("on n4 for 0:05, importing")


def test_engines_say_how_far_their_start_is(run: RunDir) -> None:
    """Of this attempt, and until something is generated; a record of a searcher is no completion."""
    now, trainer = time.time(), run.metrics_file("trainer")
    first, second = run.metrics_file("searcher", 0), run.metrics_file("searcher", 1)
    happen(run, now - 65, "start", attempt="attempt-001", trainers=1, searchers=2)
    monitor = look(run)

    def words() -> str:
        monitor.update()
        return run_state(monitor).words

    for path in (first, second):
        engine = {"time": now - 20, "event": "engine", "stage": "importing"}
        again = engine | {"time": now - 16}  # two parts of a searcher log the first stage
        write(path, [{"time": now - 48, "event": "started"}, engine, again, search(now - 15, 0, 0.0)])
    assert re.fullmatch(r"engines: 0 of 2 ready \(importing, (20|21) s\)", words())
    for path, age in ((first, 6), (second, 5)):
        write(path, [{"time": now - age, "event": "engine", "stage": "ready"}])
    assert re.fullmatch(r"engines are up, waiting for the trainer to load its model \((5|6) s\)", words())
    for path in (first, second):
        write(path, [{"time": now - 20, "event": "engine", "stage": "importing"}])
    write(trainer, [{"time": now - 47, "event": "started", "step": 0}])
    assert re.fullmatch(r"engines: 0 of 2 ready \(importing, (20|21) s\)", words())
    write(first, [{"time": now - 10, "event": "engine", "stage": "ready"}])
    write(second, [{"time": now - 10, "event": "engine", "stage": "capturing graphs"}])
    assert words().startswith("engines: 1 of 2 ready (capturing graphs, ")
    write(second, [{"time": now - 5, "event": "engine", "stage": "ready"}])
    assert re.fullmatch(r"engines are up, waiting for the first weights and completions \((5|6) s\)", words())
    write(first, [search(now, 5, 9.0)])
    assert words() == "first completions arrive: evaluating before training"
    happen(run, now + 1, "failed")
    happen(run, now + 2, "start", attempt="attempt-002", trainers=1, searchers=2)
    assert words() == "starting ranks, which import their libraries"


def test_a_run_whose_searchers_are_all_elastic_speaks_of_those_present(tmp_path: Path) -> None:
    """Also of their engines, and of an attempt for which they have not generated anything yet."""
    launch = {"searchers": 0, "elastic": 2}
    tree = {"run": {"root": str(tmp_path)}, "model": {"path": "models/<tiny>"}, "launch": launch}
    run = RunDir.create(parse_config(tree))
    now, slot = time.time(), run.metrics_file("searcher", FIRST_ELASTIC)
    happen(run, now - 65, "start", attempt="attempt-001", trainers=1, searchers=0)
    monitor = look(run)

    def words() -> str:
        monitor.update()
        return run_state(monitor).words

    assert words() == "the trainer starts"
    write(run.metrics_file("trainer"), [{"time": now - 60, "event": "started", "step": 0}])
    waiting = "waiting for an elastic searcher (tba search RUN, or on Slurm tba submit --elastic RUN)"
    assert words() == waiting
    write(slot, [{"time": now - 55, "event": "engine", "stage": "ready"}])
    assert words() == waiting, "that one was killed"
    monitor.elastic = {FIRST_ELASTIC: Owner(pid=1, since=now - 50)}
    assert words() == "starting ranks, which import their libraries"
    loading = {"time": now - 40, "event": "engine", "stage": "loading the model"}
    write(slot, [{"time": now - 45, "event": "started"}, loading])
    assert words().startswith("engines: 0 of 1 ready (loading the model, 4")
    write(slot, [{"time": now - 35, "event": "engine", "stage": "ready"}])
    assert words().startswith("engines are up, waiting for the first weights and completions (3")
    write(slot, [search(now, 5, 9.0)])
    assert words() == "first completions arrive: evaluating before training"
    save(run, now, 3)
    happen(run, now + 1, "failed")
    happen(run, now + 2, "start", attempt="attempt-002", trainers=1, searchers=0)
    write(slot, [search(now + 3, 6, 9.0)])
    assert words() == "the trainer starts (resuming at step 3)"
    write(run.metrics_file("trainer"), [{"time": now + 4, "event": "resumed", "step": 3}])
    assert words() == "first completions arrive: training resumes at step 3"
    write(run.metrics_file("trainer"), [step(4, now + 5), {"time": now + 16, "event": "waiting", "step": 4}])
    assert words() == "training waits for completions: none came for a while" and monitor.eta is None
    monitor.elastic = {}
    assert words() == f"training {waiting.replace('waiting', 'waits')}"
    assert facts(monitor, run_state(monitor))["elastic"] == "no searcher is present"
    monitor._opened, monitor.trainer.latest["time"] = now, now - 1500
    monitor.events[-1]["time"] = now - 1500
    assert monitor.silence == pytest.approx(1500, abs=20) and not monitor.is_silent, "it may take an hour"


def test_faults_of_all_attempts_are_counted(run: RunDir) -> None:
    first = "allocated orphan start failed start"  # the last has no end of its own
    second = "allocated unreachable start hung failed start signal stopped requeue"
    allocation(run, *first.split(), ago=90.0)
    allocation(run, *second.split(), restarts=1)
    started = {"time": time.time(), "event": "started"}
    first, second = run.metrics_file("searcher", 0), run.metrics_file("searcher", 1)
    write(first, [started, search(1.0, 1, 1), search(2.0, 1, 1, rebuilds=2), started, search(3.0, 1, 1)])
    quiet = [search(float(i), 1, 1) for i in range(100)]
    write(second, [*quiet, search(100.0, 1, 1, rebuilds=1), started, *quiet])
    damaged = {"time": time.time(), "event": "damaged", "step": 4, "checkpoint": "step-000004", "fault": "…"}
    write(run.metrics_file("trainer"), [damaged])
    monitor = look(run)
    write(first, [search(4.0, 1, 1, rebuilds=1)])
    monitor.update()
    assert monitor.searchers[1].last["time"] == 99.0
    counts = {"rebuilds": 4, "failed": 2, "killed": 1, "unreachable": 1, "hung": 1, "orphan": 1}
    met = {kind: times for kind, times in monitor.faults.items() if times}
    assert met == {**counts, "damaged": 1, "requeue": 1}
    assert facts(monitor, run_state(monitor))["damaged"] == "step-000004: …"
    assert facts(monitor, run_state(monitor))["faults"].startswith(
        "4 × engine rebuilt · 1 × damaged checkpoint set aside · 2 × ranks failed"
    )


def test_a_searcher_that_fell_silent_counts_no_longer(run: RunDir) -> None:
    write(run.metrics_file("searcher", 0), [search(time.time() - 100, 5, 2345.0)])
    write(run.metrics_file("searcher", 1), [search(time.time(), 5, 1234.0)])
    assert look(run).rates == [1234.0]


def test_slurm_is_asked_once_in_ten_seconds(run: RunDir) -> None:
    asked = []
    monitor = RunMonitor(run, lambda run: asked.append(run) or [])
    monitor.update()
    monitor.update()
    assert asked == [run]


# --- How it is shown ---


def busy_run(run: RunDir) -> Queue:
    """A run with something to say under every title."""
    resumed_run(run)
    allocation(run, "allocated", "start", "failed", "start")
    save(run, time.time() - 65, 3)
    trained(run)
    return queue("RUNNING", "RUNNING")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_shows_every_value_at_any_width(run: RunDir, width: int) -> None:
    monitor = look(run, busy_run(run))
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(panel(monitor))
    shown = console.file.getvalue()
    assert all(value in shown for value in cells(monitor).values())
    told = facts(monitor, run_state(monitor))
    lasting = [told[title] for title in ("attempt", "trainers", "searchers", "faults", "ETTR")]
    assert all(word in shown for value in lasting for word in value.split())
    assert max(map(len, shown.splitlines())) <= width


def test_once_prints_a_line_per_value_unbroken(run: RunDir) -> None:
    out = io.StringIO()
    print_status(run, busy_run(run), console=Console(file=out, width=40))
    lines = dict(line.split(maxsplit=1) for line in out.getvalue().splitlines())
    assert lines["run"] == str(run.path) and lines["state"] == "training"
    assert lines["step"] == "4/10, 0:06 left"
    assert (
        lines["attempt"] == "attempt-001, 1 trainer + 2 searcher ranks" and lines["job"] == "7, restarts: 0"
    )
    assert lines["trainers"] == "RUNNING node1, 9:00 left" == lines["searchers"]
    assert lines["ETTR"].endswith("% of the time, waits included") and "ETTR" not in plain_line(look(run))
    assert lines["checkpoint"].startswith("step 3, 1:0") and lines["faults"] == "1 × ranks failed"


def test_the_display_shows_fresh_completions_and_alerts(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch is of distinct and chosen completions: its reward is not how well the policy does."""
    now, kind = time.time(), {"version": 2}
    write(run.metrics_file("trainer"), [{**step(s, now, loss=1.0), "train/reward": 0.44} for s in (1, 2)])
    write(run.metrics_file("searcher", 0), [search(now, 5, 9.0, **kind, reward=1.0, kl=3.0, trajectories=30)])
    write(run.metrics_file("searcher", 1), [search(now, 5, 9.0, **kind, reward=0.8, kl=1.0, trajectories=10)])
    shown = cells(look(run))
    assert (shown["reward"], shown["KL"], shown["entropy"]) == ("0.950", "2.50", NOTHING)
    assert not {"alerts", "set aside"} & facts(look(run), run_state(look(run))).keys()
    write(run.metrics_file("searcher", 1), [search(now, 5, 9.0, **kind, rejected=60)])
    monitor = look(run)
    told = facts(monitor, run_state(monitor))
    assert told["set aside"] == "60 trajectories"
    alert = "60 trajectories (58 %) set aside without a reward (see tba logs RUN --rank searcher-0)"
    assert told["alerts"] == alert and plain_line(monitor).endswith(f" · alert: {alert}")
    print_status(run, no_job, as_json=True)
    found = json.loads(capsys.readouterr().out)
    summary = found["summary"]
    assert (found["last_step"]["train/reward"], summary["rejected"], summary["skipped_steps"]) == (
        0.44,
        60,
        0,
    )
    assert summary["alerts"][-1].startswith("60 trajectories (58 %) set aside")


def test_json_holds_numbers(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(run, busy_run(run), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["steps"], found["attempt"], found["restarts"]) == (
        *("training", 4, 10, "attempt-001", 0),
    )
    summary = found["summary"]
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (0.41, 0.85)
    assert found["last_step"]["staleness/mean"] == 2.0
    assert found["seconds_left"] == pytest.approx(6.0) and found["checkpoint_step"] == 3
    assert found["checkpoint_age_seconds"] == pytest.approx(65, abs=30) and found["command"] is None
    assert [component["state"] for component in found["job"]] == ["RUNNING", "RUNNING"]
    assert found["over"] is False
    assert found["faults"]["failed"] == 1 and found["faults"]["rebuilds"] == 0


def test_without_a_terminal_the_display_is_plain_lines(run: RunDir) -> None:
    out = io.StringIO()
    with LiveDisplay(run, console=Console(file=out, width=60)) as display:
        display.refresh()
        display.note("a note")
        write(
            run.metrics_file("trainer"),
            [step(10, time.time()), {"time": time.time(), "event": "stopped", "step": 10}],
        )
    assert (
        out.getvalue() == "a note\n[0:00] stopped at step 10, waiting for the ranks to end · staleness 2.0\n"
    )


def test_that_a_run_has_finished_is_printed_once_though_its_ranks_take_their_time(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_hpc.report.status.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("tba_hpc.report.status.LINE_SECONDS", 0.0)
    happen(run, time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
    write(run.metrics_file("trainer"), [step(10, time.time())])
    out = io.StringIO()
    with LiveDisplay(run, console=Console(file=out, width=60)) as display:
        display.refresh()
        run.mark_finished()
        for _ in range(3):
            display.refresh()
    assert [line.split("] ")[1].split(" · ")[0] for line in out.getvalue().splitlines()] == [
        "training",
        "finished at step 10, waiting for its ranks to end",
    ]


def test_on_a_terminal_the_display_is_redrawn_and_leaves_one_line(run: RunDir) -> None:
    happen(run, time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with LiveDisplay(run, console=console) as display:
        display.refresh()
    assert "starting ranks, which import their libraries" in out.getvalue() and "0/10" in out.getvalue()
    assert out.getvalue().endswith("[0:00] starting ranks, which import their libraries\n")
    assert "\x1b[?1049h" not in out.getvalue()  # no alternate screen: what was shown stays in the scrollback


def test_following_ends_when_it_is_the_users_turn(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    allocation(run, "allocated", "start", "signal", "stopped")
    follow(run, queue("COMPLETED"))
    assert capsys.readouterr().out.endswith(f"\nnext: {SUBMIT.format(run=run.path)}\n")


# --- Where Slurm does not answer ---


@pytest.mark.parametrize("script", [None, "exec sleep 60", "echo 'error: no controller' >&2; exit 1"])
def test_a_job_is_in_an_unknown_state_where_squeue_does_not_answer(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    assert slurm_queue.job_states(run) == [], "it was never submitted"
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text("7\n")
    (tmp_path / "bin").mkdir()
    if script:
        (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin" + ":/bin" * bool(script))
    monkeypatch.setattr(slurm_queue, "SQUEUE_SECONDS", 0.3)
    assert [component["state"] for component in slurm_queue.job_states(run)] == ["UNKNOWN"]


def test_whoever_stops_or_submits_a_run_waits_for_a_slow_squeue(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text("7\n")
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nsleep 0.4; echo '7|RUNNING|None|n1||||{run.path}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm_queue, "SQUEUE_SECONDS", 0.1)
    assert [row["state"] for row in slurm_queue.job_states(run)] == ["UNKNOWN"], "a display does not wait"
    running = slurm_queue.ActiveJob("7", "RUNNING")
    assert slurm_queue.active_job(run) == running == stop.at_work(run)


@pytest.mark.parametrize("name", ["metrics/searcher-0000.jsonl", "events.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(run: RunDir, name: str, kind: str) -> None:
    write(run.metrics_file("trainer"), [step(1, 5.0)])
    os.mkfifo(run.metrics / "trainer.digest.json")
    assert look(run).step == 1
    if kind == "pipe":
        os.mkfifo(run.path / name)
    else:
        (run.path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        look(run)


def test_lines_that_are_no_events_are_passed_over(run: RunDir) -> None:
    happen(run, time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
    for line in ({"event": "failed", "job": "x"}, {"time": "x"}, {"time": 1.0, "event": 7}):
        write(run.events_file, [{"time": time.time(), "restarts": 0, "job": "", **line}])
    monitor = look(run, queue("RUNNING"))
    assert len(monitor.events) == 1 and run_state(monitor).state == "starting"


def test_a_wait_for_space_that_is_over_is_given_no_end(run: RunDir) -> None:
    seconds = run.config().launch.disk_seconds
    waits = f"; the disk is full, and each rank waits for space for up to {seconds:g} s"
    for waited, words in ((0.0, "; the disk is full"), (0.5, waits), (1.2, "; the disk is full")):
        begun = time.time() - waited * run.config().launch.disk_seconds
        happen(run, begun, "start", attempt="attempt-001", trainers=1, searchers=2)
        write(run.metrics_file("trainer"), [step(3, begun)])
        monitor = look(run)
        monitor.full = True
        assert words in run_state(monitor).words
        assert (waits in run_state(monitor).words) == (words == waits)
        run.events_file.unlink()
        run.metrics_file("trainer").unlink()
    assert run_state(monitor).words.endswith(words)


@pytest.mark.parametrize("job", ["", "50", "49_1"])
def test_events_of_every_kind_of_job_are_read(run: RunDir, job: str) -> None:
    now = time.time()
    line = {"time": now, "restarts": 0, "job": job}
    write(
        run.events_file, [{**line, "event": "start", "attempt": "attempt-001"}, {**line, "event": "failed"}]
    )
    assert [event["event"] for event in look(run).events] == ["start", "failed"]
