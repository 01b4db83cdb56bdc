"""What a metrics file comes to, folded record by record in bounded memory, and kept beside the file.

Whoever writes the file keeps its digest (``KeptDigest``), so that a reader has only the last lines to parse,
however long the run. It holds nothing that the lines do not: if it is missing or does not fit its file, the
lines are folded again.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter

from tba_hpc.report.attempts import STARTS, CumulativeCounter
from tba_hpc.report.curves import Curve, Histograms, Trends
from tba_hpc.run.files import is_for_room, write_atomic
from tba_hpc.run.metrics import MetricsTail, Record, number

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the files of digests; those of another are made again from the lines."""

KEEP_SECONDS = 60.0
"""Between two writings of a digest: lines of so long are parsed by whoever reads the file."""

SEALS = 2048
"""Newest seals of a searcher that are remembered: more than were ever sealed beyond a checkpoint."""

CHECKPOINTS = 16
"""Newest checkpoints to which the counts can go back; a resume takes the newest one that is whole."""

SHOWN_EVENTS, DAMAGED = 256, 32
"""Newest events of the trainer that are remembered, and damaged checkpoints."""

PACE_STEPS = 20
"""Steps whose mean duration the estimate of the time left is made from."""

ROUTINE = ("filling", "merged", "evicted", "snapshot")
"""Events of the trainer that a report leaves out."""

PHASES = ("started", "resumed", "filling", "waiting", "stopped", "finished")
"""Events that say what the trainer does from then on."""

WAITS = ("search/seal_share", "search/propagation_seconds", "search/load_seconds", "search/busy_share")
"""Figures of a searcher of which mean and 95th percentile are shown."""


# --- Parts ---


@dataclass
class Spread:
    """Mean and quantiles of values from 0 up, the latter to 1 %.

    bins: how many values lie within 2 % from 1.02**bin; LEAST for those of 0.
    """

    total: float = 0.0
    count: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    BASE = math.log(1.02)
    LEAST = -4096

    def take(self, value: float) -> None:
        """Count one more value."""
        self.total += value
        self.count += 1
        self._count(math.floor(math.log(value) / self.BASE) if value > 0 else self.LEAST, 1)

    def add(self, other: Spread) -> None:
        """Count all values of another one as well."""
        self.total += other.total
        self.count += other.count
        for place, count in other.bins.items():
            self._count(place, count)

    def _count(self, place: int, count: int) -> None:
        self.bins[place] = self.bins.get(place, 0) + count

    @property
    def mean(self) -> float | None:
        """Of all values; None of nothing."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float:
        """The value that ``share`` of all do not exceed; of at least one."""
        wanted, passed = share * self.count, 0
        for place in sorted(self.bins):
            passed += self.bins[place]
            if passed >= wanted:
                break
        return 0.0 if place == self.LEAST else math.exp(self.BASE * (place + 0.5))


class Sealed(NamedTuple):
    """What a shard holds: trajectories, and the tokens of their completions."""

    trajectories: int
    tokens: int


@dataclass
class Merged:
    """What the surviving history of a run has merged; cursors: per searcher, the shard that comes next.

    dropped: trajectories that came too late, or answered a request a second time.
    """

    revision: int = 0
    shards: int = 0
    trajectories: int = 0
    tokens: int = 0
    duplicates: int = 0
    evicted: int = 0
    dropped: int = 0
    cursors: dict[int, int] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """One more event ``merged`` or ``evicted``."""
        self.revision = _whole(record, "revision")
        self.evicted += _whole(record, "evicted")
        if record["event"] == "merged":
            self.shards += 1
            self.trajectories += _whole(record, "trajectories")
            self.tokens += _whole(record, "tokens")
            self.duplicates += _whole(record, "duplicates")
            self.dropped += _whole(record, "late") + _whole(record, "again")
            self.cursors[_whole(record, "searcher")] = _whole(record, "shard") + 1

    def copy(self) -> Merged:
        """One that stays as this is now."""
        return Merged(**{**vars(self), "cursors": dict(self.cursors)})


@dataclass
class Stretch:
    """What the trainer wrote in one attempt: when, unix s, between which steps; event: its last record's."""

    start: float
    end: float
    first: int
    last: int
    event: str = ""


@dataclass
class EventRow:
    """Events of one kind that followed one another: how many, the time and the step of the last."""

    event: str
    times: int
    time: float
    step: int


@dataclass
class TrainerDigest:
    """The trainer's records.

    phase: the last event of PHASES, or ``training``. postponed: the newest checkpoint for which there was no
    space, if none was complete since. latest: the newest value of every figure. step: the last one done.
    redone: steps taken back by all resumes. saved: what was merged by the newest checkpoints, by revision.
    events: the newest rows of the run's history; older_events: how many came before.
    """

    trends: Trends = field(default_factory=Trends)
    stalls: Spread = field(default_factory=Spread)
    staleness: Histograms = field(default_factory=Histograms)
    phase: str = ""
    latest: Record = field(default_factory=dict)
    checkpoint: Record = field(default_factory=dict)
    postponed: Record = field(default_factory=dict)
    damaged: list[Record] = field(default_factory=list)
    damages: int = 0
    step: int = 0
    starts: int = 0
    redone: int = 0
    step_times: list[float] = field(default_factory=list)
    merged: Merged = field(default_factory=Merged)
    saved: list[Merged] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    older_events: int = 0

    def take(self, record: Record) -> None:
        """One more record."""
        self.trends.take(record)
        event = record.get("event")
        if event in ("merged", "evicted"):
            self.merged.take(record)
        elif event is None:
            self._take_step(record)
        else:
            self._take_event(str(event), record)
        if event != "damaged":  # logged before the start that it belongs to
            self._stretch(str(event or ""), record)

    def _take_step(self, record: Record) -> None:
        self.phase, self.step = "training", _whole(record, "step")
        self.step_times = [*self.step_times, number(record, "time", 0.0)][-PACE_STEPS - 1 :]
        if (stall := number(record, "sync/publish_stall_seconds")) is not None:
            self.stalls.take(stall)
        if isinstance(counts := record.get("staleness/histogram"), list):
            self.staleness.take(self.step, counts)
        self.latest = {**self.latest, **record}

    def _take_event(self, event: str, record: Record) -> None:
        if event in STARTS:
            self._begin(_whole(record, "step"), _whole(record, "revision"))
        if event in PHASES:
            self.phase, self.step_times = event, []
        if event in ("snapshot", "checkpoint"):
            self._save(_whole(record, "revision"))
        if event == "checkpoint":
            self.checkpoint, self.postponed = record, {}
            record = {**record, "step": max(self.step, _whole(record, "step"))}  # training has gone on
        elif event == "postponed":
            self.postponed = record
        elif event == "damaged":
            self.damaged = [*self.damaged, record][-DAMAGED:]
            self.damages += 1
        if event in (*PHASES, "checkpoint"):
            self.step = int(number(record, "step", self.step))
            self.latest = {**self.latest, **record}
        if event not in ROUTINE:
            self._show(event, record)

    def _save(self, revision: int) -> None:
        """What a checkpoint holds: what was merged when it was copied, which may be logged before."""
        if all(saved.revision != revision for saved in self.saved):
            self.saved = [*self.saved, self.merged.copy()][-CHECKPOINTS:]

    def _begin(self, step: int, revision: int) -> None:
        """Go back to where an attempt begins: a checkpoint, or nothing."""
        self.starts += 1
        self.redone += max(0, self.step - step)
        self.step = step
        self.staleness.cut(step)
        self.saved = [saved for saved in self.saved if saved.revision <= revision]
        if self.merged.revision != revision:  # else nothing came after the checkpoint
            self.merged = self.saved[-1].copy() if self.saved and revision else Merged()

    def _stretch(self, event: str, record: Record) -> None:
        when, step = number(record, "time", 0.0), int(number(record, "step", self.step))
        if event in STARTS or not self.stretches:
            self.stretches.append(Stretch(when, when, step, step))
        now = self.stretches[-1]
        now.end, now.last, now.event = when, step, event

    def _show(self, event: str, record: Record) -> None:
        last = self.events[-1] if self.events else None
        times = 1 + (last.times if last and last.event == event else 0)
        row = EventRow(event, times, number(record, "time", 0.0), _whole(record, "step"))
        self.events[len(self.events) - (times > 1) :] = [row]
        if len(self.events) > SHOWN_EVENTS:
            del self.events[0]
            self.older_events += 1

    @property
    def seconds(self) -> float:
        """Wall time of all attempts."""
        return sum(stretch.end - stretch.start for stretch in self.stretches)


@dataclass
class SearcherDigest:
    """A searcher's records.

    stays: seconds of its starts but the last, each to its last record; since, until: of that one, unix
    seconds. tokens: generated, those lost with their searcher included. rates: tokens per second by
    unix second; at_work: the same while it generated. seals: its newest, by index. last: the last record that
    is no event.
    """

    index: int
    trends: Trends = field(default_factory=Trends)
    rewards: Histograms = field(default_factory=Histograms)
    waits: dict[str, Spread] = field(default_factory=dict)
    rates: Curve = field(default_factory=lambda: Curve(1))
    at_work: Spread = field(default_factory=Spread)
    tokens: int = 0
    rebuilds: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("search/rebuilds"))
    seals: dict[int, Sealed] = field(default_factory=dict)
    last: Record = field(default_factory=dict)
    stays: float = 0.0
    since: float = 0.0
    until: float = 0.0

    def take(self, record: Record) -> None:
        """One more record."""
        self.trends.take_search(self.index, record)
        self._take_time(record)
        self.rebuilds.take(record)
        take_seal(self.seals, record)
        if "event" in record:
            return
        self.last = {name: value for name, value in record.items() if not isinstance(value, list)}
        self.tokens += _whole(record, "search/tokens")
        self._take_rate(record)
        for name in WAITS:
            if (value := number(record, name)) is not None:
                self.waits.setdefault(name, Spread()).take(value)
        version, counts = number(record, "search/version"), record.get("search/reward_histogram")
        if version is not None and isinstance(counts, list):
            self.rewards.take(int(version), counts)

    def _take_time(self, record: Record) -> None:
        when = number(record, "time", self.until)
        if record.get("event") == "started" or not self.since:
            self.stays, self.since = self.seconds, when
        self.until = when

    @property
    def seconds(self) -> float:
        """For how long it was there, all its starts together: engines are loaded in part before that."""
        return self.stays + self.until - self.since

    def _take_rate(self, record: Record) -> None:
        rate, when = number(record, "search/tokens_per_second"), number(record, "time")
        if rate is not None and when is not None:
            self.rates.take(int(when), rate)
            if rate:
                self.at_work.take(rate)


def take_seal(seals: dict[int, Sealed], record: Record) -> None:
    """Remember the seal that a searcher's record tells of, if it does; the oldest are forgotten."""
    if record.get("event") != "sealed":
        return
    index = _whole(record, "shard")
    seals.pop(index, None)
    seals[index] = Sealed(_whole(record, "trajectories"), _whole(record, "tokens"))
    if len(seals) > SEALS:
        del seals[next(iter(seals))]


def _whole(record: Record, name: str) -> int:
    return int(number(record, name, 0))


# --- Files ---

D = TypeVar("D", TrainerDigest, SearcherDigest)


def digest_file(metrics: Path) -> Path:
    """Where the digest of a metrics file is kept: a line with FORMAT and where it ends, and the digest."""
    return metrics.with_suffix(".digest.json")


def read_digest(metrics: Path, digest: D) -> tuple[D, MetricsTail]:
    """The digest of all whole lines of a file, and what follows the file from there.

    digest: a fresh one, which is returned if none is kept.
    """
    digest, tail = kept_digest(metrics, digest)
    for record in tail.records():
        digest.take(record)
    return digest, tail


def kept_digest(metrics: Path, digest: D) -> tuple[D, MetricsTail]:
    """The digest as it was kept, or ``digest``, and what follows the file from where it ends."""
    try:
        head, _, body = digest_file(metrics).read_bytes().partition(b"\n")
        kept: D = _adapter(type(digest).__name__).validate_json(body)
        end = json.loads(head)[f"format {FORMAT}"]
        fits = _is_line_end(metrics, end)
    except (OSError, ValueError, LookupError):
        fits = False
    return (kept, MetricsTail(metrics, place=end)) if fits else (digest, MetricsTail(metrics))


def _is_line_end(metrics: Path, end: int) -> bool:
    """Whether the lines of a file can end there."""
    with metrics.open("rb") as file:
        file.seek(end - 1)
        return file.read(1) == b"\n"


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    """Reads and writes the class of that name; made when it is needed, as that takes a moment."""
    return TypeAdapter(TrainerDigest if kind == TrainerDigest.__name__ else SearcherDigest)


class KeptDigest(Generic[D]):
    """Folds the records of a metrics file as they are written, and keeps their digest beside it.

    digest: a fresh one; what the file holds already is folded first.
    """

    def __init__(self, metrics: Path, digest: D) -> None:
        self._metrics = metrics
        self._digest: D = read_digest(metrics, digest)[0]
        self._next = 0.0  # one that did not fit the file is replaced at once

    def take(self, record: Record) -> None:
        """One more record is in the file."""
        self._digest.take(record)

    def keep_if_due(self, end: int) -> None:
        """``keep``, unless that was a moment ago."""
        if time.monotonic() >= self._next:
            self.keep(end)

    def keep(self, end: int) -> None:
        """Write the digest of the file's first ``end`` bytes; a full disk keeps the old one."""
        self._next = time.monotonic() + KEEP_SECONDS
        try:
            body = _adapter(type(self._digest).__name__).dump_json(self._digest).decode()
            write_atomic(digest_file(self._metrics), json.dumps({f"format {FORMAT}": end}) + "\n" + body)
        except OSError as error:
            if not is_for_room(error):
                raise
            log.warning("%s: %s; what it sums up is in the metrics", digest_file(self._metrics), error)
