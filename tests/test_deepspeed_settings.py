"""What DeepSpeed is told: the learner's settings, and the user's merged into them."""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedConfig

from tba_hpc.config import Config, parse_config
from tba_hpc.learner.deepspeed_settings import deepspeed_settings
from tba_hpc.learner.hf_model import use_tensor_cores


def config_with(*changes: str) -> Config:
    return parse_config({"model": {"path": "m"}}, [f"train.deepspeed.{change}" for change in changes])


def test_deepspeed_reads_both() -> None:
    """In its own words: what the learner needs, and what the user asks for."""
    config = config_with("zero_optimization.overlap_comm=true", "zero_optimization.reduce_bucket_size=1000")
    read = DeepSpeedConfig(deepspeed_settings(config, parameters=500))
    assert read.zero_config.overlap_comm and read.zero_config.reduce_bucket_size == 1000
    assert read.zero_config.allgather_bucket_size == 500 and read.zero_config.stage == 2
    assert read.gradient_clipping == 1.0 and read.bfloat16_config.enabled
    assert not read.timers_config.enabled


def test_a_cpu_computes_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    use_tensor_cores(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == before == "highest"
