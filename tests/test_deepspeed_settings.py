"""What DeepSpeed is told: the learner's settings, and the user's merged into them."""

from __future__ import annotations

import re
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import DeepSpeedConfig

from tba_hpc.config import DEEPSPEED_SETTINGS, Config, ConfigError, parse_config
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


def test_every_setting_that_may_be_added_is_one_that_deepspeed_reads() -> None:
    sources = Path(deepspeed.__file__).parent.rglob("con*.py")  # config.py and constants.py
    text = "".join(source.read_text() for source in sources)
    assert [
        name for name in (*DEEPSPEED_SETTINGS, "wall_clock") if not re.search(rf"""["']{name}["']""", text)
    ] == ["wall_clock"]


def test_a_misspelt_setting_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(
        ConfigError, match=r"^train.deepspeed.wall_clock_breakdow is none of the settings that may be added: "
    ):
        config_with("wall_clock_breakdow=true")


def test_a_cpu_computes_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    use_tensor_cores(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == before == "highest"
