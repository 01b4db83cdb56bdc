"""Answers single questions for ``tba ask`` with transformers, which starts in seconds, unlike vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import transformers
from transformers import GenerationConfig

from tba_hpc.config import Dtype
from tba_hpc.core.types import Completion, Group, Request, Sampling, WeightUpdate
from tba_hpc.learner.hf_model import HfTokenizer, load_policy, load_tokenizer, stored_dtype


class HfAnswers:
    """A model that answers questions, on the GPU if there is one.

    path: folder or hub name. dtype: dtype of the weights in memory; None: that of the files. Raises
    ConfigError if there is no such model.
    """

    def __init__(self, path: str, dtype: Dtype | None = None) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.tokenizer: HfTokenizer = load_tokenizer(path)
        self.dtype: Dtype = dtype or stored_dtype(path)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_policy(path, self.dtype).eval().to(self.device)
        own = self._model.generation_config.eos_token_id
        self._ends = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        self._model.generation_config = GenerationConfig()  # else generate() adds its sampling parameters

    def answer(
        self, tokens: np.ndarray, sampling: Sampling, *, samples: int = 1, stop: Sequence[str] = (), seed: int
    ) -> list[Completion]:
        """Sample answers to a prompt.

        tokens: the prompt, int32 [T]. samples: number of answers. stop: strings that end an answer. seed:
        seed of torch's random numbers. Log-probabilities are not computed; in the answers they are NaN.
        """
        torch.manual_seed(seed)
        prompt = torch.tensor(tokens, dtype=torch.long, device=self.device)[None]
        with torch.inference_mode():
            rows = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._settings(sampling, samples, stop),
                tokenizer=self.tokenizer.wrapped if stop else None,
            )
        return [self._completion(row[len(tokens) :].cpu().numpy(), sampling) for row in rows]

    def _settings(self, sampling: Sampling, samples: int, stop: Sequence[str]) -> GenerationConfig:
        """Make transformers' settings for ``samples`` answers."""
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            **(drawn if sampling.temperature > 0 else {}),
            max_new_tokens=sampling.max_tokens,
            num_return_sequences=samples,
            stop_strings=list(stop) or None,
            eos_token_id=sorted(self._ends),
            pad_token_id=self.tokenizer.eos_token_id,
        )

    def _completion(self, row: np.ndarray, sampling: Sampling) -> Completion:
        """Make a completion of a generated row, int [L], without the padding at its end."""
        ends = np.flatnonzero(np.isin(row, list(self._ends)))
        tokens = row[: ends[0] + 1 if len(ends) else len(row)].astype(np.int32)
        ended = len(ends) > 0 or len(tokens) < sampling.max_tokens
        return Completion(tokens, np.full(len(tokens), np.nan, np.float32), "stop" if ended else "length")


class HfTurns:
    """A Generator for conversations of ``tba ask``: it samples the requested turns one after another.

    Log-probabilities are not computed. They are 0, and not NaN, because NaN marks tokens of an environment.
    stop: strings that end a turn. seed: seed of the sampling, increased by 1 for each turn.
    """

    version = 0
    load_seconds = busy_seconds = 0.0
    rebuilds = 0
    loading = False

    def __init__(self, model: HfAnswers, stop: Sequence[str], seed: int) -> None:
        self._model, self._stop, self._seed = model, stop, seed
        self._waiting: list[Request] = []

    @property
    def in_flight(self) -> int:
        """Number of turns that are still to be sampled."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request for one turn."""
        self._waiting.append(request)

    def step(self) -> list[Group]:
        """Sample the turn of the oldest request; return its group, or nothing if no request waits."""
        if not self._waiting:
            return []
        request = self._waiting.pop(0)
        self._seed += 1
        stop = [*self._stop, *request.sampling.stop]
        found = self._model.answer(request.prompt.tokens, request.sampling, stop=stop, seed=self._seed)
        turns = tuple(replace(one, logprobs=np.zeros(len(one.tokens), np.float32)) for one in found)
        return [Group(request, turns, np.zeros((1, 2), np.int32))]

    def load(self, update: WeightUpdate) -> None:
        """Do nothing, because the weights never change."""

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
