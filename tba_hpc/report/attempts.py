"""Reads the attempts of a run (starts of its ranks) from its events: how each ended, and its faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tba_hpc.run.metrics import Record, number

Event = Mapping[str, Any]
"""A line of events.jsonl; see ``run.events.log_event``."""

STARTS = ("started", "resumed")
"""Events in a rank's metrics that begin an attempt. Counts in the rank's later records start again at 0."""

ENDS = ("failed", "aborted", "stopped", "finished", "refused")
"""Events that end an attempt."""

KILLED = "killed"
"""Outcome of an attempt whose end no event notes, because its node was lost or its launcher killed."""

FAULTS = {
    "rebuilds": "engine rebuilt",
    "damaged": "damaged checkpoint set aside",
    "failed": "ranks failed",
    KILLED: "attempt killed",
    "unreachable": "node unreachable",
    "unhealthy": "node unhealthy",
    "draining": "node drained",
    "hung": "srun hung",
    "orphan": "orphan step cancelled",
    "requeue": "back to the queue",
}
"""Text shown for each kind of fault. The first two kinds are counted in metrics, the others in events."""


WHY_REQUEUED = (
    (("draining",), "a node drained"),
    (("signal",), "preempted or out of time"),
    (("preempted",), "preempted, cancelled or out of time"),
    (("stopped", "requeue"), "the ranks were asked to stop, or out of time"),
    (("requeue",), "nodes unreachable"),
    ((), "ended by Slurm (requeued, preempted or a node lost)"),
)
"""Reasons why a job is back in the queue, by events. The first reason whose events all happened applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run's ranks, or an allocation of a Slurm job in which none were started.

    name: such as ``attempt-003``, empty if no ranks were started. job: id of the Slurm job, or empty.
    restarts: how often this job had been requeued. trainers, searchers: numbers of ranks. start, end: unix
    seconds; ``end`` is None while the attempt goes on, or if no event notes its end. outcome: one of ENDS,
    KILLED, or empty while it goes on. note: for a failure, a rank's sentence or the exit status, and the
    nodes that were unreachable afterwards; for a refusal, its sentence. requeued: whether the job then queued
    again. kinds: kinds of all its events.
    """

    name: str = ""
    job: str
    restarts: int
    trainers: int = 0
    searchers: int = 0
    start: float
    end: float | None = None
    outcome: str = ""
    note: str = ""
    requeued: bool = False
    kinds: frozenset[str] = frozenset()

    @property
    def why_requeued(self) -> str:
        """Reason why the job lost this allocation and went back to the queue."""
        return next(words for needed, words in WHY_REQUEUED if self.kinds.issuperset(needed))

    @property
    def lacks_ranks(self) -> bool:
        """True if the allocation has not ended, and no ranks have been started in it yet."""
        return not self.name and not self.end


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """Return all attempts of a run, oldest first. events: all events of the run, oldest first."""
    found: list[Attempt] = []
    for event in events:
        kind, last = event.get("event"), found[-1] if found else None
        same = last is not None and last.restarts == event.get("restarts")
        if last and same and kind == "start" and last.lacks_ranks:
            found[-1] = replace(_begun(event), start=last.start, kinds=last.kinds)
        elif kind in ("allocated", "start"):
            if last and not last.end:  # its end was never noted
                found[-1] = replace(last, outcome=KILLED)
            if last and last.job and last.job == event.get("job") and not same:
                found[-1] = replace(found[-1], requeued=True)
            found.append(_begun(event))
        elif last and kind in ENDS:
            note = event.get("sentence") or (f"exit status {event['code']}" if "code" in event else "")
            found[-1] = replace(last, end=event["time"], outcome=event["event"], note=note)
        elif last and kind == "unreachable" and same and last.outcome == "failed":
            found[-1] = replace(last, note=f"{last.note}, {event.get('nodes')} unreachable")
        elif last and kind == "requeue" and same:
            found[-1] = replace(last, requeued=True, end=last.end or event["time"])
        if found and found[-1].restarts == event.get("restarts"):
            found[-1] = replace(found[-1], kinds=found[-1].kinds | {str(kind)})
    return found


def _begun(event: Event) -> Attempt:
    return Attempt(
        name=event.get("attempt", ""),
        job=event.get("job", ""),
        restarts=event.get("restarts", 0),
        trainers=event.get("trainers", 0),
        searchers=event.get("searchers", 0),
        start=event["time"],
    )


def held_seconds(found: Sequence[Attempt], ends: Sequence[float]) -> float:
    """Return the seconds for which machines were held; a Slurm job also holds them between attempts.

    ends: end of each attempt, unix seconds.
    """
    held = sum(end - attempt.start for attempt, end in zip(found, ends, strict=True))
    for before, after, end in zip(found, found[1:], ends, strict=False):
        if after.job and (before.job, before.restarts) == (after.job, after.restarts):
            held += after.start - end
    return held


def failures_in_a_row(found: Sequence[Attempt]) -> int:
    """Count the failed attempts since the last one that did not fail."""
    outcomes = [attempt.outcome for attempt in reversed(found)]
    return next((count for count, outcome in enumerate(outcomes) if outcome != "failed"), len(outcomes))


def fault_words(faults: Mapping[str, int]) -> list[str]:
    """Return a text such as ``3 × engine rebuilt`` for each kind of fault that happened."""
    return [f"{count} × {FAULTS[kind]}" for kind, count in faults.items() if count]


@dataclass
class CumulativeCounter:
    """Sum, over all attempts, of a metric that counts from 0 in each attempt.

    name: the metric. last: its value in the present attempt.
    """

    name: str
    total: int = 0
    last: int = 0

    def take(self, record: Record) -> int:
        """Add the next record of a rank; return by how much the sum has grown."""
        if record.get("event") in STARTS:
            self.last = 0
        now = int(number(record, self.name, self.last))
        more, self.last = max(0, now - self.last), now
        self.total += more
        return more
