"""Base classes of tasks: ``Rows`` for prompts made from rows, ``RightOrWrong`` for rewards of 0 and 1."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import Task, Tokenizer, decoder
from tba_hpc.core.types import Completion, Prompt, Split
from tba_hpc.core.wording import first_few
from tba_hpc.tasks.data import MOST_SET_ASIDE
from tba_hpc.tasks.fields import answer_in

log = logging.getLogger(__name__)

Row = TypeVar("Row")


class Rows(Task, Generic[Row]):
    """Task that keeps the row from which each prompt was made, for computing rewards.

    room: largest number of tokens of a prompt; None: no limit. ``make_task`` sets it.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool = False, template: str = "{question}") -> None:
        """Set how prompts are made. Raises ConfigError if ``template`` lacks {question}.

        chat: apply the model's chat template to each prompt, as a user's message. template: text of a prompt,
        with {question}.
        """
        if "{question}" not in template:
            raise ConfigError(
                f"task.options.template={template!r} has no place for the problem: write {{question}} there"
            )
        self._question_template = template
        self._encode = tokenizer.encode_chat if chat else tokenizer.encode
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._decode_completion: Callable[[np.ndarray], str] = tokenizer.decode
        self._special = False
        self._prompts: dict[Split, tuple[Prompt, ...]] = {}
        self._rows: dict[Prompt, Row] = {}  # prompts are compared by identity
        self.room: int | None = None

    @abstractmethod
    def rows(self, split: Split) -> Iterable[tuple[str, str, Row]]:
        """Return (prompt's text, target, row) for each row of a split. Raises ConfigError for bad data."""

    def encoded(self, text: str, row: Row) -> np.ndarray:
        """Encode the text of a row's prompt, int32 [T]."""
        return self._encode(text)

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return all prompts of a split. The first call for a split reads its rows and encodes them.

        Prompts longer than ``room`` are set aside. Raises ConfigError if more than MOST_SET_ASIDE of them are
        too long, or if the data cannot be used.
        """
        if split not in self._prompts:
            found: list[Prompt] = []
            long: list[str] = []
            for text, target, row in self.rows(split):
                tokens = self.encoded(text, row)
                if self.room is not None and len(tokens) > self.room:
                    long.append(f"{len(tokens)} tokens in {' '.join(text.split())[:60]!r}")
                    continue
                found.append(Prompt(len(found), tokens, target))
                self._rows[found[-1]] = row
            self._set_aside(split, long, len(found) + len(long))
            self._prompts[split] = tuple(found)
        return self._prompts[split]

    def _set_aside(self, split: Split, long: Sequence[str], total: int) -> None:
        """Log a warning of the prompts that are too long. Raises ConfigError if there are too many.

        long: descriptions of these prompts. total: number of all prompts of the split.
        """
        if not long:
            return
        found = f"{len(long)} of {total} {split} prompts are too long: {first_few(long, between='; ')}"
        rule = f"model.context_length less generator.max_tokens leaves {self.room}"
        if len(long) > MOST_SET_ASIDE * total:
            raise ConfigError(
                f"{found}; {rule}: raise context_length, lower max_tokens, or leave out such rows (up to "
                f"{MOST_SET_ASIDE:.0%} are set aside)"
            )
        log.warning("%s; %s; they are set aside", found, rule)

    def encode_question(self, text: str) -> np.ndarray:
        """Encode a user's question as a prompt of this task, int32 [T]."""
        return self._encode(self.filled(text))

    def filled(self, question: str) -> str:
        """Return the template with the question filled in."""
        return self._question_template.replace("{question}", question)

    def row(self, prompt: Prompt) -> Row:
        """Return the row of a prompt that ``prompts`` returned."""
        return self._rows[prompt]

    def show_special_tokens(self) -> None:
        """Decode completions with their special tokens from now on."""
        self._decode_completion, self._special = decoder(self._tokenizer, special=True), True

    def text(self, completion: Completion) -> str:
        """Return the text of a completion."""
        return self._decode_completion(completion.tokens)


class RightOrWrong(Rows[None]):
    """Task with reward 1 for a completion that ends by itself with a right answer (``accepts``), else 0."""

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str]]:
        """Return (prompt's text, target) for each problem of a split. Raises ConfigError for bad data."""

    @abstractmethod
    def accepts(self, text: str, target: str) -> bool:
        """Return whether a completion's text, without its thoughts, gives the right answer, ``target``."""

    def rows(self, split: Split) -> Iterable[tuple[str, str, None]]:
        """Return the questions of a split, with None as their rows."""
        return ((text, target, None) for text, target in self.questions(split))

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return 1 for each correct completion and 0 for any other."""
        return [float(right) for right in self.correct([prompt] * len(completions), completions)]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Return whether each completion ended by itself and is accepted."""
        return [
            completion.finish_reason == "stop"
            and self.accepts(answer_in(self.text(completion)), prompt.target)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
