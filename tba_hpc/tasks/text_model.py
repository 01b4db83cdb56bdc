"""A Hugging Face model that reads whole texts, in batches: a reward model, a classifier, an embedder.

It must not know where the texts come from or what is read off them.
"""

from __future__ import annotations

import itertools
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
    SPECIAL_TOKENS: ClassVar[bool] = True
    """Whether its tokenizer adds them: texts of a chat template have them already."""

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        self.name = f"{key}={path}"
        """Key and value of the config, for errors."""
        self._check(self._load(AutoConfig, path))
        self._tokenizer = self._load(AutoTokenizer, path, truncation_side="left")
        self._model = self._load(self.LOADER, path).eval()
        self._padding = self._own_padding()
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
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
            add_special_tokens=self.SPECIAL_TOKENS,
            max_length=min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings),
            return_tensors="pt",
        ).to(self._model.device)
        self._pad(inputs)
        return inputs

    def _own_padding(self) -> int | None:
        """The token that stands for padding in this model; None where it has none.

        A decoder's score is read at its last token that is another one. A model whose own configuration pads
        with the end of a sequence has been trained to be read before that end, and is.
        """
        own, end = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        if own is not None and own != end:
            return int(own)
        return end if self._model.config.pad_token_id == end else None

    def _pad(self, inputs: BatchEncoding) -> None:
        """Write the model's own padding, or a token that none of the texts has, so that ends are read."""
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        padding = _absent(tokens) if self._padding is None else self._padding
        self._model.config.pad_token_id = padding
        tokens.masked_fill_(mask == 0, padding)

    def _load(self, kind: Any, path: str, **options: Any) -> Any:
        try:
            return kind.from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no {self.NOUN} can be loaded from {self.name}: give a folder or hub name of {self.WANTED} "
                f"({str(error).splitlines()[0]})"
            ) from None


def _absent(tokens: Tensor) -> int:
    """The first token that does not occur."""
    present = set(tokens.flatten().tolist())
    return next(token for token in itertools.count() if token not in present)
