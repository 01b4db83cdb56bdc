"""Writes trajectories as one self-contained HTML page, each token coloured by log π_behaviour/π_ref.

The page has no script and fetches nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tba_hpc.report.page import footer, template, write_html
from tba_hpc.report.samples.select import Sample, Selection
from tba_hpc.report.samples.show import facts, summary
from tba_hpc.report.samples.texts import Decode, pieces
from tba_hpc.run.directory import RunDir

EDGES = (0.1, 0.5, 1.5, 4.0)
"""Nats of |log π_behaviour − log π_ref| from which a token has the next stronger colour."""

END = "■"
"""Stands for a token without text, such as the end of a sequence."""


class Token(NamedTuple):
    """A token as it is shown. shade: up1 … up4, down1 … down4, or none; note: its log-probabilities."""

    text: str
    shade: str
    note: str


class Card(NamedTuple):
    """A trajectory as it is shown."""

    reward: str
    facts: str
    prompt: str
    tokens: list[Token]
    cut_off: bool


def write_page(path: Path, run: RunDir, selection: Selection, decode: Decode) -> None:
    """Write the page. Raises ConfigError if nothing can be written there."""
    text = template("samples.html.j2").render(
        title=f"What {run.path.name} says",
        subtitle=summary(selection),
        legend=list(_legend()) if any(s.log_ratio is not None for s in selection.samples) else [],
        cards=[_card(sample, decode) for sample in selection.samples],
        footer=footer(),
    )
    write_html(path, text)


def _card(sample: Sample, decode: Decode) -> Card:
    reward, _, others = facts(sample).partition(" · ")
    return Card(reward, others, sample.prompt.strip("\n"), list(_tokens(sample, decode)), sample.truncated)


def _tokens(sample: Sample, decode: Decode) -> Iterator[Token]:
    has_reference = sample.log_ratio is not None
    columns = (pieces(decode, sample.tokens), sample.logprobs.tolist(), sample.ref_logprobs.tolist())
    for text, logprob, ref_logprob in zip(*columns, strict=True):
        note = f"log π {logprob:.2f}"
        if has_reference:
            note += f", reference {ref_logprob:.2f}: {logprob - ref_logprob:+.2f}"
        yield Token(text or END, shade(logprob - ref_logprob) if has_reference else "", note)


def shade(log_ratio: float) -> str:
    """The class of a token's colour, empty if both policies say about the same."""
    strength = bisect_right(EDGES, abs(log_ratio))
    return f"{'up' if log_ratio > 0 else 'down'}{strength}" if strength else ""


def _legend() -> Iterator[tuple[str, str]]:
    """Classes, and the log-ratios that they begin at."""
    for strength in range(len(EDGES), 0, -1):
        yield f"down{strength}", f"≤ −{EDGES[strength - 1]:g}"
    yield "", "0"
    for strength, edge in enumerate(EDGES, 1):
        yield f"up{strength}", f"≥ +{edge:g}"
