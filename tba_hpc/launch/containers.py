"""Shell words with which a batch script starts commands in a site's container.

Sources: apptainer.org/docs (exec), docs.nersc.gov/development/containers (podman-hpc, shifter) and
github.com/NVIDIA/pyxis/wiki/Usage.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from tba_hpc.launch.plan import Container, Site

GPU_DRIVER: dict[str, tuple[str, ...]] = {
    "apptainer": ("--nv",),
    "singularity": ("--nv",),
    "podman-hpc": ("--gpu",),
    "shifter": ("--module=gpu",),
}
"""Arguments that make NVIDIA's driver available in a container, by runtime. pyxis needs none."""

TMP = "/tmp"
"""Folder that is writable in every container; the folder of TMPDIR may be missing there."""


def inside(command: Sequence[str], site: Site) -> str:
    """Return the shell words that run a command, in the site's container if it has one."""
    before = _prefix(site.container, site) if site.container else []
    return " ".join([*map(word, before), *map(shlex.quote, command)])


def step_options(site: Site) -> str:
    """Return the srun options that start programs in the site's container, each after a blank.

    Only pyxis has such options. For other runtimes, or without a container, the result is "".
    """
    box = site.container
    if box is None or box.runtime != "pyxis":
        return ""
    mounts = ",".join(_pairs(box))
    options = [f"--container-image={box.image}", f"--container-mounts={mounts}", *_arguments(box, site)]
    return "".join(f" {word(option)}" for option in options)


def filled_in(text: str) -> str:
    """Quote a shell word so that variables in it are expanded, but commands and arithmetic are not."""
    return '"' + re.sub(r'(["`\\])|\$(?=[(\[])', r"\\\g<0>", text) + '"'


def word(text: str) -> str:
    """Quote a shell word as ``filled_in`` does, but only if that is necessary."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else filled_in(text)


def _prefix(box: Container, site: Site) -> list[str]:
    """Return the words to put before a command that runs in the container; none for pyxis."""
    arguments = _arguments(box, site)
    if box.runtime in ("apptainer", "singularity"):
        binds = [part for bind in (*box.binds, "$RUN") for part in ("--bind", bind)]
        return [box.runtime, "exec", *arguments, *binds, str(box.image)]
    if box.runtime == "podman-hpc":  # only podman needs an option to pass on the environment
        volumes = [f"--volume={pair}" for pair in _pairs(box)]
        return [box.runtime, "run", "--rm", "--env-host", *arguments, *volumes, str(box.image)]
    if box.runtime == "shifter":
        volumes = [f"--volume={bind}" for bind in box.binds]
        return [box.runtime, *arguments, *volumes, f"--image={box.image}"]
    return arguments if box.runtime == "plain" else []


def _arguments(box: Container, site: Site) -> list[str]:
    if box.arguments is not None:
        return list(box.arguments)
    return list(GPU_DRIVER.get(box.runtime, ())) if site.gpus_per_node else []


def _pairs(box: Container) -> list[str]:
    """Return ``SOURCE:TARGET`` for each folder to mount, the run directory included."""
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in (*box.binds, "$RUN")]
