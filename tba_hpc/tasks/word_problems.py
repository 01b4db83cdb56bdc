r"""Problems with one right answer: GSM8K (arXiv 2110.14168) and MATH (arXiv 2103.03874).

GSM8K has ``question`` and ``answer``; the target is the number after ``####``:

    question  A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?
    answer    It takes 2/2=<<2/2=1>>1 bolt of white fiber … is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3

MATH has ``problem`` and ``solution``, whose last box is the target, or ``answer``, which is the target:

    problem   What is the smallest positive perfect cube that can be written as the sum of three …?
    solution  The sum of three consecutive integers takes the form … \boxed{27}

The data are on the Hugging Face hub, with MATH-500 as the test of MATH, or local JSONL files of these fields.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tba_hpc.config import TaskSection
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Resource, Split
from tba_hpc.tasks import notation
from tba_hpc.tasks.data import HubData, Table, hub_resources, sources_of
from tba_hpc.tasks.equivalence import Equivalence
from tba_hpc.tasks.rows import RightOrWrong

MARKER = "####"

NUMBER = re.compile(
    r"(?:(?<![\d)])-)?(?:\\?[$€£])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?!\w))?(?!\.?\d|[⁰¹²³⁴-⁹])",
    re.ASCII,
)
"""A number, with or without thousands commas, decimals, exponent, sign and currency.

A period that ends it is left out.
"""

THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![ .,]?\d)", re.ASCII)
"""A number with blanks between its thousands."""

SIGN_APART = re.compile(r"(?<=[=:])\s*-\s+(?=[$\d.])")
"""A minus sign apart from its number, after = or a colon; at the start of a line it is a bullet."""

APART = re.compile(rf"^-\s+(?=[$\d.])|{SIGN_APART.pattern}")
"""A minus sign apart from its number, in a text after a marker, whose start is no bullet."""

PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
"""A word that is no command of TeX."""

INLINE = re.compile(r"\$([^$\s](?:[^$]*[^$\s=+*/-])?)\$|\\\((.+?)\\\)")
"""A formula in a line of words, but no amount of money."""

RUN = re.compile(r"(?:(?<![\w)])[-+])?[$(.]*\d[\d\s+\-*/=^().,$%]*", re.ASCII)
"""Arithmetic in a line of words."""

Grader = Literal["final_number", "math_verify"]

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
"""A command that frames a result in TeX, up to its argument."""

BARE = re.compile(r"(?:\\[^()\[\]]|\{[^{}]*\}|[^\s${}\\])*")
"""An argument without braces around it: up to a blank, or to the end of the formula."""

Problem = tuple[str, str]
"""A question, and its gold answer as text."""


class WordProblems(RightOrWrong):
    """Reward 1 for a completion that ended by itself and whose answer is accepted, else 0."""

    HUB: ClassVar[Mapping[Split, HubData]]
    """Data of the problems when no file is given."""
    TEMPLATE: ClassVar[str]
    """Template of a prompt when none is given."""
    ROW: ClassVar[str]
    """Description of a good row, for a user whose file has another."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        template: str | None = None,
        chat: bool = False,
        validation_problems: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        """Take the options of the config; see Rows. validation_problems: size of the held-out slice."""
        super().__init__(tokenizer, chat=chat, template=self.TEMPLATE if template is None else template)
        self._table = Table(
            sources=sources_of(train_file, test_file, self.HUB),
            parse=self.parse,
            wanted=self.ROW,
            held_out=validation_problems,
            key="task.options.validation_problems",
        )
        self._equivalent = Equivalence()

    @classmethod
    def resources(cls, task: TaskSection) -> list[Resource]:
        """Return the hub's data in the place of files that are not given."""
        return hub_resources(task, sources_of(task.train_file, task.test_file, cls.HUB))

    @abstractmethod
    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Return the problem of a row of the data; None if the row is not as ``ROW`` says."""

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """Return (question in the template, target) for all problems of a split."""
        return [(self.filled(question), target) for question, target in self._table.rows(split)]


# --- GSM8K ---


def final_number(text: str) -> Decimal | None:
    """Return the number that ``text`` answers with, or None.

    With a marker it is the only number after the last ``####``; two numbers, or an unfinished sum, are no
    answer. Without one it is the last number of the text, as in the paper's reward.
    """
    _, marker, answer = text.rpartition(MARKER)
    answer = notation.digits(answer)
    if marker:
        answer = THOUSANDS.sub(lambda number: number[0].replace(" ", ""), answer.strip())
    answer = (APART if marker else SIGN_APART).sub("-", answer)
    numbers = NUMBER.findall(answer)
    if not numbers or (marker and len(numbers) > 1):
        return None
    return Decimal(re.sub(r"[\\$€£,]", "", numbers[-1]))


def final_expression(text: str) -> str:
    """Return the text after the last ``####``, or else the last line; less dollar signs and stops around it.

    In a line of words it is the last formula, or if there is none, the last arithmetic. After a marker that
    must be the only one; otherwise there is no answer.
    """
    _, marker, answer = text.rpartition(MARKER)
    line = answer if marker else text.strip().rpartition("\n")[2]
    found = line.strip().strip("$.")
    if BOX.search(line) or not PROSE.search(re.sub(r"\\text\s*\{[^{}]*\}", "", line)):
        return found
    formulas = [one or other for one, other in INLINE.findall(line)]
    runs = formulas or [run.strip(" *.,") for run in RUN.findall(notation.characters(line))]
    return "" if marker and len(runs) > 1 else runs[-1] if runs else found


class GSM8K(WordProblems):
    r"""Reward 1 for a completion that ended by itself with the right number, else 0.

    grader: ``final_number`` is the paper's rule: the final number equals the target as a decimal (72.0 is
    72). With ``math_verify`` the final expression equals it as mathematics (7/2, \boxed{\frac{7}{2}}).
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
        """Take the options of the config; see WordProblems."""
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
        """Return question and target, which is the number after the marker, without commas."""
        question, answer = row.get("question"), row.get("answer")
        number = final_number(answer) if isinstance(answer, str) and MARKER in answer else None
        if not isinstance(question, str) or not question.strip() or number is None:
            return None
        return question, f"{number:f}"

    def accepts(self, text: str, target: str) -> bool:
        """Tell whether the answer in a text is right, by the rule of ``grader``."""
        if self._grader == "final_number":
            return final_number(text) == Decimal(target)
        answer = final_expression(text)
        return self._equivalent(boxed(answer) or answer, target)


# --- MATH ---


def boxed(text: str) -> str | None:
    r"""Return the content of the last box: ``\boxed{…}`` with braces balanced, ``\boxed 2``, ``\fbox{…}``.

    It is None if there is no box, or the last one is empty or not closed.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    argument = text[boxes[-1].end() :]
    inside = _braced(argument) if argument.startswith("{") else _bare(argument)
    return inside.strip() or None


def _bare(text: str) -> str:
    """Return the argument without braces at the start, less the punctuation of a sentence that it ends."""
    match = BARE.match(text)
    return match[0].rstrip(".,;:") if match else ""


def _braced(text: str) -> str:
    """Return the text between the brace at the start and the one that closes it; empty if none does."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # an escaped brace is a character
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return text[1 : match.start()]
    return ""


class Math(WordProblems):
    """Reward 1 for a completion that ended by itself and whose last box equals the target, else 0.

    Both are compared as mathematics, with math-verify's parser.
    """

    HUB: ClassVar[Mapping[Split, HubData]] = {
        "train": HubData("DigitalLearningGmbH/MATH-lighteval", None, "train"),
        "test": HubData("HuggingFaceH4/MATH-500", None, "test"),
    }
    TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    """Template of Qwen2.5's authors."""
    ROW = r"a JSON object with a text 'problem' and a 'solution' with a \boxed{…} result, or an 'answer'"

    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Return question and target: the answer, a number or a text, or the last box of the solution."""
        question, solution, answer = row.get("problem"), row.get("solution"), row.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
            answer = str(answer)
        answer = answer or (boxed(solution) if isinstance(solution, str) else None)
        if not isinstance(question, str) or not isinstance(answer, str):
            return None
        return (question, answer) if question.strip() and answer.strip() else None

    def accepts(self, text: str, target: str) -> bool:
        """Tell whether the last box of a text is equivalent to the target."""
        answer = boxed(text)
        return answer is not None and (answer == target or self._equivalent(answer, target))
