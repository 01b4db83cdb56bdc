"""Decides which trajectories of the buffer a step may learn from, and so how far searchers may run ahead.

``exchange.max_staleness`` bounds the steps between the weights that sampled a trajectory and those that learn
from it. With ``train.reference: reset`` (TBA′), trajectories that an older reference scored are stale, too.
``buffer.replay_limit`` bounds the number of steps that learn from a trajectory.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core import schedules
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Publication, Shard, Split
from tba_hpc.core.wording import count

log = logging.getLogger(__name__)

STEPS_WITHOUT_DATA, SYNCS_WITHOUT_DATA = 50, 5
"""Most steps, or syncs if these take longer, without a new shard; after that a step waits for one."""


class Freshness:
    """Staleness, reference and rollout budget of a run, whose trajectories live in ``buffer``.

    replays: whether recorded shards arrive at their recorded steps. No step then waits for a shard that it
    can do without.
    """

    def __init__(self, config: Config, buffer: ReplayBuffer, *, replays: bool = False) -> None:
        self._config = config
        self._replays = replays
        self._buffer = buffer
        self._budget: RolloutBudget | None = None
        self._fed: int | None = 0  # step at which the last shard arrived; None: none since the resume
        self.reference = schedules.reference(config.train, 0)
        """Step whose policy is the reference, or BEHAVIOUR."""

    def begin(self, step: int, completed: CompletedRequests) -> None:
        """Begin an attempt at its first step. A resume waits for a shard: it has learned from the others."""
        self._fed = None if step else 0
        if self._config.exchange.max_staleness is not None:
            self._budget = RolloutBudget(self._config, completed)

    def publication(self, step: int, *, evaluate: Split | None, published: float) -> Publication:
        """Return what to publish with the weights of ``step``; extend the budget by what they allow."""
        end = None
        if self._budget:
            end = self._budget.extend(step, ready=self._buffer.unlearned, missing=self.missing(step))
        return Publication(
            version=step,
            published=published,
            evaluate=evaluate,
            reference=self.reference,
            budget_end=end,
            final=step >= self._config.train.steps,
        )

    # --- Reference ---

    def update_reference(self, step: int) -> bool:
        """Set the reference of ``step``; return whether it differs from the previous one."""
        before, self.reference = self.reference, schedules.reference(self._config.train, step)
        return self.reference != before

    # --- Staleness ---

    def evict_stale(self, step: int) -> int:
        """Evict the trajectories that ``step`` must not learn from; return their number."""
        if not self._config.selective:
            return 0
        used_up = self._buffer.evict_used_up(self._config.train.completions_per_prompt)
        if not self.is_stale(self._buffer.kinds, step).any():  # cheap: there are few kinds
            return used_up
        return used_up + self._buffer.evict_where(lambda record: self.is_stale(record, step))

    def is_stale(self, record: np.ndarray, step: int) -> np.ndarray:
        """bool [N] for RECORD [N], or its KIND: the trajectories that ``step`` must not learn from."""
        stale: np.ndarray = record["reference"] != self.reference
        if (bound := self._config.exchange.max_staleness) is not None:
            stale |= np.abs(step - record["version_oldest"]) > bound
        return stale

    def filling(self, step: int) -> bool:
        """Return whether the run is waiting for its initial buffer."""
        return step == 0 and self._config.exchange.max_staleness is None

    def missing(self, step: int) -> int:
        """Number of completions (at first) or groups that ``step`` waits for; 1 may mean any new group."""
        if self.filling(step):
            return max(0, self._config.buffer.initial_completions - len(self._buffer))
        wanted = self._config.train.prompts_per_step if self._config.selective else 0
        return max(wanted - self._groups, int(self.starved(step)), self._overdue(step))

    def _overdue(self, step: int) -> int:
        """Number of requests that a queue must wait for; 0 if groups are drawn at random."""
        return self._budget.overdue(step) if self._budget and self._config.queue else 0

    def starved(self, step: int) -> bool:
        """Tell whether ``step`` must wait for a shard: none arrived for too many steps, or since a resume.

        False in a replay, or if no searcher may issue a request.
        """
        if self._replays or (self._budget is not None and not self._owed.total()):
            return False
        limit = max(STEPS_WITHOUT_DATA, SYNCS_WITHOUT_DATA * self._config.exchange.sync_every)
        return self._fed is None or step - self._fed >= limit

    @property
    def _groups(self) -> int:
        """Groups in the buffer: one per request, or per prompt if used trajectories leave parts of groups."""
        limited = self._config.buffer.replay_limit is not None
        return self._buffer.prompts if limited else self._buffer.requests

    # --- Rollout budget ---

    @property
    def _owed(self) -> Counter[int]:
        return self._budget.owed() if self._budget else Counter()

    def exhausted(self, step: int) -> bool:
        """Tell whether ``step`` lacks more than searchers may issue, so that they need a larger budget."""
        return self._budget is not None and self.missing(step) > self._owed.total()

    def arrive(self, shard: Shard, step: int) -> None:
        """Note a shard that arrives before ``step``; its searcher no longer owes these requests."""
        self._fed = step
        if self._budget:
            self._budget.arrive(shard.trajectories.request_ids)

    def exclude_unresponsive(self, step: int, timeout: float) -> None:
        """Let others issue what is owed, after ``timeout`` seconds without a shard: a searcher may have died.

        Raises ExchangeError if there is no searcher left to wait for.
        """
        shortage, remedy = self._shortage(step)
        silence = f"the replay buffer {shortage} and no new one has arrived for {timeout:.0f} s: {remedy}"
        if self._budget is None:
            raise ExchangeError(silence)
        self._budget.exclude(set(self._owed), silence)
        log.warning("%s; others begin what is missing", silence)

    def _shortage(self, step: int) -> tuple[str, str]:
        """Return what the buffer lacks, and what the user can do."""
        launch, wanted = self._config.launch, self._config.train.prompts_per_step
        none = "" if launch.searchers else " (none belongs to the run itself)"
        add = f"; if no searcher is at work{none}, add one: tba search {self._config.run_dir}"
        or_add = add if launch.elastic else ""
        if self.filling(step):
            remedy = "raise launch.timeout_seconds if an engine takes longer to be built"
            if len(self._buffer):
                remedy = (
                    "start another run (run.name) with a lower buffer.initial_completions if the task has "
                    "too few distinct completions"
                )
            initial = self._config.buffer.initial_completions
            shortage = f"holds {len(self._buffer)} of {initial} initial completions"
            return shortage, f"see the searchers' logs, or {remedy}{or_add}"
        if self._config.selective and self._groups < wanted:
            shortage = f"holds {self._groups} of the {wanted} groups that step {step} needs"
        elif overdue := self._overdue(step):
            shortage = f"lacks {count(overdue, 'group')} that would be too stale after step {step}"
        elif self._fed is None:
            shortage = "got no shard since the run was resumed"
        else:
            shortage = f"got no shard in the last {step - self._fed} steps"
        if launch.elastic:
            return shortage, f"see the searchers' logs{or_add}"
        searchers = sorted(self._owed) if self._budget else range(launch.searchers)
        return shortage, f"see the logs of searchers {', '.join(map(str, searchers))}, which owe them"


class RolloutBudget:
    """The requests that searchers may issue if staleness is bounded: those before ``end``.

    A request issued under weights v is used by step v + n if no more than (n + 1)·B requests wait to be
    learned from by then (AReaL, arXiv 2505.24298, §5.1). So ``end`` is (v + n + 1)·B in a run that loses
    nothing. For requests that are lost (duplicates, stale or repeated groups, those of excluded searchers)
    others are granted. Without these, searchers would be less far ahead with each loss.

    If steps learn from the oldest first, none is too stale, since steps wait for ``overdue`` requests.
    Going on with the quick ones and dropping the rest would starve long answers.

    completed: requests completed when the attempt begins.
    """

    def __init__(self, config: Config, completed: CompletedRequests) -> None:
        assert config.exchange.max_staleness is not None, "an unbounded staleness needs no budget"
        self.end = 0
        self._steps_ahead = config.exchange.max_staleness + 1
        self._requests_per_step = config.train.prompts_per_step
        self._last_step = config.train.steps
        self._searchers = config.launch.searchers
        self._silent = set[int]()
        self._completed = CompletedRequests.from_array(completed.to_array())
        self._granted = Counter[int]()
        self._arrived = Counter[int]()
        self._open: dict[int, int] = {}  # version at the grant, by uncompleted request, ascending
        self._ahead = set[int]()  # completed requests from beyond the end
        self._set_aside = Counter[int]()  # by searcher: the most requests that were ever ahead at once

    def extend(self, step: int, *, ready: int, missing: int) -> int:
        """Grant what the weights of ``step`` allow, and what is missing but not owed; return ``end``.

        ready: requests in the buffer that no step has learned from. missing: requests it lacks for ``step``.
        """
        steps = max(0, min(self._steps_ahead, self._last_step - step))
        requests = max(steps * self._requests_per_step - ready, missing) - self.owed().total()
        self._grant(requests, step)
        return self.end

    def _grant(self, requests: int, version: int) -> None:
        """Let the responsive searchers issue ``requests`` more, under weights of ``version`` or newer."""
        while requests > 0:
            if self.end not in self._completed:
                searcher = self.end % self._searchers
                self._granted[searcher] += 1
                requests -= searcher not in self._silent
                if self.end not in self._ahead:
                    self._open[self.end] = version
            self._ahead.discard(self.end)
            self.end += 1

    def overdue(self, step: int) -> int:
        """Count requests that ``step`` must wait for, so that later steps can learn from the rest in time.

        Steps up to v + n can learn from requests granted under weights v. So before ``step`` no more than
        (v + n − step)·B requests that were granted by then may be open. A searcher's requests that were set
        aside are taken to be its oldest.
        """
        set_aside = self._set_aside.copy()
        found = overdue = 0
        for request_id, version in self._open.items():
            searcher = request_id % self._searchers
            found += searcher not in self._silent and set_aside[searcher] <= 0
            set_aside[searcher] -= 1
            in_time = max(0, version + self._steps_ahead - 1 - step) * self._requests_per_step
            overdue = max(overdue, found - in_time)
        return overdue

    def arrive(self, request_ids: np.ndarray) -> None:
        """Note completed requests; one from beyond ``end`` may replace another that was set aside."""
        searchers = (request_ids % self._searchers).tolist()
        self._arrived.update(searchers)
        self._silent.difference_update(searchers)
        for request_id in request_ids.tolist():
            self._open.pop(request_id, None)
        self._ahead.update(request_ids[request_ids >= self.end].tolist())
        self._set_aside |= Counter(request_id % self._searchers for request_id in self._ahead)

    def owed(self) -> Counter[int]:
        """Count requests that may be issued and are not completed, by searcher, excluded ones left out."""
        owed = self._granted - self._arrived
        return Counter({searcher: count for searcher, count in owed.items() if searcher not in self._silent})

    def exclude(self, searchers: set[int], why: str) -> None:
        """Ignore these searchers until they deliver. Raises ExchangeError(``why``) if none is left."""
        self._silent |= searchers
        if len(self._silent) == self._searchers:
            raise ExchangeError(why)
