"""π_ref on a trainer rank: a model beside the policy, whose weights stay in host memory.

It must not know about batches or other ranks; see DeepSpeedLearner.reference_logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tba_hpc.config import Config
from tba_hpc.learner.hf_model import PolicyLogprobs
from tba_hpc.learner.hf_reference import load_reference


class TrainerReference:
    """The reference, computed as the learner computes the policy.

    ``folder_of``: where the policy of a step was exported. ``device``: where it computes.
    """

    def __init__(self, config: Config, folder_of: Callable[[int], Path], device: torch.device) -> None:
        self._reference = load_reference(config, folder_of)
        self._device = device
        self._logprobs = PolicyLogprobs(
            self._reference.model,
            temperature=config.model.policy_temperature,
            fp32_head=config.model.fp32_head,
        )
        if device.type == "cuda":
            for tensor in _tensors(self._logprobs):
                tensor.data = tensor.data.pin_memory()

    @contextmanager
    def at(self, step: int) -> Iterator[nn.Module]:
        """A PolicyLogprobs of the policy of ``step``, on the device for that time."""
        if step != self._reference.step:
            self._reference.load(step)
        with visiting(self._logprobs, lambda tensor: tensor.to(self._device, non_blocking=True)):
            yield self._logprobs


@contextmanager
def visiting(model: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Have copies of a model's tensors in the place of those that stay where they are."""
    tensors = _tensors(model)
    home = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = copy(tensor.data)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, home, strict=True):
            tensor.data = data


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
