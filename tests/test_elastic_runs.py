"""Whole runs on the tabular policy whose searchers join, leave, or are killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import tabular_run
from waiting import until

from tba_hpc import runtime
from tba_hpc.config import FIRST_ELASTIC
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.evaluations import find_evaluation
from tba_hpc.run.history import History
from tba_hpc.run.metrics import Record, read_metrics

PATIENCE = 240.0


QUEUE = {"replay_limit": 1, "duplicates": "none", "capacity_per_prompt": 1000, "capacity": 10_000}
"""A buffer that holds all that may be ahead, so that no group makes room for another unlearned."""


def make_run(
    root: Path, *, steps: int, elastic: int, searchers: int, **sections: dict[str, object]
) -> RunDir:
    launch = {"searchers": searchers, "elastic": elastic}
    train = {"steps": steps}
    return RunDir.create(tabular_run.make_config(root, train=train, launch=launch, **sections))


def ended(*processes: ForkServerProcess) -> list[int | None]:
    """Exit statuses of processes that end by themselves."""
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def steps_of(run: RunDir) -> int:
    return len(History.read(run).steps)


def events_of(run: RunDir, searcher: int) -> list[Record]:
    return [record for record in read_metrics(run.metrics_file("searcher", searcher)) if "event" in record]


def merged(run: RunDir) -> Counter[int]:
    """Shards that the trainer merged, by searcher, over all its attempts."""
    records = read_metrics(run.metrics_file("trainer"))
    return Counter(int(record["searcher"]) for record in records if record.get("event") == "merged")


def assert_clean(run: RunDir) -> None:
    verdict = audit(run)
    assert verdict.finished and verdict.clean, verdict.problems
    assert verdict.lost == verdict.doubled == 0


def test_a_run_that_some_join_and_leave_while_others_are_killed(tmp_path: Path) -> None:
    """Twice the trainer is killed and starts again, with another number of searchers of its own."""
    random = np.random.default_rng(0)
    run = make_run(tmp_path, steps=45, elastic=3, searchers=0)
    trainer = tabular_run.start(run, searchers=0, sent=signal.SIGKILL, nth=15)
    starts = [(1, signal.SIGKILL, 20), (0, None, 0)]
    there: list[ForkServerProcess] = []
    asked: list[ForkServerProcess] = []
    while not run.finished:
        there = [process for process in there if process.is_alive()]
        if trainer.exitcode is not None and starts:
            assert trainer.exitcode == -signal.SIGKILL
            searchers, sent, nth = starts.pop(0)
            trainer = tabular_run.start(run, searchers=searchers, sent=sent, nth=nth)
        before = merged(run).total()
        match random.choice(["come", "go", "kill"], p=[0.5, 0.3, 0.2]):
            case "come" if len(there) < 3:
                there.append(tabular_run.visit(run))
            case "go" if there:
                asked.append(there.pop(int(random.integers(len(there)))))
                os.kill(asked[-1].pid, signal.SIGUSR1)  # type: ignore[arg-type]
            case "kill" if there:
                there.pop(int(random.integers(len(there)))).kill()
        if there:  # else a busy machine kills them all before they have begun
            until(
                lambda: run.finished or trainer.exitcode is not None or merged(run).total() > before,  # noqa: B023
                "a shard of those who are there",
            )
    assert ended(trainer) == [0]
    assert set(ended(*asked)) <= {0, -signal.SIGUSR1}, "one that was asked before it listened just ends"
    assert set(ended(*there)) <= {0}, "they leave with the run"
    assert_clean(run)
    assert sum(number for searcher, number in merged(run).items() if searcher >= FIRST_ELASTIC) > 0


def test_a_run_of_searchers_that_come_and_go_alone(tmp_path: Path) -> None:
    """It waits for the first, evaluates by one of them, goes on when that one is killed, and ends."""
    run = make_run(tmp_path, steps=200, elastic=2, searchers=0)
    trainer = tabular_run.start(run, searchers=0)
    until(lambda: run.metrics_file("trainer").exists(), "the trainer's start")
    assert trainer.is_alive() and steps_of(run) == 0
    first = tabular_run.visit(run)
    until(lambda: find_evaluation(run, "test", 0), "the first evaluation")
    second = tabular_run.visit(run)
    until(lambda: events_of(run, FIRST_ELASTIC + 1), "the second to join")
    first.kill()
    assert ended(trainer, second) == [0, 0]
    assert_clean(run)
    summary = json.loads(run.summary.read_text())
    assert summary["finished"] and summary["pass_at_1_after"] is not None
    whole = find_evaluation(run, "test", 200)
    assert whole is not None and whole.total == summary["test_prompts"]
    last = events_of(run, FIRST_ELASTIC + 1)[-1]
    assert (last["event"], last["why"]) == ("left", "finished")


@pytest.mark.parametrize(
    ("searchers", "buffer"),
    [pytest.param(0, QUEUE, marks=pytest.mark.nightly), (1, {})],
    ids=["queue", "drawn"],
)
def test_staleness_stays_bounded_whoever_comes_and_goes(
    tmp_path: Path, searchers: int, buffer: dict[str, object]
) -> None:
    """One searcher is killed, and another takes its slot. One is asked to leave. The trainer is killed."""
    bounded = {"transport": "files", "sync_every": 2, "seal_seconds": 0.02, "max_staleness": 3}
    run = make_run(tmp_path, steps=60, elastic=3, searchers=searchers, exchange=bounded, buffer=buffer)
    trainer = tabular_run.start(run, searchers=searchers, sent=signal.SIGKILL, nth=40)
    killed, asked = tabular_run.visit(run), tabular_run.visit(run)
    until(lambda: {FIRST_ELASTIC, FIRST_ELASTIC + 1} <= merged(run).keys(), "shards of both")
    killed.kill()
    before = steps_of(run)
    until(lambda: steps_of(run) >= min(before + 8, 39), "steps without the killed one")
    later = tabular_run.visit(run)
    os.kill(asked.pid, signal.SIGUSR1)  # type: ignore[arg-type]
    assert ended(trainer, asked) == [-signal.SIGKILL, 0]
    assert ended(tabular_run.start(run, searchers=searchers), later) == [0, 0]
    assert_clean(run)
    ages = [int(str(record["staleness/max"])) for record in History.read(run).steps]
    assert len(ages) == 60 and 0 < max(ages) <= 3
    assert {FIRST_ELASTIC, FIRST_ELASTIC + 1} <= merged(run).keys()


def test_a_trainer_that_comes_back_finds_them_waiting(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60, elastic=2, searchers=0)
    early = tabular_run.visit(run)  # before the first trainer
    trainer = tabular_run.start(run, searchers=0, sent=signal.SIGTERM, nth=20)
    assert ended(trainer) == [0] and not run.finished
    assert early.is_alive() and len(events_of(run, FIRST_ELASTIC)) > 1
    trainer = tabular_run.start(run, searchers=1)
    assert ended(trainer, early) == [0, 0]
    assert_clean(run)
    kinds = [event["event"] for event in events_of(run, FIRST_ELASTIC)]
    assert [kind for kind in kinds if kind not in ("sealed", "engine")] == [
        "started",
        "joined",
        "moved",
        "left",
    ]


def test_a_run_that_is_over_and_a_place_that_is_gone_need_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    run = make_run(tmp_path, steps=40, elastic=2, searchers=0)
    guests = [tabular_run.visit(run) for _ in range(2)]
    assert ended(tabular_run.start(run, searchers=0, sent=signal.SIGTERM, nth=10)) == [0]
    until(lambda: all(len(events_of(run, FIRST_ELASTIC + i)) > 1 for i in range(2)), "both to join")
    run.adapt(["launch.elastic=1"])
    assert ended(tabular_run.start(run, searchers=0), *guests) == [0, 0, 0]
    assert sorted(str(events_of(run, FIRST_ELASTIC + i)[-1]["why"]) for i in range(2)) == [
        "finished",
        "no slot",
    ]
    assert_clean(run)
    before = sorted(run.owners.iterdir())
    runtime.search(run, None)  # another one, after the end
    assert sorted(run.owners.iterdir()) == before
