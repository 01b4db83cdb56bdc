"""What an experiment leaves: a table as Markdown and JSON, a plot, and where, when and how it was measured.

It must not know how anything was measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from matplotlib import rc_context
from matplotlib.figure import Figure

from tba_hpc.report import plots
from tba_hpc.report.tables import NOTHING

BLUE, ORANGE, GREEN, ROSE = "#2f6fb2", "#d97706", "#2f8f5b", "#c2416b"
COLORS = (BLUE, ORANGE, GREEN, ROSE, "#7c5cc4", "#6b7280")
_INKS = {plots.INK: "#1f2937", plots.MUTED: "#4b5563", plots.GRID: "#d1d5db"}
STYLE = {
    key: _INKS.get(value, value) if isinstance(value, str) else value for key, value in plots.STYLE.items()
}
"""The report's look, in fixed colours."""


@dataclass(frozen=True)
class Spread:
    """One value per seed; None where a seed has none, such as a threshold that it never reached."""

    values: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        """The values that there are."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Of the values that there are."""
        return statistics.fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds (n − 1), of at least two."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return NOTHING
        text = _number(self.mean)
        text += f" ± {_number(self.deviation)}" if self.deviation is not None else ""
        missing = len(self.values) - len(self.known)
        return f"{text} ({len(self.known)} of {len(self.values)})" if missing else text

    def to_json(self) -> dict[str, object]:
        """Mean, deviation, and every seed's value."""
        return {"mean": self.mean, "sd": self.deviation, "values": list(self.values)}


Cell = str | int | float | Spread | None
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Result:
    """rows: alike in their keys. draw: fills a figure. notes: sentences without which the table misleads."""

    rows: Sequence[Row]
    draw: Callable[[Figure], None]
    notes: Sequence[str] = ()


def machine() -> str:
    """Cores that this process may use, processor, memory, as the system names them."""
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    return f"{cores} cores of {_processor()}, {memory:.0f} GiB"


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def provenance(seeds: Sequence[int]) -> dict[str, object]:
    """Machine, date and load before anything starts: take it first."""
    return {
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2),
        "seeds": list(seeds),
    }


def write(result: Result, folder: Path, *, title: str, origin: Mapping[str, object]) -> str:
    """Write table.md, table.json and plot.png into ``folder``; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(result, title, origin)
    (folder / "table.md").write_text(text)
    plain = [{name: _plain(cell) for name, cell in row.items()} for row in result.rows]
    record = {"title": title, **origin, "rows": plain, "notes": list(result.notes)}
    (folder / "table.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        result.draw(figure)
        figure.savefig(folder / "plot.png", dpi=160)
    return text


def markdown(result: Result, title: str, origin: Mapping[str, object]) -> str:
    """Title, table, notes, origin."""
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


def _plain(cell: Cell) -> object:
    return cell.to_json() if isinstance(cell, Spread) else cell


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
