"""Weights and LoRA adapters as they are sent: what an adapter adds, to which weights, and of which base.

See arXiv 2106.09685, §4.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tba_hpc.core.types import WeightLayout, WeightSlot

DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by safetensors' names."""

FOLDER = "adapter"
"""Subfolder of an exported policy with the adapter alone, as peft.PeftModel.from_pretrained takes it."""

PREFIX = "base_model.model."
"""Prefix that peft puts before a layer's name in its files."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of a layer's two tensors."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter that adds s·B·A to the weights W [out, in] of some linear layers.

    layers: A [r, in] and B [out, r] by a layer's name. scale: s.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], scale: float) -> Adapter:
        """Make an adapter of tensors under the names with which they are sent."""
        named = dict(tensors)
        return cls({name: (named[name + A], named[name + B]) for name in _layers(named)}, scale)

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """Load an adapter from peft's files."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        return cls.of(
            ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors.items()),
            config["lora_alpha"] / config["r"],
        )

    def changes(self, name: str) -> bool:
        """Tell whether ``name`` is the weight of one of the adapter's layers."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return W + s·B·A of a weight it changes, computed in float32 and rounded to the weight's dtype."""
        down, up = (part.to(weight.device).float() for part in self.layers[name.removesuffix(".weight")])
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def layers_of(layout: WeightLayout) -> list[str]:
    """Return the names of the layers that an adapter of this layout changes."""
    return _layers(slot.name for slot in layout.slots)


def _layers(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(A) for name in names if name.endswith(A)]


def tensor_in(buffer: np.ndarray, slot: WeightSlot) -> Tensor:
    """Return the tensor whose memory is ``slot`` of a flat uint8 buffer."""
    return torch.from_numpy(buffer[slot.start : slot.end]).view(DTYPE[slot.dtype]).view(slot.shape)


def tensors_in(buffer: np.ndarray, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a layout, with their names; nothing is copied."""
    return ((slot.name, tensor_in(buffer, slot)) for slot in layout.slots)


class Adaptable:
    """A model that takes one adapter at a time: y = W·x + s·B·(A·x), computed as by peft; W is unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.adapter: Adapter | None = None

    def put_on(self, adapter: Adapter | None) -> None:
        """Replace the adapter by another one, or by none."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.adapter = [], adapter
        if adapter is None:
            return
        for name, pair in adapter.layers.items():
            added = _Added(*pair, adapter.scale)
            self._hooks.append(self._model.get_submodule(name).register_forward_hook(added))


class _Added:
    """A forward hook on a linear layer; its tensors move to the layer's device at the first use."""

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        self._down, self._up, self._scale = down, up, scale

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._down, self._up = self._down.to(output.device), self._up.to(output.device)
        return output + inputs[0] @ self._down.T @ self._up.T * self._scale


def identity(weights: Mapping[str, Tensor]) -> str:
    """Compute a digest of weights: names, dtypes, shapes, and the sum of each one's bits, read as integers.

    They are sums because a good hash of 140 GB takes minutes. They tell models apart but withstand no attack.
    """
    digest = sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        bits = weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {total}\n".encode())
    return digest.hexdigest()
