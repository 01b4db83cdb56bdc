"""Condenses a metrics file, record by record, to a digest of bounded size, which is kept beside the file.

The rank that writes the metrics also writes the digest (``KeptDigest``), so that readers parse only the last
lines even of a long run. A digest that is missing, or does not fit its file, is made anew from all lines.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from zlib import crc32

from pydantic import TypeAdapter

from tba_hpc.report.attempts import STARTS, CumulativeCounter
from tba_hpc.report.curves import Curve, Trends
from tba_hpc.run.files import is_disk_full, open_regular, read_regular, write_atomic
from tba_hpc.run.history import integer
from tba_hpc.run.metrics import MetricsTail, Record, number

log = logging.getLogger(__name__)

FORMAT = 17
"""Version of digest files. A digest of another version is made anew from all lines."""

KEEP_SECONDS = 60.0
"""Shortest pause between two writes of a digest; readers parse the lines after the last write."""

CHECKPOINTS = 16
"""Number of newest checkpoints whose counts are kept, since a resume starts from its checkpoint's counts."""

PHASES = ("started", "resumed", "filling", "waiting", "stopped", "finished")
"""Events that begin a phase of the trainer."""


@dataclass
class Merged:
    """Counts of what the trainer has merged, without merges that a resume has undone.

    revision: how often merges or evictions have changed the buffer. tokens: number of completion tokens.
    duplicates, evicted: trajectories that the buffer rejected as duplicates, or evicted. dropped:
    trajectories left out, because an earlier shard had answered their request. cursors: index of the next
    shard, by searcher.
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
        """Count one more event ``merged`` or ``evicted``."""
        self.revision = integer(record, "revision")
        self.evicted += integer(record, "evicted")
        if record["event"] == "merged":
            self.shards += 1
            self.trajectories += integer(record, "trajectories")
            self.tokens += integer(record, "tokens")
            self.duplicates += integer(record, "duplicates")
            self.dropped += integer(record, "again")
            self.cursors[integer(record, "searcher")] = integer(record, "shard") + 1

    def copy(self) -> Merged:
        """Return a copy that later records do not change."""
        return replace(self, cursors=dict(self.cursors))


@dataclass
class Stretch:
    """The span of time and steps in which the trainer of one attempt trained.

    start: time at which the attempt's first step began, unix seconds; before that step, time of the last
    record. end: time of the last record. If the clock is set back, ``start`` moves back as far, so that
    ``end − start`` stays right. first, last: steps of the first and last record. event: event of the last
    record; empty if it has none. begun: whether a step was taken.
    """

    start: float
    end: float
    first: int
    last: int
    event: str = ""
    begun: bool = False


@dataclass
class TrainerDigest:
    """Digest of the trainer's records.

    phase: the last event of PHASES, or ``training`` if a step came after it. latest: newest value of every
    figure. checkpoint: event of the newest complete checkpoint. postponed: event of the present attempt's
    newest checkpoint that found no space, if none was completed since. damaged: events of checkpoints that
    were set aside. step: optimizer steps done. starts: starts of the loop. redone: steps that resumes had to
    do again. merged: counts up to now. saved: counts that the newest checkpoints contain, oldest first.
    """

    trends: Trends = field(default_factory=Trends)
    phase: str = ""
    latest: Record = field(default_factory=dict)
    checkpoint: Record = field(default_factory=dict)
    postponed: Record = field(default_factory=dict)
    damaged: list[Record] = field(default_factory=list)
    step: int = 0
    starts: int = 0
    redone: int = 0
    merged: Merged = field(default_factory=Merged)
    saved: list[Merged] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Add the next record."""
        self.trends.take(record)
        event = str(record.get("event", ""))
        if event in ("merged", "evicted"):
            self.merged.take(record)
        elif event:
            self._take_event(event, record)
        else:
            self.phase, self.step = "training", integer(record, "step")
            self.latest = {**self.latest, **record}
        if event != "damaged":  # logged before the event that begins the attempt
            self._stretch(event, record)

    def _take_event(self, event: str, record: Record) -> None:
        match event:
            case "damaged":
                self.damaged.append(record)
            case "postponed":
                self.postponed = record
            case "snapshot":
                self._save(integer(record, "revision"))
            case "checkpoint":
                self._save(integer(record, "revision"))
                self.checkpoint, self.postponed = record, {}
                step = max(self.step, integer(record, "step"))  # training went on meanwhile
                self._keep_latest({**record, "step": step})
            case _ if event in PHASES:
                self.phase = event
                if event in STARTS:
                    self.postponed = {}
                    self._begin(integer(record, "step"), integer(record, "revision"))
                self._keep_latest(record)

    def _keep_latest(self, record: Record) -> None:
        self.step = int(number(record, "step", self.step))
        self.latest = {**self.latest, **record}

    def _save(self, revision: int) -> None:
        """Keep the present counts as those of a checkpoint, unless its counts are kept already.

        revision: how often merges and evictions had changed the checkpoint's buffer.
        """
        if all(saved.revision != revision for saved in self.saved):
            self.saved = [*self.saved, self.merged.copy()][-CHECKPOINTS:]

    def _begin(self, step: int, revision: int) -> None:
        """Reset the counts to those of the checkpoint from which an attempt begins; without one, to 0.

        step, revision: step and revision (see ``_save``) of the checkpoint; 0 without one.
        """
        self.starts += 1
        self.redone, self.step = self.redone + max(0, self.step - step), step
        self.saved = [saved for saved in self.saved if saved.revision <= revision]
        if self.merged.revision != revision:  # equal if the buffer has not changed since
            self.merged = self.saved[-1].copy() if self.saved and revision else Merged()

    def _stretch(self, event: str, record: Record) -> None:
        when, step = number(record, "time", 0.0), int(number(record, "step", self.step))
        if event in STARTS or not self.stretches:
            self.stretches.append(Stretch(when, when, step, step))
        now = self.stretches[-1]
        if now.begun:
            now.start += min(0.0, when - now.end)
        else:
            now.start = when - number(record, "time/step_seconds", 0.0)
        now.begun |= not event
        now.end, now.last, now.event = when, step, event

    @property
    def seconds(self) -> float:
        """Wall time of training in all attempts, in seconds; see ``Stretch``."""
        return sum(stretch.end - stretch.start for stretch in self.stretches)


@dataclass
class SearcherDigest:
    """Digest of a searcher's records.

    trends: curves and counts of this searcher. ``RunData`` adds them to those of the run, and then puts those
    of the run here. rates: tokens per second by unix second. tokens: number generated, even if lost with
    their searcher. rebuilds, rejected, nan_groups: counters of the metrics of these names. stage: stage that
    the engine's start has reached. stage_since: time when this stage began, unix seconds. last: the last
    record that is not an event. since, until: times of the first and last record of the present start, unix
    seconds. earlier_seconds: seconds from first to last record, summed over earlier starts.
    """

    index: int
    trends: Trends = field(default_factory=Trends)
    rates: Curve = field(default_factory=Curve)
    tokens: int = 0
    rebuilds: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("search/rebuilds"))
    rejected: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("search/rejected"))
    nan_groups: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("search/nan_groups"))
    stage: str = ""
    stage_since: float = 0.0
    last: Record = field(default_factory=dict)
    earlier_seconds: float = 0.0
    since: float = 0.0
    until: float = 0.0

    def take(self, record: Record) -> None:
        """Add the next record."""
        when, event = number(record, "time", self.until), record.get("event")
        if event == "started" or not self.since:
            self.earlier_seconds, self.since = self.seconds, when
        elif when < self.until:  # the clock was set back: move ``since`` as far
            self.since += when - self.until
        self.until = when
        self.rebuilds.take(record)
        self.trends.rejected += self.rejected.take(record)
        self.trends.nan_groups += self.nan_groups.take(record)
        if event == "started":
            self.stage, self.trends.rejected_before = "", self.trends.rejected
        if event == "engine" and record["stage"] != self.stage:  # the first stage is logged twice
            self.stage, self.stage_since = str(record["stage"]), when
        if event is not None:
            return
        self.trends.take_search(record)
        self.last = {name: value for name, value in record.items() if not isinstance(value, list)}
        self.tokens += integer(record, "search/tokens")
        if (rate := number(record, "search/tokens_per_second")) is not None:
            self.rates.take(int(when), rate)

    @property
    def seconds(self) -> float:
        """Seconds from first to last record, summed over all starts."""
        return self.earlier_seconds + self.until - self.since


# --- Files ---

D = TypeVar("D", TrainerDigest, SearcherDigest)


def digest_file(metrics: Path) -> Path:
    """Return the path of a metrics file's digest.

    The digest's first line holds FORMAT, the number of bytes of metrics that it covers, and a checksum.
    """
    return metrics.with_suffix(".digest.json")


@functools.cache
def _codec(kind: str) -> TypeAdapter[Any]:
    """Return the codec for digests of the class called ``kind``. It is cached, since it is slow to build."""
    return TypeAdapter(TrainerDigest if kind == TrainerDigest.__name__ else SearcherDigest)


def kept_digest(metrics: Path, digest: D) -> tuple[D, MetricsTail]:
    """Return a digest of a metrics file, and a reader of the records that are not in it yet.

    digest: an empty digest, which is returned if none on disk fits the file.
    """
    try:
        head, _, body = read_regular(digest_file(metrics)).partition(b"\n")
        end, checksum = json.loads(head)[f"format {FORMAT}"]
        if checksum != _checksum(end, body):
            raise ValueError("damaged")
        kept: D = _codec(type(digest).__name__).validate_json(body)
        with open_regular(metrics) as file:
            file.seek(end - 1)
            fits = file.read(1) == b"\n"  # the covered part must end with a whole line
    except (OSError, ValueError, TypeError, LookupError):
        fits = False
    return (kept, MetricsTail(metrics, place=end)) if fits else (digest, MetricsTail(metrics))


class KeptDigest(Generic[D]):
    """Writer of the digest of a metrics file. The rank that writes the metrics calls it with new records.

    It starts from the records that the file already has. digest: an empty digest, used if none is on disk.
    """

    def __init__(self, metrics: Path, digest: D) -> None:
        self._metrics = metrics
        found = kept_digest(metrics, digest)
        self._digest: D = found[0]
        for record in found[1].records():
            self._digest.take(record)
        self._next = 0.0  # a digest that did not fit the file is replaced at once

    def __call__(self, records: Sequence[Record], end: int | None) -> None:
        """Add new records, and write the digest if that is due.

        end: length of the metrics file in bytes; None if some records are not written yet.
        """
        for record in records:
            self._digest.take(record)
        if end is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + KEEP_SECONDS
            keep_digest(self._metrics, self._digest, end)


def _checksum(end: int, body: bytes) -> int:
    return crc32(b"%d %b" % (end, body))


def keep_digest(metrics: Path, digest: TrainerDigest | SearcherDigest, end: int) -> None:
    """Write the digest of a metrics file's first ``end`` bytes; on a full disk the old one stays."""
    path, body = digest_file(metrics), _codec(type(digest).__name__).dump_json(digest)
    head = json.dumps({f"format {FORMAT}": [end, _checksum(end, body)]})
    try:
        write_atomic(path, f"{head}\n{body.decode()}")
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("%s: %s; until there is space, showing the run takes longer", path, error)
