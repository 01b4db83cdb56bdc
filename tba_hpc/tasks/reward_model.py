"""A Hugging Face reward model: one number for each text, in batches.

It must not know where the texts come from or what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from transformers import AutoModelForSequenceClassification, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError
from tba_hpc.tasks.text_model import TextModel


class RewardModel(TextModel):
    """A sequence classifier with one label; one with several is refused."""

    LOADER = AutoModelForSequenceClassification
    NOUN = "reward model"
    WANTED = "a sequence classifier"

    def ended(self, text: str) -> str:
        """The text with exactly one end-of-sequence token after it, whether it has one already or not.

        Nothing is written where the model has no such token, or its tokenizer writes it by itself.
        """
        return f"{self._unended(text)}{self._ending}"

    def _unended(self, text: str) -> str:
        end = self._tokenizer.eos_token
        while end and text.endswith(end):
            text = text.removesuffix(end)
        return text

    @cached_property
    def _ending(self) -> str:
        own = self._tokenizer("").input_ids[-1:] == [self._tokenizer.eos_token_id]
        return "" if own else self._tokenizer.eos_token or ""

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """The reward of each text."""
        rewards: list[float] = self.read(texts).tolist()
        return rewards

    def _check(self, config: PretrainedConfig) -> None:
        if config.num_labels != 1:
            raise ConfigError(
                f"{self.name} gives {config.num_labels} numbers for a text, but a reward is one: give a "
                "sequence classifier with num_labels=1"
            )

    def _read(self, inputs: BatchEncoding) -> Tensor:
        return self._model(**inputs).logits[:, 0]
