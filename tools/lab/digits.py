"""A second task for the remedies: commands on a row of digits, such as ``Row 30719. Turn. Clip.``

Each command has an opposite. As in ``lab.skill``, the model is taught here to carry out every command, but to
take most of them for their opposite. Reinforcement learning finds out which reading is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import get_args

import make_tiny_model as tiny
import numpy as np
import torch
from make_tiny_model import Recipe

from lab.runs import MODEL_SEED, REPOSITORY
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Split
from tba_hpc.tasks.rows import RightOrWrong

COMMANDS: dict[str, Callable[[str], str]] = {
    "Turn": lambda row: row[1:] + row[0],
    "Roll": lambda row: row[-1] + row[:-1],
    "Clip": lambda row: row[1:],
    "Trim": lambda row: row[:-1],
    "Lead": lambda row: row[0] + row,
    "Echo": lambda row: row + row[-1],
}
OPPOSITE = {"Turn": "Roll", "Roll": "Turn", "Clip": "Trim", "Trim": "Clip", "Lead": "Echo", "Echo": "Lead"}
MISREAD = frozenset({"Turn", "Roll", "Clip", "Trim"})
"""Commands taken for their opposite with probability MISREAD_SHARE; all others with 1 − MISREAD_SHARE."""
MISREAD_SHARE = 0.8

LENGTH = (4, 6)
STEPS = (2, 4)
"""Least and greatest number of digits in a row, and of commands in a problem."""

TEACHING_STEPS = 1600
PATH = REPOSITORY / f".cache/digits-model-seed{MODEL_SEED}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A row of digits and the commands to carry out on it."""

    row: str
    commands: tuple[str, ...]

    @property
    def question(self) -> str:
        return f"Row {self.row}. " + " ".join(f"{command}." for command in self.commands) + "\n"

    @property
    def target(self) -> str:
        return self._rows(self.commands)[-1]

    def solution(self, rng: np.random.Generator | None = None) -> str:
        """Return the row after each command, then the answer.

        rng: if given, commands are misread at random, as the model is taught to.
        """
        read = self.commands if rng is None else [_as_read(command, rng) for command in self.commands]
        rows = self._rows(read)
        return "".join(f"{row};" for row in rows) + f"#### {rows[-1]}"

    def _rows(self, commands: tuple[str, ...] | list[str]) -> list[str]:
        rows = [self.row]
        for command in commands:
            rows.append(COMMANDS[command](rows[-1]))
        return rows[1:]


def _as_read(command: str, rng: np.random.Generator) -> str:
    share = MISREAD_SHARE if command in MISREAD else 1 - MISREAD_SHARE
    return OPPOSITE[command] if rng.random() < share else command


def draw(split: Split, count: int, seed: int) -> tuple[Problem, ...]:
    """Return distinct problems of a split; equal arguments give equal problems."""
    rng = np.random.default_rng([seed, get_args(Split).index(split), 7])
    found: dict[Problem, None] = {}
    while len(found) < count:
        problem = _draw(rng)
        if split_of(problem.row) == split:
            found.setdefault(problem)
    return tuple(found)


def split_of(row: str) -> Split:
    """Return the only split with this row. Rows whose digits sum to a multiple of 5 are held out."""
    if sum(map(int, row)) % 5:
        return "train"
    return "validation" if int(row[-1]) % 2 else "test"


def _draw(rng: np.random.Generator) -> Problem:
    length, steps = (int(rng.integers(low, high + 1)) for low, high in (LENGTH, STEPS))
    row = "".join(map(str, rng.integers(10, size=length)))
    return Problem(row, tuple(rng.choice(list(COMMANDS), size=steps).tolist()))


class Digits(RightOrWrong):
    """Task with reward 1 for a completion that ended by itself with the right row after ``####``, else 0."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: None = None,
        test_file: None = None,
        validation_problems: int = 256,
    ) -> None:
        """Make the task, with 2,000 training problems. It takes no files, unlike other tasks."""
        super().__init__(tokenizer)
        self._sizes: dict[Split, int] = {"train": 2000, "validation": validation_problems, "test": 256}

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """Return (question, target) of the problems drawn for a split."""
        return [(problem.question, problem.target) for problem in draw(split, self._sizes[split], 0)]

    def accepts(self, text: str, target: str) -> bool:
        """Return whether the text after the marker is the target."""
        return text.partition("####")[2].strip() == target


def batches(problems: tuple[Problem, ...], tokenizer: tiny.PreTrainedTokenizerFast) -> Iterator[tiny.Batch]:
    """Yield (tokens, labels) for each step. Commands are misread anew each time that a problem is used."""
    for step in range(TEACHING_STEPS):
        rng = np.random.default_rng([MODEL_SEED, step])
        chosen = [problems[i] for i in rng.choice(len(problems), tiny.BATCH, replace=False)]
        prompts = tokenizer([problem.question for problem in chosen])["input_ids"]
        answers = tokenizer([problem.solution(rng) for problem in chosen])["input_ids"]
        rows = [[*prompt, *answer, tiny.EOS_ID] for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [[tiny.IGNORED] * len(p) + row[len(p) :] for p, row in zip(prompts, rows, strict=True)]
        yield tiny.padded(rows, tiny.PAD_ID), tiny.padded(labels, tiny.IGNORED)


def make() -> None:
    """Make the model in PATH, unless it exists."""
    if PATH.exists():
        return
    torch.set_num_threads(1)  # the sums, and so the model, do not depend on the number of cores
    recipe = Recipe(MODEL_SEED, TEACHING_STEPS)
    problems = draw("train", tiny.DEMONSTRATIONS, MODEL_SEED)
    tokenizer = tiny.make_tokenizer(problem.question + problem.solution() for problem in problems)
    model = tiny.make_model(tokenizer, recipe)
    tiny.teach(model, batches(problems, tokenizer), TEACHING_STEPS)
    tiny.publish(model, tokenizer, asdict(recipe), PATH)
