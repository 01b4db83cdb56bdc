"""Evaluations of a run on disk: one part per searcher, replaced by one joined file once all parts are there.

A damaged file is ignored, and overwritten if its split is evaluated again.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

from pydantic import TypeAdapter

from tba_hpc.core.ports import MEAN_REWARD, PASS_AT_1
from tba_hpc.core.types import Split
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import if_available, read_regular, remove, write_atomic

log = logging.getLogger(__name__)

PART = re.compile(r"searcher-\d+-of-(\d+)\.json")
"""File name of a part. Its group is the number of searchers that share the evaluation."""

SUMMED = ("correct", "cut_correct", "total", "tokens", "truncated", "graded", "rewards", "squares")
"""Fields of an evaluation that are sums over its answers, so that joining two parts adds them."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to an evaluation prompt as text, and whether it is correct.

    prompt: id of the prompt. question: text of the prompt. reward: None if the task gives none in
    evaluations.
    """

    prompt: int
    question: str
    text: str
    correct: bool
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of evaluating the weights of ``step`` on a split: one searcher's part, or the whole.

    correct, total: numbers of correct and of all answers. truncated: number of answers that a limit of tokens
    or turns cut off; cut_correct: how many of these are correct. tokens: number of tokens that the policy
    sampled. ref_logprob: sum of log π_ref over these tokens, in nats; None without a reference model. graded:
    number of answers with a reward; rewards, squares: sums of these rewards and of their squares. score_name:
    the task's name for the share of correct answers; MEAN_REWARD if no answer can be called correct. answers:
    a few answers as text, ascending by prompt id. results: score of each judged answer of the test split, by
    prompt id: its reward, or 1 for a correct and 0 for a wrong answer of a task without rewards.
    """

    split: Split
    step: int
    correct: int
    total: int
    tokens: int
    truncated: int
    ref_logprob: float | None = None
    score_name: str = PASS_AT_1
    answers: tuple[Answer, ...] = ()
    graded: int = 0
    rewards: float = 0.0
    squares: float = 0.0
    cut_correct: int = 0
    results: Mapping[int, float] = field(default_factory=dict)

    def __add__(self, other: Evaluation) -> Evaluation:
        """Join two parts of the same split and step."""
        known = self.ref_logprob is not None and other.ref_logprob is not None
        answers = {answer.prompt: answer for answer in (*self.answers, *other.answers)}
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in SUMMED},
            ref_logprob=(self.ref_logprob or 0) + (other.ref_logprob or 0) if known else None,
            answers=tuple(answers[prompt] for prompt in sorted(answers)),
            results={**self.results, **other.results},
        )

    @property
    def score(self) -> float:
        """Share of correct answers; NaN for an empty split."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def ended_score(self) -> float:
        """Share of answers that are correct and not cut off by a limit; NaN for an empty split."""
        return (self.correct - self.cut_correct) / self.total if self.total else float("nan")

    @property
    def tells_correct(self) -> bool:
        """True if the task tells correct answers from wrong ones.

        Otherwise ``score`` and ``ended_score`` mean nothing.
        """
        return self.score_name != MEAN_REWARD

    @property
    def is_graded(self) -> bool:
        """True if there are rewards that are not just 1 for correct and 0 for wrong answers."""
        if not self.tells_correct:
            return self.graded > 0
        return self.graded > 0 and not self.rewards == self.squares == self.correct

    @property
    def unjudged(self) -> int:
        """Number of answers without a reward, although others have one."""
        return self.total - self.graded if self.graded else 0

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the answers under the reference, exp(−Σ log π_ref ÷ tokens).

        It grows with the policy's KL from the reference. None without a reference model, or without tokens.
        """
        if self.ref_logprob is None or self.tokens == 0:
            return None
        return math.exp(-self.ref_logprob / self.tokens)


_FILE = TypeAdapter(Evaluation)


def write_evaluation(run: RunDir, searcher: int, searchers: int, part: Evaluation) -> None:
    """Write one searcher's part of an evaluation. The searcher that writes the last part joins all of them.

    searcher: place of the searcher among the ``searchers`` that share the evaluation, from 0. Nothing is
    written if the joined file exists.
    """
    folder = _folder(run, part.split, part.step)
    if _read(_whole_file(run, part.split, part.step)):
        return
    folder.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):  # another searcher has joined the parts meanwhile
        write_atomic(folder / _part_name(searcher, searchers), json.dumps(asdict(part)))
    if whole := _sum_of_parts(folder, searchers):
        _keep_whole(run, whole)


def read_part(run: RunDir, searcher: int, searchers: int, split: Split, step: int) -> Evaluation | None:
    """Read one searcher's part of an evaluation; None if it is missing, damaged, or joined already."""
    return _read(_folder(run, split, step) / _part_name(searcher, searchers))


def missing_parts(run: RunDir, split: Split, step: int, searchers: int) -> list[int]:
    """List the places (from 0) of the ``searchers`` searchers whose parts of an evaluation are missing."""
    if _read(_whole_file(run, split, step)):
        return []
    there = _part_names(_folder(run, split, step))
    return [
        place
        for place in range(searchers)
        if _part_name(place, searchers) not in there or not read_part(run, place, searchers, split, step)
    ]


def find_evaluation(run: RunDir, split: Split, step: int) -> Evaluation | None:
    """Return the evaluation joined from all its parts; None while a part is missing.

    The parts may come from an earlier start, which may have had another number of searchers.
    """
    path, folder = _whole_file(run, split, step), _folder(run, split, step)
    if whole := _read(path):
        return whole
    counts = {int(name.removesuffix(".json").rpartition("-")[2]) for name in _part_names(folder)}
    sums = (_sum_of_parts(folder, searchers) for searchers in sorted(counts))
    # Read again, since a searcher may have joined the parts and removed them meanwhile.
    return next((found for found in sums if found), None) or _read(path)


def evaluations_on_disk(run: RunDir) -> dict[str, tuple[Split, int]]:
    """Map the name of every evaluation that has parts or a joined file on disk to its split and step."""
    name = re.compile(r"((test|validation)-step-(\d+))(\.json)?")
    named = (name.fullmatch(path.name) for path in run.evaluations.iterdir())
    return {found[1]: (cast(Split, found[2]), int(found[3])) for found in named if found}


def discard_evaluations(run: RunDir, *, after: int) -> None:
    """Delete the evaluations that a resume from step ``after`` repeats. Join the parts of complete ones.

    A resume repeats evaluations of later steps, and incomplete ones of the validation split. An incomplete
    evaluation of the test split is completed instead: the resume evaluates the same weights again, and
    searchers that have written their part skip it.
    """
    for split, step in evaluations_on_disk(run).values():
        whole = find_evaluation(run, split, step)
        if step > after:
            _whole_file(run, split, step).unlink(missing_ok=True)
        if step > after or (whole is None and split != "test"):
            with suppress(FileNotFoundError):
                remove(_folder(run, split, step))
        elif whole:
            _keep_whole(run, whole)


def _keep_whole(run: RunDir, whole: Evaluation) -> None:
    """Replace the parts of an evaluation by the joined file. Two searchers may do so at the same time."""
    path = _whole_file(run, whole.split, whole.step)
    if not _read(path):
        write_atomic(path, json.dumps(asdict(whole)))
    shutil.rmtree(_folder(run, whole.split, whole.step), ignore_errors=True)


def _sum_of_parts(folder: Path, searchers: int) -> Evaluation | None:
    """Return the parts of ``searchers`` searchers joined; None if one is missing or damaged."""
    names = {_part_name(searcher, searchers) for searcher in range(searchers)}
    if not names <= _part_names(folder):
        return None
    parts = [_read(folder / name) for name in sorted(names)]
    known = [part for part in parts if part]
    return functools.reduce(operator.add, known) if len(known) == searchers else None


def _read(path: Path) -> Evaluation | None:
    """Read an evaluation; None if the file is missing or damaged."""
    text = _if_there(lambda: read_regular(path), otherwise=b"")
    try:
        return _FILE.validate_json(text) if text else None
    except ValueError:
        _warn_of_damage(path)
        return None


@functools.cache
def _warn_of_damage(path: Path) -> None:
    """Log the damage of a file once per process."""
    log.warning("%s is damaged, so it is ignored", path)


def _part_names(folder: Path) -> set[str]:
    """List the file names of all parts in a folder; empty if it does not exist."""
    there: list[Path] = _if_there(lambda: list(folder.iterdir()), otherwise=[])
    return {path.name for path in there if PART.fullmatch(path.name)}


def _if_there(read: Callable[[], Result], *, otherwise: Result) -> Result:
    """Return ``read()``, or ``otherwise`` if the file or folder is missing or its server does not answer."""
    with suppress(FileNotFoundError):
        return if_available(read, otherwise=otherwise)
    return otherwise


def _part_name(searcher: int, searchers: int) -> str:
    """Return the file name of a searcher's part of an evaluation, with the number of all searchers in it."""
    return f"searcher-{searcher:04d}-of-{searchers:04d}.json"


def _folder(run: RunDir, split: Split, step: int) -> Path:
    """Return the folder of an evaluation's parts."""
    return run.evaluations / f"{split}-step-{step:06d}"


def _whole_file(run: RunDir, split: Split, step: int) -> Path:
    return run.evaluations / f"{split}-step-{step:06d}.json"
