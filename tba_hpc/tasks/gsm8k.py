"""Grade-school maths word problems (Cobbe et al. 2021, arXiv 2110.14168); 0/1 reward for the final number.

A problem (``question`` and ``answer`` of the data; the target is the number after ``####``):

    question  A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?
    answer    It takes 2/2=<<2/2=1>>1 bolt of white fiber … is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3

Data: ``openai/gsm8k`` on the Hugging Face hub, or local JSONL files of the same two fields.
Splits: validation is the end of the training data and never trained on, so that the test problems
need not be looked at for any choice. With a local train_file and no test_file, test is the slice
before validation.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tba_hpc.config import ConfigError
from tba_hpc.ports import Tokenizer
from tba_hpc.types import Completion, Prompt, Split

HUB_NAME = "openai/gsm8k"
MARKER = "####"
TEMPLATE = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
"""The prompt that realtreetune/rho-1b-sft-GSM8K was tuned on."""

NUMBER = re.compile(r"-?\$?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\$?\.\d+")
"""With or without thousands commas, decimals, a sign and a dollar sign; a trailing period is left out."""

ANSWER_CHARACTERS = 64
COSTLY = re.compile(r"\^|\*\*|!|\\(?!(?:d|t)?frac\b|boxed\b|text\b|times\b|div\b|cdot\b|left\b|right\b|[$%,;! ()\[\]])")
"""What a number needs not, and what could keep computer algebra busy for hours."""

Grader = Literal["final_number", "math_verify"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its gold number as text without commas."""

    question: str
    target: str


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


def equal_final_number(text: str, target: str) -> bool:
    """The paper's rule: the final number equals the target as a decimal (72.0 is 72)."""
    return final_number(text) == Decimal(target)


def equivalent(text: str, target: str) -> bool:
    """math-verify's rule: the answer equals the target as an expression (7/2, 3.5 and \\frac{7}{2}).

    Looks at what follows the last ``####``, or else at the last line. math-verify's own time limits
    are signals, which no thread but the main one may use; here the length of the answer is bounded
    instead, and powers, factorials and functions, which a number needs not, are wrong.
    """
    import math_verify  # 2 s, and only this grader needs it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing time limits
    _, marker, answer = text.rpartition(MARKER)
    answer = answer.strip() if marker else answer.strip().rpartition("\n")[2]
    answer = answer[-ANSWER_CHARACTERS:]
    if COSTLY.search(answer):
        return False
    given = math_verify.parse(answer, parsing_timeout=None)
    gold = math_verify.parse(target, parsing_timeout=None)
    return math_verify.verify(gold, given, timeout_seconds=None)
