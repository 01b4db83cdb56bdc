"""Draws README's picture of the quickstart: pass@1 over steps, and a problem answered before and after.

python tools/quickstart_picture.py runs/quickstart-seed0    # writes docs/img/quickstart.svg
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from lab.results import BLUE, GREEN, ORANGE, ROSE, STYLE
from matplotlib import rc_context
from matplotlib.figure import Figure

from tba_hpc.report.data import read_evaluations
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation

OUT = Path(__file__).resolve().parents[1] / "docs/img/quickstart.svg"


def draw(found: list[Evaluation]) -> Figure:
    """Return the picture of a run's evaluations; the two on the test split are its first and last."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    axes, words = figure.subplots(1, 2, width_ratios=(1.25, 1))
    points = {
        split: [(one.step, 100 * one.correct / one.total) for one in found if one.split == split]
        for split in ("validation", "test")
    }
    axes.plot(*zip(*points["validation"], strict=True), "o-", color=BLUE, markersize=4, label="validation")
    axes.plot(*zip(*points["test"], strict=True), "D", color=ORANGE, label="512 held-out problems")
    for step, score in points["test"]:
        axes.annotate(f"{score:.1f} %", (step, score), (8, -4), textcoords="offset points", fontsize=9)
    axes.set(xlabel="optimizer steps", ylabel="pass@1, %", ylim=(40, 104), xlim=(-3, 92))
    axes.legend(loc="lower right", frameon=False, fontsize=8)

    before, after = (one for one in found if one.split == "test")
    question, wrong, right = next(
        (old.question, old.text, new.text)
        for old, new in zip(before.answers, after.answers, strict=True)
        if new.correct and not old.correct
    )
    words.axis("off")
    asked = "\n".join(textwrap.wrap(question, 44))
    lines = ((0.9, asked, None), (0.58, "before", None), (0.48, wrong, ROSE))
    for y, text, color in (*lines, (0.34, "after", None), (0.24, right, GREEN)):
        title = text in ("before", "after")
        look = {"weight": "bold"} if title else {"family": "monospace"}
        words.text(0, y, text, color=color, fontsize=8.5, va="top", **look)
    return figure


if __name__ == "__main__":
    evaluations = read_evaluations(RunDir.open(Path(sys.argv[1])))
    with rc_context({**STYLE, "svg.hashsalt": "tba-hpc"}):
        draw(sorted(evaluations.values(), key=lambda one: one.step)).savefig(OUT, metadata={"Date": None})
