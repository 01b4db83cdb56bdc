"""Decides which trajectories of the buffer a step may learn from, and so how far searchers may run ahead.

``exchange.max_staleness`` bounds the steps between the weights that sampled a trajectory and those that learn
from it. With ``train.reference: reset`` (TBA′), trajectories that an older reference scored are stale, too.
``buffer.replay_limit`` bounds the number of steps that learn from a trajectory.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection

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
    """Staleness, reference and rollout budget of a run, whose trajectories live in ``buffer``."""

    def __init__(self, config: Config, buffer: ReplayBuffer) -> None:
        self._config = config
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
        end, slot_ends = None, dict[int, int]()
        if self._budget:
            end = self._budget.extend(step, ready=self._buffer.unlearned, missing=self.missing(step))
            slot_ends = self._budget.slot_ends
        return Publication(
            version=step,
            published=published,
            evaluate=evaluate,
            reference=self.reference,
            budget_end=end,
            slot_ends=slot_ends,
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
        return max(wanted - self._groups, int(self.starved(step)), self.overdue(step))

    def overdue(self, step: int) -> int:
        """Number of requests that a queue must wait for; 0 if groups are drawn at random."""
        return self._budget.overdue(step) if self._budget and self._config.queue else 0

    def starved(self, step: int) -> bool:
        """Tell whether ``step`` must wait for a shard: none arrived for too many steps, or since a resume.

        False if no searcher may issue a request.
        """
        if self._budget is not None and not self._owed.total():
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
        if self._budget is None or not self._budget.has_searchers:
            return False
        return self.missing(step) > self._owed.total()

    def note_visitors(self, visitors: Callable[[], Collection[int]]) -> None:
        """Share the budget among the run's own searchers and the elastic ones at work.

        visitors: returns the numbers of these elastic searchers.
        """
        if self._budget:
            self._budget.attend(visitors())

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
        elif overdue := self.overdue(step):
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
    """Requests that searchers may issue if staleness is bounded.

    A request issued under weights v is used by step v + n if no more than (n + 1)·B requests wait to be
    learned from by then (AReaL, arXiv 2505.24298, §5.1). So the run's own searchers may issue theirs before
    ``end``, which is (v + n + 1)·B in a run without losses or elastic searchers. In place of lost requests
    (duplicates, stale or repeated groups, those of excluded searchers) others are granted. Otherwise each
    loss would leave searchers less far ahead.

    Each slot has an end of its own, which rises only while an elastic searcher is at work there. Requests
    that this searcher leaves unanswered are granted again to the slot's next searcher. Until then as many
    others are granted to the other searchers.

    If steps learn from the oldest first, none is too stale, since steps wait for ``overdue`` requests.
    Going on with the quick ones and dropping the rest would starve long answers.

    completed: requests completed when the attempt begins.
    """

    def __init__(self, config: Config, completed: CompletedRequests) -> None:
        assert config.exchange.max_staleness is not None, "an unbounded staleness needs no budget"
        self._steps_ahead = config.exchange.max_staleness + 1
        self._requests_per_step = config.train.prompts_per_step
        self._last_step = config.train.steps
        self._launch = config.launch
        self._own = range(config.launch.searchers)
        self._slots = range(config.launch.searchers, config.launch.places)
        self._ends = {self._own: 0, **{_only(slot): slot for slot in self._slots}}  # by places that share it
        self._absent = set(self._slots)  # slots without a searcher at work
        self._silent = set[int]()
        self._completed = CompletedRequests.from_array(completed.to_array())
        self._open: dict[int, int] = {}  # version at the grant by unanswered request, oldest first
        self._ahead = set[int]()  # answered requests that are not granted yet
        self._owed = Counter[int]()  # by place: open requests, less those ahead
        self._set_aside = Counter[int]()  # by place: the most requests that were ever ahead at once

    @property
    def end(self) -> int:
        """The first request that the run's own searchers may not issue yet."""
        return self._ends[self._own]

    @property
    def slot_ends(self) -> dict[int, int]:
        """End of the requests of each elastic searcher at work, by its number."""
        numbers = zip(self._slots, self._launch.elastic_searchers, strict=True)
        return {number: self._ends[_only(slot)] for slot, number in numbers if slot not in self._absent}

    @property
    def has_searchers(self) -> bool:
        """True if there is a searcher to grant requests to."""
        return len(self._idle) < self._launch.places

    @property
    def _idle(self) -> set[int]:
        """Places from which no answer is expected."""
        return self._silent | self._absent

    def _place_of(self, request_id: int) -> int:
        return request_id % self._launch.places

    def attend(self, searchers: Collection[int]) -> None:
        """Note the numbers of the elastic searchers at work; one that has left owes nothing."""
        self._absent = set(self._slots).difference(map(self._launch.place_of, searchers))

    def extend(self, step: int, *, ready: int, missing: int) -> int:
        """Grant what the weights of ``step`` allow, and what is missing but not owed; return ``end``.

        ready: requests in the buffer that no step has learned from. missing: requests it lacks for ``step``.
        """
        self._withdraw()
        steps = max(0, min(self._steps_ahead, self._last_step - step))
        requests = max(steps * self._requests_per_step - ready, missing) - self.owed().total()
        idle, debts = self._idle, self._debts()
        while requests > 0 and debts:
            _, first, owed, busy, places = debts[0]
            request_id = self._next_request(places)
            place = self._place_of(request_id)
            if request_id in self._ahead:
                self._ahead.discard(request_id)
            else:
                self._open[request_id] = step
            self._owed[place] += 1
            if place not in idle:
                heapq.heapreplace(debts, ((owed + 1) / busy, first, owed + 1, busy, places))
                requests -= self._owed[place] > 0
        return self.end

    def _debts(self) -> list[tuple[float, int, int, int, range]]:
        """Return a heap of the places that share an end, those that owe least first.

        An entry holds the requests owed per busy place, the first place, the requests owed, the number of
        busy places, and all of these places.
        """
        idle, debts = self._idle, []
        for places in self._ends:
            owed = [self._owed[place] for place in places if place not in idle]
            if owed:
                debts.append((sum(owed) / len(owed), places.start, sum(owed), len(owed), places))
        heapq.heapify(debts)
        return debts

    def _next_request(self, places: range) -> int:
        """Return the next request of these places, and raise their end past it."""
        while True:
            request_id = self._ends[places]
            self._ends[places] += self._launch.places if len(places) == 1 else 1
            theirs = self._place_of(request_id) in places
            if theirs and (request_id in self._ahead or request_id not in self._completed):
                return request_id

    def _withdraw(self) -> None:
        """Take back the requests that slots without a searcher owe.

        A searcher that takes such a slot before this call still has the old end.
        """
        for request_id in [one for one in self._open if self._place_of(one) in self._absent]:
            del self._open[request_id]
            slot = _only(self._place_of(request_id))
            self._ends[slot] = min(self._ends[slot], request_id)
        self._ahead = {one for one in self._ahead if self._place_of(one) not in self._absent}
        self._silent -= self._absent
        for place in self._absent:
            self._owed[place] = self._set_aside[place] = 0

    def overdue(self, step: int) -> int:
        """Count requests that ``step`` must wait for, so that later steps can learn from the rest in time.

        Steps up to v + n can learn from requests granted under weights v. So before ``step`` no more than
        (v + n − step)·B requests that were granted by then may be open. A searcher's requests that were set
        aside are taken to be its oldest.
        """
        set_aside, idle = self._set_aside.copy(), self._idle
        found = overdue = 0
        for request_id, version in self._open.items():
            place = self._place_of(request_id)
            found += place not in idle and set_aside[place] <= 0
            set_aside[place] -= 1
            in_time = max(0, version + self._steps_ahead - 1 - step) * self._requests_per_step
            overdue = max(overdue, found - in_time)
        return overdue

    def arrive(self, request_ids: np.ndarray) -> None:
        """Note answered requests. A request that is not granted yet may stand in for one that was set aside.

        Second answers do not count. Neither do answers to requests from before a searcher left or the attempt
        began.
        """
        new = request_ids[~self._completed.among(request_ids)]
        self._completed.add(new)
        self._silent.difference_update(map(self._place_of, request_ids.tolist()))
        for request_id in new.tolist():
            place = self._place_of(request_id)
            if self._open.pop(request_id, None) is None:
                if self._owed[place] <= 0:
                    continue
                self._ahead.add(request_id)
            self._owed[place] -= 1
        self._set_aside |= Counter(map(self._place_of, self._ahead))

    def owed(self) -> Counter[int]:
        """Count requests that may be issued and are not completed, by place; excluded places are left out."""
        idle = self._idle
        return +Counter({place: count for place, count in self._owed.items() if place not in idle})

    def exclude(self, places: set[int], why: str) -> None:
        """Ignore these searchers until they deliver. Raises ExchangeError(``why``) if none is left."""
        self._silent |= places
        if not self.has_searchers:
            raise ExchangeError(why)


def _only(place: int) -> range:
    return range(place, place + 1)
