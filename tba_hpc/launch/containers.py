"""How a command is started inside a site's container, as words of the batch script.

The facts are those of the runtimes' own pages: apptainer.org/docs
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
"""What brings NVIDIA's driver into a container; pyxis has it by a hook of enroot."""

TMP = "/tmp"
"""A folder that every container has and lets programs write in, unlike what TMPDIR names outside."""


def inside(command: Sequence[str], site: Site) -> str:
    """The command as shell words, in the site's container if that is a matter of words before it."""
    before = _prefix(site.container, site) if site.container else []
    return " ".join([*map(word, before), *map(shlex.quote, command)])


def step_options(site: Site) -> str:
    """Options of an srun that starts programs in the site's container, with a blank before; or nothing."""
    box = site.container
    if box is None or box.runtime != "pyxis":
        return ""
    mounts = ",".join(_pairs(box))
    options = [f"--container-image={box.image}", f"--container-mounts={mounts}", *_arguments(box, site)]
    return "".join(f" {word(option)}" for option in options)


def filled_in(text: str) -> str:
    """A quoted shell word in which variables are filled in; no command or sum of it is evaluated."""
    return '"' + re.sub(r'(["`\\])|\$(?=[(\[])', r"\\\g<0>", text) + '"'


def word(text: str) -> str:
    """The same, without quotes if it needs none."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else filled_in(text)


def _prefix(box: Container, site: Site) -> list[str]:
    """The words before a command that start it inside; none for pyxis, for which srun does."""
    arguments = _arguments(box, site)
    if box.runtime in ("apptainer", "singularity"):
        binds = [part for bind in (*box.binds, "$RUN") for part in ("--bind", bind)]
        return [box.runtime, "exec", *arguments, *binds, str(box.image)]
    if box.runtime == "podman-hpc":  # unlike the others, podman leaves the environment outside
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
    """``SOURCE:TARGET`` of all that is to be seen inside, the run directory among it."""
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in (*box.binds, "$RUN")]
