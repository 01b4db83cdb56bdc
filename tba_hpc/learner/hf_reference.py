"""The reference policy π_ref: log-probabilities of finished completions, by a Hugging Face model.

Shape letters: K distinct completions of a group, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba_hpc.config import Config, ModelSection
from tba_hpc.core.types import Completion, Group, WeightUpdate
from tba_hpc.learner.adapter import FOLDER, Adaptable, Adapter, tensors_in
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, use_tensor_cores


class HfReference:
    """A Reference port on a causal language model of transformers, for any one thread.

    section: says how log-probabilities are computed. policy_of: loads the policy of a step, for a reference
    that is reset; adapter_of: its adapter alone, if the policy is ``model`` with one.

    The model stays in host memory until log-probabilities are first asked for: an engine that is being built
    counts all that disappears from its GPU as its own.
    """

    has_model = True

    def __init__(
        self,
        model: PreTrainedModel,
        section: ModelSection,
        *,
        policy_of: Callable[[int], PreTrainedModel] | None = None,
        adapter_of: Callable[[int], Adapter] | None = None,
    ) -> None:
        self.step = 0
        self._policy_of = policy_of
        self._adapter_of = adapter_of
        self.model = model.eval().requires_grad_(False)
        self._adaptable = Adaptable(self.model)
        self._logprobs = PolicyLogprobs.of(self.model, section)

    def load(self, step: int) -> None:
        """Become the policy of ``step``: its weights are copied into the old ones' memory."""
        if self._adapter_of is not None:
            self._adaptable.put_on(self._adapter_of(step))
        else:
            assert self._policy_of is not None, "a frozen reference is never reset"
            self.model.load_state_dict(self._policy_of(step).state_dict())
        self.step = step

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """As ``logprobs``, of every group, under other weights of the same architecture and dtype.

        They are swapped with the reference's own, tensor by tensor, without more memory; an adapter is put
        beside the weights that it was made for. Afterwards the reference is bit by bit what it was.
        """
        with self._under(weights):
            return [self.logprobs(group) for group in groups]

    @contextmanager
    def _under(self, weights: WeightUpdate) -> Iterator[None]:
        before, lora = self._adaptable.adapter, weights.layout.lora
        if lora is None:
            self._settle()
            self._swap(weights)
            try:
                yield
            finally:
                self._swap(weights)
            return
        self._adaptable.put_on(Adapter.of(tensors_in(weights.data, weights.layout), lora.scale))
        try:
            yield
        finally:
            self._adaptable.put_on(before)

    @torch.no_grad()
    def _swap(self, weights: WeightUpdate) -> None:
        parameters = dict(self.model.named_parameters())
        for name, theirs in tensors_in(weights.data, weights.layout):
            ours = parameters[name]
            before = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(before)

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: log π_ref of each sampled token given all before it; 0 at others.

        Equal completions are computed once: a trained policy repeats itself.
        """
        self._settle()
        keys = [(c.tokens.tobytes(), c.action_T.tobytes()) for c in group.completions]
        distinct = dict(zip(keys, group.completions, strict=True))
        rows = self._distinct_logprobs(group.request.prompt.tokens, list(distinct.values()))
        found = dict(zip(distinct, rows, strict=True))
        return [found[key] for key in keys]

    def _settle(self) -> None:
        """Move to the GPU, once; not in inference mode, whose tensors cannot be changed outside it."""
        if torch.cuda.is_available() and self.model.device.type == "cpu":
            self.model.cuda()
            use_tensor_cores(self.model.device)

    @torch.inference_mode()
    def _distinct_logprobs(self, prompt: np.ndarray, completions: Sequence[Completion]) -> list[np.ndarray]:
        sequences = [np.concatenate([prompt, c.tokens], dtype=np.int64) for c in completions]
        sampled = [np.concatenate([np.zeros(len(prompt), bool), c.action_T]) for c in completions]
        tokens_KL, action_KL = (
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
            for rows in (sequences, sampled)
        )
        length_K = torch.tensor([len(sequence) for sequence in sequences])
        prompt_K = torch.full_like(length_K, len(prompt))
        rows = (tokens_KL, prompt_K, length_K, torch.zeros_like(length_K), action_KL)
        logprob_KL = self._logprobs(*(row.to(self.model.device) for row in rows)).cpu().numpy()
        return [
            logprob_L[len(prompt) : length]
            for logprob_L, length in zip(logprob_KL, length_K.tolist(), strict=True)
        ]

    @contextmanager
    def visiting(self, device: torch.device, step: int) -> Iterator[PolicyLogprobs]:
        """The policy of ``step`` on a device for that time, on a trainer rank; its home is host memory."""
        if step != self.step:
            self.load(step)
        if device.type == "cuda":
            for tensor in _tensors(self._logprobs):
                if not tensor.is_pinned():
                    tensor.data = tensor.data.pin_memory()
        with visiting(self._logprobs, lambda tensor: tensor.to(device, non_blocking=True)):
            yield self._logprobs


@contextmanager
def visiting(model: nn.Module, copy: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put copies of a model's tensors in the place of those that stay where they are."""
    tensors = _tensors(model)
    home = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = copy(tensor.data)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, home, strict=True):
            tensor.data = data


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def load_reference(config: Config, folder_of: Callable[[int], Path]) -> HfReference:
    """The reference that a run begins with. ``folder_of``: where the policy of a step is exported to."""

    def adapter_of(step: int) -> Adapter:
        return Adapter.load(folder_of(step) / FOLDER)

    return HfReference(
        load_policy(config.model.path, config.model.dtype),
        config.model,
        policy_of=lambda step: load_policy(str(folder_of(step)), config.model.dtype),
        adapter_of=adapter_of if config.model.lora else None,
    )
