"""Base classes of tasks: prompts that each come from a row, and completions that are right or wrong."""

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

log = logging.getLogger(__name__)

Row = TypeVar("Row")


class Rows(Task, Generic[Row]):
    """Task whose prompts each have a row that says what an answer is worth. room: most tokens of a prompt."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool = False, template: str = "{question}") -> None:
        """Set how prompts are made. Raises ConfigError if the template has no place for a question.

        chat: prompts are a user's messages in the model's chat template. template: text around a {question}.
        """
        if "{question}" not in template:
            raise ConfigError(
                f"task.options.template={template!r} has no place for the problem: write {{question}} there"
            )
        self._ask = template
        self._encode = tokenizer.encode_chat if chat else tokenizer.encode
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._said: Callable[[np.ndarray], str] = tokenizer.decode
        self._special = False
        self._prompts: dict[Split, tuple[Prompt, ...]] = {}
        self._rows: dict[Prompt, Row] = {}  # a prompt equals only itself
        self.room: int | None = None

    @abstractmethod
    def rows(self, split: Split) -> Iterable[tuple[str, str, Row]]:
        """Return (text of the prompt, target, row) for each row of a split. Raises ConfigError."""

    def encoded(self, text: str, row: Row) -> np.ndarray:
        """Return the tokens, int32 [T], of the text of a row's prompt."""
        return self._encode(text)

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return all prompts of a split, read or made, and encoded, at the first call. Raises ConfigError."""
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
        """Warn of prompts that leave no room for a completion. Raises ConfigError if there are many."""
        if not long:
            return
        found = f"{len(long)} of {total} {split} prompts are too long: {first_few(long, between='; ')}"
        rule = f"model.context_length less generator.max_tokens leaves {self.room}"
        if len(long) > MOST_SET_ASIDE * total:
            raise ConfigError(
                f"{found}; {rule}: raise the first, lower the second, or leave out such rows (up to "
                f"{MOST_SET_ASIDE:.0%} are set aside)"
            )
        log.warning("%s; %s; they are set aside", found, rule)

    def encode_question(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of a user's question as this task would put it."""
        return self._encode(self.filled(text))

    def filled(self, question: str) -> str:
        """Return the template with a question in it."""
        return self._ask.replace("{question}", question)

    def row(self, prompt: Prompt) -> Row:
        """Return the row of one of ``prompts``."""
        return self._rows[prompt]

    def show_special_tokens(self) -> None:
        """Show special tokens of completions, too."""
        self._said, self._special = decoder(self._tokenizer, special=True), True

    def text(self, completion: Completion) -> str:
        """Return the text that the model wrote."""
        return self._said(completion.tokens)


class RightOrWrong(Rows[None]):
    """Reward 1 for a completion that ended by itself and whose answer is accepted, else 0."""

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str]]:
        """Return (text of the prompt, target) for all problems of a split. Raises ConfigError."""

    @abstractmethod
    def accepts(self, text: str, target: str) -> bool:
        """Tell whether the text of a whole completion answers with ``target``."""

    def rows(self, split: Split) -> Iterable[tuple[str, str, None]]:
        """Return the questions, each with None as its row."""
        return ((text, target, None) for text, target in self.questions(split))

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return 1 for each completion that is correct, and 0 for any other."""
        return [float(right) for right in self.correct([prompt] * len(completions), completions)]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Tell whether each completion ended by itself with an answer that is accepted."""
        return [
            completion.finish_reason == "stop" and self.accepts(self.text(completion), prompt.target)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
