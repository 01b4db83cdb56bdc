"""The figures of the report page: SVG elements whose colours are CSS variables, for light and dark mode."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tba_hpc.config import TrainSection
from tba_hpc.core.types import Split
from tba_hpc.core.wording import printable
from tba_hpc.report.curves import Curve
from tba_hpc.report.data import MANY_SEARCHERS, RunData
from tba_hpc.report.summary import policy_name, reference_of, same_reference

VARIABLES = ("ink", "muted", "grid", "blue", "orange", "green", "rose")
COLOURS = {name: f"#0{i}0{i}0{i}" for i, name in enumerate(VARIABLES, 1)}
"""The page's CSS variables, and stand-ins for them that matplotlib takes."""

INK, MUTED, GRID, BLUE, ORANGE, GREEN, ROSE = COLOURS.values()

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
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "lines.solid_capstyle": "round",
    **{f"{axis}tick.color": GRID for axis in "xy"},
    **{f"{axis}tick.labelcolor": MUTED for axis in "xy"},
    **{f"{axis}tick.labelsize": 8.5 for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}

AXES = (0.12, 0.18, 0.86, 0.7)
"""Left, bottom, width and height of the axes: matplotlib takes a second to find these for a page."""


class Plot(NamedTuple):
    """A captioned figure."""

    title: str
    note: str
    svg: str


Draw = Callable[[Axes, RunData, TrainSection], bool]
"""Draws one figure; whether there was anything to draw."""


def plots(data: RunData, train: TrainSection) -> list[Plot]:
    """Every figure of the page; at least one step was taken."""
    score = [(printable(data.score_name), "greedy", _score)]
    drawn = (_plot(title, note, draw, data, train) for title, note, draw in (*score, *PLOTS))
    return [plot for plot in drawn if plot]


def _plot(title: str, note: str, draw: Callable[..., bool], *given: object) -> Plot | None:
    """Draw one figure of what is given; None if there was nothing to draw."""
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(5.0, 2.5))
        if not draw(figure.add_axes(AXES), *given):
            return None
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Plot(title, note, _themed(out.getvalue(), title))


def _themed(svg: str, title: str) -> str:
    """Only the <svg> element, sized by the page, coloured by its CSS variables."""
    svg = printable(svg[svg.index("<svg") :])
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    label = f' role="img" aria-label="{html.escape(title)}"'
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', lambda found: found[1] + label, svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for variable, stand_in in COLOURS.items():
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


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None, **style: Any) -> None:
    """A single point as a dot."""
    ax.plot(x, y, color=color, label=label, marker="o" if len(x) == 1 else None, **style)


def _trend(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """The points, faint, under their moving mean."""
    if len(x) > 40:
        ax.plot(x, y, color=color, alpha=0.25, linewidth=0.9)
    _line(ax, x, _smooth(y), color, label)


def _steps_axis(ax: Axes, *runs: RunData) -> None:
    """From step 0 to the last, the same on every plot."""
    last = max([1.0, *(data.step for data in runs)])
    ax.set_xlim(-0.02 * last, 1.02 * last)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("step")


def _percent_axis(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _counts_axis(ax: Axes) -> None:
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _legend(ax: Axes) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0, borderpad=0.2)


def _note(ax: Axes, text: str, at: tuple[float, float], **style: Any) -> None:
    ax.annotate(text, at, textcoords="offset points", va="top", **style)


def _score(ax: Axes, data: RunData, train: TrainSection) -> bool:
    """Validation as a line; the held-out test before and after as diamonds, with their values."""
    validation, test = data.evaluated("validation"), data.evaluated("test")
    values = [data.score(evaluation).value for evaluation in validation]
    ax.plot([e.step for e in validation], values, "o-", color=BLUE, label="validation")
    values = [data.score(evaluation).value for evaluation in test]
    if test:
        ax.axhline(values[0], color=ORANGE, linewidth=1, linestyle=(0, (2, 3)))
    label = "held-out test, before and after"
    ax.plot([e.step for e in test], values, "D", color=ORANGE, markersize=7, label=label)
    for i, (e, value) in enumerate(zip(test, values, strict=True)):
        low = not data.graded and value < 0.1  # not on the labels of the axis
        place: dict[str, Any] = {"xytext": (0, -9), "ha": "right"}
        if i == 0:
            place = {"xytext": (9, 14 if low else -5), "ha": "left"}
        _note(ax, data.show(value), (e.step, value), weight="bold", **place)
    _score_axis(ax, data)
    _steps_axis(ax, data)
    _legend(ax)
    return bool(validation or test)


def _score_axis(ax: Axes, data: RunData) -> None:
    if not data.graded:
        ax.set_ylim(0, 1.03)
        _percent_axis(ax)


def _pareto(ax: Axes, data: RunData, train: TrainSection) -> bool:
    """What the score cost in distance from one reference: up and to the left is better."""
    found = same_reference(train, sorted(data.evaluations.values(), key=lambda evaluation: evaluation.step))
    for split, marker, size, color in (("validation", "o", 4, BLUE), ("test", "D", 7, ORANGE)):
        shown = [e for e in found if e.split == split]
        x, y = [e.perplexity or 0.0 for e in shown], [data.score(e).value for e in shown]
        ax.plot(x, y, color=color, alpha=0.3, linewidth=0.9)
        ax.plot(x, y, marker, color=color, markersize=size, label=split)
        for place in {0, len(x) - 1} & {*range(len(x))}:
            at, step = (x[place], y[place]), shown[place].step
            _note(ax, f"step {step}", at, xytext=(6, -4), fontsize=7.5, color=MUTED)
    ax.margins(0.1, 0.15)
    if found:
        ax.set_xlabel(f"perplexity of the answers under the {policy_name(reference_of(train, found[-1]))}")
    if not data.graded:
        _percent_axis(ax)
    _legend(ax)
    return len(found) > 1


@dataclass(frozen=True, slots=True)
class Lines:
    """Draws metrics over the steps, those that there are; each with its colour and, among several, its label.

    shares: whether the axis shows 0 to 100 %. finish: what else the axes need.
    """

    lines: tuple[tuple[str, str, str | None], ...]
    shares: bool = False
    finish: Callable[[Axes], object] = id

    def __call__(self, ax: Axes, data: RunData, train: TrainSection) -> bool:
        known = [(_course(data, name), color, label) for name, color, label in self.lines]
        known = [line for line in known if len(line[0][0])]
        for (x, y), color, label in known:
            _trend(ax, x, y, color, label)
        if self.shares:
            ax.set_ylim(-0.02, 1.02)
            _percent_axis(ax)
        _steps_axis(ax, data)
        if any(label for _, _, label in known):
            _legend(ax)
        self.finish(ax)
        return bool(known)


def _one(name: str, color: str = BLUE, **options: Any) -> Lines:
    return Lines(((name, color, None),), **options)


def _both(what: str, **options: Any) -> Lines:
    """A metric of fresh completions and of the batch."""
    fresh = (f"search/{what}", ORANGE, "searchers, fresh")
    return Lines((fresh, (f"train/{what}", BLUE, "training batch")), **options)


def _values(ax: Axes) -> list[float]:
    """All that is drawn."""
    return [y for line in ax.get_lines() for y in np.atleast_1d(np.asarray(line.get_ydata(), float))]


def _log_scale(ax: Axes) -> None:
    """So that float32's 1e-5 and bfloat16's 1e-2 both show."""
    drawn = [value for value in _values(ax) if value > 0]
    ax.set_ylim(min([1e-5, *drawn]) / 2, max([1e-1, *drawn]))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _small_share(ax: Axes) -> None:
    """From 0 to a little above the largest value, 5 % at least."""
    ax.set_ylim(0, max(0.05, 1.15 * max(_values(ax), default=0.0)))
    _percent_axis(ax)


def _staleness(ax: Axes, data: RunData, train: TrainSection) -> bool:
    x, largest = _course(data, "staleness/max")
    ax.fill_between(x, 0, largest, color=BLUE, alpha=0.14, linewidth=0, label="up to the largest")
    x, average = _course(data, "staleness/mean")
    _trend(ax, x, average, BLUE, "mean")
    ax.set_ylim(bottom=0)
    _steps_axis(ax, data)
    _legend(ax)
    return len(x) > 0


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
    curves = {index: _columns(searcher.rates) for index, searcher in data.searchers.items()}
    known = {index: (minutes(when), rate) for index, (when, rate) in curves.items() if len(when)}
    if not known:
        return False
    if len(known) > MANY_SEARCHERS:
        _band(ax, list(known.values()))
    else:
        for (index, (x, y)), color in zip(known.items(), (BLUE, ORANGE, GREEN, ROSE), strict=False):
            _trend(ax, x, y, color, f"searcher {index}")
    _counts_axis(ax)
    ax.set_xlabel("minute")
    _legend(ax)
    return True


def _band(ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Slowest to fastest searcher, and their mean, on a common grid of times."""
    grid = np.linspace(0, max(x[-1] for x, _ in curves), 200)
    rates = np.array([np.interp(grid, x, y) for x, y in curves])
    ax.fill_between(grid, rates.min(0), rates.max(0), color=BLUE, alpha=0.14, linewidth=0, label="all")
    _trend(ax, grid, rates.mean(0), BLUE, f"mean of {len(curves)} searchers")


BATCH = (
    ("train/ess", BLUE, "effective sample size"),
    ("train/clip_share", ROSE, "clipped, capped or masked"),
)
DRIFT = (
    ("train/log_weight", BLUE, "all completions"),
    ("train/better_log_weight", ROSE, "those above their group's mean reward"),
)

BUFFER = (
    ("buffer/size", BLUE, "held"),
    ("buffer/added", GREEN, "added"),
    ("buffer/duplicates", ORANGE, "duplicates"),
    ("buffer/evicted", ROSE, "evicted"),
)

PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("Score and distance", "a point per evaluation", _pareto),
    ("Reward", "mean per completion", _both("reward")),
    (
        "KL",
        "fresh samples to the reference, nats per completion",
        _one("search/kl", ORANGE, finish=lambda ax: ax.axhline(0, color=MUTED, linewidth=0.8)),
    ),
    ("Log-ratio", "policy to reference on the batch, replayed data: no KL", _one("train/log_ratio")),
    (
        "Entropy",
        "of fresh samples, nats per token",
        _one("search/entropy", ORANGE, finish=lambda ax: ax.set_ylim(bottom=0)),
    ),
    ("Off-policy", "effective sample size, clip share; of a batch", Lines(BATCH, shares=True)),
    ("Drift", "batch under the policy to what sampled it, nats per completion", Lines(DRIFT)),
    (
        "Engine gap",
        "engine to learner at the same weights, nats per token",
        _both("engine_gap", finish=_log_scale),
    ),
    ("Groups without variance", "share of groups with one reward for all", _both("flat_groups", shares=True)),
    ("Loss", "of the objective", _one("train/loss")),
    ("Gradient norm", "before clipping", _one("train/grad_norm", ROSE)),
    ("Length", "tokens per completion", _both("length")),
    (
        "Truncated",
        "share of completions cut off by the token limit",
        _one("search/truncated_share", ORANGE, finish=_small_share),
    ),
    ("Replay ratio", "steps that learned from a trajectory of the batch", _one("train/replay_ratio")),
    ("Staleness", "optimizer steps, mean and largest of a batch", _staleness),
    ("Searchers", "tokens per second, by minute of the run", _throughput),
    (
        "Trainer wait",
        "share of wall time outside the optimizer step",
        _one("train/wait_share", finish=_small_share),
    ),
    ("Replay buffer", "trajectories", Lines(BUFFER, finish=_counts_axis)),
    ("Learning rate", "of the step", _one("train/learning_rate", finish=lambda ax: ax.set_ylim(bottom=0))),
    ("β", "KL coefficient of the step", _one("train/beta", ORANGE, finish=lambda ax: ax.set_ylim(bottom=0))),
)
"""Title, note, and what draws it; the score comes before them."""


# --- Runs laid over each other ---


def run_line(index: int) -> tuple[str, str]:
    """Colour and line style of the run at that place, by names that the page and matplotlib know."""
    return ("blue", "orange", "green", "rose")[index % 4], ("solid", "dashed", "dotted")[index // 4 % 3]


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


def overlays(runs: Sequence[RunData], *, kl: bool = True) -> list[Plot]:
    """The curves of some runs laid over each other, by step; those that at least one run has.

    kl: whether theirs may be, since it is to one reference.
    """
    names = [data.score_name for data in runs if data.evaluations] or ["score"]
    shown = [curve for curve in OVERLAID if kl or curve[2] != "search/kl"]
    drawn = [
        _plot(printable(names[0]), "validation, and held-out before and after", _scores, runs),
        *(_plot(title, note, _over, runs, name) for title, note, name in shown),
    ]
    return [plot for plot in drawn if plot]


def _over(ax: Axes, runs: Sequence[RunData], name: str) -> bool:
    """A figure of each run, smoothed."""
    for index, data in enumerate(runs):
        (x, y), (color, style) = _course(data, name), run_line(index)
        _line(ax, x, _smooth(y), COLOURS[color], linestyle=style)
    _steps_axis(ax, *runs)
    return any(data.trends.curves[name].sums for data in runs)


def _scores(ax: Axes, runs: Sequence[RunData]) -> bool:
    for index, data in enumerate(runs):
        color, style = run_line(index)
        looks: dict[Split, dict[str, Any]] = {
            "validation": {"linestyle": style, "marker": "o", "markersize": 3},
            "test": {"linestyle": "none", "marker": "D", "markersize": 7},
        }
        for split, look in looks.items():
            found = [(e.step, data.score(e).value) for e in data.evaluated(split)]
            ax.plot(*zip(*found, strict=True) if found else ([], []), color=COLOURS[color], **look)
    _score_axis(ax, next((data for data in runs if data.graded), runs[0]))
    _steps_axis(ax, *runs)
    return any(data.evaluations for data in runs)
