"""Shows how a run stands: live on a terminal, once for a look, as JSON for scripts.

It only reads, so it may follow a run from anywhere. If the output is no terminal, the live display is one
plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba_hpc.config import Config
from tba_hpc.core.wording import count
from tba_hpc.report.alerts import line
from tba_hpc.report.attempts import Attempt, fault_words
from tba_hpc.report.monitor import Queue, QueueEntry, RunMonitor
from tba_hpc.report.run_state import RunState, job_of, run_state
from tba_hpc.report.summary import (
    MANY_SEARCHERS,
    Counts,
    SizeOf,
    policy_name,
    reference_of,
    same_reference,
    unknown_size,
)
from tba_hpc.report.tables import NOTHING, dropped_unlearned, duration, percent
from tba_hpc.report.terminal import Terminal
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.metrics import Record, number

LINE_SECONDS = 5.0
"""Pause between two plain lines if the output is no terminal."""

REFRESH_SECONDS = 1.0
"""Pause between two looks at the run."""


# --- Values ---


def heading(monitor: RunMonitor, now: RunState) -> dict[str, str]:
    """Which run it is, and how far."""
    steps = f"{monitor.progress.step}/{monitor.config.train.steps}"
    return {
        "run": str(monitor.run.path),
        "state": now.words,
        "step": ", ".join([steps, *_left(monitor, now)]),
    }


def _left(monitor: RunMonitor, now: RunState) -> list[str]:
    """How long training goes on, if it does."""
    return [f"{duration(monitor.eta)} left"] if now.state == "training" and monitor.eta is not None else []


def cells(monitor: RunMonitor) -> dict[str, str]:
    """Column title → value, the numbers a user watches. Reward, KL and entropy are of fresh completions."""
    latest, trends = monitor.progress.latest, monitor.trends
    validation, test = monitor.evaluated("validation"), monitor.evaluated("test")
    return {
        monitor.score_name: _scores(validation[-1:]),
        "test": _scores(test[:1] + test[1:][-1:]),
        "perplexity": _perplexity(monitor.config, [*test[:1], *validation, *test[1:]]),
        "reward": _or_nothing(trends.latest("search/reward"), "{:.3f}"),
        "KL": _or_nothing(trends.latest("search/kl"), "{:.2f}"),
        "entropy": _or_nothing(trends.latest("search/entropy"), "{:.3f}"),
        "loss": _show(latest, "train/loss", "{:.4f}"),
        "staleness": _show(latest, "staleness/mean", "{:.1f}"),
        "trainer wait": _show(latest, "train/wait_share", "{:.1%}"),
        "buffer": _show(latest, "buffer/size", "{:,.0f}"),
        "tokens/s": _rates(monitor.rates),
    }


def _scores(evaluations: Sequence[Evaluation]) -> str:
    return " → ".join(percent(evaluation.score) for evaluation in evaluations) or NOTHING


def _perplexity(config: Config, evaluations: Sequence[Evaluation]) -> str:
    """Of the last evaluation, and under which policy if that changes."""
    last = evaluations[-1].perplexity if evaluations else None
    if last is None or config.train.reference.name != "reset":
        return _or_nothing(last, "{:.3f}")
    return f"{last:.3f} under {policy_name(reference_of(config.train, evaluations[-1]))}"


def facts(monitor: RunMonitor, now: RunState) -> dict[str, str]:
    """What else there is to say, by title: who is at work where, what is safe, what went wrong, what next."""
    attempt, job = monitor.attempt, job_of(monitor)
    saved, age, silence = monitor.progress.trainer.checkpoint, monitor.checkpoint_age, monitor.silence
    found = {
        "attempt": _attempt(attempt) if attempt and attempt.name else "",
        "job": _job(job[0]["job"], attempt) if job else "",
        **{_role(component): _component(component) for component in job},
        "come and go": " · ".join(_visitor(visitor) for visitor in visitors(monitor)),
        "checkpoint": f"step {number(saved, 'step', 0):.0f}, {duration(age)} ago" if age is not None else "",
        "postponed": _postponed(monitor.progress.trainer.postponed),
        "damaged": ", ".join(
            f"{damage['checkpoint']}: {damage['fault']}" for damage in monitor.progress.trainer.damaged
        ),
        "alerts": line(monitor.alerts),
        "set aside": _set_aside(monitor),
        "dropped unlearned": dropped_unlearned(monitor.trends.by_length),
        "faults": " · ".join(fault_words(monitor.faults)),
        "last word": f"{duration(silence)} ago" if silence is not None else "",
        "next": now.command,
    }
    return {title: text for title, text in found.items() if text}


def visitors(monitor: RunMonitor) -> list[dict[str, Any]]:
    """Elastic searchers that are there; since: unix s; job, of Slurm, may be empty."""
    return [
        {
            "searcher": searcher,
            "host": owner.host,
            "job": owner.job,
            "since": owner.since,
            "tokens_per_second": number(
                monitor.progress.searchers.get(searcher, {}), "search/tokens_per_second"
            ),
        }
        for searcher, owner in sorted(monitor.visitors.items())
    ]


def _visitor(visitor: Mapping[str, Any]) -> str:
    rate, job = visitor["tokens_per_second"], visitor["job"]
    return (
        f"{visitor['searcher']} on {visitor['host']}{f' (job {job})' if job else ''} for "
        f"{duration(max(0.0, time.time() - visitor['since']))}{f', {rate:,.0f} tokens/s' if rate else ''}"
    )


def _postponed(record: Record) -> str:
    """The checkpoint that there was no room for, if none came after it."""
    return f"the checkpoint of step {number(record, 'step', 0):.0f}: {record['fault']}" if record else ""


def done(counts: Counts) -> dict[str, str]:
    """What the run has done, as ``tba audit`` counts it too."""
    if not counts.attempts:
        return {}
    redone = {"redone": count(counts.redone, "step")} if counts.redone else {}
    dropped = f", {counts.dropped:,} dropped (too late, or asked twice)" if counts.dropped else ""
    return {
        "acknowledged": f"{count(counts.trajectories, 'trajectory')} in {count(counts.shards, 'shard')}, "
        f"{count(counts.tokens, 'token')}",
        "merged": f"{count(counts.duplicates, 'duplicate')}, {counts.evicted:,} evicted{dropped}",
        **redone,
    }


def _set_aside(monitor: RunMonitor) -> str:
    """Trajectories without a usable reward, and steps without a finite loss or gradient norm."""
    trends = monitor.trends
    counts = {"trajectory": trends.rejected, "optimizer step": trends.skipped}
    return ", ".join(f"{count(number, thing)}" for thing, number in counts.items() if number)


def _attempt(attempt: Attempt) -> str:
    return f"{attempt.name}, {attempt.trainers} trainer + {attempt.searchers} searcher ranks"


def _job(job: str, attempt: Attempt | None) -> str:
    return f"{job}, restarts: {attempt.restarts}" if attempt and attempt.job == job else job


def _role(component: QueueEntry) -> str:
    """What a component of a het job does; a job of one component does all."""
    roles = {"0": "trainers", "1": "searchers"}
    return roles.get(component["id"].partition("+")[2], "ranks")


def _component(component: QueueEntry) -> str:
    """State of a component, and where it runs or when it might."""
    state, nodes, start, left = (component[key] for key in ("state", "nodes", "start", "left"))
    until = f"{left} left" if state == "RUNNING" and left else ""
    since = f"not before {start.replace('T', ' ')}" if state == "PENDING" and start not in ("", "N/A") else ""
    return ", ".join(filter(None, [" ".join(filter(None, [state, nodes])), until, since]))


def figures(monitor: RunMonitor, size_of: SizeOf = unknown_size) -> dict[str, Any]:
    """Everything that is shown, as values for JSON; None if there is no value yet."""
    now, latest, attempt = run_state(monitor), monitor.progress.latest, monitor.attempt
    validation, test = monitor.evaluated("validation"), monitor.evaluated("test")
    train, trends = monitor.config.train, monitor.trends
    comparable = same_reference(train, test)
    return {
        "run": str(monitor.run.path),
        "state": now.state,
        "words": now.words,
        "over": now.over,
        "command": now.command or None,
        "attempt": attempt.name if attempt else None,
        "restarts": attempt.restarts if attempt else None,
        "job": job_of(monitor),
        "come_and_go": visitors(monitor),
        "step": monitor.progress.step,
        "steps": monitor.config.train.steps,
        "counts": asdict(monitor.counts(size_of)),
        "seconds_left": monitor.eta if now.state == "training" else None,
        "score_name": monitor.score_name,
        "pass_at_1": validation[-1].score if validation else None,
        "perplexity": validation[-1].perplexity if validation else None,
        "perplexity_reference": reference_of(train, validation[-1]) if validation else None,
        "test_pass_at_1": [evaluation.score for evaluation in test],
        "test_perplexity": [e.perplexity if e in comparable else None for e in test],
        "test_perplexity_reference": reference_of(train, test[-1]) if test else None,
        "reward": trends.latest("search/reward"),
        "batch_reward": number(latest, "train/reward"),
        "loss": number(latest, "train/loss"),
        "kl": trends.latest("search/kl"),
        "log_ratio": trends.latest("train/log_ratio"),
        "entropy": trends.latest("search/entropy"),
        "ess": trends.latest("train/ess"),
        "clip_share": trends.latest("train/clip_share"),
        "engine_gap": trends.engine_gap,
        "flat_groups": trends.latest("search/flat_groups"),
        "batch_flat_groups": trends.latest("train/flat_groups"),
        "length": trends.latest("search/length"),
        "truncated_share": trends.latest("search/truncated_share"),
        "replay_ratio": trends.latest("train/replay_ratio"),
        "skipped_steps": trends.skipped,
        "rejected": trends.rejected,
        "by_length": asdict(trends.by_length),
        "alerts": [alert.sentence for alert in monitor.alerts],
        "staleness": number(latest, "staleness/mean"),
        "trainer_wait_share": number(latest, "train/wait_share"),
        "buffer": number(latest, "buffer/size"),
        "searcher_tokens_per_second": monitor.rates,
        "checkpoint_step": number(monitor.progress.trainer.checkpoint, "step"),
        "checkpoint_age_seconds": monitor.checkpoint_age,
        "silence_seconds": monitor.silence,
        "faults": monitor.faults,
    }


def _show(record: Record, name: str, style: str) -> str:
    return _or_nothing(number(record, name), style)


def _or_nothing(value: float | None, style: str) -> str:
    return NOTHING if value is None else style.format(value)


def _rates(rates: Sequence[float]) -> str:
    """Tokens per second of each searcher; of many, their number times the mean."""
    if len(rates) > MANY_SEARCHERS:
        return f"{len(rates)} × {sum(rates) / len(rates):,.0f}"
    return " + ".join(f"{rate:,.0f}" for rate in rates) or NOTHING


# --- Display ---


def plain_line(monitor: RunMonitor) -> str:
    """The state of a run as one line of text."""
    now, steps = run_state(monitor), monitor.config.train.steps
    parts = [f"[{duration(monitor.elapsed)}] {now.words}"]
    if now.state == "training":
        parts.append(f"step {monitor.progress.step}/{steps}")
    if monitor.progress.step and (monitor.phase or now.over):
        parts += [f"{title} {value}" for title, value in cells(monitor).items() if value != NOTHING]
    worst = [f"alert: {alert.short}" for alert in monitor.alerts[:1]]
    return " · ".join([*parts, *fault_words(monitor.faults), *worst])


def panel(monitor: RunMonitor) -> RenderableType:
    """The state of a run for a terminal: in words, as a bar, the numbers, the facts."""
    now = run_state(monitor)
    numbers = [_numbers(cells(monitor))] if monitor.progress.step else []
    below = Group(_bar(monitor, now), *numbers, _grid(facts(monitor, now)))
    return Group(Text.assemble(("> ", "cyan"), (now.words, "bold")), Padding(below, (0, 0, 0, 2)))


def _bar(monitor: RunMonitor, now: RunState) -> Table:
    """Steps done, the time that took, the time that is left."""
    step, steps = monitor.progress.step, monitor.config.train.steps
    bar = ProgressBar(total=steps, completed=step, width=28, complete_style="cyan", finished_style="green")
    times = " · ".join([duration(monitor.elapsed), *_left(monitor, now)])
    table = Table.grid(padding=(0, 1))
    table.add_row(bar, Text(f"{step}/{steps}"), Text(times, style="dim"))
    return table


def _numbers(values: Mapping[str, str]) -> Columns:
    """Titles above values, as many in a row as fit."""
    cells = [Text.assemble((title, "dim"), "\n", value, justify="right") for title, value in values.items()]
    return Columns(cells, padding=(0, 2))


def _grid(values: Mapping[str, str]) -> Table:
    """Titles and values in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for title, value in values.items():
        table.add_row(title, value)
    return table


class LiveDisplay:
    """Follows a run on the console: ``with LiveDisplay(run, config) as display: display.refresh()``.

    Looks and draws only inside ``refresh``, so its owner decides when; no thread is started. queue: how
    Slurm sees the run's job, if it may have one.
    """

    def __init__(
        self, run: RunDir, config: Config, *, console: Console | None = None, queue: Queue | None = None
    ) -> None:
        self._console = console or Terminal()
        self._monitor = RunMonitor(run, config, queue or (lambda _: []))
        self._looked = self._printed = 0.0
        clever = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if clever else None

    def __enter__(self) -> LiveDisplay:
        self._monitor.update()
        self._printed = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monitor.update()
        if self._live:
            self._live.stop()
        self._print(plain_line(self._monitor))

    def refresh(self) -> None:
        """Read what is new and show it, unless that was a moment ago."""
        if time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        self._looked = time.monotonic()
        self._monitor.update()
        if self._live:
            self._live.update(panel(self._monitor), refresh=True)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            self._print(plain_line(self._monitor))

    def note(self, text: str) -> None:
        """Print a line that stays, above the display."""
        self._print(text)

    def follow(self) -> RunState:
        """Refresh until nothing happens any more by itself; returns how the run stands then."""
        while not (now := run_state(self._monitor)).over:
            self.refresh()
            time.sleep(REFRESH_SECONDS)
        return now

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def follow(run: RunDir, config: Config, queue: Queue) -> None:
    """Show a run live until it is the user's turn, or the user has seen enough (Ctrl-C)."""
    console = Terminal()
    with contextlib.suppress(KeyboardInterrupt):
        with LiveDisplay(run, config, console=console, queue=queue) as display:
            now = display.follow()
        if now.command:
            console.print(Text(f"next: {now.command}"), soft_wrap=True)


def print_status(
    run: RunDir,
    config: Config,
    queue: Queue,
    *,
    as_json: bool = False,
    console: Console | None = None,
    size_of: SizeOf = unknown_size,
) -> None:
    """Print once how a run stands."""
    monitor = RunMonitor(run, config, queue)
    monitor.update()
    if as_json:
        print(json.dumps(figures(monitor, size_of), indent=2))
        return
    console, now = console or Terminal(), run_state(monitor)
    values = {**heading(monitor, now), **cells(monitor), **done(monitor.counts(size_of))}
    for title, value in {**values, **facts(monitor, now)}.items():
        # Unwrapped: a path or a command broken into lines cannot be copied.
        console.print(Text.assemble((f"{title:<12} ", "dim"), value), soft_wrap=True)
