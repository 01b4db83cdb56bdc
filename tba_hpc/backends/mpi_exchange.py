"""The exchange of weights and shards over MPI: one world, one copy of the weights per node.

It must not know how weights are made, used or stored, nor what a shard means. Only this module imports
mpi4py; importing it starts MPI. Every process must be started with ``python -m mpi4py`` so that an
uncaught exception on one rank ends the world.

A round, started by the leader (trainer 0), runs on a communication thread at every rank:

    leader                                   every other rank
    header (command, version, …)     ──►
                                     ◄──     ready (how many shards, how large, stop asked)
                                     ◄──     the shards, one flat message each
    weights: buckets broadcast between the nodes, each from the node of the trainer rank that owns it
                                     ◄──     confirmed

Messages go point to point so that a missing peer can be named; only the weights use a collective, and
on a world of one node they do not travel at all. Nothing waits by blocking: Open MPI's blocking calls
spin, and there may be fewer cores than ranks.

Why the two slots of a node's memory are enough. Round n writes slot n mod 2, which last held round
n − 2. The leader starts round n only when every rank has confirmed round n − 1. A searcher confirms
round n − 1 once it shows those weights to its main thread and the main thread holds no older ones. So
nobody reads round n − 2 while it is overwritten. A round with weights to evaluate is confirmed only
once the main thread has taken them, so that no newer ones can replace them. A searcher that is slow to
confirm delays the next round, never the trainer's steps.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import cast, get_args

import numpy as np
from mpi4py import MPI

from tba_hpc.ports import ExchangeError
from tba_hpc.types import (
    RECORD,
    Ragged,
    Role,
    Shard,
    Split,
    Trajectories,
    WeightLayout,
    WeightUpdate,
)

log = logging.getLogger(__name__)

Waiting = Generator[float, None, None]
"""A procedure that yields the seconds to pause wherever it has to wait."""

LEADER = 0
"""World rank that starts every round."""

SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two looks at a peer that is about to answer."""

IDLE_PAUSE = 2e-3
"""Seconds between two looks while nothing is expected of a peer: for a header, or for our main thread."""

IDLE_DEADLINES = 6
"""A searcher gives its trainer this many deadlines between two rounds."""

BUCKETS_IN_FLIGHT = 4
"""Broadcasts under way at once."""

SHARDS_PER_ROUND, BYTES_PER_ROUND = 256, 1 << 30
"""Most that one searcher hands over in one round; the rest goes with the next."""

PAGE = 4096


class Tag(IntEnum):
    """Kinds of point-to-point messages."""

    JOIN = 1
    CONNECT = 2
    HEADER = 3
    READY = 4
    SHARD = 5
    ARRIVED = 6
    STATUS = 7


class Command(IntEnum):
    """What a round is for."""

    PUBLISH = 1  # weights out, shards in
    GATHER = 2  # shards in
    CLOSE = 3  # the last shards in; nothing is accepted any more
    END = 4  # let go


class Status(IntEnum):
    """A peer's answer at the end of a round."""

    CONFIRMED = 1
    BUSY = 2  # weights received, main thread alive but not done with the older ones


HOSTNAME = np.dtype("S256")
HEADER = np.dtype(
    [
        ("command", "<i8"),
        ("round", "<i8"),
        ("write", "<i8"),  # number of rounds with weights before this one; its parity is the slot
        ("version", "<i8"),
        ("evaluate", "<i8"),  # index into SPLITS
        ("published", "<f8"),  # unix seconds
    ]
)
READY = np.dtype(
    [
        ("stop", "<i8"),  # 1 where the searcher was asked to stop the run
        ("kept", "<i8"),  # shards that wait for the next round
        ("shards", "<i8"),  # shards that follow
        ("sizes", "<i8", SHARDS_PER_ROUND),  # bytes of each
    ]
)
SPLITS: tuple[Split | None, ...] = (None, *get_args(Split))
"""What weights may be evaluated on."""

_HANGS = "its process or its node hangs; see its log"
_BROADCAST_HANGS = "the network between the nodes, or a rank of another node, hangs"


def split_by_memory(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks that share this rank's memory."""
    return cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))


@dataclass(frozen=True)
class MpiWorld:
    """The ranks of a run: trainers first, then searchers. Made by ``join``."""

    comm: MPI.Intracomm
    trainers: int
    searchers: int
    hosts: tuple[str, ...]
    """Host name of every world rank."""
    deadline: float
    threaded: bool
    node_split: Callable[[MPI.Intracomm], MPI.Intracomm]

    @classmethod
    def join(
        cls,
        role: Role,
        *,
        trainers: int,
        searchers: int,
        deadline: float,
        threaded: bool | None = None,
        node_split: Callable[[MPI.Intracomm], MPI.Intracomm] = split_by_memory,
    ) -> MpiWorld:
        """Check that this is one world with the roles as configured; call it before slow imports.

        deadline: longest wait for another rank, s. threaded: whether rounds run beside the main thread
        (default: where MPI allows it). node_split: which ranks share memory.
        Raises ExchangeError naming what is wrong with the world, or who has not joined.
        """
        comm = MPI.COMM_WORLD
        _check_size(comm.size, trainers, searchers)
        _check_role(comm.rank, role, trainers)
        if threaded is None:
            threaded = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        if not threaded:
            log.info("weights and shards travel in the main thread, at the round boundary")
        world = cls(comm, trainers, searchers, (), deadline, threaded, node_split)
        hosts = world._meet()
        # Dup is collective, hence not before everybody is known to be there.
        return replace(world, comm=comm.Dup(), hosts=hosts)

    @property
    def rank(self) -> int:
        """World rank."""
        return self.comm.rank

    @property
    def role(self) -> Role:
        """This rank's role."""
        return "trainer" if self.rank < self.trainers else "searcher"

    @property
    def index(self) -> int:
        """This rank's number within its role."""
        return self.rank if self.rank < self.trainers else self.rank - self.trainers

    @property
    def size(self) -> int:
        """Ranks of this rank's role."""
        return self.trainers if self.role == "trainer" else self.searchers

    @property
    def hostname(self) -> str:
        """Host of this rank."""
        return self.hosts[self.rank]

    @property
    def local_index(self) -> int:
        """This rank's number among the ranks of any role on its host: which GPU is its own."""
        return self.hosts[: self.rank].count(self.hostname)

    @property
    def peers(self) -> range:
        """All ranks but the leader."""
        return range(1, self.comm.size)

    def name(self, rank: int) -> str:
        """For messages: ``searcher 1 (world rank 2 on node07)``."""
        role = f"trainer {rank}" if rank < self.trainers else f"searcher {rank - self.trainers}"
        return f"{role} (world rank {rank}{f' on {self.hosts[rank]}' if self.hosts else ''})"

    @property
    def patience(self) -> float:
        """Seconds to wait for a rank: the leader, who sees most, is first to give up and name the culprit."""
        return self.deadline * (1 if self.rank == LEADER else 2)

    def missing(
        self, ranks: Iterable[int], what: str, remedy: str = _HANGS, *, seconds: float | None = None
    ) -> ExchangeError:
        """The error that says who is missing, for how long, and what to do."""
        names = [self.name(rank) for rank in sorted(set(ranks))]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return ExchangeError(f"{shown} {what} within {seconds or self.patience:g} s: {remedy}")

    def send_all(self, message: np.ndarray, tag: Tag, what: str) -> Waiting:
        """Send ``message`` to every other rank; past the deadline, name those that did not take it."""
        sends = [(rank, self.comm.Isend(message.view(np.uint8), rank, tag)) for rank in self.peers]
        yield from self.wait_for(sends, what)

    def wait_for(
        self,
        requests: Sequence[tuple[int, MPI.Request]],
        what: str,
        remedy: str = _HANGS,
        *,
        seconds: float | None = None,
        pause: float = SHORTEST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ) -> Waiting:
        """Wait for requests that depend on the given ranks; past the deadline, name those not done.

        pause, longest: first and last seconds between two looks.
        """
        end = time.monotonic() + (seconds or self.patience)
        while requests := [(rank, request) for rank, request in requests if not request.Test()]:
            if time.monotonic() > end:
                raise self.missing([rank for rank, _ in requests], what, remedy, seconds=seconds)
            yield pause
            pause = min(1.5 * pause, longest)

    def open_trainer(self, layout: WeightLayout, *, bucket_mb: int) -> MpiTrainerExchange:
        """Connect, as the leader, to ranks that are all set up. Raises ExchangeError naming who is not."""
        assert self.rank == LEADER, "followers call open_follower"
        self._connect_peers(layout, bucket_mb << 20)
        return MpiTrainerExchange(self, NodeMemory(self, layout, bucket_mb << 20))

    def open_follower(self) -> MpiTrainerFollower:
        """Connect as a trainer rank other than the leader."""
        if not self.threaded:
            raise ExchangeError(
                f"launch.trainers={self.trainers} needs an MPI with threads (MPI_THREAD_SERIALIZED), this "
                "one has none: use launch.trainers=1, exchange.transport=files, or another MPI library"
            )
        return MpiTrainerFollower(self, self._connect())

    def open_searcher(self) -> MpiSearcherExchange:
        """Connect as a searcher whose engine is ready for weights."""
        return MpiSearcherExchange(self, self._connect())

    def _meet(self) -> tuple[str, ...]:
        """Host names of all ranks."""
        table = np.zeros(self.comm.size, HOSTNAME)
        table[self.rank] = socket.gethostname()
        rows = [table[rank : rank + 1].view(np.uint8) for rank in range(self.comm.size)]
        not_there = "it did not start, or not as configured; see the launcher's output"
        if self.rank == LEADER:
            hellos = [(rank, self.comm.Irecv(rows[rank], rank, Tag.JOIN)) for rank in self.peers]
            _run(self.wait_for(hellos, "did not join the world", not_there))
            _run(self.send_all(table, Tag.JOIN, "did not take the list of ranks"))
        else:
            sent = self.comm.Isend(rows[self.rank], LEADER, Tag.JOIN)
            answer = self.comm.Irecv(table.view(np.uint8), LEADER, Tag.JOIN)
            requests = [(LEADER, sent), (LEADER, answer)]
            _run(self.wait_for(requests, "did not welcome all ranks", not_there))
        return tuple(host.decode() for host in table)

    def _connect_peers(self, layout: WeightLayout, bucket_bytes: int) -> None:
        """Wait until every rank is set up, then send all of them the layout of the weights."""
        hellos = [(rank, self.comm.Irecv(np.empty(1, np.int64), rank, Tag.CONNECT)) for rank in self.peers]
        _run(
            self.wait_for(
                hellos,
                "joined the world, but did not get ready (loading model and engine)",
                "see its log, or raise exchange.deadline_seconds",
            )
        )
        text = np.frombuffer(layout.to_json().encode(), np.uint8)
        for message in (np.array([len(text), bucket_bytes]), text):
            _run(self.send_all(message, Tag.CONNECT, "did not take the layout of the weights"))

    def _connect(self) -> NodeMemory:
        """Tell the leader that this rank is set up; receive the layout of the weights."""
        hello = self.comm.Isend(np.array([self.rank]), LEADER, Tag.CONNECT)
        sizes = self._layout_message(np.empty(2, np.int64))
        text = self._layout_message(np.empty(int(sizes[0]), np.uint8))
        _run(self.wait_for([(LEADER, hello)], "did not take the greeting"))
        return NodeMemory(self, WeightLayout.from_json(text.tobytes().decode()), int(sizes[1]))

    def _layout_message(self, out: np.ndarray) -> np.ndarray:
        request = self.comm.Irecv(out, LEADER, Tag.CONNECT)
        what, remedy = (
            "did not send the layout of the weights",
            "it, or a rank that it waits for, is not ready",
        )
        _run(self.wait_for([(LEADER, request)], what, remedy))
        return out


class NodeMemory:
    """One copy of the weights per node, in shared memory with two slots, and the way between nodes.

    Making one is collective over the world. The lowest world rank of a node is its node leader.
    """

    def __init__(self, world: MpiWorld, layout: WeightLayout, bucket_bytes: int) -> None:
        self.layout = layout
        self._world = world
        self._node = world.node_split(world.comm)
        self._nodes = world.comm.Split(0 if self._node.rank == 0 else MPI.UNDEFINED, key=world.rank)
        leaders = self._node_leaders()
        self._node_leader = int(leaders[world.rank])
        self.nodes = len(np.unique(leaders))
        roots = np.searchsorted(np.unique(leaders), leaders[: world.trainers]).tolist()
        self._buckets = _buckets(layout, roots, bucket_bytes) if self.nodes > 1 else []
        self._slots = self._allocate()
        self._touch()

    def slot(self, write: int) -> np.ndarray:
        """uint8 [layout.nbytes]: this node's copy of the weights of the given number; reused two later."""
        return self._slots[write % 2]

    def spread(self, write: int) -> Waiting:
        """Bring the weights from the trainers that wrote them into this node's slot."""
        if self._node.rank == 0:
            yield from self._broadcast(self.slot(write))
            yield from self._announce()
        else:
            arrived = self._node.Irecv(np.empty(0, np.uint8), 0, Tag.ARRIVED)
            what = "did not receive the weights for its node"
            yield from self._world.wait_for([(self._node_leader, arrived)], what, _BROADCAST_HANGS)
        self._window.Sync()

    def _node_leaders(self) -> np.ndarray:
        """int64 [ranks]: the world rank that leads each rank's node."""
        mine, leaders = np.array([self._world.rank]), np.empty(self._world.comm.size, np.int64)
        self._node.Bcast(mine, 0)
        self._world.comm.Allgather(mine, leaders)
        return leaders

    def _allocate(self) -> tuple[np.ndarray, np.ndarray]:
        """The two slots, page-aligned, in memory that the node leader owns."""
        nbytes = self.layout.nbytes
        stride = -(-nbytes // PAGE) * PAGE
        if self._node.rank == 0:
            _check_shared_memory(2 * stride)
        self._window = MPI.Win.Allocate_shared(2 * stride if self._node.rank == 0 else 0, 1, comm=self._node)
        # An epoch without end makes the memory plain memory with Sync as its fence. It is never freed
        # before the process ends: weights that the main thread has not taken yet outlive the last round.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory = np.frombuffer(cast(memoryview, self._window.Shared_query(0)[0]), np.uint8)
        return memory[:nbytes], memory[stride : stride + nbytes]

    def _touch(self) -> None:
        """Pay all page faults now, not on the trainer's critical path."""
        for slot in self._slots:
            if self._node.rank == 0:
                slot[:] = 0
            self._node.Barrier()
            if self._world.role == "trainer":
                slot[::PAGE] = 0
            else:
                slot[::PAGE].max(initial=0)

    def _broadcast(self, slot: np.ndarray) -> Waiting:
        """Between node leaders, bucket by bucket; nothing to do on a world of one node."""
        under_way: deque[tuple[int, MPI.Request]] = deque()
        for start, end, root in self._buckets:
            if len(under_way) == BUCKETS_IN_FLIGHT:
                yield from self._finish_broadcast([under_way.popleft()])
            under_way.append((self._world.rank, self._nodes.Ibcast(slot[start:end], root)))
        yield from self._finish_broadcast(under_way)

    def _finish_broadcast(self, buckets: Sequence[tuple[int, MPI.Request]]) -> Waiting:
        # MPI moves data only while we look, so look often.
        what = "could not finish the broadcast of the weights"
        yield from self._world.wait_for(buckets, what, _BROADCAST_HANGS, longest=SHORTEST_PAUSE)

    def _announce(self) -> Waiting:
        """Tell the other ranks of this node that the weights are in memory."""
        self._window.Sync()
        empty = np.empty(0, np.uint8)
        sends = [
            (self._node_leader, self._node.Isend(empty, i, Tag.ARRIVED)) for i in range(1, self._node.size)
        ]
        yield from self._world.wait_for(sends, "could not tell its node that the weights have arrived")


class MpiTrainerExchange:
    """The leader's end. Of its calls only ``close`` waits; see the module for a round."""

    def __init__(self, world: MpiWorld, memory: NodeMemory) -> None:
        self._world = world
        self._memory = memory
        self._round_number = 0  # of the last round
        self._writes = 0  # publishing rounds so far
        self._round = Background(iter(()), threaded=False)
        self._arrived: deque[Shard] = deque()
        self._stop_requested = False
        self._closed = False
        log.info(
            "exchange: %d ranks on %d nodes, %.1f MB of weights",
            *(world.comm.size, memory.nodes, memory.layout.nbytes / 1e6),
        )

    def publish(
        self, version: int, write: Callable[[np.ndarray], None], *, evaluate: Split | None = None
    ) -> bool:
        """Start a sync round; see ports.TrainerExchange. ``write`` fills this node's slot in place.

        With several trainer ranks, rank i writes run i of ``layout.parts``: the leader inside ``write``,
        the others into their ``slot()``; ``write`` must be back only when all have written.
        """
        published = time.time()
        if not self._idle:
            return False
        write(self._memory.slot(self._writes))
        self._start(Command.PUBLISH, version, SPLITS.index(evaluate), published)
        return True

    def gather(self) -> bool:
        """Start a round without weights; see ports.TrainerExchange."""
        if not self._idle:
            return False
        self._start(Command.GATHER)
        return True

    def collect(self) -> list[Shard]:
        """Shards that arrived since the last call, each exactly once, in order per searcher."""
        self._round.advance()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    @property
    def stop_requested(self) -> bool:
        """Whether a searcher has asked, in a round so far, to stop the run."""
        return self._stop_requested

    def close(self) -> list[Shard]:
        """Finish the round under way, fetch the shards offered until now, let everybody go."""
        if not self._closed:
            self._closed = True
            self._finish()
            self._round = Background(self._closing(), threaded=self._world.threaded)
            self._finish()
        return self.collect()

    @property
    def _idle(self) -> bool:
        self._round.advance()
        return self._round.finished

    def _finish(self) -> None:
        while not self._idle:
            time.sleep(LONGEST_PAUSE)

    def _start(self, command: Command, version: int = 0, evaluate: int = 0, published: float = 0.0) -> None:
        sync = self._sync(command, version, evaluate, published)
        self._round = Background(sync, threaded=self._world.threaded)
        self._round.advance()

    def _closing(self) -> Waiting:
        while (yield from self._sync(Command.CLOSE)):
            pass
        yield from self._tell(Command.END)

    def _sync(
        self, command: Command, version: int = 0, evaluate: int = 0, published: float = 0.0
    ) -> Generator[float, None, int]:
        """One whole round; returns how many shards the searchers kept for the next."""
        yield from self._tell(command, version, evaluate, published)
        ready = yield from self._hear()
        parcels, transfers = self._receive(ready)
        if command is Command.PUBLISH:
            yield from self._memory.spread(self._writes)
            self._writes += 1
        yield from self._world.wait_for(transfers, f"did not send its shards in round {self._round_number}")
        self._arrived.extend(unpack_shard(parcel) for parcel in parcels)
        yield from self._confirmed()
        return sum(int(answer["kept"][0]) for answer in ready.values())

    def _tell(self, command: Command, version: int = 0, evaluate: int = 0, published: float = 0.0) -> Waiting:
        self._round_number += 1
        header = np.array([(command, self._round_number, self._writes, version, evaluate, published)], HEADER)
        what = f"did not take the header of round {self._round_number}"
        yield from self._world.send_all(header, Tag.HEADER, what)

    def _hear(self) -> Generator[float, None, dict[int, np.ndarray]]:
        """Everybody's READY."""
        ready = {rank: np.zeros(1, READY) for rank in self._world.peers}
        answers = [
            (rank, self._world.comm.Irecv(ready[rank].view(np.uint8), rank, Tag.READY)) for rank in ready
        ]
        yield from self._world.wait_for(answers, f"did not answer in round {self._round_number}")
        self._stop_requested |= any(answer["stop"][0] for answer in ready.values())
        return ready

    def _receive(
        self, ready: dict[int, np.ndarray]
    ) -> tuple[list[np.ndarray], list[tuple[int, MPI.Request]]]:
        """Buffers for all announced shards, in order per searcher, and the receives into them."""
        parcels = [
            (rank, np.empty(int(size), np.uint8))
            for rank, answer in ready.items()
            for size in answer["sizes"][0, : int(answer["shards"][0])]
        ]
        receives = [(rank, self._world.comm.Irecv(parcel, rank, Tag.SHARD)) for rank, parcel in parcels]
        return [parcel for _, parcel in parcels], receives

    def _confirmed(self) -> Waiting:
        """Wait for every rank to confirm the round; one that says it is busy gets another deadline."""
        waiting_since = dict.fromkeys(self._world.peers, time.monotonic())
        answers = {rank: self._next_status(rank) for rank in waiting_since}
        while waiting_since:
            for rank, (status, _) in [item for item in answers.items() if item[1][1].Test()]:
                del answers[rank]
                if status[0] == Status.CONFIRMED:
                    del waiting_since[rank]
                else:
                    answers[rank], waiting_since[rank] = self._next_status(rank), time.monotonic()
            self._refuse_silence(waiting_since)
            yield LONGEST_PAUSE

    def _next_status(self, rank: int) -> tuple[np.ndarray, MPI.Request]:
        status = np.empty(1, np.int64)
        return status, self._world.comm.Irecv(status, rank, Tag.STATUS)

    def _refuse_silence(self, waiting_since: dict[int, float]) -> None:
        now = time.monotonic()
        silent = [rank for rank, since in waiting_since.items() if now - since > self._world.deadline]
        if silent:
            what = f"did not confirm round {self._round_number}"
            raise self._world.missing(silent, what, "its main thread or its engine hangs; see its log")


class _Peer:
    """A rank that answers the leader's rounds; as it stands, one without shards and without readers."""

    def __init__(self, world: MpiWorld, memory: NodeMemory) -> None:
        self._world = world
        self._memory = memory
        self._service = Background(self._serve(), threaded=world.threaded)

    def _serve(self) -> Waiting:
        while (header := (yield from self._next_header()))["command"] != Command.END:
            yield from self._take_part(header)

    def _next_header(self) -> Generator[float, None, np.void]:
        header = np.zeros(1, HEADER)
        request = self._world.comm.Irecv(header.view(np.uint8), LEADER, Tag.HEADER)
        patience = IDLE_DEADLINES * self._world.deadline
        what = "did not start a round"
        yield from self._world.wait_for(
            [(LEADER, request)], what, seconds=patience, pause=IDLE_PAUSE, longest=IDLE_PAUSE
        )
        return header[0]

    def _take_part(self, header: np.void) -> Waiting:
        """This rank's side of a round."""
        ready, parcels = self._prepare(header)
        messages = [(ready.view(np.uint8), Tag.READY), *((parcel, Tag.SHARD) for parcel in parcels)]
        sends = [(LEADER, self._world.comm.Isend(data, LEADER, tag)) for data, tag in messages]
        if header["command"] == Command.PUBLISH:
            yield from self._memory.spread(int(header["write"]))
            self._show(header)
        yield from self._world.wait_for(sends, f"did not fetch the shards of round {header['round']}")
        self._handed_over(len(parcels))
        yield from self._until_free(header)
        yield from self._send_status(Status.CONFIRMED)

    def _until_free(self, header: np.void) -> Waiting:
        """Wait until the next weights may come; meanwhile tell the leader that the main thread lives."""
        told = time.monotonic()
        while not self._is_free(header):
            yield IDLE_PAUSE
            if self._last_call > told and time.monotonic() - told > self._world.deadline / 4:
                told = time.monotonic()
                yield from self._send_status(Status.BUSY)

    def _send_status(self, status: Status) -> Waiting:
        send = self._world.comm.Isend(np.array([status], np.int64), LEADER, Tag.STATUS)
        yield from self._world.wait_for([(LEADER, send)], "did not take a confirmation")

    _last_call = 0.0
    """When the main thread last called, on the monotonic clock."""

    def _prepare(self, header: np.void) -> tuple[np.ndarray, list[np.ndarray]]:
        """READY [1] and the packed shards that it announces."""
        return np.zeros(1, READY), []

    def _show(self, header: np.void) -> None:
        """Let the main thread take the weights that have arrived."""

    def _handed_over(self, shards: int) -> None:
        """So many shards are now the leader's."""

    def _is_free(self, header: np.void) -> bool:
        """Whether the weights of two rounds may now be overwritten: all but those of ``header``."""
        return True


class MpiTrainerFollower(_Peer):
    """A trainer rank other than the leader: it writes its run of ``layout.parts`` and serves the rounds."""

    _writes = 0

    def slot(self) -> np.ndarray:
        """uint8 [layout.nbytes]: where the next published weights go. Call once per publish of the leader."""
        self._service.advance()
        self._writes += 1
        return self._memory.slot(self._writes - 1)

    def close(self) -> None:
        """Wait, up to the deadline, until the leader has closed the exchange."""
        end = time.monotonic() + self._world.deadline
        while not self._service.finished:
            if time.monotonic() > end:
                raise self._world.missing([LEADER], "did not close the exchange")
            time.sleep(IDLE_PAUSE)


class MpiSearcherExchange(_Peer):
    """A searcher's end. No call waits.

    Every call shows that the main thread lives and no longer reads the weights of its last ``poll``.
    """

    def __init__(self, world: MpiWorld, memory: NodeMemory) -> None:
        self._lock = threading.Lock()  # guards the fields below, shared with the communication thread
        self._offered: deque[np.ndarray] = deque()
        self._in_transit = 0
        self._accepting = True
        self._stop = False
        self._unseen: WeightUpdate | None = None
        self._shown = self._taken = -1  # number of the newest weights shown to, taken by the main thread
        self._holding = False  # whether the main thread may be reading the weights it took last
        super().__init__(world, memory)

    def offer(self, shard: Shard) -> None:
        """Hand over a sealed shard; one offered after the trainer's close stays on disk for a resume."""
        self._called()
        parcel = pack_shard(shard)
        with self._lock:
            if self._accepting:
                self._offered.append(parcel)

    def poll(self) -> WeightUpdate | None:
        """The newest weights not seen before; read-only shared memory until the next call of any method."""
        self._called()
        with self._lock:
            update, self._unseen = self._unseen, None
            if update is not None:
                self._taken, self._holding = self._shown, True
            return update

    def request_stop(self) -> None:
        """Ask the trainer, in the next round, to stop the run."""
        self._stop = True
        self._called()

    @property
    def pending(self) -> int:
        """Shards offered and not yet fetched."""
        self._called()
        with self._lock:
            return len(self._offered) + self._in_transit

    @property
    def closed(self) -> bool:
        """Whether the trainer has ended the run and every published weight has been polled."""
        self._called()
        with self._lock:
            return self._service.finished and self._unseen is None

    def close(self) -> None:
        """Leave. MPI itself ends with the process, when all ranks do."""
        self._called()

    def _called(self) -> None:
        self._holding = False
        self._last_call = time.monotonic()
        self._service.advance()

    def _prepare(self, header: np.void) -> tuple[np.ndarray, list[np.ndarray]]:
        with self._lock:
            self._accepting &= header["command"] != Command.CLOSE
            parcels = self._take_offered()
            self._in_transit = len(parcels)
            ready = np.zeros(1, READY)
            ready["stop"], ready["kept"], ready["shards"] = self._stop, len(self._offered), len(parcels)
            ready["sizes"][0, : len(parcels)] = [len(parcel) for parcel in parcels]
            return ready, parcels

    def _take_offered(self) -> list[np.ndarray]:
        """The first offered shards, at least one where there is any, within a round's limits."""
        taken: list[np.ndarray] = []
        room = BYTES_PER_ROUND
        while (
            self._offered and len(taken) < SHARDS_PER_ROUND and (not taken or len(self._offered[0]) <= room)
        ):
            taken.append(self._offered.popleft())
            room -= len(taken[-1])
        return taken

    def _show(self, header: np.void) -> None:
        write = int(header["write"])
        data = self._memory.slot(write).view()
        data.flags.writeable = False
        evaluate = SPLITS[header["evaluate"]]
        update = WeightUpdate(
            int(header["version"]), self._memory.layout, data, evaluate, float(header["published"])
        )
        with self._lock:
            self._shown, self._unseen = write, update

    def _handed_over(self, shards: int) -> None:
        with self._lock:
            self._in_transit = 0

    def _is_free(self, header: np.void) -> bool:
        with self._lock:
            newest = self._taken == self._shown
            return newest or not (self._holding or header["evaluate"])


class Background:
    """A procedure with pauses, on a thread of its own or, where MPI allows none, inside ``advance``."""

    def __init__(self, procedure: Waiting | Iterator[float], *, threaded: bool) -> None:
        self.finished = False
        self._procedure = procedure
        self._threaded = threaded
        self._error: Exception | None = None
        if threaded:
            # A daemon: a process that ends by an error must not wait for a peer first.
            threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def advance(self) -> None:
        """Raise what went wrong. Without a thread, go on until there is nothing to expect of a peer."""
        if not self._threaded and not self.finished:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for pause in self._procedure:
                if not self._threaded and pause == IDLE_PAUSE:
                    return
                time.sleep(pause)
        except ExchangeError as error:
            self._error = error
        except Exception as error:
            self._error = ExchangeError(
                f"the exchange failed ({error}): a rank has probably died, see the logs"
            )
            self._error.__cause__ = error
        self.finished = True


def pack_shard(shard: Shard) -> np.ndarray:
    """One flat uint8 message: int64 searcher, index and array lengths, then the arrays, 8-byte aligned."""
    arrays = [np.ascontiguousarray(array).view(np.uint8) for array in _arrays(shard.trajectories)]
    header = np.array([shard.searcher, shard.index, *(array.nbytes for array in arrays)], np.int64)
    message = np.zeros(header.nbytes + sum(_aligned(array.nbytes) for array in arrays), np.uint8)
    start = 0
    for part in (header.view(np.uint8), *arrays):
        message[start : start + part.nbytes] = part
        start += _aligned(part.nbytes)
    return message


def unpack_shard(message: np.ndarray) -> Shard:
    """Inverse of pack_shard; the arrays are views of ``message``."""
    searcher, index, *sizes = message[: 8 * (2 + len(PACKED))].view(np.int64).tolist()
    parts, start = [], 8 * (2 + len(PACKED))
    for dtype, size in zip(PACKED, sizes, strict=True):
        parts.append(message[start : start + size].view(dtype))
        start += _aligned(size)
    record, prompts, prompt_offsets, completions, completion_offsets, logprobs, ref_logprobs = parts
    trajectories = Trajectories(
        record,
        Ragged(prompts, prompt_offsets),
        Ragged(completions, completion_offsets),
        logprobs,
        ref_logprobs,
    )
    return Shard(searcher, index, trajectories)


PACKED = (RECORD, *map(np.dtype, (np.int32, np.int64, np.int32, np.int64, np.float32, np.float32)))
"""Types of the arrays of a message, in the order of ``_arrays``."""


def _arrays(trajectories: Trajectories) -> tuple[np.ndarray, ...]:
    prompts, completions = trajectories.prompts, trajectories.completions
    return (
        trajectories.record,
        *(prompts.values, prompts.offsets),
        *(completions.values, completions.offsets),
        *(trajectories.logprobs, trajectories.ref_logprobs),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _buckets(layout: WeightLayout, roots: list[int], bucket_bytes: int) -> list[tuple[int, int, int]]:
    """(start, end, root) of every broadcast; the owners take turns, so that all their links are busy."""
    queues = [
        [
            (start, min(start + bucket_bytes, run[-1].end), root)
            for start in range(run[0].start, run[-1].end, bucket_bytes)
        ]
        for run, root in zip(layout.parts(len(roots)), roots, strict=True)
        if run
    ]
    return [bucket for turn in zip_longest(*queues) for bucket in turn if bucket]


def _run(procedure: Waiting) -> None:
    for pause in procedure:
        time.sleep(pause)


def _check_size(size: int, trainers: int, searchers: int) -> None:
    expected = trainers + searchers
    if size == 1 != expected:
        library = MPI.Get_library_version().split(",")[0].strip()
        flavour = "pmix" if library.startswith("Open MPI") else "pmi2"
        raise ExchangeError(
            f"this process is alone in its MPI world, {expected} ranks were expected: the launcher and this "
            f"MPI library ({library}) do not understand each other; under Slurm start with srun "
            f"--mpi={flavour}, else with the mpiexec of the same library"
        )
    if size != expected:
        raise ExchangeError(
            f"the MPI world has {size} ranks, but launch.trainers={trainers} and "
            f"launch.searchers={searchers} need {expected}: start exactly that many"
        )


def _check_role(rank: int, role: Role, trainers: int) -> None:
    expected: Role = "trainer" if rank < trainers else "searcher"
    if role != expected:
        raise ExchangeError(
            f"world rank {rank} was started as a {role}, but with launch.trainers={trainers} it must be a "
            f"{expected}: start ranks 0 to {trainers - 1} with 'tba train' and the others with 'tba search'"
        )


def _check_shared_memory(nbytes: int) -> None:
    """Refuse what would end in a bus error at the first write."""
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.exists() else nbytes
    if free < nbytes:
        raise ExchangeError(
            f"two copies of the weights need {nbytes / 1e9:.1f} GB of shared memory on each node, {folder} "
            f"on {socket.gethostname()} has {free / 1e9:.1f} GB: free some, or set exchange.transport=files"
        )
