"""Shell words of the batch script that start a command inside a site's container.

They follow the runtimes' own pages: apptainer.org/docs
(exec), docs.nersc.gov/development/containers (podman-hpc, shifter), github.com/NVIDIA/pyxis/wiki/Usage.
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
"""Arguments that bring NVIDIA's driver into a container; for pyxis a hook of enroot does it."""

TMP = "/tmp"
"""Folder that is writable in every container, unlike the one that TMPDIR names outside."""


def inside(command: Sequence[str], site: Site) -> str:
    """Return the command as shell words, preceded by those that start it in the site's container."""
    before = _prefix(site.container, site) if site.container else []
    return " ".join([*map(word, before), *map(shlex.quote, command)])


def step_options(site: Site) -> str:
    """Return the srun options that start programs in the site's container, each after a blank; or ""."""
    box = site.container
    if box is None or box.runtime != "pyxis":
        return ""
    mounts = ",".join(_pairs(box))
    options = [f"--container-image={box.image}", f"--container-mounts={mounts}", *_arguments(box, site)]
    return "".join(f" {word(option)}" for option in options)


def filled_in(text: str) -> str:
    """Quote a shell word so that its variables expand, but neither its commands nor its arithmetic."""
    return '"' + re.sub(r'(["`\\])|\$(?=[(\[])', r"\\\g<0>", text) + '"'


def word(text: str) -> str:
    """Quote like ``filled_in``, but only if the word needs quotes."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else filled_in(text)


def _prefix(box: Container, site: Site) -> list[str]:
    """Return the words before a command that start it inside; empty for pyxis, where srun does."""
    arguments = _arguments(box, site)
    if box.runtime in ("apptainer", "singularity"):
        binds = [part for bind in (*box.binds, "$RUN") for part in ("--bind", bind)]
        return [box.runtime, "exec", *arguments, *binds, str(box.image)]
    if box.runtime == "podman-hpc":  # unlike the others, podman does not pass on the environment
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
    """List ``SOURCE:TARGET`` for each folder to mount, including the run directory."""
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in (*box.binds, "$RUN")]
