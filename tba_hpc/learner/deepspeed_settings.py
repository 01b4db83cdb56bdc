"""DeepSpeed's own configuration: what the learner needs, and ``train.deepspeed`` merged into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tba_hpc.config import Config

BUCKET_ELEMENTS = 128 << 20
"""Most parameters in one reduction of gradients: memory against messages."""


def deepspeed_settings(config: Config, parameters: int) -> dict[str, Any]:
    """All of it, for a model of so many parameters.

    ``step`` alone ends an accumulation, whatever the micro-batches. An offloaded optimizer is torch's AdamW,
    too: DeepSpeed's own would need a compiler.
    """
    bucket = min(BUCKET_ELEMENTS, parameters)
    ours = {
        "train_micro_batch_size_per_gpu": 1,  # required, and unused: batches do not come from DeepSpeed
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.train.gradient_clip or 0.0,  # 0: no limit
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU at every forward pass
        "zero_optimization": {
            "stage": config.train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
        },
    }
    return merged(ours, config.train.deepspeed)


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both, recursively; what both have as ``theirs`` has it."""
    both = {
        key: merged(ours[key], value)
        if isinstance(value, Mapping) and isinstance(ours[key], Mapping)
        else value
        for key, value in theirs.items()
        if key in ours
    }
    return {**ours, **theirs, **both}


def is_fused(device: torch.device) -> bool | None:
    """Whether AdamW updates all weights by a few large kernels: on a GPU. None: torch's default."""
    return True if device.type == "cuda" else None
