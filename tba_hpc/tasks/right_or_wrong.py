"""Tasks whose completions are right or wrong, told by their text: the reward is 1 or 0.

It must not know what is asked, nor what a right answer looks like: a task derives from ``RightOrWrong``
and says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Completion, Prompt, Split


class RightOrWrong(ABC):
    """Reward 1 for a completion that ended by itself and whose answer is accepted, else 0."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool = False) -> None:
        """chat: prompts are a user's messages in the model's chat template."""
        self._encode = tokenizer.encode_chat if chat else tokenizer.encode
        self._decode = tokenizer.decode
        self._prompts: dict[Split, tuple[Prompt, ...]] = {}

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str]]:
        """(Text of the prompt, target) of all problems of a split. Raises ConfigError."""

    @abstractmethod
    def accepts(self, text: str, target: str) -> bool:
        """Whether a whole completion answers with ``target``."""

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """All prompts of a split; read or made, and encoded, at the first call. Raises ConfigError."""
        if split not in self._prompts:
            self._prompts[split] = tuple(
                Prompt(i, self._encode(text), target)
                for i, (text, target) in enumerate(self.questions(split))
            )
        return self._prompts[split]

    def encode_question(self, text: str) -> np.ndarray:
        """A question of somebody else's as this task would put it; see ports.Asking."""
        return self._encode(text)

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """1 or 0 each."""
        return [float(right) for right in self.correct([prompt] * len(completions), completions)]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Whether each completion ended by itself with an answer that is accepted."""
        return [
            completion.finish_reason == "stop"
            and self.accepts(self._decode(completion.tokens), prompt.target)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
