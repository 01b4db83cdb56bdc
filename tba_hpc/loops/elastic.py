"""Elastic searchers: how they lease a slot, issue requests, evaluate, and leave.

A slot is an elastic searcher's number in the run. Its holder issues its requests; the next holder issues
those that are not completed. A restarted trainer may divide the requests among another number of slots. Each
searcher then restarts its stream of requests, and keeps its engine and shards.
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
from tba_hpc.run.events import this_job
from tba_hpc.run.files import if_available, retry
from tba_hpc.run.metrics import MetricsWriter
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Claim, Lease, clock, holders, note_ready, take_lease
from tba_hpc.run.signals import StopFlag

EVALUATOR = "evaluator"
"""Name of the lease of the evaluating searcher in a run whose searchers are all elastic."""

EVALUATOR_RETRY_SECONDS = 5.0
"""Pause between two attempts to take the EVALUATOR lease, in seconds."""

ELASTIC_CHECK_SECONDS = 5.0
"""Interval at which the trainer checks which elastic searchers are there, in seconds."""

MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Environment variables that an MPI launcher sets in the processes it starts."""


class NoSlotError(ValueError):
    """Raised if all slots of elastic searchers are taken. The message is one sentence."""


def has_no_launcher(config: Config, index: int | None) -> bool:
    """Return whether this searcher is elastic, which means that no launcher has started it.

    index: the searcher's number, if it was started with one. Raises ConfigError if there was no launcher, and
    the run has no slots for elastic searchers.
    """
    if index is not None or ATTEMPT in os.environ:
        return False
    if not config.launch.elastic and not any(name in os.environ for name in MPI_RANK):
        raise ConfigError(
            "launch.elastic=0 leaves no slot for an elastic searcher: stop the run if it is at work, and go "
            "on with --set launch.elastic=N, where N is how many may join"
        )
    return config.launch.elastic > 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A searcher's number in the run, and the number of its lease, which is never reused."""

    searcher: int
    lease: int


@contextmanager
def leased_slot(run: RunDir, config: Config) -> Iterator[Slot]:
    """Hold the lowest free slot while the block runs. Raises NoSlotError if none is free."""
    searchers = {rank_name("searcher", number): number for number in config.launch.elastic_searchers}
    lease = take_lease(run, searchers)
    if lease is None:
        raise NoSlotError(
            f"all slots of {run.path} for elastic searchers are taken (launch.elastic="
            f"{config.launch.elastic}): stop one of these searchers, or start the run with more slots"
        )
    try:
        yield Slot(searchers[lease.name], lease.number)
    finally:
        lease.release()


class ElasticSearchers:
    """The elastic searchers of a run, as its trainer sees them.

    The trainer looks at their leases at most once in ELASTIC_CHECK_SECONDS. After a searcher has left,
    ``ready`` includes it until its sealed shards are read; see ``reading``.
    """

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._names = {rank_name("searcher", number): number for number in config.launch.elastic_searchers}
        self._checked = -ELASTIC_CHECK_SECONDS
        self._holders: dict[str, Claim] = {}
        self._unread: dict[int, int] = {}  # leases that were ready before shards were last read

    def anybody(self) -> bool:
        """Return whether any elastic searcher holds a slot, even if its engine is still being built."""
        return bool(self._last())

    def ready(self) -> dict[int, int]:
        """Return the leases of elastic searchers whose engines have loaded weights, by searcher."""
        return {**self._loaded(), **self._unread}

    def reading(
        self, read: Callable[[Mapping[int, int]], Iterable[Shard]]
    ) -> Callable[[Mapping[int, int]], Iterator[Shard]]:
        """Wrap ``read`` so that ``ready`` learns when all shards of departed searchers have been read.

        read: function that yields all sealed shards on disk from the given cursors on.
        """

        def noted(cursors: Mapping[int, int]) -> Iterator[Shard]:
            ready = self._loaded()
            yield from read(cursors)
            self._unread = ready

        return noted

    def _loaded(self) -> dict[int, int]:
        """Return the leases of present searchers whose engines have loaded weights, by searcher."""
        return {self._names[name]: claim.number for name, claim in self._last().items() if claim.owner.ready}

    def _last(self) -> dict[str, Claim]:
        """Return the present searchers' claims to their slots, by rank name, after a check if one is due."""
        if self._names and time.monotonic() - self._checked >= ELASTIC_CHECK_SECONDS:
            self._checked = time.monotonic()
            self._holders = if_available(self._look, otherwise=self._holders)
        return self._holders

    def _look(self) -> dict[str, Claim]:
        if not self._run.owners.is_dir():
            return {}
        return holders(self._run, self._names, now=clock(self._run))


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let a stop signal within the block end the process at once, as there are no completions to seal yet."""
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
    """Lease on the evaluations of a run whose searchers are all elastic: only its holder carries them out."""

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
    """An elastic searcher's participation in a run, from joining to leaving.

    stop_asked: function that returns whether a signal has asked the searcher to leave.
    """

    run: RunDir
    config: Config
    slot: Slot
    metrics: MetricsWriter = field(kw_only=True)
    stop_asked: Callable[[], bool] = field(kw_only=True)
    _attempt: str = ""  # the trainer's attempt for which the config was read
    _ready: bool = False

    def __post_init__(self) -> None:
        self._division = _division(self.config.launch)
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
        """Return the launch section of the config with which the current trainer was started."""
        if (attempt := self.exchange.attempt) != self._attempt:
            self._attempt = attempt
            self.config = self.config.model_copy(update={"launch": self.run.config().launch})
        return self.config.launch

    @property
    def _slotless(self) -> bool:
        """True if the run was started again without this slot."""
        return self.slot.searcher not in self._launch().elastic_searchers

    def requests(self, task: Task, progress: Progress) -> Iterator[Request]:
        """Yield the slot's requests, except completed ones, until the run is restarted without this slot.

        progress: the run's progress when this searcher joined, including the sealed shards of this slot. If a
        restarted trainer divides the requests among another number of slots, the slot's new requests follow,
        except those that this searcher has issued before.
        """
        known = CompletedRequests.from_array(progress.completed.to_array())
        stream = training_requests(self.config, task, self.slot.searcher, known)
        issued = False
        while True:
            division = _division(self._launch())
            if self._slotless:
                return
            if division != self._division:
                self._division = division
                if issued:
                    known.unite(self.exchange.progress().completed)
                stream = training_requests(self.config, task, self.slot.searcher, known)
                self._log("moved", searchers=self.config.launch.places)
            request = next(stream)
            known.add(request.id)
            issued = True
            yield request

    def note_ready(self) -> None:
        """Report that weights are loaded, so that the trainer grants requests to this slot.

        Only the first call reports.
        """
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
        self._log("joined", host=socket.gethostname(), job=this_job())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the evaluator's lease; the slot is released by ``leased_slot``."""
        self._evaluator.release()
        if kind is None:
            self._log("left", why=self.why)

    def _log(self, event: str, **values: str | int) -> None:
        place = self.config.launch.place_of(self.slot.searcher)
        self.metrics.log({"event": event, **values, "place": place})


def _division(launch: LaunchSection) -> tuple[int, int]:
    """Return how many searchers and how many slots a run has, which decides who issues which requests."""
    return launch.searchers, launch.elastic
