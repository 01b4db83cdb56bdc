"""Trainer and searchers in lockstep on an enumerable policy: real buffer, objectives, generator and learner.

So staleness and the number of searchers are exact, not the outcome of a race for the cores.

Shape letters as in tools/lab/tabular.py, and: M words of a prompt that are rewarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from lab.tabular import Table, TabularGenerator, TabularReference, TabularTask
from lab.tabular_learner import TabularLearner
from tba_hpc.config import BufferSection, TrainSection
from tba_hpc.core import schedules
from tba_hpc.core.batch import staleness
from tba_hpc.core.buffer import ReplayBuffer, soft_values
from tba_hpc.core.ports import Task
from tba_hpc.core.prompts import CompletedRequests, PromptOrder
from tba_hpc.core.types import (
    BEHAVIOUR,
    LIVE_RECORD,
    Group,
    Publication,
    Request,
    Sampling,
    ScoredGroup,
    Trajectories,
    TrajectoryBatch,
    WeightUpdate,
    as_record,
)

REFERENCE_SCALE = 0.3
"""Standard deviation of the reference's logits."""

DEFAULTS = BufferSection()


@dataclass(frozen=True)
class SparseTable(Table):
    """Reward 1 for ``modes`` words of full length per prompt, any two of which differ in most letters.

    The reference is close to uniform, so that its target gives every rewarded word some of its mass.
    """

    modes: int = 8

    @cached_property
    def ref_logits_PSV(self) -> np.ndarray:
        """float32."""
        rng = np.random.default_rng([self.seed, 1])
        return REFERENCE_SCALE * rng.standard_normal(self.shape, np.float32)

    @cached_property
    def reward_PC(self) -> np.ndarray:
        """float32."""
        reward_PC = np.zeros((self.prompts, len(self.completions)), np.float32)
        np.put_along_axis(reward_PC, self.modes_PM, 1.0, axis=1)
        return reward_PC

    @cached_property
    def modes_PM(self) -> np.ndarray:
        """int64: which completions are rewarded."""
        rng = np.random.default_rng([self.seed, 2])
        return np.array([self._scattered(rng) for _ in range(self.prompts)])

    def _scattered(self, rng: np.random.Generator) -> list[int]:
        """Random words of full length, each far from those before."""
        words: list[np.ndarray] = []
        while len(words) < self.modes:
            word = rng.integers(self.letters, size=self.length, dtype=np.int32)
            if all((word != other).sum() > self.length // 2 for other in words):
                words.append(word)
        return [self.index(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run.

    groups_per_step: prompts that each searcher answers during an optimizer step, with ``completions``
    completions each. buffer: None to train on every group once, in order, and duplicates too; B and K are
    then what one searcher generates. ahead: searchers get weights before they generate for the next steps,
    not after, so that data are 0 … k − 1 steps old instead of k … 2k − 1, as with TBA.
    """

    table: Table
    train: TrainSection
    buffer: BufferSection | None = DEFAULTS
    sync_every: int = 1
    searchers: int = 1
    groups_per_step: int = 8
    completions: int = 16
    ahead: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """After ``step`` steps.

    trajectories: generated so far. found: distinct rewarded ones among them, of all prompts.
    staleness: mean over the last batch, steps.
    """

    step: int
    trajectories: int
    found: int
    staleness: float
    policy_PC: np.ndarray


def train(setup: Setup, *, every: int) -> Iterator[Moment]:
    """The start, then the policy after every ``every`` steps."""
    return Lockstep(setup).run(every)


class Lockstep:
    """The state of a run."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._learner = TabularLearner(setup.table, setup.train)
        beta = setup.train.value_beta
        self._data = (
            ReplayBuffer(setup.buffer, setup.seed, value_beta=beta)
            if setup.buffer
            else Queue(value_beta=beta)
        )
        self._task, self._reference = TabularTask(setup.table), TabularReference(setup.table)
        order = PromptOrder(setup.seed, setup.table.prompts)
        self._searchers = [
            (TabularGenerator(setup.table, seed=setup.seed + 1000 * s), self._requests(order, s))
            for s in range(setup.searchers)
        ]
        self._generated = 0
        self._found: set[tuple[int, bytes]] = set()

    def run(self, every: int) -> Iterator[Moment]:
        """All steps of ``train.steps``."""
        train = self._setup.train
        yield Moment(0, 0, 0, 0.0, self._learner.policy_PC)
        for step in range(train.steps):
            if step % self._setup.sync_every == 0:
                self._sync(step)
            batch = self._data.sample(
                step, groups=train.prompts_per_step, group_size=train.completions_per_prompt
            )
            self._learner.step(
                batch,
                learning_rate=schedules.learning_rate(train, step),
                beta=schedules.beta(train, step),
            )
            if (step + 1) % every == 0:
                age = float(staleness(batch, step).mean())
                yield Moment(step + 1, self._generated, len(self._found), age, self._learner.policy_PC)

    def _sync(self, step: int) -> None:
        """Merge what was generated under the weights of the sync before, hand out the newest."""
        if self._setup.ahead:
            self._publish(step)
        for index, (generator, requests) in enumerate(self._searchers):
            for request in islice(requests, self._setup.groups_per_step * self._setup.sync_every):
                generator.submit(request)
            self._merge(index, _all_groups(generator), step)
        if not self._setup.ahead:
            self._publish(step)

    def _publish(self, step: int) -> None:
        data = np.empty(self._learner.layout.nbytes, np.uint8)
        self._learner.write_weights(data)
        for generator, _ in self._searchers:
            generator.load(WeightUpdate(Publication(version=step), self._learner.layout, data))

    def _merge(self, searcher: int, groups: Sequence[Group], step: int) -> None:
        found = scored(groups, self._task, self._reference)
        self._generated += len(found)
        for row in np.flatnonzero(found.record["reward"]):
            self._found.add((int(found.record["prompt_id"][row]), found.completions.row(row).tobytes()))
        self._data.merge(found, step)

    def _requests(self, order: PromptOrder, searcher: int) -> Iterator[Request]:
        prompts = self._task.prompts("train")
        top = self._setup.train.score_centering
        sampling = Sampling(1.0, 1.0, self._setup.table.length, top_logprobs=top)
        for request_id in order.request_ids(searcher, self._setup.searchers, CompletedRequests()):
            yield Request(prompts[order.prompt_of(request_id)], request_id, self._setup.completions, sampling)


class Queue:
    """What a replay buffer offers, with neither replay nor distinctness: first in, first out, once."""

    def __init__(self, *, value_beta: float | None = None) -> None:
        self._value_beta = value_beta
        self._merged: deque[Trajectories] = deque()
        self._row = 0

    def merge(self, trajectories: Trajectories, revision: int) -> None:
        """Add groups of equal size, all of one sync."""
        record = as_record(trajectories.record, LIVE_RECORD)
        record["value"] = soft_values(trajectories, self._value_beta)
        record["sync"] = record["version_oldest"]
        self._merged.append(replace(trajectories, record=record))

    def sample(self, step: int, *, groups: int, group_size: int) -> TrajectoryBatch:
        """The oldest groups not yet sampled; a sync must have brought a multiple of ``groups``."""
        source, start = self._merged[0], self._row
        self._row += groups * group_size
        taken = source.between(start, self._row).to_arrays()
        if self._row == len(source):
            self._merged.popleft()
            self._row = 0
        return TrajectoryBatch.from_arrays(taken, group_size=group_size, step=step)


def _all_groups(generator: TabularGenerator) -> list[Group]:
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def scored(groups: Sequence[Group], task: Task, reference: TabularReference | None) -> Trajectories:
    """What a searcher makes of its groups. reference: None for the policy that sampled."""
    return Trajectories.of_groups(
        [
            ScoredGroup(
                group,
                task.rewards(group.request.prompt, group.completions),
                reference.logprobs(group) if reference else [one.logprobs for one in group.completions],
                reference.step if reference else BEHAVIOUR,
            )
            for group in groups
        ]
    )
