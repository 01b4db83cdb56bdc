"""Exchange of weights and shards over MPI, in rounds. ``mpi_world`` wraps MPI itself.

A round, started by the leader (trainer 0), runs on a communication thread at every rank:

    leader                                   every other rank
    header (purpose, version, …)     ──►
                                     ◄──     ready (how many shards, stop asked)
                                     ◄──     the sizes of the shards, then each as the bytes of its file
    weights: buckets broadcast between the nodes, each from the node of the trainer rank that owns it
                                     ◄──     confirmed

Two files per node are enough. Write n goes to the file of write n − 2, once round n − 1 is over. Every rank
that may read weights holds a reader of their file. A searcher gets its reader in the round of these weights,
when it shows them to its main thread. It then drops the reader of the previous weights, unless the main
thread has taken those. Once round n − 1 is over, nobody can begin to read write n − 2. The node leader
confirms round n − 1 only when nobody reads write n − 2 any more. If a rank goes on reading, in an evaluation
or with a slow engine, the spare file takes the place of that file. So nobody reads what is overwritten.

A round with weights to evaluate is confirmed only once the main thread has taken them, so that no newer ones
can replace them. A searcher that is slow to confirm delays the next round, and the others are
told to wait for it. It delays neither the trainer's steps nor the end, whose header need not wait for it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from tba_hpc.core.ports import IDLE_DEADLINES, ExchangeError, Write
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Publication, Shard, WeightLayout, WeightUpdate
from tba_hpc.exchange.hdf5_shards import parse_shard
from tba_hpc.exchange.mpi_world import BUCKET_MB, LEADER, LONGEST_PAUSE, MpiWorld, Pending, Tag
from tba_hpc.run.background import Worker, at_once

log = logging.getLogger(__name__)

IDLE_PAUSE = 2e-3
"""Pause between two checks of a rank that is not expected to answer soon, s."""

SWITCH_SECONDS, PYTHONS_SECONDS = 5e-5, sys.getswitchinterval()
"""Python's switch interval during a round, and otherwise, s: how long a busy main thread may keep the
exchange thread from running. MPI moves data only while that thread polls it; Python's default is 5 ms."""


class Purpose(IntEnum):
    """Purpose of a round."""

    PUBLISH = 1  # weights out, shards in
    GATHER = 2  # shards in
    END = 3  # peers stop serving rounds
    WAIT = 4  # another rank has yet to confirm the last round


class Status(IntEnum):
    """A rank's answer at the end of a round."""

    CONFIRMED = 1
    BUSY = 2  # weights received; the main thread lives, but still uses older ones


HEADER = np.dtype(
    [
        ("purpose", "<i8"),
        ("round", "<i8"),
        ("write", "<i8"),  # number of earlier publishes
        ("publication", "S512"),  # its JSON text, empty if no weights travel
    ]
)
READY = np.dtype([("stop", "<i8"), ("shards", "<i8")])
"""A rank's first answer in a round: 1 if the run must stop, else 0, and the number of shards that follow."""


@contextmanager
def _attentive() -> Iterator[None]:
    """Shorten Python's switch interval in the block, so that this thread does not wait long for its turn."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(PYTHONS_SECONDS)


class ExchangeThread:
    """Thread that runs one function at a time. Once all ranks are connected, only this thread calls MPI."""

    def __init__(self) -> None:
        # One thread for all work: if every core is busy, the start of a thread may take half a second.
        self._worker = Worker("exchange")
        self._work: Future[object] = at_once(lambda: None)

    def start(self, work: Callable[[], object]) -> None:
        """Start ``work``. Earlier work must be finished."""
        self._work = self._worker.submit(work)

    @property
    def finished(self) -> bool:
        """Return whether the last work is done. Raises ExchangeError if it failed."""
        finished = self._work.done()
        self.check()
        return finished

    def check(self) -> None:
        """Raise ExchangeError if the last work failed."""
        if not self._work.done() or not (error := self._work.exception()):
            return
        if isinstance(error, ExchangeError):
            raise error
        raise ExchangeError(f"the exchange failed ({error}): see the logs of the other ranks") from error

    def wait(self) -> None:
        """Wait until the last work is done. Raises ExchangeError if it failed."""
        wait([self._work])
        self.check()


class MpiTrainerExchange:
    """The leader's end of the exchange, in rounds. Only ``close`` and the constructor wait.

    The constructor waits until all ranks are set up, and sends them ``progress``. It raises ExchangeError
    that names the missing ranks.
    """

    def __init__(
        self, world: MpiWorld, layout: WeightLayout, *, progress: Progress, bucket_mb: int = BUCKET_MB
    ) -> None:
        self._world = world
        self._memory = memory = world.connect_peers(layout, progress=progress.to_bytes(), bucket_mb=bucket_mb)
        self._rounds = 0  # started so far
        self._writes = 0  # rounds of these with new weights
        self._published: Publication | None = None  # with the last write
        self._thread = ExchangeThread()
        self._arrived: deque[Shard] = deque()
        self._stop_requested = False
        self._closing = self._ended = False
        log.info(
            "exchange: %d ranks on %d nodes, %.1f MB of weights",
            *(world.comm.size, memory.nodes, memory.layout.nbytes / 1e6),
        )

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round; see ports.TrainerExchange. ``write`` fills this node's memory in place.

        With several trainer ranks, rank i writes part i of ``layout.parts``: the leader inside ``write``, the
        others into the memory that ``slot()`` returns. The round begins when all have written.
        """
        if not self._thread.finished:
            return False
        written = write(self._memory.slot(self._writes))
        self._published = publication
        self._writes += 1
        self._start(Purpose.PUBLISH, written)
        return True

    def arrived(self) -> WeightUpdate | None:
        """Return the weights published last, once their round is over; None during a round."""
        if not self._thread.finished or self._published is None:
            return None
        file = self._memory.reader(self._writes - 1)
        return WeightUpdate(self._published, self._memory.layout, file.map("r"), file)

    def gather(self) -> bool:
        if not self._thread.finished:
            return False
        self._start(Purpose.GATHER)
        return True

    def collect(self) -> list[Shard]:
        self._thread.check()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    @property
    def stop_requested(self) -> bool:
        """True if a searcher has asked, in any round so far, to stop the run."""
        return self._stop_requested

    def close(self) -> None:
        """End the run; a present round waits for no evaluation, and for nobody who still reads weights."""
        self._closing = True
        self._thread.wait()
        self._thread.start(self._end)
        self._thread.wait()

    def _start(self, purpose: Purpose, written: Callable[[], object] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)  # now, so that the round begins at once
        self._thread.start(partial(self._round, purpose, written))

    @_attentive()
    def _round(self, purpose: Purpose, written: Callable[[], object] | None = None) -> None:
        """Run one whole round; ``written`` first waits for weights that are still being written."""
        if written:
            written()
        self._rounds += 1
        self._world.send_all(
            self._header(purpose), Tag.HEADER, f"did not take the header of round {self._rounds}"
        )
        images = [(rank, np.empty(size, np.uint8)) for rank, sizes in self._hear().items() for size in sizes]
        transfers = [self._world.receive(image, rank, Tag.SHARD) for rank, image in images]
        if purpose is Purpose.PUBLISH:
            self._memory.spread(self._writes - 1)
        self._world.wait_for(transfers, f"did not send its shards in round {self._rounds}")
        for rank, image in images:
            self._arrived.append(parse_shard(Path(f"shard of {self._world.name(rank)}"), image.tobytes()))
        self._confirmed()

    def _header(self, purpose: Purpose) -> np.ndarray:
        published = self._published if purpose is Purpose.PUBLISH else None
        # HEADER has no room for lease_ends; elastic searchers read them from a manifest instead.
        text = msgspec.json.encode(replace(published, lease_ends={})) if published else b""
        assert len(text) <= HEADER["publication"].itemsize, "HEADER has room for the text"
        return np.array([(purpose, self._rounds, self._writes - 1, text)], HEADER)

    def _hear(self) -> dict[int, np.ndarray]:
        """Receive the sizes, in bytes, of the shards that each rank will send."""
        ready = {rank: np.zeros(1, READY) for rank in self._world.peers}
        answers = [self._world.receive(ready[rank], rank, Tag.READY) for rank in ready]
        self._world.wait_for(answers, f"did not answer in round {self._rounds}")
        self._stop_requested |= any(answer["stop"][0] for answer in ready.values())
        sizes = {rank: np.zeros(answer["shards"][0], np.int64) for rank, answer in ready.items()}
        answers = [self._world.receive(sizes[rank], rank, Tag.READY) for rank in sizes if len(sizes[rank])]
        self._world.wait_for(answers, f"did not say how large its shards are in round {self._rounds}")
        return sizes

    def _confirmed(self) -> None:
        """Wait for every rank to confirm the round. A rank that reports BUSY gets a new deadline."""
        told = time.monotonic()
        waiting_since = dict.fromkeys(self._world.peers, told)
        answers = {rank: self._next_status(rank) for rank in waiting_since}
        while waiting_since or not (self._ended or self._memory.has_room(self._writes)):
            if self._closing:
                self._end()
            elif time.monotonic() - told > self._world.deadline:
                told = time.monotonic()
                self._let_wait([rank for rank in self._world.peers if rank not in waiting_since])
            for rank, (status, (_, request)) in list(answers.items()):
                if not request.Test():
                    continue
                del answers[rank]
                if status[0] == Status.CONFIRMED:
                    del waiting_since[rank]
                else:
                    answers[rank], waiting_since[rank] = self._next_status(rank), time.monotonic()
            self._refuse_silence(waiting_since)
            time.sleep(LONGEST_PAUSE)

    def _let_wait(self, ranks: list[int]) -> None:
        """Tell ranks that have confirmed the round that it goes on, or they would miss the next one."""
        wait = self._header(Purpose.WAIT)
        sends = [self._world.send(wait, rank, Tag.HEADER) for rank in ranks]
        self._world.wait_for(sends, f"did not take word that round {self._rounds} goes on")

    def _end(self) -> None:
        """Tell every rank, once, that the run is over."""
        if not self._ended:
            self._ended = True
            self._world.send_all(self._header(Purpose.END), Tag.HEADER, "did not take its leave")

    def _next_status(self, rank: int) -> tuple[np.ndarray, Pending]:
        status = np.empty(1, np.int64)
        return status, self._world.receive(status, rank, Tag.STATUS)

    def _refuse_silence(self, waiting_since: dict[int, float]) -> None:
        now, deadline = time.monotonic(), self._world.deadline
        if silent := [rank for rank, since in waiting_since.items() if now - since > deadline]:
            what = f"did not confirm round {self._rounds}"
            remedy = "its main thread or its engine hangs; see its log"
            raise self._world.missing(silent, what, remedy, seconds=deadline)


class _Peer:
    """A rank that answers the leader's rounds. This base class sends no shards and shows no weights.

    Construct it once the rank is ready for weights. Raises ExchangeError.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._memory, progress = world.connect()
        self._progress = Progress.from_bytes(progress)
        self._thread = ExchangeThread()
        self._thread.start(self._serve)

    def _serve(self) -> None:
        """Take part in the leader's rounds until the last."""
        while (header := self._next_header())["purpose"] != Purpose.END:
            if header["purpose"] == Purpose.WAIT:
                continue
            self._transfer(header)
            self._until_free(int(header["write"]) + 1)
            self._send_status(Status.CONFIRMED)

    def _next_header(self) -> np.void:
        header = np.zeros(1, HEADER)
        request = self._world.receive(header, LEADER, Tag.HEADER)
        idle = IDLE_DEADLINES * self._world.deadline
        self._world.wait_for(
            [request], "did not start a round", seconds=idle, pause=IDLE_PAUSE, longest=IDLE_PAUSE
        )
        return header[0]

    @_attentive()
    def _transfer(self, header: np.void) -> None:
        stop, images = self._prepare()
        messages = [(np.array([(stop, len(images))], READY), Tag.READY)]
        if images:
            messages.append((np.array([len(image) for image in images]), Tag.READY))
            messages += [(image, Tag.SHARD) for image in images]
        sends = [self._world.send(message, LEADER, tag) for message, tag in messages]
        if header["purpose"] == Purpose.PUBLISH:
            self._memory.spread(int(header["write"]))
            self._show(header)
        self._world.wait_for(sends, f"did not fetch the shards of round {header['round']}")
        self._handed_over()

    def _until_free(self, write: int) -> None:
        """Wait until the next weights may be written; meanwhile report to the leader that this rank lives.

        If the leader ends the run, no more weights follow.
        """
        reported = time.monotonic()
        while not (self._world.is_called(Tag.HEADER) or (self._is_free() and self._memory.has_room(write))):
            time.sleep(IDLE_PAUSE)
            now = time.monotonic()
            if self._last_call > reported and now - reported > self._world.deadline / 4:
                reported = now
                self._send_status(Status.BUSY)

    def _send_status(self, status: Status) -> None:
        send = self._world.send(np.array([status], np.int64), LEADER, Tag.STATUS)
        self._world.wait_for([send], "did not take a confirmation")

    _last_call = float("inf")
    """Time of the main thread's last call, on the monotonic clock; a follower's always counts as alive."""

    def _prepare(self) -> tuple[bool, list[np.ndarray]]:
        """Return whether to stop the run, and the shards as bytes of their files, uint8."""
        return False, []

    def _show(self, header: np.void) -> None:
        """Offer the weights that have arrived to the main thread."""

    def _handed_over(self) -> None:
        """Record that the leader has fetched this rank's shards of the round."""

    def _is_free(self) -> bool:
        """Return whether newer weights may be shown to the main thread."""
        return True


class MpiTrainerFollower(_Peer):
    """Trainer rank other than the leader: it writes its part of ``layout.parts`` and answers the rounds."""

    _writes = 0

    def slot(self) -> np.ndarray:
        """Return the memory for the next published weights, uint8 [layout.nbytes]. Call once per publish."""
        self._thread.check()
        self._writes += 1
        return self._memory.slot(self._writes - 1)

    def close(self) -> None:
        """Wait until the leader has closed the exchange. Raises ExchangeError if it falls silent."""
        self._thread.wait()


class MpiSearcherExchange(_Peer):
    """A searcher's end of the exchange. No call waits; each proves that the main thread lives."""

    def __init__(self, world: MpiWorld) -> None:
        self._lock = threading.Lock()  # guards the fields below, shared with the communication thread
        self._offered: list[np.ndarray] = []
        self._in_transit = 0
        self._stop = False
        self._unseen: WeightUpdate | None = None
        self._holding = False  # whether the main thread has taken weights, and not called since
        self._last_call = 0.0
        super().__init__(world)

    def progress(self) -> Progress:
        """Return the progress of the run when the ranks connected."""
        return self._progress

    def offer(self, shard: Shard) -> None:
        """Offer a sealed shard. If no further round fetches it, it stays on disk for a resume."""
        assert shard.image is not None, "who seals a shard has the bytes of its file"
        self._called()
        with self._lock:
            self._offered.append(np.frombuffer(shard.image, np.uint8))

    def poll(self) -> WeightUpdate | None:
        """Return the newest unseen weights, read-only in the node's memory, or None."""
        self._called()
        with self._lock:
            update, self._unseen = self._unseen, None
            self._holding = update is not None
            return update

    def request_stop(self) -> None:
        self._stop = True
        self._called()

    @property
    def pending(self) -> int:
        self._called()
        with self._lock:
            return len(self._offered) + self._in_transit

    @property
    def ended(self) -> bool:
        self._called()
        return self._thread.finished

    @property
    def closed(self) -> bool:
        with self._lock:
            return self.ended and self._unseen is None

    def _called(self) -> None:
        self._holding = False
        self._last_call = time.monotonic()
        self._thread.check()

    def _prepare(self) -> tuple[bool, list[np.ndarray]]:
        with self._lock:
            images, self._offered = self._offered, []
            self._in_transit = len(images)
            return self._stop, images

    def _show(self, header: np.void) -> None:
        file = self._memory.reader(int(header["write"]))
        publication = msgspec.json.decode(header["publication"], type=Publication)
        update = WeightUpdate(publication, self._memory.layout, file.map("r"), file)
        with self._lock:
            self._unseen = update

    def _handed_over(self) -> None:
        with self._lock:
            self._in_transit = 0

    def _is_free(self) -> bool:
        with self._lock:
            return self._unseen is None or not (self._holding or self._unseen.publication.evaluate)
