"""The figures of the report page, each an SVG element whose colours are the page's CSS variables.

So they follow light and dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tba_hpc.config import TrainSection
from tba_hpc.core.types import Split
from tba_hpc.report.curves import Curve
from tba_hpc.report.summary import (
    MANY_SEARCHERS,
    RunData,
    policy_name,
    reference_of,
    same_reference,
    score_name_of,
)
from tba_hpc.report.tables import percent
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.metrics import REWARD_EDGES

INK, MUTED, GRID = "#010101", "#020202", "#030303"
BLUE, ORANGE, GREEN, ROSE = "#040404", "#050505", "#060606", "#070707"
VARIABLES = dict(
    zip(
        (INK, MUTED, GRID, BLUE, ORANGE, GREEN, ROSE),
        ("ink", "muted", "grid", "blue", "orange", "green", "rose"),
        strict=True,
    )
)
"""Stand-in colours given to matplotlib → the CSS variables that replace them."""

STYLE: dict[Any, object] = {
    "text.parse_math": False,  # a task may call its score anything
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}

WAIT_GOAL = 0.05
"""Largest share of its time that the trainer should wait."""


EARLY_LATE = 0.2
"""Share of the weights' versions that the first and the last rewards of a histogram are of."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A captioned figure."""

    title: str
    note: str
    svg: str


Draw = Callable[[Axes, RunData, TrainSection], bool]
"""Draws one figure; whether there was anything to draw."""


def plots(data: RunData, train: TrainSection) -> list[Plot]:
    """Every figure of the page; at least one step was taken."""
    score = score_name_of(data.evaluations)
    drawn = [
        _plot(score if draw is _score else title, note, draw, data, train) for title, note, draw in PLOTS
    ]
    return [plot for plot in drawn if plot]


def _plot(title: str, note: str, draw: Callable[..., bool], *given: object) -> Plot | None:
    """Draw one figure of what is given; None if there was nothing to draw."""
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(5.0, 2.5), layout="constrained")
        if not draw(figure.add_subplot(), *given):
            return None
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Plot(title, note, _themed(out.getvalue(), title))


def _themed(svg: str, title: str) -> str:
    """Only the <svg> element, sized by the page, coloured by its CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    return svg


def _course(data: RunData, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric over the steps: two float arrays. Of fresh completions by the weights that sampled them."""
    return _columns(data.trends.curves[name])


def _columns(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Where its points are, and their values."""
    columns = np.array([(step, value) for step, value, _ in curve.points], float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a twentieth of the points; the window shrinks at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """The points, faint, under their moving mean; a single point as a dot."""
    if len(x) > 40:
        ax.plot(x, y, color=color, alpha=0.25, linewidth=0.9)
    ax.plot(x, _smooth(y), color=color, label=label, marker="o" if len(x) == 1 else None, markersize=4)


def _steps_axis(ax: Axes, data: RunData) -> None:
    """From step 0 to the last, the same on every plot."""
    last = max(1.0, data.trainer.step)
    ax.set_xlim(-0.02 * last, 1.02 * last)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("step")


def _percent_axis(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _legend(ax: Axes, columns: int = 3) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0, borderpad=0.2)


def _score(ax: Axes, data: RunData, train: TrainSection) -> bool:
    validation = [evaluation for evaluation in data.evaluations if evaluation.split == "validation"]
    ax.plot(
        [evaluation.step for evaluation in validation],
        [evaluation.score for evaluation in validation],
        *("o-",),
        color=BLUE,
        markersize=4,
        label="validation",
    )
    test = data.test()
    steps, shares = [e.step for e in test], [e.score for e in test]
    if test:
        ax.axhline(shares[0], color=ORANGE, linewidth=1, linestyle=(0, (2, 3)))
    ax.plot(steps, shares, "D", color=ORANGE, markersize=7, label="held-out test, before and after")
    for evaluation in test:
        ax.annotate(
            percent(evaluation.score),
            (evaluation.step, evaluation.score),
            xytext=(9, -5) if evaluation is test[0] else (0, -9),
            textcoords="offset points",
            ha="left" if evaluation is test[0] else "right",
            va="top",
            weight="bold",
        )
    ax.set_ylim(0, 1.03)
    _percent_axis(ax)
    _steps_axis(ax, data)
    _legend(ax)
    return bool(data.evaluations)


def _pareto(ax: Axes, data: RunData, train: TrainSection) -> bool:
    """What the score cost in distance from one reference: up and to the left is better."""
    found = same_reference(train, sorted(data.evaluations, key=lambda evaluation: evaluation.step))
    shown = _scatter(ax, found, "validation", "o", 4, BLUE) + _scatter(ax, found, "test", "D", 7, ORANGE)
    ax.margins(0.1, 0.15)
    if found:
        ax.set_xlabel(f"perplexity of the answers under the {policy_name(reference_of(train, found[-1]))}")
    _percent_axis(ax)
    _legend(ax)
    return shown > 1


def _scatter(
    ax: Axes, evaluations: Sequence[Evaluation], split: Split, marker: str, size: float, color: str
) -> int:
    """Score against perplexity of a split's evaluations, the step beside each point; returns their number."""
    found = [(e.perplexity, e.score, e.step) for e in evaluations if e.split == split and e.perplexity]
    x, y = [x for x, _, _ in found], [y for _, y, _ in found]
    ax.plot(x, y, color=color, alpha=0.3, linewidth=0.9)
    ax.plot(x, y, marker, color=color, markersize=size, label=split)
    for perplexity, score, step in found:
        ax.annotate(
            str(step),
            (perplexity, score),
            xytext=(6, -4),
            textcoords="offset points",
            va="top",
            fontsize=7.5,
            color=MUTED,
        )
    return len(found)


@dataclass(frozen=True, slots=True)
class Lines:
    """Draws metrics over the steps, those that there are; each with its colour and, among several, its label.

    shares: whether the axis shows 0 to 100 %. finish: what else the axes need.
    """

    lines: tuple[tuple[str, str, str | None], ...]
    shares: bool = False
    finish: Callable[[Axes], object] = id

    @classmethod
    def one(cls, name: str, color: str = BLUE, **options: Any) -> Lines:
        """A single metric."""
        return cls(((name, color, None),), **options)

    @classmethod
    def both(cls, what: str, **options: Any) -> Lines:
        """A metric of fresh completions and of the batch."""
        fresh, batch = (
            (f"search/{what}", ORANGE, "searchers, fresh"),
            (f"train/{what}", BLUE, "training batch"),
        )
        return cls((fresh, batch), **options)

    def __call__(self, ax: Axes, data: RunData, train: TrainSection) -> bool:
        known = [(_course(data, name), color, label) for name, color, label in self.lines]
        known = [line for line in known if len(line[0][0])]
        for (x, y), color, label in known:
            _line(ax, x, y, color, label)
        if self.shares:
            ax.set_ylim(-0.02, 1.02)
            _percent_axis(ax)
        _steps_axis(ax, data)
        if any(label for _, _, label in known):
            _legend(ax)
        self.finish(ax)
        return bool(known)


def _log_scale(ax: Axes) -> None:
    """So that float32's 1e-5 and bfloat16's 1e-2 both show."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 1e-5), max(high, 1e-1))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _small_share(ax: Axes) -> None:
    """From 0 to a little above the largest value, 5 % at least."""
    values = [y for line in ax.get_lines() for y in np.atleast_1d(np.asarray(line.get_ydata(), float))]
    ax.set_ylim(0, max(0.05, 1.15 * max(values, default=0.0)))
    _percent_axis(ax)


def _skipped(ax: Axes, data: RunData, train: TrainSection) -> bool:
    """Nothing to see where every step was taken."""
    x, y = _course(data, "train/skipped_steps")
    ax.plot(x, y, color=ROSE, drawstyle="steps-post")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    _steps_axis(ax, data)
    return bool(y.any())


def _rewards(ax: Axes, data: RunData, train: TrainSection) -> bool:
    """How rewards were spread early and late, over bins as wide as rewards are large."""
    found = [(at, np.array(row)) for at, row in data.rewards.points if len(row) == len(REWARD_EDGES) + 1]
    if not any(counts.any() for _, counts in found):
        return False
    first, last = found[0][0], found[-1][0]
    part = EARLY_LATE * (last - first)
    early = np.sum([counts for version, counts in found if version <= first + part], axis=0)
    late = np.sum([counts for version, counts in found if version >= last - part], axis=0)
    used = np.flatnonzero(early + late)
    bins = np.arange(used[0], used[-1] + 1)
    for shift, counts, color, label in (
        (-0.2, early, BLUE, f"up to step {first + part:.0f}"),
        (0.2, late, ORANGE, f"from step {last - part:.0f}"),
    ):
        ax.bar(bins + shift, counts[bins] / counts.sum(), 0.38, color=color, alpha=0.75, label=label)
    shown = bins[:: 1 + len(bins) // 6]
    ax.set_xticks(shown, [_bin_name(i) for i in shown])
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("reward")
    _percent_axis(ax)
    _legend(ax)
    return True


def _bin_name(index: int) -> str:
    """Its edges; those of the first and of the last go on without end."""
    edges = ["−∞", *(f"{edge:.2g}" for edge in REWARD_EDGES), "∞"]
    return f"{edges[index]} … {edges[index + 1]}"


def _staleness(ax: Axes, data: RunData, train: TrainSection) -> bool:
    x, largest = _course(data, "staleness/max")
    ax.fill_between(x, 0, largest, color=BLUE, alpha=0.14, linewidth=0, label="up to the largest")
    x, average = _course(data, "staleness/mean")
    _line(ax, x, average, BLUE, "mean")
    ax.set_ylim(bottom=0)
    _steps_axis(ax, data)
    _legend(ax)
    return len(x) > 0


def _histogram(ax: Axes, data: RunData, train: TrainSection) -> bool:
    rows = [row for _, row in data.trainer.staleness.points]
    total = np.zeros(max(map(len, rows), default=0))
    for row in rows:
        total[: len(row)] += row
    if not total.sum():
        return False
    ax.bar(np.arange(len(total)), total / total.sum(), color=BLUE, alpha=0.75, width=0.85)
    ax.grid(axis="x", visible=False)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("steps between sampling and training")
    _percent_axis(ax)
    return True


def run_minutes(data: RunData) -> Callable[[np.ndarray], np.ndarray]:
    """Maps unix time to minutes of running time: the pauses between attempts do not count."""
    stretches = data.trainer.stretches
    lengths = np.array([stretch.end - stretch.start for stretch in stretches])
    ends = np.cumsum(lengths)
    knots = np.array([knot for stretch in stretches for knot in (stretch.start, stretch.end)])
    minutes = np.column_stack([ends - lengths, ends]).ravel() / 60
    return lambda unix: np.interp(unix, knots, minutes)


def _throughput(ax: Axes, data: RunData, train: TrainSection) -> bool:
    minutes = run_minutes(data)
    curves = [_columns(searcher.rates) for searcher in data.searchers.values()]
    curves = [(minutes(when), rate) for when, rate in curves if len(when)]
    if not curves:
        return False
    if len(curves) > MANY_SEARCHERS:
        _band(ax, curves)
    else:
        for index, color, (x, y) in zip(data.searchers, (BLUE, ORANGE, GREEN, ROSE), curves, strict=False):
            _line(ax, x, y, color, f"searcher {index}")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_xlabel("minute")
    _legend(ax, columns=4)
    return True


def _band(ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Slowest to fastest searcher, and their mean, on a common grid of times."""
    grid = np.linspace(0, max(x[-1] for x, _ in curves), 200)
    rates = np.array([np.interp(grid, x, y) for x, y in curves])
    ax.fill_between(grid, rates.min(0), rates.max(0), color=BLUE, alpha=0.14, linewidth=0, label="all")
    _line(ax, grid, rates.mean(0), BLUE, f"mean of {len(curves)} searchers")


def _wait(ax: Axes, data: RunData, train: TrainSection) -> bool:
    x, y = _course(data, "train/wait_share")
    ax.plot(x, y, color=BLUE, marker="o" if len(x) == 1 else None, markersize=4)
    ax.set_ylim(0, max(0.06, 1.15 * y.max()) if len(y) else 1)
    ax.axhline(WAIT_GOAL, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="goal")
    _percent_axis(ax)
    _steps_axis(ax, data)
    _legend(ax)
    return len(x) > 0


def _buffer(ax: Axes, data: RunData, train: TrainSection) -> bool:
    drawn = 0
    for name, color, label in (
        ("buffer/size", BLUE, "held"),
        ("buffer/added", GREEN, "added"),
        ("buffer/duplicates", ORANGE, "duplicates"),
        ("buffer/evicted", ROSE, "evicted"),
    ):
        x, y = _course(data, name)
        ax.plot(x, y, color=color, label=label, marker="o" if len(x) == 1 else None, markersize=4)
        drawn += len(x)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _steps_axis(ax, data)
    _legend(ax, columns=4)
    return drawn > 0


def _schedules(ax: Axes, data: RunData, train: TrainSection) -> bool:
    x, rate = _course(data, "train/learning_rate")
    marker = "o" if len(x) == 1 else None
    ax.plot(x, rate, color=BLUE, marker=marker, label="learning rate (left)")
    ax.set_ylim(0, 1.15 * rate.max() if len(rate) and rate.max() > 0 else 1)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))
    twin = ax.twinx()
    x, beta = _course(data, "train/beta")
    ax.plot([], [], color=ORANGE, label="β (right)")
    twin.plot(x, beta, color=ORANGE, marker=marker)
    twin.set_ylim(0, 1.3 * beta.max() if len(beta) else 1)
    twin.grid(visible=False)
    _steps_axis(ax, data)
    _legend(ax)
    return len(x) > 0


PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("score", "greedy", _score),
    ("Score and distance", "a point per evaluation, and its step", _pareto),
    ("Reward", "mean per completion", Lines.both("reward")),
    ("Rewards of fresh completions", "share of them, at the beginning and at the end", _rewards),
    (
        "KL",
        "fresh samples to the reference, nats per completion",
        Lines.one("search/kl", ORANGE, finish=lambda ax: ax.axhline(0, color=MUTED, linewidth=0.8)),
    ),
    (
        "Log-ratio",
        "policy to reference on the batch, replayed data: no KL",
        Lines.one("train/log_ratio"),
    ),
    (
        "Entropy",
        "of fresh samples, nats per token",
        Lines.one("search/entropy", ORANGE, finish=lambda ax: ax.set_ylim(bottom=0)),
    ),
    (
        "Off-policy",
        "effective sample size, clip share; of a batch",
        Lines(
            (
                ("train/ess", BLUE, "effective sample size"),
                ("train/clip_share", ROSE, "clipped, capped or masked"),
            ),
            shares=True,
        ),
    ),
    (
        "Drift",
        "batch under the policy to what sampled it, nats per completion",
        Lines(
            (
                ("train/log_weight", BLUE, "all completions"),
                ("train/better_log_weight", ROSE, "those above their group's mean reward"),
            )
        ),
    ),
    (
        "Engine gap",
        "engine to learner at the same weights, nats per token",
        Lines.both("engine_gap", finish=_log_scale),
    ),
    (
        "Groups without variance",
        "share of groups with one reward for all",
        Lines.both("flat_groups", shares=True),
    ),
    ("Loss", "of the objective", Lines.one("train/loss")),
    ("Gradient norm", "before clipping", Lines.one("train/grad_norm", ROSE)),
    ("Skipped steps", "so far: loss or norm not finite", _skipped),
    ("Length", "tokens per completion", Lines.both("length")),
    (
        "Truncated",
        "share of completions cut off by the token limit",
        Lines.one("search/truncated_share", ORANGE, finish=_small_share),
    ),
    (
        "Replay ratio",
        "steps that learned from a trajectory of the batch",
        Lines.one("train/replay_ratio"),
    ),
    ("Staleness", "optimizer steps, mean and largest of a batch", _staleness),
    ("Staleness, all batches", "share of trajectories", _histogram),
    ("Searchers", "tokens per second, by minute of the run", _throughput),
    ("Trainer wait", "share of wall time outside the optimizer step", _wait),
    ("Replay buffer", "trajectories", _buffer),
    ("Schedules", "learning rate and β", _schedules),
)
"""Title, note, and what draws it; the first has the name of the task's score for its title."""


# --- Runs laid over each other ---


@dataclass(frozen=True, slots=True)
class RunLine:
    """How the curves of a run look: colour for matplotlib and the page's variable, dashes for both."""

    color: str
    variable: str
    dashes: Any
    css: str


def run_line(index: int) -> RunLine:
    """Of the run of that place among others: four colours, then the same dashed, then dotted."""
    color = (BLUE, ORANGE, GREEN, ROSE)[index % 4]
    dashes: tuple[tuple[Any, str], ...] = (("-", "solid"), ((0, (4, 2)), "dashed"), ((0, (1, 2)), "dotted"))
    return RunLine(color, VARIABLES[color], *dashes[index // 4 % 3])


def overlays(runs: Sequence[RunData], *, kl: bool = True) -> list[Plot]:
    """The curves of some runs laid over each other, by step; those that at least one run has.

    kl: whether theirs may be, since it is to one reference.
    """
    score = score_name_of(evaluation for data in runs for evaluation in data.evaluations)
    drawn = [
        _plot(score, "validation, and held-out before and after", _scores, runs),
        *(
            _plot(title, note, _over, runs, name)
            for title, note, name in OVERLAID
            if kl or name != "search/kl"
        ),
    ]
    return [plot for plot in drawn if plot]


OVERLAID = (
    ("Reward", "mean per fresh completion", "search/reward"),
    ("KL", "fresh samples to the reference, nats per completion", "search/kl"),
    ("Entropy", "of fresh samples, nats per token", "search/entropy"),
    ("Length", "tokens per fresh completion", "search/length"),
    ("Loss", "of the objective: not to be compared between objectives", "train/loss"),
    ("Gradient norm", "before clipping", "train/grad_norm"),
    ("Effective sample size", "share of a batch", "train/ess"),
    ("Staleness", "optimizer steps, mean of a batch", "staleness/mean"),
    ("Replay ratio", "steps that learned from a trajectory of the batch", "train/replay_ratio"),
)
"""Title, note and metric."""


def _over(ax: Axes, runs: Sequence[RunData], name: str) -> bool:
    """A figure of each run, smoothed."""
    drawn = 0
    for index, data in enumerate(runs):
        (x, y), line = _course(data, name), run_line(index)
        marker = "o" if len(x) == 1 else None
        ax.plot(x, _smooth(y), color=line.color, linestyle=line.dashes, marker=marker, markersize=4)
        drawn += len(x)
    _steps_axis(ax, max(runs, key=lambda data: data.trainer.step))
    return drawn > 0


def _scores(ax: Axes, runs: Sequence[RunData]) -> bool:
    for index, data in enumerate(runs):
        line, test = run_line(index), data.test()
        validation = [evaluation for evaluation in data.evaluations if evaluation.split == "validation"]
        for found, style, size in ((validation, line.dashes, 3), (test, "none", 7)):
            ax.plot(
                [evaluation.step for evaluation in found],
                [evaluation.score for evaluation in found],
                color=line.color,
                linestyle=style,
                marker="o" if found is validation else "D",
                markersize=size,
            )
    ax.set_ylim(0, 1.03)
    _percent_axis(ax)
    _steps_axis(ax, max(runs, key=lambda data: data.trainer.step))
    return any(data.evaluations for data in runs)
