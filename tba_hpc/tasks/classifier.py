"""A Hugging Face classifier: the log-probability of one label for each text, in batches.

It must not know where the texts come from or what the label means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError
from tba_hpc.tasks.text_model import TextModel


class Classifier(TextModel):
    """A sequence classifier of which ``label`` is asked; one that lacks it is refused."""

    LOADER = AutoModelForSequenceClassification
    NOUN = "classifier"
    WANTED = "a sequence classifier"

    def __init__(self, path: str, *, label: str, batch: int, key: str, label_key: str) -> None:
        """label_key: the config key of ``label``, for errors."""
        self._label, self._label_key = label, label_key
        super().__init__(path, batch=batch, key=key)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [N]: log-probability of the label for each text."""
        return self.read(texts).numpy()

    def _check(self, config: PretrainedConfig) -> None:
        labels = sorted(map(str, config.label2id or ()))
        if self._label not in labels:
            raise ConfigError(
                f"{self.name} has no label {self._label!r}: set {self._label_key} to one of "
                f"{', '.join(labels)}"
            )

    def _read(self, inputs: BatchEncoding) -> Tensor:
        config = self._model.config
        several = config.problem_type == "multi_label_classification"  # then each label has its own odds
        logits_NC = self._model(**inputs).logits.float()
        logprob_NC = functional.logsigmoid(logits_NC) if several else logits_NC.log_softmax(1)
        return logprob_NC[:, config.label2id[self._label]]
