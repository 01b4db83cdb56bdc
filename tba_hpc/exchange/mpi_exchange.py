"""Exchange of weights and shards over MPI, in rounds. ``mpi_world`` wraps MPI itself.

The leader (trainer 0) starts every round. On each rank the thread ``exchange`` carries out the round:

    leader                                   every other rank
    header (purpose, version, …)     ──►
                                     ◄──     ready (how many shards, stop asked)
                                     ◄──     the sizes of the shards, then each as the bytes of its file
    weights: buckets broadcast between the nodes, each from the node of the trainer rank that owns it
                                     ◄──     confirmed

Published weights have *sequence numbers* from 0. A node keeps them in two files that take turns: weights n
replace weights n − 2, and are written after the round of weights n − 1. Nobody reads what is overwritten,
because:

- Every rank that reads weights holds a *reader* of their file. A searcher's exchange thread opens the reader
  in the round that brings the weights, and offers the weights to the main thread, which takes them when it
  calls ``poll``. At the same time it drops the reader of the previous weights, unless the main thread has
  taken them. So after the round of weights n − 1 nobody begins to read weights n − 2.
- The lowest rank of a node waits until nobody on the node reads weights n − 2 any more, and only then
  confirms the round of weights n − 1. If a rank still reads them after RELEASE_SECONDS, in an evaluation or
  because its engine is slow, a third file takes the place of the file that it reads. The node waits longer
  only while a rank reads the third file, too, or while there is no memory for it.

A searcher confirms a round with weights to evaluate only once its main thread has taken them, so that newer
weights cannot replace them. If it confirms late, the next round begins late, and the leader tells the other
ranks to wait. The trainer's steps go on meanwhile, and the run can end without that confirmation.
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
from tba_hpc.core.wording import count
from tba_hpc.exchange.hdf5_shards import parse_shard
from tba_hpc.exchange.mpi_world import BUCKET_MB, LEADER, LONGEST_PAUSE, MpiWorld, Pending, Tag
from tba_hpc.run.background import Worker, at_once

log = logging.getLogger(__name__)

IDLE_PAUSE = 2e-3
"""Pause between two checks for a message that is not expected soon, in seconds."""

SWITCH_SECONDS, PYTHONS_SECONDS = 5e-5, sys.getswitchinterval()
"""Python's switch interval during a round, and its default (5 ms) for all other times, in seconds.

A busy main thread may keep the exchange thread from running for one interval, and MPI moves data only while
the exchange thread polls it.
"""


class Purpose(IntEnum):
    """Purpose of the leader's message HEADER: a round with or without weights, the run's end, or a delay."""

    PUBLISH = 1  # weights out, shards in
    GATHER = 2  # shards in
    END = 3  # the run is over: no further rounds
    WAIT = 4  # the next round begins later, because another rank has not confirmed this one


class Status(IntEnum):
    """A rank's answer to the leader at the end of a round.

    CONFIRMED: the rank is ready for the next round. Until then, BUSY is sent now and then, as a sign of life.
    """

    CONFIRMED = 1
    BUSY = 2  # alive, but not ready to confirm the round: see ``_until_free``


HEADER = np.dtype(
    [
        ("purpose", "<i8"),
        ("round", "<i8"),
        ("sequence", "<i8"),  # sequence number of the newest weights; −1 before the first
        ("publication", "S512"),  # the Publication as JSON; empty if the round has no weights
    ]
)
"""The leader's message to another rank: a round begins, the run is over, or the rank must wait (Purpose)."""

READY = np.dtype([("stop", "<i8"), ("shards", "<i8")])
"""A rank's first answer in a round: whether it asks to stop the run (1 or 0), and how many shards follow."""


@contextmanager
def _attentive() -> Iterator[None]:
    """Shorten Python's switch interval within the block, so that this thread gets its turn soon."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(PYTHONS_SECONDS)


class ExchangeThread:
    """Thread that runs one function at a time. Once all ranks are connected, only this thread calls MPI."""

    def __init__(self) -> None:
        # One thread for all rounds, because the start of a thread takes up to half a second on busy cores.
        self._worker = Worker("exchange")
        self._work: Future[object] = at_once(lambda: None)

    def start(self, work: Callable[[], object]) -> None:
        """Start ``work``. Earlier work must be finished."""
        self._work = self._worker.submit(work)

    @property
    def finished(self) -> bool:
        """True if the most recently started function has returned. Raises ExchangeError if it failed."""
        finished = self._work.done()
        self.check()
        return finished

    def check(self) -> None:
        """Raise ExchangeError if the most recently started function has failed. Does not wait for it."""
        if not self._work.done() or not (error := self._work.exception()):
            return
        if isinstance(error, ExchangeError):
            raise error
        raise ExchangeError(f"the exchange failed ({error}): see the logs of the other ranks") from error

    def wait(self) -> None:
        """Wait until the most recently started function has returned. Raises ExchangeError if it failed."""
        wait([self._work])
        self.check()


class MpiTrainerExchange:
    """The leader's end of the exchange. Only ``close`` and the constructor wait for other ranks.

    The constructor waits until all ranks are set up, and sends them ``progress``: the completed requests, and
    how many shards of each searcher are merged. It raises ExchangeError, which names the missing ranks, if
    some are not set up in time. bucket_mb: size of a broadcast between nodes, MiB.
    """

    def __init__(
        self, world: MpiWorld, layout: WeightLayout, *, progress: Progress, bucket_mb: int = BUCKET_MB
    ) -> None:
        self._world = world
        self._memory = memory = world.connect_peers(layout, progress=progress.to_bytes(), bucket_mb=bucket_mb)
        self._rounds = 0  # number of rounds started so far
        self._sequence = -1  # sequence number of the newest weights
        self._published: Publication | None = None  # describes the newest weights
        self._thread = ExchangeThread()
        self._arrived: deque[Shard] = deque()
        self._stop_requested = False
        self._closing = self._ended = False
        log.info(
            "exchange: %s on %s, %.1f MB of weights",
            *(count(world.comm.size, "rank"), count(memory.nodes, "node"), memory.layout.nbytes / 1e6),
        )

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round with new weights; see ports.TrainerExchange. ``write`` fills this node's memory.

        With several trainer ranks, rank i writes part i of ``layout.parts``. The leader does so in ``write``,
        the others write into the memory that ``MpiTrainerFollower.next_weights`` returns. The round begins
        when all have written their parts.
        """
        if not self._thread.finished:
            return False
        written = write(self._memory.writable(self._sequence + 1))
        self._published = publication
        self._sequence += 1
        self._start(Purpose.PUBLISH, written)
        return True

    def arrived(self) -> WeightUpdate | None:
        """Return the weights published last; None before the first, and while a round is in progress."""
        if not self._thread.finished or self._published is None:
            return None
        file = self._memory.reader(self._sequence)
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
        """Finish the round in progress, without waiting for evaluations or readers; then end the run."""
        self._closing = True
        self._thread.wait()
        self._thread.start(self._end)
        self._thread.wait()

    def _start(self, purpose: Purpose, written: Callable[[], object] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)  # now, so that the round begins at once
        self._thread.start(partial(self._round, purpose, written))

    @_attentive()
    def _round(self, purpose: Purpose, written: Callable[[], object] | None = None) -> None:
        """Run a whole round. written: function that waits until new weights are written; None without any."""
        if written:
            written()
        self._rounds += 1
        self._world.send_all(
            self._header(purpose), Tag.HEADER, f"did not take the header of round {self._rounds}"
        )
        images = [
            (rank, np.empty(size, np.uint8)) for rank, sizes in self._shard_sizes().items() for size in sizes
        ]
        transfers = [self._world.receive(image, rank, Tag.SHARD) for rank, image in images]
        if purpose is Purpose.PUBLISH:
            self._memory.spread(self._sequence)
        self._world.wait_for(transfers, f"did not send its shards in round {self._rounds}")
        for rank, image in images:
            self._arrived.append(parse_shard(Path(f"shard of {self._world.name(rank)}"), image.tobytes()))
        self._await_confirmations()

    def _header(self, purpose: Purpose) -> np.ndarray:
        published = self._published if purpose is Purpose.PUBLISH else None
        # HEADER has no room for lease_ends, which only elastic searchers need; they read a manifest instead.
        text = msgspec.json.encode(replace(published, lease_ends={})) if published else b""
        assert len(text) <= HEADER["publication"].itemsize, "HEADER has room for the text"
        return np.array([(purpose, self._rounds, self._sequence, text)], HEADER)

    def _shard_sizes(self) -> dict[int, np.ndarray]:
        """Receive every rank's answer; return, by rank, the sizes (int64, bytes) of the shards to come."""
        ready = {rank: np.zeros(1, READY) for rank in self._world.peers}
        answers = [self._world.receive(ready[rank], rank, Tag.READY) for rank in ready]
        self._world.wait_for(answers, f"did not answer in round {self._rounds}")
        self._stop_requested |= any(answer["stop"][0] for answer in ready.values())
        sizes = {rank: np.zeros(answer["shards"][0], np.int64) for rank, answer in ready.items()}
        answers = [self._world.receive(sizes[rank], rank, Tag.READY) for rank in sizes if len(sizes[rank])]
        self._world.wait_for(answers, f"did not say how large its shards are in round {self._rounds}")
        return sizes

    def _await_confirmations(self) -> None:
        """Wait until every rank has confirmed the round and this node has room for the next weights.

        The deadline of a rank starts anew whenever the rank reports BUSY.
        """
        told = time.monotonic()
        waiting_since = dict.fromkeys(self._world.peers, told)
        answers = {rank: self._next_status(rank) for rank in waiting_since}
        while waiting_since or not (self._ended or self._memory.make_room(self._sequence + 1)):
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
        """Tell ranks that have confirmed the round to wait; otherwise they would give up on the leader."""
        wait = self._header(Purpose.WAIT)
        sends = [self._world.send(wait, rank, Tag.HEADER) for rank in ranks]
        self._world.wait_for(sends, f"did not take the message that round {self._rounds} goes on")

    def _end(self) -> None:
        """Tell every rank, once, that the run is over."""
        if not self._ended:
            self._ended = True
            what = "did not take the message that the run is over"
            self._world.send_all(self._header(Purpose.END), Tag.HEADER, what)

    def _next_status(self, rank: int) -> tuple[np.ndarray, Pending]:
        status = np.empty(1, np.int64)
        return status, self._world.receive(status, rank, Tag.STATUS)

    def _refuse_silence(self, waiting_since: dict[int, float]) -> None:
        """Raise ExchangeError if a rank has reported nothing for a whole deadline.

        waiting_since: monotonic time of each rank's last report, or of the beginning of the wait, by rank.
        """
        now, deadline = time.monotonic(), self._world.deadline
        if silent := [rank for rank, since in waiting_since.items() if now - since > deadline]:
            what = f"did not confirm round {self._rounds}"
            remedy = "its main thread or its engine hangs; see its log"
            raise self._world.missing(silent, what, remedy, seconds=deadline)


class _Peer:
    """Base class of the exchange on ranks that answer the leader. It sends no shards and uses no weights.

    Construct it when the rank is ready for weights, since the leader waits for all ranks to be ready. The
    constructor waits for the leader, and raises ExchangeError if the leader does not answer in time.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._memory, progress = world.connect()
        self._progress = Progress.from_bytes(progress)
        self._thread = ExchangeThread()
        self._thread.start(self._serve)

    def _serve(self) -> None:
        """Answer the leader's rounds, in the exchange's thread, until the run is over."""
        while (header := self._next_header())["purpose"] != Purpose.END:
            if header["purpose"] == Purpose.WAIT:
                continue
            self._transfer(header)
            self._until_free(int(header["sequence"]) + 1)
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
            self._memory.spread(int(header["sequence"]))
            self._show(header)
        self._world.wait_for(sends, f"did not fetch the shards of round {header['round']}")
        self._handed_over()

    def _until_free(self, sequence: int) -> None:
        """Wait until this node's memory has room for the weights of a sequence number, or until the run ends.

        Meanwhile report BUSY to the leader, as long as the main thread of this rank is alive.
        """
        reported = time.monotonic()
        while not (
            self._world.has_message(Tag.HEADER) or (self._is_free() and self._memory.make_room(sequence))
        ):
            time.sleep(IDLE_PAUSE)
            now = time.monotonic()
            if self._last_call > reported and now - reported > self._world.deadline / 4:
                reported = now
                self._send_status(Status.BUSY)

    def _send_status(self, status: Status) -> None:
        send = self._world.send(np.array([status], np.int64), LEADER, Tag.STATUS)
        self._world.wait_for([send], "did not take a confirmation")

    _last_call = float("inf")
    """Time of the main thread's last call of this object, on the monotonic clock.

    Infinite where the main thread always counts as alive, as in a trainer.
    """

    def _prepare(self) -> tuple[bool, list[np.ndarray]]:
        """Return whether to ask for a stop of the run, and the bytes, uint8, of each shard to send."""
        return False, []

    def _show(self, header: np.void) -> None:
        """Make the weights that have arrived available to the main thread."""

    def _handed_over(self) -> None:
        """Note that the leader has fetched the shards that this rank sent in the round."""

    def _is_free(self) -> bool:
        """Return whether newer weights may replace those that were shown to the main thread."""
        return True


class MpiTrainerFollower(_Peer):
    """A trainer rank other than the leader. It writes its part of ``layout.parts`` and takes part in rounds.

    ``next_weights`` returns the memory for its part.
    """

    _sequence = -1

    def next_weights(self) -> np.ndarray:
        """Return memory for the next weights, uint8 [layout.nbytes]. Call this once per publication."""
        self._thread.check()
        self._sequence += 1
        return self._memory.writable(self._sequence)

    def close(self) -> None:
        """Wait until the leader has closed the exchange. Raises ExchangeError if it falls silent."""
        self._thread.wait()


class MpiSearcherExchange(_Peer):
    """A searcher's end of the exchange. No call waits.

    Every call but ``progress`` also shows that the main thread is alive, which the exchange's thread reports.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._lock = threading.Lock()  # guards the fields below, shared with the exchange's thread
        self._offered: list[np.ndarray] = []
        self._in_transit = 0  # number of shards that the leader is fetching
        self._stop = False
        self._unseen: WeightUpdate | None = None
        self._holding = False  # whether the last call was a ``poll`` that returned weights
        self._last_call = 0.0
        super().__init__(world)

    def progress(self) -> Progress:
        """Return the run's progress as it was when this attempt began.

        It consists of the completed requests and the cursors: how many shards of each searcher are merged.
        """
        return self._progress

    def offer(self, shard: Shard) -> None:
        """Offer a sealed shard for the next round. Without a next round, a resume reads it from disk."""
        assert shard.image is not None, "a shard that this process sealed has the bytes of its file"
        self._called()
        with self._lock:
            self._offered.append(np.frombuffer(shard.image, np.uint8))

    def poll(self) -> WeightUpdate | None:
        """Return the newest unseen weights, mapped read-only from node memory, or None if there are none."""
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
        file = self._memory.reader(int(header["sequence"]))
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
