"""Tasks whose prompts each come of a row, something that tells what an answer to it is worth.

It must not know what a row holds, nor how answers are judged: a task derives from ``Rows`` and says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Completion, Prompt, Split

Row = TypeVar("Row")


class Rows(ABC, Generic[Row]):
    """Prompts, each with its row."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool = False) -> None:
        """chat: prompts are a user's messages in the model's chat template."""
        self._encode = tokenizer.encode_chat if chat else tokenizer.encode
        self._decode = tokenizer.decode
        self._prompts: dict[Split, tuple[Prompt, ...]] = {}
        self._rows: dict[Prompt, Row] = {}  # prompts are themselves alone, whatever they say

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str, Row]]:
        """(Text of the prompt, target, row) of a split. Raises ConfigError."""

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """All prompts of a split; read or made, and encoded, at the first call. Raises ConfigError."""
        if split not in self._prompts:
            found: list[Prompt] = []
            for text, target, row in self.questions(split):
                found.append(Prompt(len(found), self._encode(text), target))
                self._rows[found[-1]] = row
            self._prompts[split] = tuple(found)
        return self._prompts[split]

    def encode_question(self, text: str) -> np.ndarray:
        """A question of somebody else's as this task would put it; see ports.Asking."""
        return self._encode(text)

    def row(self, prompt: Prompt) -> Row:
        """The row of one of ``prompts``."""
        return self._rows[prompt]

    def text(self, completion: Completion) -> str:
        """What the model wrote."""
        return self._decode(completion.tokens)
