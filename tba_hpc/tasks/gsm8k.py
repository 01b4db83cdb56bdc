"""Grade-school maths word problems (Cobbe et al. 2021, arXiv 2110.14168); 0/1 reward for the final number.

A problem (``question`` and ``answer`` of the data; the target is the number after ``####``):

    question  A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?
    answer    It takes 2/2=<<2/2=1>>1 bolt of white fiber … is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3

Data: ``openai/gsm8k`` on the Hugging Face hub, or local JSONL files of the same two fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Split
from tba_hpc.tasks.data import HubData
from tba_hpc.tasks.word_problems import Problem, WordProblems

MARKER = "####"

NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
"""With or without thousands commas, decimals, a sign and a dollar sign; a trailing period is left out."""

Grader = Literal["final_number", "math_verify"]


def final_number(text: str) -> Decimal | None:
    """The number that ``text`` answers with, or None.

    With a marker: the only number after the last ``####`` (two numbers, or an unfinished sum, are no
    answer). Without one: the last number of the text, as in the paper's reward.
    """
    _, marker, answer = text.rpartition(MARKER)
    numbers = NUMBER.findall(answer)
    if not numbers or (marker and len(numbers) > 1):
        return None
    return Decimal(re.sub("[$,]", "", numbers[-1]))


def final_expression(text: str) -> str:
    """What follows the last ``####``, or else the last line; less dollar signs and full stops around it."""
    _, marker, answer = text.rpartition(MARKER)
    return (answer if marker else text.strip().rpartition("\n")[2]).strip().strip("$.")


class GSM8K(WordProblems):
    r"""Reward 1 for a completion that ended by itself with the right number, else 0.

    grader: ``final_number``, the paper's rule (the final number equals the target as a decimal, 72.0 is
    72), or ``math_verify`` (the final expression equals it as mathematics: 7/2, \boxed{\frac{7}{2}}).
    """

    HUB: ClassVar[Mapping[Split, HubData]] = {
        "train": HubData("openai/gsm8k", "main", "train"),
        "test": HubData("openai/gsm8k", "main", "test"),
    }
    TEMPLATE = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    """The prompt that realtreetune/rho-1b-sft-GSM8K was tuned on."""
    ROW = f"a JSON object with a text 'question' and an 'answer' that ends in '{MARKER}' and a number"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        grader: Grader = "final_number",
        template: str | None = None,
        chat: bool = False,
        validation_problems: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        """See WordProblems."""
        super().__init__(
            tokenizer,
            train_file=train_file,
            test_file=test_file,
            template=template,
            chat=chat,
            validation_problems=validation_problems,
        )
        self._grader = grader

    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Target: the number after the marker, without commas."""
        question, answer = row.get("question"), row.get("answer")
        number = final_number(answer) if isinstance(answer, str) and MARKER in answer else None
        if not isinstance(question, str) or number is None:
            return None
        return Problem(question, f"{number:f}")

    def accepts(self, text: str, target: str) -> bool:
        """As the grader says."""
        if self._grader == "final_number":
            return final_number(text) == Decimal(target)
        return self._equivalent(final_expression(text), target)
