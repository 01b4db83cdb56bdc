"""The trainer ranks as one group: they find each other, the leader commands, sums go over all.

It must not know what the commands mean. Rendezvous goes through files in a private folder, so that no
rank opens a port to strangers; rank 0 is the leader.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tba_hpc.core.ports import ExchangeError
from tba_hpc.run.files import listing, write_atomic

IDLE_DEADLINE = timedelta(days=2)
"""Longest time between two commands: the leader may fill its first buffer for hours.

Its death is noticed at once, by the closed connection.
"""

FIRST_PAUSE, LAST_PAUSE = 0.02, 0.32
"""Seconds between two looks for ranks that are still starting."""

ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of ranks that nobody outside their machine has to reach."""

HEADER = struct.Struct("<qddq")  # command, two numbers, bytes of the payload


@dataclass(frozen=True, slots=True)
class Message:
    """A command of the leader, with what it needs."""

    command: int
    numbers: tuple[float, float] = (0.0, 0.0)
    payload: bytes = b""


class TrainerGroup:
    """One rank's view of the group; one per process, because torch.distributed is.

    ``device`` is this rank's GPU where there are GPUs, else the CPU. ``local_ranks``: how many of the group
    are on this machine.
    """

    def __init__(
        self, *, rank: int, ranks: int, local_ranks: int, device: torch.device, deadline: float
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.local_ranks = local_ranks
        self.device = device
        self._commands = dist.new_group(backend="gloo", timeout=IDLE_DEADLINE)
        self._texts = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))

    @classmethod
    def join(
        cls, store: Path, *, rank: int, ranks: int, deadline: float, start_deadline: float | None = None
    ) -> TrainerGroup:
        """Meet the other ranks in ``store``: an existing, private, shared folder, empty before this attempt.

        ``start_deadline``: longest wait for another rank here, s; ``deadline``: in any collective, and by
        default here. Sets the variables by which libraries learn their place (RANK, LOCAL_RANK …). Raises
        ExchangeError naming who is missing.
        """
        hosts = _meet(store, rank, ranks, start_deadline or deadline)
        local_rank, local_ranks = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
        if len(set(hosts)) == 1:
            os.environ |= ON_ONE_MACHINE
        device = torch.device("cpu")
        if gpus := torch.cuda.device_count():  # 1 where the launcher shows each rank only its own
            local_rank %= gpus
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        _set_environment(rank=rank, ranks=ranks, local_rank=local_rank, local_ranks=local_ranks)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store.absolute() / 'group'}",
            timeout=timedelta(seconds=deadline),
            rank=rank,
            world_size=ranks,
        )
        return cls(rank=rank, ranks=ranks, local_ranks=local_ranks, device=device, deadline=deadline)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == 0

    @property
    def _alone(self) -> bool:
        """Whether there is nobody to talk to: gloo would still wait for its own threads to get a core."""
        return self.ranks == 1

    def tell(self, message: Message) -> None:
        """Leader: send a command to all followers. Raises ExchangeError where one of them is gone."""
        if self._alone:
            return
        header = HEADER.pack(message.command, *message.numbers, len(message.payload))
        with _lost(f"trainer rank 0 cannot reach the followers, ranks 1 to {self.ranks - 1}: one of them"):
            self._broadcast(header)
            if message.payload:
                self._broadcast(message.payload)

    def hear(self) -> Message:
        """Follower: wait for the leader's next command. Raises ExchangeError where the leader is gone."""
        with _lost(f"trainer rank {self.rank} waited for its next command, but the leader, trainer rank 0,"):
            command, first, second, size = HEADER.unpack(self._broadcast(bytes(HEADER.size)))
            payload = self._broadcast(bytes(size)) if size else b""
        return Message(command, (first, second), payload)

    def _broadcast(self, data: bytes) -> bytes:
        """The leader's ``data``; a follower passes as many bytes of anything."""
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._commands)
        return buffer.numpy().tobytes()

    def await_leader(self) -> None:
        """Back when the leader comes here, too, hours later perhaps. ExchangeError where it is gone."""
        if not self._alone:
            with _lost(f"trainer rank {self.rank} waited for what the leader, trainer rank 0, does, but it"):
                self._broadcast(b"\0")

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank; on a follower its own alone.

        One thread of each rank may be here while others command and sum: these are connections of their own.
        Raises ExchangeError where another rank is gone, or does not come for the deadline.
        """
        if self._alone:
            return [text]
        with _lost(f"trainer rank {self.rank} could not agree with the others: one of them"):
            if self.leads:
                return [text, *(self._receive(rank) for rank in range(1, self.ranks))]
            for data in (struct.pack("<q", len(text.encode())), text.encode()):
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=0, group=self._texts)
            return [text]

    def _receive(self, rank: int) -> str:
        """What a follower sends."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size.view(torch.uint8), src=rank, group=self._texts)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, src=rank, group=self._texts)
        return data.numpy().tobytes().decode()

    def total(self, values: np.ndarray) -> np.ndarray:
        """float64 sums over all ranks."""
        if self._alone:
            return values.astype(np.float64)
        sums = torch.from_numpy(values.astype(np.float64))
        dist.all_reduce(sums)
        return sums.numpy()

    def spread(self, tensor: torch.Tensor, owner: int) -> None:
        """Have on all ranks what ``tensor`` is on ``owner``: contiguous, and of one shape and dtype."""
        if not self._alone:
            dist.broadcast(tensor, src=owner)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks do at the same time. Raises ExchangeError where another is gone in its midst."""
        other = f"trainer rank {1 - self.rank}" if self.ranks == 2 else "another trainer rank"
        with _lost(f"trainer rank {self.rank} cannot go on: {other}"):
            yield

    def barrier(self) -> None:
        """Back when all ranks have come here."""
        self.total(np.zeros(1))

    def leave(self) -> None:
        """Close all connections; all ranks call it."""
        dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Whether torch.distributed lost a peer; gloo's RuntimeError is known by the source file it names."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


@contextmanager
def _lost(who: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise ExchangeError(
            f"{who} has died or was cut off; the cause is in that rank's log ({error})"
        ) from error


def _meet(store: Path, rank: int, ranks: int, deadline: float) -> list[str]:
    """Host names of all ranks; each leaves its own in a file of ``store``."""
    names = [f"rank-{other:04d}" for other in range(ranks)]
    write_atomic(store / names[rank], socket.gethostname())
    give_up, pause = time.monotonic() + deadline, FIRST_PAUSE
    # One listing a look: that every rank looks for every other would be many requests to one file server.
    while missing := _missing(names, store):
        if time.monotonic() > give_up:
            raise ExchangeError(
                f"trainer rank {rank} waited {deadline:.0f} s for trainer ranks {missing} of {ranks} in "
                f"{store}: they have not started, or do not see that folder; see their logs, or raise "
                "launch.timeout_seconds"
            )
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
    return [(store / name).read_text() for name in names]


def _missing(names: list[str], folder: Path) -> list[int]:
    """Places in ``names`` of those that a folder lacks."""
    there = set(listing(folder))
    return [place for place, name in enumerate(names) if name not in there]


def _set_environment(*, rank: int, ranks: int, local_rank: int, local_ranks: int) -> None:
    """What torch-based libraries read. MPI's own names count searchers too and would contradict them."""
    for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD_")]:
        del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(local_ranks),
    }
