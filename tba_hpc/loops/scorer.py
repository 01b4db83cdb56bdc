"""Computes rewards and reference log-probabilities, and seals shards, while the engine generates.

Everything but the task's own code happens in one worker thread, in the order of submission, so that neither a
slow reward nor an fsync stops the engine. The task's code runs in another thread, for which the worker waits.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import raised_at
from tba_hpc.core.ports import EngineError, Reference, Task
from tba_hpc.core.task_contract import (
    Failures,
    checked_parts,
    checked_rewards,
    checked_verdicts,
    class_name,
)
from tba_hpc.core.types import BEHAVIOUR, Group, Shard, WeightUpdate
from tba_hpc.loops.search_log import Sums
from tba_hpc.loops.task_calls import LEAVING_SECONDS, OverranError, TaskCalls, background_worker
from tba_hpc.run.underway import Underway

if TYPE_CHECKING:
    from tba_hpc.exchange.hdf5_shards import ShardWriter

log = logging.getLogger(__name__)

BACKLOG = 32
"""Largest number of groups that are scored together.

If more groups wait to be scored, ``Scorer.finished`` waits for the oldest of them. If twice as many wait,
``Scorer.full`` is True."""

BACKLOG_SECONDS = 1.0
"""Longest time that ``Scorer.finished`` waits, in seconds. The searcher has other work to do."""

ANSWERS_AT_ONCE = 16
"""Largest number of evaluation answers judged together. Waiting training groups are scored in between."""

MOST_REJECTED = 10
"""Number of groups in a row without a usable reward, or of unjudged answers, at which a searcher ends."""

CLOSING_SECONDS = 30.0
"""Seconds at the end of a run in which waiting groups are still scored. A resume issues the requests of the
other groups again."""

LARGEST = float(np.finfo(np.float32).max)
"""Largest magnitude of a reward. Larger ones are not finite as float32, and are set aside."""

ENDS_THE_RUN = (ConfigError, EngineError)
"""Exceptions that end the run. A task raises them if a model that it needs does not exist, or keeps dying."""


Itemised = tuple[list[float], Mapping[str, Sequence[float]]]
"""The rewards of a group's completions, and the summands of these rewards, by name."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of scoring or sealing. sums: sums over the scored groups. shard: the sealed shard, if any."""

    sums: Sums = field(default_factory=Sums)
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A group after the task has rewarded it, without completions whose reward is not usable.

    rewards: reward of each completion that is left. parts: summands of these rewards, by name. sums: sums of
    the whole group for the metrics, with the duration of the task's call and the number of completions left
    out.
    """

    group: Group
    rewards: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    sums: Sums


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to an evaluation prompt, with the task's verdict.

    answer: a group of one completion. correct: whether the task calls the answer correct. reward: None if the
    task gives none. ref_logprob: log π_ref of all sampled tokens together, in nats; None without a reference
    model.
    """

    answer: Group
    correct: bool
    reward: float | None
    ref_logprob: float | None


@dataclass
class EngineCheck:
    """Comparison of the engine's log-probabilities with those that the learner's model code computes.

    weights: private copy of the weights that sample the answers. wanted: number of answers to compare.
    answers: those collected so far.
    """

    weights: WeightUpdate
    wanted: int
    answers: list[Group] = field(default_factory=list)

    def complete(self, answer: Group) -> bool:
        """Add an answer if ``weights`` sampled all of it; return whether ``wanted`` answers are collected."""
        if (answer.versions == self.weights.publication.version).all():
            self.answers.append(answer)
        return len(self.answers) == self.wanted

    def measure(self, reference: Reference) -> Scored:
        """Return the comparison, made with the model of ``reference``, which is unchanged afterwards."""
        rows = reference.logprobs_under(self.weights, self.answers)
        return Scored(Sums.between(self.answers, rows))


class Scorer:
    """Scores groups and seals them into ``shards`` after at most ``seal_seconds``. Judges evaluation answers.

    A group is set aside if the task's code raises an exception, or takes too long. ``finished`` and
    ``judged`` raise ConfigError after ``most_rejected`` groups in a row without a usable reward, or as many
    answers in a row that could not be judged. They also raise it if the task violates ports.Task, or if
    MOST_HANGING calls hang.

    reference: None if searchers hold no reference model. Trajectories then record the sampler's
    log-probabilities if the reference is BEHAVIOUR, and otherwise NaN, for the trainer to compute.
    call_seconds: time limit of a call of the task's code, unless the task sets its own. underway: records
    which call is being made. temperature: the run's sampling temperature; groups sampled at another are
    left out of entropy and KL. None: no group is left out.
    """

    def __init__(
        self,
        task: Task,
        reference: Reference | None,
        shards: ShardWriter,
        *,
        seal_seconds: float,
        call_seconds: float = math.inf,
        underway: Underway | None = None,
        most_rejected: int = MOST_REJECTED,
        temperature: float | None = None,
    ) -> None:
        self._task = task
        self._temperature = temperature
        self._no_reward = Failures(
            "groups without a usable reward", "these trajectories are set aside", most_rejected
        )
        self._unjudged = Failures(
            "answers that could not be judged",
            "this one counts as wrong, and a mean reward leaves it out",
            most_rejected,
        )
        self._reference = reference
        self._shards = shards
        self._seal_seconds = seal_seconds
        self._wanted = self._step = reference.step if reference else BEHAVIOUR
        self._worker = background_worker("scorer")
        self._underway = underway
        longest = call_seconds if task.longest_call is None else task.longest_call
        self._calls = TaskCalls(class_name(task), longest, underway or nullcontext)
        # If judging may have ended the process before, answers are judged one by one, to find the culprit.
        ended = underway is not None and any(call.startswith("correct()") for call in underway.ends)
        self._answers_at_once = 1 if ended else ANSWERS_AT_ONCE
        self._waiting: deque[Future[Scored]] = deque()
        self._unscored: deque[Group] = deque()  # all for one reference, the one that was requested last
        self._answers: deque[Group] = deque()
        self._judging: deque[Future[list[Judged]]] = deque()
        self._check: EngineCheck | None = None
        self._end = math.inf  # time on the monotonic clock after which the task is no longer called

    def submit(self, group: Group) -> None:
        """Queue a training group. Groups that wait are scored together."""
        unscored = self._unscored
        unscored.append(group)
        self._do(lambda: self._score(unscored))

    def refer_to(self, step: int) -> None:
        """Use the reference of ``step``, or a newer one, for groups that are submitted from now on.

        Evaluation answers that still wait are scored by the previous reference, which was in use when they
        were sampled.
        """
        if step != self._wanted:
            self._wanted = step
            while self._answers:
                self._judge_next()
            self._unscored = deque()  # earlier groups stay in the old deque, which is scored before the load
            self._do(self._load)

    @property
    def full(self) -> bool:
        """True if so many groups wait to be scored that the searcher should issue no requests."""
        return len(self._waiting) >= 2 * BACKLOG

    def finished(self, *, seal_now: bool = False) -> list[Scored]:
        """Return results since the last call, in order. Waits up to BACKLOG_SECONDS if too many groups wait.

        seal_now: seal the open shard, whatever its age, as soon as nothing is left to score.
        """
        if not self._waiting and self._shards.age > (0 if seal_now else self._seal_seconds):
            self._do(self._seal)
        if (more := len(self._waiting) - BACKLOG) > 0:
            wait([self._waiting[more - 1]], BACKLOG_SECONDS)
        return self._take(lambda: self._waiting[0].done())

    def judge(self, answer: Group) -> None:
        """Queue an answer to an evaluation prompt, a group of one completion."""
        self._answers.append(answer)
        if self._check and self._check.complete(answer):
            check, reference, self._check = self._check, self._reference, None
            assert reference, "there is no check without a reference"
            self._do(lambda: check.measure(reference))

    def check_engine(self, update: WeightUpdate, answers: int) -> None:
        """Compare engine and learner code on the first ``answers`` evaluation answers under ``update``.

        At most ANSWERS_AT_ONCE answers are compared. A copy of the weights is kept until that is done. Does
        nothing without a reference model, because the comparison loads the weights into it.
        """
        if self._reference:
            self._check = EngineCheck(update.private(), min(answers, ANSWERS_AT_ONCE))

    def judged(self) -> list[Judged]:
        """Return the answers judged since the last call, in order; begin to judge the next ones."""
        results = []
        while self._judging and self._judging[0].done():
            results += self._judging.popleft().result()
        if self._answers and not self._judging:
            self._judge_next()
        return results

    def _judge_next(self) -> None:
        batch = [self._answers.popleft() for _ in range(min(len(self._answers), self._answers_at_once))]
        self._judging.append(self._worker.submit(lambda: self._judge(batch)))

    def note_stop(self) -> None:
        """Record that the process was asked to end, so that no call of the task is blamed for its end."""
        if self._underway:
            self._underway.close()

    def close(self) -> list[Scored]:
        """Score waiting groups for up to CLOSING_SECONDS, seal the open shard, and end; return the results.

        If a call of the task's code is in progress by then, it may take longer.
        """
        self._end = time.monotonic() + CLOSING_SECONDS
        self._do(self._seal)
        results = self._take(lambda: True)
        self._worker.close(LEAVING_SECONDS)
        self._calls.close()
        return results

    def _do(self, work: Callable[[], Scored]) -> None:
        self._waiting.append(self._worker.submit(work))

    def _take(self, ready: Callable[[], bool]) -> list[Scored]:
        results = []
        while self._waiting and ready():
            results.append(self._waiting.popleft().result())
        return results

    def _score(self, unscored: deque[Group]) -> Scored:
        """Score the waiting groups, and append them to the open shard."""
        groups = [unscored.popleft() for _ in range(min(len(unscored), BACKLOG))]
        rewarded = [self._reward(group) for group in groups if time.monotonic() < self._end]
        kept = [one for one in rewarded if one.rewards]
        rows = self._logprobs_of([one.group for one in kept])
        sums = sum((one.sums for one in rewarded), Sums())
        for one in rewarded:
            if not one.rewards:
                self._shards.append(one.group, [], [])
        for one, ref_logprobs in zip(kept, rows, strict=True):
            sums += self._store(one, ref_logprobs)
        sealed = self._seal() if self._shards.age >= self._seal_seconds else NOTHING
        return Scored(sums + sealed.sums, sealed.shard)

    def _reward(self, group: Group) -> Rewarded:
        """Have the task reward a group, and leave out completions whose reward is not usable."""
        start = time.monotonic()
        rewards, parts = self._rewards(group)
        kept = [row for row, reward in enumerate(rewards) if abs(reward) <= LARGEST]
        parts = {name: [values[row] for row in kept] for name, values in parts.items()}
        seconds = time.monotonic() - start
        if len(kept) < len(rewards):
            group = Group(group.request, tuple(group.completions[row] for row in kept), group.versions[kept])
        sums = Sums(scored=1, reward_seconds=seconds, rejected=len(rewards) - len(kept))
        return Rewarded(group, [rewards[row] for row in kept], parts, sums)

    def _store(self, one: Rewarded, ref_logprobs: list[np.ndarray]) -> Sums:
        """Append a group to the open shard; return sums over its completions and tokens, for the metrics.

        ref_logprobs: for each completion the values to record as log π_ref, float32 [T].
        """
        group = one.group
        self._shards.append(group, one.rewards, ref_logprobs, reference=self._step)
        tempered = self._temperature not in (None, group.request.sampling.temperature)
        compared = ref_logprobs if self._reference else None
        return Sums.of(group, one.rewards, compared, one.parts, tempered=tempered)

    def _logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return the values that trajectories record as log π_ref, float32 [T], by group and completion."""
        if self._reference:
            return self._reference.logprobs_of(groups) if groups else []
        rows = [[completion.logprobs for completion in group.completions] for group in groups]
        if self._step == BEHAVIOUR:
            return rows
        return [[np.full_like(row, np.nan) for row in of_group] for of_group in rows]

    def _rewards(self, group: Group) -> Itemised:
        """Return the rewards of a group, and their summands by name.

        If the task's code raises an exception, all rewards are NaN.
        """
        request, total = group.request, len(group.completions)
        call, which = f"rewards() of prompt {request.prompt.id}", f" (request {request.id})"
        error = None
        try:
            rewards, parts = self._calls(call, lambda: self._itemised(group), which)
        except ENDS_THE_RUN:
            raise
        except BaseException as raised:  # a user's code may raise anything; signals reach another thread
            rewards, parts, error = [math.nan] * total, {}, raised
        rejected = sum(not abs(reward) <= LARGEST for reward in rewards)
        if rejected < total:
            self._no_reward.in_a_row = 0
        if rejected:
            what = f"{call}{which} gave {rejected} of {total} that are not finite"
            if error:
                what = f"{call}{which} {_end_of(error)}"
            elif fault := next((one.fault for one in group.completions if one.fault), ""):
                which = f"prompt {request.prompt.id}{which}"
                what = f"{rejected} of {total} episodes of {which} gave no usable reward ({fault})"
            self._no_reward.note(what, error, counts=rejected == total)
        return rewards, parts

    def _itemised(self, group: Group) -> Itemised:
        rewards = checked_rewards(self._task, group.request.prompt, group.completions)
        return rewards, checked_parts(self._task, len(rewards))

    def _judge(self, answers: list[Group]) -> list[Judged]:
        if time.monotonic() > self._end:
            return []
        rows = zip(answers, self._verdicts(answers), self._ref_logprobs(answers), strict=True)
        return [Judged(answer, right, reward, logprob) for answer, (right, reward), logprob in rows]

    def _verdicts(self, answers: list[Group]) -> list[tuple[bool, float | None]]:
        """Return for each answer whether it is correct, and its reward, which is None without grades.

        If the task's code raises an exception, answers are judged one by one. An answer for which it raises
        one again counts as wrong.
        """
        request = answers[0].request
        more = f" and {len(answers) - 1} more" if len(answers) > 1 else ""
        call = f"correct() of {request.split} prompt {request.prompt.id}"
        try:
            verdicts = self._calls(call, lambda: self._graded(answers), more)
        except ENDS_THE_RUN:
            raise
        except BaseException as error:  # a user's code may raise anything
            if len(answers) > 1:
                return [verdict for answer in answers for verdict in self._verdicts([answer])]
            self._unjudged.note(f"{call} {_end_of(error)}", error)
            return [(False, None)]
        self._unjudged.in_a_row = 0
        for answer, (_, reward) in zip(answers, verdicts, strict=True):
            if reward is not None and not math.isfinite(reward):
                what = f"grades() gave {reward} for {request.split} prompt {answer.request.prompt.id}"
                self._unjudged.note(what, None, counts=False)
        return verdicts

    def _graded(self, answers: list[Group]) -> list[tuple[bool, float | None]]:
        prompts = [answer.request.prompt for answer in answers]
        completions = [completion for answer in answers for completion in answer.completions]
        return checked_verdicts(self._task, prompts, completions)

    def _ref_logprobs(self, answers: list[Group]) -> list[float | None]:
        """Return log π_ref of each answer, summed over sampled tokens, nats; None without a reference."""
        if not self._reference:
            return [None] * len(answers)
        rows = zip(answers, self._reference.logprobs_of(answers), strict=True)
        return [
            float(logprob_T[answer.completions[0].action_T].sum(dtype=np.float64))
            for answer, (logprob_T,) in rows
        ]

    def _load(self) -> Scored:
        """Load the reference that was requested last, because earlier ones may be deleted already."""
        step = self._wanted
        if self._reference and self._reference.step != step:
            self._reference.load(step)
        self._step = step
        return NOTHING

    def _seal(self) -> Scored:
        """Seal the open shard. From here on it is durable, and its groups are acknowledged."""
        start = time.monotonic()
        shard = self._shards.seal()
        return Scored(Sums(seal_seconds=time.monotonic() - start), shard)


NOTHING = Scored()


def _end_of(error: BaseException) -> str:
    """Return why a call of the task gave no result, as the end of a sentence that begins with the call."""
    return str(error) if isinstance(error, OverranError) else raised_at(error)
