"""Generated word problems with two to four additions and subtractions, easy enough to train on a laptop.

A problem, its worked solution and its bare answer:

    Gus has 17 apples. Gus loses 3. Gus finds 9. How many apples?
    17-3=14;14+9=23;#### 23
    #### 23

The splits are disjoint by construction, for every seed: the checksum of an expression (``17-3+9``) decides
its split. Nothing is read from disk.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, get_args

import numpy as np
from pydantic import Field

from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Split
from tba_hpc.tasks.data import HELD_OUT, refuse_files
from tba_hpc.tasks.rows import RightOrWrong

NAMES = ("Ada", "Ben", "Gus", "Ida", "Kim", "Leo", "Mia", "Tom")
ITEMS = ("apples", "books", "coins", "eggs", "keys", "pens", "shells", "stamps")
GAINS = ("buys", "finds", "wins")
LOSSES = ("drops", "loses", "sells")
START = (5, 30)
CHANGE = (1, 9)
STEPS = (2, 4)
"""Fewest and most changes of a problem. START is the range of the first number, CHANGE of each change."""

LARGEST = 50
"""Largest total at any point of a problem. The smallest is 0."""

PARTS = 10
"""Number of parts into which expressions are divided by their checksums. Part 0 is held out for validation
and part 1 for test, in the order of HELD_OUT. The other eight are for training."""

Size = Annotated[int, Field(ge=0, le=100_000)]


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem about a person who has some things, and then gains or loses a few, several times.

    name: the person. item: the things, in the plural. start: how many the person has at first. changes:
    numbers that are gained (positive) or lost (negative), in order. verbs: a verb for each change.
    """

    name: str
    item: str
    start: int
    changes: tuple[int, ...]
    verbs: tuple[str, ...]

    @property
    def expression(self) -> str:
        """Expression that identifies the problem, such as ``17-3+9``."""
        return str(self.start) + "".join(f"{change:+d}" for change in self.changes)

    @property
    def totals(self) -> list[int]:
        """Numbers of things: at first, and after each change."""
        return list(accumulate(self.changes, initial=self.start))

    @property
    def target(self) -> str:
        """Final total, which is the right answer."""
        return str(self.totals[-1])

    @property
    def question(self) -> str:
        """Text of the prompt, ending with a newline."""
        story = [f"{self.name} has {self.start} {self.item}."]
        for verb, change in zip(self.verbs, self.changes, strict=True):
            story.append(f"{self.name} {verb} {abs(change)}.")
        return " ".join([*story, f"How many {self.item}?\n"])

    @property
    def bare_answer(self) -> str:
        """Right answer without a worked solution, such as ``#### 23``."""
        return f"#### {self.target}"

    @property
    def solution(self) -> str:
        """Worked solution: an equation for each change, then the right answer."""
        totals = self.totals
        work = [f"{a}{c:+d}={b};" for a, c, b in zip(totals, self.changes, totals[1:], strict=False)]
        return "".join(work) + self.bare_answer


def split_of(expression: str) -> Split:
    """Return the split to which ``expression`` belongs."""
    part = zlib.crc32(expression.encode()) % PARTS
    return HELD_OUT[part] if part < len(HELD_OUT) else "train"


def draw_problems(split: Split, count: int, seed: int) -> tuple[Problem, ...]:
    """Draw ``count`` problems of ``split`` with distinct expressions, determined by ``seed``."""
    rng = np.random.default_rng([seed, get_args(Split).index(split)])
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = _draw(rng)
        if split_of(problem.expression) == split:
            found.setdefault(problem.expression, problem)
    return tuple(found.values())


def _draw(rng: np.random.Generator) -> Problem:
    start = _between(rng, START)
    changes: list[int] = []
    for _ in range(_between(rng, STEPS)):
        changes.append(_draw_change(rng, start + sum(changes)))
    return Problem(
        name=NAMES[rng.integers(len(NAMES))],
        item=ITEMS[rng.integers(len(ITEMS))],
        start=start,
        changes=tuple(changes),
        verbs=tuple(_draw_verb(rng, change) for change in changes),
    )


def _draw_change(rng: np.random.Generator, total: int) -> int:
    """Draw a change, a gain or a loss, that keeps the ``total`` between 0 and LARGEST."""
    size = _between(rng, CHANGE)
    gains = bool(rng.integers(2))
    return size if total < size or (gains and total + size <= LARGEST) else -size


def _draw_verb(rng: np.random.Generator, change: int) -> str:
    verbs = GAINS if change > 0 else LOSSES
    return verbs[rng.integers(len(verbs))]


def _between(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(rng.integers(ends[0], ends[1] + 1))


def is_correct(text: str, target: str) -> bool:
    """Return whether the target, and nothing else, follows the first ``####``."""
    _, _, answer = text.partition("####")
    return answer.strip() == target


class Arithmetic(RightOrWrong):
    """Task with reward 1 for a completion that ends by itself with the right ``####`` number, else 0."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        train_problems: Size = 2000,
        validation_problems: Size = 256,
        test_problems: Size = 512,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        """Set the number of problems of each split, and the seed that determines them.

        Raises ConfigError if a file is given.
        """
        remedy = "it generates its problems; remove them or choose another task.name"
        refuse_files("arithmetic", train_file, test_file, remedy=remedy)
        super().__init__(tokenizer)
        self._seed = seed
        self._sizes: dict[Split, int] = {
            "train": train_problems,
            "validation": validation_problems,
            "test": test_problems,
        }

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """Return (text of the prompt, target) for each problem drawn for a split."""
        problems = draw_problems(split, self._sizes[split], self._seed)
        return [(problem.question, problem.target) for problem in problems]

    def encode_question(self, text: str) -> np.ndarray:
        """Encode a user's question with a newline at its end, as in the problems, int32 [T]."""
        return self._encode(f"{text.strip()}\n")

    def accepts(self, text: str, target: str) -> bool:
        """Return whether the text of a completion has the right answer, by ``is_correct``."""
        return is_correct(text, target)
