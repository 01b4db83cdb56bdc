"""The end of a run: what is left where it is finished, stopped before, or stopped at its last evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_loops import ReplayExchange as Replayed
from test_loops import TrainerParts, _sealed, make_config

from tba_hpc.ending import end_run
from tba_hpc.metrics import read_metrics
from tba_hpc.ports import ExchangeError
from tba_hpc.report import page
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, write_evaluation
from tba_hpc.types import Publication

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

    def close(self) -> list:
        """Nothing is left."""
        self.closed = True
        return super().close()


def end(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stop_at: str = "",
    evaluated: bool = True,
    patience: float = 20,
) -> tuple[RunDir, Exchange]:
    """Train and end a run; ``stop_at``: the last event of the trainer at which a stop is asked for."""
    monkeypatch.setattr(page, "write_report", lambda run: run.report.write_text("plots"))
    config = make_config(root, train={"steps": STEPS}, exchange={"deadline_seconds": patience})
    run = RunDir.create(config)
    parts, exchange = TrainerParts(config, run), Exchange(_sealed(config, run, 10), 0)

    def stop_asked() -> bool:
        return bool(stop_at) and events(run)[-1:] == [stop_at]

    if evaluated:
        part = Evaluation(split="test", step=STEPS, correct=1, total=4, tokens=9, truncated=0)
        write_evaluation(run, 0, 1, part)
    trainer = parts.build(exchange, stop_asked)
    finished = trainer.run()
    end_run(run, config, finished=finished, trainer=trainer, learner=parts.learner, exchange=exchange)
    return run, exchange


def events(run: RunDir) -> list[object]:
    """The trainer's, in order, merges left out."""
    found = [record["event"] for record in read_metrics(run.metrics_file("trainer")) if "event" in record]
    return [event for event in found if event != "merged"]


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
    assert not run.export.exists() and not run.finished and run.report.exists()


def test_a_stop_at_the_last_evaluation_leaves_only_that_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, exchange = end(tmp_path, monkeypatch, stop_at="finished", evaluated=False)
    assert events(run) == ["started", "filling", "checkpoint", "finished", "stopped"]
    assert run.export.is_dir() and not run.finished and exchange.closed


def test_an_evaluation_that_never_comes_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExchangeError, match=r"incomplete after 0.3 s: see which searcher's part is missing"):
        end(tmp_path, monkeypatch, evaluated=False, patience=0.3)
