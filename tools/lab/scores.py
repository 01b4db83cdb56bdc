"""Where runs of the quickstart end up: held-out pass@1 and how steady the way there was, per arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from lab.curves import Curve, sag, swing
from lab.results import COLORS, Result, Row, Spread
from lab.runs import Options, Study
from tba_hpc.config import Config
from tba_hpc.report.summary import RunData, summary_of
from tba_hpc.run.directory import RunDir

NOTES = (
    "Before, after: greedy pass@1 on 512 held-out problems. Swing: standard deviation of validation pass@1 "
    "over the last third of a run; sag: its largest fall from a peak; both in points, on 256 problems.",
    "Staleness: steps between the weights that sampled and those that train, mean over a run's batches.",
)

EVALUATED = ("evaluate.every=10", "evaluate.validation_prompts=256")


@dataclass(frozen=True)
class Scored:
    """One run: its curve over steps, and figures of its summary."""

    curve: Curve
    before: float
    after: float
    staleness: float
    trajectories: int

    @classmethod
    def read(cls, run: RunDir) -> Scored:
        """Of a finished run."""
        data = RunData.read(run)
        summary = summary_of(data, run.config())
        assert summary.pass_at_1_before is not None and summary.pass_at_1_after is not None
        validation = [(float(e.step), e.score) for e in data.evaluations if e.split == "validation"]
        staleness = summary.staleness or 0.0
        return cls(
            validation, summary.pass_at_1_before, summary.pass_at_1_after, staleness, summary.trajectories
        )


@dataclass(frozen=True)
class Scores:
    """An experiment that is no more than a study's runs and their scores."""

    question: str
    study: Study

    def arms(self, options: Options) -> dict[str, Config]:
        """The config of every arm's first run."""
        return {arm: self.study.config(arm, options.seeds[0], options) for arm in self.study.arms}

    def measure(self, options: Options) -> Result:
        """All runs, then their scores."""
        scored = score(self.study, options)
        rows = [row(arm, of_seeds) for arm, of_seeds in scored.items()]
        return Result(rows, lambda figure: draw(figure.add_subplot(), scored), NOTES)


def score(study: Study, options: Options) -> dict[str, dict[int, Scored]]:
    """By arm and seed."""
    found: dict[str, dict[int, Scored]] = {arm: {} for arm in study.arms}
    for arm, seed, run_dir in study.runs(options):
        found[arm][seed] = Scored.read(run_dir)
    return found


def row(arm: str, of_seeds: Mapping[int, Scored]) -> Row:
    """One arm of the table; shares in per cent."""
    runs = list(of_seeds.values())
    return {
        "arm": arm,
        "before, %": Spread([100 * run.before for run in runs]),
        "after, %": Spread([100 * run.after for run in runs]),
        "swing": Spread([100 * swing(run.curve) for run in runs]),
        "sag": Spread([100 * sag(run.curve) for run in runs]),
        "staleness": Spread([run.staleness for run in runs]),
        "trajectories": Spread([float(run.trajectories) for run in runs]),
    }


def draw(ax: Axes, scored: Mapping[str, Mapping[int, Scored]]) -> None:
    """Mean curve per arm, and the band between its lowest and highest seed."""
    for index, (arm, of_seeds) in enumerate(scored.items()):
        color, style = COLORS[index % len(COLORS)], ("-", "--", ":")[index // len(COLORS) % 3]
        curves = [np.array(run.curve) for run in of_seeds.values()]
        steps = np.unique(np.concatenate(curves)[:, 0])
        values = 100 * np.array([np.interp(steps, curve[:, 0], curve[:, 1]) for curve in curves])
        ax.plot(steps, values.mean(0), style, color=color, label=arm)
        ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.12, linewidth=0)
    ax.set_xlabel("step")
    ax.set_ylabel("pass@1, validation, %")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
