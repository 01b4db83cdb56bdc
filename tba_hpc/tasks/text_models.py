"""Hugging Face models that read whole texts: reward models, classifiers, safety models, embedders."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
)

from tba_hpc.config import ConfigError


class TextModel(ABC):
    """A model in evaluation mode with its tokenizer.

    The model stays on the CPU until its first use, and then moves to the GPU, if there is one. It thus takes
    no GPU memory while an engine is built: the engine measures how much memory is free.

    path: folder or hub name. batch: texts per forward pass. key: config key of ``path``, for errors. The
    constructor raises ConfigError if there is no such model, or if it is not suitable.
    """

    LOADER: ClassVar[Any]
    """Class of transformers that loads the model."""
    NOUN: ClassVar[str]
    """Name of this kind of model, for errors."""
    WANTED: ClassVar[str]
    """Kind of model that ``path`` must hold, for errors."""
    SPECIAL_TOKENS: ClassVar[bool] = True
    """True if the tokenizer must add special tokens. False if texts contain them, as rendered chats do."""

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        self.name = f"{key}={path}"
        """Config key with its value, for errors."""
        self._check(self._load(AutoConfig, path))
        self._tokenizer = self._load(AutoTokenizer, path, truncation_side="left")
        self._model = self._load(self.LOADER, path).eval()
        self._padding = self._own_padding()
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._batch = batch
        self._turn = threading.Lock()

    @torch.inference_mode()
    def read(self, texts: Sequence[str]) -> Tensor:
        """Return the model's output for each text, float32 [N, …], on the CPU.

        A text that is too long for the model is truncated at its beginning. Several threads may call this.
        They wait for each other, because a tokenizer is not thread-safe.
        """
        with self._turn:
            if torch.cuda.is_available():
                self._model.cuda()  # does nothing if it is there already
            batches = [texts[start : start + self._batch] for start in range(0, len(texts), self._batch)]
            return torch.cat([self._read(self._encode(batch)).float().cpu() for batch in batches])

    @abstractmethod
    def _read(self, inputs: BatchEncoding) -> Tensor:
        """Return the output for a padded batch, [N, …]."""

    @abstractmethod
    def _check(self, config: PretrainedConfig) -> None:
        """Raise ConfigError if a model with this configuration is not suitable."""

    def _encode(self, texts: Sequence[str]) -> BatchEncoding:
        inputs: BatchEncoding = self._tokenizer(
            # An empty text without special tokens would have no token at all, so it becomes a padding token.
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
        """Return the padding token with which the model was trained; None if it had none.

        The choice matters because a decoder's score is read at the last token that is not padding. If the
        model's config pads with the EOS token, a text's own EOS counts as padding, too, and the score is read
        before the EOS, as in training. If only the tokenizer pads with the EOS token, training read the score
        at the EOS. The result is then None, so that the EOS does not count as padding.
        """
        own, end = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        if own is not None and own != end:
            return int(own)
        return end if self._model.config.pad_token_id == end else None

    def _pad(self, inputs: BatchEncoding) -> None:
        """Replace the padding by the model's own padding token, or else by a token that occurs in no text.

        Each score is then read at the same token as in training, see ``_own_padding``.
        """
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        padding = self._padding
        if padding is None:
            present = set(tokens.flatten().tolist())
            padding = next(token for token in itertools.count() if token not in present)
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


class RewardModel(TextModel):
    """A sequence classifier with one label, whose logit is the reward."""

    LOADER = AutoModelForSequenceClassification
    NOUN = "reward model"
    WANTED = "a sequence classifier"

    def ended(self, text: str) -> str:
        """Return the text, changed to end with exactly one EOS token when it is encoded.

        If the model has no EOS token, the text stays as it is.
        """
        end = self._tokenizer.eos_token
        while end and text.endswith(end):
            text = text.removesuffix(end)
        return f"{text}{self._ending}"

    @cached_property
    def _ending(self) -> str:
        own = self._tokenizer("").input_ids[-1:] == [self._tokenizer.eos_token_id]
        return "" if own else self._tokenizer.eos_token or ""

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return the reward of each text."""
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


class Classifier(TextModel):
    """A sequence classifier that returns the log-probability of one of its labels."""

    LOADER = AutoModelForSequenceClassification
    NOUN = "classifier"
    WANTED = "a sequence classifier"

    def __init__(self, path: str, *, label: str, batch: int, key: str, label_key: str) -> None:
        """Load the classifier at ``path``.

        label: name of the label whose log-probability it returns. batch: number of texts per pass. key,
        label_key: config keys of ``path`` and ``label``, for errors.
        """
        self._label, self._label_key = label, label_key
        super().__init__(path, batch=batch, key=key)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the log-probability of the label for each text, float32 [N]."""
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
        several = config.problem_type == "multi_label_classification"  # labels are independent
        logits = self._model(**inputs).logits.float()  # [N, labels]
        logprobs = functional.logsigmoid(logits) if several else logits.log_softmax(1)
        return logprobs[:, config.label2id[self._label]]


VERDICTS = ("unsafe", "safe")
"""Verdicts in the first line of a safety model's answer (model card of Llama Guard 3)."""

LEAD = "\n\n"
"""Text before the verdict. Some versions of the model write it; in others the chat template ends with it."""

PROBE = ("a question", "an answer")
"""Texts for finding out what a chat template shows."""


class Guard(TextModel):
    """A safety model that answers in words, such as Llama Guard; returns log p("unsafe").

    Its chat template defines what is unsafe. As in the model card, p is the probability of the verdict's
    first token, whether it comes at once or after LEAD. The probabilities of "unsafe" and "safe" are scaled
    to add up to 1.
    """

    LOADER = AutoModelForCausalLM
    NOUN = "safety model"
    WANTED = "a causal language model such as meta-llama/Llama-Guard-3-8B"
    SPECIAL_TOKENS = False

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        super().__init__(path, batch=batch, key=key)
        self._tokenizer.padding_side = "left"  # so that all texts end at the last position
        self._in_parts = not self._shows_both(in_parts=False)
        if self._in_parts and not self._shows_both(in_parts=True):
            raise ConfigError(
                f"{self.name} has no chat template that shows a question and its answer: give a safety model "
                "such as meta-llama/Llama-Guard-3-8B"
            )
        self._lead = self._tokens(LEAD)
        self._verdicts = [self._tokens(verdict)[0] for verdict in VERDICTS]
        if len({*self._verdicts, self._lead[0]}) < 3:
            raise ConfigError(
                f"{self.name} begins 'safe' and 'unsafe' with the same token, so that its first token says "
                "nothing: give a safety model such as meta-llama/Llama-Guard-3-8B"
            )

    def __call__(self, questions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Return log p("unsafe") of each answer to its question, float32 [N], at most 0."""
        turns = zip(questions, answers, strict=True)
        return self.read([self._template(*turn, in_parts=self._in_parts) for turn in turns]).numpy()

    def _check(self, config: PretrainedConfig) -> None:
        if config.is_encoder_decoder:
            raise ConfigError(
                f"{self.name} is no causal language model (it is of type {config.model_type}): give a safety "
                "model such as meta-llama/Llama-Guard-3-8B"
            )

    def _shows_both(self, *, in_parts: bool) -> bool:
        """Return whether the chat template shows both question and answer, as not every template does.

        in_parts: contents are given as a list with a text part, instead of as a string.
        """
        if self._tokenizer.chat_template is None:
            return False
        text = self._template(*PROBE, in_parts=in_parts)
        return all(words in text for words in PROBE)

    def _template(self, question: str, answer: str, *, in_parts: bool) -> str:
        """Return the text of the conversation, which the model continues with its verdict.

        in_parts: see ``_shows_both``.
        """
        roles = {"user": question, "assistant": answer}
        chat = [
            {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
            for role, text in roles.items()
        ]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _read(self, inputs: BatchEncoding) -> Tensor:
        lead = torch.tensor(self._lead, device=inputs["input_ids"].device)
        leads = lead.expand(len(inputs["input_ids"]), -1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(leads)], 1)
        logits = self._model(
            input_ids=torch.cat([inputs["input_ids"], leads], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=len(lead) + 1,
        ).logits
        logprob_NLV = logits.float().log_softmax(2)
        at_once = logprob_NLV[:, 0, self._verdicts]
        led_by = logprob_NLV[:, :-1].gather(2, leads[:, :, None]).sum(1)  # log p(LEAD), [N, 1]
        verdict = torch.logaddexp(at_once, led_by + logprob_NLV[:, -1, self._verdicts])
        return verdict.log_softmax(1)[:, 0]


class Embedder(TextModel):
    """An encoder that embeds a text as the mean of its last hidden states, scaled to norm 1.

    sentence-transformers does the same for models with mean pooling, such as all-MiniLM-L6-v2.
    """

    LOADER = AutoModel
    NOUN = "embedder"
    WANTED = "a text encoder"

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return embeddings of norm 1, float32 [N, D]. Raises ConfigError if the model returns none."""
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
        # The sum has the same direction as the mean.
        return functional.normalize((hidden_NLD.float() * mask_NL1).sum(1), dim=1)


def diversity(embedding_ND: np.ndarray) -> float:
    """Return 1 − the mean cosine similarity over all pairs of rows of ``embedding_ND``, which have norm 1.

    It is 0 if all rows are equal, and NaN for fewer than two rows. TBA and arXiv 2405.18540 use this measure.
    """
    rows = embedding_ND.astype(np.float64)
    pairs = len(rows) * (len(rows) - 1)
    cosines = np.square(rows.sum(0)).sum() - np.square(rows).sum()  # of all pairs, in linear time
    return float(1 - cosines / pairs) if pairs else float("nan")
