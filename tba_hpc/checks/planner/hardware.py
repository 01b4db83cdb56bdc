"""GPUs by name, from their data sheets, and the share of those figures that the planner counts on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba_hpc.config import ConfigError, Dtype

GIB = 1 << 30
GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory: GiB that a program finds. bf16, fp32: dense TFLOP/s, fp32 without TF32; bf16 is 0 if it has
    none. bandwidth: of its memory, GB/s. link: to another GPU of the node, GB/s each way.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    link: float

    @property
    def bytes(self) -> float:
        """Bytes of its memory."""
        return self.memory * GIB

    def flops(self, dtype: Dtype) -> float:
        """FLOP/s of matrix products at best."""
        return 1e12 * (self.bf16 if dtype == "bfloat16" and self.bf16 else self.fp32)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16", 14.6, 0, 8.1, 320, 12),
        Gpu("l4-24", 22.0, 121, 30.3, 300, 25),
        Gpu("a10-24", 22.0, 125, 31.2, 600, 25),
        Gpu("a30-24", 23.5, 165, 10.3, 933, 25),
        Gpu("rtx3090-24", 23.5, 71, 35.6, 936, 25),
        Gpu("a100-40", 39.4, 312, 19.5, 1555, 300),
        Gpu("a100-80", 79.1, 312, 19.5, 2039, 300),
        Gpu("h100-80", 79.1, 989, 67, 3350, 450),
        Gpu("h200-141", 139.7, 989, 67, 4800, 450),
        Gpu("l40s-48", 44.4, 362, 91.6, 864, 25),
        Gpu("a40-48", 44.3, 149.7, 37.4, 696, 25),
        Gpu("rtx4090-24", 23.5, 165, 82.6, 1008, 25),
        Gpu("rtx6000ada-48", 47.3, 364, 91.1, 960, 25),
        Gpu("mi250x-64", 63.9, 191.5, 23.9, 1638, 50),
    )
}
"""An MI250X counts as the two GPUs that programs see."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name. Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not known: valid are {', '.join(GPUS)}")
    return GPUS[name]


def gpus_named(text: str) -> list[Gpu]:
    """Those whose kind is a word of a driver's or a request's text: "a100" names no A10."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=rtx) |(?<=6000) (?=ada)", "", text.lower()))
    return [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]


def require_dtype(gpu: Gpu, dtype: Dtype) -> None:
    """Raise ConfigError if a GPU cannot compute in the policy's dtype."""
    if dtype == "bfloat16" and not gpu.bf16:
        raise ConfigError(
            f"model.dtype=bfloat16 is more than --gpu {gpu.name} can: add --set model.dtype=float32 (twice "
            "the memory), or choose a GPU of another kind"
        )


# Assumed, for no GPU has run these yet.

TRAINING_SHARE = {"bfloat16": 0.3, "float32": 0.5}
"""Share of the FLOP/s that a learner reaches."""

SCORING_SHARE = 0.3
"""Share of the FLOP/s that a model of transformers reaches when it reads finished texts."""

DECODE_SHARE = 0.6
"""Share of the FLOP/s that an engine reaches with many sequences at once."""

BANDWIDTH_SHARE = 0.8
"""Share of the memory's bandwidth that an engine or an optimizer reaches."""

LINK_SHARE = 0.6
"""Share of the links between GPUs that collectives reach."""

DECODE_STEP_SECONDS, DECODE_SEQUENCE_SECONDS = 0.5e-3, 10e-6
"""What a step of an engine costs besides, s, and each of its sequences."""

HOST_COPY, NODE_LINK = 6 * GB, 20 * GB
"""Bytes/s between a GPU and pageable memory of its host, and between nodes by NCCL."""
