"""Evaluations of a run on disk: every searcher's part of each, and their sum.

It must not know who evaluates, nor how.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from tba_hpc.ports import PASS_AT_1
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import remove, write_atomic
from tba_hpc.types import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy answers to a split under the weights of ``step``: one searcher's part, or all of it.

    ref_logprob: log π_ref of all their tokens together, nats; None without a reference model. score_name:
    what the task calls the share of correct answers.
    """

    split: Split
    step: int
    correct: int
    total: int
    tokens: int
    truncated: int
    ref_logprob: float | None = None
    score_name: str = PASS_AT_1

    def __add__(self, other: Evaluation) -> Evaluation:
        """Both together, of the same split and step."""
        known = self.ref_logprob is not None and other.ref_logprob is not None
        return replace(
            self,
            correct=self.correct + other.correct,
            total=self.total + other.total,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            ref_logprob=(self.ref_logprob or 0) + (other.ref_logprob or 0) if known else None,
        )

    @property
    def score(self) -> float:
        """Share of correct answers; NaN for an empty split."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def perplexity(self) -> float | None:
        """Of the answers under the reference, exp(−Σ log π_ref ÷ tokens), which grows with the KL to it.

        None without a reference model, or without a token.
        """
        if self.ref_logprob is None or self.tokens == 0:
            return None
        return math.exp(-self.ref_logprob / self.tokens)


def write_evaluation(run: RunDir, searcher: int, searchers: int, part: Evaluation) -> None:
    """Publish one searcher's part of an evaluation."""
    path = _evaluation_part(run, part.split, part.step, searcher, searchers)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(asdict(part)))


def read_evaluation(run: RunDir, split: Split, step: int, searchers: int) -> Evaluation | None:
    """The sum of all parts; None until every searcher's part is there."""
    paths = [_evaluation_part(run, split, step, searcher, searchers) for searcher in range(searchers)]
    if not all(path.exists() for path in paths):
        return None
    return functools.reduce(operator.add, (Evaluation(**json.loads(path.read_text())) for path in paths))


def find_evaluation(run: RunDir, split: Split, step: int) -> Evaluation | None:
    """As ``read_evaluation``, whatever number of searchers made it."""
    parts = _evaluation_folder(run, split, step).glob("searcher-*-of-*.json")
    counts = sorted({int(part.stem.rpartition("-")[2]) for part in parts})
    whole = (read_evaluation(run, split, step, searchers) for searchers in counts)
    return next((evaluation for evaluation in whole if evaluation), None)


def discard_evaluations(run: RunDir, *, after: int) -> None:
    """Delete evaluations of steps beyond ``after``, which a resume takes again, and those cut short."""
    for folder in run.evaluations.glob("*-step-*"):
        split, _, step = folder.name.partition("-step-")
        if int(step) > after or find_evaluation(run, cast(Split, split), int(step)) is None:
            remove(folder)


def _evaluation_part(run: RunDir, split: Split, step: int, searcher: int, searchers: int) -> Path:
    """The name holds the number of searchers: parts of another number slice the split differently."""
    return _evaluation_folder(run, split, step) / f"searcher-{searcher:04d}-of-{searchers:04d}.json"


def _evaluation_folder(run: RunDir, split: Split, step: int) -> Path:
    return run.evaluations / f"{split}-step-{step:06d}"
