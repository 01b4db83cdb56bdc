"""GPUs by name, from their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba_hpc.config import ConfigError

GIB = 1 << 30
GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory: GiB that a program finds. bf16, fp32: dense TFLOP/s, fp32 without TF32; bf16 is 0 if it has
    none. bandwidth: of its memory, GB/s.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float

    @property
    def bytes(self) -> float:
        """Bytes of its memory."""
        return self.memory * GIB

    def flops(self, weight_bytes: int) -> float:
        """Peak FLOP/s of matrix products of weights of so many bytes."""
        return 1e12 * (self.bf16 if weight_bytes == 2 and self.bf16 else self.fp32)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16", 14.6, 0, 8.1, 320),
        Gpu("l4-24", 22.0, 121, 30.3, 300),
        Gpu("a10-24", 22.0, 125, 31.2, 600),
        Gpu("a30-24", 23.5, 165, 10.3, 933),
        Gpu("rtx3090-24", 23.5, 71, 35.6, 936),
        Gpu("rtx4090-24", 23.5, 165, 82.6, 1008),
        Gpu("a100-40", 39.4, 312, 19.5, 1555),
        Gpu("a40-48", 44.3, 149.7, 37.4, 696),
        Gpu("l40s-48", 44.4, 362, 91.6, 864),
        Gpu("rtx6000ada-48", 47.3, 364, 91.1, 960),
        Gpu("mi250x-64", 63.9, 191.5, 23.9, 1638),
        Gpu("a100-80", 79.1, 312, 19.5, 2039),
        Gpu("h100-80", 79.1, 989, 67, 3350),
        Gpu("h200-141", 139.7, 989, 67, 4800),
    )
}
"""From the smallest memory up. An MI250X counts as the two GPUs that programs see."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name. Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not known: valid are {', '.join(GPUS)}")
    return GPUS[name]


def gpus_named(text: str) -> list[Gpu]:
    """Those whose kind is a word of a driver's or a request's text: "a100" names no A10."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=rtx) |(?<=6000) (?=ada)", "", text.lower()))
    return [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
