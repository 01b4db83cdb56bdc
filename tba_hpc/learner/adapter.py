"""LoRA adapters as the trainer publishes them, and two ways to apply one to a model (arXiv 2106.09685, §4.1).

An adapter is either merged into a model's weights, or attached to a model whose weights stay unchanged.
Shapes: ``in`` and ``out`` are the sizes of a linear layer's input and output, ``r`` is the adapter's rank.
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
"""Torch dtypes by their names in safetensors files."""

FOLDER = "adapter"
"""Subfolder of an exported policy that holds only the adapter, as peft.PeftModel.from_pretrained loads it."""

PREFIX = "base_model.model."
"""Prefix that peft puts before a layer's name in its files."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes that make the names of a layer's two adapter tensors, A and B, from the name of the layer."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that adds s·B·A to the weight W [out, in] of some linear layers.

    layers: the tensors A [r, in] and B [out, r] by the name of their layer. scale: s.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], scale: float) -> Adapter:
        """Make an adapter from pairs of name and tensor. Each name ends with the suffix A or B."""
        named = dict(tensors)
        return cls({name: (named[name + A], named[name + B]) for name in _layers(named)}, scale)

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """Load an adapter, on the CPU, from a folder with the files that peft writes."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        return cls.of(
            ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors.items()),
            config["lora_alpha"] / config["r"],
        )

    def changes(self, name: str) -> bool:
        """Return whether ``name`` is the name of an adapted layer's weight."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return W + s·B·A, on W's device, computed in float32 and rounded to W's dtype.

        name: name of the adapted weight. weight: W.
        """
        down, up = (part.to(weight.device).float() for part in self.layers[name.removesuffix(".weight")])
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def layers_of(layout: WeightLayout) -> list[str]:
    """Return the names of the layers that an adapter with this layout changes."""
    return _layers(slot.name for slot in layout.slots)


def _layers(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(A) for name in names if name.endswith(A)]


def tensor_in(buffer: np.ndarray, slot: WeightSlot) -> Tensor:
    """Return the tensor of ``slot`` as a view of ``buffer``, uint8, which holds all tensors of a layout."""
    return torch.from_numpy(buffer[slot.start : slot.end]).view(DTYPE[slot.dtype]).view(slot.shape)


def tensors_in(buffer: np.ndarray, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's name, and the tensor as a view of ``buffer``; see ``tensor_in``."""
    return ((slot.name, tensor_in(buffer, slot)) for slot in layout.slots)


class Adaptable:
    """A model whose adapted layers compute y = W·x + s·B·(A·x), as peft's do, while W stays unchanged.

    adapter: the attached adapter; None: none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.adapter: Adapter | None = None

    def attach(self, adapter: Adapter | None) -> None:
        """Attach an adapter in place of the present one; None: only remove the present one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.adapter = [], adapter
        if adapter is None:
            return
        for name, pair in adapter.layers.items():
            added = _Added(*pair, adapter.scale)
            self._hooks.append(self._model.get_submodule(name).register_forward_hook(added))


class _Added:
    """Forward hook that adds s·B·(A·x) to a linear layer's output, on the device of that output."""

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        self._down, self._up, self._scale = down, up, scale

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._down, self._up = self._down.to(output.device), self._up.to(output.device)
        return output + inputs[0] @ self._down.T @ self._up.T * self._scale


def identity(weights: Mapping[str, Tensor]) -> str:
    """Return a digest that tells models apart, in hexadecimal.

    It covers each weight's name, dtype and shape, and the sum of its elements, whose bits are read as
    integers. Sums are used because a cryptographic hash of 140 GB would take minutes. They do not protect
    against weights that were forged to have the same sums.
    """
    digest = sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        bits = weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {total}\n".encode())
    return digest.hexdigest()
