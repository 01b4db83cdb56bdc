"""``tba fetch``: downloads models and data that a config names into the cache that a site's jobs will see.

The download runs in its own process, ``python -m tba_hpc.commands.fetch`` with a config on stdin, because the
Hugging Face libraries choose their cache when they are imported, and a task may import the user's code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tba_hpc.checks.facts import job_environment, login_python
from tba_hpc.checks.resources import is_path, place, resources
from tba_hpc.commands import packaged
from tba_hpc.config import Config, ConfigError, dump_config, parse_config
from tba_hpc.core.hub_files import data_cache, hub_cache
from tba_hpc.core.types import Resource
from tba_hpc.core.wording import print_in_any_encoding
from tba_hpc.launch.plan import Site
from tba_hpc.run.notes import Exit
from tba_hpc.tasks.data import download

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables by which batch scripts forbid access to the hub."""

NO_ROOM = re.compile(r"[Qq]uota exceeded|No space left|os error (28|122)")
"""Pattern of errors for lack of space. Not all of them are OSErrors: the hub's client is partly in Rust."""

OTHER_FORMATS = ("*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite", "*.gguf", "*.mlmodel", "*.pth", "*.pt")
"""Files with weights in formats that this package does not read, so they are not downloaded."""

SAFETENSORS, PICKLED = "*.safetensors", "*.bin"
"""Files with weights in formats that are read. Pickled ones are downloaded only without safetensors."""


def fetch(config: Config, site: Site | None) -> None:
    """Download the models and data sets that ``config`` names, and print a line about each.

    site: cluster whose cache is filled; None for this user's own cache. Raises ConfigError if something is
    still missing at the end, or if the cache cannot be located.
    """
    environment = _environment(site)
    python = login_python(site) if site else sys.executable
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"{python} cannot be started here: set the site key venv to an environment that this machine "
            "sees, too; or leave --site out and set HF_HOME as it is on the nodes"
        )
    done = subprocess.run(
        [python, "-P", "-m", "tba_hpc.commands.fetch"], input=dump_config(config), env=environment, text=True
    )
    if done.returncode:
        raise ConfigError(
            "something is missing, see above: if it is on the hub, check its name, the network, and HF_TOKEN "
            "for a gated one; if it is a file or folder of yours, make it first, as the config may explain"
        )


def _environment(site: Site | None) -> dict[str, str]:
    """Return the environment of the site's jobs, without variables that forbid access to the hub."""
    environment = job_environment(site) if site else dict(os.environ)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        if "$" in environment.get(name, ""):
            raise ConfigError(
                f"{name}={environment[name]} of the site file contains a variable that is not set here: set "
                "this variable as it is on the nodes, and call the command again"
            )
    return {name: value for name, value in environment.items() if name not in OFFLINE}


def fetch_all(config: Config, environment: Mapping[str, str]) -> bool:
    """Download the resources that are missing, print a line about each, and return whether all are there."""
    there = [_fetch(resource, environment) for resource in resources(config)]
    return all(there)


def _fetch(resource: Resource, environment: Mapping[str, str]) -> bool:
    """Download a resource unless this machine has it; return whether it is there in the end."""
    if where := place(resource, environment):
        return _tell(resource, f"is there, {where}")
    packed = resource.kind == "model" and Path(resource.name).name == packaged.NAME
    if is_path(resource) and not packed:
        what = "no such file" if resource.kind == "file" else "no folder with config.json and weights"
        return _tell(resource, f"MISSING, {what} here, in {Path.cwd()}", there=False)
    cache = hub_cache if resource.kind == "model" else data_cache
    made = f"is made in {Path(resource.name).absolute()} from {packaged.ORIGIN} …"
    _tell(resource, made if packed else f"is fetched into {cache(environment)} …")
    try:
        if resource.kind == "data set":
            download(resource)
        elif packed:
            packaged.make_model(Path(resource.name))
        else:
            _download_model(resource.name)
    except ConfigError as error:
        return _tell(resource, f"MISSING, {error}", there=False)
    except Exception as error:  # the hub's client raises many kinds; the other resources are still fetched
        reason = (str(error).strip().splitlines() or [""])[0]
        room = "; free space, or set HF_HOME to a folder with more" if NO_ROOM.search(str(error)) else ""
        return _tell(resource, f"MISSING, {type(error).__name__}: {reason}{room}", there=False)
    where = place(resource, environment)
    return _tell(
        resource,
        f"is there, {where}" if where else "MISSING, the hub has no weights of it",
        there=bool(where),
    )


def _tell(resource: Resource, what: str, *, there: bool = True) -> bool:
    """Print a line about a resource; return ``there``, which says whether the resource is available."""
    print(f"  {resource}: {what}", flush=True)
    return there


def _download_model(name: str) -> None:
    """Download a model's config, tokenizer, and weights in one format, from the hub."""
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().list_repo_files(name)
    top = [file for file in files if "/" not in file]
    pickled = [PICKLED] if any(Path(file).match(SAFETENSORS) for file in top) else []
    # Subfolders hold weights in other formats or for other libraries, so only their text files are fetched.
    below = [file for file in files if "/" in file and not file.endswith((".json", ".txt"))]
    snapshot_download(name, ignore_patterns=[*OTHER_FORMATS, *pickled, *below])


if __name__ == "__main__":
    print_in_any_encoding()
    try:
        sys.exit(0 if fetch_all(parse_config(yaml.safe_load(sys.stdin)), os.environ) else Exit.REFUSED)
    except ConfigError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(Exit.REFUSED)
