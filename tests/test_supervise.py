"""What a batch script does next, decided from the files of the run and what the script tells."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.config import FIRST_ELASTIC, parse_config
from tba_hpc.launch import supervise
from tba_hpc.report.attempts import attempts
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.owners import owned

POLICY = {"relaunches": 2, "save_seconds": 60, "requeue": "yes"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that job 7 has begun."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    made = RunDir.create(
        parse_config(
            {
                "run": {"root": str(tmp_path)},
                "model": {"path": "none"},
                "train": {"prompts_per_step": 12},
                "launch": {"elastic": 1},
            }
        )
    )
    (made.path / "slurm").mkdir()
    for mark in ("allocated", "start", "asked"):
        _touch(made.path / "slurm" / mark, 10)
    made.begin_attempt()
    return made


def _touch(path: Path, at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (at, at))


def _next(run: RunDir, stage: str, **facts: object) -> str:
    """The answer at a stage."""
    words = [f"{key}={value}" for key, value in (POLICY | facts).items()]
    return supervise.STAGES[stage](supervise.JobState.read(run.path, words)).strip()


def _events(run: RunDir) -> list[str]:
    return [event["event"] for event in read_events(run)]


def _command(run: RunDir, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tba_hpc", "supervise", words[0], str(run.path), *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_answer_is_the_last_line_and_its_import_is_light(run: RunDir) -> None:
    """It runs several times a job, on nodes whose file system may be slow."""
    logs = run.begin_attempt().resolve()
    done = _command(run, "ended", "code=3", "relaunches=2")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "again 1")
    assert f"job 7 restart 0] the ranks ended with status 3 (failure 1 in a row): see {logs}" in done.stderr
    show = "import sys, tba_hpc.launch.supervise; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert not {"numpy", "pydantic", "torch", "yaml"} & {*loaded.stdout.split()}


def test_a_failure_is_told_with_the_sentence_that_a_rank_left(run: RunDir) -> None:
    logs = run.begin_attempt()
    (logs / "failed-trainer-0000.txt").write_text("searcher 1 is silent\n")
    done = _command(run, "ended", "code=1", "relaunches=2")
    assert f"status 1 (failure 1 in a row): searcher 1 is silent; see {logs.resolve()}" in done.stderr
    last = read_events(run)[-1]
    assert (last["event"], last["code"], last["sentence"]) == ("failed", 1, "searcher 1 is silent")


def test_it_is_a_command_of_tba_as_well(run: RunDir) -> None:
    """Installed as a script, and as light."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["tba"].partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    python = [sys.executable, "-X", "importtime", "-c", program]
    words = [*python, "supervise", "searched", str(run.path), "code=0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "queue\n") and "typer" not in done.stderr


def test_first_elastic_number_is_the_configs() -> None:
    assert supervise.FIRST_ELASTIC == FIRST_ELASTIC


# --- begin ---


def test_a_job_takes_the_run_and_notes_its_nodes(run: RunDir) -> None:
    assert re.fullmatch("go tba-[0-9a-f]{16}", _next(run, "begin", hosts="n1 n2"))
    assert (run.path / "slurm/job").read_text() == "7\n"
    (event,) = read_events(run)
    assert (event["event"], event["nodes"], event["job"]) == ("allocated", "n1,n2", "7")


def test_a_job_is_told_if_somebody_is_to_be_told_of_it(run: RunDir) -> None:
    run.adapt(["run.notify.command=['true']"])
    assert re.fullmatch("go tba-[0-9a-f]{16} notify", _next(run, "begin", hosts="n1 n2"))


def test_a_job_does_not_begin_beside_another_owner(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    with owned(run):
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        done = _command(run, "begin", "hosts=n1")
    assert done.returncode == 2 and "is already in use" in done.stderr and _events(run) == []


def test_nothing_is_left_to_do_for_a_finished_or_stopped_run(run: RunDir) -> None:
    (run.path / "slurm/stop").write_text("7\n")
    assert _next(run, "begin") == "exit 0" and _events(run) == ["allocated", "stopped"]
    assert not (run.path / "slurm/stop").exists()
    (run.path / "slurm/stop").write_text("6\n")
    assert _next(run, "begin").startswith("go"), "another job was meant"
    run.mark_finished()
    assert _next(run, "begin") == "exit 0"


def test_jobs_of_a_run_agree_on_a_name_for_their_caches_that_nobody_can_guess(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = {*pool.map(lambda _: _next(run, "join"), range(24))}
    (name,) = names
    assert len(name) > len("go tba-") + 15
    assert (run.path / "slurm/caches").stat().st_mode & 0o077 == 0


# --- start ---


def _place(run: RunDir, answers: str, *, look: int = 1, **options: object) -> str:
    """The answer, where the ranks of both roles may start; nodes n2 n3 n4."""
    facts = {"trainers": 2, "searchers": 4, "answers": answers, "last_look": look, **options}
    return _next(run, "start", **facts)


HET = {"het": 1, "hosts": "n2", "others": "n3 n4", "ascending": "n2 n3 n4"}
ONE = {"nodes": 3, "hosts": "n2 n3 n4", "trainer_nodes": 1, "searchers_per_node": 2}


def test_a_start_sets_the_ranks_and_begins_their_logs(run: RunDir) -> None:
    assert _place(run, "n4 n2 n3", **HET) == "go 3 4 attempt-002"
    assert (run.config().launch.trainers, run.config().launch.searchers) == (2, 4)
    assert (run.path / "slurm/start").stat().st_mtime > 10
    assert read_events(run)[-1]["attempt"] == run.attempt.name == "attempt-002"
    hosts = ("het=1", "hosts=n2", "others=n3", "answers=n2 n3", "ascending=n2 n3")
    done = _command(run, "start", *hosts, "trainers=5", "searchers=1")
    assert done.returncode == 2 and "cannot be split over launch.trainers=5" in done.stderr
    assert run.attempt.name == "attempt-002"


@pytest.mark.parametrize(
    ("answers", "options", "answer", "why"),
    [
        ("n2 n4", HET, "queue", "n3 cannot be used"),
        ("", HET, "queue", "n2 n3 n4 cannot be used"),
        ("n2 n3", HET | {"others": "n2 n3"}, "queue", "its components share a node"),
        ("n2", HET | {"others": ""}, "queue", "Slurm names no nodes of one component"),
        ("n2 !n3 n4", HET, "queue", "n3 does not see"),
        ("n2 ?n3 n4", HET, "queue", "n3 cannot write to its /dev/shm or /tmp, or has GPUs with errors"),
        ("n2 ?n3 n4", ONE, "go 2 2 attempt-002", "excluded from the next start"),
        ("n2 n4", ONE, "go 2 2 attempt-002", ""),
        ("n3 n4", ONE, "go 2 2 attempt-002", ""),
        ("n2", ONE, "queue", "no node is left to search"),
        ("n2", ONE | {"nodes": 2, "hosts": "n2"}, "queue", "no node is left to search"),
        ("n2 n4", ONE | {"searchers_per_node": 0, "trainers": 6}, "queue", "n3 cannot be used"),
        ("n2 n3 n4", ONE | {"searchers_per_node": 0, "trainers": 6}, "go 3 0 attempt-002", ""),
    ],
)
def test_which_nodes_will_do(
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    answers: str,
    options: dict[str, Any],
    answer: str,
    why: str,
) -> None:
    assert _place(run, answers, **options) == answer
    assert why in capsys.readouterr().err
    hosts = f"{options['hosts']} {options.get('others', '')}".split()
    missing = [host for host in hosts if host not in answers.split()]
    kind = "unhealthy" if {*"?!"} & {*answers} else "unreachable"
    assert [event["nodes"] for event in read_events(run) if event["event"] == kind] == missing


def test_before_the_first_start_a_node_that_does_not_see_the_run_ends_the_job(run: RunDir) -> None:
    (run.path / "slurm/start").unlink()
    assert _place(run, "n2 !n3 n4", **HET) == "exit 2"
    assert "n3 does not see" in read_events(run)[-1]["sentence"]


def test_before_a_node_is_given_up_it_is_asked_twice(run: RunDir) -> None:
    assert _place(run, "n2 n4", look=0, **HET) == "look"
    assert _place(run, "n2 n4", look=0, **ONE) == "look"
    assert _events(run) == []


def test_a_node_that_slurm_has_taken_out_of_the_job_is_named_once(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _next(run, "begin", hosts="n2 n3 n4")
    assert _place(run, "n2 n3 n4", **ONE) == "go 3 4 attempt-002"
    _next(run, "ended", code=137)
    for attempt in (3, 4):
        assert _place(run, "n2 n4", **ONE | {"hosts": "n2 n4"}) == f"go 2 2 attempt-{attempt:03d}"
    assert capsys.readouterr().err.count("n3 is lost; the job still has n2 n4") == 1
    assert _events(run) == ["allocated", "start", "failed", "unreachable", "start", "start"]
    assert attempts(read_events(run))[0].note == "exit status 137, n3 unreachable"


def test_a_node_that_was_without_an_answer_before_it_left_the_job_is_not_lost_again(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _next(run, "begin", hosts="n2 n3 n4")
    assert _place(run, "n2 n4", **ONE) == "go 2 2 attempt-002"
    assert _place(run, "n2 n4", **ONE | {"hosts": "n2 n4"}) == "go 2 2 attempt-003"
    assert "is lost" not in capsys.readouterr().err
    assert _events(run) == ["allocated", "unreachable", "start", "start"]


def test_the_first_nodes_train_and_ranks_lie_in_blocks(run: RunDir) -> None:
    _place(run, "n2 n4", **ONE)
    assert (run.path / "slurm/hosts").read_text().split() == ["n2", "n2", "n4", "n4"]
    _place(run, "n2", **ONE | {"nodes": 1, "hosts": "n2", "searchers": 3, "searchers_per_node": 3})
    assert (run.path / "slurm/hosts").read_text().split() == ["n2"] * 5
    assert supervise.spread(7, ["a", "b"]) == [*"aaaabbb"]
    assert supervise.spread(2, ["a", "b", "c"]) == [*"ab"]


def test_nodes_in_another_order_than_slurms_send_the_job_back(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _place(run, "n2 n3 n4", **HET | {"ascending": "n3 n4 n2"}) == "queue"
    assert "they are not in Slurm's own order, component 0 first: n2 n3 n4" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["begin", "start"])
def test_a_full_disk_ends_the_job_with_a_sentence(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    def full(_: supervise.JobState) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(supervise.STAGES, stage, full)
    assert supervise.main([stage, str(run.path)]) == 2
    sentence = f"the file system of {run.path} is full: free space or raise the quota, then"
    assert sentence in capsys.readouterr().err
    assert read_events(run)[-1]["sentence"].startswith(sentence)


def test_another_fault_of_the_system_is_no_refusal(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: supervise.JobState) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setitem(supervise.STAGES, "begin", away)
    with pytest.raises(OSError, match="Stale file handle"):
        supervise.main(["begin", str(run.path)])


# --- ended ---


def test_ranks_that_could_write_no_note_on_a_full_disk_are_not_started_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_hpc.run.notes.is_full", lambda folder: True)
    assert _next(run, "ended", code=1) == "exit 2"
    assert f"the file system of {run.path}/logs/latest is full" in read_events(run)[-1]["sentence"]


def test_the_answer_is_given_although_the_log_lies_on_a_full_disk(run: RunDir) -> None:
    words = [sys.executable, "-m", "tba_hpc", "supervise", "ended", str(run.path), "code=3", "relaunches=2"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "again 1\n")


def test_only_the_leaders_word_makes_a_run_finished(run: RunDir) -> None:
    assert _next(run, "ended", code=0) == "queue"
    run.mark_finished()
    assert _next(run, "ended", code=137) == "exit 0"
    assert _events(run) == ["stopped", "finished"]


def test_failures_in_a_row_are_counted_until_something_is_sealed(run: RunDir) -> None:
    assert _next(run, "ended", code=9, failures=1) == "again 2"
    assert _next(run, "ended", code=9, failures=2) == "exit 4"
    _touch(run.path / "shards/searcher-5000/000000.h5", 20)
    assert _next(run, "ended", code=9, failures=2) == "exit 4", "an elastic searcher's"
    _touch(run.path / "checkpoints/step-000002/state.json", 20)
    assert _next(run, "ended", code=9, failures=2) == "exit 4", "no checkpoint without COMPLETE"
    _touch(run.path / "shards/searcher-0000/000000.h5", 5)
    assert _next(run, "ended", code=9, failures=2) == "exit 4", "from before the start"
    _touch(run.path / "checkpoints/step-000002/COMPLETE", 20)
    assert _next(run, "ended", code=9, failures=2) == "again 1"
    assert {*_events(run)} == {"failed"} and read_events(run)[-1]["code"] == 9


def test_what_fails_while_slurm_ends_the_job_is_no_failure(run: RunDir) -> None:
    assert _next(run, "ended", code=143, ending=1) == "queue" and _events(run) == []


def test_what_only_the_user_can_fix_ends_the_job(run: RunDir) -> None:
    (run.attempt / "refused-trainer-0000.txt").write_text('no such model: "x"\n')
    for stop in (0, 1):
        assert _next(run, "ended", code=2, stop=stop) == "exit 2"
    assert [event["sentence"] for event in read_events(run)] == ['no such model: "x"'] * 2


@pytest.mark.parametrize(
    ("code", "at_work", "saved", "event"),
    [
        (14, False, False, "stopped"),  # USR1 before they listened
        (137, False, False, "failed"),  # they hung and were killed
        (138, True, False, "failed"),
        (137, True, True, "stopped"),  # killed on the way out, after the checkpoint
    ],
)
def test_a_stop_before_the_ranks_listen_or_after_their_checkpoint_is_no_failure(
    run: RunDir, code: int, at_work: bool, saved: bool, event: str
) -> None:
    if at_work:
        (run.attempt / "at-work").touch()
    _touch(run.path / "checkpoints/step-000001/COMPLETE", 20 if saved else 5)
    assert _next(run, "ended", code=code, stop=1) == "queue"
    assert _events(run) == [event]


# --- leave ---


def test_a_job_named_by_tba_stop_ends_instead_of_going_back(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(supervise, "_draw")  # whatever becomes of the report
    (run.path / "slurm/stop").write_text("7\n")
    assert _next(run, "leave", stop=1) == "exit 0" and _events(run) == []
    assert _next(run, "leave", stop=1) == "queue" and _events(run) == ["requeue"]


def test_a_stopped_run_gets_its_report_after_its_ranks_have_left(run: RunDir) -> None:
    (run.path / "slurm/stop").write_text("7\n")
    assert _next(run, "leave", stop=1) == "exit 0"
    assert run.report.exists() and json.loads(run.summary.read_text())["finished"] is False


@pytest.mark.parametrize(
    ("sealed", "stop", "answer"), [(True, 0, "exit 75"), (False, 1, "exit 75"), (False, 0, "exit 4")]
)
def test_job_without_requeue_is_unfinished_or_made_no_progress(
    run: RunDir, sealed: bool, stop: int, answer: str
) -> None:
    """What was asked to stop early has not failed."""
    if sealed:
        _touch(run.path / "shards/searcher-0000/000000.h5", 20)
    assert _next(run, "leave", requeue="no", stop=stop) == answer
    assert _events(run) == (["refused"] if answer == "exit 4" else [])


def test_next_link_of_a_chain_goes_on_until_the_run_is_over(run: RunDir) -> None:
    chain = run.path / "slurm/chain"
    chain.write_text("6\n7\n8\n9\n")
    assert [_next(run, "leave", requeue="no") for _ in range(2)] == ["exit 75", "exit 75"]
    assert _next(run, "begin", chained=1).startswith("go ")
    assert _next(run, "leave", requeue="no") == "exit 4 8 9", "three in a row sealed nothing"
    assert not chain.exists()
    before = _events(run)
    assert _next(run, "begin", chained=1) == "exit 0" and _events(run) == before, "one that was not cancelled"
    chain.write_text("6\n7\n8\n")
    (run.attempt / "refused-trainer-0000.txt").write_text("no such model\n")
    assert _next(run, "ended", code=2) == "exit 2 8"
    chain.write_text("7\n8\n")
    run.mark_finished()
    assert _next(run, "begin", chained=1) == "exit 0 8" and not chain.exists()


def test_allocations_that_seal_nothing_do_not_follow_each_other_for_ever(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "slurm/idle").write_text("a[$(touch X)]")  # not a number: as if nothing was counted
    assert [_next(run, "leave") for _ in range(3)] == ["queue", "queue", "exit 4"]
    assert _events(run) == ["requeue", "requeue", "refused"]
    assert [_next(run, "leave", stop=1) for _ in range(4)] == ["queue"] * 4, "preempted"
    monkeypatch.setenv("TBA_JOB_END", str(time.time() + 100))
    assert [_next(run, "leave", stop=1) for _ in range(2)] == ["queue"] * 2
    _touch(run.path / "shards/searcher-0000/000000.h5", 20)
    assert _next(run, "leave") == "queue" and (run.path / "slurm/idle").read_text() == "0\n"


def test_a_signal_that_comes_before_the_engines_are_up_does_not_requeue_for_ever(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with ``--time 0:04:00``, the script's own ``--signal=B:USR1@300``, and a site of 60 s."""
    monkeypatch.setenv("TBA_JOB_END", str(time.time() + 225))
    answers = [_next(run, "leave", stop=1, save_seconds=30) for _ in range(3)]
    assert answers == ["queue", "queue", "exit 4"]
    assert "3 allocations in a row: the last was asked to stop before it could" in capsys.readouterr().err
    monkeypatch.setenv("TBA_JOB_END", str(time.time() + 3600))
    assert [_next(run, "leave", stop=1, save_seconds=30) for _ in range(9)] == ["queue"] * 9, "preempted"
    monkeypatch.setenv("TBA_JOB_END", str(time.time() + 650))
    assert [_next(run, "leave", stop=1, save_seconds=270) for _ in range(9)] == ["queue"] * 9, "so is this"


def test_a_preemption_is_not_blamed_on_the_time_limit(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job before had sealed nothing, and this one, the last, was preempted long before its end."""
    (run.path / "slurm/idle").write_text("1\n")
    monkeypatch.setenv("TBA_JOB_END", str(time.time() + 80_000))
    assert _next(run, "leave", stop=1, requeue="no") == "exit 4"
    assert "1 allocation in a row: see the job's log" in capsys.readouterr().err


# --- Elastic searchers ---


def test_elastic_searchers_give_up_when_node_after_node_fails_its_check(run: RunDir) -> None:
    """Two may, by POLICY; a job that has searched begins again."""
    sick = [f"?n{number}" for number in (1, 2, 0, 3, 4, 5)]
    sick[2] = ""
    found = [_next(run, "join", array_job="7_0", answers=answer) for answer in sick]
    assert [answer.split()[0] for answer in found] == ["queue", "queue", "go", "queue", "queue", "exit"]
    assert found[-1] == "exit 4" and not list((run.path / "slurm").glob("unfit*"))


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({"code": 0}, "queue"),  # preempted by TERM, of which only the searchers heard
        ({"code": 1, "stop": 1}, "queue"),
        ({"code": 1, "ending": 1}, "queue"),
        ({"code": 2}, "exit 2"),
        ({"code": 3}, "exit 0"),  # no place
        ({"code": 1}, "again 1"),  # srun, before any searcher began
        ({"code": 137, "failures": 1}, "again 2"),
        ({"code": 137, "failures": 2}, "exit 4"),
        ({"code": 137, "failures": 2, "seconds": 300}, "again 1"),
    ],
)
def test_a_job_of_elastic_searchers_comes_back_until_the_run_is_finished(
    run: RunDir, facts: dict[str, int], answer: str
) -> None:
    assert _next(run, "join").startswith("go tba-") and _next(run, "join", stop=1) == "queue"
    assert _next(run, "searched", **facts) == answer
    run.mark_finished()
    assert _next(run, "join") == _next(run, "searched", **facts) == "exit 0"
    assert _events(run) == [], "events are the run's own"
