"""π_ref on the trainer ranks as a moving average of the policy: each rank keeps a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tba_hpc.config import Config
from tba_hpc.config.variants import EmaReference
from tba_hpc.core.types import WeightLayout, WeightSlot
from tba_hpc.learner.hf_model import TORCH_DTYPE, PolicyLogprobs, load_policy
from tba_hpc.learner.hf_reference import visiting
from tba_hpc.learner.trainer_group import TrainerGroup
from tba_hpc.run.checkpoints import StateError

FILES = "average-*.pt"
"""What a checkpoint has of it: a file of each rank."""


class AveragedReference:
    """decay·average + (1 − decay)·policy after every step, the initial policy before the first.

    It is float32, since bfloat16 would lose the small steps, and in host memory: on each rank the tensors of
    its part of ``layout``. A model is made of them for each use.
    """

    def __init__(self, config: Config, group: TrainerGroup, layout: WeightLayout) -> None:
        assert isinstance(config.train.reference, EmaReference)
        self._decay = config.train.reference.decay
        self._dtype = TORCH_DTYPE[config.model.dtype]
        self._group = group
        self._parts = layout.parts(group.ranks)
        model = load_policy(config.model.path, config.model.dtype).eval().requires_grad_(False)
        self._logprobs = PolicyLogprobs.of(model, config.model)
        self._parameters = dict(model.named_parameters())
        self._average = {slot.name: self._initial(slot.name) for slot in self.slots}
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, dtype=self._dtype)

    def _initial(self, name: str) -> Tensor:
        weight = self._parameters[name].data.float()
        return weight.pin_memory() if self._group.device.type == "cuda" else weight

    @property
    def slots(self) -> tuple[WeightSlot, ...]:
        """What this rank keeps."""
        return self._parts[self._group.rank]

    def move(self, policy: Iterable[tuple[WeightSlot, Tensor]]) -> None:
        """Follow the policy by a step, on its device; ``policy``: its tensors of ``slots``."""
        for slot, weight in policy:
            kept = self._average[slot.name]
            kept.copy_(kept.to(weight.device).lerp_(weight.float(), 1 - self._decay))

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """A PolicyLogprobs of all of it, on the device for that time; all ranks call it together."""
        with visiting(self._logprobs, lambda tensor: tensor.to(self._group.device)):
            for owner, part in enumerate(self._parts):
                for slot in part:
                    self._parameters[slot.name].data = self._from(owner, slot)
            yield self._logprobs

    def _from(self, owner: int, slot: WeightSlot) -> Tensor:
        """A tensor that ``owner`` keeps, in the policy's dtype."""
        device = self._group.device
        if owner == self._group.rank:
            weight = self._average[slot.name].to(device).to(self._dtype)
        else:
            weight = torch.empty(slot.shape, dtype=self._dtype, device=device)
        self._group.spread(weight, owner)
        return weight

    def save(self, folder: Path, write: Callable[[dict[str, Tensor], str], None]) -> None:
        """Have ``write`` put this rank's part into a file of ``folder``."""
        write(self._average, str(folder / FILES.replace("*", f"{self._group.rank:04d}")))

    @staticmethod
    def require(folder: Path) -> None:
        """Raise StateError if a checkpoint has no average."""
        if not any(folder.glob(FILES)):
            raise StateError(
                f"{folder} lacks the average of the policy that train.reference=ema goes on from: resume "
                "from another checkpoint, or start another run (run.name)"
            )

    def load(self, folder: Path) -> None:
        """Restore what was saved, by however many ranks."""
        for file in folder.glob(FILES):
            for name, weight in torch.load(file, weights_only=True, mmap=True).items():
                if name in self._average:
                    self._average[name].copy_(weight)
