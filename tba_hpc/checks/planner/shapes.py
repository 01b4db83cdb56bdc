"""Shape of the model that a config names, and size of its adapter.

The model's config.json comes from a folder or the Hugging Face cache. Else it is known here by the model's
name, or comes from the hub. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tba_hpc.checks.resources import find_file, hub_cache
from tba_hpc.config import ConfigError, LoraSection, is_local
from tba_hpc.config.plain_yaml import read_yaml
from tba_hpc.core.model_shapes import Shape, shape_of

KNOWN = Path(__file__).with_name("known_models.yaml")
"""Fields of config.json of the models that shipped configs name, by name."""


def adapter_weights(shape: Shape, lora: LoraSection, path: str) -> int:
    """Count the weights of a LoRA adapter. Raises ConfigError if a target names no linear layer."""
    layers = shape.linear_layers
    wanted = {target.rpartition(".")[2] for target in lora.targets or layers}
    unknown = sorted(wanted - layers.keys())
    if unknown or not layers:
        raise ConfigError(
            f"model.lora.{f'targets={unknown[0]}' if unknown else 'rank'} names no linear layer of "
            f"model.path={path} that LoRA can adapt: it has {', '.join(layers) or 'none'}"
        )
    return shape.layers * lora.rank * sum(layers[name] for name in wanted)


def load_shape(path: str, key: str = "model.path") -> Shape:
    """Load the shape of a folder or hub name. key: its config key, for errors. Raises ConfigError."""
    fields = _fields(path, key)
    try:
        return shape_of(fields)
    except KeyError as error:
        raise ConfigError(
            f"the config.json of {key}={path} does not say {error}: the planner knows decoders such as "
            "Llama, Qwen, GPT-NeoX and GPT-2"
        ) from None


def _fields(path: str, key: str) -> dict[str, Any]:
    """Return a model's config.json: a local one, else that in KNOWN, else a download. Raises ConfigError."""
    file = find_file(path, "config.json", os.environ)
    if file is None and (known := read_yaml(KNOWN.read_text(encoding="utf-8")).get(path)):
        return dict(known)
    fields: dict[str, Any] = json.loads((file or _downloaded(path, key)).read_text(encoding="utf-8"))
    return fields


def _downloaded(path: str, key: str) -> Path:
    """Download the config.json of a hub name. Raises ConfigError."""
    reason = "no such file"
    if not is_local(path):
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        try:
            # Fails at once, where hf_hub_download retries noisily for half a minute.
            get_hf_file_metadata(hf_hub_url(path, "config.json"))
            return Path(hf_hub_download(path, "config.json", cache_dir=hub_cache(os.environ)))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
        except Exception as error:  # from the hub's HTTP library
            reason = f"the hub cannot be reached: {error}"
    download = "" if is_local(path) else f", or run `hf download {path} config.json` where there is a network"
    raise ConfigError(
        f"{key}={path} has no config.json that can be read ({reason}): give a model's folder{download}"
    )
