"""Shows trajectories in the terminal, as JSON, or as one HTML page without scripts.

Text of models and data files is untrusted: its control characters are made visible. The page colours each
token by log π_behaviour − log π_ref.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.text import Text

from tba_hpc.core.types import BEGIN
from tba_hpc.core.wording import count
from tba_hpc.report.samples.select import Decode, Sample, Selection
from tba_hpc.report.tables import Indented, Terminal
from tba_hpc.run.directory import RunDir

PAGER = "-RFX"
"""Options of less: show colours, end at once if all fits on a screen, and leave the text on the screen."""

STATES = {
    "waiting": "not merged",
    "merged": "merged, no checkpoint since",
    "buffer": "in the buffer",
    "gone": "not in the buffer: used up, evicted, or equal to another",
}

EDGES = (0.1, 0.5, 1.5, 4.0)
"""Values of |log π_behaviour − log π_ref|, in nats, at which a token's colour becomes stronger."""

END = "■"
"""Mark for a token without text, such as the end of a sequence."""

SEQUENCE = "  ── another sequence of the episode begins:"
"""Line before the tokens with which a further sequence of the completion begins."""

CONTEXT = 4
"""Number of preceding tokens decoded with a token. Its text, such as a leading space, may depend on them."""

BROKEN = "\ufffd"
"""Text that decoders return for a token that is only part of a character."""


def print_samples(selection: Selection, *, as_json: bool = False) -> None:
    """Print the samples, then how many match. as_json: print only the samples, as a JSON list."""
    if as_json:
        print(json.dumps([sample.values() for sample in selection.samples], indent=2))
        return
    console = Terminal()
    os.environ.setdefault("LESS", PAGER)
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for sample in selection.samples:
            console.print(Text(facts(sample), style="bold"))
            console.print(Indented(Text(sample.prompt.strip("\n"), style="dim")))
            for who, text in sample.segments:
                if who == "sequence":
                    console.print(Text(SEQUENCE, style="dim"))
                indent, style = (2, "") if who == "policy" else (6, "italic dim")
                console.print(Indented(Text(text.strip("\n"), style), indent))
            console.print("  […cut off]\n" if sample.truncated else "", markup=False)
        console.print(Text(summary(selection), style="dim"))


def facts(sample: Sample) -> str:
    """Return a line with what is known about a trajectory: reward, prompt, weights, state and uses."""
    oldest, newest = sample.version_oldest, sample.version_newest
    weights = f"step {oldest}" if oldest == newest else f"steps {oldest}–{newest}"
    stale = f", {count(sample.staleness or 0, 'step')} stale"
    used = f", trained on {count(sample.uses, 'time')}" if sample.uses is not None else ""
    parts = [
        f"reward {sample.reward:.4g}",
        f"prompt {sample.prompt_id}, request {sample.request_id}",
        f"weights of {weights}",
        "" if sample.merged_step is None else f"merged at step {sample.merged_step}{stale}",
        f"{STATES[sample.state]}{used}",
        "" if sample.log_ratio is None else f"log π/π_ref {sample.log_ratio:+.3f} a token",
    ]
    return " · ".join(part for part in parts if part)


def summary(selection: Selection) -> str:
    """Say how many samples match; if no trajectory is on disk, say how to keep some."""
    shown, found, read = len(selection.samples), selection.found, selection.read
    if not read:
        return (
            "no trajectory is on disk: none was sealed yet, or the merged ones were deleted; the next "
            "run keeps them with --set exchange.keep_shards=1"
        )
    known = selection.checkpoint_step
    as_of = (
        "no checkpoint yet, so uses are unknown"
        if known is None
        else f"uses as of the checkpoint of step {known}"
    )
    return f"{shown:,} of {found:,} that match, of {count(read, 'trajectory')} still on disk; {as_of}"


# --- The page ---


class Token(NamedTuple):
    """A token as the page shows it.

    shade: CSS class: up1 … up4, down1 … down4, environment, or empty. note: tooltip with its logprobs.
    """

    text: str
    shade: str
    note: str


def write_page(path: Path, run: RunDir, selection: Selection, decode: Decode) -> None:
    """Write a page with the samples. Raises ConfigError if ``path`` cannot be written."""
    from tba_hpc.report import page  # matplotlib takes a second

    page.write_page(
        path,
        "samples.html.j2",
        title=f"What {run.path.name} says",
        subtitle=summary(selection),
        legend=list(_legend()) if any(s.log_ratio is not None for s in selection.samples) else [],
        cards=[
            {
                "facts": facts(sample),
                "prompt": sample.prompt.strip("\n"),
                "tokens": list(_tokens(sample, decode)),
                "cut_off": sample.truncated,
            }
            for sample in selection.samples
        ],
    )


def _tokens(sample: Sample, decode: Decode) -> Iterator[Token]:
    has_reference = sample.log_ratio is not None
    columns = (pieces(decode, sample.tokens), sample.logprobs.tolist(), sample.ref_logprobs.tolist())
    for text, logprob, ref_logprob in zip(*columns, strict=True):
        if logprob == BEGIN:
            yield Token(f"\n{SEQUENCE}\n", "environment", "")
        if not logprob < BEGIN:
            yield Token(text or END, "environment", "given by the environment")
            continue
        note = f"log π {logprob:.2f}"
        if has_reference:
            note += f", reference {ref_logprob:.2f}: {logprob - ref_logprob:+.2f}"
        yield Token(text or END, shade(logprob - ref_logprob) if has_reference else "", note)


def pieces(decode: Decode, tokens: np.ndarray) -> list[str]:
    """Return the text that each token adds to the text before it.

    tokens: int32 [T]. Special tokens add no text. If several tokens make up a character, the last adds it.
    """
    found: list[str] = []
    start = 0  # first token whose text is still incomplete
    for end in range(1, len(tokens) + 1):
        before = max(0, start - CONTEXT)
        known, text = decode(tokens[before:start]), decode(tokens[before:end])
        whole = not text.endswith(BROKEN) or end == len(tokens)
        found.append(text[len(known) :] if whole else "")
        start = end if whole else start
    return found


def shade(log_ratio: float) -> str:
    """Return the CSS class of a token's colour; empty if |log_ratio|, in nats, is below EDGES[0]."""
    strength = bisect_right(EDGES, abs(log_ratio))
    return f"{'up' if log_ratio > 0 else 'down'}{strength}" if strength else ""


def _legend() -> Iterator[tuple[str, str]]:
    """Yield each CSS class with a text of the log-ratio from which it is used, such as ``≥ +0.1``."""
    for strength in range(len(EDGES), 0, -1):
        yield f"down{strength}", f"≤ −{EDGES[strength - 1]:g}"
    yield "", "0"
    for strength, edge in enumerate(EDGES, 1):
        yield f"up{strength}", f"≥ +{edge:g}"
