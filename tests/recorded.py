"""Run directories with records of a known past, written as ranks and launchers write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tba_hpc.config import parse_config
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer, Evaluation, write_evaluation
from tba_hpc.run.events import log_event
from tba_hpc.run.inventory import COMPLETE

STEPS = 10


def new_run(
    root: Path, model: Mapping[str, object] | None = None, *, seed: int = 0, **train: object
) -> RunDir:
    """A run directory without a metric. model, train: settings of these sections."""
    tree = {
        "run": {"root": str(root), "name": "known", "seed": seed},
        "model": {"path": "models/<tiny>", **(model or {})},
        "train": {"steps": STEPS, **train},
        "launch": {"searchers": 2},
    }
    return RunDir.create(parse_config(tree))


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Append records to a metrics file."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, time: float, **values: object) -> dict[str, object]:
    """The trainer's record of an optimizer step."""
    names = {"loss": "train/loss", "wait": "train/wait_share", "stall": "sync/publish_stall_seconds"}
    names["seconds"] = "time/step_seconds"
    base = {"step": number, "time": time, "staleness/mean": 2.0}
    return {**base, **{names[name]: value for name, value in values.items()}}


def search(
    time: float, tokens: int, rate: float, *, rebuilds: int = 0, **figures: object
) -> dict[str, object]:
    """A searcher's record of about a second; figures: more of its metrics, or others, without ``search/``."""
    return {
        "time": time,
        "search/tokens": tokens,
        "search/trajectories": 4,
        "search/tokens_per_second": rate,
        "search/seal_share": 0.01,
        "search/version": 0,
        "search/reward": 0.5,
        "search/rebuilds": rebuilds,
        **{f"search/{name}": value for name, value in figures.items()},
    }


def evaluate(
    run: RunDir,
    split: str,
    at: int,
    correct: tuple[int, int],
    total: int = 50,
    *,
    ref_logprob: float | None = None,
    answers: tuple[Answer, ...] = (),
    rewards: Sequence[float] = (),
) -> None:
    """Both searchers' parts of an evaluation; with ``ref_logprob`` each, of a task that is won or lost.

    rewards: of each of them.
    """
    name = "pass@1" if ref_logprob is None else "win rate"
    for searcher, right in enumerate(correct):
        part = Evaluation(
            split=split,
            step=at,
            correct=right,
            total=total,
            tokens=9,
            truncated=0,
            ref_logprob=ref_logprob,
            score_name=name,
            answers=answers[searcher::2],
            graded=len(rewards),
            rewards=sum(rewards),
            squares=sum(reward**2 for reward in rewards),
        )
        write_evaluation(run, searcher, 2, part)


def happen(
    run: RunDir, time: float, event: str, *, job: str = "", restarts: int = 0, **extra: object
) -> None:
    """An event at a time of its own."""
    log_event(run, event, time=time, job=job, restarts=restarts, **extra)


def save(run: RunDir, time: float, step: int, *, recorded: bool = True) -> None:
    """A complete checkpoint. recorded: whether the trainer lived to record it."""
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETE).touch()
    if recorded:
        write(run.metrics_file("trainer"), [{"time": time, "event": "checkpoint", "step": step}])


def resumed_run(run: RunDir) -> None:
    """Two attempts: steps 1-6 in 60 s, an hour's pause, steps 5-10 in 50 s after a resume from 4."""
    trainer = run.metrics_file("trainer")
    write(trainer, [{"time": 1000.0, "event": "started", "step": 0}])
    write(trainer, [step(s, 1000.0 + 10 * s, loss=100.0, stall=0.5, seconds=10.0) for s in range(1, 7)])
    write(trainer, [{"time": 4660.0, "event": "resumed", "step": 4}])
    write(
        trainer,
        [step(s, 4660.0 + 5 * (s - 4), loss=float(s), wait=s / 1000, seconds=5.0) for s in range(5, 11)],
    )
    write(trainer, [{"time": 4700.0, "event": "checkpoint", "step": 10}])
    write(trainer, [{"time": 4710.0, "event": "finished", "step": 10}])
    write(run.metrics_file("searcher", 0), [search(1005.0, 100, 1000), search(4665.0, 100, 3000)])
    write(run.metrics_file("searcher", 1), [search(1005.0, 50, 500), search(4665.0, 0, 0)])
    evaluate(run, "test", 0, (20, 21))
    evaluate(run, "validation", 5, (30, 30))
    evaluate(run, "test", 10, (40, 45))
