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
from collections.abc import Iterable
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

NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
"""With or without thousands commas, decimals, a sign and a dollar sign; a trailing period is left out."""

LONGEST_ANSWER = 256
"""Characters of an answer that math-verify is asked about."""
COMMANDS = frozenset(
    ("boxed", "cdot", "dfrac", "div", "frac", "left", "mathrm", "right", "text", "tfrac", "times")
)
"""LaTeX in which a number may be written."""

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
    r"""math-verify's rule: the answer equals the target as an expression (3.5, 7/2, \boxed{7/2}).

    The answer is what follows the last ``####``, or else the last line. math-verify's own time limits
    are signals, which only a main thread may use, and rewards are computed in another; so what could
    keep computer algebra busy is counted as wrong: long answers, powers, factorials, functions.
    """
    import math_verify  # slow to import, and only this grader needs it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of the missing time limits
    _, marker, answer = text.rpartition(MARKER)
    answer = answer.strip() if marker else answer.strip().rpartition("\n")[2]
    if not _is_plain(answer):
        return False
    given = math_verify.parse(answer, parsing_timeout=None)
    gold = math_verify.parse(target, parsing_timeout=None)
    return bool(math_verify.verify(gold, given, timeout_seconds=None))


def _is_plain(answer: str) -> bool:
    costly = any(sign in answer for sign in ("^", "!", "**"))
    commands = set(re.findall(r"\\([A-Za-z]+)", answer))
    return len(answer) <= LONGEST_ANSWER and not costly and commands <= COMMANDS


GRADERS = {"final_number": equal_final_number, "math_verify": equivalent}


class GSM8K:
    """Reward 1 for a completion that ended by itself and whose answer the grader accepts, else 0."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        grader: Grader = "final_number",
        template: str = TEMPLATE,
        validation_problems: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        """``template`` holds ``{question}``; ``validation_problems`` is the size of the held-out slice.

        Raises ConfigError where the template has no place for the question.
        """
        if "{question}" not in template:
            raise ConfigError(
                f"task.options.template={template!r} has no place for the problem: write {{question}} there"
            )
        self._tokenizer = tokenizer
        self._train_file = train_file
        self._test_file = test_file
        self._accepts = GRADERS[grader]
        self._template = template
        self._held_out = validation_problems
        self._prompts: dict[Split, tuple[Prompt, ...]] = {}

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """All prompts of a split; read and encoded at the first call. Raises ConfigError."""
        if split not in self._prompts:
            self._prompts[split] = tuple(
                Prompt(i, self._tokenizer.encode(self._template.replace("{question}", p.question)), p.target)
                for i, p in enumerate(self._problems(split))
            )
        return self._prompts[split]

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 or 0."""
        return float(self.correct(prompt, completion))

    def correct(self, prompt: Prompt, completion: Completion) -> bool:
        """Whether the completion ended by itself with an answer that the grader accepts."""
        if completion.finish_reason == "length":
            return False
        return self._accepts(self._tokenizer.decode(completion.tokens), prompt.target)

    @property
    def _test_is_own(self) -> bool:
        """Whether test has a source of its own, or else is a slice of train_file."""
        return self._test_file is not None or self._train_file is None

    def _problems(self, split: Split) -> list[Problem]:
        if split == "test" and self._test_is_own:
            return read_problems(self._test_file, "test")
        problems = read_problems(self._train_file, "train")
        held_out: tuple[Split, ...] = ("validation",) if self._test_is_own else ("validation", "test")
        return _cut(problems, held_out, self._held_out)[split]


def _cut(problems: list[Problem], held_out: tuple[Split, ...], size: int) -> dict[Split, list[Problem]]:
    """Take ``size`` problems off the end for each held-out split; the rest is for training."""
    rest = len(problems) - size * len(held_out)
    if rest <= 0:
        raise ConfigError(
            f"the training data has {len(problems)} problems, but {' and '.join(held_out)} take {size} each: "
            "give more problems or lower task.options.validation_problems"
        )
    starts = {split: len(problems) - size * (i + 1) for i, split in enumerate(held_out)}
    parts = {split: problems[start : start + size] for split, start in starts.items()}
    return {"train": problems[:rest], **parts}


def read_problems(file: str | None, source: Literal["train", "test"]) -> list[Problem]:
    """All problems of a local JSONL file, or of the hub's split ``source``. Raises ConfigError."""
    rows = _hub_rows(source) if file is None else _file_rows(Path(file), f"task.{source}_file")
    return [_problem(row, f"{file or HUB_NAME}, line {i}") for i, row in enumerate(rows, start=1)]


def _file_rows(path: Path, key: str) -> Iterable[object]:
    try:
        lines = path.read_text(encoding="utf-8").strip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {key}={path} ({reason}): check the path") from None
    if lines == [""]:
        raise ConfigError(f"{key}={path} is empty: it must hold one JSON object a line")
    return map(_json, lines)


def _json(line: str) -> object:
    """The value of a line; None where it is not JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _problem(row: object, place: str) -> Problem:
    fields = row if isinstance(row, dict) else {}
    question, answer = fields.get("question"), fields.get("answer")
    number = final_number(answer) if isinstance(answer, str) and MARKER in answer else None
    if not isinstance(question, str) or number is None:
        raise ConfigError(
            f"{place}: not a problem; write a JSON object with a text 'question' and an 'answer' "
            f"that ends in '{MARKER}' and a number"
        )
    return Problem(question, f"{number:f}")


def _hub_rows(split: str) -> Iterable[dict[str, Any]]:
    import datasets  # slow to import, and local files need it not

    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(HUB_NAME, "main", split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load {HUB_NAME} from the hub ({type(error).__name__}): check the network, "
            "or give local JSONL files with task.train_file and task.test_file"
        ) from None
    return rows
