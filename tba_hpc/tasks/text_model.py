"""A Hugging Face model that reads whole texts, in batches: a reward model, a classifier, an embedder.

It must not know where the texts come from or what is read off them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError


class TextModel(ABC):
    """A model in evaluation mode, on the GPU where there is one; it reads texts with its own tokenizer.

    path: folder or hub name. batch: texts per forward pass. key: the config key of ``path``, for errors.
    Raises ConfigError where there is no such model, or it is not of use.
    """

    LOADER: ClassVar[Any]
    """The class of transformers that loads it."""
    NOUN: ClassVar[str]
    """What it is here, for errors."""
    WANTED: ClassVar[str]
    """What a folder or hub name must hold, for errors."""

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        self.name = f"{key}={path}"
        """Key and value of the config, for errors."""
        self._check(self._load(AutoConfig, path))
        self._tokenizer = self._load(AutoTokenizer, path, truncation_side="left")
        self._model = self._load(self.LOADER, path).eval()
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # A decoder's score is read at its last token that is no padding.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._batch = batch
        self._turn = threading.Lock()
        if torch.cuda.is_available():
            self._model.cuda()

    @torch.inference_mode()
    def read(self, texts: Sequence[str]) -> Tensor:
        """float32 [N, …] on the CPU: what the model reads off each text; a long one loses its beginning.

        It may be called from several threads, one of which works at a time: a tokenizer takes no two.
        """
        with self._turn:
            return torch.cat(
                [self._read(self._encode(batch)).float().cpu() for batch in self._batches(texts)]
            )

    @abstractmethod
    def _read(self, inputs: BatchEncoding) -> Tensor:
        """[N, …] of a padded batch."""

    @abstractmethod
    def _check(self, config: PretrainedConfig) -> None:
        """Raise ConfigError where a model of this configuration would be of no use."""

    def _batches(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        return (texts[start : start + self._batch] for start in range(0, len(texts), self._batch))

    def _encode(self, texts: Sequence[str]) -> BatchEncoding:
        inputs: BatchEncoding = self._tokenizer(
            # Padding stands for a text without tokens: the empty one, where no special token is added.
            [text or self._tokenizer.pad_token for text in texts],
            padding=True,
            truncation=True,
            max_length=min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings),
            return_tensors="pt",
        ).to(self._model.device)
        return inputs

    def _load(self, kind: Any, path: str, **options: Any) -> Any:
        try:
            return kind.from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no {self.NOUN} can be loaded from {self.name}: give a folder or hub name of {self.WANTED} "
                f"({str(error).splitlines()[0]})"
            ) from None
