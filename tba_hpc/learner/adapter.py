"""Weights and LoRA adapters as they travel: what one adds to which weights, and of which base.

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
"""By safetensors' name."""

FOLDER = "adapter"
"""Of an exported policy: the adapter alone, as peft.PeftModel.from_pretrained takes it."""

PREFIX = "base_model.model."
"""What peft puts before a layer's name in its files."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of a layer's two tensors."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """s·B·A for the weights W [out, in] of some linear layers.

    layers: by a layer's name, A [r, in] and B [out, r]. scale: s.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], scale: float) -> Adapter:
        """From tensors under the names that travel."""
        named = dict(tensors)
        return cls({name: (named[name + A], named[name + B]) for name in _layers(named)}, scale)

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """From files of peft's."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        return cls.of(
            ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors.items()),
            config["lora_alpha"] / config["r"],
        )

    def changes(self, name: str) -> bool:
        """Whether this is the weight of one of its layers."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """W + s·B·A of a weight that it changes, computed in float32 and rounded to the weight's type."""
        down, up = (part.to(weight.device).float() for part in self.layers[name.removesuffix(".weight")])
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def layers_of(layout: WeightLayout) -> list[str]:
    """Names of the layers that an adapter of this layout changes."""
    return _layers(slot.name for slot in layout.slots)


def _layers(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(A) for name in names if name.endswith(A)]


def tensor_in(buffer: np.ndarray, slot: WeightSlot) -> Tensor:
    """The tensor whose memory is ``slot`` of a flat uint8 buffer."""
    return torch.from_numpy(buffer[slot.start : slot.end]).view(DTYPE[slot.dtype]).view(slot.shape)


def tensors_in(buffer: np.ndarray, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a layout, under their names; nothing is copied."""
    return ((slot.name, tensor_in(buffer, slot)) for slot in layout.slots)


class Adaptable:
    """A model that takes one adapter at a time: y = W·x + s·B·(A·x), as peft computes it; W stays."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.adapter: Adapter | None = None

    def put_on(self, adapter: Adapter | None) -> None:
        """Exchange the adapter for another one, or for none."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.adapter = [], adapter
        if adapter is None:
            return
        for name, pair in adapter.layers.items():
            added = _Added(*pair, adapter.scale)
            self._hooks.append(self._model.get_submodule(name).register_forward_hook(added))


class _Added:
    """A forward hook of a linear layer; its tensors move to the layer's device at the first use."""

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        self._down, self._up, self._scale = down, up, scale

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._down, self._up = self._down.to(output.device), self._up.to(output.device)
        return output + inputs[0] @ self._down.T @ self._up.T * self._scale


def identity(weights: Mapping[str, Tensor]) -> str:
    """A digest of weights: names, types, shapes, and the sum of each one's bits, taken as integers.

    Sums, since a good hash of 140 GB takes minutes; it tells models apart, and withstands no attack.
    """
    digest = sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        bits = weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {total}\n".encode())
    return digest.hexdigest()
