"""A training step as a GPU sees it: nothing waits for a value, and launches do not grow with the groups.

Without a GPU: tensors without values raise where one would have to come to the host, and operations are
counted as they are dispatched.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_worker import BETA, learner_of, make_batch, make_config, play
from test_batch import batch_of
from tiny_models import FAMILIES, make_family_model, make_random_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tba_hpc.config import Config, TrainSection
from tba_hpc.core.batch import plan
from tba_hpc.core.packing import Layout
from tba_hpc.core.types import TOP_LOGPROBS
from tba_hpc.learner import hf_model
from tba_hpc.learner.deepspeed_learner import _Work
from tba_hpc.learner.hf_model import PolicyLogprobs
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import OBJECTIVES, Groups, make_objective

CPU = torch.device("cpu")

SECTIONS = [
    *({"objective": name} for name in OBJECTIVES),
    *({"ratio_bound": bound} for bound in ("cap", "icepop", "dppo", "binary_kl", "taper")),
    {"objective": {"name": "grpo", "second_moment_limit": 0.04}},
    {"reference": "lagged"},
    *({"score_centering": 2, "ratio_bound": bound} for bound in ("none", "cap", "taper")),
]


OFTEN = ("qwen2",)
"""The family whose steps `make test` takes; the others differ from it in what no objective sees."""


@pytest.mark.parametrize("layout", ["padded", "varlen"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in OFTEN else pytest.mark.nightly) for kind in FAMILIES]
)
def test_no_value_comes_to_the_host_between_upload_and_gradient(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    """Of log-probabilities and every objective; tensors without values raise at each such place."""
    batch = make_batch(1)
    batch = replace(batch, top_logprobs=np.ones((len(batch.logprobs), 2), TOP_LOGPROBS))
    (part,) = plan(batch, rank=0, ranks=1, budget=100_000, share_prompts=True)
    config = AutoConfig.from_pretrained(make_family_model(tmp_path, kind))
    config._attn_implementation = "sdpa"
    with FakeTensorMode(allow_non_fake_inputs=True):
        logprobs = PolicyLogprobs(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        work = upload(_Work.of(part, batch, layout), CPU)
        (packed,) = work.passes
        policy_T = torch.zeros((len(batch.logprobs), 3)).index_copy(0, packed.place_A, logprobs(packed))
        groups = Groups.of(policy_T, work.recorded, batch_tokens=7.0)
        for section in SECTIONS:
            train = TrainSection.model_validate(section)
            loss = make_objective(train, max_tokens=24)(groups, BETA).loss
            torch.autograd.grad(loss, list(logprobs.parameters()), retain_graph=True, allow_unused=True)


STOPS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2"}
"""Operations after which the host waits for a GPU, and indexing by a mask, which looks for its places."""


class Counting(TorchDispatchMode):
    """Counts what a GPU would launch, which views are not, and what the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.stops = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            at is not None and at.dtype == torch.bool for at in args[1]
        )
        if name in STOPS or by_mask:
            self.stops[name] += 1
        elif not function.is_view:
            self.launches += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.engine
def test_a_step_stops_a_few_times_and_launches_as_often_for_many_groups(tmp_path: Path) -> None:
    """Thirty layers, sixteen groups of sixteen short completions, and then four of them."""
    model = make_random_model(tmp_path / "model", tied=True, hidden=32, layers=30, spread=0.15)
    config = make_config(model, ranks=1, context_length=64, tokens_per_micro_batch=16_384)
    play(_count, tmp_path, config, ranks=1)
    many, few = json.loads((tmp_path / "counts").read_text())
    assert sum(many["stops"].values()) <= 4, many  # and the figures, in one copy
    assert many["stops"] == few["stops"]
    assert few["launches"] == many["launches"] <= 6_000, (few, many)


def _count(folder: Path, rank: int, config: Config) -> None:
    chunk = hf_model.CHUNK_BYTES["cpu"]
    learner = learner_of(folder, rank, config)
    hf_model.CHUNK_BYTES["cpu"] = chunk  # what other tests' workers make small
    found = []
    for groups in (4, 16, 4):  # of the first, DeepSpeed makes more
        rng = np.random.default_rng(groups)
        lengths = np.full(groups, 9), rng.integers(20, 30, groups * 16)
        batch = batch_of(lengths[0].repeat(16), lengths[1], 16, rng)
        for ragged in (batch.prompts, batch.completions):
            ragged.values[:] %= 128
        with Counting() as counting:
            learner._step(batch, 1e-4, BETA)
        found.append({"launches": counting.launches, "stops": dict(counting.stops)})
    (folder / "counts").write_text(json.dumps(found[1:]))
    learner._close()
