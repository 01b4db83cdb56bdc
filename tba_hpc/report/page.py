"""Writes ``report.html``: results, plots and attempts of a run on one page that needs no other file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tba_hpc.config import ConfigError, dump_config, flat, is_elastic
from tba_hpc.core.ports import RIGHT_AND_ENDED
from tba_hpc.core.wording import count, duration, mean_reward, percent, printable
from tba_hpc.report.attempts import KILLED, Attempt, fault_words
from tba_hpc.report.data import RunData, history_text
from tba_hpc.report.digest import Stretch
from tba_hpc.report.plots import plots
from tba_hpc.report.summary import (
    CORRECT,
    Summary,
    changed_code,
    correct_answers,
    right_and_ended,
    summary_of,
    write_summary,
)
from tba_hpc.report.tables import NOTHING
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer, Evaluation
from tba_hpc.run.files import write_atomic

TEMPLATES = Path(__file__).parent

OUTCOMES = {
    "finished": "finished",
    "stopped": "asked to stop",
    "aborted": "killed on request",
    "failed": "failed",
    "refused": "refused",
    KILLED: "killed, or its node lost",
}
"""Text shown for each outcome of an attempt."""


ASKED = "asked to stop, by you or by Slurm"
"""Text shown if the script of a job was asked to stop, and the job was not requeued."""

BY_SLURM = "ended by Slurm (cancelled or preempted), or out of time"
"""Text shown if the ranks of a job were stopped without a signal to its script."""


class Tile(NamedTuple):
    """A headline number of the page, as text.

    name, note: text above and below the number. then: the number after training, if ``value`` is the one
    before; otherwise "". gain: the change. verdict: ``good`` for a rise, ``bad`` for a fall, otherwise "".
    """

    name: str
    value: str
    note: str
    then: str = ""
    gain: str = ""
    verdict: str = ""


class Answers(NamedTuple):
    """Answers to the same questions at one or two steps. rows: for each question, one answer per step."""

    steps: tuple[int, ...]
    rows: list[tuple[Answer, ...]]


def write_report(run: RunDir) -> Summary:
    """Write ``summary.json`` and ``report.html`` of a run in any state; return the summary."""
    data = RunData.read(run)
    summary = summary_of(data)
    write_summary(run, summary)
    write_atomic(run.report, render(data, summary))
    return summary


def render(data: RunData, summary: Summary) -> str:
    """Return the page as HTML text."""
    config, begun = data.config, bool(data.step or data.searchers)
    return page_of(
        "page.html.j2",
        title=f"{config.run.name}, seed {config.run.seed}",
        state=_state(data),
        finished=data.finished,
        subtitle=_subtitle(data),
        tiles=tiles(data, summary),
        alerts=summary.alerts if begun else None,
        plots=plots(data) if data.step else [],
        answers=answers(data.evaluated("test")),
        graded=data.graded,
        attempts=attempt_rows(data),
        faults=fault_words(data.faults),
        changed=_changed(data),
        config=dump_config(config),
    )


def page_of(template: str, **values: object) -> str:
    """Fill in a template of this folder. Values are escaped, and their control characters made visible."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        loader=FileSystemLoader(TEMPLATES),
        finalize=_shown,
    )
    footer = f"tba-hpc · written {_utc(time.time())} UTC"
    return environment.get_template(template).render(**values, footer=footer)


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def write_page(path: Path, template: str, **values: object) -> None:
    """Write ``page_of(template, …)`` to a path that a user chose. Raises ConfigError if this fails."""
    try:
        write_atomic(path, page_of(template, **values))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}): choose another place with --html"
        ) from None


def _state(data: RunData) -> str:
    if data.finished:
        return "finished"
    stretches = data.trainer.stretches
    word = "stopped" if stretches and stretches[-1].event == "stopped" else "unfinished"
    return f"{word} at step {data.step} of {data.config.train.steps}"


def _subtitle(data: RunData) -> str:
    config, elastic = data.config, sum(map(is_elastic, data.searchers))
    ranks, objective = config.launch, config.train.objective.name.replace("_", " ")
    roles = f"{count(ranks.trainers, 'trainer')} + {count(ranks.searchers, 'searcher')}"
    roles += f" + {count(elastic, 'elastic searcher')}" if elastic else ""
    since = "" if data.finished else f" · as of {_utc(time.time())} UTC"
    return f"{config.task.name} · {Path(config.model.path).name} · {objective} · {roles}{since}"


def _changed(data: RunData) -> list[str]:
    """Return a text such as ``KEY 1 → 2`` for each config key that a resume changed, with all its values."""
    now = flat(data.config.model_dump(mode="json"))
    return [f"{key} {history_text([*past, now.get(key)])}" for key, past in data.past_values.items()]


def tiles(data: RunData, summary: Summary) -> list[Tile]:
    """Return the headline numbers of the page."""
    steps = count(summary.steps, "step")
    attempts = "" if summary.attempts < 2 else f" in {summary.attempts} attempts"
    ended = data.attempts and data.attempts[-1].end  # else the ETTR is not final
    ettr = f", ETTR {percent(summary.ettr)}" if ended and summary.ettr is not None else ""
    rate, goodput = summary.generated_per_searcher_second, summary.goodput
    rates = [f"{rate:,.0f} per searcher-second"] if rate else []
    rates += [f"{goodput:,.0f} acknowledged"] if goodput else []
    per_step = summary.trajectories / summary.steps if summary.steps else 0
    staleness = NOTHING if summary.staleness is None else f"{summary.staleness:.1f}"
    return [
        _score_tile(data, summary),
        Tile("Training time", duration(summary.train_seconds), steps + attempts + ettr),
        Tile("Trajectories", f"{summary.trajectories:,}", f"{per_step:,.0f} sampled per step"),
        Tile("Tokens generated", _rounded(summary.generated_tokens), ", ".join(rates)),
        Tile("Staleness", staleness, "mean, in steps"),
    ]


def _rounded(tokens: int) -> str:
    """Format a number of tokens: ``850``, ``11 k``, ``2.5 M``."""
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1e3:,.0f} k" if tokens < 999_500 else f"{tokens / 1e6:,.1f} M"


def _score_tile(data: RunData, summary: Summary) -> Tile:
    before, after, gain, verdict = summary.score_before, summary.score_after, "", ""
    at = f" step {summary.evaluated_step}" if summary.is_ahead else ""
    if before and after:
        by = round(after.value - before.value, 3)
        gain = mean_reward(by, "+") if data.graded else f"{100 * by:+.1f} points"
        verdict = "good" if by > 0 else "bad" if by < 0 else ""
        gain += f"; after: {data.show(after.low)} … {data.show(after.high)} (95 % interval)"
    beside = {CORRECT: correct_answers(summary), RIGHT_AND_ENDED: right_and_ended(summary)}
    gain = "; ".join(
        filter(None, [gain, *(f"{name}: {shares}" for name, shares in beside.items() if shares)])
    )
    greedy = f"greedy, {summary.test_prompts or 0:,} held-out prompts"
    greedy += f"; code changed: {words}" if (words := changed_code(summary)) else ""
    return Tile(
        f"{summary.score_name} before → after{at}",
        data.show(before.value) if before else NOTHING,
        greedy if before else "not measured",
        then=data.show(after.value) if after else "",
        gain=gain.replace("-", "−"),
        verdict=verdict,
    )


def answers(evaluations: Sequence[Evaluation]) -> Answers | None:
    """Return what the first and the last evaluation answered to the same prompts; None without answers."""
    known = [evaluation for evaluation in evaluations if evaluation.answers]
    if not known:
        return None
    ends = (known[0], known[-1]) if len(known) > 1 else (known[0],)
    by_prompt = [{answer.prompt: answer for answer in evaluation.answers} for evaluation in ends]
    both = [prompt for prompt in by_prompt[0] if prompt in by_prompt[-1]]
    rows = [tuple(answers[prompt] for answers in by_prompt) for prompt in both]
    return Answers(tuple(evaluation.step for evaluation in ends), rows)


# --- Attempts ---


def attempt_rows(data: RunData) -> list[dict[str, Any]]:
    """Return the page's table of attempts, with a row for each.

    left, width: start and length of the attempt's bar, in percent of the time from the first attempt's start
    to the last one's end.
    """
    found, ends = data.attempts, data.ends
    if not found:
        return []
    since, whole = found[0].start, max(max(ends) - found[0].start, 1e-9)
    return [
        {
            **_attempt_words(attempt, part),
            "lasted": duration(end - attempt.start),
            "left": 100 * (attempt.start - since) / whole,
            "width": 100 * (end - attempt.start) / whole,
        }
        for attempt, part, end in zip(found, data.stretches, ends, strict=True)
    ]


def _attempt_words(attempt: Attempt, part: Sequence[Stretch]) -> dict[str, str]:
    # The trainer writes the page before the launcher notes the attempt's end.
    last = part[-1].event if part and part[-1].event in ("stopped", "finished") else ""
    outcome = attempt.outcome or last
    words = OUTCOMES.get(outcome, "" if attempt.end else "at work")
    words = _why_stopped(attempt) if outcome == "stopped" else words
    requeued = "back to the queue" if attempt.requeued else ""
    bad = outcome in ("failed", "refused", KILLED)
    return {
        "name": attempt.name or "no ranks",
        "job": f"job {attempt.job}, restarts: {attempt.restarts}" if attempt.job else "",
        "start": _utc(attempt.start),
        "ranks": f"{attempt.trainers} + {attempt.searchers}" if attempt.name else NOTHING,
        "steps": f"{part[0].first} → {part[-1].last}" if part else NOTHING,
        "outcome": ", ".join(filter(None, [words, attempt.note, requeued])),
        "verdict": "bad" if bad else "good" if outcome == "finished" else "",
    }


def _why_stopped(attempt: Attempt) -> str:
    if attempt.requeued or attempt.kinds & {"draining", "preempted"}:
        return attempt.why_requeued
    if not attempt.job:
        return OUTCOMES["stopped"]
    return ASKED if "signal" in attempt.kinds else BY_SLURM


def _utc(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))
