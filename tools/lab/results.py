"""The results of an experiment: a table, a plot, and where, when and how they were measured.

Table and plot can be made again from the JSON alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, NullFormatter

from tba_hpc.report import plots
from tba_hpc.report.tables import NOTHING

BLUE, ORANGE, GREEN, ROSE = "#2f6fb2", "#d97706", "#2f8f5b", "#c2416b"
COLORS = (BLUE, ORANGE, GREEN, ROSE, "#7c5cc4", "#6b7280")
LINES = ("-", "--", ":")
_INKS = {plots.INK: "#1f2937", plots.MUTED: "#4b5563", plots.GRID: "#d1d5db"}
STYLE = {
    key: _INKS.get(value, value) if isinstance(value, str) else value for key, value in plots.STYLE.items()
}
"""Matplotlib settings of ``tba report``, with fixed colours."""


@dataclass(frozen=True)
class Spread:
    """One figure for each seed; None if there is none, such as a time to a threshold never reached."""

    values: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        """The values that are not None."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Mean of ``known``; None if it is empty."""
        return statistics.fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n − 1) of ``known``; None if it has fewer than two values."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return NOTHING
        text = _number(self.mean)
        text += f" ± {_number(self.deviation)}" if self.deviation is not None else ""
        missing = len(self.values) - len(self.known)
        return f"{text} ({len(self.known)} of {len(self.values)})" if missing else text


Cell = str | int | float | Spread | None
Row = Mapping[str, Cell]


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """The curves of one arm in a panel: one per seed, of points (x, y) with ascending x."""

    label: str
    curves: Sequence[Points]

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """All x of the curves [X], and the y of each curve at these x [C, X], interpolated linearly."""
        x_X = np.unique(np.concatenate([np.array(curve)[:, 0] for curve in self.curves]))
        return x_X, np.array([np.interp(x_X, *np.array(curve).T) for curve in self.curves])


@dataclass(frozen=True)
class Panel:
    """A plot of several arms, with the titles of its axes.

    banded: whether each arm is drawn as the mean of its curves, in a band from the lowest to the highest;
    otherwise each curve is drawn. level: y of a dashed line. logarithmic: whether the x axis is.
    """

    x: str
    y: str
    series: Sequence[Series]
    title: str = ""
    banded: bool = True
    level: float | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class Result:
    """A table and its plot.

    rows: rows of the table, all with the same keys. panels: plots, drawn side by side. notes: sentences that
    a reader of the table needs.
    """

    rows: Sequence[Row]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


def machine() -> str:
    """Describe this machine: cores that this process may use, processor, memory."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", listing.read_text() if listing.exists() else "", re.M)
    processor = next(iter(names), platform.machine())
    memory = psutil.virtual_memory().total / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, {memory:.0f} GiB"


def provenance(seeds: Sequence[int]) -> dict[str, object]:
    """Return machine, date, load and seeds. Call it before anything is started, for the load."""
    return {
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2),
        "seeds": list(seeds),
    }


def write(result: Result, folder: Path, *, title: str, origin: Mapping[str, object]) -> str:
    """Write table.md, table.json, plot.png and plot.svg into ``folder``; return the Markdown.

    title: title of the table. origin: the result of ``provenance``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(result, title, origin)
    (folder / "table.md").write_text(text)
    (folder / "table.json").write_text(to_json(result, title, origin))
    with rc_context({**STYLE, "svg.hashsalt": "tba-hpc"}):
        figure = draw(result.panels)
        figure.savefig(folder / "plot.png", dpi=160)
        figure.savefig(folder / "plot.svg", metadata={"Date": None})
    return text


def to_json(result: Result, title: str, origin: Mapping[str, object]) -> str:
    """Return everything from which table and plot are made, as JSON for ``from_json``."""
    return json.dumps({"title": title, **origin, **asdict(result)}, ensure_ascii=False) + "\n"


def from_json(text: str) -> tuple[Result, str, dict[str, object]]:
    """Return result, title and origin, as ``to_json`` was given them."""
    record = json.loads(text)
    rows = [
        {name: Spread(cell["values"]) if isinstance(cell, dict) else cell for name, cell in row.items()}
        for row in record.pop("rows")
    ]
    panels = [
        Panel(**{**panel, "series": [Series(**series) for series in panel["series"]]})
        for panel in record.pop("panels")
    ]
    return Result(rows, panels, record.pop("notes")), record.pop("title"), record


def draw(panels: Sequence[Panel]) -> Figure:
    """Draw the panels from left to right. An arm looks the same in all; the legend stands beside the last."""
    looks = looks_of(panels)
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    one_scale = len({panel.y for panel in panels}) == 1
    axes = figure.subplots(1, len(panels), sharey=one_scale, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for series in panel.series:
            _draw_series(ax, series, looks[series.label], banded=panel.banded)
        if panel.level is not None:
            ax.axhline(panel.level, color="#6b7280", linewidth=1, linestyle=(0, (4, 3)))
        ax.set_title(panel.title, fontsize=9)
        ax.set_xlabel(panel.x)
        if panel.logarithmic:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # powers of ten would be shown as raw TeX
            ax.xaxis.set_minor_formatter(NullFormatter())
        if not one_scale or ax is axes[0]:
            ax.set_ylabel(panel.y)
    if len(looks) > 1:
        lines = [Line2D([], [], label=label, **look) for label, look in looks.items()]
        axes[-1].legend(handles=lines, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def looks_of(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Return colour and line style of each arm, in the order of their first appearance."""
    arms = dict.fromkeys(series.label for panel in panels for series in panel.series)
    return {
        arm: {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index // len(COLORS)]}
        for index, arm in enumerate(arms)
    }


def _draw_series(ax: Axes, series: Series, look: Mapping[str, Any], *, banded: bool) -> None:
    if not banded:
        for index, curve in enumerate(series.curves):
            ax.plot(*zip(*curve, strict=True), label=None if index else series.label, alpha=0.85, **look)
        return
    x_X, y_CX = series.band
    ax.plot(x_X, y_CX.mean(0), label=series.label, **look)
    ax.fill_between(x_X, y_CX.min(0), y_CX.max(0), color=look["color"], alpha=0.12, linewidth=0)


def markdown(result: Result, title: str, origin: Mapping[str, object]) -> str:
    """Return title, table, notes and origin as Markdown."""
    names = list(result.rows[0])
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(_text(row[name]) for name in names) + " |" for row in result.rows),
    ]
    seeds = ", ".join(map(str, origin["seeds"]))  # type: ignore[call-overload]
    where = f"{origin['machine']}; {origin['date']}; load before {origin['load_before']}; seeds {seeds}."
    spread = "± is the standard deviation between seeds."
    return "\n".join(
        [f"## {title}", "", *lines, "", *(f"- {note}" for note in (*result.notes, spread, where)), ""]
    )


def _text(cell: Cell) -> str:
    if cell is None:
        return NOTHING
    return _number(cell) if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
