"""The learner against plain torch on one process, its own restored self, and other numbers of ranks."""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_worker import (
    BETA,
    GROUP_SIZE,
    LEARNING_RATE,
    SPOILT_PROMPT,
    Plan,
    Run,
    join,
    log_to,
    make_batch,
    make_config,
    run,
    start,
)
from safetensors.torch import load_file
from tiny_models import make_random_model

from tba_hpc.backends.deepspeed_learner import Command, DeepSpeedLearner
from tba_hpc.backends.hf_model import load_policy, load_tokenizer
from tba_hpc.backends.trainer_group import Message, TrainerGroup
from tba_hpc.config import Config, LossNormaliser
from tba_hpc.ports import ExchangeError
from tba_hpc.types import TrajectoryBatch

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
    """The definition, a row at a time: sum of log-softmax of all logits/T at the completion tokens."""
    sums = []
    for row, prompt_length in enumerate(batch.prompt_length_N):
        tokens = torch.from_numpy(batch.sequences.row(row).astype(np.int64))
        logprobs = (model(input_ids=tokens[None]).logits[0] / temperature).log_softmax(-1)
        sums.append(logprobs[:-1].gather(1, tokens[1:, None])[prompt_length - 1 :].sum())
    return torch.stack(sums).view(-1, GROUP_SIZE)


def trajectory_balance_loss(model: torch.nn.Module, batch: TrajectoryBatch, case: Case) -> torch.Tensor:
    """METHOD: mean over rows of the squared residual, log Z as the group's mean without gradient."""
    ends = np.cumsum(batch.completion_length_N)[:-1]
    ref = torch.tensor([part.sum() for part in np.split(batch.ref_logprobs, ends)]).view(-1, GROUP_SIZE)
    reward = torch.from_numpy(batch.reward_N).view(-1, GROUP_SIZE)
    excess = sequence_logprobs(model, batch, case.temperature) - ref - reward / BETA
    loss = (excess - excess.mean(1, keepdim=True).detach()).square().mean() * LOSS_SCALE
    return loss / batch.completion_length_N.mean() if case.loss_normaliser == "batch_tokens" else loss


def effective_size_and_gap(
    model: torch.nn.Module, batch: TrajectoryBatch, temperature: float
) -> tuple[float, float]:
    """(Σw)²/(N·Σw²), and what a token of an on-policy row lacks; the behaviour's log-probabilities are 0."""
    with torch.no_grad():
        logprob_N = sequence_logprobs(model, batch, temperature).flatten().double()
    weight_N, on_policy_N = logprob_N.exp(), torch.from_numpy(batch.on_policy_N)
    gap = -logprob_N[on_policy_N].sum() / batch.completion_length_N[batch.on_policy_N].sum()
    return float(weight_N.sum() ** 2 / (len(weight_N) * weight_N.square().sum())), float(gap)


LOSS_SCALE = BETA / 2
"""The objective's loss is ½β·δ²."""


class Plain:
    """The tests' known answer: an ordinary single-process AdamW loop over the same batches.

    ``clear`` marks the weights whose gradient was never lost in rounding: Adam divides a gradient by its own
    size, so that rounding decides which way the others step (float32 and float64 differ there, too).
    """

    def __init__(self, folder: Path, case: Case) -> None:
        train = make_config(folder, ranks=1).train
        self.model = load_policy(str(folder), "float32")
        self.weights = dict(self.model.named_parameters())
        self.clear = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.weights.items()}
        before = {name: p.detach().clone() for name, p in self.weights.items()}
        optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, train.adam_betas, weight_decay=train.weight_decay
        )
        self.losses, self.norms, self.clip = [], [], case.gradient_clip or math.inf
        self.figures: list[tuple[float, float]] = []
        for seed in STEPS:
            optimizer.zero_grad()
            self.figures.append(effective_size_and_gap(self.model, make_batch(seed), case.temperature))
            loss = trajectory_balance_loss(self.model, make_batch(seed), case)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            optimizer.step()
            self.losses.append(loss.item())
            self.norms.append(norm.item())
            for name, p in self.weights.items():
                self.clear[name] &= (p.grad == 0) | (p.grad.abs() > 1e-5 * p.grad.abs().max())
        self.moved = {name: (p.detach() - before[name]).norm() for name, p in self.weights.items()}

    def check(self, done: Run) -> None:
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


@dataclass(frozen=True)
class Case:
    """A way to train: number of ranks and settings."""

    ranks: int
    zero_stage: int
    tied: bool = False
    dtype: str = "float32"
    groups_per_micro_batch: int = 1
    gradient_checkpointing: bool = False
    gradient_clip: float | None = 5.0
    loss_normaliser: LossNormaliser = "sum"
    temperature: float = 1.0

    def config(self, model: Path, *, ranks: int | None = None) -> Config:
        settings = {key: value for key, value in asdict(self).items() if key not in ("ranks", "tied")}
        return make_config(model, ranks=ranks or self.ranks, **settings)

    def __str__(self) -> str:
        tied, clip = "tied" if self.tied else "untied", "" if self.gradient_clip else "-unclipped"
        heat = "" if self.temperature == 1 else f"-at-{self.temperature}"
        return f"zero{self.zero_stage}-{self.dtype}-{self.ranks}-ranks-{tied}{clip}{heat}"


ONE_RANK = Case(1, 2, groups_per_micro_batch=3)
ZERO_1 = Case(2, 1, tied=True)
ZERO_2 = Case(2, 2)
ZERO_3 = Case(2, 3, tied=True, gradient_checkpointing=True)
UNCLIPPED = Case(2, 2, gradient_clip=None, loss_normaliser="batch_tokens")
TEMPERED = Case(2, 3, temperature=0.7)
BF16 = [Case(2, 2, dtype="bfloat16"), Case(1, 1, dtype="bfloat16"), Case(1, 3, dtype="bfloat16")]


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


@pytest.mark.parametrize("case", [ONE_RANK, ZERO_1, ZERO_2, ZERO_3, UNCLIPPED, TEMPERED], ids=str)
def test_learner_equals_a_plain_adamw_loop(runs: Runs, case: Case) -> None:
    runs.plain(case).check(runs.whole(case))


@pytest.mark.parametrize("case", [ZERO_1, ZERO_2, ZERO_3, *BF16], ids=str)
def test_a_restored_run_continues_bit_for_bit(runs: Runs, case: Case) -> None:
    whole, restored = runs.whole(case), runs.restored(case)
    assert restored.metrics == whole.metrics[2:]
    assert (restored.folder / "weights").read_bytes() == (whole.folder / "weights").read_bytes()


@pytest.mark.parametrize("case", [ZERO_1, ZERO_2, ZERO_3, BF16[0]], ids=str)
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


@pytest.mark.parametrize(("case", "ranks"), [(ZERO_2, 1), (ZERO_3, 1), (ONE_RANK, 2)], ids=str)
def test_a_checkpoint_loads_with_another_number_of_ranks(runs: Runs, case: Case, ranks: int) -> None:
    restored = runs.restored(case, ranks=ranks)
    np.testing.assert_allclose(restored.losses(), runs.plain(case).losses[2:], rtol=1e-5)
    expected = runs.whole(case).weights("weights")
    for name, weight in restored.weights("weights").items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)
    leftovers = [path.name for path in runs.whole(case).folder.iterdir() if "universal" in path.name]
    assert leftovers == []


class Payload:
    """What a stranger's file would have a reader do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "*_optim_states.pt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strangers_checkpoint_executes_nothing(runs: Runs, tmp_path: Path, name: str, ranks: int) -> None:
    """Loaded by one rank that wrote it, or converted for two."""
    case = ONE_RANK
    folder, mark = tmp_path / "checkpoint", tmp_path / "executed"
    shutil.copytree(runs.whole(case).folder / "checkpoint", folder)
    (file,) = folder.glob(f"zero/{name}")
    states = torch.load(file, weights_only=False)
    torch.save({**states, "more": Payload(mark)}, file)
    config, plan = case.config(runs.model(case.tied), ranks=ranks), [("load", str(folder)), *REST]
    with pytest.raises(AssertionError, match="holds more than the data of a checkpoint, and none of it was"):
        run(tmp_path / "run", config, plan)
    assert not mark.exists()
    torch.load(file, weights_only=False)  # and it would have been
    assert mark.exists()


@pytest.mark.parametrize("case", [ZERO_2, ZERO_3], ids=str)
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


def test_a_trainer_needs_little_memory(runs: Runs) -> None:
    assert runs.whole(ONE_RANK).peak_bytes(0) < 1.2e9


def test_a_full_disk_ends_a_save_with_one_sentence(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    process = start(_save_beyond_a_limit, tmp_path, ONE_RANK.config(runs.model(False)))
    assert join([process]) == [1]
    assert f"StateError: cannot write the checkpoint {tmp_path}" in (tmp_path / "log-0").read_text()


def _save_beyond_a_limit(folder: Path, config: Config) -> None:
    log_to(folder / "log-0")
    learner = DeepSpeedLearner.create(config, rank=0, ranks=1, store=folder / "store", deadline=60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    learner.save(folder)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"trainer rank 0 waited 0 s for trainer ranks \[1, 2\] of 3"):
        TrainerGroup.join(tmp_path, rank=0, ranks=3, deadline=0.1)


def test_a_follower_notices_that_its_leader_died(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    processes = [start(_die_or_hear, tmp_path, rank) for rank in range(2)]
    assert join(processes) == [9, 1]
    assert "the leader, trainer rank 0, has died or was cut off" in (tmp_path / "log-1").read_text()


@pytest.mark.parametrize("command", [Command.SAVE, Command.EXPORT], ids=lambda command: command.name)
def test_a_death_amidst_a_common_action_is_no_full_disk(runs: Runs, tmp_path: Path, command: Command) -> None:
    (tmp_path / "store").mkdir()
    config = ZERO_2.config(runs.model(False))
    processes = [start(_die_or_follow, tmp_path, rank, config, command) for rank in range(2)]
    assert join(processes) == [9, 1]
    error = "ExchangeError: trainer rank 1 cannot go on: trainer rank 0 has died or was cut off"
    assert error in (tmp_path / "log-1").read_text()


def _die_or_follow(folder: Path, rank: int, config: Config, command: Command) -> None:
    log_to(folder / f"log-{rank}")
    learner = DeepSpeedLearner.create(config, rank=rank, ranks=2, store=folder / "store", deadline=60)
    if rank == 0:
        learner._group.tell(Message(command, payload=os.fsencode(folder)))
        os._exit(9)
    learner.follow(lambda: np.empty(0, np.uint8))


def _die_or_hear(folder: Path, rank: int) -> None:
    log_to(folder / f"log-{rank}")
    group = TrainerGroup.join(folder / "store", rank=rank, ranks=2, deadline=60)
    if rank == 0:
        group.tell(Message(3, (0.25, -1.5), b"payload"))
        os._exit(9)
    assert group.hear() == Message(3, (0.25, -1.5), b"payload")
    group.hear()
