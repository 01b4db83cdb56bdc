"""Arguments for CUDA graphs, which no engine on a CPU has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba_hpc.engine import vllm_engine
from tba_hpc.engine.vllm_engine import graph_sizes, with_graphs


@pytest.mark.parametrize("sequences", [1, 3, 6, 24, 192, 255, 384, 600, 640, 1000])
def test_every_batch_of_sequences_has_a_graph_of_about_its_size(sequences: int) -> None:
    sizes = graph_sizes(sequences)
    assert sizes[-1] == max(sequences, min(2 * sequences, 512)) and sizes == sorted(set(sizes))
    assert all(above - below <= max(8, below / 8) for below, above in pairwise(sizes))
    assert len(sizes) <= 44


def test_sizes_that_the_user_names_stay_alone() -> None:
    """vLLM refuses a list beside a largest size that is not its last."""
    assert with_graphs({}, 4) == {"cudagraph_capture_sizes": [1, 2, 4, 8], "compilation_config": {}}
    assert with_graphs({"quantization": "fp8", "compilation_config": 3}, 1, "PIECEWISE") == {
        "cudagraph_capture_sizes": [1, 2],
        "quantization": "fp8",
        "compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"},
    }
    for own in ({"max_cudagraph_capture_size": 64}, {"compilation_config": {"cudagraph_capture_sizes": [8]}}):
        assert with_graphs(own, 640) == {"compilation_config": {}, **own}


def test_vllm_takes_the_sizes_as_they_are() -> None:
    from vllm.config import CompilationConfig, VllmConfig

    sizes = graph_sizes(600)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=CompilationConfig(
            cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=sizes
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=600),
        uniform_decode_query_len=1,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    found = config.compilation_config
    assert (found.cudagraph_capture_sizes, found.max_cudagraph_capture_size) == (sizes, 600)


@pytest.mark.parametrize(("on_gpu", "precision"), [(True, "high"), (False, None)])
def test_an_engine_multiplies_float32_as_the_learner_does(
    on_gpu: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TF32 on a GPU; on a CPU exactly, as the other tests rely on."""
    environment: dict[str, str] = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    monkeypatch.setattr(vllm_engine.os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    vllm_engine.prepare_environment()
    assert environment.get("VLLM_FLOAT32_MATMUL_PRECISION") == precision
    assert ("TORCHDYNAMO_DISABLE" in environment) != on_gpu
