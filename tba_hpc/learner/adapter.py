"""LoRA adapters as they are published, and their addition to a model's weights (arXiv 2106.09685, §4.1)."""

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
"""Torch's dtypes by safetensors' names."""

FOLDER = "adapter"
"""Subfolder of an exported policy with only the adapter, for peft.PeftModel.from_pretrained."""

PREFIX = "base_model.model."
"""Prefix that peft puts before a layer's name in its files."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of a layer's two tensors."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter that adds s·B·A to the weights W [out, in] of some linear layers.

    layers: A [r, in] and B [out, r] by layer name. scale: s.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], scale: float) -> Adapter:
        """Make an adapter from published tensors and their names."""
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
        """Return whether ``name`` is the weight of an adapted layer."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return W + s·B·A for an adapted weight W, computed in float32 and rounded to W's dtype."""
        down, up = (part.to(weight.device).float() for part in self.layers[name.removesuffix(".weight")])
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def layers_of(layout: WeightLayout) -> list[str]:
    """Return the names of the layers that an adapter with this layout changes."""
    return _layers(slot.name for slot in layout.slots)


def _layers(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(A) for name in names if name.endswith(A)]


def tensor_in(buffer: np.ndarray, slot: WeightSlot) -> Tensor:
    """Return a view of a flat uint8 buffer as the tensor of ``slot``."""
    return torch.from_numpy(buffer[slot.start : slot.end]).view(DTYPE[slot.dtype]).view(slot.shape)


def tensors_in(buffer: np.ndarray, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor of a layout, and the tensor as a view of ``buffer``."""
    return ((slot.name, tensor_in(buffer, slot)) for slot in layout.slots)


class Adaptable:
    """A model to which an adapter can be attached: y = W·x + s·B·(A·x), as in peft, with W unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.adapter: Adapter | None = None

    def attach(self, adapter: Adapter | None) -> None:
        """Attach an adapter instead of the present one; None: remove it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.adapter = [], adapter
        if adapter is None:
            return
        for name, pair in adapter.layers.items():
            added = _Added(*pair, adapter.scale)
            self._hooks.append(self._model.get_submodule(name).register_forward_hook(added))


class _Added:
    """Forward hook that adds s·B·(A·x) to a linear layer's output. Its tensors move to the layer's device."""

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        self._down, self._up, self._scale = down, up, scale

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._down, self._up = self._down.to(output.device), self._up.to(output.device)
        return output + inputs[0] @ self._down.T @ self._up.T * self._scale


def identity(weights: Mapping[str, Tensor]) -> str:
    """Compute a digest of weights from their names, dtypes, shapes, and sums of their bits read as integers.

    Sums are used because a cryptographic hash of 140 GB takes minutes. They tell models apart, but do not
    resist attacks.
    """
    digest = sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        bits = weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {total}\n".encode())
    return digest.hexdigest()
