"""One MPI world: its ranks, their messages, and the weights in the memory of each node.

Only this module imports mpi4py, and the import starts MPI. Every process must be started with ``python -m
mpi4py``, so that an uncaught exception on one rank ends the whole world.

Messages go point to point, so that a missing rank can be named. Collective calls set the world up, when all
ranks are known to be there. After that, and until MPI is finalized, only the broadcast of weights between
nodes is collective, and no call blocks: Open MPI spins in a blocking call, and there may be more ranks than
cores.

When a process of the world dies, mpiexec or ``srun --kill-on-bad-exit`` ends the others, and the launcher
restarts them all.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from mpi4py import MPI

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import IDLE_DEADLINES, ExchangeError
from tba_hpc.core.types import Role, WeightLayout
from tba_hpc.core.weight_files import SHARED_MEMORY, WeightFile, fault_in
from tba_hpc.core.wording import first_few, first_words
from tba_hpc.run.directory import SEARCHERS_FIRST

log = logging.getLogger(__name__)

Pending = tuple[int, MPI.Request]
"""World rank to which a message goes, or from which it comes, and the MPI request of that message."""


def library_version() -> str:
    """Return the MPI library's name and version: ``Open MPI v5.0.11``."""
    return first_words(MPI.Get_library_version())


LEADER = 0
"""World rank that starts every round."""

SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Shortest and longest pause between two checks for a message that is expected soon, in seconds."""

BUCKETS_IN_FLIGHT, BUCKET_MB = 4, 64
"""Number of concurrent broadcasts of weights, and the size of each, MiB. MPI allows less than 2 GiB."""

SETTLING_SECONDS = 0.5
"""Pause before the first message, in seconds. Open MPI 5 may crash if a message reaches a rank on another
node that is still in MPI_Init (open-mpi/ompi#12495)."""

HOSTNAME = np.dtype("S256")

FILES = 3
"""Number of files for a node's weights: two in use, and a spare, which takes no memory until it is needed."""

TABLE = np.dtype([("order", np.int64, 2), ("generations", np.int64, FILES)])
"""Table in shared memory for the ranks of a node.

order: indices of two files, the one for weights with even sequence numbers and the one for odd numbers.
generations: how often each file has given back its memory.
"""

RELEASE_SECONDS = 1.0
"""Seconds after which the spare file replaces a file that new weights need but a rank still reads."""

READ_DEADLINES = IDLE_DEADLINES - 2
"""Number of deadlines for which readers may delay new weights if the spare file cannot be used.

After that, the lowest rank of the readers' node raises an error that names the node. Other ranks would give
up on the next round only later.
"""

END_DEADLINES = 2
"""Number of deadlines that ranks may take to score and seal what they hold once the run is over."""


class Tag(IntEnum):
    """Kinds of point-to-point messages."""

    JOIN = 1  # a rank's host name to the leader; then all host names to each rank
    CONNECT = 2  # a rank is set up; then the leader answers with Welcome
    HEADER = 3  # start of a round, end of the run, or a delay
    READY = 4  # number of a rank's shards in a round, and their sizes
    SHARD = 5  # bytes of a shard
    ARRIVED = 6  # within a node: the weights of a round are complete
    STATUS = 7  # a rank confirms a round, or says that it is busy
    LEAVE = 8  # a rank has ended its work; then the leader says that all have


_HANGS = "its process or its node hangs; see its log"
_BROADCAST_HANGS = "the network between the nodes, or a rank of another node, hangs"


def finalize() -> None:
    """Finalize MPI, in the main thread. All ranks must call it."""
    if not MPI.Is_finalized():
        MPI.Finalize()


def split_by_memory(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of those ranks of ``comm`` that share memory with this rank."""
    return cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))


class Welcome(msgspec.Struct):
    """Message from the leader to every rank once all ranks are set up.

    bucket_bytes: size of a broadcast between nodes. progress: Progress.to_bytes of the run, which only
    searchers need.
    """

    layout: WeightLayout
    bucket_bytes: int
    progress: bytes


@dataclass
class MpiWorld:
    """The ranks of a run, and messages between them. ``join`` makes one.

    *World ranks* number the trainers first and then the searchers, even if MPI numbers them differently.
    """

    comm: MPI.Intracomm
    rank: int
    """World rank of this process."""
    trainers: int
    searchers: int
    deadline: float
    """Longest wait for another rank, in seconds."""
    node_split: Callable[[MPI.Intracomm], MPI.Intracomm]
    """Function that takes a communicator, and returns one for those ranks that share this rank's memory."""
    hosts: tuple[str, ...] = ()
    """Host name of every world rank."""
    offset: int = 0
    """Rank in ``comm`` of world rank 0; always 0 once ``join`` has returned."""
    work_deadline: float | None = None
    """Deadline once all ranks are set up, in seconds; None: ``deadline``."""

    @classmethod
    def join(
        cls,
        role: Role,
        *,
        trainers: int,
        searchers: int,
        deadline: float,
        work_deadline: float | None = None,
        node_split: Callable[[MPI.Intracomm], MPI.Intracomm] = split_by_memory,
    ) -> MpiWorld:
        """Join the world, and check its size and roles against the config. Call it before slow imports.

        trainers, searchers: numbers of ranks in the config. deadline: longest wait for another rank, in
        seconds. work_deadline: longest wait once all ranks are set up, in seconds; None: ``deadline``.
        node_split: see the attribute. If MPI numbers the searchers before the trainers, the launcher sets the
        environment variable TBA_SEARCHERS_FIRST to "1". Raises ConfigError if size or role is wrong, and
        ExchangeError, which names the ranks, if some have not joined in time.
        """
        comm = MPI.COMM_WORLD
        _check_threads()
        _check_size(comm.size, trainers, searchers)
        offset = searchers if os.environ.get(SEARCHERS_FIRST) == "1" else 0
        rank = (comm.rank - offset) % comm.size
        _check_role(rank, role, trainers)
        world = cls(comm, rank, trainers, searchers, deadline, node_split, (), offset, work_deadline)
        time.sleep(SETTLING_SECONDS)
        hosts = world._meet()
        # Split and Dup are collective: they come after ``_meet``, when all ranks are known to be there.
        comm = cast(MPI.Intracomm, comm.Split(key=rank)) if offset else comm.Dup()
        return replace(world, comm=comm, hosts=hosts, offset=0)

    @property
    def role(self) -> Role:
        """Role of this rank."""
        return "trainer" if self.rank < self.trainers else "searcher"

    @property
    def index(self) -> int:
        """Number of this rank among those of its role, from 0."""
        return self.rank if self.rank < self.trainers else self.rank - self.trainers

    @property
    def hostname(self) -> str:
        """Host of this rank."""
        return self.hosts[self.rank]

    @property
    def local_index(self) -> int:
        """Number of this rank among all ranks on its host, from 0; it decides which GPUs this rank uses."""
        return self.hosts[: self.rank].count(self.hostname)

    @property
    def peers(self) -> tuple[int, ...]:
        """World ranks of all processes but the leader."""
        return tuple(range(1, self.comm.size))

    def name(self, rank: int) -> str:
        """Name a rank in messages: ``searcher 1 (world rank 2 on node07)``."""
        role = f"trainer {rank}" if rank < self.trainers else f"searcher {rank - self.trainers}"
        return f"{role} (world rank {rank}{f' on {self.hosts[rank]}' if self.hosts else ''})"

    # --- Messages ---

    def send(self, message: np.ndarray, rank: int, tag: Tag) -> Pending:
        """Start to send an array; return rank and request for ``wait_for``."""
        return rank, self.comm.Isend(message.view(np.uint8), self._rank_in_comm(rank), tag)

    def receive(self, out: np.ndarray, rank: int, tag: Tag) -> Pending:
        """Start to receive into an array; return rank and request for ``wait_for``."""
        return rank, self.comm.Irecv(out.view(np.uint8), self._rank_in_comm(rank), tag)

    def send_all(self, message: np.ndarray, tag: Tag, what: str) -> None:
        """Send ``message`` to every other rank, as the leader. ``what`` and errors are as in ``wait_for``."""
        self.wait_for([self.send(message, rank, tag) for rank in self.peers], what)

    def has_message(self, tag: Tag) -> bool:
        """Return whether a message of this kind from the leader waits to be received."""
        return self.comm.Iprobe(self._rank_in_comm(LEADER), tag)

    def missing(
        self, ranks: Iterable[int], what: str, remedy: str = _HANGS, *, seconds: float
    ) -> ExchangeError:
        """Return an error that names the first four of the missing ranks, and a remedy.

        what: what the ranks failed to do within ``seconds``, such as "did not join the world".
        """
        names = [self.name(rank) for rank in sorted(set(ranks))]
        return ExchangeError(f"{first_few(names, 4)} {what} within {seconds:g} s: {remedy}")

    def wait_for(
        self,
        requests: Sequence[Pending],
        what: str,
        remedy: str = _HANGS,
        *,
        seconds: float | None = None,
        pause: float = SHORTEST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ) -> None:
        """Wait for requests. Raises ExchangeError, which names the ranks that have not answered in time.

        what, remedy: as in ``missing``. seconds: longest wait; None: the deadline on the leader, and twice
        the deadline on other ranks. So the leader gives up first. Only the leader hears from all ranks, and
        can name the missing one. pause, longest: first and longest pause between two checks, in seconds.
        """
        seconds = seconds or self.deadline * (1 if self.rank == LEADER else 2)
        end = time.monotonic() + seconds
        while requests := [(rank, request) for rank, request in requests if not request.Test()]:
            if time.monotonic() > end:
                raise self.missing([rank for rank, _ in requests], what, remedy, seconds=seconds)
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _rank_in_comm(self, rank: int) -> int:
        """Return the rank in the communicator ``comm`` of the process with this world rank."""
        return (rank + self.offset) % self.comm.size

    # --- Coming together ---

    def connect_peers(
        self, layout: WeightLayout, *, progress: bytes, bucket_mb: int = BUCKET_MB
    ) -> NodeMemory:
        """Wait, as the leader, until every rank is set up; then send ``layout`` and ``progress`` to all.

        Returns this node's shared memory for weights.

        layout: layout of the weights. bucket_mb: size of a broadcast between nodes, MiB. Raises
        ExchangeError, which names the ranks, if some are not set up in time.
        """
        assert self.rank == LEADER, "all others call connect"
        hellos = [self.receive(np.empty(1, np.int64), rank, Tag.CONNECT) for rank in self.peers]
        what = "joined the world, but did not get ready (loading model and engine)"
        self.wait_for(hellos, what, "see its log, or raise launch.timeout_seconds")
        welcome = Welcome(layout, bucket_mb << 20, progress)
        text = np.frombuffer(msgspec.msgpack.encode(welcome), np.uint8)
        for message in (np.array([len(text)]), text):
            self.send_all(message, Tag.CONNECT, "did not take the layout of the weights")
        return self._begin_work(welcome)

    def connect(self) -> tuple[NodeMemory, bytes]:
        """Tell the leader that this rank is set up; return the node's memory and the leader's ``progress``.

        Raises ExchangeError if the leader does not answer in time.
        """
        hello = self.send(np.array([self.rank]), LEADER, Tag.CONNECT)
        size, what = np.empty(1, np.int64), "did not send the layout of the weights"
        self.wait_for(
            [self.receive(size, LEADER, Tag.CONNECT)], what, "it, or a rank that it waits for, is not ready"
        )
        text = np.empty(int(size[0]), np.uint8)
        self.wait_for([hello, self.receive(text, LEADER, Tag.CONNECT)], what)
        welcome = msgspec.msgpack.decode(text.tobytes(), type=Welcome)
        return self._begin_work(welcome), welcome.progress

    def _begin_work(self, welcome: Welcome) -> NodeMemory:
        """Return the node's memory, and apply ``work_deadline`` now that all ranks are set up."""
        memory = NodeMemory(self, welcome.layout, welcome.bucket_bytes)
        self.deadline = self.work_deadline or self.deadline
        return memory

    def leave(self) -> None:
        """Wait until all ranks have ended their work. MPI's own wait, in ``finalize``, has no deadline.

        Raises ExchangeError, which names the ranks, if some are still at work after END_DEADLINES deadlines.
        """
        done, what = np.array([self.rank]), "did not end with the run"
        longest = END_DEADLINES * self.deadline
        if self.rank == LEADER:
            told = [self.receive(done.copy(), rank, Tag.LEAVE) for rank in self.peers]
            self.wait_for(told, what, seconds=longest, pause=LONGEST_PAUSE)
            self.send_all(done, Tag.LEAVE, what)
        else:
            messages = self.send(done, LEADER, Tag.LEAVE), self.receive(done.copy(), LEADER, Tag.LEAVE)
            self.wait_for(messages, what, seconds=2 * longest, pause=LONGEST_PAUSE)

    def _meet(self) -> tuple[str, ...]:
        """Exchange and return the host names of all ranks."""
        table = np.zeros(self.comm.size, HOSTNAME)
        table[self.rank] = socket.gethostname()
        not_there = (
            "it did not start, or not as configured; see the launcher's output, or raise "
            "launch.timeout_seconds if it was only slow"
        )
        if self.rank == LEADER:
            hellos = [self.receive(table[rank : rank + 1], rank, Tag.JOIN) for rank in self.peers]
            self.wait_for(hellos, "did not join the world", not_there)
            self.send_all(table, Tag.JOIN, "did not take the list of ranks")
        else:
            sent = self.send(table[self.rank : self.rank + 1], LEADER, Tag.JOIN)
            answer = self.receive(table, LEADER, Tag.JOIN)
            self.wait_for([sent, answer], "did not welcome all ranks", not_there)
        return tuple(host.decode() for host in table)


class NodeMemory:
    """A node's copy of the weights, in two files in memory that take turns, and transfers between nodes.

    All ranks of the world must call the constructor together. The lowest world rank of a node is its *node
    leader*. The files have no names: each rank of the node has them open, and they vanish with the last rank.
    Weights that a rank still reads are not overwritten: if it does not release them soon, a third file is
    used. Published weights have sequence numbers from 0.
    """

    def __init__(self, world: MpiWorld, layout: WeightLayout, bucket_bytes: int) -> None:
        self.layout = layout
        self._world = world
        self._bucket_bytes = bucket_bytes
        self._connect(world.node_split(world.comm))
        self._files, table = self._open()
        self._order, self._generations = table["order"][0], table["generations"][0]
        self._maps = [file.map("r+") for file in self._files]
        self._crowded: float | None = None  # when readers began to delay new weights (monotonic)
        for place in self._order if world.role == "trainer" else ():
            fault_in(self._maps[place])  # now, not while the trainer waits for it

    def writable(self, sequence: int) -> np.ndarray:
        """Return this node's memory for the weights published as number ``sequence``, uint8 [layout.nbytes].

        Weights ``sequence`` + 2 reuse this memory.
        """
        self._map_anew()
        return self._map_of(sequence)

    def reader(self, sequence: int) -> WeightFile:
        """Return the weights of this sequence number, which stay unchanged while the returned object lives.

        Call it before the node leader calls ``make_room(sequence + 2)``.
        """
        place = self._order[sequence % 2]
        reader = self._files[place].reader()
        reader.generation = int(self._generations[place])
        return reader

    def _map_of(self, sequence: int) -> np.ndarray:
        return self._maps[self._order[sequence % 2]]

    def _map_anew(self) -> None:
        """Map anew the files that have given back their memory, so that CUDA forgets the old pages."""
        for place, generation in enumerate(self._generations.tolist()):
            if self._files[place].generation != generation:
                self._files[place].generation = generation
                self._maps[place] = self._files[place].map("r+")

    def make_room(self, sequence: int) -> bool:
        """Return whether nobody reads the weights that those of this sequence number will replace.

        The node leader must call this until it returns True; on other ranks it always does. If the old
        weights are read for RELEASE_SECONDS, the spare file takes the place of their file. Raises
        ExchangeError if readers have delayed new weights for READ_DEADLINES deadlines.
        """
        if self._node.rank != 0:
            return True
        place, spare = self._order[sequence % 2], sum(range(FILES)) - self._order.sum()
        spare_is_read = not self._free(spare)
        if not self._files[place].has_readers:
            self._crowded = None
            return True
        now = time.monotonic()
        self._crowded = self._crowded or now
        self._refuse_readers(now - self._crowded, spare_is_read=spare_is_read)
        if spare_is_read or now - self._crowded < RELEASE_SECONDS or not self._gets_memory(spare):
            return False
        self._map_anew()
        fault_in(self._maps[spare])
        self._order[sequence % 2], self._crowded = spare, None
        return True

    def _free(self, spare: int) -> bool:
        """Free the memory of ``spare``, the spare file, unless a rank reads it; return whether it is free."""
        if self._files[spare].has_readers:
            return False
        self._files[spare].give_back()
        self._generations[spare] += 1
        return True

    def _gets_memory(self, spare: int) -> bool:
        """Allocate memory in ``spare`` for a third copy of the weights; return whether this succeeds."""
        if shutil.disk_usage(SHARED_MEMORY).free < self.layout.nbytes:
            return False
        with suppress(OSError):  # another process has taken the memory meanwhile
            self._files[spare].allocate()
            return True
        return False

    def _refuse_readers(self, seconds: float, *, spare_is_read: bool) -> None:
        """Raise ExchangeError if readers have delayed new weights for READ_DEADLINES deadlines.

        seconds: time for which they have done so. spare_is_read: whether a rank reads the spare file, too.
        """
        longest = READ_DEADLINES * self._world.deadline
        if seconds <= longest:
            return
        why, remedy = "there is no memory for newer ones beside them", f"free some of {SHARED_MEMORY} or "
        if spare_is_read:
            why, remedy = "another rank there has read older ones", ""
        raise ExchangeError(
            f"a rank on {socket.gethostname()} has read old weights for {longest:g} s, and {why}: it hangs, "
            f"or its evaluation takes longer; see the logs of the ranks there, and {remedy}raise "
            "launch.timeout_seconds"
        )

    def spread(self, sequence: int) -> None:
        """Copy the weights of this sequence number from the trainers' nodes into this node's memory.

        All ranks of the world must call this. Raises ExchangeError if others do not call it in time.
        """
        empty = np.empty(0, np.uint8)
        if self._node.rank == 0:
            self._broadcast(sequence)
            to_all = [self._node.Isend(empty, rank, Tag.ARRIVED) for rank in range(1, self._node.size)]
            sends = [(self._world.rank, send) for send in to_all]
            self._world.wait_for(sends, "could not tell its node that the weights have arrived")
        else:
            arrived = self._node.Irecv(empty, 0, Tag.ARRIVED)
            what = "did not receive the weights for its node"
            self._world.wait_for([(self._node_leader, arrived)], what, _BROADCAST_HANGS)

    def _connect(self, node: MPI.Intracomm) -> None:
        """Set up communicators within this node and between node leaders, and the list of broadcasts."""
        self._node = node
        self._nodes = self._world.comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, key=self._world.rank)
        mine, leaders = np.array([self._world.rank]), np.empty(self._world.comm.size, np.int64)
        node.Bcast(mine, 0)
        self._world.comm.Allgather(mine, leaders)
        self._node_leader = int(mine[0])
        nodes = np.unique(leaders)
        self.nodes = len(nodes)
        roots = np.searchsorted(nodes, leaders[: self._world.trainers]).tolist()
        self._buckets = _buckets(self.layout, roots, self._bucket_bytes) if self.nodes > 1 else []

    def _open(self) -> tuple[list[WeightFile], np.ndarray]:
        """Create the node's files and table, or open those that the node leader creates; return both.

        The table is TABLE [1]. Raises ConfigError if the node's ranks do not share SHARED_MEMORY.
        """
        name, sizes = np.zeros(1, HOSTNAME), [*[self.layout.nbytes] * FILES, TABLE.itemsize]
        if self._node.rank == 0:
            _check_shared_memory(self.layout.nbytes)
            name[0] = tempfile.mkdtemp(prefix="tba-hpc-weights-", dir=SHARED_MEMORY)
            for number, nbytes in enumerate(sizes):
                with Path(name[0].decode(), str(number)).open("xb") as file:
                    file.truncate(nbytes)
        self._node.Bcast(name.view(np.uint8), 0)
        folder = Path(name[0].decode())
        if not folder.exists():
            raise ConfigError(
                f"the ranks of {socket.gethostname()} do not share {SHARED_MEMORY}: have their containers "
                "share it, or start another run (run.name) with exchange.transport=files"
            )
        *files, last = [
            WeightFile.open(folder / str(number), nbytes, write=True) for number, nbytes in enumerate(sizes)
        ]
        table = last.map("r+").view(TABLE)
        self._node.Barrier()  # all ranks have the files open
        if self._node.rank == 0:
            shutil.rmtree(folder)
            table["order"] = 0, 1
            for place in (0, 1):
                files[place].allocate()
        self._node.Barrier()
        return files, table

    # --- Between nodes ---

    def _broadcast(self, sequence: int) -> None:
        """Broadcast the weights of this sequence number between node leaders, in buckets.

        With a single node, does nothing.
        """
        weights = self._map_of(sequence)
        under_way: deque[Pending] = deque()
        for start, end, root in self._buckets:
            if len(under_way) == BUCKETS_IN_FLIGHT:
                self._finish_broadcast([under_way.popleft()])
            under_way.append((self._world.rank, self._nodes.Ibcast(weights[start:end], root)))
        self._finish_broadcast(under_way)

    def _finish_broadcast(self, buckets: Sequence[Pending]) -> None:
        # MPI moves data only while it is polled, so poll often.
        what = "could not finish the broadcast of the weights"
        self._world.wait_for(buckets, what, _BROADCAST_HANGS, longest=SHORTEST_PAUSE)


def _buckets(layout: WeightLayout, roots: list[int], bucket_bytes: int) -> list[tuple[int, int, int]]:
    """List first byte, end and root of every broadcast. The root is the node whose trainer wrote the bytes.

    roots: node of each trainer rank. Roots take turns in the list, which keeps all their network links busy.
    """
    queues = [
        [
            (start, min(start + bucket_bytes, run[-1].end), root)
            for start in range(run[0].start, run[-1].end, bucket_bytes)
        ]
        for run, root in zip(layout.parts(len(roots)), roots, strict=True)
        if run
    ]
    return [bucket for turn in zip_longest(*queues) for bucket in turn if bucket]


def _check_threads() -> None:
    """Raise ConfigError if MPI can be called only in the thread that started it.

    The main thread starts MPI and joins the world; later the exchange's thread calls MPI.
    """
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            f"this MPI library ({library_version()}) lets no second thread call it (MPI_THREAD_SERIALIZED): "
            "use another one, or start another run (run.name) with exchange.transport=files"
        )


def _check_size(size: int, trainers: int, searchers: int) -> None:
    expected = trainers + searchers
    if size == 1 != expected:
        library = library_version()
        flavour = "pmix" if library.startswith("Open MPI") else "pmi2"
        raise ConfigError(
            f"this process is alone in its MPI world, but {expected} ranks were expected: the launcher does "
            f"not fit this MPI library ({library}); under Slurm start with srun --mpi={flavour}, else with "
            "the mpiexec of the same library"
        )
    if size != expected:
        raise ConfigError(
            f"the MPI world has {size} ranks, but launch.trainers={trainers} and "
            f"launch.searchers={searchers} need {expected}: start exactly that many"
        )


def _check_role(rank: int, role: Role, trainers: int) -> None:
    expected: Role = "trainer" if rank < trainers else "searcher"
    if role != expected:
        raise ConfigError(
            f"world rank {rank} was started as a {role}, but with launch.trainers={trainers} it must be a "
            f"{expected}: start ranks 0 to {trainers - 1} with 'tba train' and the others with 'tba search'"
        )


def _check_shared_memory(nbytes: int) -> None:
    """Raise ConfigError if shared memory is too small for the weights, which would cause a bus error."""
    free, host = shutil.disk_usage(SHARED_MEMORY).free, socket.gethostname()
    if free < 2 * nbytes:
        raise ConfigError(
            f"two copies of the weights need {2 * nbytes / 1e9:.1f} GB of shared memory on each node, but "
            f"{SHARED_MEMORY} on {host} has {free / 1e9:.1f} GB: free some, or start another "
            "run (run.name) with exchange.transport=files"
        )
    if free < FILES * nbytes:
        log.warning(
            "three copies of the weights need %.1f GB of shared memory, but %s on %s has %.1f GB: new "
            "weights will have to wait while an evaluation uses older ones",
            *(FILES * nbytes / 1e9, SHARED_MEMORY, host, free / 1e9),
        )
