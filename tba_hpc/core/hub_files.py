"""Finds a model's files on this machine: in its folder, or where the Hugging Face libraries keep downloads.

It imports none of these libraries, which would take long.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tba_hpc.config import is_local


def find_file(model: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the path of a file of a model, in its folder or in the hub's cache; None if it is not there.

    model: folder or hub name. environment: environment variables, which say where the cache is.
    """
    here = is_local(model) or Path(model).is_dir()
    folder = _expanded(model) if here else _snapshot(model, environment)
    return folder / name if folder and (folder / name).is_file() else None


def _snapshot(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the newest version of a model in the hub's cache; None if there is none."""
    folder = hub_cache(environment) / f"models--{name.replace('/', '--')}"
    newest = folder / "refs/main"
    return folder / "snapshots" / newest.read_text().strip() if newest.is_file() else None


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether the environment forbids the Hugging Face libraries to access the hub."""
    return environment.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")


def hub_home(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep all that they download (HF_HOME)."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return _expanded(home)


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep models."""
    chosen = environment.get("HF_HUB_CACHE")
    return _expanded(chosen) if chosen else hub_home(environment) / "hub"


def data_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the Hugging Face libraries keep prepared data sets."""
    chosen = environment.get("HF_DATASETS_CACHE")
    return _expanded(chosen) if chosen else hub_home(environment) / "datasets"


def _expanded(path: str) -> Path:
    """Expand ``~`` and variables in a path, as the Hugging Face libraries do."""
    return Path(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111, Path.expanduser raises without a home
