"""The reference policy π_ref as a Hugging Face model that scores finished completions.

Shape letters: N distinct completions, T their tokens, A sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba_hpc.config import ModelSection
from tba_hpc.core.model_shapes import PASS_TOKENS
from tba_hpc.core.packing import pack
from tba_hpc.core.types import Completion, Group, Ragged, WeightUpdate
from tba_hpc.learner.adapter import FOLDER, Adaptable, Adapter, tensors_in
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, use_tensor_cores
from tba_hpc.learner.upload import upload

Key = tuple[int, bytes, bytes, bytes]
"""Identity of a completion in a pass: its group's index; bytes of its tokens, ``action_T``, ``begin_T``."""


class HfReference:
    """A Reference (``core.ports``) on a causal language model of transformers. Use it in one thread.

    model: the initial policy. section: settings of log-probabilities, and the dtype and adapter of exported
    policies. folder_of: function from a step to the folder of the policy that was exported then; None: the
    reference never changes.

    The model stays in host memory until log-probabilities are first needed, because an engine that is being
    built counts any GPU memory allocated meanwhile as its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        section: ModelSection,
        folder_of: Callable[[int], Path] | None = None,
    ) -> None:
        self.step = 0
        self._section = section
        self._folder_of = folder_of
        self.model = model.eval().requires_grad_(False)
        self._adaptable = Adaptable(self.model)
        self._logprobs = PolicyLogprobs.of(self.model, section)

    def load(self, step: int) -> None:
        """Load the policy exported at ``step`` into the memory of the present weights.

        With LoRA, only attach the adapter exported at ``step``.
        """
        assert self._folder_of is not None, "a frozen reference is never reset"
        folder = self._folder_of(step)
        if self._section.lora:
            self._adaptable.attach(Adapter.load(folder / FOLDER))
        else:
            self.model.load_state_dict(load_policy(str(folder), self._section.dtype).state_dict())
        self.step = step

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Do the same as ``logprobs_of`` under other weights of the same architecture and dtype.

        A whole policy is swapped with the reference's weights, tensor by tensor, without extra memory, and
        swapped back afterwards, bit for bit. A LoRA adapter is attached to the initial weights instead.
        """
        with self._under(weights):
            return self.logprobs_of(groups)

    @contextmanager
    def _under(self, weights: WeightUpdate) -> Iterator[None]:
        """Give the model these weights within the block."""
        before, lora = self._adaptable.adapter, weights.layout.lora
        if lora is None:
            self._move_to_gpu()
            self._swap(weights)
            try:
                yield
            finally:
                self._swap(weights)
            return
        self._adaptable.attach(Adapter.of(tensors_in(weights.data, weights.layout), lora.scale))
        try:
            yield
        finally:
            self._adaptable.attach(before)

    @torch.no_grad()
    def _swap(self, weights: WeightUpdate) -> None:
        """Exchange the model's weights with those in ``weights.data``."""
        parameters = dict(self.model.named_parameters())
        for name, theirs in tensors_in(weights.data, weights.layout):
            ours = parameters[name]
            before = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(before)

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return log π_ref of each token, float32 [T], by group and completion; 0 if it was not sampled.

        A pass takes as many groups as PASS_TOKENS allows. Equal completions of a group are computed only
        once, because a trained policy repeats itself.
        """
        self._move_to_gpu()
        return [rows for some in _in_passes(groups) for rows in self._in_one_pass(some)]

    def _move_to_gpu(self) -> None:
        """Move the model to the GPU if there is one; later calls do nothing.

        Must not be called in inference mode, because tensors made there cannot be changed later.
        """
        if torch.cuda.is_available() and self.model.device.type == "cpu":
            self.model.cuda()
            use_tensor_cores(self.model.device)

    @torch.inference_mode()
    def _in_one_pass(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Do the same as ``logprobs_of`` for groups that fit into one pass."""
        keys = [
            (number, one.tokens.tobytes(), one.action_T.tobytes(), one.begin_T.tobytes())
            for number, group in enumerate(groups)
            for one in group.completions
        ]
        completions = [completion for group in groups for completion in group.completions]
        distinct = dict(zip(keys, completions, strict=True))
        found = dict(zip(distinct, self._logprobs_of(groups, distinct), strict=True))
        rows = iter([found[key] for key in keys])
        return [[next(rows) for _ in group.completions] for group in groups]

    def _logprobs_of(self, groups: Sequence[Group], distinct: Mapping[Key, Completion]) -> list[np.ndarray]:
        """Return log π_ref of distinct completions, float32 [T] each, by one pass of the model.

        groups: the groups to which the indices in the keys of ``distinct`` refer.
        """
        group_N = np.array([number for number, *_ in distinct])
        prompts = [groups[number].request.prompt.tokens for number in group_N]
        pairs = zip(prompts, distinct.values(), strict=True)
        sequences = Ragged.from_rows([np.concatenate([p, c.tokens]) for p, c in pairs], np.int32)
        prompt_length_N = np.array([len(prompt) for prompt in prompts])
        action_T, begin_T = (
            np.concatenate([getattr(completion, mask) for completion in distinct.values()])
            for mask in ("action_T", "begin_T")
        )
        layout = self._logprobs.layout
        packed = pack(sequences, prompt_length_N, group_N, action_T, layout, begin_T=begin_T)
        logprob_T = np.zeros(len(action_T), np.float32)
        logprob_T[packed.place_A] = self._logprobs(upload(packed, self.model.device)).cpu().numpy()
        return np.split(logprob_T, np.cumsum(sequences.lengths - prompt_length_N)[:-1])

    @contextmanager
    def on_device(self, device: torch.device, step: int) -> Iterator[PolicyLogprobs]:
        """Yield the reference of ``step`` as a module with its tensors on ``device``, for a trainer rank.

        After the block they are in host memory again, page-locked if ``device`` is a GPU.
        """
        if step != self.step:
            self.load(step)
        if device.type == "cuda":
            for tensor in _tensors(self._logprobs):
                if not tensor.is_pinned():
                    tensor.data = tensor.data.pin_memory()
        with replaced_tensors(self._logprobs, lambda tensor: tensor.to(device, non_blocking=True)):
            yield self._logprobs


def _in_passes(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Divide groups, in order, into passes of at most PASS_TOKENS tokens. A larger group has its own pass."""
    some, tokens = list[Group](), 0
    for group in groups:
        more = len(group.request.prompt.tokens) + sum(len(one.tokens) for one in group.completions)
        if some and tokens + more > PASS_TOKENS:
            yield some
            some, tokens = [], 0
        some, tokens = [*some, group], tokens + more
    if some:
        yield some


@contextmanager
def replaced_tensors(model: nn.Module, copy: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, replace a model's parameters and buffers by copies, for example on another device.

    copy: function that copies a tensor.
    """
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


def load_reference(section: ModelSection, folder_of: Callable[[int], Path]) -> HfReference:
    """Load the initial reference of a run; see HfReference."""
    return HfReference(load_policy(section.path, section.dtype), section, folder_of)
