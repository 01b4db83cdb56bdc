r"""Competition mathematics: MATH (Hendrycks et al. 2021, arXiv 2103.03874) and MATH-500; 0/1 reward.

A problem (``problem`` and ``solution`` of the data; the target is what the last box holds):

    problem   What is the smallest positive perfect cube that can be written as the sum of three …?
    solution  The sum of three consecutive integers takes the form … \boxed{27}

Data: the training problems of MATH and, as test, MATH-500, both on the Hugging Face hub, or local JSONL
files of the same two fields (an ``answer`` replaces the solution's box).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from tba_hpc.core.types import Split
from tba_hpc.tasks.data import HubData
from tba_hpc.tasks.word_problems import Problem, WordProblems

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
"""What frames a result in TeX, up to its argument."""

BARE = re.compile(r"(?:\\[^()\[\]]|\{[^{}]*\}|[^\s${}\\])*")
"""An argument without braces around it: up to a blank, or to the end of the formula."""


def boxed(text: str) -> str | None:
    r"""What the last box of a text holds: ``\boxed{…}`` with braces balanced, ``\boxed 2``, ``\fbox{…}``.

    None where there is no box, or the last one is empty or not closed.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    argument = text[boxes[-1].end() :]
    inside = _braced(argument) if argument.startswith("{") else _bare(argument)
    return inside.strip() or None


def _bare(text: str) -> str:
    """The argument without braces at the start, less the punctuation of a sentence that ends with it."""
    match = BARE.match(text)
    return match[0].rstrip(".,;:") if match else ""


def _braced(text: str) -> str:
    """What stands between the brace at the start and the one that closes it; nothing where none does."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # an escaped brace is a character
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return text[1 : match.start()]
    return ""


class Math(WordProblems):
    """Reward 1 for a completion that ended by itself and whose last box equals the target, else 0.

    Equal as mathematics, by math-verify.
    """

    HUB: ClassVar[Mapping[Split, HubData]] = {
        "train": HubData("DigitalLearningGmbH/MATH-lighteval", None, "train"),
        "test": HubData("HuggingFaceH4/MATH-500", None, "test"),
    }
    TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    """What Qwen2.5's authors ask with."""
    ROW = r"a JSON object with a text 'problem' and a 'solution' with a \boxed{…} result, or an 'answer'"

    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Target: the answer, or what the solution boxes."""
        question, solution = row.get("problem"), row.get("solution")
        answer = row.get("answer") or (boxed(solution) if isinstance(solution, str) else None)
        if not isinstance(question, str) or not isinstance(answer, str):
            return None
        return Problem(question, answer)

    def accepts(self, text: str, target: str) -> bool:
        """By equivalence of what is boxed."""
        answer = boxed(text)
        return answer is not None and (answer == target or self._equivalent(answer, target))
