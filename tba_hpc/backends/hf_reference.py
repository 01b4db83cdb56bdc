"""The frozen reference policy π_ref: log-probabilities of finished completions, by a Hugging Face model.

It must not know which engine sampled them, and it never holds the logits of a whole group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from tba_hpc.types import Completion, Group


class HfReference:
    """A Reference port on a causal language model of transformers.

    ``chunk_tokens`` bounds the tokens whose logits [tokens × vocabulary] are held at once. It may be called
    from any thread, also while the engine runs in another.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._chunk_tokens = chunk_tokens

    @torch.inference_mode()
    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: log π_ref of each token given all before it, at temperature 1."""
        tokens_KT, lengths_K = _pad(group.completions)
        hidden_KTD = self._hidden(group.request.prompt.tokens, tokens_KT.to(self._model.device))
        real_KT = torch.arange(tokens_KT.shape[1]) < lengths_K[:, None]
        real_KT, tokens_KT = real_KT.to(self._model.device), tokens_KT.to(self._model.device)
        logprobs = self._token_logprobs(hidden_KTD[real_KT], tokens_KT[real_KT])
        return np.split(logprobs.cpu().numpy(), np.cumsum(lengths_K.numpy())[:-1])

    def _hidden(self, prompt: np.ndarray, tokens_KT: torch.Tensor) -> torch.Tensor:
        """Last hidden states [K, T, D] from which each completion token is predicted.

        The prompt is computed once and its attention cache shared by the K completions. Padding stands on the
        right, where causal attention never looks, so it needs no mask.
        """
        decoder, group_size = self._model.get_decoder(), len(tokens_KT)
        prompt_1P = torch.as_tensor(prompt, dtype=torch.int64, device=self._model.device)[None]
        start = decoder(input_ids=prompt_1P, use_cache=True)
        first = start.last_hidden_state[:, -1:].expand(group_size, -1, -1)
        if tokens_KT.shape[1] == 1:
            return first
        start.past_key_values.batch_repeat_interleave(group_size)
        rest = decoder(input_ids=tokens_KT[:, :-1], past_key_values=start.past_key_values, use_cache=True)
        return torch.cat([first, rest.last_hidden_state], dim=1)

    def _token_logprobs(self, hidden_TD: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """float32 [T]: log-softmax of the output layer at the given tokens, a chunk of tokens at a time."""
        chunks = zip(hidden_TD.split(self._chunk_tokens), tokens_T.split(self._chunk_tokens), strict=True)
        return torch.cat([self._chunk_logprobs(hidden, tokens) for hidden, tokens in chunks])

    def _chunk_logprobs(self, hidden_TD: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        logits_TV = self._model.get_output_embeddings()(hidden_TD).float()
        return logits_TV.gather(1, tokens_T[:, None])[:, 0] - logits_TV.logsumexp(1)


def _pad(completions: Sequence[Completion]) -> tuple[torch.Tensor, torch.Tensor]:
    """Completions as int64 [K, T], padded on the right, and their lengths int64 [K]."""
    rows = [torch.from_numpy(completion.tokens.astype(np.int64)) for completion in completions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
