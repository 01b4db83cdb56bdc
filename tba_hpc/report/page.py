"""Writes ``report.html``: a run on one self-contained page, plots and all, for any browser or printer."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from tba_hpc.config import Config, dump_config
from tba_hpc.core.wording import count, printable
from tba_hpc.report.attempts import KILLED, Attempt, attempts, count_faults, fault_words
from tba_hpc.report.digest import Spread, Stretch
from tba_hpc.report.plots import WAIT_GOAL, plots, run_minutes
from tba_hpc.report.summary import RunData, SizeOf, Summary, summary_of, unknown_size, write_summary
from tba_hpc.report.tables import NOTHING, dropped_unlearned, duration, percent
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer, Evaluation
from tba_hpc.run.files import write_atomic
from tba_hpc.run.metrics import number

TEMPLATES = Path(__file__).parent

SEAL_GOAL = 0.01
"""Largest share of its time that a searcher should spend sealing shards."""

OUTCOMES = {
    "finished": "finished",
    "stopped": "asked to stop",
    "aborted": "killed on request",
    "failed": "failed",
    "refused": "refused",
    KILLED: "ended without a word",
}
"""Ends of an attempt → words."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline number."""

    name: str
    value: str
    note: str
    then: str = ""
    gain: str = ""


@dataclass(frozen=True, slots=True)
class AnswersRow:
    """A question, and its answers before and, if known, after."""

    question: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """The same questions answered at one step, and at a later one if there is any."""

    before_step: int
    after_step: int | None
    rows: tuple[AnswersRow, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """A measured promise about waiting, with its goal if it has one."""

    name: str
    meaning: str
    mean: str
    high: str
    goal: str
    verdict: str


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A row of the table of what happened in a run."""

    time: str
    into: str
    what: str
    step: str


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A row of the table of attempts; ``left`` and ``width`` of its bar in percent of the run's time."""

    name: str
    job: str
    start: str
    lasted: str
    ranks: str
    steps: str
    outcome: str
    verdict: str
    left: float
    width: float


def write_report(run: RunDir, size_of: SizeOf = unknown_size) -> Summary:
    """Write ``summary.json``, and then ``report.html``, from one look at a run at any moment of it."""
    data, config = RunData.read(run, size_of), run.config()
    summary = summary_of(data, config)
    write_summary(run, summary)
    write_atomic(run.report, render(data, config))
    return summary


def render(data: RunData, config: Config) -> str:
    """The page as HTML text."""
    summary = summary_of(data, config)
    return template("page.html.j2").render(
        title=f"{config.run.name}, seed {config.run.seed}",
        state=_state(data, summary, config),
        finished=summary.finished,
        subtitle=_subtitle(config),
        tiles=tiles(summary),
        alerts=summary.alerts if data.trainer.step or data.searchers else None,
        plots=plots(data, config.train) if data.trainer.step else [],
        answers=answers(data.test()),
        printable=printable,
        promises=promises(data),
        attempts=attempt_rows(data),
        faults=fault_words(faults(data)),
        events=events(data),
        config=dump_config(config),
        footer=footer(),
    )


def template(name: str) -> Template:
    """A template of this folder; what it is given is text, never HTML."""
    loader = FileSystemLoader(TEMPLATES)
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader
    ).get_template(name)


def footer() -> str:
    """Who wrote a page, and when."""
    return f"tba-hpc · written {_utc(time.time())} UTC"


def _state(data: RunData, summary: Summary, config: Config) -> str:
    if summary.finished:
        return "finished"
    stretches = data.trainer.stretches
    word = "stopped" if stretches and stretches[-1].event == "stopped" else "unfinished"
    return f"{word} at step {summary.steps} of {config.train.steps}"


def _subtitle(config: Config) -> str:
    ranks = config.launch
    roles = f"{count(ranks.trainers, 'trainer')} + {count(ranks.searchers, 'searcher')}"
    model = Path(config.model.path).name
    return f"{config.task.name} · {model} · {config.train.objective.name.replace('_', ' ')} · {roles}"


def tiles(summary: Summary) -> list[Tile]:
    """The headline numbers."""
    before, after, gain = summary.pass_at_1_before, summary.pass_at_1_after, summary.gain
    sign = "" if gain is None else f"{'+' if gain >= 0 else '−'}{abs(100 * gain):.1f} points"
    prompts = f"greedy, {summary.test_prompts:,} held-out prompts" if summary.test_prompts else "not measured"
    steps = count(summary.steps, "step")
    attempts = "" if summary.attempts < 2 else f" in {summary.attempts} attempts"
    rate, goodput = summary.searcher_tokens_per_second, summary.goodput
    rates = [f"{rate:,.0f} per second"] if rate else []
    rates += [f"{goodput:,.0f} acknowledged per searcher and second"] if goodput else []
    per_step = summary.trajectories / summary.steps if summary.steps else 0
    return [
        Tile(
            f"{summary.score_name} before → after",
            NOTHING if before is None else percent(before),
            prompts,
            then="" if after is None else percent(after),
            gain=sign,
        ),
        Tile("Training time", duration(summary.train_seconds), steps + attempts),
        Tile("Trajectories", f"{summary.trajectories:,}", f"{per_step:,.0f} per step"),
        Tile("Tokens generated", _compact(summary.generated_tokens), ", ".join(rates)),
        Tile("Staleness", _or_dash(summary.staleness, "{:.1f}"), "mean, in steps"),
    ]


def answers(evaluations: Sequence[Evaluation]) -> Answers | None:
    """What the first and the last evaluation keep of the same prompts; None if that is nothing."""
    known = [evaluation for evaluation in evaluations if evaluation.answers]
    if not known:
        return None
    ends = (known[0], known[-1]) if len(known) > 1 else (known[0],)
    by_prompt = [{answer.prompt: answer for answer in evaluation.answers} for evaluation in ends]
    both = [prompt for prompt in by_prompt[0] if prompt in by_prompt[-1]]
    rows = [tuple(answers[prompt] for answers in by_prompt) for prompt in both]
    return Answers(
        before_step=ends[0].step,
        after_step=ends[1].step if len(ends) > 1 else None,
        rows=tuple(AnswersRow(row[0].question, row) for row in rows),
    )


def _compact(value: int) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g} {unit}"
    return f"{value:,}"


def _or_dash(value: float | None, style: str) -> str:
    return NOTHING if value is None else style.format(value)


# --- Tables ---


def promises(data: RunData) -> list[Promise]:
    """How long trainer and searchers stood still."""
    wait, waits = Spread(), data.waits
    if (share := number(data.trainer.latest, "train/wait_share")) is not None:
        wait.take(share)
    measured: tuple[tuple[str, str, Spread, Callable[[float], str], float | None], ...] = (
        (
            "Trainer wait",
            "wall time outside forward, backward and optimizer, after warm-up",
            *(wait, _share, WAIT_GOAL),
        ),
        (
            "Publish stall",
            "the trainer's loop stands still to hand over weights",
            *(data.trainer.stalls, _time, None),
        ),
        (
            "Propagation",
            "publish called to loaded in a searcher",
            *(waits["search/propagation_seconds"], _time, None),
        ),
        (
            "Loading weights",
            "a searcher's engine stands still to take new weights",
            *(waits["search/load_seconds"], _time, None),
        ),
        (
            "Sealing shards",
            "a searcher's wall time spent making trajectories durable",
            *(waits["search/seal_share"], _share, SEAL_GOAL),
        ),
        (
            "Searcher busy",
            "a searcher's wall time inside the engine",
            *(waits["search/busy_share"], _share, None),
        ),
    )
    return [_promise(*row) for row in measured]


def _promise(
    name: str, meaning: str, values: Spread, show: Callable[[float], str], goal: float | None
) -> Promise:
    average, bound = values.mean, "" if goal is None else f"≤ {show(goal)}"
    if average is None:
        return Promise(name, meaning, NOTHING, NOTHING, bound or NOTHING, "")
    high = show(values.quantile(0.95)) if values.count > 1 else ""
    verdict = "" if goal is None else "good" if average <= goal else "bad"
    return Promise(name, meaning, show(average), high, bound, verdict)


def _share(value: float) -> str:
    return f"{100 * value:.2f} %" if value < 0.02 else f"{100 * value:.1f} %"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def events(data: RunData) -> list[HistoryRow]:
    """The run's history: starts, resumes, checkpoints, ends, and what went wrong."""
    rows, older = data.trainer.events, data.trainer.older_events
    minutes = run_minutes(data) if rows else None
    lines = [HistoryRow("", "", f"{older:,} rows before these", "")] if older else []
    for row in rows:
        into = duration(60 * float(minutes(np.array([row.time]))[0])) if minutes else ""
        what = row.event if row.times == 1 else f"{row.times} × {row.event}, the last"
        lines.append(HistoryRow(_utc(row.time), into, what, f"{row.step}"))
    return [*lines, *_skipped_steps(data), *_dropped_unlearned(data), *_of_searchers(data)]


def _skipped_steps(data: RunData) -> list[HistoryRow]:
    """A line, if there were any."""
    times, last = data.trends.skipped, data.trends.last_skip
    what = f"{times} × optimizer step skipped: loss or gradient norm not finite"
    return [HistoryRow("", "", what, f"{last}")] if times else []


def _dropped_unlearned(data: RunData) -> list[HistoryRow]:
    """A line, if any trajectories were."""
    what = dropped_unlearned(data.trends.by_length)
    return [HistoryRow("", "", f"dropped unlearned, too stale or too late: {what}", "")] if what else []


def _of_searchers(data: RunData) -> list[HistoryRow]:
    """Engines rebuilt and trajectories set aside, a line per searcher that had any."""
    rows = []
    for index, searcher in data.searchers.items():
        for times, what in (
            (searcher.rebuilds, "engine rebuilt"),
            (searcher.rejected, "trajectory set aside: reward not finite, or the task's code raised"),
        ):
            if times:
                rows.append(HistoryRow("", "", f"searcher {index}: {times} × {what}", ""))
    return rows


def faults(data: RunData) -> dict[str, int]:
    """How often each kind of fault happened."""
    rebuilds = sum(searcher.rebuilds for searcher in data.searchers.values())
    return count_faults(data.events, rebuilds=rebuilds, damaged=data.trainer.damages)


def attempt_rows(data: RunData) -> list[AttemptRow]:
    """The attempts of the run, each with what its trainer did."""
    found, stretches = attempts(data.events), data.trainer.stretches
    cuts = [*(attempt.start for attempt in found), math.inf]
    parts = [
        [stretch for stretch in stretches if since <= stretch.start < until]
        for since, until in itertools.pairwise(cuts)
    ]
    ends = [_end(attempt, part) for attempt, part in zip(found, parts, strict=True)]
    return [
        _attempt_row(attempt, part, end, since=found[0].start, until=max(ends))
        for attempt, part, end in zip(found, parts, ends, strict=True)
    ]


def _end(attempt: Attempt, part: Sequence[Stretch]) -> float:
    """When an attempt ended; the trainer's last word, if nobody noted it."""
    return attempt.end or max([attempt.start, *(stretch.end for stretch in part)])


def _attempt_row(
    attempt: Attempt, part: Sequence[Stretch], end: float, *, since: float, until: float
) -> AttemptRow:
    whole = max(until - since, 1e-9)
    steps = [f"{part[0].first}", f"{part[-1].last}"] if part else []
    outcome = attempt.outcome or _last_word(part)
    words = OUTCOMES.get(outcome, "" if attempt.end else "at work")
    requeued = "back to the queue" if attempt.requeued else ""
    bad = outcome in ("failed", "refused", KILLED)
    return AttemptRow(
        name=attempt.name or "no ranks",
        job=f"job {attempt.job}, restarts: {attempt.restarts}" if attempt.job else "",
        start=_utc(attempt.start),
        lasted=duration(end - attempt.start),
        ranks=f"{attempt.trainers} + {attempt.searchers}" if attempt.name else NOTHING,
        steps=" → ".join(steps) or NOTHING,
        outcome=", ".join(filter(None, [words, attempt.note, requeued])),
        verdict="bad" if bad else "good" if outcome == "finished" else "",
        left=100 * (attempt.start - since) / whole,
        width=100 * (end - attempt.start) / whole,
    )


def _last_word(part: Sequence[Stretch]) -> str:
    """How the trainer says that an attempt ended: it writes the page before the launcher knows."""
    event = part[-1].event if part else ""
    return event if event in ("stopped", "finished") else ""


def _utc(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))
