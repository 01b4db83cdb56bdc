r"""Problems with one right answer: GSM8K (arXiv 2110.14168) and MATH (arXiv 2103.03874).

Rows of GSM8K have ``question`` and ``answer``. The target is the number after ``####``:

    question  A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?
    answer    It takes 2/2=<<2/2=1>>1 bolt of white fiber … is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3

Rows of MATH have ``problem``, and ``answer`` or ``solution``. The target is the answer, or else the last box
of the solution:

    problem   What is the smallest positive perfect cube that can be written as the sum of three …?
    solution  The sum of three consecutive integers takes the form … \boxed{27}

The data are from the Hugging Face hub, with MATH-500 as the test of MATH, or local JSONL files with these
fields.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tba_hpc.config import TaskSection
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Resource, Split
from tba_hpc.tasks import notation
from tba_hpc.tasks.data import HubData, Table, hub_resources, sources_of
from tba_hpc.tasks.equivalence import Equivalence
from tba_hpc.tasks.rows import RightOrWrong

MARKER = "####"

CURRENCY = f"${notation.SIGNS}"
"""All signs of currencies."""

NUMBER = re.compile(
    rf"(?:(?<![\d)])-)?(?:\\?[{CURRENCY}])?"
    r"(?<!\d)(?<!\d\.)(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?!\w))?(?!\.?\d|[⁰¹²³⁴-⁹])",
    re.ASCII,
)
"""Pattern of a number: with or without sign, currency, thousands commas, decimals and exponent. A final
period does not belong to it, and a part of 1.2.3 does not match."""

SIGN_APART = re.compile(rf"(?<=[=:])\s*-\s+(?=[{CURRENCY}\d.])")
"""Pattern of a minus sign with a space before its number, after = or a colon. At the start of a line such a
sign is taken for a bullet."""

APART = re.compile(rf"^-\s+(?=[{CURRENCY}\d.])|{SIGN_APART.pattern}")
"""Pattern of a minus sign with a space before its number, in the text after ####. At the start of that text
a minus sign is not a bullet."""

PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
"""Pattern of a word that is not a TeX command."""

INLINE = re.compile(r"\$([^$\s](?:[^$]*[^$\s=+*/-])?)\$|\\\(((?:(?!\\\().)+?)\\\)")
"""Pattern of a formula in a line of words, as opposed to amounts of money."""

RUN = re.compile(r"(?:(?<![\w)])[-+]|(?<![$(.]))[$(.]*\d[\d\s+\-*/=^().,$%]*", re.ASCII)
"""Pattern of arithmetic in a line of words. A match never begins within a run of brackets, points or dollar
signs, so that even a long run takes linear time."""

Grader = Literal["final_number", "math_verify"]

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
"""Pattern of a TeX command that frames a result, up to its argument."""

BARE = re.compile(r"(?:\\[^()\[\]]|\{[^{}]*\}|[^\s${}\\])*")
"""Pattern of an argument without braces, which ends at a space or at the end of the formula."""

Problem = tuple[str, str]
"""A question, and the right answer as text."""


class WordProblems(RightOrWrong):
    """Task with reward 1 for a completion that ends by itself with the right answer, else 0."""

    HUB: ClassVar[Mapping[Split, HubData]]
    """Data on the hub, for the splits without a file."""
    TEMPLATE: ClassVar[str]
    """Default template of a prompt."""
    ROW: ClassVar[str]
    """Description of a good row, for errors."""

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
        """Make a task from the config's options.

        template, chat: see ``Rows``. validation_problems: number of rows of the training data to hold out for
        each split without a source of its own.
        """
        super().__init__(tokenizer, chat=chat, template=self.TEMPLATE if template is None else template)
        self._table = Table(
            sources=sources_of(train_file, test_file, self.HUB),
            parse=self.parse,
            wanted=self.ROW,
            held_out=validation_problems,
            key="task.options.validation_problems",
            identity=lambda problem: " ".join(problem[0].split()),
        )
        self._equivalent = Equivalence()

    @classmethod
    def resources(cls, task: TaskSection) -> list[Resource]:
        """Return the hub data sets needed for splits without a file."""
        return hub_resources(task, sources_of(task.train_file, task.test_file, cls.HUB))

    @abstractmethod
    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Return the problem in a row, or None if the row is not as ``ROW`` describes."""

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """Return (prompt's text, target) for each problem of a split. Raises ConfigError for bad data."""
        return [(self.filled(question), target) for question, target in self._table.rows(split)]


# --- GSM8K ---


def final_number(text: str) -> Decimal | None:
    """Return the number with which ``text`` answers, or None if it has no answer.

    After the last ``####`` there must be exactly one number: several numbers, or an unfinished sum, are not
    an answer. Without ``####`` the answer is the last number of the text, as in the paper's reward.
    """
    _, marker, answer = text.rpartition(MARKER)
    answer = notation.digits(answer)
    if marker:
        answer = notation.rewritten(answer.strip(), notation.THOUSANDS)
    answer = (APART if marker else SIGN_APART).sub("-", answer)
    numbers = NUMBER.findall(answer)
    if not numbers or (marker and len(numbers) > 1):
        return None
    return Decimal(re.sub(rf"[\\{CURRENCY},]", "", numbers[-1]))


def _trimmed(text: str, ends: str) -> str:
    """Strip periods and the characters ``ends`` from both ends, but not the point of a number such as .5."""
    return re.sub(rf"^[{ends}.]+(?!\d)|^[{ends}]+", "", text.rstrip(f"{ends}.")).lstrip(ends)


def final_expression(text: str) -> str:
    """Return the expression with which ``text`` answers, without enclosing dollar signs and periods.

    The answer is the text after the last ``####``, or else the last line. If it contains words but no box,
    the expression is its last formula, or its last arithmetic if it has no formula. If there are several
    of these after ``####``, the result is empty.
    """
    _, marker, answer = text.rpartition(MARKER)
    line = answer if marker else text.strip().rpartition("\n")[2]
    found = _trimmed(line.strip(), "$")
    if BOX.search(line) or not PROSE.search(re.sub(r"\\text\s*\{[^{}]*\}", "", line)):
        return found
    formulas = [one or other for one, other in INLINE.findall(line)]
    plain = notation.rewritten(notation.characters(line), notation.SEPARATED)
    plain = re.sub(f"[{notation.SIGNS}]", "", plain)
    runs = formulas or [_trimmed(run, " *,") for run in RUN.findall(plain)]
    return "" if marker and len(runs) > 1 else runs[-1] if runs else found


class GSM8K(WordProblems):
    r"""Task with reward 1 for a completion that ends by itself with the right number, else 0.

    grader: "final_number", the rule of TBA's paper: the final number must equal the target as a decimal (72.0
    is 72). "math_verify": the final expression must equal the target mathematically (7/2,
    \boxed{\frac{7}{2}}).
    """

    HUB: ClassVar[Mapping[Split, HubData]] = {
        "train": HubData("openai/gsm8k", "main", "train"),
        "test": HubData("openai/gsm8k", "main", "test"),
    }
    TEMPLATE = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    """Prompt with which realtreetune/rho-1b-sft-GSM8K was fine-tuned."""
    ROW = f"a JSON object with a text 'question' and an 'answer' that ends in '{MARKER}' and a number"

    def __init__(self, tokenizer: Tokenizer, *, grader: Grader = "final_number", **options: Any) -> None:
        """Make a task from the config's options. options: those of ``WordProblems``."""
        super().__init__(tokenizer, **options)
        self._grader = grader

    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Return the question and its target: the number after ``####`` in plain decimals."""
        question, answer = row.get("question"), row.get("answer")
        number = final_number(answer) if isinstance(answer, str) and MARKER in answer else None
        if not isinstance(question, str) or not question.strip() or number is None:
            return None
        return question, f"{number:f}"

    def accepts(self, text: str, target: str) -> bool:
        """Return whether the answer in a text is right, by the rule of ``grader``."""
        if self._grader == "final_number":
            return final_number(text) == Decimal(target)
        answer = final_expression(text)
        return self._equivalent(boxed(answer) or answer, target)


# --- MATH ---


def boxed(text: str) -> str | None:
    r"""Return the content of the last box, such as ``\boxed{…}``, ``\boxed 2`` or ``\fbox{…}``.

    The result is None if there is no box, or if the last box is empty or not closed.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    argument = text[boxes[-1].end() :]
    inside = _braced(argument) if argument.startswith("{") else _bare(argument)
    return inside.strip() or None


def _bare(text: str) -> str:
    r"""Return the content of a box without braces, such as 2 of ``\boxed 2.``

    text: what follows the box's command. Punctuation at the content's end is left off. The result is "" if
    there is no content.
    """
    match = BARE.match(text)
    return match[0].rstrip(".,;:") if match else ""


def _braced(text: str) -> str:
    """Return the text between the brace at the start and its closing brace; "" if that is missing."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # an escaped brace is a character
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return text[1 : match.start()]
    return ""


class Math(WordProblems):
    """Task with reward 1 for a completion that ends by itself and whose last box equals the target, else 0.

    Box and target are compared mathematically (``comparison``).
    """

    HUB: ClassVar[Mapping[Split, HubData]] = {
        "train": HubData("DigitalLearningGmbH/MATH-lighteval", None, "train"),
        "test": HubData("HuggingFaceH4/MATH-500", None, "test"),
    }
    TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    """Template recommended by the authors of Qwen2.5."""
    ROW = r"a JSON object with a text 'problem' and a 'solution' with a \boxed{…} result, or an 'answer'"

    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """Return the question and its target: the answer, or else the last box of the solution.

        Returns None if the question or the target is missing, blank or of the wrong type.
        """
        question, solution, answer = row.get("problem"), row.get("solution"), row.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
            answer = str(answer)
        answer = answer or (boxed(solution) if isinstance(solution, str) else None)
        if not isinstance(question, str) or not isinstance(answer, str):
            return None
        return (question, answer) if question.strip() and answer.strip() else None

    def accepts(self, text: str, target: str) -> bool:
        """Return whether the last box of a text is equivalent to the target."""
        answer = boxed(text)
        return answer is not None and (answer == target or self._equivalent(answer, target))
