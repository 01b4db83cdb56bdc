"""The figures of a run, folded from its files as they grow; cheap enough to look every second.

It starts no process: a caller that may asks Slurm how the job stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tba_hpc.config import Config, is_elastic
from tba_hpc.core.types import Split
from tba_hpc.report.alerts import Alert, alerts
from tba_hpc.report.attempts import Attempt, CumulativeCounter, Event, attempts, count_faults
from tba_hpc.report.curves import Trends
from tba_hpc.report.digest import Sealed, SearcherDigest, TrainerDigest, kept_digest, take_seal
from tba_hpc.report.summary import (
    Counts,
    SizeOf,
    index_of,
    read_evaluations,
    score_name_of,
    searcher_files,
    series,
    unknown_size,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.metrics import MetricsTail, Record, number, record_seconds
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Owner, holders

QUEUE_SECONDS = 10.0
"""Shortest pause between two questions to Slurm."""

FRESH_SECONDS = 60.0
"""A searcher silent for longer, and for two records, is not at work; clocks of nodes may differ by less."""

QueueEntry = dict[str, str]
"""A component of a Slurm job; see ``launch.slurm_queue.job_states``."""

Queue = Callable[[RunDir], list[QueueEntry]]
"""How Slurm sees the components of a run's job; none for a run that was never submitted."""


@dataclass
class RunRecords:
    """What the metrics of all ranks say. searchers: the last record of each; seals: its newest, by index."""

    trainer: TrainerDigest = field(default_factory=TrainerDigest)
    searchers: dict[int, Record] = field(default_factory=dict)
    seals: dict[int, dict[int, Sealed]] = field(default_factory=dict)
    _rebuilds: dict[int, CumulativeCounter] = field(default_factory=dict)

    def begin_search(self, digest: SearcherDigest) -> None:
        """What a searcher has done by now; its next records follow."""
        self.trends.add(digest.trends)
        self._rebuilds[digest.index], self.seals[digest.index] = digest.rebuilds, digest.seals
        if digest.last:
            self.searchers[digest.index] = digest.last

    def take_search(self, searcher: int, record: Record) -> None:
        """One more record of a searcher."""
        self.trends.take_search(searcher, record)
        self._rebuilds[searcher].take(record)
        take_seal(self.seals[searcher], record)
        if "event" not in record:
            self.searchers[searcher] = record

    @property
    def trends(self) -> Trends:
        """Of the trainer and of all searchers."""
        return self.trainer.trends

    @property
    def rebuilds(self) -> int:
        """Engines rebuilt, in all attempts."""
        return sum(counter.total for counter in self._rebuilds.values())

    @property
    def latest(self) -> Record:
        """The trainer's newest value of every figure."""
        return self.trainer.latest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.trainer.step

    @property
    def newest(self) -> float:
        """Time of the newest record, unix seconds; 0 if there is none.

        Not of elastic searchers: they outlive the run.
        """
        own = [record for searcher, record in self.searchers.items() if not is_elastic(searcher)]
        return max(series([self.latest, *own], "time"), default=0.0)


@dataclass
class RunMonitor:
    """Follows a run; ``update`` looks at what is new."""

    run: RunDir
    config: Config
    queue: Queue = lambda _: []
    progress: RunRecords = field(default_factory=RunRecords)
    events: list[Event] = field(default_factory=list)
    """Of launchers and batch scripts; not those of submissions, after which a run may wait for days."""
    submissions: dict[str, str] = field(default_factory=dict)
    """What submits the run again, by the job that was submitted so."""
    attempts: list[Attempt] = field(default_factory=list)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    job: list[QueueEntry] = field(default_factory=list)
    visitors: dict[int, Owner] = field(default_factory=dict)
    """Elastic searchers that are there."""
    _asked: float = -QUEUE_SECONDS
    _opened: float = field(default_factory=time.time)
    _tails: dict[Path, MetricsTail] = field(default_factory=dict)

    def update(self) -> None:
        """Read what is new in the run directory; ask Slurm if that was long ago."""
        self._ask_slurm()  # first: what the files say is newer then
        if events := self._new(self.run.events_file):
            self.submissions |= {
                str(e["job"]): str(e["command"]) for e in events if e["event"] == "submitted"
            }
            self.events += [event for event in events if event["event"] != "submitted"]
            self.attempts = attempts(self.events)
            if any(event["event"] == "changed" for event in events):
                self.config = self.run.config()
        self._read_trainer(self.run.metrics_file("trainer"))
        for path in searcher_files(self.run):
            self._read_searcher(path)
        self.evaluations = read_evaluations(self.run, self.evaluations)

    def _new(self, path: Path) -> list[Record]:
        return self._tails.setdefault(path, MetricsTail(path)).new()

    def _read_trainer(self, path: Path) -> None:
        if path not in self._tails:
            self.progress.trainer, self._tails[path] = kept_digest(path, TrainerDigest())
        for record in self._tails[path].records():
            self.progress.trainer.take(record)

    def _read_searcher(self, path: Path) -> None:
        searcher = index_of(path)
        if path not in self._tails:
            digest, self._tails[path] = kept_digest(path, SearcherDigest(searcher))
            self.progress.begin_search(digest)
        for record in self._tails[path].records():
            self.progress.take_search(searcher, record)

    def _ask_slurm(self) -> None:
        if time.monotonic() - self._asked >= QUEUE_SECONDS:
            self.job = self.queue(self.run)
            self.visitors = self._find_visitors()
            self._asked = time.monotonic()  # after the answer, which may take its time

    def _find_visitors(self) -> dict[int, Owner]:
        names = {rank_name("searcher", number): number for number in self.config.launch.elastic_searchers}
        return {names[name]: owner for name, owner in holders(self.run, names).items()} if names else {}

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt, if the run was ever started."""
        return self.attempts[-1] if self.attempts else None

    @property
    def phase(self) -> str:
        """What the trainer of the newest attempt said last; empty before its first word."""
        return self.progress.trainer.phase if number(self.progress.latest, "time", 0.0) >= self._begun else ""

    @property
    def _begun(self) -> float:
        """When the newest attempt began; what ranks wrote earlier was another attempt's."""
        return self.attempt.start if self.attempt else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds that the newest attempt took so far; before the first, those since it was opened."""
        if self.attempt is None:
            return time.time() - self._opened
        return max(0.0, (self.attempt.end or time.time()) - self.attempt.start)

    @property
    def eta(self) -> float | None:
        """Seconds that the steps left take at the pace of the last ones; None before two of an attempt."""
        times = self.progress.trainer.step_times
        if self.phase != "training" or len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return pace * (self.config.train.steps - self.progress.step)

    @property
    def silence(self) -> float | None:
        """Seconds since the last word of any rank or launcher; None before the first."""
        heard = max([self.progress.newest, *(event["time"] for event in self.events[-1:])])
        return max(0.0, time.time() - heard) if heard else None

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the last checkpoint; None before the first."""
        saved = number(self.progress.trainer.checkpoint, "time")
        return None if saved is None else max(0.0, time.time() - saved)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each searcher that is at work."""
        silent = max(FRESH_SECONDS, 2 * record_seconds(self.config.launch.places))
        since = max(self._begun, time.time() - silent)
        records = [record for _, record in sorted(self.progress.searchers.items())]
        return series([r for r in records if number(r, "time", 0.0) >= since], "search/tokens_per_second")

    @property
    def faults(self) -> dict[str, int]:
        """How often each kind of fault happened."""
        trainer = self.progress.trainer
        return count_faults(self.events, rebuilds=self.progress.rebuilds, damaged=trainer.damages)

    def counts(self, size_of: SizeOf = unknown_size) -> Counts:
        """What the run has done by now."""
        counts = Counts.of(self.progress.trainer)
        for searcher, seals in self.progress.seals.items():
            counts.add_waiting(self.run, searcher, seals, self.progress.trainer.merged, size_of)
        return counts

    @property
    def trends(self) -> Trends:
        """The run's figures as curves."""
        return self.progress.trends

    @property
    def alerts(self) -> list[Alert]:
        """What is wrong by now, the worst first."""
        return alerts(self.trends, self.config, list(self.evaluations.values()))

    def evaluated(self, split: Split) -> list[Evaluation]:
        """The complete evaluations of a split, by step."""
        return [found for found in self.evaluations.values() if found.split == split]

    @property
    def score_name(self) -> str:
        """What the task calls its score."""
        return score_name_of(self.evaluations.values())

    @property
    def tested(self) -> bool:
        """Whether the final evaluation is there."""
        found = self.evaluations.values()
        return any((part.split, part.step) == ("test", self.config.train.steps) for part in found)
