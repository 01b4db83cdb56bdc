"""LoRA by peft: an adapter on the policy's linear layers, trained while the policy's own weights are frozen.

No other module imports peft, so that runs without LoRA do not load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba_hpc.config import ConfigError, LoraSection
from tba_hpc.core.types import LoraWeights
from tba_hpc.learner.adapter import FOLDER, PREFIX, Adapter, identity
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.files import write_atomic

BASE_FILE = "base"
"""File of a checkpoint with the ``adapter.identity`` of the model to which its adapter belongs."""


class Lora:
    """A new adapter, which the constructor puts into ``policy``.

    Its tensors A are random, drawn from ``seed``; its tensors B are zero. All have the policy's dtype. path:
    model.path, for errors. Raises ConfigError if there is nothing to adapt, or if one of the section's
    targets matches no layer.

    adapter: the adapter's parameters, by the names under which they are published. base: the policy's own
    parameters, by their names without an adapter. weights: description of the published adapter.
    """

    def __init__(self, policy: PreTrainedModel, section: LoraSection, *, path: str, seed: int) -> None:
        layers = _layers(policy, section.targets, path)
        self.base: dict[str, nn.Parameter] = dict(policy.named_parameters())
        self._path = path
        self._policy = policy
        self._identity = identity(self.base)
        self.weights = LoraWeights(
            identity({f"{name}.weight": self.base[f"{name}.weight"] for name in layers}),
            section.alpha / section.rank,
        )
        self._config = LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
            target_modules=sorted({name.rpartition(".")[2] for name in layers})
            if section.targets is None
            else list(section.targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=path,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._config, policy)
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data = parameter.data.to(policy.dtype)  # peft makes them float32
        self.adapter: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter for name, parameter in trained.items()
        }
        assert len(self.adapter) == 2 * len(layers), "peft takes the same layers for the targets"

    @contextmanager
    def disabled(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Disable the adapter within the block. Yields ``policy``, a module around the adapted model."""
        layers = [layer for layer in self._policy.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield policy
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write the model with the adapter merged, for ``from_pretrained``, and the adapter alone in FOLDER.

        tensors: the parameters in ``adapter`` and ``base``, and the model's stored buffers, by name.
        """
        given = {name: tensors[name] for name in self.adapter}
        adapter = Adapter.of(given.items(), self.weights.scale)
        whole = {
            name: adapter.merged(name, tensor) if adapter.changes(name) else tensor
            for name, tensor in tensors.items()
            if name not in self.adapter
        }
        self._policy.save_pretrained(folder, state_dict=whole)
        (folder / FOLDER).mkdir()
        save_file(
            {PREFIX + name: tensor for name, tensor in given.items()},
            folder / FOLDER / "adapter_model.safetensors",
            {"format": "pt"},
        )
        self._config.save_pretrained(str(folder / FOLDER))

    def note_base(self, checkpoint: Path) -> None:
        """Record in a checkpoint to which model its adapter belongs."""
        write_atomic(checkpoint / BASE_FILE, self._identity)

    def require_base(self, checkpoint: Path) -> None:
        """Raise StateError if a checkpoint's adapter belongs to another model."""
        file = checkpoint / BASE_FILE
        if not file.exists() or file.read_text() != self._identity:
            raise StateError(
                f"{checkpoint} holds an adapter for other weights than those of model.path={self._path}: "
                "give the model that the run began with, or start another run"
            )


def _layers(policy: PreTrainedModel, targets: tuple[str, ...] | None, path: str) -> list[str]:
    """Return the names of the linear layers to adapt. Raises ConfigError if a target matches none.

    targets: last components of layer names; None: all linear layers. The output layer is never adapted,
    because LogprobHead takes only its weights, which may be tied to the embedding. path: used in errors.
    """
    head = policy.get_output_embeddings()
    linear = [
        name
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if not linear:
        raise ConfigError(
            f"model.lora has nothing to adapt in model.path={path}, a {type(policy).__name__} without linear "
            "layers: leave it out, or train a model such as Llama, Qwen or GPT-NeoX"
        )
    if targets is None:
        return linear
    named = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    for target, names in named.items():
        if not names:
            raise ConfigError(
                f"model.lora.targets: {target} names no linear layer of model.path={path} that can be "
                f"adapted (the output layer cannot): choose from {kinds}"
            )
    return [name for name in linear if any(name in names for names in named.values())]
