"""``tba evaluate``: measures a model's score, with confidence intervals, and perplexity under the reference.

The model may be that of a run, which is evaluated with the run's config, or any other model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.text import Text

from tba_hpc.core.ports import RIGHT_AND_ENDED
from tba_hpc.core.wording import count, mean_reward, percent
from tba_hpc.evaluate.measure import Decoding, Result, measure
from tba_hpc.evaluate.target import find_target
from tba_hpc.report.tables import NOTHING, Indented, Terminal, print_lines, print_rows

__all__ = ["find_target", "measure", "print_result"]


NO_SCORES = "the task calls no answer correct; with several rewards, task.options.correct_from does"
"""Text shown if only mean rewards are measured."""


def print_result(result: Result, *, as_json: bool = False) -> None:
    """Print what was evaluated, a table of all figures, and the answers that the result contains.

    as_json: whether to print the whole result as JSON instead.
    """
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    asked = f"{result.task}, {result.split} split, {result.prompts:,} prompts"
    model = f"{result.model}, in {result.dtype}"
    print_lines([("model", model), ("reference", result.reference), ("task", asked)])
    if not result.single.scores:
        print_lines([("no pass@k", NO_SCORES)])
    print()
    decodings = [decoding for decoding in (result.single, result.sampled) if decoding]
    print_rows([row for decoding in decodings for row in _rows(decoding)])
    console = Terminal()
    for answer in result.answers:
        verdict = "right" if answer.correct else "wrong"
        if result.single.reward or not result.single.scores:
            verdict = f"reward {answer.reward:.4g}"
        console.print(Text(f"\nprompt {answer.prompt}: {verdict}", style="bold"))
        console.print(Indented(Text(answer.question.strip("\n"), style="dim")))
        console.print(Indented(Text(answer.text)))


def _rows(decoding: Decoding) -> Iterator[dict[str, str]]:
    """Yield a row of the table for each figure."""
    sampled = f"{count(decoding.samples, 'sample')} at temperature {decoding.temperature:g}"
    how = sampled if decoding.temperature else "greedy"

    def row(measure: str, value: str, interval: str = "") -> dict[str, str]:
        return {"decoding": how, "measure": measure, "value": value, "95 % interval": interval}

    if reward := decoding.reward:
        value, low, high = map(mean_reward, (reward.value, reward.low, reward.high))
        yield row("mean reward", value, f"{low} … {high}")
    yield from (row(f"reward {name}", mean_reward(mean)) for name, mean in decoding.rewards.items())
    scores = dict(decoding.scores)
    if decoding.ended and decoding.ended != next(iter(scores.values())):
        scores[RIGHT_AND_ENDED] = decoding.ended
    for name, score in scores.items():
        yield row(name, percent(score.value), f"{100 * score.low:.1f} … {percent(score.high)}")
    yield from (row(name, f"{value:.4g}") for name, value in decoding.summary.items())
    yield row("truncated", percent(decoding.truncated_share))
    yield row("tokens per completion", f"{decoding.tokens:.1f}")
    yield row("perplexity", NOTHING if decoding.perplexity is None else f"{decoding.perplexity:.3f}")
