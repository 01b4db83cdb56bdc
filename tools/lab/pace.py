"""Measures the speed of steps if generation dominates: long, uneven answers and small batches.

The experiment says nothing about learning. How much a step teaches depends on the age of its data, which the
table also shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab import asynchrony, skill
from lab.curves import tokens_per_second
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, Study, slug
from tba_hpc.config import Config
from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics

ONE, EIGHT, FREE = "asynchronous, data one step old", "at most eight steps old", "no bound on their age"

ARMS = {
    ONE: (*asynchrony.QUEUE, "exchange.max_staleness=1", "launch.searchers=1"),
    EIGHT: (*asynchrony.QUEUE, "launch.searchers=1"),
    FREE: (
        *asynchrony.QUEUE,
        "exchange.max_staleness=200",
        "launch.searchers=1",
    ),
    asynchrony.SYNCHRONOUS: asynchrony.ARMS[asynchrony.SYNCHRONOUS],
    asynchrony.TWICE: asynchrony.ARMS[asynchrony.TWICE],
}

STEPS = 100
WARM = 5
"""A run is divided into so many parts, of which the first is left out as a warm-up."""

SETTINGS = (
    *skill.SAMPLING,
    skill.BETA,
    skill.constant(1e-6),  # answers stay as long as they are
    "buffer.duplicates=none",
    "buffer.initial_completions=16",
    "model.context_length=320",
    "generator.max_tokens=220",
    "generator.prompts_in_flight=12",
    "generator.completions_per_prompt=8",
    "train.prompts_per_step=2",
    "train.completions_per_prompt=8",
    "evaluate.validation_prompts=16",
    "evaluate.test_prompts=1",
)

NOTES = (
    f"Seconds of a step: mean over a run of {STEPS} steps, without its first fifth and without evaluations. "
    "A step learns from two prompts with eight completions each, of 20 to 200 tokens.",
    "Age: steps between the weights that sampled and those that train, mean over a run's batches.",
    "Tokens/s: of all engines together, while they are at work; waits for the trainer do not count.",
    "All arms use both cores, and learn from each completion once. TRL: as in `asynchrony`.",
)


@dataclass(frozen=True)
class Paced:
    """Figures of one run.

    done: (time in s, number) of each step when it was done. age: mean age of the data, steps. tokens: tokens
    that engines generate per second while they are at work; None if unknown.
    """

    done: Sequence[tuple[float, float]]
    age: float
    tokens: float | None

    @property
    def seconds(self) -> float:
        """Mean duration of a step, s."""
        (start, first), (end, last) = self.done[0], self.done[-1]
        return (end - start) / (last - first)

    @property
    def course(self) -> list[tuple[float, float]]:
        """``done``, counted from its first entry, so that all runs begin at 0."""
        began, first = self.done[0]
        return [(time - began, step - first) for time, step in self.done]

    @classmethod
    def read(cls, run: RunDir) -> Paced:
        """Read the figures of a finished run."""
        steps = History.read(run).steps
        searchers = [read_metrics(path) for path in run.searcher_files().values()]
        done = list(zip(series(steps, "time"), series(steps, "step"), strict=True))
        done = done[len(done) // WARM :]
        age = statistics.fmean(series(steps, "staleness/mean"))
        return cls(done, age, tokens_per_second(searchers))


class Pace:
    """The arms of ``asynchrony``, and two with other ages of data, at a learning rate too small to matter."""

    question = "How fast are steps where generation dominates: long, uneven answers, small batches?"

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of each arm's first run; TRL reads that of a synchronous arm."""
        return self._study(options).configs(options)

    def measure(self, options: Options) -> Result:
        """Run all arms, seed by seed, so that changes of the machine's speed affect all arms alike."""
        study = self._study(options)
        found: dict[str, list[Paced]] = {arm: [] for arm in (*study.arms, asynchrony.PEER)}
        for seed in options.seeds:
            for arm in study.arms:
                found[arm].append(Paced.read(study.run(arm, seed, options)))
            found[asynchrony.PEER].append(self._peer(study, seed, options))
        return result(found)

    def _study(self, options: Options) -> Study:
        last = options.steps or STEPS
        return Study(ARMS, (*SETTINGS, f"evaluate.every={last}"), last, skill.COUNTING)

    def _peer(self, study: Study, seed: int, options: Options) -> Paced:
        """Run TRL, which notes the time only at evaluations: here in the middle and at the end."""
        overrides = study.overrides(asynchrony.SYNCHRONOUS, seed, options)
        middle = f"evaluate.every={(options.steps or STEPS) // 2}"
        course = asynchrony.peer_course([*overrides, middle], f"{slug(asynchrony.PEER)}-seed{seed}", options)
        return Paced([(seconds, step) for seconds, step, _ in course.points], 0.0, None)


def result(found: Mapping[str, Sequence[Paced]]) -> Result:
    """Return a row and a line for each arm. A row compares the arm's steps with those of the first arm."""
    first, *_ = found.values()
    rows: list[Row] = [
        {
            "arm": arm,
            "s a step": Spread([run.seconds for run in runs]),
            "÷ the first": Spread([run.seconds / one.seconds for run, one in zip(runs, first, strict=True)]),
            "age": Spread([run.age for run in runs]),
            "tokens/s": Spread([run.tokens for run in runs]),
        }
        for arm, runs in found.items()
    ]
    lines = [Series(arm, [run.course for run in runs]) for arm, runs in found.items()]
    panel = Panel("seconds", "optimizer steps since the first shown", lines, banded=False)
    return Result(rows, [panel], NOTES)


PACE = Pace()
