"""GPUs by name: what their makers say of memory and speed, and what share of that the planner counts on.

It must not know what they compute. The shares are assumptions: nothing of this project has run on a GPU yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba_hpc.config import ConfigError, Dtype

GIB = 1 << 30
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """memory: GiB that a program finds. bf16, fp32: dense TFLOP/s, fp32 without TF32; bf16 is 0 where it has
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
        """Of its memory."""
        return self.memory * GIB

    def flops(self, dtype: Dtype) -> float:
        """FLOP/s of matrix products at best."""
        return 1e12 * (self.bf16 if dtype == "bfloat16" and self.bf16 else self.fp32)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="t4-16", memory=14.6, bf16=0, fp32=8.1, bandwidth=320, link=12),
        Gpu(name="l4-24", memory=22.0, bf16=121, fp32=30.3, bandwidth=300, link=25),
        Gpu(name="a10-24", memory=22.0, bf16=125, fp32=31.2, bandwidth=600, link=25),
        Gpu(name="a30-24", memory=23.5, bf16=165, fp32=10.3, bandwidth=933, link=25),
        Gpu(name="rtx3090-24", memory=23.5, bf16=71, fp32=35.6, bandwidth=936, link=25),
        Gpu(name="a100-40", memory=39.4, bf16=312, fp32=19.5, bandwidth=1555, link=300),
        Gpu(name="a100-80", memory=79.1, bf16=312, fp32=19.5, bandwidth=2039, link=300),
        Gpu(name="h100-80", memory=79.1, bf16=989, fp32=67, bandwidth=3350, link=450),
        Gpu(name="h200-141", memory=139.7, bf16=989, fp32=67, bandwidth=4800, link=450),
        Gpu(name="l40s-48", memory=44.4, bf16=362, fp32=91.6, bandwidth=864, link=25),
        Gpu(name="a40-48", memory=44.3, bf16=149.7, fp32=37.4, bandwidth=696, link=25),
        Gpu(name="rtx4090-24", memory=23.5, bf16=165, fp32=82.6, bandwidth=1008, link=25),
        Gpu(name="rtx6000ada-48", memory=47.3, bf16=364, fp32=91.1, bandwidth=960, link=25),
        Gpu(name="mi250x-64", memory=63.9, bf16=191.5, fp32=23.9, bandwidth=1638, link=50),
    )
}
"""From data sheets; an MI250X counts as the two GPUs that programs see."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name. Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not known: valid are {', '.join(GPUS)}")
    return GPUS[name]


def gpus_named(text: str) -> list[Gpu]:
    """Those whose kind is a word of what a driver calls a GPU, or a request asks for: of a100, not of a10."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=rtx) |(?<=6000) (?=ada)", "", text.lower()))
    return [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]


def require_dtype(gpu: Gpu, dtype: Dtype) -> None:
    """Raise ConfigError where a GPU cannot compute in the policy's dtype."""
    if dtype == "bfloat16" and not gpu.bf16:
        raise ConfigError(
            f"model.dtype=bfloat16 is more than --gpu {gpu.name} can: add --set model.dtype=float32 (twice "
            "the memory), or choose a GPU of another kind"
        )


# What of the data sheets is reached; see docs/lab-book.md for where the numbers come from.

TRAINING_SHARE = {"bfloat16": 0.3, "float32": 0.5}
"""Of the FLOP/s, by a learner of transformers' own modelling code."""

SCORING_SHARE = 0.3
"""Of the FLOP/s, by models of transformers that read finished texts."""

PREFILL_SHARE = 0.5
"""Of the FLOP/s, by an engine that reads prompts."""

DECODE_SHARE = 0.6
"""Of the FLOP/s, by an engine that generates for many sequences at once."""

BANDWIDTH_SHARE = 0.8
"""Of the memory's bandwidth, by an engine that generates, and by an optimizer."""

LINK_SHARE = 0.6
"""Of the links between GPUs, by collectives."""

DECODE_STEP_SECONDS = 0.5e-3
"""What every step of an engine costs besides, s."""

DECODE_SEQUENCE_SECONDS = 10e-6
"""What every sequence of it adds to that, s: sampling, scheduling, bookkeeping."""

LAYER_SECONDS = 0.4e-3
"""What a layer costs besides in a forward and backward pass, whatever its size, s: some eighty kernels."""

HOST_COPY = 6 * GB
"""Bytes/s between a GPU and ordinary memory of its host, which is not pinned."""

MEMORY_COPY = 5 * GB
"""Bytes/s of a plain copy in host memory, or through shared memory between processes."""

NETWORK = 10 * GB
"""Bytes/s between two nodes, for weights through MPI."""

NODE_LINK = 20 * GB
"""Bytes/s of a GPU to GPUs of other nodes, for collectives."""

DISK = 1 * GB
"""Bytes/s that a node writes to the shared file system."""
