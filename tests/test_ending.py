"""The end of a run: what is left where it is finished, stopped before, or stopped at its last evaluation."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_loops import ReplayExchange as Replayed
from test_loops import TrainerParts, _sealed, make_config

from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import Publication
from tba_hpc.loops import ending
from tba_hpc.loops.ending import end_run
from tba_hpc.report import page
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, missing_parts, write_evaluation
from tba_hpc.run.metrics import MetricsWriter, read_metrics

STEPS = 4


class Exchange(Replayed):
    """Notes what is published, and whether it was closed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.publications: list[Publication] = []
        self.closed = False

    def publish(self, publication, write) -> bool:  # type: ignore[no-untyped-def]
        """As ever."""
        self.publications.append(publication)
        return super().publish(publication, write)

    def close(self) -> None:
        """As ever."""
        self.closed = True


def end(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stop_at: str = "",
    evaluated: bool = True,
    patience: float = 20,
) -> tuple[RunDir, Exchange]:
    """Train and end a run; ``stop_at``: the last event of the trainer at which a stop is asked for."""
    monkeypatch.setattr(page, "render", lambda *_: "plots")
    config = make_config(root, train={"steps": STEPS}, launch={"timeout_seconds": patience})
    run = RunDir.create(config)
    parts, exchange = TrainerParts(config, run), Exchange(_sealed(config, run, 10), 0)

    def stop_asked() -> bool:
        return bool(stop_at) and events(run)[-1:] == [stop_at]

    if evaluated:
        part = Evaluation(split="test", step=STEPS, correct=1, total=4, tokens=9, truncated=0)
        write_evaluation(run, 0, 1, part)
    trainer = parts.build(exchange, stop_asked)
    finished = trainer.run()
    end_run(run, config, trainer, finished=finished)
    return run, exchange


def events(run: RunDir) -> list[object]:
    """The trainer's, in order, merges and snapshots left out."""
    found = [record["event"] for record in read_metrics(run.metrics_file("trainer")) if "event" in record]
    return [event for event in found if event not in ("merged", "snapshot")]


def test_a_finished_run_leaves_a_model_a_summary_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, exchange = end(tmp_path, monkeypatch)
    assert events(run) == ["started", "filling", "checkpoint", "finished"]
    last = exchange.publications[-1]
    assert (last.version, last.evaluate) == (STEPS, "test") and exchange.closed
    assert run.export.is_dir() and run.report.read_text() == "plots"
    assert run.finished and json.loads(run.summary.read_text())["steps"] == STEPS


def test_a_run_that_is_stopped_before_publishes_and_exports_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, exchange = end(tmp_path, monkeypatch, stop_at="filling")
    assert events(run) == ["started", "filling", "checkpoint", "stopped"]
    assert {publication.version for publication in exchange.publications} == {0} and exchange.closed
    assert not run.export.exists() and not run.finished and run.summary.exists()


def test_a_stop_at_the_last_evaluation_leaves_only_that_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, exchange = end(tmp_path, monkeypatch, stop_at="finished", evaluated=False)
    assert events(run) == ["started", "filling", "checkpoint", "finished", "stopped"]
    assert run.export.is_dir() and not run.finished and exchange.closed


def test_a_run_is_finished_before_there_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the report leaves a finished run, of which only that is missing."""

    def killed(run: RunDir) -> None:
        assert run.finished and run.export.is_dir() and not run.summary.exists() and not run.report.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(page, "write_report", killed)
        end(tmp_path, monkeypatch)


class OneAtATime:
    """Searchers that evaluate one after the other; each generates for a while and then hands in its part."""

    def __init__(self, run: RunDir, searchers: int, records: int) -> None:
        self.run = run
        self.left = [searcher for searcher in range(searchers) for _ in range(records)]
        self.searchers = searchers
        self.writers = [MetricsWriter(run.metrics_file("searcher", index)) for index in range(searchers)]
        self.stopping = False
        self.exchange = self

    def gather(self) -> bool:
        """One more record; with the last of a searcher its part."""
        if self.left:
            searcher = self.left.pop(0)
            self.writers[searcher].log({"search/tokens": 9})
            if searcher not in self.left:
                part = Evaluation(split="test", step=STEPS, correct=1, total=4, tokens=9, truncated=0)
                write_evaluation(self.run, searcher, self.searchers, part)
        for writer in self.writers:
            writer.log({"search/tokens": 0})  # the others are there, and wait
        return False


@pytest.mark.parametrize("answering", [4, 2])
def test_the_last_evaluation_is_waited_for_while_anybody_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: int
) -> None:
    """It takes several times the deadline; where two of four do nothing, these are named after one."""
    monkeypatch.setattr(ending, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(ending, "EVALUATION_CHECK_SECONDS", 0.02)
    config = make_config(tmp_path, train={"steps": STEPS}, launch={"searchers": 4, "timeout_seconds": 0.3})
    run = RunDir.create(config)
    run.begin_attempt()
    trainer = OneAtATime(run, 4, records=15)
    trainer.left = [searcher for searcher in trainer.left if searcher < answering]
    began = time.monotonic()
    if answering == 4:
        assert ending._evaluation_arrives(run, config, trainer)  # type: ignore[arg-type]
        assert time.monotonic() - began > 3 * config.launch.timeout_seconds
    else:
        with pytest.raises(ExchangeError, match=r"searchers 2, 3 generated nothing for 0.3 s: see the log"):
            ending._evaluation_arrives(run, config, trainer)  # type: ignore[arg-type]
        assert missing_parts(run, "test", STEPS, 4) == [2, 3]


def test_preempted_elastic_searchers_are_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are no others: as long as while training."""
    monkeypatch.setattr(ending, "EVALUATION_CHECK_SECONDS", 0.02)
    launch = {"searchers": 0, "elastic": 2, "timeout_seconds": 0.1}
    config = make_config(tmp_path, train={"steps": STEPS}, launch=launch)
    run = RunDir.create(config)
    run.begin_attempt()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"elastic searchers generated nothing for 0.6 s: if no searcher"):
        ending._evaluation_arrives(run, config, OneAtATime(run, 0, records=0))  # type: ignore[arg-type]
    assert time.monotonic() - began > 0.6
