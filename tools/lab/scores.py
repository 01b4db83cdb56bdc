"""Where runs of the quickstart end up: held-out pass@1 and how steady the way there was, per arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab import skill
from lab.curves import Curve, sag, swing
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, Study
from tba_hpc.config import Config
from tba_hpc.report.data import RunData
from tba_hpc.report.summary import summary_of
from tba_hpc.run.directory import RunDir

NOTES = (
    "Before, after: greedy pass@1 on the test problems. Swing: standard deviation of pass@1 on the "
    "validation problems over the last third of a run; sag: its largest fall from a peak; both in points.",
    "Staleness: steps between the weights that sampled and those that train, mean over a run's batches.",
)


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
        validation = [(float(e.step), e.score) for e in data.evaluated("validation")]
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
        return self.study.configs(options)

    def measure(self, options: Options) -> Result:
        """All runs, then their scores."""
        scored = score(self.study, options)
        rows = [row(arm, of_seeds) for arm, of_seeds in scored.items()]
        return Result(rows, [panel(scored)], NOTES)


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


def panel(scored: Mapping[str, Mapping[int, Scored]]) -> Panel:
    """Validation pass@1 over steps."""
    series = [
        Series(arm, [[(step, 100 * value) for step, value in run.curve] for run in of_seeds.values()])
        for arm, of_seeds in scored.items()
    ]
    return Panel("step", "pass@1, validation, %", series)


SHARE = Scores(
    "How much replay? m on arithmetic",
    Study(
        {f"m = {m:g}": (f"buffer.most_on_policy={m}",) for m in (0.0, 0.5, 0.95, 1.0)},
        skill.UNTUNED,
        steps=350,
        model=skill.MODEL,
    ),
)

SEARCHERS = Scores(
    "Do more searchers help where few completions are right? Whole runs on arithmetic",
    Study(
        {
            f"{n} searcher{'s' * (n > 1)}": (
                f"launch.searchers={n}",
                f"buffer.initial_completions={128 * n}",
            )
            for n in (1, 2, 4)
        },
        skill.UNTUNED,
        steps=300,
        model=skill.SPARSE,
    ),
)
