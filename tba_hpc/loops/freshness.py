"""Decides which trajectories of the buffer a step may learn from, and so how far searchers may run ahead.

``exchange.max_staleness`` bounds the steps between the weights that sampled a trajectory and those that learn
from it. With ``train.reference: reset`` (TBA′), trajectories that an older reference scored are stale, too.
``buffer.replay_limit`` bounds the number of steps that learn from a trajectory.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

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
"""A step waits for a new shard if none has arrived for this many steps, and for this many syncs.

There are exchange.sync_every steps from one sync to the next.
"""


class Freshness:
    """Staleness, reference and rollout budget of a run, whose trajectories are in ``buffer``.

    The rollout budget limits which requests searchers may issue. A run without exchange.max_staleness has
    none.
    """

    def __init__(self, config: Config, buffer: ReplayBuffer) -> None:
        self._config = config
        self._buffer = buffer
        self._budget: RolloutBudget | None = None
        self._last_shard: int | None = 0  # step when a shard last arrived; None: none has since the resume
        self.reference = schedules.reference(config.train, 0)
        """Step of the policy that is the reference, or BEHAVIOUR."""

    def begin(self, step: int, completed: CompletedRequests) -> None:
        """Begin an attempt at its first step. After a resume the first step waits for a new shard.

        completed: requests completed before the attempt.
        """
        self._last_shard = None if step else 0
        if self._config.exchange.max_staleness is not None:
            self._budget = RolloutBudget(self._config, completed)

    def publication(self, step: int, *, evaluate: Split | None, published: float) -> Publication:
        """Grant the requests that the weights of ``step`` allow; return the publication for these weights.

        evaluate, published: see Publication.
        """
        end, lease_ends = None, dict[int, dict[int, int]]()
        if self._budget:
            end = self._budget.extend(step, ready=self._buffer.unlearned, missing=self.missing(step))
            lease_ends = self._budget.lease_ends
        return Publication(
            version=step,
            published=published,
            evaluate=evaluate,
            reference=self.reference,
            budget_end=end,
            lease_ends=lease_ends,
            final=step >= self._config.train.steps,
        )

    # --- Reference ---

    def update_reference(self, step: int) -> bool:
        """Set the reference that ``step`` uses; return whether it differs from the previous one."""
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
        """Return which trajectories ``step`` must not learn from, bool [N].

        record: ``types.RECORD`` [N], or ``live_store.KIND`` [N].
        """
        stale: np.ndarray = record["reference"] != self.reference
        if (bound := self._config.exchange.max_staleness) is not None:
            stale |= np.abs(step - record["version_oldest"]) > bound
        return stale

    def filling(self, step: int) -> bool:
        """Return whether ``step`` waits for an initial buffer: only step 0, if staleness is unbounded."""
        return step == 0 and self._config.exchange.max_staleness is None

    def missing(self, step: int) -> int:
        """Return how much ``step`` still waits for; 0 if it can be taken.

        While the initial buffer is ``filling``, this is the number of completions that it lacks. Later it is
        the largest of: the requests that are ``overdue``, 1 if the step is ``starved``, and the groups that
        the buffer lacks for a batch. The last counts only under ``Config.selective``: if trajectories may be
        evicted for age, reference or uses.
        """
        if self.filling(step):
            return max(0, self._config.buffer.initial_completions - len(self._buffer))
        wanted = self._config.train.prompts_per_step if self._config.selective else 0
        return max(wanted - self._groups, int(self.starved(step)), self.overdue(step))

    def overdue(self, step: int) -> int:
        """Return how many requests must be answered before ``step``; see ``RolloutBudget.overdue``.

        0 unless the buffer is a queue.
        """
        return self._budget.overdue(step) if self._budget and self._config.queue else 0

    def starved(self, step: int) -> bool:
        """Return whether ``step`` must wait for a shard: none arrived for too many steps, or since a resume.

        False if searchers have answered all granted requests, because then no shard can arrive.
        """
        if self._budget is not None and not self._owed.total():
            return False
        limit = max(STEPS_WITHOUT_DATA, SYNCS_WITHOUT_DATA * self._config.exchange.sync_every)
        return self._last_shard is None or step - self._last_shard >= limit

    @property
    def _groups(self) -> int:
        """Number of groups that a step can draw: one per request, but one per prompt under a replay limit."""
        limited = self._config.buffer.replay_limit is not None
        return self._buffer.prompts if limited else self._buffer.requests

    # --- Rollout budget ---

    @property
    def _owed(self) -> Counter[int]:
        """Number of granted requests that are not completed, by place; empty without a rollout budget."""
        return self._budget.owed() if self._budget else Counter()

    def exhausted(self, step: int) -> bool:
        """Return whether ``step`` lacks more groups than the granted, unanswered requests can bring."""
        if self._budget is None or not self._budget.has_searchers:
            return False
        return self.missing(step) > self._owed.total()

    def note_elastic_leases(self, leases: Mapping[int, int]) -> None:
        """Tell the rollout budget, if there is one, which elastic searchers are present.

        leases: lease of each of them, by searcher.
        """
        if self._budget:
            self._budget.note_leases(leases)

    def arrive(self, shard: Shard, step: int) -> None:
        """Record a shard that arrives before ``step``. Its requests count as completed."""
        self._last_shard = step
        if self._budget:
            self._budget.arrive(shard.request_ids)

    def exclude_unresponsive(self, step: int, timeout: float) -> None:
        """Exclude the searchers that owe answers, because no shard has arrived for ``timeout`` seconds.

        Other searchers are granted requests instead. Raises ExchangeError if there are no others, or if
        staleness is unbounded, because there is no rollout budget in that case.
        """
        shortage, remedy = self._shortage(step)
        silence = f"the replay buffer {shortage} and no new one has arrived for {timeout:.0f} s: {remedy}"
        if self._budget is None:
            raise ExchangeError(silence)
        self._budget.exclude(set(self._owed), silence)
        log.warning("%s; other searchers are granted requests instead", silence)

    def _shortage(self, step: int) -> tuple[str, str]:
        """Return what the buffer lacks, as the end of a sentence, and what the user can do."""
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
        elif overdue := self.overdue(step):
            shortage = f"lacks {count(overdue, 'group')} that would be too stale after step {step}"
        elif self._last_shard is None:
            shortage = "got no shard since the run was resumed"
        else:
            shortage = f"got no shard in the last {step - self._last_shard} steps"
        if launch.elastic:
            return shortage, f"see the searchers' logs{or_add}"
        searchers = sorted(self._owed) if self._budget else range(launch.searchers)
        names = ", ".join(map(str, searchers))
        return shortage, f"see the logs of searchers {names}, which have yet to answer"


class Debt(NamedTuple):
    """Requests that a set of places owes: granted, but not completed. Debts are sorted by ``each``.

    A place is busy if answers are expected from it. each: requests owed per busy place. first: the first
    place of the set. owed: requests owed. busy: number of busy places. places: the set.
    """

    each: float
    first: int
    owed: int
    busy: int
    places: range

    @classmethod
    def of(cls, owed: int, busy: int, places: range) -> Debt:
        """Make the debt of ``places``."""
        return cls(owed / busy, places.start, owed, busy, places)


class RolloutBudget:
    """Limit on the requests that searchers may issue, so that staleness stays within its bound.

    Let n be exchange.max_staleness, B train.prompts_per_step, and let steps learn from the oldest groups
    first. Then no group becomes too stale if the following holds before each step s and for each version v:
    of the requests that were granted under weights up to v, at most (v + n + 1 − s)·B are unanswered, or
    answered but not learned from yet. AReaL (arXiv 2505.24298, §5.1) has this rule for the newest v.
    ``extend`` grants no more than that, and steps wait for ``overdue`` requests. Slow answers are waited for,
    not dropped, because otherwise the policy would learn from short completions only.

    A searcher's place p decides which requests it takes: those with id ≡ p, modulo the number of places. The
    run's own searchers may issue requests below ``end``, which is (v + n + 1)·B in a run without losses or
    elastic searchers. Some requests bring nothing to learn from: duplicates, groups set aside, requests of
    excluded searchers. Further requests are granted instead, so that searchers can run as far ahead as
    before.

    The place of each elastic searcher has an end of its own, which holds for that searcher's lease only. Once
    the lease is gone or changed, as many requests are granted to other places, and the next searcher at this
    place begins with its requests that are not completed.

    completed: requests completed when the attempt begins.
    """

    def __init__(self, config: Config, completed: CompletedRequests) -> None:
        assert config.exchange.max_staleness is not None, "an unbounded staleness needs no budget"
        self._steps_ahead = config.exchange.max_staleness + 1
        self._requests_per_step = config.train.prompts_per_step
        self._last_step = config.train.steps
        self._launch = config.launch
        self._own = range(config.launch.searchers)  # places of the run's own searchers
        self._elastic = range(config.launch.searchers, config.launch.places)  # those of elastic searchers
        # For each set of places the first request that these places may not issue yet.
        self._ends = {self._own: 0, **{_only(place): place for place in self._elastic}}
        self._leases = dict[int, int]()  # lease of each present elastic searcher, by place
        self._granted = dict[int, int]()  # the same, as it was at the last grant
        self._excluded = set[int]()  # places from which nothing is expected until they deliver
        self._completed = CompletedRequests.from_array(completed.to_array())
        self._unanswered: dict[int, int] = {}  # version that granted each request, oldest first

    @property
    def end(self) -> int:
        """First request that the run's own searchers may not issue yet."""
        return self._ends[self._own]

    @property
    def lease_ends(self) -> dict[int, dict[int, int]]:
        """End of each elastic searcher's requests at the last grant, by searcher and lease."""
        searchers = zip(self._elastic, self._launch.elastic_searchers, strict=True)
        return {
            searcher: {self._granted[place]: self._ends[_only(place)]}
            for place, searcher in searchers
            if place in self._granted
        }

    @property
    def has_searchers(self) -> bool:
        """True if there is a searcher to grant requests to."""
        return not self._excluded.issuperset([*self._own, *self._leases])

    @property
    def _idle(self) -> set[int]:
        """Places from which no answer is expected."""
        return self._excluded.union(place for place in self._elastic if not self._holds(place))

    def _holds(self, place: int) -> bool:
        """Return whether the elastic searcher that was last granted requests of a place is still at work."""
        return place in self._leases and self._granted.get(place) == self._leases[place]

    def _place_of(self, request_id: int) -> int:
        return request_id % self._launch.places

    def note_leases(self, leases: Mapping[int, int]) -> None:
        """Note which elastic searchers are present. Those that have left owe nothing from now on.

        leases: number of each present elastic searcher's lease, by searcher. All shards that departed
        searchers have sealed must have been read before this call.
        """
        now = {self._launch.place_of(searcher): lease for searcher, lease in leases.items()}
        self._excluded -= {place for place in self._elastic if now.get(place) != self._leases.get(place)}
        self._leases = now

    def extend(self, step: int, *, ready: int, missing: int) -> int:
        """Grant the requests that the weights of ``step`` allow, and replace lost ones.

        Returns ``end``: the first request that the run's own searchers may not issue yet.

        ready: number of requests in the buffer that no step has learned from. missing: number of further
        requests that ``step`` needs.
        """
        self._withdraw()
        steps = max(0, min(self._steps_ahead, self._last_step - step))
        requests = max(steps * self._requests_per_step - ready, missing) - self.owed().total()
        idle, debts = self._idle, self._debts()
        while requests > 0 and debts:
            least = debts[0]
            request_id = self._next_request(least.places)
            self._unanswered[request_id] = step
            if self._place_of(request_id) not in idle:
                heapq.heapreplace(debts, Debt.of(least.owed + 1, least.busy, least.places))
                requests -= 1
        return self.end

    def _debts(self) -> list[Debt]:
        """Return, as a heap, the debt of each key of ``_ends`` that has a busy place."""
        idle, all_owed, debts = self._idle, self.owed(), []
        for places in self._ends:
            owed = [all_owed[place] for place in places if place not in idle]
            if owed:
                debts.append(Debt.of(sum(owed), len(owed), places))
        heapq.heapify(debts)
        return debts

    def _next_request(self, places: range) -> int:
        """Return the id of the next request to grant to ``places``, and move their end past it.

        places: a key of ``_ends``. Its value there, the end, is the first request that these places may not
        issue yet. The search begins at the end, and skips requests that are completed.
        """
        while True:
            request_id = self._ends[places]
            self._ends[places] += self._launch.places if len(places) == 1 else 1
            if self._place_of(request_id) in places and request_id not in self._completed:
                return request_id

    def _withdraw(self) -> None:
        """Withdraw requests granted to elastic searchers that left, and reset the ends of their places."""
        gone = {place for place in self._elastic if not self._holds(place)}
        kept = self._unanswered.items()
        self._unanswered = {one: version for one, version in kept if self._place_of(one) not in gone}
        self._ends.update({_only(place): place for place in gone})
        self._granted = self._leases

    def overdue(self, step: int) -> int:
        """Return how many answers ``step`` must wait for, because later steps could not use them in time.

        With n = exchange.max_staleness, steps up to v + n can learn from requests granted under weights v. So
        before ``step``, of the requests granted under weights up to v, no more than (v + n − step)·B may be
        unanswered, where B is train.prompts_per_step.
        """
        idle = self._idle
        unanswered = overdue = 0
        for request_id, version in self._unanswered.items():
            unanswered += self._place_of(request_id) not in idle
            in_time = max(0, version + self._steps_ahead - 1 - step) * self._requests_per_step
            overdue = max(overdue, unanswered - in_time)
        return overdue

    def arrive(self, request_ids: np.ndarray) -> None:
        """Note that requests are completed: answered, or set aside. Repeats change nothing."""
        self._completed.add(request_ids)
        for request_id in request_ids.tolist():
            self._excluded.discard(self._place_of(request_id))
            self._unanswered.pop(request_id, None)

    def owed(self) -> Counter[int]:
        """Return how many granted requests are not completed, for each place that is expected to answer."""
        idle, places = self._idle, map(self._place_of, self._unanswered)
        return Counter(place for place in places if place not in idle)

    def exclude(self, places: set[int], why: str) -> None:
        """Expect nothing from these places until they deliver, so that ``extend`` grants more to others.

        Raises ExchangeError(``why``) if no searcher is left.
        """
        self._excluded |= places
        if not self.has_searchers:
            raise ExchangeError(why)


def _only(place: int) -> range:
    """Return the set of places, as a range, that contains only ``place``, which one elastic searcher has."""
    return range(place, place + 1)
