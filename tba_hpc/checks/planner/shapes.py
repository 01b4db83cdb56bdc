"""Finds the shape of a model that a config names (numbers of layers, heads and so on) and its adapter's size.

The shape is read from the model's config.json, in its folder or the cache of Hugging Face. For a model that
is in neither, the shape comes from ``known_models.yaml``, or else from the hub. Neither torch nor
transformers is imported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tba_hpc.config import ConfigError, LoraSection, is_local
from tba_hpc.config.plain_yaml import read_yaml
from tba_hpc.core.hub_files import hub_cache, model_fields, refused_by_hub
from tba_hpc.core.model_shapes import Shape, shape_of

KNOWN = Path(__file__).with_name("known_models.yaml")
"""File with the fields of config.json for the models that shipped configs name."""


def adapter_weights(shape: Shape, lora: LoraSection, path: str) -> int:
    """Return the number of weights of a LoRA adapter.

    path: model.path, for errors. Raises ConfigError if the model has no layer to adapt, or lacks a target.
    """
    layers = shape.linear_layers
    wanted = {target.rpartition(".")[2] for target in lora.targets or layers}
    if not layers:
        raise ConfigError(f"model.path={path} has no linear layer that LoRA can adapt: leave out model.lora")
    if unknown := sorted(wanted - layers.keys()):
        raise ConfigError(
            f"model.lora.targets={unknown[0]} names no linear layer of model.path={path} that LoRA can "
            f"adapt: it has {', '.join(layers)}"
        )
    return shape.layers * lora.rank * sum(layers[name] for name in wanted)


def load_shape(path: str, key: str = "model.path") -> Shape:
    """Return the shape of a model. Raises ConfigError if it cannot be found or is of an unknown kind.

    path: folder or name on the hub. key: config key that names the model, for errors.
    """
    fields = _fields(path, key)
    try:
        return shape_of(fields)
    except KeyError as error:
        raise ConfigError(
            f"the config.json of {key}={path} does not say {error}: the planner knows decoders such as "
            "Llama, Qwen, GPT-NeoX and GPT-2"
        ) from None


def _fields(path: str, key: str) -> dict[str, Any]:
    """Return the fields of a model's config.json, from this machine, KNOWN or the hub. Raises ConfigError."""
    if fields := model_fields(path, os.environ):
        return fields
    known = read_yaml(KNOWN.read_text(encoding="utf-8")).get(path)
    return dict(known or json.loads(_downloaded(path, key).read_text(encoding="utf-8")))


def _downloaded(path: str, key: str) -> Path:
    """Download the config.json of a model on the hub; return its path. Raises ConfigError if that fails."""
    is_folder = is_local(path) or Path(path).is_dir()
    # Without a network hf_hub_download would retry for half a minute.
    reason = "it is missing or damaged" if is_folder else refused_by_hub(path, os.environ)
    if not reason:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, "config.json", cache_dir=hub_cache(os.environ)))
    fetch = "" if is_folder else f", or type 'hf download {path} config.json' where there is a network"
    raise ConfigError(
        f"{key}={path} has no config.json that can be read ({reason}): give a model's folder{fetch}"
    )
