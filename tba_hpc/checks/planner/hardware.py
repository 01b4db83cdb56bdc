"""GPUs by name, from their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba_hpc.config import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU. memory: GiB that programs can use. bf16: dense TFLOP/s in bfloat16, 0 if unsupported."""

    name: str
    memory: float
    bf16: float

    @property
    def kind(self) -> str:
        """Name without the size of the memory."""
        return self.name.partition("-")[0]

    @property
    def bytes(self) -> float:
        """Memory in bytes."""
        return self.memory * GIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16", 14.6, 0),
        Gpu("l4-24", 22.0, 121),
        Gpu("a10-24", 22.0, 125),
        Gpu("a30-24", 23.5, 165),
        Gpu("rtx3090-24", 23.5, 71),
        Gpu("rtx4090-24", 23.5, 165),
        Gpu("rtx5090-32", 31.4, 210),
        Gpu("a100-40", 39.4, 312),
        Gpu("a40-48", 44.3, 149.7),
        Gpu("l40s-48", 44.4, 362),
        Gpu("rtx6000ada-48", 47.3, 364),
        Gpu("a6000-48", 47.5, 155),
        Gpu("mi250x-64", 63.9, 191.5),
        Gpu("a100-80", 79.1, 312),
        Gpu("h100-80", 79.1, 989),
        Gpu("gh200-96", 94.5, 989),
        Gpu("h200-141", 139.7, 989),
        Gpu("b200-180", 178.4, 2250),
        Gpu("mi300x-192", 191.5, 1307),
    )
}
"""GPUs by name, those with least memory first. An MI250X counts as two GPUs, as programs see it."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name, such as a100-40, or of this kind, such as a6000, if it has one size.

    Raises ConfigError, with the names to choose from, if there is none or more than one.
    """
    found = [gpu for gpu in GPUS.values() if name in (gpu.name, gpu.kind)]
    if not found:
        raise ConfigError(f"--gpu {name} is not known: valid are {', '.join(GPUS)}")
    if found[1:]:
        raise ConfigError(f"--gpu {name} has several sizes: give {' or '.join(gpu.name for gpu in found)}")
    return found[0]


def gpus_named(text: str) -> list[Gpu]:
    """Return the GPUs whose kind is a word of ``text``: "a100" does not name an A10.

    text: name of a GPU as its driver gives it, or an option that requests GPUs.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=rtx)[ _](?=\d)|(?<=6000)[ _](?=ada)", "", text.lower()))
    return [gpu for gpu in GPUS.values() if gpu.kind in words]
