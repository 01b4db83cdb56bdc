"""A Hugging Face reward model: one number for each text, in batches.

It must not know where the texts come from or what the numbers are for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tba_hpc.config import ConfigError


class RewardModel:
    """A sequence classifier with one label, in evaluation mode, on the GPU where there is one.

    path: folder or hub name; it reads texts with its own tokenizer · batch: texts per forward pass ·
    key: the config key of ``path``, for errors. Raises ConfigError where there is no such model, or one with
    several labels.
    """

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        try:
            labels = AutoConfig.from_pretrained(path).num_labels
            if labels != 1:
                raise ConfigError(
                    f"{key}={path} gives {labels} numbers for a text, but a reward is one: give a sequence "
                    "classifier with num_labels=1"
                )
            self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
            # A decoder's score is read at its last token that is no padding.
            self._model = AutoModelForSequenceClassification.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"no reward model can be loaded from {key}={path}: give a folder or hub name of a sequence "
                f"classifier ({str(error).splitlines()[0]})"
            ) from None
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._batch = batch
        self._turn = threading.Lock()
        if torch.cuda.is_available():
            self._model.cuda()

    @property
    def eos_token(self) -> str:
        """What ends a text, in the model's own vocabulary."""
        return str(self._tokenizer.eos_token)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> list[float]:
        """The reward of each text; what is longer than the model's context loses its beginning.

        It may be called from several threads, one of which works at a time: a tokenizer takes no two.
        """
        with self._turn:
            return [reward for batch in self._batches(texts) for reward in self._rewards(batch)]

    def _batches(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        return (texts[start : start + self._batch] for start in range(0, len(texts), self._batch))

    def _rewards(self, texts: Sequence[str]) -> list[float]:
        inputs = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._model.config.max_position_embeddings,
            return_tensors="pt",
        ).to(self._model.device)
        rewards: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return rewards
