"""A searcher that comes and goes: the place that it leases, what it asks and evaluates, how it leaves.

It must not know how completions are generated or scored. Whoever holds a place asks for its requests; whoever
holds it next asks for what is not completed. A trainer that starts again may share the requests out among
another number of places: then the stream of requests begins anew, while engine and shards go on.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Self

from tba_hpc.config import Config, ConfigError, LaunchSection
from tba_hpc.core.ports import Task
from tba_hpc.core.prompts import CompletedRequests, Progress, training_requests
from tba_hpc.core.types import Request
from tba_hpc.exchange.file_exchange import ElasticSearcherExchange
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.files import unless_away
from tba_hpc.run.metrics import MetricsWriter
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import clock, holders, leased
from tba_hpc.run.signals import StopFlag

NO_PLACE = 3
"""Exit status of a searcher that found all places taken: there is nothing to do for it now."""

EVALUATOR = "evaluator"
"""What the one owns that evaluates, in a run without searchers of its own."""

SEAT_SECONDS = 5.0
"""Pause between two tries to be that one."""

LOOK_SECONDS = 5.0
"""Pause between two looks of the trainer whether anybody is there: an engine takes longer to be built."""

MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables of a process that an MPI launcher has started."""


class NoPlaceError(ValueError):
    """All places are taken; the message is one sentence."""


def comes_by_itself(config: Config, index: int | None) -> bool:
    """Whether this searcher was started by nobody who counts ranks. ConfigError where none may come so."""
    if index is not None or ATTEMPT in os.environ:
        return False
    if not config.launch.elastic and not any(name in os.environ for name in MPI_RANK):
        raise ConfigError(
            "launch.elastic=0 leaves no place for a searcher that comes by itself: stop the run, if it is at "
            "work, and go on with --set launch.elastic=N, for as many as may come"
        )
    return config.launch.elastic > 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a searcher holds: its number in the run, and that of its lease, which comes only once."""

    searcher: int
    lease: int


@contextmanager
def leased_place(run: RunDir, config: Config) -> Iterator[Place]:
    """Hold the lowest free place while the block runs. Raises NoPlaceError."""
    searchers = {rank_name("searcher", number): number for number in config.launch.elastic_searchers}
    with leased(run, searchers) as lease:
        if lease is None:
            raise NoPlaceError(
                f"all places of {run.path} for searchers that come and go are taken (launch.elastic="
                f"{config.launch.elastic}): let one of them leave, or start the run with more"
            )
        yield Place(searchers[lease.name], lease.number)


class Attendance:
    """Whether anybody holds a place; looks every LOOK_SECONDS."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._names = [rank_name("searcher", number) for number in config.launch.elastic_searchers]
        self._looked = -LOOK_SECONDS
        self._anybody = False

    def __call__(self) -> bool:
        """As of the last look, or of the one before where the file system was away."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._anybody = unless_away(self._look, otherwise=self._anybody)
        return self._anybody

    def _look(self) -> bool:
        return bool(holders(self._run, self._names, now=clock(self._run)))


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While there is nothing to seal yet: a stop ends the process, after what it holds was given back."""
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
        if asked:  # a library that calls back from C may have swallowed the first one
            raise SystemExit(0)


class EvaluatorSeat:
    """Held by one searcher at a time, which evaluates for the run, until it leaves or dies."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._stay = ExitStack()
        self._held = False
        self._tried = -SEAT_SECONDS

    def taken(self) -> bool:
        """Whether this process holds it; tries to, now and then."""
        if not self._held and time.monotonic() - self._tried >= SEAT_SECONDS:
            self._tried = time.monotonic()
            self._held = unless_away(self._take, otherwise=False)
        return self._held

    def _take(self) -> bool:
        with ExitStack() as trial:
            lease = trial.enter_context(leased(self._run, [EVALUATOR]))
            self._stay = trial.pop_all()
        return lease is not None

    def leave(self) -> None:
        """Give it back."""
        self._stay.close()
        self._held = False


class Visit:
    """A stay of searcher ``searcher`` at a run, which its metrics tell of. told: whether to leave."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        searcher: int,
        *,
        metrics: MetricsWriter,
        told: Callable[[], bool],
    ) -> None:
        self._run = run
        self._config = config
        self._searcher = searcher
        self._log = metrics.log
        self._told = told
        self._places_told = _places(config.launch)  # by the searcher's "started"
        self._attempt = ""  # of the trainer, as of which the config was read
        self._placeless = False  # the run was started again with fewer places
        self._seat = EvaluatorSeat(run)
        self.exchange = ElasticSearcherExchange(
            run.weights,
            searcher,
            patience=config.launch.elastic_seconds,
            told=lambda: told() or self._placeless,
            finished=lambda: run.finished,
            evaluates=lambda: not self._launch().searchers and self._seat.taken(),
        )

    def _launch(self) -> LaunchSection:
        """How the trainer at work now was started."""
        if (attempt := self.exchange.attempt) != self._attempt:
            self._attempt = attempt
            self._config = self._config.model_copy(update={"launch": self._run.config().launch})
            self._placeless = self._searcher not in self._config.launch.elastic_searchers
        return self._config.launch

    def requests(self, task: Task, progress: Progress) -> Iterator[Request]:
        """The requests of the place, without end, less those completed by ``progress``.

        progress: what the trainer and the shards of this place say. Where a start of the trainer has shared
        out the requests among other places, those that remain: what was issued here before, or is completed
        by then, is left out.
        """
        known = CompletedRequests.from_array(progress.completed.to_array())
        stream, places = self._requests(task, known), self._places_told
        issued = False
        while True:
            now = _places(self._launch())
            if self._placeless:
                return
            if now != places:
                places = now
                if issued:
                    known.unite(self.exchange.progress().completed)
                stream = self._requests(task, known)
                self._log({"event": "moved", "place": self._place, "searchers": self._config.launch.places})
            request = next(stream)
            known.add_one(request.id)
            issued = True
            yield request

    def _requests(self, task: Task, known: CompletedRequests) -> Iterator[Request]:
        return training_requests(self._config, task, self._searcher, known)

    def report(self, write: Callable[[int, int, Evaluation], None]) -> Callable[[int, int, Evaluation], None]:
        """``write`` of a whole evaluation, if the trainer that has asked for it is still at work."""

        def report(place: int, places: int, whole: Evaluation) -> None:
            if self.exchange.still_wants(whole.split, whole.step):
                write(place, places, whole)

        return report

    @property
    def _place(self) -> int:
        return self._config.launch.place_of(self._searcher)

    @property
    def why(self) -> str:
        """Why it leaves."""
        if self._told():
            return "told"
        return "no place" if self._placeless else "finished"

    def __enter__(self) -> Self:
        job = os.environ.get("SLURM_JOB_ID", "")
        self._log({"event": "joined", "host": socket.gethostname(), "job": job, "place": self._place})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give back what is held besides the place."""
        self._seat.leave()
        if kind is None:
            self._log({"event": "left", "why": self.why, "place": self._place})


def _places(launch: LaunchSection) -> tuple[int, int]:
    """What decides which requests are those of a place."""
    return launch.searchers, launch.elastic
