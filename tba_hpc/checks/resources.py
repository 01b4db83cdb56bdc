"""Finds the models, data sets and files that a config names, on this machine.

Each of these is a resource (``core.types.Resource``). This module looks at file names only: it loads no
resource and never asks the hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tba_hpc.config import Config, is_local
from tba_hpc.core.hub_files import data_cache, find_file, hub_cache, hub_home, is_offline
from tba_hpc.core.model_files import TOKENIZER, absent, lacking
from tba_hpc.core.own_code import is_own
from tba_hpc.core.types import Resource
from tba_hpc.tasks import TASKS, task_resources


def resources(config: Config, *, of_custom_task: bool = True) -> list[Resource]:
    """Return all resources that a config names. Raises ConfigError for a bad task or bad options.

    of_custom_task: whether to import the user's own task, if the config names one, and ask it for its
    resources.
    """
    models = {"model.path": config.model.path, "buffer.duplicates.model": config.buffer.embedding_model}
    files = {"task.train_file": config.task.train_file, "task.test_file": config.task.test_file}
    asked = of_custom_task or config.task.name in TASKS
    return [
        *(Resource("model", key, name) for key, name in models.items() if name and not is_own(name)),
        *(Resource("file", key, name) for key, name in files.items() if name),
        *(task_resources(config.task) if asked else []),
    ]


def is_path(resource: Resource) -> bool:
    """Return whether a resource is a path, which need not exist, rather than a name on the hub."""
    return resource.kind == "file" or is_local(resource.name) or Path(resource.name).is_dir()


def place(resource: Resource, environment: Mapping[str, str]) -> Path | None:
    """Return the path of a resource on this machine; None if files of it are missing.

    environment: environment variables of the processes that will load the resource.
    """
    if resource.kind == "data set":
        return _data_place(resource, environment)
    path = Path(resource.name)
    if resource.kind == "file":
        return path if path.is_file() else None
    config = find_file(resource.name, "config.json", environment)
    return config.parent if config and _has_weights(config.parent) else None


def missing(config: Config, environment: Mapping[str, str], *, of_custom_task: bool = True) -> list[Resource]:
    """Return the resources on the hub that a config names, but that its ranks could not load.

    They are those that the cache lacks, if ``environment`` forbids access to the hub. Otherwise, or if only
    the nodes know the path of the cache, the list is empty. of_custom_task: as for ``resources``.
    """
    if not is_offline(environment) or "$" in str(hub_cache(environment)):
        return []
    wanted = resources(config, of_custom_task=of_custom_task)
    return [one for one in wanted if not is_path(one) and place(one, environment) is None]


def missing_sentence(absent: Iterable[Resource], environment: Mapping[str, str]) -> str:
    """Return a sentence, without a remedy, about resources that ``missing`` has returned."""
    names = " and ".join(map(str, absent))
    return (
        f"{hub_home(environment)} (HF_HOME), where ranks look, has no complete copy of {names}, and "
        "HF_HUB_OFFLINE=1 forbids them to download anything"
    )


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has weight files, and all those that their index lists."""
    return absent(folder) in (None, TOKENIZER) and not lacking(folder)


def _data_place(resource: Resource, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of a prepared data set in the cache, or None.

    Capitals and underscores in names are ignored, since the datasets library changes them.
    """
    owner, _, title = resource.name.rpartition("/")
    for folder in data_cache(environment).glob(f"{owner}___*" if owner else "*"):
        found = folder.name.rpartition("___")[2]
        if _plain(found) == _plain(title) and any(
            folder.glob(f"{resource.subset or '*'}/*/*/dataset_info.json")
        ):
            return folder
    return None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
