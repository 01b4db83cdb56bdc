"""Finds a model's files on this machine: in its folder, or where the Hugging Face libraries keep downloads.

It imports huggingface_hub only to ask the hub, since the import takes long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_hpc.config import is_local

HUB_SECONDS = 10.0
"""Timeout of the request to the hub, in seconds."""

LONGEST_REASON = 120
"""Largest number of characters shown of an error of the hub's client."""


def find_file(model: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the path of a file of a model, in its folder or in the hub's cache; None if it is not there.

    model: folder or hub name. environment: environment variables, which say where the cache is.
    """
    here = is_local(model) or Path(model).is_dir()
    folder = _expanded(model) if here else _snapshot(model, environment)
    return folder / name if folder and (folder / name).is_file() else None


def model_fields(model: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a model's config.json; those in ``text_config`` replace others of the same name.

    Empty if the file is not on this machine or cannot be read.
    """
    file = find_file(model, "config.json", environment)
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file else {}
        return fields | (fields.get("text_config") or {})
    except (ValueError, TypeError, AttributeError):  # not JSON, or no mapping: the ranks refuse such a file
        return {}


def _snapshot(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the newest version of a model in the hub's cache; None if there is none."""
    folder = hub_cache(environment) / f"models--{name.replace('/', '--')}"
    newest = folder / "refs/main"
    return folder / "snapshots" / newest.read_text().strip() if newest.is_file() else None


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether the environment forbids the Hugging Face libraries to access the hub."""
    return environment.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")


def refused_by_hub(model: str, environment: Mapping[str, str]) -> str:
    """Ask the hub once for a model's config.json; return why the hub does not give it, or ""."""
    if is_offline(environment):
        return "HF_HUB_OFFLINE=1 forbids a download"
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # slow to import

    try:
        url = hf_hub_url(model, "config.json", endpoint=environment.get("HF_ENDPOINT"))
        get_hf_file_metadata(url, timeout=HUB_SECONDS)
    except Exception as error:  # the hub's client raises many kinds
        said = " ".join(str(error).split())[:LONGEST_REASON]
        return f"the hub did not give its config.json ({type(error).__name__}: {said})"
    return ""


def hub_home(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep all that they download (HF_HOME)."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return _expanded(home)


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep models."""
    chosen = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(chosen) if chosen else hub_home(environment) / "hub"


def data_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep prepared data sets."""
    chosen = environment.get("HF_DATASETS_CACHE")
    return _expanded(chosen) if chosen else hub_home(environment) / "datasets"


def _expanded(path: str) -> Path:
    """Expand ``~`` and variables in a path, as the Hugging Face libraries do."""
    return Path(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111, Path.expanduser raises without a home
