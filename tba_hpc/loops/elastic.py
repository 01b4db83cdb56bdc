"""An elastic searcher: the slot it leases, its requests and evaluations, and how it leaves.

The holder of a slot issues the slot's requests; the next holder issues those that are not completed. A
restarted trainer may divide the requests among a different number of slots. The searcher then restarts its
stream of requests and keeps its engine and shards.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Self

from tba_hpc.config import Config, ConfigError, LaunchSection
from tba_hpc.core.ports import Task
from tba_hpc.core.prompts import CompletedRequests, Progress, training_requests
from tba_hpc.core.types import Request, Shard
from tba_hpc.exchange.file_exchange import ElasticSearcherExchange
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.files import if_available, retry
from tba_hpc.run.metrics import MetricsWriter
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Claim, Lease, clock, holders, note_ready, take_lease
from tba_hpc.run.signals import StopFlag

EVALUATOR = "evaluator"
"""Name of the lease of the evaluating searcher in a run whose searchers are all elastic."""

EVALUATOR_RETRY_SECONDS = 5.0
"""Pause between two attempts to take the EVALUATOR lease."""

ELASTIC_CHECK_SECONDS = 5.0
"""Pause between the trainer's checks for elastic searchers; building an engine takes longer."""

MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Environment variables that an MPI launcher sets in the processes it starts."""


class NoSlotError(ValueError):
    """Raised if all slots are taken; the message is one sentence."""


def has_no_launcher(config: Config, index: int | None) -> bool:
    """Return whether this searcher is elastic (no launcher). Raises ConfigError if the run has no slots."""
    if index is not None or ATTEMPT in os.environ:
        return False
    if not config.launch.elastic and not any(name in os.environ for name in MPI_RANK):
        raise ConfigError(
            "launch.elastic=0 leaves no slot for an elastic searcher: stop the run if it is at work, and go "
            "on with --set launch.elastic=N, for as many as may join"
        )
    return config.launch.elastic > 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A searcher's number in the run, and the number of its lease, which is never reused."""

    searcher: int
    lease: int


@contextmanager
def leased_slot(run: RunDir, config: Config) -> Iterator[Slot]:
    """Hold the lowest free slot while the block runs. Raises NoSlotError."""
    searchers = {rank_name("searcher", number): number for number in config.launch.elastic_searchers}
    lease = take_lease(run, searchers)
    if lease is None:
        raise NoSlotError(
            f"all slots of {run.path} for elastic searchers are taken (launch.elastic="
            f"{config.launch.elastic}): let one of them leave, or start the run with more"
        )
    try:
        yield Slot(searchers[lease.name], lease.number)
    finally:
        lease.release()


class ElasticSearchers:
    """Elastic searchers that hold a slot, as of the last check (at most every ELASTIC_CHECK_SECONDS).

    A searcher that has left still counts until all of its sealed shards have been read; see ``reading``.
    """

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._names = {rank_name("searcher", number): number for number in config.launch.elastic_searchers}
        self._looked = -ELASTIC_CHECK_SECONDS
        self._there: dict[str, Claim] = {}
        self._unread: dict[int, int] = {}  # those that were ready when the last whole read began

    def anybody(self) -> bool:
        """Return whether any elastic searcher holds a slot, even if its engine is still being built."""
        return bool(self._last())

    def ready(self) -> dict[int, int]:
        """Return the leases of elastic searchers whose engines have loaded weights, by searcher."""
        return {**self._loaded(), **self._unread}

    def reading(
        self, read: Callable[[Mapping[int, int]], Iterable[Shard]]
    ) -> Callable[[Mapping[int, int]], Iterator[Shard]]:
        """Wrap ``read``, which yields sealed shards, so that it first records who holds a slot."""

        def noted(cursors: Mapping[int, int]) -> Iterator[Shard]:
            ready = self._loaded()
            yield from read(cursors)
            self._unread = ready

        return noted

    def _loaded(self) -> dict[int, int]:
        return {self._names[name]: claim.number for name, claim in self._last().items() if claim.owner.ready}

    def _last(self) -> dict[str, Claim]:
        """Return the result of the last check that the file system answered."""
        if self._names and time.monotonic() - self._looked >= ELASTIC_CHECK_SECONDS:
            self._looked = time.monotonic()
            self._there = if_available(self._look, otherwise=self._there)
        return self._there

    def _look(self) -> dict[str, Claim]:
        if not self._run.owners.is_dir():
            return {}
        return holders(self._run, self._names, now=clock(self._run))


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let a stop signal within the block end the process at once, since it has no completions to seal."""
    asked = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise SystemExit(0)

    before = {number: signal.signal(number, leave) for number in StopFlag.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)
        if asked:  # a library that calls back from C may have swallowed the first SystemExit
            raise SystemExit(0)


class EvaluatorLease:
    """Lease of the only searcher that evaluates for the run, until it leaves or dies."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lease: Lease | None = None
        self._tried = -EVALUATOR_RETRY_SECONDS

    def held(self) -> bool:
        """Return whether this process holds the lease; try to take it every EVALUATOR_RETRY_SECONDS."""
        if not self._lease and time.monotonic() - self._tried >= EVALUATOR_RETRY_SECONDS:
            self._tried = time.monotonic()
            self._lease = if_available(lambda: take_lease(self._run, [EVALUATOR]), otherwise=None)
        return self._lease is not None

    def release(self) -> None:
        """Release the lease if it is held."""
        if self._lease:
            self._lease.release()
            self._lease = None


@dataclass
class ElasticStay:
    """An elastic searcher's participation in a run. stop_asked: function that returns whether to leave."""

    run: RunDir
    config: Config
    slot: Slot
    metrics: MetricsWriter = field(kw_only=True)
    stop_asked: Callable[[], bool] = field(kw_only=True)
    _attempt: str = ""  # the trainer's attempt for which the config was read
    _ready: bool = False

    def __post_init__(self) -> None:
        self._split = _split(self.config.launch)  # the division that the searcher's "started" event reports
        self._evaluator = EvaluatorLease(self.run)
        self.exchange = ElasticSearcherExchange(
            self.run.weights,
            self.slot.searcher,
            lease=self.slot.lease,
            timeout=self.config.launch.elastic_seconds,
            leaving=lambda: self.stop_asked() or self._slotless,
            finished=lambda: self.run.finished,
            evaluates=lambda: not self._launch().searchers and self._evaluator.held(),
        )

    def _launch(self) -> LaunchSection:
        """Return the launch section with which the current trainer was started."""
        if (attempt := self.exchange.attempt) != self._attempt:
            self._attempt = attempt
            self.config = self.config.model_copy(update={"launch": self.run.config().launch})
        return self.config.launch

    @property
    def _slotless(self) -> bool:
        """True if the run was started again with fewer slots."""
        return self.slot.searcher not in self._launch().elastic_searchers

    def requests(self, task: Task, progress: Progress) -> Iterator[Request]:
        """Yield the slot's requests without end, except those completed according to ``progress``.

        progress: as reported by the trainer and this slot's shards. If a restarted trainer divides the
        requests differently, the slot's new requests follow, except those issued here or completed.
        """
        known = CompletedRequests.from_array(progress.completed.to_array())
        stream = training_requests(self.config, task, self.slot.searcher, known)
        issued = False
        while True:
            split = _split(self._launch())
            if self._slotless:
                return
            if split != self._split:
                self._split = split
                if issued:
                    known.unite(self.exchange.progress().completed)
                stream = training_requests(self.config, task, self.slot.searcher, known)
                self._log("moved", searchers=self.config.launch.places)
            request = next(stream)
            known.add(request.id)
            issued = True
            yield request

    def note_ready(self) -> None:
        """Report once that the engine has loaded weights, so that the trainer grants requests to it."""
        if not self._ready:
            name, seconds = rank_name("searcher", self.slot.searcher), self.config.launch.disk_seconds
            retry(lambda: note_ready(name), seconds=seconds)
            self._ready = True

    @property
    def why(self) -> str:
        """Reason for leaving: "stopped", "no slot" or "finished"."""
        if self.stop_asked():
            return "stopped"
        return "no slot" if self._slotless else "finished"

    def __enter__(self) -> Self:
        self._log("joined", host=socket.gethostname(), job=os.environ.get("SLURM_JOB_ID", ""))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the evaluator's lease; the slot is released by ``leased_slot``."""
        self._evaluator.release()
        if kind is None:
            self._log("left", why=self.why)

    def _log(self, event: str, **values: str | int) -> None:
        place = self.config.launch.place_of(self.slot.searcher)
        self.metrics.log({"event": event, **values, "place": place})


def _split(launch: LaunchSection) -> tuple[int, int]:
    """Return the numbers of searchers and of elastic slots. Together they decide each slot's requests."""
    return launch.searchers, launch.elastic
