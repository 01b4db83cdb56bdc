"""Shows the state of a run: live on a terminal, live as plain lines elsewhere, or once as text or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba_hpc.config import Config, ConfigError
from tba_hpc.core.ports import RIGHT_AND_ENDED
from tba_hpc.core.wording import count, duration, percent
from tba_hpc.report.alerts import line
from tba_hpc.report.attempts import fault_words
from tba_hpc.report.curves import NAMED, SHOWN_REWARDS, Trends
from tba_hpc.report.data import MANY_SEARCHERS, Counts, RunData
from tba_hpc.report.run_state import Queue, QueueEntry, RunMonitor, RunState, job_of, run_state
from tba_hpc.report.summary import policy_name, reference_of, summary_of
from tba_hpc.report.tables import NOTHING, Terminal, print_lines
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.metrics import number
from tba_hpc.run.owners import Owner

LINE_SECONDS = 5.0
"""Pause between two plain lines if the output is not a terminal, in seconds."""

REFRESH_SECONDS = 1.0
"""Shortest pause between two readings of the run, in seconds."""

ROLES = {"0": "trainers", "1": "searchers"}
"""Roles of a het job's components, by number. The only component of another job holds all ranks."""


# --- Values ---


def _time_left(monitor: RunMonitor, now: RunState) -> list[str]:
    """Return a list with the time left as text; it is empty unless the run is training."""
    return [f"{duration(monitor.eta)} left"] if now.state == "training" and monitor.eta is not None else []


def cells(monitor: RunMonitor) -> dict[str, str]:
    """Return the numbers that a user watches, as strings, keyed by title.

    Reward, KL and entropy describe fresh completions; loss and staleness describe the last step's batch.
    """
    latest, trends = monitor.trainer.latest, monitor.trends
    validation, test = monitor.evaluated("validation"), monitor.evaluated("test")
    newest = sorted([*validation, *test], key=lambda found: found.step)[-1:]
    return {
        f"validation {monitor.score_name}": _scores(monitor, validation[-1:]),
        "test" if test[1:] else "test before": _scores(monitor, test[:1] + test[1:][-1:]),
        **_right_and_ended(newest),
        "perplexity": _perplexity(monitor.config, newest),
        "reward": _show(trends.latest("search/reward"), "{:.3f}"),
        "KL": _show(trends.latest("search/kl"), "{:.2f}"),
        "entropy": _show(trends.latest("search/entropy"), "{:.3f}"),
        "loss": _show(number(latest, "train/loss"), "{:.4f}"),
        "staleness": _show(number(latest, "staleness/mean"), "{:.1f}"),
        "trainer wait": _show(number(latest, "train/wait_share"), "{:.1%}"),
        "buffer": _show(number(latest, "buffer/size"), "{:,.0f}"),
        "tokens/s": _rates(monitor.rates),
    }


def _scores(data: RunData, evaluations: Sequence[Evaluation]) -> str:
    """Format scores, oldest first, with the step of the last one if the run has trained on since."""
    scores = " → ".join(data.show(data.score(evaluation).value) for evaluation in evaluations) or NOTHING
    return scores + "".join(f" (step {last.step})" for last in evaluations[-1:] if 0 < last.step < data.step)


def _right_and_ended(last: Sequence[Evaluation]) -> dict[str, str]:
    """Return a cell with the share of answers that are correct and were not cut off, keyed by its title.

    last: list that holds only the newest evaluation; empty without one. The result is empty if no answer can
    be called correct, or if no correct answer was cut off, because the share then equals the score.
    """
    told = last and last[0].tells_correct and last[0].cut_correct
    return {RIGHT_AND_ENDED: percent(last[0].ended_score)} if told else {}


def _perplexity(config: Config, last: Sequence[Evaluation]) -> str:
    """Format the perplexity of the newest evaluation, with the name of its reference if that changes.

    last: the newest evaluation, or none.
    """
    text = _show(last[-1].perplexity if last else None, "{:.3f}")
    if text == NOTHING or config.train.reference.name != "reset":
        return text
    return f"{text} under {policy_name(reference_of(config.train, last[-1]))}"


def _show(value: float | None, style: str) -> str:
    return NOTHING if value is None else style.format(value)


def _rates(rates: Sequence[float]) -> str:
    """Format each searcher's tokens per second; for many searchers, their number times the mean."""
    if len(rates) > MANY_SEARCHERS:
        return f"{len(rates)} × {sum(rates) / len(rates):,.0f}"
    return " + ".join(f"{rate:,.0f}" for rate in rates) or NOTHING


def facts(monitor: RunMonitor, now: RunState) -> dict[str, str]:
    """Return facts about a run, such as its ranks, checkpoint and faults, as strings, keyed by title."""
    attempt, job, trainer = monitor.attempt, job_of(monitor), monitor.trainer
    age, silence, trends = monitor.checkpoint_age, monitor.silence, monitor.trends
    ago = "" if age is None else f", {duration(age)} ago"
    aside = {"trajectory": trends.rejected, "optimizer step": trends.skipped}
    no_room = f"the checkpoint of step {number(trainer.postponed, 'step', 0):.0f}: "
    restarts = f", restarts: {attempt.restarts}" if attempt and job and attempt.job == job[0]["job"] else ""
    found = {
        "rewards": _named_rewards(trends),
        "attempt": f"{attempt.name}, {attempt.trainers} trainer + {attempt.searchers} searcher ranks"
        if attempt and attempt.name
        else "",
        "job": f"{job[0]['job']}{restarts}" if job else attempt.job if attempt else "",
        **{ROLES.get(component["id"].partition("+")[2], "ranks"): _component(component) for component in job},
        "elastic": " · ".join(_elastic(monitor, *one) for one in monitor.elastic.items())
        or ("no searcher is present" if monitor.config.launch.elastic and not now.over else ""),
        "ETTR": "" if monitor.ettr is None else f"{percent(monitor.ettr)} of the time, waits included",
        "checkpoint": "" if monitor.saved is None else f"step {monitor.saved}{ago}",
        "postponed": f"{no_room}{trainer.postponed.get('fault')}" if trainer.postponed else "",
        "damaged": ", ".join(f"{one.get('checkpoint')}: {one.get('fault')}" for one in trainer.damaged),
        "alerts": line(monitor.alerts),
        "set aside": ", ".join(count(number, thing) for thing, number in aside.items() if number),
        "faults": " · ".join(fault_words(monitor.faults)),
        "last failure": "" if now.state == "failed" else _last_failure(monitor),
        "last record": f"{duration(silence)} ago" if silence is not None else "",
        "next": now.command,
    }
    return {title: text for title, text in found.items() if text}


def _last_failure(monitor: RunMonitor) -> str:
    """Say which attempt failed last, and why; "" if none did, or in a finished run."""
    failed = [attempt for attempt in monitor.attempts if attempt.outcome == "failed"]
    return f"{failed[-1].name}: {failed[-1].note}" if failed and not monitor.finished else ""


def _named_rewards(trends: Trends) -> str:
    """Return the latest means of SHOWN_REWARDS named rewards; "" unless the task returns several."""
    means = {name.removeprefix(NAMED): trends.latest(name) for name in trends.named_rewards[:SHOWN_REWARDS]}
    return ", ".join(f"{name} {_show(mean, '{:.3f}')}" for name, mean in means.items())


def _elastic(monitor: RunMonitor, index: int, owner: Owner) -> str:
    """Say where an elastic searcher runs, since when, and how fast or how far its engine's start is."""
    job, stay = f" (job {owner.job})" if owner.job else "", max(0.0, time.time() - owner.since)
    digest = monitor.searchers.get(index)
    last = digest.last if digest and number(digest.last, "time", 0.0) >= owner.since else {}
    rate = number(last, "search/tokens_per_second", 0.0)
    speed = f", {rate:,.0f} tokens/s" if rate else ""
    if digest and digest.stage not in ("", "ready") and digest.stage_since >= owner.since:
        speed = f", {digest.stage}"
    return f"searcher {index} on {owner.host}{job} for {duration(stay)}{speed}"


def _component(component: QueueEntry) -> str:
    """Return a job component's state with its nodes and the time left, or its expected start."""
    state, nodes, start, left = (component[key] for key in ("state", "nodes", "start", "left"))
    until = f"{left} left" if state == "RUNNING" and left else ""
    expected = state == "PENDING" and start not in ("", "N/A")
    since = f"expected by {start.replace('T', ' ')}" if expected else ""
    return ", ".join(filter(None, [" ".join(filter(None, [state, nodes])), until, since]))


def done(counts: Counts) -> dict[str, str]:
    """Return counts of what the run has done, as strings, keyed by title. ``tba audit`` counts the same."""
    if not counts.attempts:
        return {}
    dropped = f", dropped {counts.dropped:,} (answered twice)" if counts.dropped else ""
    found = {
        "acknowledged": f"{count(counts.trajectories, 'trajectory')} in {count(counts.shards, 'shard')}, "
        f"{count(counts.tokens, 'token')}",
        "duplicates": f"{counts.duplicates:,}, evicted {counts.evicted:,}{dropped}",
    }
    return {**found, "redone": count(counts.redone, "step")} if counts.redone else found


def figures(monitor: RunMonitor) -> dict[str, Any]:
    """Return the values behind all that is shown, for JSON; None where there is no value yet.

    summary: contents of summary.json. last_step: newest value of each of the trainer's figures. elastic:
    fields of ``run.owners.Owner`` for each elastic searcher.
    """
    now, attempt = run_state(monitor), monitor.attempt
    return {
        "run": str(monitor.run.path),
        **asdict(now),
        "command": now.command or None,
        "over": now.over,
        "attempt": attempt.name if attempt else None,
        "restarts": attempt.restarts if attempt else None,
        "job": job_of(monitor),
        "elastic": [{"searcher": index, **asdict(owner)} for index, owner in monitor.elastic.items()],
        "step": monitor.step,
        "steps": monitor.config.train.steps,
        "seconds_left": monitor.eta if now.state == "training" else None,
        "summary": asdict(summary_of(monitor)),
        "last_step": monitor.trainer.latest,
        "searcher_tokens_per_second": monitor.rates,
        "checkpoint_step": monitor.saved,
        "checkpoint_age_seconds": monitor.checkpoint_age,
        "silence_seconds": monitor.silence,
        "faults": monitor.faults,
    }


# --- Display ---


def plain_line(monitor: RunMonitor) -> str:
    """Return the state of a run as one line of text."""
    now, steps = run_state(monitor), monitor.config.train.steps
    parts = [f"[{duration(monitor.elapsed)}] {now.words}"]
    if now.state == "training":
        parts.append(f"step {monitor.step}/{steps}")
    if monitor.step and (monitor.phase or now.over):
        values = {**cells(monitor), "rewards": _named_rewards(monitor.trends) or NOTHING}
        parts += [f"{title} {value}" for title, value in values.items() if value != NOTHING]
    worst = [f"alert: {alert.short}" for alert in monitor.alerts[:1]]
    return " · ".join([*parts, *fault_words(monitor.faults), *worst])


def overview_line(path: Path, queue: Queue) -> str:
    """Return a run's name, state, progress and scores as one line of text. queue: see ``RunMonitor``."""
    try:
        monitor = RunMonitor(RunDir.open(path), queue)
        monitor.update()
    except ConfigError as error:  # as of a run of another version
        return f"{path.name}: {error}"
    now, steps = run_state(monitor), monitor.config.train.steps
    progress = [f"step {monitor.step}/{steps}"] if monitor.step and not now.over else []
    scores = [f"{title} {value}" for title, value in [*cells(monitor).items()][:2] if value != NOTHING]
    return " · ".join([f"{path.name}: {now.words}", *progress, *scores])


def panel(monitor: RunMonitor) -> RenderableType:
    """Return the display of a run for a terminal: its state, a progress bar, numbers and facts."""
    now, step, steps = run_state(monitor), monitor.step, monitor.config.train.steps
    progress = Table.grid(padding=(0, 1))
    times = " · ".join([duration(monitor.elapsed), *_time_left(monitor, now)])
    bar = ProgressBar(total=steps, completed=step, width=28, complete_style="cyan", finished_style="green")
    progress.add_row(bar, Text(f"{step}/{steps}"), Text(times, style="dim"))
    numbers = [
        Text.assemble((title, "dim"), "\n", value, justify="right") for title, value in cells(monitor).items()
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for title, value in facts(monitor, now).items():
        grid.add_row(title, value)
    shown: list[RenderableType] = [progress, *([Columns(numbers, padding=(0, 2))] if step else []), grid]
    words = Text.assemble(("> ", "cyan"), (now.words, "bold"))
    return Group(words, Padding(Group(*shown), (0, 0, 0, 2)))


class LiveDisplay:
    """Live display of a run on the console: ``with LiveDisplay(run) as display: display.refresh()``.

    Files are read, and the display is drawn, only in the caller's thread, during a call. console: None for
    the terminal. queue: see ``RunMonitor``.
    """

    def __init__(self, run: RunDir, *, console: Console | None = None, queue: Queue = lambda _: []) -> None:
        self._console = console or Terminal()
        self._monitor = RunMonitor(run, queue)
        self._looked = self._printed = 0.0
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None

    def __enter__(self) -> LiveDisplay:
        self._look()
        self._printed = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        if self._live:
            self._live.stop()
        self.note(plain_line(self._monitor))

    def refresh(self) -> None:
        """Read what is new and show it; do nothing within REFRESH_SECONDS of the last reading.

        Without a terminal, nothing is printed about a run that is over: ``__exit__`` prints the last line.
        """
        if time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        self._looked = time.monotonic()
        self._look()
        if self._live:
            self._live.update(panel(self._monitor), refresh=True)
        elif not run_state(self._monitor).over and time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            self.note(plain_line(self._monitor))

    def _look(self) -> None:
        """Read what is new; keep the previous state while the run's folder is unreachable."""
        with suppress(OSError):
            self._monitor.update()

    def follow(self) -> RunState:
        """Refresh until the run does nothing more by itself; return its last state."""
        while not (now := run_state(self._monitor)).over:
            self.refresh()
            time.sleep(REFRESH_SECONDS)
        return now

    def note(self, text: str) -> None:
        """Print a line above the display, where it stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def follow(run: RunDir, queue: Queue) -> None:
    """Show a run live until it does nothing more by itself, or until Ctrl-C. queue: see ``RunMonitor``."""
    console = Terminal()
    with suppress(KeyboardInterrupt):
        with LiveDisplay(run, console=console, queue=queue) as display:
            now = display.follow()
        if now.command:
            console.print(Text(f"next: {now.command}"), soft_wrap=True)


def print_each(runs: Iterable[Path], queue: Queue) -> None:
    """Print an ``overview_line`` of each run. queue: see ``RunMonitor``."""
    console = Terminal()
    for path in runs:
        console.print(Text(overview_line(path, queue)), soft_wrap=True)


def print_status(run: RunDir, queue: Queue, *, as_json: bool = False, console: Console | None = None) -> None:
    """Print the state of a run once. queue: see ``RunMonitor``."""
    monitor = RunMonitor(run, queue)
    monitor.update()
    if as_json:
        print(json.dumps(figures(monitor), indent=2))
        return
    console, now = console or Terminal(), run_state(monitor)
    step = ", ".join([f"{monitor.step}/{monitor.config.train.steps}", *_time_left(monitor, now)])
    heading = {"run": str(run.path), "state": now.words, "step": step}
    values = {**heading, **cells(monitor), **done(monitor.counts()), **facts(monitor, now)}
    print_lines(values.items(), console)
