"""Completions sampled from a small Llama on one core: a prompt is read once, and what has ended is dropped.

Equal to transformers' but for rounding. It must not know what becomes of the completions.

Shape letters: B prompts of P tokens, N completions of theirs, Q tokens of each that are computed, D hidden
size, H heads, d their size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from tba_hpc.core.types import Completion

Weights = Mapping[str, Tensor]
"""By their Hugging Face names."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values of the tokens that are computed) → what they find, all [N, H, Q, d]."""

ROWS = 512
"""Completions that are sampled together: a core's cache holds what they look at again and again."""
KEPT = 0.75
"""Share of them below which those that have not ended are copied together."""

attention = functional.scaled_dot_product_attention


class SmallLlama:
    """The architecture, for up to ``context`` tokens; weights come with each call."""

    def __init__(self, config: PreTrainedConfig, context: int) -> None:
        assert config.num_key_value_heads == config.num_attention_heads, "make_tiny_model.py makes no other"
        self.layers = config.num_hidden_layers
        self._eps, self._head = config.rms_norm_eps, int(config.head_dim)
        frequency = config.rope_parameters["rope_theta"] ** -(torch.arange(0, self._head, 2) / self._head)
        angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
        self._cos, self._sin = angle.cos(), angle.sin()

    def hidden(self, weights: Weights, token_NQ: Tensor, position_NQ: Tensor, attend: Attend) -> Tensor:
        """[N, Q, D], from which the next tokens are predicted."""
        x = functional.embedding(token_NQ, weights["model.embed_tokens.weight"])
        rotation = self._cos[position_NQ][:, None], self._sin[position_NQ][:, None]
        for layer in range(self.layers):
            x = self._layer(layer, weights, x, rotation, attend)
        return self._norm(x, weights["model.norm.weight"])

    def _layer(
        self, layer: int, weights: Weights, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        def of(name: str) -> Tensor:
            return weights[f"model.layers.{layer}.{name}.weight"]

        y = self._norm(x, of("input_layernorm"))
        query, key, value = (self._heads(functional.linear(y, of(f"self_attn.{n}_proj"))) for n in "qkv")
        found = attend(layer, _rotated(query, *rotation), _rotated(key, *rotation), value)
        x = x + functional.linear(found.transpose(1, 2).flatten(2), of("self_attn.o_proj"))
        y = self._norm(x, of("post_attention_layernorm"))
        gate, up = (functional.linear(y, of(f"mlp.{name}_proj")) for name in ("gate", "up"))
        return x + functional.linear(functional.silu(gate) * up, of("mlp.down_proj"))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self._head)).transpose(1, 2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)


def _rotated(x_NHQd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_NHQd.chunk(2, 3)
    return x_NHQd * cos + torch.cat([-right, left], 3) * sin


class Cache:
    """Keys and values of N sequences: of their prompts, [N, H, P, d], and of up to ``room`` tokens beyond."""

    def __init__(self, length_B: Tensor, width: int, room: int) -> None:
        self.length_N = length_B
        self.tokens = 0
        self._width = width
        self._room = room
        self._layers: list[list[Tensor]] = []

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Every token looks at those before; what lies right of a prompt is seen by nothing in it."""
        self._layers.append([functional.pad(x, (0, 0, 0, self._room)) for x in (key, value)])
        return attention(query, key, value, is_causal=True)

    def next(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One more token per sequence looks at all before it."""
        end = self._width + self.tokens
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            kept[:, :, end - 1] = new[:, :, 0]
        place = torch.arange(end)
        visible = (place < self.length_N[:, None]) | (place >= self._width)
        keys, values = (kept[:, :, :end] for kept in self._layers[layer])
        return attention(query, keys, values, attn_mask=visible[:, None, None])

    def take(self, rows: Tensor) -> None:
        """Only these sequences, some perhaps more than once, are of interest from now on."""
        self.length_N = self.length_N[rows]
        self._layers = [[kept[rows] for kept in layer] for layer in self._layers]


class Sampler:
    """Draws completions; ``seed`` decides which."""

    def __init__(self, llama: SmallLlama, *, eos: int, max_tokens: int, seed: int) -> None:
        self._llama = llama
        self._eos = eos
        self._max_tokens = max_tokens
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sample(
        self, weights: Weights, prompts: Sequence[np.ndarray], n: int, *, greedy: bool = False
    ) -> list[tuple[Completion, ...]]:
        """``n`` completions of every prompt, at temperature 1 unless they are to be the likeliest."""
        at_once = max(1, ROWS // n)
        parts = (prompts[i : i + at_once] for i in range(0, len(prompts), at_once))
        return [group for part in parts for group in self._sample(weights, part, n, greedy)]

    def _sample(
        self, weights: Weights, prompts: Sequence[np.ndarray], n: int, greedy: bool
    ) -> list[tuple[Completion, ...]]:
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        token_BP = pad_sequence([torch.from_numpy(prompt) for prompt in prompts], batch_first=True).long()
        cache = Cache(length_B, token_BP.shape[1], self._max_tokens)
        position_BP = torch.arange(token_BP.shape[1]).expand_as(token_BP)
        hidden_BPD = self._llama.hidden(weights, token_BP, position_BP, cache.prompt)
        row_N = torch.arange(len(prompts)).repeat_interleave(n)
        cache.take(row_N)
        found = self._decode(weights, hidden_BPD[row_N, length_B[row_N] - 1], cache, greedy)
        return [tuple(found[i : i + n]) for i in range(0, len(found), n)]

    def _decode(self, weights: Weights, hidden_ND: Tensor, cache: Cache, greedy: bool) -> list[Completion]:
        """One completion of each hidden state, token by token."""
        row_N = torch.arange(len(hidden_ND))  # which completion each sequence of the cache is
        token_NL = torch.full((len(row_N), self._max_tokens), self._eos)
        logprob_NL = torch.zeros(token_NL.shape)
        open_N = torch.ones(len(row_N), dtype=torch.bool)
        while True:
            logprob_NV = functional.linear(hidden_ND, weights["lm_head.weight"]).log_softmax(1)
            token_N = logprob_NV.argmax(1) if greedy else self._draw(logprob_NV)
            token_NL[row_N[open_N], cache.tokens] = token_N[open_N]
            logprob_NL[row_N, cache.tokens] = logprob_NV.gather(1, token_N[:, None])[:, 0]
            open_N &= token_N != self._eos
            cache.tokens += 1
            if cache.tokens == self._max_tokens or not open_N.any():
                return _completions(token_NL.numpy(), logprob_NL.numpy(), self._eos)
            if open_N.float().mean() < KEPT:
                cache.take(left := open_N.nonzero()[:, 0])
                row_N, token_N, open_N = row_N[left], token_N[left], open_N[left]
            position_N1 = cache.length_N[:, None] + cache.tokens - 1
            hidden_ND = self._llama.hidden(weights, token_N[:, None], position_N1, cache.next)[:, 0]

    def _draw(self, logprob_NV: Tensor) -> Tensor:
        """int64 [N]: where the sum of the probabilities passes a random share of it, in (0, 1]."""
        sum_NV = logprob_NV.exp().cumsum(1)
        share_N1 = 1 - torch.rand(len(sum_NV), 1, generator=self._random)
        return (sum_NV < share_N1 * sum_NV[:, -1:]).sum(1)


def _completions(token_NL: np.ndarray, logprob_NL: np.ndarray, eos: int) -> list[Completion]:
    """Each up to its first EOS, which is one of its tokens."""
    ends_NL = token_NL == eos
    length_N = np.where(ends_NL.any(1), ends_NL.argmax(1) + 1, token_NL.shape[1]).tolist()
    return [
        Completion(token_L[:length].astype(np.int32), logprob_L[:length], "stop" if ends else "length")
        for token_L, logprob_L, length, ends in zip(
            token_NL, logprob_NL, length_N, ends_NL.any(1).tolist(), strict=True
        )
    ]
