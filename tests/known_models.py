"""A cache of the hub that holds the config.json of the models that shipped configs name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tba_hpc.checks.planner import shapes

KNOWN: dict[str, dict[str, Any]] = {
    ".cache/tiny-model-seed0": {
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 192,
        "vocab_size": 349,
        "dtype": "float32",
    },
    **yaml.safe_load(shapes.KNOWN.read_text()),
}
"""By name; float32 if the type of the weights in their files is not known."""


def cache_shapes(folder: Path) -> dict[str, str]:
    """Write them into a cache in ``folder``, the tiny model beside it; the variables that name the cache."""
    for name, fields in KNOWN.items():
        place = folder / name
        if not name.startswith("."):
            model = folder / "hub" / f"models--{name.replace('/', '--')}"
            place = model / "snapshots/abc"
            (model / "refs").mkdir(parents=True)
            (model / "refs/main").write_text("abc")
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(fields))
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def make_empty_model(folder: Path) -> None:
    """Write files that name a model and hold nothing, for jobs whose ranks are others'."""
    (folder / "config.json").touch()
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
