"""Draws the plots of the report page and of ``tba compare`` as SVG, for light and dark mode."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tba_hpc.core.types import Split
from tba_hpc.core.wording import printable
from tba_hpc.report.curves import NAMED, SHOWN_REWARDS, Curve
from tba_hpc.report.data import MANY_SEARCHERS, RunData
from tba_hpc.report.summary import policy_name, reference_of, same_reference

VARIABLES = ("ink", "muted", "grid", "blue", "orange", "green", "rose")
COLOURS = {name: f"#0{i}0{i}0{i}" for i, name in enumerate(VARIABLES, 1)}
"""Colour that stands for each CSS variable of the page while matplotlib draws; see ``_themed``."""

INK, MUTED, GRID, BLUE, ORANGE, GREEN, ROSE = COLOURS.values()

STYLE: dict[Any, object] = {
    "text.parse_math": False,  # a task may give its score any name
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
"""Left, bottom, width and height of the axes, as shares of the figure. matplotlib would need a second to
choose them."""


class Plot(NamedTuple):
    """A drawn figure. note: text beside the title. svg: an <svg> element."""

    title: str
    note: str
    svg: str


Line = tuple[str, str, str]
"""A metric, its colour, and its name in the legend."""

Axis = Callable[[Axes], object]
"""Function that sets up the vertical axis after the curves are drawn."""


class Lines(NamedTuple):
    """A figure of metrics over the steps.

    axis: sets up the vertical axis; ``id`` leaves that to matplotlib. compared: whether ``tba compare`` draws
    the first metric for several runs. above: the figure is drawn only if some value exceeds this one.
    """

    title: str
    note: str
    lines: Sequence[Line]
    axis: Axis = id
    compared: bool = False
    above: float = -math.inf


def plots(data: RunData) -> list[Plot]:
    """Draw all figures of the report page. The run must have taken at least one step."""
    drawn = (
        _plot(printable(data.score_name), "greedy", _score, data),
        _plot("Score and distance", "a point per evaluation", _pareto, data),
        *(_plot(figure.title, figure.note, _lines, data, figure) for figure in _figures(data)),
        _plot("Searchers", "tokens per second, by minute of the run", _throughput, data),
    )
    return [plot for plot in drawn if plot]


def _figures(data: RunData) -> list[Lines]:
    """Return FIGURES. If the task names several rewards, add a second figure, of SHOWN_REWARDS of them."""
    names = _reward_names(data)
    if not names:
        return [*FIGURES]
    shown = names[:SHOWN_REWARDS]
    room = 48 // len(shown)  # characters of a name in the legend
    lines = [(name, COLOURS[run_line(i)[0]], _reward_name(name)[-room:]) for i, name in enumerate(shown)]
    left_out = f"; {len(shown)} of {len(names)}" if len(names) > len(shown) else ""
    note = f"mean per fresh completion, without weights{left_out}"
    return [FIGURES[0], Lines("Rewards by name", note, lines), *FIGURES[1:]]


def _reward_names(*runs: RunData) -> list[str]:
    """Return the metrics of the rewards that the runs' tasks return by name."""
    return sorted({name for data in runs for name in data.trends.named_rewards})


def _reward_name(metric: str) -> str:
    """Return a reward's name without the underscores in front, which matplotlib's legends leave out."""
    return metric.removeprefix(NAMED).lstrip("_")


def overlays(runs: Sequence[RunData], *, kl: bool = True) -> list[Plot]:
    """Draw the curves of several runs over each other, by step. A figure that no run has is left out.

    kl: whether to draw KL, which can be compared only if all runs have the same reference.
    """
    names = [data.score_name for data in runs if data.evaluations] or ["score"]
    rewards = [
        Lines(f"Reward {_reward_name(name)}", "mean per fresh completion, without weights", _one(name))
        for name in _reward_names(*runs)[:SHOWN_REWARDS]
    ]
    shown = [figure for figure in FIGURES if figure.compared and (kl or figure.title != "KL")]
    shown[1:1] = rewards
    drawn = (
        _plot(printable(names[0]), "validation, and held-out before and after", _scores, runs),
        *(_plot(figure.title, _note_of_first(figure), _overlaid, runs, figure) for figure in shown),
    )
    return [plot for plot in drawn if plot]


def _note_of_first(figure: Lines) -> str:
    """Return the note on a plot that shows only the first metric of a figure.

    It is the figure's note, followed by the metric's name in the legend, if the metric has one.
    """
    return ": ".join(part for part in (figure.note, figure.lines[0][2]) if part)


def run_line(index: int) -> tuple[str, str]:
    """Return the colour, a name in VARIABLES, and the line style of run ``index`` among several."""
    return ("blue", "orange", "green", "rose")[index % 4], ("solid", "dashed", "dotted")[index // 4 % 3]


def _plot(title: str, note: str, draw: Callable[..., bool], *given: object) -> Plot | None:
    """Draw a figure by ``draw(axes, *given)``; None if ``draw`` returns False, having drawn nothing."""
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(5.0, 2.5))
        ax = figure.add_axes(AXES)
        if not draw(ax, *given):
            return None
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0, borderpad=0.2)
        ax.yaxis.get_offset_text().set_horizontalalignment("right")  # not into the legend
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Plot(title, note, _themed(out.getvalue(), title))


def _themed(svg: str, title: str) -> str:
    """Return the <svg> element with ``title`` as its label, no fixed size, and the page's CSS variables."""
    svg = printable(svg[svg.index("<svg") :])
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    label = f' role="img" aria-label="{html.escape(title)}"'
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', lambda found: found[1] + label, svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for variable, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    return svg


# --- Axes ---


def _steps_axis(ax: Axes, *runs: RunData) -> None:
    """Set the horizontal axis from step 0 to the last step of all runs."""
    last = max([1.0, *(data.step for data in runs)])
    ax.set_xlim(-0.02 * last, 1.02 * last)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("step")


def _percents(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _shares(ax: Axes) -> None:
    ax.set_ylim(-0.02, 1.02)
    _percents(ax)


def _small_share(ax: Axes) -> None:
    """Set the vertical axis from 0 to a little above the largest value, but at least to 5 %."""
    ax.set_ylim(0, max(0.05, 1.15 * max(_values(ax), default=0.0)))
    _percents(ax)


def _from_zero(ax: Axes) -> None:
    ax.set_ylim(bottom=0)


def _counts(ax: Axes) -> None:
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _log_scale(ax: Axes) -> None:
    """Set a log scale that shows the engine gap of float32, about 1e-5, and of bfloat16, about 1e-2."""
    drawn = [value for value in _values(ax) if value > 0]
    ax.set_ylim(min([1e-5, *drawn]) / 2, max([1e-1, *drawn]))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _values(ax: Axes) -> list[float]:
    """Return the y values of all drawn lines."""
    return [y for line in ax.get_lines() for y in np.atleast_1d(np.asarray(line.get_ydata(), float))]


# --- Curves ---


def _columns(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of a curve's points, both float [N]."""
    columns = np.array([point[:2] for point in curve.points], float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving mean over about a twentieth of the points; windows shrink at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None, **style: Any) -> None:
    """Draw a line; a single point becomes a dot."""
    ax.plot(x, y, color=color, label=label, marker="o" if len(x) == 1 else None, **style)


def _trend(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """Draw the moving mean of the points and, if there are many, the points faintly under it."""
    if len(x) > 40:
        ax.plot(x, y, color=color, alpha=0.25, linewidth=0.9)
    _line(ax, x, _smooth(y), color, label)


def _lines(ax: Axes, data: RunData, figure: Lines) -> bool:
    known = [line for line in figure.lines if data.trends.curves[line[0]].sums]
    for name, color, label in known:
        _trend(ax, *_columns(data.trends.curves[name]), color, label)
    _steps_axis(ax, data)
    figure.axis(ax)
    return max(_values(ax), default=-math.inf) > figure.above


def _overlaid(ax: Axes, runs: Sequence[RunData], figure: Lines) -> bool:
    """Draw the first metric of a figure for each run; return whether any run has values of it."""
    curves = [data.trends.curves.get(figure.lines[0][0], Curve()) for data in runs]
    for index, curve in enumerate(curves):
        (x, y), (color, style) = _columns(curve), run_line(index)
        _line(ax, x, _smooth(y), COLOURS[color], linestyle=style)
    _steps_axis(ax, *runs)
    figure.axis(ax)
    return any(curve.sums for curve in curves)


def run_minutes(data: RunData) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts unix seconds to minutes of training, without pauses between attempts.

    The function converts arrays of any length.
    """
    stretches = data.trainer.stretches
    lengths = np.array([stretch.end - stretch.start for stretch in stretches])
    ends = np.cumsum(lengths)
    knots = np.array([knot for stretch in stretches for knot in (stretch.start, stretch.end)])
    minutes = np.column_stack([ends - lengths, ends]).ravel() / 60
    return lambda unix: np.interp(unix, knots, minutes)


def _throughput(ax: Axes, data: RunData) -> bool:
    """Draw the throughput of each searcher; for many searchers, the range and the mean."""
    minutes = run_minutes(data)
    curves = {index: _columns(searcher.rates) for index, searcher in data.searchers.items()}
    known = {index: (minutes(when), rate) for index, (when, rate) in curves.items() if len(when)}
    if len(known) > MANY_SEARCHERS:
        grid = np.linspace(0, max(x[-1] for x, _ in known.values()), 200)
        rates = np.array([np.interp(grid, x, y) for x, y in known.values()])
        ax.fill_between(grid, rates.min(0), rates.max(0), color=BLUE, alpha=0.14, linewidth=0, label="all")
        _trend(ax, grid, rates.mean(0), BLUE, f"mean of {len(rates)} searchers")
    else:
        for (index, (x, y)), color in zip(known.items(), (BLUE, ORANGE, GREEN, ROSE), strict=False):
            # Only the first label says "searcher": four long labels would be wider than the figure.
            _trend(ax, x, y, color, f"searcher {index}" if color == BLUE else f"{index}")
    _counts(ax)
    ax.set_xlabel("minute")
    return bool(known)


# --- Scores ---


def _score(ax: Axes, data: RunData) -> bool:
    """Draw validation scores as a line, and held-out test scores as diamonds with their values."""
    validation, test = (
        [(e.step, data.score(e).value) for e in data.evaluated(split)] for split in ("validation", "test")
    )
    _points(ax, validation, marker="o", color=BLUE, label="validation")
    _points(
        ax,
        test,
        marker="D",
        linestyle="none",
        color=ORANGE,
        markersize=7,
        label="held-out test, before and after",
    )
    if test:
        ax.axhline(test[0][1], color=ORANGE, linewidth=1, linestyle=(0, (2, 3)))
    for i, (step, value) in enumerate(test):
        low = not data.graded and value < 0.1  # keeps the text off the axis labels
        place: dict[str, Any] = {"xytext": (0, -9), "ha": "right"}
        if i == 0:
            place = {"xytext": (9, 14 if low else -5), "ha": "left"}
        _note(ax, data.show(value), (step, value), weight="bold", **place)
    _score_axis(ax, data)
    return bool(validation or test)


def _points(ax: Axes, found: Sequence[tuple[float, float]], **style: Any) -> None:
    """Draw the points (x, y) in ``found``, without cutting off markers at the edge of the axes."""
    ax.plot([x for x, _ in found], [y for _, y in found], clip_on=False, **style)


def _note(ax: Axes, text: str, at: tuple[float, float], **style: Any) -> None:
    ax.annotate(text, at, textcoords="offset points", va="top", **style)


def _score_axis(ax: Axes, *runs: RunData) -> None:
    if not any(data.graded for data in runs):
        ax.set_ylim(0, 1.03)
        _percents(ax)
    _steps_axis(ax, *runs)


def _pareto(ax: Axes, data: RunData) -> bool:
    """Draw the score against the perplexity under one reference; points up and to the left are better."""
    train = data.config.train
    found = same_reference(train, sorted(data.evaluations.values(), key=lambda evaluation: evaluation.step))
    if len(found) < 2:
        return False
    for split, marker, size, color in (("test", "D", 7, ORANGE), ("validation", "o", 4, BLUE)):
        if not (points := [(e.perplexity or 0.0, data.score(e).value) for e in found if e.split == split]):
            continue
        _points(ax, points, color=color, alpha=0.3, linewidth=0.9)
        _points(ax, points, marker=marker, linestyle="none", color=color, markersize=size, label=split)
    ax.margins(0.1, 0.15)
    middle = sum(ax.get_xlim()) / 2
    for e in (found[0], found[-1]):
        at = (e.perplexity or 0.0, data.score(e).value)
        place: dict[str, Any] = {"xytext": (6, -4), "ha": "left"}
        if at[0] > middle:  # else the text would leave the figure
            place = {"xytext": (-6, -4), "ha": "right"}
        _note(ax, f"step {e.step}", at, fontsize=7.5, color=MUTED, **place)
    ax.set_xlabel(f"perplexity of the answers under the {policy_name(reference_of(train, found[-1]))}")
    if not data.graded:
        _percents(ax)
    return True


def _scores(ax: Axes, runs: Sequence[RunData]) -> bool:
    for index, data in enumerate(runs):
        color, style = run_line(index)
        looks: dict[Split, dict[str, Any]] = {
            "validation": {"linestyle": style, "marker": "o", "markersize": 3},
            "test": {"linestyle": "none", "marker": "D", "markersize": 7},
        }
        for split, look in looks.items():
            found = [(e.step, data.score(e).value) for e in data.evaluated(split)]
            _points(ax, found, color=COLOURS[color], **look)
    _score_axis(ax, *runs)
    return any(data.evaluations for data in runs)


# --- The figures of metrics ---


def _one(name: str, color: str = BLUE) -> list[Line]:
    return [(name, color, "")]


def _both(what: str) -> list[Line]:
    """Return two lines: metric search/``what``, of fresh completions, and train/``what``, of the batch."""
    return [(f"search/{what}", ORANGE, "searchers, fresh"), (f"train/{what}", BLUE, "training batch")]


OFF_POLICY = [
    ("train/ess", BLUE, "effective sample size"),
    ("train/clip_share", ROSE, "clipped, capped or masked"),
]
DRIFT = [
    ("train/log_weight", BLUE, "all completions"),
    ("train/better_log_weight", ROSE, "above their group's mean reward"),
]
STALENESS = [
    ("staleness/mean", BLUE, "first token"),
    ("staleness/end", GREEN, "last token"),
    ("staleness/max", ORANGE, "max"),
]
BUFFER = [
    ("buffer/size", BLUE, "held"),
    ("buffer/added", GREEN, "added"),
    ("buffer/duplicates", ORANGE, "duplicates"),
    ("buffer/evicted", ROSE, "evicted"),
]
SEARCHERS_TIME = [
    ("search/busy_share", BLUE, "in the engine"),
    ("search/paused_share", ORANGE, "idle"),
    ("search/seal_share", GREEN, "sealing shards"),
]
WEIGHTS = [
    ("sync/publish_stall_seconds", ROSE, "trainer hands over"),
    ("search/load_seconds", GREEN, "engine loads"),
    ("search/propagation_seconds", BLUE, "publish to use"),
]

FIGURES = (
    Lines("Reward", "mean per completion", _both("reward"), compared=True),
    Lines("KL", "from the reference, nats per fresh completion", _one("search/kl", ORANGE), compared=True),
    Lines("Log-ratio", "log π/π_ref of the batch, nats; not a KL if data is old", _one("train/log_ratio")),
    Lines("Entropy", "of fresh samples, nats per token", _one("search/entropy", ORANGE), _from_zero, True),
    Lines("Off-policy", "of a batch", OFF_POLICY, _shares, True),
    Lines("Drift", "log π/π_behaviour of the batch, nats per completion", DRIFT),
    Lines("Engine gap", "between engine and learner, nats per token", _both("engine_gap"), _log_scale),
    Lines("Groups without variance", "whose rewards are equal", _both("flat_groups"), _shares),
    Lines("Loss", "of the objective", _one("train/loss"), compared=True),
    Lines("Gradient norm", "before clipping", _one("train/grad_norm", ROSE), compared=True),
    Lines("Length", "sampled tokens per completion", _both("length"), compared=True),
    Lines("Turns", "per fresh completion", _one("search/turns", ORANGE), above=1),
    Lines("Failed calls", "of tools, by fresh completions", _one("search/failed_calls", ROSE), _small_share),
    Lines("Environment", "share of tokens that it wrote", _both("environment_share"), _shares, above=0),
    Lines("Truncated", "cut off by the token limit", _one("search/truncated_share", ORANGE), _small_share),
    Lines("Replay ratio", "steps that learned from a trajectory", _one("train/replay_ratio"), compared=True),
    Lines("Staleness", "optimizer steps, of a batch", STALENESS, _from_zero, True),
    Lines("Trainer wait", "wall time outside the optimizer step", _one("train/wait_share"), _small_share),
    Lines("Searchers' time", "shares of wall time", SEARCHERS_TIME, _shares),
    Lines("Weights", "seconds to publish and to load them", WEIGHTS, _from_zero),
    Lines("Replay buffer", "trajectories", BUFFER, _counts),
    Lines("Learning rate", "of the step", _one("train/learning_rate"), _from_zero),
    Lines("β", "KL coefficient, the target policy's temperature", _one("train/beta", ORANGE), _from_zero),
)
