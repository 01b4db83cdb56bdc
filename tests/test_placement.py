"""Where ranks sit that no MPI numbers: by their index, or as srun numbers them in a step of both roles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.launch import placement
from tba_hpc.launch.placement import Placement


def config_of(trainers: int, searchers: int, **generator: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny"},
            "exchange": {"transport": "files"},
            "train": {"prompts_per_step": 4},
            "generator": generator,
            "launch": {"trainers": trainers, "searchers": searchers},
        }
    )


def step(monkeypatch: pytest.MonkeyPatch, rank: int, local: int) -> None:
    monkeypatch.setenv("SLURM_PROCID", str(rank))
    monkeypatch.setenv("SLURM_LOCALID", str(local))


@pytest.mark.parametrize(
    ("searchers_first", "role", "rank", "local", "index", "first_gpu"),
    [
        (False, "trainer", 0, 0, 0, 0),
        (False, "trainer", 1, 1, 1, 1),
        (False, "searcher", 2, 2, 0, 2),  # beside both trainers, whose GPUs come first
        (False, "searcher", 3, 3, 1, 4),
        (False, "searcher", 4, 0, 2, 0),  # on a node of its own
        (False, "searcher", 5, 1, 3, 2),
        (True, "searcher", 0, 0, 0, 0),
        (True, "searcher", 3, 1, 3, 2),
        (True, "trainer", 4, 0, 0, 0),  # the other component, on nodes of its own
        (True, "trainer", 5, 1, 1, 1),
    ],
)
def test_srun_numbers_the_ranks_of_a_step_over_both_roles(
    monkeypatch: pytest.MonkeyPatch,
    searchers_first: bool,
    role: Any,
    rank: int,
    local: int,
    index: int,
    first_gpu: int,
) -> None:
    step(monkeypatch, rank, local)
    monkeypatch.setenv("TBA_SEARCHERS_FIRST", str(int(searchers_first)))
    found = Placement.join(config_of(2, 4, tensor_parallel=2), role, None)
    assert (found.index, found.first_gpu, found.mpi) == (index, first_gpu, None)
    other = "trainer" if role == "searcher" else "searcher"
    which = "last" if searchers_first else "first"
    with pytest.raises(ConfigError, match=f"the {which} 2 ranks train; start 6 ranks"):
        Placement.join(config_of(2, 4), other, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "index", "first_gpu"), [("trainer", 1, 1), ("searcher", 0, 2), ("searcher", 1, 4)]
)
def test_ranks_of_one_machine_have_gpus_of_their_own(role: Any, index: int, first_gpu: int) -> None:
    assert Placement.join(config_of(2, 4, tensor_parallel=2), role, index).first_gpu == first_gpu


@pytest.mark.parametrize("opened", [1, 4])
def test_a_rank_that_cannot_have_its_gpu_alone_any_more_says_so(
    monkeypatch: pytest.MonkeyPatch, opened: int
) -> None:
    """Of four, the second; where MPI has started CUDA before, all four stay."""
    monkeypatch.setattr(placement, "_has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: opened, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    seat = Placement.join(config_of(1, 3), "searcher", 0)
    if opened == 1:
        seat.choose_gpus()
    else:
        with pytest.raises(
            ConfigError, match=r"use only GPU 5, but CUDA has already opened all 4 .*srun_arguments"
        ):
            seat.choose_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_a_rank_takes_its_own_mig_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as CUDA counts several instances
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c,MIG-d")
    Placement.join(config_of(1, 3), "searcher", 1).choose_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-c"


def test_a_given_index_counts_more_and_none_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch, 5, 1)
    assert Placement.join(config_of(1, 8), "searcher", 7).index == 7
    for role, rank in (("trainer", 1), ("searcher", 0), ("searcher", 3)):
        step(monkeypatch, rank, 0)
        with pytest.raises(
            ConfigError, match=rf"rank {rank} of this Slurm step is no {role}: .* start 3 ranks"
        ):
            Placement.join(config_of(1, 2), role, None)  # type: ignore[arg-type]
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.raises(ConfigError, match="give --index, or start it with srun"):
        Placement.join(config_of(1, 2), "searcher", None)
