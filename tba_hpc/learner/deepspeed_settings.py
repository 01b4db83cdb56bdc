"""The configuration of DeepSpeed: settings that the learner needs, merged with the user's train.deepspeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tba_hpc.config import Config

BUCKET_ELEMENTS = 128 << 20
"""Largest number of parameters whose gradients DeepSpeed reduces at once.

A smaller number takes less memory, but more messages.
"""


def deepspeed_settings(config: Config, parameters: int) -> dict[str, Any]:
    """Return all of DeepSpeed's settings for a model.

    parameters: the number of trained parameters, or an upper bound.

    Gradients accumulate over any number of micro-batches, until the engine's ``step``. Even if
    train.deepspeed offloads the optimizer to the CPU, it is torch's AdamW, because DeepSpeed's own would need
    a compiler.
    """
    bucket = min(BUCKET_ELEMENTS, parameters)
    ours = {
        "train_micro_batch_size_per_gpu": 1,  # required but unused: DeepSpeed makes no batches here
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.train.gradient_clip or 0.0,  # 0: no limit
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU at every forward pass
        "zero_optimization": {
            "stage": config.train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
        },
    }
    return merged(ours, config.train.deepspeed)


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested dictionaries of settings; where both have a value, that of ``theirs`` is taken."""
    both = {
        key: merged(ours[key], value)
        if isinstance(value, Mapping) and isinstance(ours[key], Mapping)
        else value
        for key, value in theirs.items()
        if key in ours
    }
    return {**ours, **theirs, **both}


def is_fused(device: torch.device) -> bool | None:
    """Return AdamW's argument ``fused``: True on a GPU, to update all weights by few kernels; else None."""
    return True if device.type == "cuda" else None
