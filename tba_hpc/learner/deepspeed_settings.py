"""DeepSpeed's own configuration: the settings that the learner needs, with ``train.deepspeed`` merged in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tba_hpc.config import Config

BUCKET_ELEMENTS = 128 << 20
"""Most parameters in one reduction of gradients: fewer take less memory but more messages."""


def deepspeed_settings(config: Config, parameters: int) -> dict[str, Any]:
    """Return all of DeepSpeed's settings for a model with this number of parameters.

    Only ``step`` ends an accumulation of gradients, whatever the micro-batches. An offloaded optimizer is
    torch's AdamW, too, because DeepSpeed's own would need a compiler.
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
    """Merge two trees of settings, recursively; ``theirs`` wins where both have a value."""
    both = {
        key: merged(ours[key], value)
        if isinstance(value, Mapping) and isinstance(ours[key], Mapping)
        else value
        for key, value in theirs.items()
        if key in ours
    }
    return {**ours, **theirs, **both}


def is_fused(device: torch.device) -> bool | None:
    """Tell whether AdamW updates all weights by a few large kernels: on a GPU. None: torch's default."""
    return True if device.type == "cuda" else None
