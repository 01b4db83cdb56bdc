"""Trainer and searchers that take turns in one process (in lockstep), on an enumerable policy.

So the age of data is exact, and does not depend on how busy cores are. Buffer and objectives are the
product's; generator and learner are those of ``tabular``. Shape letters are those of ``tabular``, and M for
the rewarded words of a prompt.
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
from tba_hpc.core.prompts import CompletedRequests, prompt_of
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
"""Standard deviation of the reference's logits; small, so that the reference is nearly uniform."""

DEFAULTS = BufferSection()


@dataclass(frozen=True)
class SparseTable(Table):
    """Table with reward 1 for ``modes`` words of full length per prompt, and 0 for all else.

    Any two rewarded words differ in more than half of their letters. The reference is nearly uniform, so that
    every rewarded word has a share of the target distribution.
    """

    modes: int = 8

    @cached_property
    def ref_logits_PSV(self) -> np.ndarray:
        """Logits of the reference, float32."""
        rng = np.random.default_rng([self.seed, 1])
        return REFERENCE_SCALE * rng.standard_normal(self.shape, np.float32)

    @cached_property
    def reward_PC(self) -> np.ndarray:
        """Reward of each completion, float32."""
        reward_PC = np.zeros((self.prompts, len(self.completions)), np.float32)
        np.put_along_axis(reward_PC, self.modes_PM, 1.0, axis=1)
        return reward_PC

    @cached_property
    def modes_PM(self) -> np.ndarray:
        """Indices of the rewarded completions, int64 [P, M]."""
        rng = np.random.default_rng([self.seed, 2])
        return np.array([self._scattered(rng) for _ in range(self.prompts)])

    def _scattered(self, rng: np.random.Generator) -> list[int]:
        """Return the indices of random words of full length, each far from those before."""
        words: list[np.ndarray] = []
        while len(words) < self.modes:
            word = rng.integers(self.letters, size=self.length, dtype=np.int32)
            if all((word != other).sum() > self.length // 2 for other in words):
                words.append(word)
        return [self.index(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a run.

    groups_per_step: number of prompts that each searcher answers during an optimizer step. completions:
    number of completions per prompt. buffer: section of the replay buffer; None: each group is trained on
    once, in order, duplicates included, and train's B and K must equal what one searcher generates. ahead:
    whether searchers get new weights before they generate for the next steps, so that data are 0 to k − 1
    steps old. Otherwise they get them afterwards, as with TBA, and data are k to 2k − 1 steps old.
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
    """The state of a run after ``step`` optimizer steps.

    trajectories: number generated so far. found: number of distinct rewarded ones among them. staleness: mean
    age of the last batch, steps. policy_PC: probability of each completion.
    """

    step: int
    trajectories: int
    found: int
    staleness: float
    policy_PC: np.ndarray


def train(setup: Setup, *, every: int) -> Iterator[Moment]:
    """Run; yield the state at the start, and after every ``every`` steps."""
    return Lockstep(setup).run(every)


class Lockstep:
    """A run, from its start to its last step."""

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
        self._searchers = [
            (TabularGenerator(setup.table, seed=setup.seed + 1000 * s), self._requests(s))
            for s in range(setup.searchers)
        ]
        self._generated = 0
        self._found: set[tuple[int, bytes]] = set()

    def run(self, every: int) -> Iterator[Moment]:
        """Take all steps; yield the state at the start, and after every ``every`` steps."""
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
        """Generate and merge the groups for the next steps, and publish weights, before it or afterwards."""
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

    def _requests(self, searcher: int) -> Iterator[Request]:
        prompts = self._task.prompts("train")
        top = self._setup.train.score_centering
        sampling = Sampling(1.0, 1.0, self._setup.table.length, top_logprobs=top)
        for request_id in CompletedRequests().remaining(searcher, self._setup.searchers):
            prompt = prompts[prompt_of(request_id, seed=self._setup.seed, prompts=len(prompts))]
            yield Request(prompt, request_id, self._setup.completions, sampling)


class Queue:
    """A buffer in place of ReplayBuffer that returns each group once, in order, and keeps duplicates."""

    def __init__(self, *, value_beta: float | None = None) -> None:
        self._value_beta = value_beta
        self._merged: deque[Trajectories] = deque()
        self._row = 0

    def merge(self, trajectories: Trajectories, revision: int) -> None:
        """Add the groups of one sync, all of equal size. revision: ignored."""
        record = as_record(trajectories.record, LIVE_RECORD)
        record["value"] = soft_values(trajectories, self._value_beta)
        record["sync"] = record["version_oldest"]
        self._merged.append(replace(trajectories, record=record))

    def sample(self, step: int, *, groups: int, group_size: int) -> TrajectoryBatch:
        """Return the oldest groups not yet returned. Each sync must bring a multiple of ``groups``."""
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
    """Return groups with rewards and reference log-probabilities, as a searcher's shard has them.

    reference: None takes the policy that sampled as the reference.
    """
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
