"""Communication between trainer ranks: finding each other, the leader's commands, and sums over ranks.

The leader is rank 0; the others are its followers. Ranks find each other through files in a private folder,
so that none has to listen where strangers could connect.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import numpy as wire
from torch.nn import functional

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import ExchangeError
from tba_hpc.learner.folder_store import FolderStore
from tba_hpc.run.listeners import own_listeners, stop_listening

IDLE_DEADLINE = timedelta(days=2)
"""Longest time that a follower waits for a command. The leader may wait hours until its buffer is filled.

If the leader dies, a follower notices at once, because the connection closes.
"""

ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that keep connections between ranks on one machine off the network."""

SIZE = struct.Struct("<q")
"""Encoding of a command's length in bytes, which is sent before the command."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the leader sends to all followers.

    name: the work to do, such as "step". arguments: its numbers and texts. arrays: its arrays, by name.
    """

    name: str
    arguments: tuple[float | str, ...] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Encode the command as a line of JSON followed by safetensors."""
        return json.dumps([self.name, *self.arguments]).encode() + b"\n" + wire.save(dict(self.arrays))

    @classmethod
    def from_bytes(cls, data: bytes) -> Command:
        """Inverse of to_bytes."""
        line, _, arrays = data.partition(b"\n")
        name, *arguments = json.loads(line)
        return cls(name, tuple(arguments), wire.load(arrays))


class TrainerGroup:
    """One rank's connection to the others; one per process, because torch.distributed allows no more.

    The constructor waits for the other ranks in ``store``, an existing, private, shared folder that was empty
    before this attempt. It sets the environment variables RANK, LOCAL_RANK and others, which libraries read.
    deadline: time limit of each operation in which all ranks take part, in seconds. start_deadline: longest
    wait for another rank to start, in seconds; None: deadline. Raises an ExchangeError that names missing
    ranks, or a ConfigError that names ranks sharing a GPU.

    device: this rank's GPU, or the CPU. local_ranks: number of trainer ranks on this machine.
    """

    def __init__(
        self, store: Path, *, rank: int, ranks: int, deadline: float, start_deadline: float | None = None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        (store / "group").mkdir(exist_ok=True)
        self._entries = FolderStore(store / "group", deadline=deadline)  # torch does not keep it alive
        hosts = _meet(self._entries, rank, ranks, start_deadline or deadline)
        local_rank, self.local_ranks = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
        if len(set(hosts)) == 1:
            os.environ |= ON_ONE_MACHINE
        self.device = torch.device("cpu")
        if gpus := torch.cuda.device_count():  # 1 if the launcher shows each rank only its own
            local_rank %= gpus
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
            uuid = torch.cuda.get_device_properties(self.device).uuid
            refuse_shared_gpu(self._entries, rank, ranks, f"{uuid}")
        _set_environment(rank=rank, ranks=ranks, local_rank=local_rank, local_ranks=self.local_ranks)
        self._not_ours = own_listeners()  # sockets that listened before this group opened its own
        timeout = timedelta(seconds=deadline)
        self._longest = max(timeout, timedelta(seconds=start_deadline or 0))  # a follower may be starting
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._entries, timeout=timeout, rank=rank, world_size=ranks)
        self._commands = dist.new_group(backend="gloo", timeout=IDLE_DEADLINE)
        self._texts = dist.new_group(backend="gloo", timeout=timeout)
        self._background = dist.new_group(backend="gloo", timeout=timeout)
        stop_listening(less=self._not_ours)  # now, because sockets that NCCL opens later must stay open

    def refuse_strangers(self) -> None:
        """Close the ports at which gloo still listens, once all groups of ranks have been made.

        gloo has all connections that it needs by then. It would keep a file descriptor for each stranger that
        connects, and abort the process when none is left. On a GPU this does nothing, because sockets of NCCL
        must stay open.
        """
        if self.device.type == "cpu":
            stop_listening(less=self._not_ours)

    @property
    def leads(self) -> bool:
        """True if this rank is the leader."""
        return self.rank == 0

    @property
    def _alone(self) -> bool:
        """True if there are no other ranks. Methods then skip gloo, which takes time even for one rank."""
        return self.ranks == 1

    def send(self, command: Command) -> None:
        """Send a command to all followers, as the leader. Raises ExchangeError if one of them is gone."""
        if self._alone:
            return
        data = command.to_bytes()
        with _lost(f"trainer rank 0 cannot reach the followers, ranks 1 to {self.ranks - 1}: one of them"):
            self._broadcast(SIZE.pack(len(data)))
            self._broadcast(data)

    def receive(self) -> Command:
        """Wait for the leader's next command, as a follower. Raises ExchangeError if the leader is gone."""
        with _lost(f"trainer rank {self.rank} waited for its next command, but the leader, trainer rank 0,"):
            (size,) = SIZE.unpack(self._broadcast(bytes(SIZE.size)))
            return Command.from_bytes(self._broadcast(bytes(size)))

    def _broadcast(self, data: bytes) -> bytes:
        """Return the leader's ``data`` on every rank. A follower passes any bytes of the same length.

        The leader waits until all have received the data, for at most ``deadline`` or ``start_deadline``
        seconds, whichever is longer.
        """
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        work = dist.broadcast(buffer, src=0, group=self._commands, async_op=True)
        work.wait(self._longest if self.leads else IDLE_DEADLINE)
        return buffer.numpy().tobytes()

    def await_leader(self) -> None:
        """Wait, perhaps for hours, until the leader calls this. Raises ExchangeError if it has died."""
        if not self._alone:
            with _lost(f"trainer rank {self.rank} waited for the leader, trainer rank 0, but it"):
                self._broadcast(b"\0")

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in the order of ranks. No text may be empty.

        One thread of each rank may call this while other threads use the group.
        Raises ExchangeError if another rank is gone, or does not call this within the deadline.
        """
        if self._alone:
            return [text]
        with _lost(f"trainer rank {self.rank} could not agree with the others: one of them"):
            data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            longest = torch.tensor([len(data)])
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._texts)
            padded = functional.pad(data, (0, int(longest) - len(data)))
            texts = [torch.empty_like(padded) for _ in range(self.ranks)]
            dist.all_gather(texts, padded, group=self._texts)
            return [one.numpy().tobytes().rstrip(b"\0").decode() for one in texts]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of ``values`` over all ranks, element by element, as float64."""
        sums = torch.from_numpy(values.astype(np.float64))
        if not self._alone:
            dist.all_reduce(sums)
        return sums.numpy()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose work that all ranks do together. Raises ExchangeError if another rank dies in the block."""
        other = f"trainer rank {1 - self.rank}" if self.ranks == 2 else "another trainer rank"
        with _lost(f"trainer rank {self.rank} cannot go on: {other}"):
            yield

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.total(np.zeros(1))

    def background_barrier(self) -> None:
        """Wait until one thread of each rank has called this. Other threads may use the group meanwhile."""
        if not self._alone:
            dist.all_reduce(torch.zeros(1), group=self._background)

    def leave(self) -> None:
        """Close all connections. All ranks must call this."""
        dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that a rank is lost. gloo's errors are recognised by their texts."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/", "timed out"))


@contextmanager
def _lost(who: str) -> Iterator[None]:
    """Turn an error that means a lost rank into ExchangeError. who: beginning of its message."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise ExchangeError(
            f"{who} has died, hangs or was cut off; the cause is in that rank's log ({error})"
        ) from error


def _meet(entries: FolderStore, rank: int, ranks: int, deadline: float) -> list[str]:
    """Wait for all ranks; return their host names, by rank. Raises ExchangeError that names missing ranks."""
    keys = [f"host of rank {other}" for other in range(ranks)]
    entries.set(keys[rank], socket.gethostname())
    try:
        entries.wait(keys, timedelta(seconds=deadline))
    except dist.DistStoreError:
        missing = [other for other, key in enumerate(keys) if not entries.check([key])]
        raise ExchangeError(
            f"trainer rank {rank} waited {deadline:.0f} s for trainer ranks {missing} of {ranks} in "
            f"{entries.folder}: they have not started, or do not see that folder; see their logs, or raise "
            "launch.timeout_seconds"
        ) from None
    return [entries.get(key).decode() for key in keys]


def refuse_shared_gpu(entries: FolderStore, rank: int, ranks: int, gpu: str) -> None:
    """Raise ConfigError if another rank has the same GPU, with which NCCL would fail at the first step.

    gpu: UUID of this rank's GPU.
    """
    entries.set(f"GPU of rank {rank}", gpu)
    gpus = [entries.get(f"GPU of rank {other}").decode() for other in range(ranks)]
    if gpus.count(gpu) > 1:
        same = [other for other in range(ranks) if gpus[other] == gpu]
        raise ConfigError(
            f"trainer ranks {' and '.join(map(str, same))} have one GPU, {gpu}, and each needs its own: "
            "lower launch.trainers, or let CUDA_VISIBLE_DEVICES show more of them"
        )


def _set_environment(*, rank: int, ranks: int, local_rank: int, local_ranks: int) -> None:
    """Set environment variables that libraries on torch read. Remove MPI's, whose ranks include searchers."""
    for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD_")]:
        del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(local_ranks),
    }
