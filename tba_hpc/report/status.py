"""What the terminal shows: a live display of a run, and tables that are JSON on request.

The display only reads metrics files, so it may follow a run from anywhere; where the output is no
terminal it prints one plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba_hpc.config import Config
from tba_hpc.metrics import MetricsTail, Record, number
from tba_hpc.report.summary import Summary, index_of, read_evaluations, searcher_files, series
from tba_hpc.state import Evaluation, RunDir

LINE_SECONDS = 5.0
"""Pause between two plain lines where the output is no terminal."""

REFRESH_PER_SECOND = 4
"""How often a terminal is redrawn."""

MANY_SEARCHERS = 4
"""Above this number the searchers are shown together."""

NOTHING = "–"
"""Shown where there is no value yet."""

PACE_STEPS = 20
"""Steps whose mean duration the estimate of the time left is made from."""


@dataclass
class RunView:
    """The present state of a run, folded from its metrics as they come in."""

    run: RunDir
    config: Config
    latest: Record = field(default_factory=dict)
    searchers: dict[int, Record] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    phase: str = "starting"
    _times: list[float] = field(default_factory=list)
    _tails: dict[Path, MetricsTail] = field(default_factory=dict)

    def skip_past(self) -> None:
        """Take what an earlier attempt left behind as known, not as news."""
        self.update()
        self.latest, self.searchers, self._times, self.phase = {}, {}, [], "starting"

    def update(self) -> None:
        """Read what is new in the run directory."""
        for record in self._new(self.run.metrics_file("trainer")):
            self._take(record)
        for path in searcher_files(self.run):
            for record in self._new(path):
                self.searchers[index_of(path)] = record
        self.evaluations = read_evaluations(self.run, self.evaluations)

    def _new(self, path: Path) -> list[Record]:
        return self._tails.setdefault(path, MetricsTail(path)).new()

    def _take(self, record: Record) -> None:
        event = record.get("event")
        if event is None:
            self.phase = "training"
            self._times = [*self._times, number(record, "time", 0.0)][-PACE_STEPS - 1 :]
        elif event != "checkpoint":
            self.phase = str(event)
        self.latest = {**self.latest, **record}

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(number(self.latest, "step", 0))

    @property
    def eta(self) -> float | None:
        """Seconds left at the pace of the last steps; None before two steps."""
        if len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return pace * (self.config.train.steps - self.step)

    @property
    def headline(self) -> str:
        """What the run is doing, in words."""
        wanted = self.config.buffer.initial_completions
        if self.phase == "training":
            return "training"
        if self.phase == "finished" and not any(
            (found.split, found.step) == ("test", self.step) for found in self.evaluations.values()
        ):
            return "last step done, final evaluation"
        if self.phase in ("stopped", "finished"):
            return f"{self.phase} at step {self.step}"
        if size := int(number(self.latest, "buffer/size", 0)):
            return f"filling the buffer {min(size, wanted)}/{wanted}"
        if self.searchers:
            return "first completions, evaluation before training"
        return (
            "starting engines…" if self.phase == "starting" else "engines are up, first weights on their way"
        )

    def cells(self) -> dict[str, str]:
        """Column title → value, the numbers a user watches."""
        latest = self.latest
        validation = self._pass_at_1("validation")[-1:]
        test = self._pass_at_1("test")
        return {
            "pass@1": " → ".join(map(percent, validation)) or NOTHING,
            "test": " → ".join(map(percent, test[:1] + test[1:][-1:])) or NOTHING,
            "reward": _show(latest, "train/reward", "{:.3f}"),
            "loss": _show(latest, "train/loss", "{:.4f}"),
            "KL": _show(latest, "train/kl", "{:.2f}"),
            "staleness": _show(latest, "staleness/mean", "{:.1f}"),
            "trainer wait": _show(latest, "train/wait_share", "{:.1%}"),
            "buffer": _show(latest, "buffer/size", "{:,.0f}"),
            "tokens/s": self._rates(),
        }

    def _pass_at_1(self, split: str) -> list[float]:
        return [found.pass_at_1 for found in self.evaluations.values() if found.split == split]

    def _rates(self) -> str:
        """Tokens per second of each searcher; of many, their number times the mean."""
        rates = series([record for _, record in sorted(self.searchers.items())], "search/tokens_per_second")
        if len(rates) > MANY_SEARCHERS:
            return f"{len(rates)} × {sum(rates) / len(rates):,.0f}"
        return " + ".join(f"{rate:,.0f}" for rate in rates) or NOTHING


def percent(share: float) -> str:
    """One decimal: 51.2 %."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are any: 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _show(record: Record, name: str, style: str) -> str:
    value = number(record, name)
    return NOTHING if value is None else style.format(value)


def plain_line(view: RunView, elapsed: float) -> str:
    """The state of a run as one line of text."""
    parts = [f"[{duration(elapsed)}] {view.headline}"]
    if view.phase == "training":
        parts.append(f"step {view.step}/{view.config.train.steps}")
    if view.step:
        parts += [f"{title} {value}" for title, value in view.cells().items() if value != NOTHING]
    return " · ".join(parts)


def panel(view: RunView, elapsed: float) -> RenderableType:
    """The state of a run for a terminal: a line with the bar, below it the numbers."""
    head = Table.grid(padding=(0, 1))
    steps = view.config.train.steps
    left = "" if view.eta is None or view.phase != "training" else f"· {duration(view.eta)} left"
    head.add_row(
        Text(">", style="cyan"),
        Text(view.headline, style="bold"),
        ProgressBar(
            total=steps, completed=view.step, width=28, complete_style="cyan", finished_style="green"
        ),
        Text(f"{view.step}/{steps}"),
        Text(f"{duration(elapsed)} {left}", style="dim"),
    )
    if not view.step:
        return head
    cells = [
        Text.assemble((title, "dim"), "\n", value, justify="right") for title, value in view.cells().items()
    ]
    return Group(head, Padding(Columns(cells, padding=(0, 2)), (0, 0, 0, 2)))


class LiveDisplay:
    """Follows a run on the console: ``with LiveDisplay(run, config) as display: display.refresh()``.

    Draws only inside ``refresh``, so its owner decides when; no thread is started.
    """

    def __init__(self, run: RunDir, config: Config, *, console: Console | None = None) -> None:
        self._console = console or Console()
        self._view = RunView(run, config)
        self._start = time.monotonic()
        self._line = ""
        self._printed = self._start
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> LiveDisplay:
        self._view.skip_past()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.update()
        if self._live:
            self._live.stop()
        self._print(plain_line(self._view, self._elapsed))

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def refresh(self) -> None:
        """Read what is new and show it."""
        self._view.update()
        if self._live:
            self._live.update(panel(self._view, self._elapsed), refresh=True)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            self._print(plain_line(self._view, self._elapsed))

    def note(self, text: str) -> None:
        """Print a line that stays, above the display."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_status(run: RunDir, config: Config, *, as_json: bool = False) -> None:
    """Print once how a run stands."""
    view = RunView(run, config)
    view.update()
    where = {"run": str(run.path), "state": view.headline, "step": f"{view.step}/{config.train.steps}"}
    print_values({**where, **view.cells()}, as_json=as_json)


def follow(run: RunDir, config: Config) -> None:
    """Show a run live until it is finished or the user has seen enough (Ctrl-C)."""
    view, start = RunView(run, config), time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            view.update()
            live.update(panel(view, time.monotonic() - start), refresh=True)
            if run.finished:
                return
            time.sleep(1 / REFRESH_PER_SECOND)


Cell = str | int | float | bool | None


def print_summary(
    run: RunDir, summary: Summary, *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print what a run came to and where its results lie; as JSON, all of summary.json."""
    if as_json:
        print_values(asdict(summary), as_json=True)
        return
    shares = {
        "pass@1 before": summary.pass_at_1_before,
        "pass@1 after": summary.pass_at_1_after,
        "trainer wait": summary.trainer_wait_share,
    }
    places = {"model": run.export, "report": run.report, "summary": run.summary}
    values: dict[str, Cell] = {
        **{name: None if share is None else percent(share) for name, share in shares.items()},
        "held-out prompts": summary.test_prompts,
        "optimizer steps": summary.steps,
        "training time": duration(summary.train_seconds),
        "trajectories": summary.trajectories,
        "tokens": summary.tokens,
        **{name: str(path) for name, path in places.items() if path.exists()},
    }
    print_values(values, console=console)


def print_values(
    values: Mapping[str, Cell], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print names and values: a table of two columns, or a JSON object."""
    if as_json:
        print(json.dumps(dict(values), indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, _cell(value))
    (console or Console()).print(table)


def print_rows(
    rows: Sequence[Mapping[str, Cell]], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print rows with the same keys: a table, or a JSON list of objects."""
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, value in (rows[0] if rows else {}).items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    (console or Console()).print(table)


def _cell(value: Cell) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
