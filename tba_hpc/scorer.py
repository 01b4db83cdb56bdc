"""Rewards, reference log-probabilities and seals, in a thread beside generation.

It must not know where groups come from or what becomes of the shards. Everything here happens in one
worker thread, in the order of submission, so that neither a slow reward nor an fsync stops the engine.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tba_hpc.ports import Reference, ShardSink, Task
from tba_hpc.types import BEHAVIOUR, Group, Shard

log = logging.getLogger(__name__)

YIELDS = 5
"""Niceness of the thread: 80 steps of the quickstart took 43 s without it, 34 s with it, on two cores."""

BACKLOG = 8
"""Groups that may wait to be scored before ``finished`` waits for the oldest of them."""

ANSWERS_AT_ONCE = 16
"""Most evaluation answers judged together; training groups have their turn before the next ones."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of a group, or of a call to seal.

    rewards: of the completions kept. rejected: completions set aside, because their reward is not a
    finite number. truncated: those kept that the token limit ended. shard: the open shard, where it
    was now sealed, which took ``seal_seconds``.
    """

    rewards: list[float]
    rejected: int
    truncated: int
    shard: Shard | None
    seal_seconds: float


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to an evaluation prompt, and whether it is correct.

    ref_logprob: log π_ref of all its tokens together, nats; None without a reference model.
    """

    answer: Group
    correct: bool
    ref_logprob: float | None


class Scorer:
    """Scores groups into ``shards``, seals what has waited for ``seal_seconds``; judges evaluations, too."""

    def __init__(self, task: Task, reference: Reference, shards: ShardSink, *, seal_seconds: float) -> None:
        self._task = task
        self._reference = reference
        self._shards = shards
        self._seal_seconds = seal_seconds
        self._wanted = reference.step
        self._worker = ThreadPoolExecutor(1, "scorer", initializer=_yield_to_trainer)
        self._waiting: deque[Future[Scored]] = deque()
        self._answers: deque[Group] = deque()
        self._judging: Future[list[Judged]] | None = None

    def submit(self, group: Group) -> None:
        """Queue a finished training group."""
        self._do(lambda: self._score(group))

    def refer_to(self, step: int) -> None:
        """Score what is submitted from now on by the reference of ``step``, or by a newer one."""
        if step != self._wanted:
            self._wanted = step
            self._do(self._load)

    def finished(self, *, seal_now: bool = False) -> list[Scored]:
        """Results since the last call, in order. Waits only while more than BACKLOG groups are queued.

        seal_now: seal as soon as nothing is left to score.
        """
        if not self._waiting and self._shards.age > (0 if seal_now else self._seal_seconds):
            self._do(self._seal)
        return self._take(lambda: self._waiting[0].done() or len(self._waiting) > BACKLOG)

    def judge(self, answer: Group) -> None:
        """Queue an answer to an evaluation prompt: a group of one completion."""
        self._answers.append(answer)

    def judged(self) -> list[Judged]:
        """Answers judged since the last call, in order. Never waits; those that have queued are next."""
        if self._judging is not None and not self._judging.done():
            return []
        results = self._judging.result() if self._judging else []
        batch = [self._answers.popleft() for _ in range(min(len(self._answers), ANSWERS_AT_ONCE))]
        self._judging = self._worker.submit(self._judge, batch) if batch else None
        return results

    def close(self) -> list[Scored]:
        """Score and seal all that is left, judge no more answers; no call may follow."""
        self._do(self._seal)
        results = self._take(lambda: True)
        self._worker.shutdown()
        return results

    def _do(self, work: Callable[[], Scored]) -> None:
        self._waiting.append(self._worker.submit(work))

    def _take(self, ready: Callable[[], bool]) -> list[Scored]:
        results = []
        while self._waiting and ready():
            results.append(self._waiting.popleft().result())
        return results

    def _score(self, group: Group) -> Scored:
        prompt = group.request.prompt
        rewards = [float(reward) for reward in self._task.rewards(prompt, group.completions)]
        kept = [row for row, reward in enumerate(rewards) if math.isfinite(reward)]
        if len(kept) < len(rewards):
            group = _without_rejected(group, kept)
        kept_rewards = [rewards[row] for row in kept]
        if kept:
            ref_logprobs, step = self._reference.logprobs(group), self._reference.step
            self._shards.append(group, kept_rewards, ref_logprobs, reference=step)
        truncated = sum(completion.finish_reason == "length" for completion in group.completions)
        sealed = self._seal() if self._shards.age >= self._seal_seconds else NOTHING
        return Scored(kept_rewards, len(rewards) - len(kept), truncated, sealed.shard, sealed.seal_seconds)

    def _judge(self, answers: list[Group]) -> list[Judged]:
        prompts = [answer.request.prompt for answer in answers]
        completions = [completion for answer in answers for completion in answer.completions]
        correct = self._task.correct(prompts, completions)
        return [
            Judged(answer, right, self._ref_logprob(answer))
            for answer, right in zip(answers, correct, strict=True)
        ]

    def _ref_logprob(self, answer: Group) -> float | None:
        if self._reference.step == BEHAVIOUR:
            return None
        (logprob_T,) = self._reference.logprobs(answer)
        return float(logprob_T.sum(dtype=np.float64))

    def _load(self) -> Scored:
        """Of several references asked for only the newest: the others may be gone from the disk."""
        if self._reference.step != self._wanted:
            self._reference.load(self._wanted)
        return NOTHING

    def _seal(self) -> Scored:
        """Acknowledge what is scored: durable on disk before anybody hears of it."""
        start = time.monotonic()
        shard = self._shards.seal()
        return Scored([], 0, 0, shard, time.monotonic() - start)


NOTHING = Scored([], 0, 0, None, 0.0)


def _yield_to_trainer() -> None:
    """Where both share a machine, as its engine does: samples a step late are better than a late step."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDS)


def _without_rejected(group: Group, kept: list[int]) -> Group:
    """The group less the completions set aside, which are named."""
    request, total = group.request, len(group.completions)
    log.warning(
        "prompt %d (request %d): %d of %d rewards are not finite numbers; these trajectories are set aside, "
        "check the task's rewards()",
        *(request.prompt.id, request.id, total - len(kept), total),
    )
    return Group(request, tuple(group.completions[row] for row in kept), group.versions[kept])
