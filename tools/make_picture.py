"""Draws the README's picture of a result: pass@1 over the steps of a run, and one problem before and after.

    python tools/make_picture.py RUN [--out docs/img/quickstart.svg]

The problem is the first held-out one that was answered wrongly before and rightly after.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from lab.results import BLUE, ORANGE, STYLE
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tba_hpc.run.directory import RunDir

DOCS = Path(__file__).resolve().parents[1] / "docs"
MUTED, INK, RED, GREEN = "#4b5563", "#111827", "#b3261e", "#1f6f3f"


def evaluations(run: RunDir, split: str) -> list[dict[str, Any]]:
    """What is on file of a split, by step."""
    files = sorted(run.evaluations.glob(f"{split}-step-*.json"))
    return [json.loads(file.read_text()) for file in files]


def draw(run: RunDir, out: Path) -> None:
    """Write the picture. SystemExit where no problem was answered better after than before."""
    test = evaluations(run, "test")
    before, after = test[0], test[-1]
    pair = next(
        (
            (x, y)
            for x, y in zip(before["answers"], after["answers"], strict=True)
            if y["correct"] > x["correct"]
        ),
        None,
    )
    if pair is None:
        raise SystemExit(
            f"{run.path} has no kept answer that was wrong before and right after: try another seed"
        )
    with rc_context({**STYLE, "svg.hashsalt": "tba-hpc"}):
        figure = Figure(figsize=(9, 3.1), layout="constrained", facecolor="#fbfbfd")
        curve, words = figure.subplots(1, 2, width_ratios=(5, 4))
        _curve(curve, evaluations(run, "validation"), before, after)
        _words(words, *pair)
        figure.savefig(out, metadata={"Date": None})


def _curve(
    axes: Axes, validation: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any]
) -> None:
    axes.set_facecolor("#fbfbfd")
    points = [(each["step"], 100 * each["correct"] / each["total"]) for each in validation]
    axes.plot(*zip(*points, strict=True), color=BLUE, marker="o", markersize=4, label="validation")
    held_out = [(each["step"], 100 * each["correct"] / each["total"]) for each in (before, after)]
    axes.plot(
        *zip(*held_out, strict=True),
        "D",
        color=ORANGE,
        markersize=7,
        label=f"{after['total']} held-out problems",
    )
    for step, score in held_out:
        text = f"{score:.1f} %"
        axes.annotate(text, (step, score), xytext=(9, -4), textcoords="offset points", color=INK)
    axes.set(xlabel="optimizer steps", ylabel="pass@1, %", ylim=(40, 104), xlim=(-3, after["step"] * 1.15))
    axes.legend(loc="lower right", frameon=False)


def _words(axes: Axes, before: dict[str, Any], after: dict[str, Any]) -> None:
    axes.axis("off")
    lines = [
        (textwrap.fill(before["question"].strip(), 44), INK, "normal"),
        ("before", MUTED, "bold"),
        (textwrap.fill(before["text"].strip(), 44), RED, "normal"),
        ("after", MUTED, "bold"),
        (textwrap.fill(after["text"].strip(), 44), GREEN, "normal"),
    ]
    top = 0.93
    for text, color, weight in lines:
        family = "sans-serif" if weight == "bold" else "monospace"
        axes.text(0, top, text, color=color, weight=weight, family=family, size=9.5, va="top")
        top -= 0.09 + 0.085 * text.count("\n") + (0.05 if weight == "normal" else 0.0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=DOCS / "img/quickstart.svg")
    options = parser.parse_args()
    draw(RunDir.open(options.run), options.out)


if __name__ == "__main__":
    main()
