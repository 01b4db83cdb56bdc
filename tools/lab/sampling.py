"""Samples completions with transformers' ``generate``, in the form that tasks and objectives take.

Shape letters: B prompts of up to P tokens, N completions of up to L tokens, V vocabulary, C likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba_hpc.core.types import TOP_LOGPROBS, Completion

ROWS = 512
"""Number of completions that are sampled together."""


def completion_of(
    tokens: list[int], eos: int, logprobs: np.ndarray | None = None, top: np.ndarray | None = None
) -> Completion:
    """Return a completion, which ends after the first ``eos`` or is cut off; without ``logprobs`` they are 0.

    top: the likeliest tokens at each position, TOP_LOGPROBS [T, C].
    """
    ended = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    array = np.array(ended, np.int32)
    logprobs = np.zeros(len(array), np.float32) if logprobs is None else logprobs[: len(array)]
    top = None if top is None else top[: len(array)]
    return Completion(array, logprobs, "stop" if eos in tokens else "length", top_logprobs=top)


class Sampler:
    """Samples completions, the same for the same seed.

    model: any model of the right shape; every call loads weights into it. top: number of likeliest tokens
    that are recorded at each position.
    """

    def __init__(self, model: PreTrainedModel, *, eos: int, max_tokens: int, seed: int, top: int = 0) -> None:
        self._model = model
        self._top = top
        self._eos = eos
        self._max_tokens = max_tokens
        self._seed = 1_000_003 * seed

    @torch.no_grad()
    def sample(
        self, weights: Mapping[str, Tensor], prompts: Sequence[np.ndarray], n: int, *, greedy: bool = False
    ) -> list[tuple[Completion, ...]]:
        """Return ``n`` completions of each prompt, sampled at temperature 1, or by greedy decoding."""
        self._model.load_state_dict(weights)
        torch.manual_seed(self._seed)
        self._seed += 1
        at_once = max(1, ROWS // n)
        parts = (prompts[i : i + at_once] for i in range(0, len(prompts), at_once))
        return [group for part in parts for group in self._sample(part, n, greedy)]

    def _sample(self, prompts: Sequence[np.ndarray], n: int, greedy: bool) -> list[tuple[Completion, ...]]:
        width = max(map(len, prompts))
        token_BP = torch.full((len(prompts), width), self._eos)
        visible_BP = torch.zeros_like(token_BP)
        for row, prompt in enumerate(prompts):
            token_BP[row, width - len(prompt) :] = torch.from_numpy(prompt)
            visible_BP[row, width - len(prompt) :] = 1
        found = self._model.generate(  # type: ignore[operator]  # of a mixin that this type does not know
            input_ids=token_BP,
            attention_mask=visible_BP,
            **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
            num_return_sequences=n,
            max_new_tokens=self._max_tokens,
            eos_token_id=self._eos,
            pad_token_id=self._eos,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_NL = found.sequences[:, width:]
        logprob_NLV = torch.stack(found.logits, 1).log_softmax(2)
        logprob_NL = logprob_NLV.gather(2, token_NL[:, :, None])[:, :, 0].numpy()
        best = logprob_NLV.topk(0 if greedy else self._top)
        top_NLC = np.empty(best.values.shape, TOP_LOGPROBS)
        top_NLC["token"], top_NLC["logprob"] = best.indices.numpy(), best.values.numpy()
        rows = zip(token_NL.tolist(), logprob_NL, top_NLC, strict=True)
        completions = [completion_of(tokens, self._eos, logprobs, top) for tokens, logprobs, top in rows]
        return [tuple(completions[i : i + n]) for i in range(0, len(completions), n)]
