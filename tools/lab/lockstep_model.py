"""Trainer and searcher that take turns in one process (in lockstep), on a whole model: staleness is exact.

Task and model are those of ``lab.skill``. Config, objective, schedules and log-probabilities are the
product's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lab import skill
from lab.lockstep import Queue, scored
from lab.runs import QUICKSTART, read_json, slug
from lab.sampling import Sampler
from tba_hpc.config import Config, load_config
from tba_hpc.config.variants import DecoupledPpo
from tba_hpc.core import schedules
from tba_hpc.core.batch import plan, staleness, take_groups, with_reference_power, with_top_logprobs
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.packing import pack
from tba_hpc.core.prompts import CompletedRequests, training_requests
from tba_hpc.core.types import BEHAVIOUR, Group, TrajectoryBatch
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, load_tokenizer
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import (
    Groups,
    Objective,
    ObjectiveOutput,
    RecordedGroups,
    figures,
    make_objective,
)
from tba_hpc.objectives.diagnostics import moments
from tba_hpc.objectives.policy_gradient import decoupled_ppo
from tba_hpc.run.files import write_atomic
from tba_hpc.run.signals import die_with
from tba_hpc.tasks import load_task

CPU = torch.device("cpu")

T = TypeVar("T")

PREFACE = (*skill.ONCE, "launch.searchers=1")
"""Overrides of every run; its own follow and win."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run. Equal settings give equal figures, bit for bit.

    overrides: of the config, as ``--set`` takes them. lag: k; after the first k steps data are k to 2k − 1
    steps old. With lag 0 they are fresh. every: steps between two greedy evaluations. problems: number of
    validation problems. published_proximal: whether π_prox of decoupled PPO is the policy published last,
    computed with its weights. fresh_groups: groups that are sampled per step for the replay buffer; None: as
    many as a step learns from, each learned from once.
    """

    overrides: tuple[str, ...] = ()
    lag: int = 10
    rate: float = skill.RATE
    seed: int = 0
    steps: int = 200
    every: int = 25
    problems: int = 256
    published_proximal: bool = False
    fresh_groups: int | None = None

    def config(self) -> Config:
        """Return the config. Raises ConfigError, or ValueError if completions would not be plain samples."""
        given = (f"model.path={skill.MODEL.path}", f"run.seed={self.seed}")
        size = (f"train.steps={self.steps}", f"task.options.validation_problems={self.problems}")
        constant = skill.constant(self.rate)
        config = load_config(QUICKSTART, [*given, *PREFACE, constant, *size, *self.overrides])
        of = config.generator
        asked = (of.temperature, of.top_p, of.min_tokens, of.tempered_range)
        if asked != (1, 1, 0, None) or config.model.policy_temperature != 1:
            raise ValueError(
                f"generator.temperature, top_p, min_tokens and tempered_range are {asked}, and the policy's "
                f"temperature {config.model.policy_temperature:g}: the lab knows (1, 1, 0, None) and 1 "
                "alone, leave them out"
            )
        return config


def measure(run: Run) -> dict[str, Any]:
    """Do a run; return its settings, ``curve``, ``series`` and ``seconds``.

    curve: list of (step, pass@1). series: figures of each step, by name; None where a step lacks a figure.
    seconds: processor time of generation, learning and evaluation.
    """
    torch.set_num_threads(1)
    world = Lockstep(run)
    curve: list[tuple[int, float]] = []
    series: dict[str, list[float | None]] = {}
    for step in range(run.steps + 1):
        if step % run.every == 0 or step == run.steps:
            curve.append((step, world.evaluate()))
        if step < run.steps:
            for name, value in world.step(step).items():
                so_far = series.setdefault(name, [])
                so_far += [None] * (step - len(so_far)) + [round(value, 6)]
    return {**asdict(run), "curve": curve, "series": series, "seconds": world.seconds}


def figures_of(wanted: Mapping[T, tuple[str, Run]], folder: Path) -> dict[T, dict[str, Any]]:
    """Return the figures of named runs, by the keys of ``wanted``; see ``kept``.

    Two runs are measured at a time, each in a process of its own.
    """
    spawned = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    end_with_us = (os.getpid(), signal.SIGKILL)
    with ProcessPoolExecutor(2, spawned, initializer=die_with, initargs=end_with_us) as pool:
        found = pool.map(kept, *zip(*wanted.values(), strict=True), [folder] * len(wanted))
        return dict(zip(wanted, found, strict=True))


def kept(name: str, run: Run, folder: Path) -> dict[str, Any]:
    """Return the figures of a run: those in its file, if it was measured with the same settings, or new ones.

    New ones are written to the file. name: name of the arm, for the name of the file.
    """
    what = f"lag{run.lag}-rate{run.rate:g}-steps{run.steps}-seed{run.seed}"
    path, settings = folder / f"{slug(name)}-{what}.json", json.loads(json.dumps(asdict(run)))
    found: Any = read_json(path)
    if found is None or settings != {key: found.get(key) for key in settings}:
        text = json.dumps(measure(run))
        write_atomic(path, text + "\n")
        found = json.loads(text)
        print(f"{path.stem}:", *(f"{100 * score:.0f}" for _, score in found["curve"]), flush=True)
    return found


class Lockstep:
    """A run in lockstep: its learner, sampler and data."""

    def __init__(self, run: Run) -> None:
        config = run.config()
        tokenizer = load_tokenizer(config.model.path)
        self.seconds = {"generation": 0.0, "learning": 0.0, "evaluation": 0.0}
        self._run, self._train = run, config.train
        self._task = load_task(config.task, tokenizer)
        self._learner = Learner(config, published_proximal=run.published_proximal)
        self._sampler = Sampler(
            load_policy(config.model.path, config.model.dtype),
            eos=tokenizer.eos_token_id,
            max_tokens=config.generator.max_tokens,
            seed=run.seed,
            top=config.train.score_centering,
        )
        self._requests = training_requests(config, self._task, 0, CompletedRequests())
        beta = config.train.value_beta
        self._data = (
            Queue(value_beta=beta)
            if run.fresh_groups is None
            else ReplayBuffer(config.buffer, run.seed, value_beta=beta)
        )
        self._published = (0, self._learner.publish())

    def step(self, step: int) -> dict[str, float]:
        """Sync if one is due, then take an optimizer step; return the figures of the step."""
        if step % max(1, self._run.lag) == 0:
            with self._timed("generation"):
                self._sync(step)
        with self._timed("learning"):
            train = self._train
            batch = self._data.sample(
                step, groups=train.prompts_per_step, group_size=train.completions_per_prompt
            )
            age, reward = float(staleness(batch, step).mean()), float(batch.reward_N.mean())
            return {"age": age, "reward": reward, **self._learner.step(batch, step)}

    def evaluate(self) -> float:
        """Return greedy pass@1 on the validation problems with the newest weights."""
        prompts = self._task.prompts("validation")
        with self._timed("evaluation"):
            weights, tokens = self._learner.weights(), [prompt.tokens for prompt in prompts]
            found = self._sampler.sample(weights, tokens, 1, greedy=True)
            rewards = [self._task.rewards(prompt, of) for prompt, of in zip(prompts, found, strict=True)]
        return float(np.mean(rewards))

    def _sync(self, step: int) -> None:
        """Generate for the steps until the next sync, with weights of the sync before; then publish.

        With lag 0 the newest weights generate.
        """
        if self._run.lag == 0:
            self._publish(step)
        fresh = self._run.fresh_groups or self._train.prompts_per_step
        groups = self._generate(fresh * max(1, self._run.lag))
        self._data.merge(scored(groups, self._task, None), step)
        self._publish(step)

    def _publish(self, step: int) -> None:
        self._published = (step, self._learner.publish())

    def _generate(self, count: int) -> list[Group]:
        version, weights = self._published
        requests = list(islice(self._requests, count))
        n = self._train.completions_per_prompt
        found = self._sampler.sample(weights, [request.prompt.tokens for request in requests], n)
        versions = np.full((n, 2), version, np.int32)
        return [Group(*answered, versions) for answered in zip(requests, found, strict=True)]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[what] += time.process_time() - began


class Learner:
    """Learner of one rank that computes the reference of each batch. It uses no DeepSpeed."""

    def __init__(self, config: Config, *, published_proximal: bool = False) -> None:
        train = self._train = config.train
        self.policy = load_policy(config.model.path, config.model.dtype)
        self._logprobs = PolicyLogprobs(self.policy)
        self._reference = (
            0,
            PolicyLogprobs(load_policy(config.model.path, config.model.dtype)),
        )
        self._proximal = (
            PolicyLogprobs(load_policy(config.model.path, config.model.dtype)) if published_proximal else None
        )
        self._objective = make_objective(train, max_tokens=config.generator.max_tokens)
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters(), betas=train.adam_betas, weight_decay=train.weight_decay
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Return a copy of the weights."""
        return {name: value.clone() for name, value in self.policy.state_dict().items()}

    def publish(self) -> Mapping[str, Tensor]:
        """Return a copy of the weights, and make it the weights of the proximal policy."""
        weights = self.weights()
        if self._proximal:
            self._proximal.model.load_state_dict(weights)
        return weights

    def step(self, batch: TrajectoryBatch, step: int) -> dict[str, float]:
        """Take an optimizer step, unless the gradient is not finite; return its figures."""
        power = schedules.reference_power(self._train, step)
        batch = with_reference_power(self._with_reference(batch, step), power)
        batch = with_top_logprobs(batch, self._train.score_centering)
        beta = schedules.beta(self._train, step)
        self._optimizer.zero_grad()
        sums: dict[str, float] = {}
        budget = self._train.tokens_per_micro_batch
        for part in plan(batch, rank=0, ranks=1, budget=budget, share_prompts=self._logprobs.shares_prompts):
            rows = take_groups(batch, part.groups)
            for name, value in self._backward(rows, batch, beta).items():
                share = len(rows) / len(batch)
                sums[name] = sums.get(name, 0.0) + share * float(value)
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), self._train.gradient_clip or float("inf")
        )
        if norm.isfinite():
            self._optimizer.param_groups[0]["lr"] = schedules.learning_rate(self._train, step)
            self._optimizer.step()
        found = figures(sums)
        found.pop("engine_gap", None)  # there is no engine
        return {**found, "grad_norm": float(norm)}

    def _backward(self, rows: TrajectoryBatch, batch: TrajectoryBatch, beta: float) -> Mapping[str, Tensor]:
        """Add the gradient of some groups of ``batch``; return their metrics."""
        mean_tokens = float(batch.action_length_N.mean())
        recorded = upload(RecordedGroups.of(rows), CPU)
        groups = Groups.of(_of(self._logprobs, rows), recorded, batch_tokens=mean_tokens)
        objective = self._decoupled(rows, recorded) if self._proximal else self._objective
        output = objective(groups, beta)
        (output.loss * len(rows) / len(batch)).backward()
        kl = groups.log_ratio_BK.detach().mean()
        return {"kl": kl, "loss": output.loss.detach(), **output.metrics}

    def _decoupled(self, rows: TrajectoryBatch, recorded: RecordedGroups) -> Objective:
        """Return decoupled PPO around the policy published last; metrics compare π_θ with the sampler."""
        assert self._proximal and isinstance(self._train.objective, DecoupledPpo)
        clip = self._train.objective.ratio_clip
        with torch.no_grad():
            proximal_BKL = Groups.of(_of(self._proximal, rows), recorded).policy_BKL

        def objective(groups: Groups, beta: float) -> ObjectiveOutput:
            output = decoupled_ppo(groups, beta, ratio_clip=clip, proximal_BKL=proximal_BKL)
            return replace(output, metrics={**output.metrics, **moments(groups)})

        return objective

    @torch.no_grad()
    def _with_reference(self, batch: TrajectoryBatch, step: int) -> TrajectoryBatch:
        wanted = schedules.reference(self._train, step)
        if wanted == BEHAVIOUR:
            return batch
        at, reference = self._reference
        if at != wanted:
            reference.model.load_state_dict(self.policy.state_dict())
            self._reference = (wanted, reference)
        return replace(batch, ref_logprobs=_of(reference, with_top_logprobs(batch, 0)).numpy())


def _of(logprobs: PolicyLogprobs, rows: TrajectoryBatch) -> Tensor:
    """Return the log-probabilities of completion tokens, float32 [T]; [T, 1 + C] with C likeliest tokens."""
    prompt_N = rows.record["prompt_row"]
    others_TC = rows.top_logprobs["token"]
    form = rows.action_T, logprobs.layout
    packed = upload(pack(rows.sequences, rows.prompt_length_N, prompt_N, *form, others_TC=others_TC), CPU)
    of_token = packed.sampled_A.shape[1:]
    return torch.zeros(len(rows.logprobs), *of_token).index_copy(0, packed.place_A, logprobs(packed))
