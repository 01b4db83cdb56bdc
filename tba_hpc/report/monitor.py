"""Follows a run: its files as they grow, and how Slurm sees its job; cheap enough to look every second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from tba_hpc.config import Config
from tba_hpc.report.alerts import Alert, alerts
from tba_hpc.report.attempts import Attempt
from tba_hpc.report.curves import Trends
from tba_hpc.report.data import RunData, series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import number, record_seconds
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Owner, holders

QUEUE_SECONDS = 10.0
"""Shortest pause between two questions to Slurm."""

PACE_STEPS = 20
"""Steps whose mean duration the estimate of the time left is made from."""

FRESH_SECONDS = 60.0
"""A searcher silent for longer, and for two records, is not at work; clocks of nodes may differ by less."""

QueueEntry = dict[str, str]
"""A component of a Slurm job; see ``launch.slurm_queue.job_states``."""

Queue = Callable[[RunDir], list[QueueEntry]]
"""How Slurm sees the components of a run's job; none for a run that was never submitted."""


@dataclass
class RunMonitor:
    """A run under way. elastic: elastic searchers that are there."""

    run: RunDir
    config: Config
    queue: Queue = lambda _: []
    job: list[QueueEntry] = field(default_factory=list)
    elastic: dict[int, Owner] = field(default_factory=dict)
    _asked: float = -QUEUE_SECONDS
    _opened: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.data = RunData(self.run)

    def update(self) -> None:
        """Read what is new in the run directory; ask Slurm if that was long ago."""
        if time.monotonic() - self._asked >= QUEUE_SECONDS:  # first: what the files say is newer then
            self.job = self.queue(self.run)
            self.elastic = self._find_elastic()
            self._asked = time.monotonic()  # after the answer, which may take its time
        known = len(self.data.events)
        self.data.update()
        if any(event["event"] == "changed" for event in self.data.events[known:]):
            self.config = self.run.config()

    def _find_elastic(self) -> dict[int, Owner]:
        names = {rank_name("searcher", index): index for index in self.config.launch.elastic_searchers}
        found = holders(self.run, names) if names else {}
        return {names[name]: found[name] for name in sorted(found)}

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt, if the run was ever started."""
        return self.data.attempts[-1] if self.data.attempts else None

    @property
    def last_event(self) -> str:
        """Of launchers and batch scripts, the last that changed how the run stands."""
        asides = {"unreachable", "hung", "orphan"}
        kinds = (str(event["event"]) for event in reversed(self.data.events))
        return next((kind for kind in kinds if kind not in asides), "")

    @property
    def phase(self) -> str:
        """What the trainer of the newest attempt said last; empty before its first word."""
        trainer = self.data.trainer
        return trainer.phase if number(trainer.latest, "time", 0.0) >= self._begun else ""

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
        """Seconds that the steps left take at the pace of the last ones; None while none is taken."""
        latest = self.data.trainer.durations[-PACE_STEPS:]
        if self.phase != "training" or not any(latest):
            return None
        return fmean(latest) * (self.config.train.steps - self.data.step)

    @property
    def silence(self) -> float | None:
        """Seconds since the last record or event of any rank or launcher; None before the first."""
        heard = max([self.data.newest, *(event["time"] for event in self.data.events[-1:])])
        return max(0.0, time.time() - heard) if heard else None

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the last checkpoint; None before the first."""
        saved = number(self.data.trainer.checkpoint, "time")
        return None if saved is None else max(0.0, time.time() - saved)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each searcher that is at work."""
        silent = max(FRESH_SECONDS, 2 * record_seconds(self.config.launch.places))
        since = max(self._begun, time.time() - silent)
        records = [digest.last for _, digest in sorted(self.data.searchers.items())]
        return series([r for r in records if number(r, "time", 0.0) >= since], "search/tokens_per_second")

    @property
    def trends(self) -> Trends:
        """The run's figures as curves."""
        return self.data.trends

    @property
    def alerts(self) -> list[Alert]:
        """What is wrong by now, the worst first."""
        return alerts(self.trends, self.config, list(self.data.evaluations.values()))

    @property
    def tested(self) -> bool:
        """Whether the final evaluation is there."""
        return any(found.step == self.config.train.steps for found in self.data.evaluated("test"))
