"""A Hugging Face reward model: one number for each text, in batches.

It must not know where the texts come from or what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import AutoModelForSequenceClassification, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError
from tba_hpc.tasks.text_model import TextModel


class RewardModel(TextModel):
    """A sequence classifier with one label; one with several is refused."""

    LOADER = AutoModelForSequenceClassification
    NOUN = "reward model"
    WANTED = "a sequence classifier"

    @property
    def eos_token(self) -> str:
        """What ends a text, in the model's own vocabulary."""
        return str(self._tokenizer.eos_token)

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
