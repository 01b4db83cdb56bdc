"""The learner, of all weights or of an adapter, against plain torch, itself restored, and other ranks."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import tabular_run
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_optimizer_state
from killer import Killer
from learner_worker import (
    BETA,
    GROUP_SIZE,
    LEARNING_RATE,
    SPOILT_PROMPT,
    Plan,
    Run,
    learner_of,
    log_to,
    make_batch,
    make_config,
    play,
    run,
    shared_window,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_family_model, make_random_model
from transformers import AutoModelForCausalLM

from tba_hpc.config import Config, LoraSection, TrainSection, parse_config
from tba_hpc.config.variants import LossNormaliser
from tba_hpc.core.batch import plan, take_groups, with_top_logprobs
from tba_hpc.core.packing import Layout
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import BEGIN, TOP_LOGPROBS, TrajectoryBatch
from tba_hpc.exchange.hdf5_shards import write_arrays
from tba_hpc.learner import deepspeed_learner
from tba_hpc.learner.adapter import FOLDER, Adaptable, Adapter, layers_of
from tba_hpc.learner.deepspeed_learner import _Work
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, load_tokenizer
from tba_hpc.learner.lora import Lora
from tba_hpc.learner.trainer_group import Command, TrainerGroup
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import OBJECTIVES, make_objective
from tba_hpc.run.checkpoints import (
    Checkpoints,
    StateError,
    TrainerState,
    checkpoint_folders,
    damaged_checkpoints,
    read_state,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.inventory import damage, inventory, with_checksum

pytestmark = pytest.mark.engine

STEPS = (1, 2, 3, 4)
WHOLE: Plan = [
    ("step", 1),
    ("step", 2),
    ("save", "checkpoint"),
    ("step", 3),
    ("step", 4),
    ("write", "weights"),
]
REST: Plan = [("step", 3), ("step", 4), ("write", "weights")]


def sequence_logprobs(model: torch.nn.Module, batch: TrajectoryBatch, temperature: float) -> torch.Tensor:
    """Sums over the completions' sampled tokens, [B, K]."""
    sampled = np.split(batch.action_T, batch.completions.offsets[1:-1])
    rows = zip(token_logprobs(model, batch, temperature), sampled, strict=True)
    sums = [logprobs[torch.from_numpy(mask)].sum() for logprobs, mask in rows]
    return torch.stack(sums).view(-1, GROUP_SIZE)


def token_logprobs(
    model: torch.nn.Module, batch: TrajectoryBatch, temperature: float = 1.0
) -> Iterator[torch.Tensor]:
    """The definition, a row at a time: log-softmax of all logits/T at the completion tokens."""
    for row, prompt_length in enumerate(batch.prompt_length_N):
        tokens = torch.from_numpy(batch.sequences.row(row).astype(np.int64))
        logprobs = (model(input_ids=tokens[None]).logits[0] / temperature).log_softmax(-1)
        yield logprobs[:-1].gather(1, tokens[1:, None])[prompt_length - 1 :, 0]


def trajectory_balance_loss(model: torch.nn.Module, batch: TrajectoryBatch, case: Case) -> torch.Tensor:
    """METHOD: mean over rows of the squared residual, log Z as the group's mean without gradient."""
    ref_T, ends = np.where(batch.action_T, batch.ref_logprobs, 0), np.cumsum(batch.completion_length_N)[:-1]
    ref = torch.tensor([part.sum() for part in np.split(ref_T, ends)]).view(-1, GROUP_SIZE)
    reward = torch.from_numpy(batch.reward_N).view(-1, GROUP_SIZE)
    excess = sequence_logprobs(model, batch, case.temperature) - ref - reward / BETA
    loss = (excess - excess.mean(1, keepdim=True).detach()).square().mean() * LOSS_SCALE
    return loss / batch.action_length_N.mean() if case.loss_normaliser == "batch_tokens" else loss


def effective_size_and_gap(
    model: torch.nn.Module, batch: TrajectoryBatch, temperature: float
) -> tuple[float, float]:
    """(Σw)²/(N·Σw²), and what a token of an on-policy row lacks; the behaviour's log-probabilities are 0."""
    with torch.no_grad():
        logprob_N = sequence_logprobs(model, batch, temperature).flatten().double()
    weight_N, on_policy_N = logprob_N.exp(), torch.from_numpy(batch.on_policy_N)
    gap = -logprob_N[on_policy_N].sum() / batch.action_length_N[batch.on_policy_N].sum()
    return float(weight_N.sum() ** 2 / (len(weight_N) * weight_N.square().sum())), float(gap)


LOSS_SCALE = BETA / 2
"""The objective's loss is ½β·δ²."""


ADAPTER = LoraSection(rank=4, alpha=12.0)
SCALE = 3.0


class Plain:
    """The tests' known answer: an ordinary single-process AdamW loop over the same batches.

    It knows neither DeepSpeed nor peft: the tensors of an adapter lie beside the weights of the model.

    ``clear`` marks the weights whose gradient was never lost in rounding: Adam divides a gradient by its own
    size, so that rounding decides which way the others step (float32 and float64 differ there, too).
    """

    def __init__(self, folder: Path, case: Case) -> None:
        train = make_config(folder, ranks=1).train
        self.model = load_policy(str(folder), "float32")
        self.weights = dict(self.model.named_parameters())
        if case.lora:
            self.weights = new_adapter(folder)
            Adaptable(self.model.requires_grad_(False)).attach(Adapter.of(self.weights.items(), SCALE))
        self.clear = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.weights.items()}
        before = {name: p.detach().clone() for name, p in self.weights.items()}
        optimizer = torch.optim.AdamW(
            self.weights.values(), LEARNING_RATE, train.adam_betas, weight_decay=train.weight_decay
        )
        self.losses, self.norms, self.clip = [], [], case.gradient_clip or math.inf
        self.figures: list[tuple[float, float]] = []
        for seed in STEPS:
            optimizer.zero_grad()
            self.figures.append(effective_size_and_gap(self.model, make_batch(seed), case.temperature))
            loss = trajectory_balance_loss(self.model, make_batch(seed), case)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self.clip)
            optimizer.step()
            self.losses.append(loss.item())
            self.norms.append(norm.item())
            for name, p in self.weights.items():
                self.clear[name] &= (p.grad == 0) | (p.grad.abs() > 1e-5 * p.grad.abs().max())
        self.moved = {name: (p.detach() - before[name]).norm() for name, p in self.weights.items()}

    def check(self, done: Run) -> None:
        assert done.weights("weights").keys() == self.weights.keys()
        np.testing.assert_allclose(done.losses(), self.losses, rtol=1e-5)
        np.testing.assert_allclose([step["grad_norm"] for step in done.metrics], self.norms, rtol=1e-4)
        figures = [(step["ess"], step["engine_gap"]) for step in done.metrics]
        np.testing.assert_allclose(figures, self.figures, rtol=1e-3)
        assert min(self.norms) > self.clip or self.clip == math.inf, "the gradient clip was meant to matter"
        for name, weight in done.weights("weights").items():
            expected, clear = self.weights[name].detach(), self.clear[name]
            assert clear.float().mean() > 0.99, name
            torch.testing.assert_close(weight[clear], expected[clear], atol=1e-5, rtol=0)
            assert (weight - expected).norm() < 1e-2 * self.moved[name], name


def new_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """As a run begins with, each tensor a leaf that gradients go to."""
    adapter = Lora(load_policy(str(folder), "float32"), ADAPTER, path=str(folder), seed=0).adapter
    return {name: value.detach().clone().requires_grad_() for name, value in adapter.items()}


@dataclass(frozen=True)
class Case:
    """A way to train: number of ranks and settings."""

    ranks: int
    zero_stage: int
    tied: bool = False
    dtype: str = "float32"
    tokens_per_micro_batch: int | None = None
    gradient_checkpointing: bool = False
    gradient_clip: float | None = 5.0
    loss_normaliser: LossNormaliser = "sum"
    temperature: float = 1.0
    offload: bool = False
    sub_group_size: int | None = None
    lora: bool = False

    def config(self, model: Path, *, ranks: int | None = None) -> Config:
        others = ("ranks", "tied", "offload", "sub_group_size", "lora")
        settings = {key: value for key, value in asdict(self).items() if key not in others}
        zero = OFFLOADED if self.offload else {}
        zero |= {"sub_group_size": self.sub_group_size} if self.sub_group_size else {}
        settings["deepspeed"] = {"zero_optimization": zero} if zero else {}
        config = make_config(model, ranks=ranks or self.ranks, context_length=LONGEST, **settings)
        adapted = config.model.model_copy(update={"lora": ADAPTER if self.lora else None})
        return config.model_copy(update={"model": adapted})

    def __str__(self) -> str:
        tied, clip = "tied" if self.tied else "untied", "" if self.gradient_clip else "-unclipped"
        host = "-offloaded" if self.offload else ""
        host += f"-in-{self.sub_group_size}" if self.sub_group_size else ""
        by = f"-by-{self.tokens_per_micro_batch}" if self.tokens_per_micro_batch else ""
        heat = "" if self.temperature == 1 else f"-at-{self.temperature}"
        lora = "-adapter" if self.lora else ""
        return f"zero{self.zero_stage}-{self.dtype}-{self.ranks}-ranks-{tied}{clip}{heat}{by}{host}{lora}"


OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}

LONGEST = 32
"""Tokens that a sequence of a batch has at most."""

ONE_RANK = Case(1, 2)
ZERO_1 = Case(2, 1, tied=True)
ZERO_2 = Case(2, 2)
ZERO_3 = Case(2, 3, tied=True, gradient_checkpointing=True)
UNCLIPPED = Case(2, 2, gradient_clip=None, loss_normaliser="batch_tokens")
TEMPERED = Case(2, 3, temperature=0.7)
BY_TOKENS = [Case(1, 2, tokens_per_micro_batch=LONGEST), Case(2, 3, tied=True, tokens_per_micro_batch=48)]
HOST = [Case(2, 2, offload=True), Case(2, 3, tied=True, offload=True)]
SUB_GROUPS = Case(2, 3, sub_group_size=1000)
"""ZeRO-3 makes several of a model whose part on a rank has more than 1e9 weights, each with its own step."""

BF16 = [Case(2, 2, dtype="bfloat16"), Case(1, 1, dtype="bfloat16"), Case(1, 3, dtype="bfloat16")]

LORA, LORA_ZERO_2 = replace(ZERO_3, lora=True), replace(ZERO_2, lora=True)
LORA_BF16 = replace(BF16[2], tied=True, lora=True)
"""An adapter is saved in another way where parameters are shared out."""


@dataclass(frozen=True)
class Runs:
    """Models, plain loops and whole runs, each made once."""

    folder: Path
    model: Callable[[bool], Path]
    plain: Callable[[Case], Plain]
    whole: Callable[[Case], Run]

    def restored(self, case: Case, *, ranks: int | None = None) -> Run:
        """Steps 3 and 4 taken by fresh processes, perhaps of another number, after loading steps 1 and 2."""
        load = ("load", str(self.whole(case).folder / "checkpoint"))
        config = case.config(self.model(case.tied), ranks=ranks)
        return run(self.folder / f"{case}-restored-{ranks}", config, [load, *REST])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("learner")
    model = cache(lambda tied: make_random_model(folder / f"model-{tied}", tied=tied))
    plain = cache(lambda case: Plain(model(case.tied), case))
    whole = cache(lambda case: run(folder / str(case), case.config(model(case.tied)), WHOLE))
    return Runs(folder, model, plain, whole)


@pytest.mark.parametrize("layout", ["padded", "rectangle"])
@pytest.mark.parametrize("budget", [None, 30])
def test_sequences_of_an_episode_are_computed_as_by_themselves(
    tmp_path: Path, layout: Layout, budget: int | None
) -> None:
    batch = make_batch(1)
    given = np.flatnonzero(~batch.action_T)
    batch.logprobs[given[::2]] = BEGIN
    model = load_policy(str(make_random_model(tmp_path, tied=False)), "float32")
    parts = plan(batch, rank=0, ranks=1, budget=budget, share_prompts=layout == "padded")
    work = [_Work.of(part, batch, layout) for part in parts]
    assert sum(len(part.passes) for part in work) > (budget is not None)
    with torch.no_grad():
        for part, packed in zip(parts, work, strict=True):
            groups = take_groups(batch, part.groups)
            found_T = np.full(len(groups.logprobs), np.nan)
            for one in packed.passes:
                found_T[one.place_A] = PolicyLogprobs(model)(upload(one, torch.device("cpu"))).numpy()
            np.testing.assert_allclose(found_T, _by_themselves(model, groups), atol=1e-5)


def _by_themselves(model: torch.nn.Module, batch: TrajectoryBatch) -> np.ndarray:
    """Log-probabilities of sampled tokens, each sequence a pass of its own; NaN elsewhere."""
    found_T = np.full(len(batch.logprobs), np.nan)
    for row, (start, end) in enumerate(pairwise(batch.completions.offsets.tolist())):
        begins = [start, *(start + np.flatnonzero(batch.begin_T[start:end])).tolist(), end]
        before = batch.prompts.row(batch.record["prompt_row"][row])
        for first, last in pairwise(begins):
            tokens = np.concatenate([before, batch.completions.values[first:last]]).astype(np.int64)
            logprobs = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1).numpy()
            for place in first + np.flatnonzero(batch.action_T[first:last]):
                at = len(before) + place - first
                found_T[place] = logprobs[at - 1, tokens[at]]
            before = before[:0]
    return found_T


def nightly(*cases: object) -> list[Any]:
    """Cases, or tuples of what a test takes."""
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*one, marks=pytest.mark.nightly) for one in given]


@pytest.mark.parametrize(
    "case",
    [
        *(ONE_RANK, ZERO_2, ZERO_3, LORA),
        *nightly(ZERO_1, UNCLIPPED, TEMPERED, SUB_GROUPS, LORA_ZERO_2, *BY_TOKENS, *HOST),
    ],
    ids=str,
)
def test_learner_equals_a_plain_adamw_loop(runs: Runs, case: Case) -> None:
    runs.plain(case).check(runs.whole(case))


@pytest.mark.parametrize(
    "case", [ZERO_3, BF16[0], LORA, *nightly(ZERO_1, ZERO_2, *BF16[1:], *HOST, LORA_BF16)], ids=str
)
def test_a_restored_run_continues_bit_for_bit(runs: Runs, case: Case) -> None:
    whole, restored = runs.whole(case), runs.restored(case)
    assert restored.metrics == whole.metrics[2:]
    assert (restored.folder / "weights").read_bytes() == (whole.folder / "weights").read_bytes()


@pytest.mark.parametrize("case", [ZERO_3, *nightly(ZERO_1, ZERO_2, BF16[0], BY_TOKENS[1])], ids=str)
def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(runs: Runs, case: Case) -> None:
    """Neither weights nor optimizer, bit by bit: NaN, and a reward whose square alone overflows."""
    plan: Plan = [("step", 1), ("step", 2), ("write", "before"), ("spoilt", "nan"), ("write", "after")]
    config = case.config(runs.model(case.tied))
    done = run(runs.folder / f"{case}-spoilt", config, [*plan, ("spoilt", "1e25"), *REST])
    assert (done.folder / "after").read_bytes() == (done.folder / "before").read_bytes()
    assert (done.folder / "weights").read_bytes() == (runs.whole(case).folder / "weights").read_bytes()
    assert [step["skipped_steps"] for step in done.metrics] == [0, 0, 1, 2, 2, 2]
    assert [step for step, row in enumerate(done.metrics) if not math.isfinite(row["grad_norm"])] == [2, 3]
    for rank in range(case.ranks):
        told = (done.folder / f"log-{rank}").read_text()
        assert told.count(f"the loss of the groups of prompts {SPOILT_PROMPT} is not finite") == 2


@pytest.mark.parametrize(("case", "ranks"), [(ZERO_3, 1), *nightly((ONE_RANK, 2), (SUB_GROUPS, 1))], ids=str)
def test_a_checkpoint_loads_with_another_number_of_ranks(runs: Runs, case: Case, ranks: int) -> None:
    restored = runs.restored(case, ranks=ranks)
    np.testing.assert_allclose(restored.losses(), runs.plain(case).losses[2:], rtol=1e-5)
    expected = runs.whole(case).weights("weights")
    for name, weight in restored.weights("weights").items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)
    leftovers = [path.name for path in runs.whole(case).folder.iterdir() if "universal" in path.name]
    assert leftovers == []


# --- An adapter ---


def test_a_checkpoint_for_another_base_is_refused(runs: Runs, tmp_path: Path) -> None:
    """One of the same shape, whose embedding alone differs: by a bit."""
    checkpoint = runs.whole(LORA_BF16).folder / "checkpoint"
    other = make_random_model(tmp_path / "other", tied=True)
    model = load_policy(str(other), "float32")
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 5] *= 1.01
    model.save_pretrained(other)
    sentence = (
        f"StateError: {checkpoint} holds an adapter for other weights than those of model.path={other}: "
    )
    with pytest.raises(AssertionError, match=sentence):
        run(tmp_path / "run", LORA_BF16.config(other), [("load", str(checkpoint))])


def test_published_weights_and_checkpoints_are_of_the_adapters_size(runs: Runs, tmp_path: Path) -> None:
    """A checkpoint has its weights, their masters and AdamW's two moments: 14 bytes each in bfloat16.

    And nothing of the base, whose embedding has three names: it is the output layer's, too.
    """
    done, folder = runs.whole(LORA_BF16), runs.model(LORA_BF16.tied)
    full = run(tmp_path / "full", replace(LORA_BF16, lora=False).config(folder), [("save", "checkpoint")])
    adapter = sum(parameter.numel() for parameter in new_adapter(folder).values())
    assert done.layout.nbytes == 2 * adapter
    small, large = (
        sum(file.stat().st_size for file in one.folder.joinpath("checkpoint").rglob("*.pt"))
        for one in (done, full)
    )
    per_tensor = 1000  # what DeepSpeed says of each
    assert 14 * adapter < small < 14 * adapter + per_tensor * len(done.layout.slots) < 0.6 * large


def test_an_export_holds_the_policy_merged_and_the_adapter(runs: Runs, tmp_path: Path) -> None:
    """Both load by the libraries' own means, to the logits of the base with the adapter beside it."""
    folder, load = runs.model(LORA.tied), ("load", str(runs.whole(LORA).folder / "checkpoint"))
    done = run(tmp_path / "run", LORA.config(folder), [load, *REST, ("export", "export")])
    assert done.layout.lora and done.layout.lora.scale == SCALE
    model, tokens = load_policy(str(folder), "float32"), torch.arange(3, 60)[None]
    before = model(tokens).logits
    Adaptable(model).attach(Adapter.of(done.weights("weights").items(), SCALE))
    expected = model(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(done.folder / "export", dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=0)
    assert (
        load_file(done.folder / "export/model.safetensors").keys() == dict(merged.named_parameters()).keys()
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worn = PeftModel.from_pretrained(base, done.folder / "export" / FOLDER)
    assert torch.equal(worn(tokens).logits, expected) and not torch.equal(expected, before)
    again = Adapter.load(done.folder / "export" / FOLDER)
    assert again.scale == SCALE and again.layers.keys() == set(layers_of(done.layout))


# --- Files that nobody may trust, and exports ---


class Payload:
    """What a stranger's file would have a reader do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("mp_rank_00_model_states.pt", 1),
        ("*_optim_states.pt", 2),
        *nightly(("*_optim_states.pt", 1)),
    ],
)
def test_a_strangers_checkpoint_executes_nothing(runs: Runs, tmp_path: Path, name: str, ranks: int) -> None:
    """Loaded by one rank that wrote it, or converted for two."""
    case = ONE_RANK
    folder, mark = tmp_path / "checkpoint", tmp_path / "executed"
    shutil.copytree(runs.whole(case).folder / "checkpoint", folder)
    (file,) = folder.glob(f"zero/{name}")
    states = torch.load(file, weights_only=False)
    torch.save({**states, "more": Payload(mark)}, file)
    config, plan = case.config(runs.model(case.tied), ranks=ranks), [("load", str(folder)), *REST]
    refused = r"holds more than the data of a checkpoint, and none of it was executed \(posix.system\)"
    with pytest.raises(AssertionError, match=refused):
        run(tmp_path / "run", config, plan)
    assert not mark.exists()
    torch.load(file, weights_only=False)  # and it would have been
    assert mark.exists()


def test_a_checkpoint_that_no_resume_would_read_is_refused_when_it_is_written(
    runs: Runs, tmp_path: Path
) -> None:
    """By the rank that wrote it, here a follower; the leader raises what that rank found."""
    (tmp_path / "checkpoint").mkdir()
    config = ZERO_1.config(runs.model(ZERO_1.tied))
    play(_save_what_is_refused, tmp_path, config)


def _save_what_is_refused(folder: Path, rank: int, config: Config) -> None:
    """A version of DeepSpeed whose state has a class that the second rank's reader does not know."""
    learner = learner_of(folder, rank, config)
    if rank == 0:
        write = learner.save(folder / "checkpoint")
        with pytest.raises(
            StateError, match=r"rank_1_.*written, but a resume .* holds deepspeed\..*ZeroStageEnum"
        ):
            write()
        learner.close()
    else:
        deepspeed_learner.PLAIN_DATA.remove(ZeroStageEnum)
        learner.follow(None)


@pytest.mark.parametrize("case", [ZERO_3, *nightly(ZERO_2)], ids=str)
def test_export_holds_the_trained_weights(runs: Runs, case: Case, tmp_path: Path) -> None:
    """Under the layout's names, and a user's from_pretrained and tokenizer load it."""
    load = ("load", str(runs.whole(case).folder / "checkpoint"))
    plan: Plan = [load, *REST, ("export", "export"), ("export", "export")]  # a second one replaces the first
    done = run(tmp_path / "run", case.config(runs.model(case.tied)), plan)
    weights, export = done.weights("weights"), done.folder / "export"
    stored = load_file(export / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in stored)
    assert not list(done.folder.glob(".export*"))
    tokens = torch.from_numpy(load_tokenizer(str(export)).encode("3+4=7").astype(np.int64))[None]
    logits = load_policy(str(export), "float32")(tokens).logits
    torch.testing.assert_close(logits, runs.plain(case).model(tokens).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt2", *nightly(*sorted(FAMILIES.keys() - {"qwen3_moe", "gpt2"}))]
)
def test_a_family_is_trained_and_exported(family: str, tmp_path: Path) -> None:
    """Every weight; the export has those that are published, under the names of the folder they came in."""
    first = make_family_model(tmp_path / family, family)
    plan: Plan = [("step", 1), ("step", 2), ("write", "weights"), ("export", "export")]
    done = run(tmp_path / "run", make_config(first, ranks=1, context_length=LONGEST, weight_decay=0.0), plan)
    before, after = (load_file(folder / "model.safetensors") for folder in (first, done.folder / "export"))
    assert before.keys() == after.keys()
    assert not [name for name, weight in after.items() if torch.equal(weight, before[name])]
    policy = load_policy(str(done.folder / "export"), "float32")
    published = done.weights("weights")
    assert published.keys() == dict(policy.named_parameters()).keys()
    assert all(torch.equal(published[name], weight) for name, weight in policy.named_parameters())


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("lora", [None, {"targets": ["q_proj"]}], ids=["whole", "adapter"])
def test_an_export_holds_what_is_stored_but_no_parameter(
    zero_stage: int, lora: object, tmp_path: Path
) -> None:
    """GLM's choice of experts depends on biases in float32 that no gradient changes."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    routes = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    first = make_family_model(tmp_path / "model", "glm4_moe", num_key_value_heads=1, **experts, **routes)
    stored = load_file(first / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored[bias] = torch.tensor([0.1, -0.2, 0.3, 0.0])
    save_file(stored, first / "model.safetensors", {"format": "pt"})
    config = make_config(first, ranks=1, dtype="bfloat16", zero_stage=zero_stage)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"lora": lora and LoraSection(**lora)})}
    )
    done = run(tmp_path / "run", config, [("step", 1), ("export", "export")])
    exported = load_file(done.folder / "export" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert torch.equal(exported[bias], stored[bias]) and exported[bias].dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_not_chosen_at_random(checkpointing: bool, tmp_path: Path) -> None:
    """As they are in this model in training mode, where it also adds noise to what it routes."""
    routes = {"num_local_experts": 4, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3}
    folder = make_family_model(tmp_path / "model", "phimoe", num_key_value_heads=1, **routes)
    config = make_config(folder, ranks=1, gradient_checkpointing=checkpointing)
    done = run(tmp_path / "run", config, [("step", 1)])
    loss = trajectory_balance_loss(load_policy(str(folder), "float32"), make_batch(1), ONE_RANK)
    np.testing.assert_allclose(done.losses(), loss.item(), rtol=1e-5)


def test_master_weights_keep_updates_below_a_bfloat16_ulp(runs: Runs, tmp_path: Path) -> None:
    """A step moves a weight by 5e-5, a tenth of half a bfloat16 ulp at 0.125: only float32 adds those up."""
    case = BF16[0]
    plan: Plan = [("write", "before"), *[("step", 1)] * 30, ("write", "after")]
    done = run(tmp_path / "run", case.config(runs.model(case.tied)), plan)
    before, after = done.weights("before"), done.weights("after")
    name = "model.layers.0.mlp.up_proj.weight"
    large = before[name].abs() > 0.125
    assert (after[name] != before[name])[large].float().mean() > 0.2
    assert done.losses()[-1] < 0.9 * done.losses()[0]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_positions_turn_by_exact_frequencies_in_bfloat16(runs: Runs, case: Case, tmp_path: Path) -> None:
    """DeepSpeed has cast buffers with the weights: frequencies would then be 0.4 % off."""
    play(_require_exact_buffers, tmp_path, case.config(runs.model(case.tied)), ranks=case.ranks)


def _require_exact_buffers(folder: Path, rank: int, config: Config) -> None:
    learner = learner_of(folder, rank, config)
    exact = dict(load_policy(config.model.path, "float32").named_buffers())
    for name, buffer in learner._policy.named_buffers():
        assert torch.equal(buffer, exact[name]) and buffer.dtype == torch.float32, name
    assert exact and next(learner._policy.parameters()).dtype == torch.bfloat16
    if rank == 0:
        learner.close()
    else:
        learner.follow(None)


def test_a_trainer_needs_little_memory(runs: Runs) -> None:
    assert runs.whole(ONE_RANK).peak_bytes(0) < 1.2e9


@pytest.mark.parametrize("case", [ZERO_3, *nightly(ZERO_1, BF16[0])], ids=str)
def test_a_checkpoint_written_beside_training_is_of_its_moment(
    runs: Runs, tmp_path: Path, case: Case
) -> None:
    """Two steps are taken before the copies are known to be on disk, and none of them is in the files."""
    begin: Plan = [("step", 1), ("step", 2), ("snapshot", "checkpoint")]
    config = case.config(runs.model(case.tied))
    done = run(tmp_path / "run", config, [*begin, *REST, ("written", "checkpoint")])
    whole = runs.whole(case)
    assert (done.folder / "weights").read_bytes() == (whole.folder / "weights").read_bytes()

    checkpoint = done.folder / "checkpoint"
    lines = (checkpoint / "lines").read_text()
    summed = {line.split(" ", 2)[2] for line in lines.splitlines()}
    assert summed == {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.pt")}
    (checkpoint / "COMPLETE").write_text(with_checksum(inventory(checkpoint, known=lines)))
    assert damage(checkpoint) == ""

    restored = run(tmp_path / "restored", config, [("load", str(checkpoint)), *REST])
    assert restored.metrics == whole.metrics[2:]
    assert (restored.folder / "weights").read_bytes() == (whole.folder / "weights").read_bytes()


@pytest.mark.parametrize("transport", ["mpi", *nightly("files")])
def test_publishing_holds_a_bucket_of_parameters_at_a_time(
    runs: Runs, tmp_path: Path, transport: str
) -> None:
    """Under ZeRO-3; and the weights are those of the run that gathers all at once, to the bit."""
    config = ZERO_3.config(runs.model(ZERO_3.tied))
    exchange = config.exchange.model_copy(update={"transport": transport})
    config = config.model_copy(update={"exchange": exchange})
    play(_write_by_buckets, tmp_path, config)
    whole = runs.whole(ZERO_3)
    assert (tmp_path / "window").read_bytes() == (whole.folder / "weights").read_bytes()
    largest = max(slot.end - slot.start for slot in whole.layout.slots)
    for rank in range(2):
        peaks = json.loads((tmp_path / f"peaks-{rank}").read_text())
        assert len(peaks) > 3 and max(peaks) <= max(SMALL_BUCKET, largest) < whole.layout.nbytes / 2
        assert sum(peaks) == whole.layout.nbytes


SMALL_BUCKET = 30_000


def _write_by_buckets(folder: Path, rank: int, config: Config) -> None:
    """The steps of ``WHOLE``, and a publish; notes the bytes that are whole at a time."""
    learner = learner_of(folder, rank, config)
    deepspeed_learner.BUCKET_BYTES = SMALL_BUCKET
    gathered, peaks = deepspeed_learner.GatheredParameters, list[int]()

    def whole() -> set[int]:
        return {id(p) for p in learner._parameters.values() if p.ds_status == ZeroParamStatus.AVAILABLE}

    @contextmanager
    def noting(parameters: list[torch.nn.Parameter], *, enabled: bool) -> Iterator[None]:
        before = whole()  # small ones stay as the last step has left them
        with gathered(parameters, enabled=enabled):
            assert whole() <= before | {id(p) for p in parameters}
            peaks.append(sum(p.numel() * p.element_size() for p in parameters))
            yield

    deepspeed_learner.GatheredParameters = noting
    if rank == 0:
        (folder / "window").write_bytes(bytes(learner.layout.nbytes))
        for seed in STEPS:
            learner.step(make_batch(seed), learning_rate=LEARNING_RATE, beta=BETA)
        learner.write_weights(shared_window(folder / "window", learner.layout))()
        learner.close()
    else:
        window = partial(shared_window, folder / "window", learner.layout)
        learner.follow(window if config.one_world else None)
    (folder / f"peaks-{rank}").write_text(json.dumps(peaks))


@pytest.mark.parametrize("full", [1, *nightly(0)])
def test_a_disk_that_is_full_for_one_rank_is_told_by_the_leader_and_the_next_save_has_room(
    runs: Runs, tmp_path: Path, full: int
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    config = ZERO_2.config(runs.model(False))
    play(_save_with_one_full, tmp_path, config, full)
    assert (
        (tmp_path / "told")
        .read_text()
        .startswith(
            f"cannot write the checkpoint {tmp_path / 'first'} (the disk or quota is full); free space"
        )
    )
    written = {path.name for path in (tmp_path / "second").rglob("*") if path.is_file()}
    assert {"ranks.json", "zero_to_fp32.py"} < written and sum(name.endswith(".pt") for name in written) == 3


def _save_with_one_full(folder: Path, rank: int, config: Config, full: int) -> None:
    learner = learner_of(folder, rank, config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_files = learner._write_files

    def write_then_make_room(*arguments: object) -> str:
        try:
            return write_files(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    learner._write_files = write_then_make_room
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    if rank == 0:
        with pytest.raises(DiskFullError) as caught:
            learner.save(folder / "first")()
        (folder / "told").write_text(str(caught.value))
        learner.save(folder / "second")()
        learner.close()
    else:
        learner.follow(lambda: np.empty(0, np.uint8))


@pytest.mark.parametrize("rank, nth", [(0, 12), (1, 2), *nightly((0, 1))])
def test_a_rank_killed_while_a_checkpoint_is_written_leaves_the_one_before(
    runs: Runs, tmp_path: Path, rank: int, nth: int
) -> None:
    directory = RunDir.create(tabular_run.make_config(tmp_path))
    config = ZERO_2.config(runs.model(False))
    codes = [-signal.SIGKILL if place == rank else 1 for place in range(2)]
    play(_checkpoint_and_die, tmp_path, config, directory.path, rank, nth, codes=codes)
    other = (tmp_path / f"log-{1 - rank}").read_text()
    assert "ExchangeError: trainer rank" in other
    (folder,) = checkpoint_folders(directory, complete=True)
    assert read_state(folder).step == 2 and damaged_checkpoints(directory) == {}
    restored = run(tmp_path / "restored", config, [("load", str(folder)), *REST])
    expected = runs.whole(ZERO_2).folder / "weights"
    assert (restored.folder / "weights").read_bytes() == expected.read_bytes()


def _checkpoint_and_die(folder: Path, rank: int, config: Config, path: Path, killed: int, nth: int) -> None:
    """Rank ``killed`` ends as it is about to change the disk for the ``nth`` time after the first save."""
    learner = learner_of(folder, rank, config)
    directory = RunDir.open(path)
    if rank == 1:
        if killed == 1:
            killer = Killer(directory.checkpoints / "step-000003", nth)
        learner.follow(lambda: np.empty(0, np.uint8))
        return
    checkpoints = Checkpoints(directory, 2, write_arrays)
    for step in (1, 2):
        learner.step(make_batch(step), learning_rate=LEARNING_RATE, beta=BETA)
    checkpoints.save(TrainerState(step=2), learner, {}).result(60)
    learner.step(make_batch(3), learning_rate=LEARNING_RATE, beta=BETA)
    if killed == 0:
        killer = Killer(directory.checkpoints, nth)
    saved = checkpoints.save(TrainerState(step=3), learner, {})
    for step in (4, 5):
        learner.step(make_batch(step), learning_rate=LEARNING_RATE, beta=BETA)
    saved.result(60)
    del killer


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"trainer rank 0 waited 0 s for trainer ranks \[1, 2\] of 3"):
        TrainerGroup(tmp_path, rank=0, ranks=3, deadline=0.1)


def test_a_follower_notices_that_its_leader_died(tmp_path: Path) -> None:
    play(_die_or_hear, tmp_path, codes=(9, 1))
    assert "the leader, trainer rank 0, has died, hangs or was cut off" in (tmp_path / "log-1").read_text()


@pytest.mark.parametrize("command", ["save", *nightly("export")])
def test_a_death_amidst_a_common_action_is_no_full_disk(runs: Runs, tmp_path: Path, command: str) -> None:
    config = ZERO_2.config(runs.model(False))
    play(_die_or_follow, tmp_path, config, command, codes=(9, 1))
    error = "ExchangeError: trainer rank 1 cannot go on: trainer rank 0 has died, hangs or was cut off"
    assert error in (tmp_path / "log-1").read_text()


def test_a_follower_logs_where_it_hangs(runs: Runs, tmp_path: Path) -> None:
    """Its leader sends a command in which it does not take part, and dies later."""
    config = ZERO_2.config(runs.model(False))
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"timeout_seconds": 10})})
    play(_die_or_follow, tmp_path, config, "save", 1.5 * config.launch.stack_seconds, codes=(9, 1))
    text = (tmp_path / "log-1").read_text()
    assert text.count("Timeout (") == 1 and " in _execute" in text


def _die_or_follow(folder: Path, rank: int, config: Config, command: str, seconds: float = 0) -> None:
    learner = learner_of(folder, rank, config)
    if rank == 0:
        learner._group.send(Command(command, (str(folder),)))
        time.sleep(seconds)
        os._exit(9)
    learner.follow(lambda: np.empty(0, np.uint8))


def _die_or_hear(folder: Path, rank: int) -> None:
    log_to(folder / f"log-{rank}")
    group = TrainerGroup(folder / "store", rank=rank, ranks=2, deadline=60)
    if rank == 0:
        group.send(Command("step", (0.1, -1.5, 3, "text"), {"numbers": np.arange(3)}))
        os._exit(9)
    heard = group.receive()
    assert (heard.name, heard.arguments) == ("step", (0.1, -1.5, 3, "text"))
    np.testing.assert_array_equal(heard.arrays["numbers"], np.arange(3))
    group.receive()


# --- Micro-batches by tokens ---

SETTINGS: list[dict[str, Any]] = [
    *({"objective": name} for name in OBJECTIVES),
    {"objective": "trajectory_balance", "score_centering": 3},
    {"objective": "rloo", "score_centering": 2, "ratio_bound": "cap"},
    {"objective": "trajectory_balance", "loss_normaliser": "batch_tokens"},
    *({"ratio_bound": bound} for bound in ("cap", "icepop", "taper")),
    {"objective": {"name": "grpo", "second_moment_limit": 0.04}},
]

BUDGETS = (LONGEST, 48, 10_000)
"""Several groups are split; one is; none is, and all are one micro-batch."""


@pytest.mark.parametrize(("ranks", "stage", "settings"), [(1, 2, SETTINGS), (2, 3, SETTINGS[-5:])])
def test_a_split_group_has_the_gradient_of_a_whole_one(
    tmp_path: Path, ranks: int, stage: int, settings: list[dict[str, Any]]
) -> None:
    """And loss and metrics, for every objective; Adam's first moment with β₁ = 0 is the gradient.

    Over two ranks for those that hang on all tokens of a batch or of a completion.

    Weights as large as a model's usually are: with larger ones rounding is told apart from nothing else.
    """
    model = make_random_model(tmp_path / "model", tied=False, spread=0.15)
    config = Case(ranks, stage, gradient_clip=None).config(model)
    train = config.train.model_copy(update={"adam_betas": (0.0, 0.99), "weight_decay": 0.0})
    config = config.model_copy(update={"train": train})
    with torch.no_grad():
        rows = token_logprobs(load_policy(str(model), "float32"), make_batch(7))
        own_T = torch.cat(list(rows)).numpy()
    np.save(tmp_path / "behaviour", own_T + np.random.default_rng(0).normal(0, 2, len(own_T)))
    play(_gradients, tmp_path, config, settings, ranks=ranks)
    found = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    for number, (objective, (whole, *split)) in enumerate(zip(settings, found, strict=True)):
        gradients = [np.load(tmp_path / f"{number}-{budget}.npy") for budget in (None, *BUDGETS)]
        assert np.linalg.norm(gradients[0]) > 1e-3, objective
        for gradient, metrics in zip(gradients[1:], split, strict=True):
            assert np.linalg.norm(gradient - gradients[0]) < 1e-6 * np.linalg.norm(gradients[0]), objective
            assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-7), objective


def _gradients(folder: Path, rank: int, config: Config, tried: list[dict[str, Any]]) -> None:
    """Be a rank: a step at a learning rate of 0 for every objective and budget; note what rank 0 sees."""
    learner = learner_of(folder, rank, config)
    behaviour = np.load(folder / "behaviour.npy").astype(np.float32)
    batch = make_batch(7)
    batch = replace(batch, logprobs=np.where(batch.action_T, behaviour, np.float32(np.nan)))
    batch.record["value"] = np.random.default_rng(0).random(len(batch), np.float32)
    top = np.empty((len(behaviour), 3), TOP_LOGPROBS)
    top["token"], top["logprob"] = np.random.default_rng(1).integers(3, 90, top.shape), (-1, -2, -4)
    batch = replace(batch, top_logprobs=top)
    for number, settings in enumerate(tried):
        asked = TrainSection(**settings)
        keys = ("objective", "ratio_bound", "loss_normaliser", "score_centering")
        objective = {key: getattr(asked, key) for key in keys}
        found = []
        for budget in (None, *BUDGETS):
            train = config.train.model_copy(update={**objective, "tokens_per_micro_batch": budget})
            learner._config = config.model_copy(update={"train": train})
            learner._objective = make_objective(train, max_tokens=24)
            found.append(learner._step(with_top_logprobs(batch, train.score_centering), 0.0, BETA))
            gradient = [safe_get_full_optimizer_state(p, "exp_avg") for p in learner._parameters.values()]
            if rank == 0:
                np.save(
                    folder / f"{number}-{budget}", torch.cat([part.flatten() for part in gradient]).numpy()
                )
        if rank == 0:
            with (folder / "metrics").open("a") as file:
                file.write(json.dumps(found) + "\n")
    learner._close()


@pytest.mark.parametrize("ranks", [2, *nightly(1)])
def test_the_engine_computes_no_more_tokens_than_the_budget(runs: Runs, tmp_path: Path, ranks: int) -> None:
    """Rows times the longest, as the model itself gets them; twice where groups are split, else once."""
    config = Case(ranks, 3).config(runs.model(False))
    play(_note_tokens, tmp_path, config, ranks=ranks)
    noted = [json.loads((tmp_path / f"shapes-{rank}").read_text()) for rank in range(ranks)]
    for budget, shapes in zip(BUDGETS, zip(*noted, strict=True), strict=True):
        assert len({len(of_rank) for of_rank in shapes}) == 1
        for of_rank in shapes:
            assert all(rows * width <= budget for rows, width, _ in of_rank)
            first = [shape for *shape, gradient in of_rank if not gradient]
            second = [shape for *shape, gradient in of_rank if gradient]
            assert bool(first) == (budget < 10_000) and first == second[: len(first)]


def _note_tokens(folder: Path, rank: int, config: Config) -> None:
    """Be a rank: a step for each budget; note rows and tokens of every pass, and whether with gradient."""
    learner, noted = learner_of(folder, rank, config), list[list[tuple[int, int, bool]]]()

    def note(module: torch.nn.Module, arguments: object, keywords: dict[str, torch.Tensor]) -> None:
        rows, width = keywords["input_ids"].shape
        noted[-1].append((rows, width, torch.is_grad_enabled()))

    learner._policy.base_model.register_forward_pre_hook(note, with_kwargs=True)
    for budget in BUDGETS:
        noted.append([])
        train = config.train.model_copy(update={"tokens_per_micro_batch": budget})
        learner._config = config.model_copy(update={"train": train})
        learner._step(make_batch(1), LEARNING_RATE, BETA)
    (folder / f"shapes-{rank}").write_text(json.dumps(noted))
    learner._close()


# --- DeepSpeed's own settings ---


@pytest.mark.parametrize(("case", "ranks"), [(ZERO_3, 2), *nightly((ZERO_2, 2), (ZERO_3, 1))], ids=str)
def test_the_adamw_of_a_gpu_takes_the_same_steps_and_resumes(
    runs: Runs, tmp_path: Path, case: Case, ranks: int
) -> None:
    """Bit for bit on as many ranks as have written it; torch has the same kernel for CPUs."""
    model = runs.model(case.tied)
    whole = run(tmp_path / "whole", case.config(model), WHOLE, fused=True)
    runs.plain(case).check(whole)
    rest: Plan = [("load", str(whole.folder / "checkpoint")), *REST]
    again = run(tmp_path / "again", case.config(model, ranks=ranks), rest, fused=True)
    if ranks == case.ranks:
        assert (again.folder / "weights").read_bytes() == (whole.folder / "weights").read_bytes()
    for name, weight in again.weights("weights").items():
        torch.testing.assert_close(weight, whole.weights("weights")[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, *nightly(1)])
def test_an_optimizer_goes_to_the_host_and_to_fewer_ranks_on_a_resume(
    runs: Runs, tmp_path: Path, ranks: int
) -> None:
    """Written by two ranks without offload; read with it."""
    rest: Plan = [("load", str(runs.whole(ZERO_2).folder / "checkpoint")), *REST]
    found = run(tmp_path / "run", HOST[0].config(runs.model(False), ranks=ranks), rest).weights("weights")
    for name, weight in runs.whole(ZERO_2).weights("weights").items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)


def test_a_model_is_shared_out_while_it_is_loaded(runs: Runs, tmp_path: Path) -> None:
    """Never more than a module of it is whole on a rank; put together it is the model as loaded whole."""
    folders = [runs.model(False), *(make_family_model(tmp_path / kind, kind) for kind in FAMILIES)]
    configs = [ZERO_3.config(folder) for folder in folders] + [BF16[2].config(runs.model(True))]
    play(_load_in_parts, tmp_path, configs)
    for number, config in enumerate(configs):
        policy = load_policy(config.model.path, config.model.dtype)
        plain = {name: weight.detach() for name, weight in policy.named_parameters()}
        modules = [list(module.parameters(recurse=False)) for module in policy.modules()]
        largest = max(sum(weight.numel() for weight in weights) for weights in modules)
        for rank in range(2):
            kept, peaks = json.loads((tmp_path / f"kept-{number}-{rank}").read_text())
            assert max(peaks) <= largest and len(peaks) > 10
            assert kept == {name: math.ceil(weight.numel() / 2) for name, weight in plain.items()}
            found = load_file(tmp_path / f"whole-{number}-{rank}")
            assert found.keys() == plain.keys()
            assert all(torch.equal(found[name], plain[name]) for name in plain), config.model.path
            buffers = load_file(tmp_path / f"buffers-{number}-{rank}")
            for name, buffer in policy.named_buffers():  # bfloat16 would not equal the float32 of frequencies
                assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name


def _load_in_parts(folder: Path, rank: int, configs: list[Config]) -> None:
    log_to(folder / f"log-{rank}")
    group = TrainerGroup(folder / "store", rank=rank, ranks=2, deadline=60)
    gathered = deepspeed.zero.GatheredParameters
    for number, config in enumerate(configs):
        peaks: list[int] = []

        def noting(parameters: list[torch.nn.Parameter], **options: object) -> object:
            peaks.append(sum(parameter.ds_numel for parameter in parameters))  # noqa: B023
            return gathered(parameters, **options)

        deepspeed.zero.GatheredParameters = noting
        policy = deepspeed_learner._load_policy(config)
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        save_file(buffers, folder / f"buffers-{number}-{rank}")
        weights = dict(policy.named_parameters())
        assert all(weight.numel() == 0 for weight in weights.values())
        kept = {name: weight.ds_tensor.numel() for name, weight in weights.items()}
        (folder / f"kept-{number}-{rank}").write_text(json.dumps([kept, peaks]))
        with gathered(list(weights.values())):
            whole = {name: weight.detach().clone() for name, weight in weights.items()}
        save_file(whole, folder / f"whole-{number}-{rank}")
    group.leave()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "zero_optimization.offload_everything=true",
            "DeepSpeed refuses train.deepspeed: 1 validation error for DeepSpeedZeroConfig offload_",
        ),
        (
            "zero_optimization.mics_shard_size=2",
            "DeepSpeed refuses train.deepspeed: MiCS ZeRO-3 sharding has",
        ),
        ("communication_data_type=fp8", "DeepSpeed refuses train.deepspeed: Invalid communication_data_type"),
    ],
)
def test_a_setting_that_deepspeed_refuses_is_one_sentence(
    runs: Runs, tmp_path: Path, given: str, sentence: str
) -> None:
    tree = ONE_RANK.config(runs.model(False)).model_dump(mode="json")
    config = parse_config(tree, [f"train.deepspeed.{given}"])
    play(learner_of, tmp_path, config, ranks=1, codes=[1])
    told = (tmp_path / "log-0").read_text()
    assert f"ConfigError: {sentence}" in told
