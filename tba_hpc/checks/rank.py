"""What a rank of the doctor's trial does: join the world, note what its node has, measure the network.

Importing it starts MPI. It must not know what of the facts matters.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tba_hpc.checks import trial
from tba_hpc.checks.loaded import describe, pmix_server
from tba_hpc.checks.machine_checks import look
from tba_hpc.checks.mpi_checks import Fabric, Sums, World
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import Role, WeightLayout
from tba_hpc.exchange.mpi_world import BUCKET_MB, LEADER, MpiWorld, NodeMemory, Tag, library_version
from tba_hpc.run.directory import RunDir

SMALL, LARGE, WEIGHTS, SUMMED = 8, 64 << 20, 128 << 20, 256 << 20
"""Bytes of the messages that are measured."""

PING_SECONDS = 0.5
"""Time for each size of message; two of them go in any case."""

NO_PAUSE = 0.0
"""Between two looks, for any would be longer than what is measured."""

REPETITIONS = 5
"""All-reduces that are timed."""


def greet(directory: RunDir, role: Role, *, gpus: bool) -> None:
    """Be one rank. gpus: whether each has one, so that their all-reduce is measured, too.

    Raises ConfigError or ExchangeError saying what is wrong with the world, or who went missing.
    """
    config = directory.config()
    world = MpiWorld.join(
        role,
        trainers=config.launch.trainers,
        searchers=config.launch.searchers,
        deadline=config.launch.start_seconds,
    )
    if world.local_index == 0:
        model = config.model.path
        trial.note_machine(directory, look(directory.path.parent, None if model == trial.NO_MODEL else model))
    facts = World(library=describe(library_version()), server=pmix_server(os.environ))
    note(directory, world, facts)
    if world.rank == LEADER:
        directory.mark_finished()  # as a run; what is measured from here on may fail by itself
    facts = replace(facts, fabric=measure(world, BUCKET_MB))
    note(directory, world, facts)
    if gpus:
        store = directory.attempt / "group"
        sums = all_reduce(store, rank=world.rank, ranks=world.comm.size, deadline=world.deadline)
        note(directory, world, replace(facts, sums=sums))


def note(directory: RunDir, world: MpiWorld, facts: World) -> None:
    """As the leader, write down what is known by now."""
    if world.rank == LEADER:
        trial.note_world(directory, facts)


# --- MPI ---


def measure(world: MpiWorld, bucket_mb: int) -> Fabric | None:
    """What lies between the nodes, None for a single one. All ranks call it; the leader's figures hold."""
    peer = next((rank for rank, host in enumerate(world.hosts) if host != world.hosts[LEADER]), None)
    if peer is None:
        return None
    small, large = (one_way(world, peer, nbytes) for nbytes in (SMALL, LARGE))
    return Fabric(
        hosts=(world.hosts[LEADER], world.hosts[peer]),
        latency=small,
        bandwidth=LARGE / max(large, 1e-9),
        spread=WEIGHTS / max(spread(world, bucket_mb), 1e-9),
    )


def one_way(world: MpiWorld, peer: int, nbytes: int) -> float:
    """Seconds that a message takes to ``peer``, the median of half the round trips; 0 at other ranks.

    The first byte of a message says whether another one follows.
    """
    message = np.ones(nbytes, np.uint8)
    if world.rank == peer:
        while message[0]:
            world.wait_for([world.receive(message, LEADER, Tag.PING)], "did not ping", pause=NO_PAUSE)
            sent = world.send(message, LEADER, Tag.PING)
            world.wait_for([sent], "did not take its ping back", pause=NO_PAUSE)
    if world.rank != LEADER:
        return 0.0
    trips: list[float] = []
    back = message.copy()  # memory that is there before the clock runs
    end = time.monotonic() + PING_SECONDS
    while message[0]:
        message[0] = len(trips) < 1 or time.monotonic() < end
        trips.append(_seconds(partial(_there_and_back, world, peer, message, back)))
    return statistics.median(trips[1:]) / 2  # the first one connects


def _there_and_back(world: MpiWorld, peer: int, message: np.ndarray, back: np.ndarray) -> None:
    both = [world.receive(back, peer, Tag.PING), world.send(message, peer, Tag.PING)]
    world.wait_for(both, "did not answer a ping", pause=NO_PAUSE)


def spread(world: MpiWorld, bucket_mb: int) -> float:
    """Seconds until weights of the leader are in every node's memory, sent as in a run."""
    memory = _connected(world, bucket_mb)
    return min(_seconds(partial(_spread_once, world, memory, write)) for write in range(2))


def _connected(world: MpiWorld, bucket_mb: int) -> NodeMemory:
    if world.rank != LEADER:
        return world.connect()[0]
    layout = WeightLayout.of([("weights", (WEIGHTS // 4,))], "F32")
    return world.connect_peers(layout, bucket_mb=bucket_mb, told=b"")


def _spread_once(world: MpiWorld, memory: NodeMemory, write: int) -> None:
    """Back, at the leader, when all ranks have them."""
    memory.spread(write)
    empty = np.empty(0, np.uint8)
    if world.rank == LEADER:
        there = [world.receive(empty, rank, Tag.STATUS) for rank in world.peers]
    else:
        there = [world.send(empty, LEADER, Tag.STATUS)]
    world.wait_for(there, "did not receive the weights")


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# --- torch ---


def all_reduce(store: Path, *, rank: int, ranks: int, deadline: float) -> Sums:
    """Sum over all ranks by NCCL where they have GPUs, by gloo where they have none.

    store: a folder that all see. Raises ExchangeError where a rank is missing or the sum is wrong. The
    bandwidth is NCCL's bus bandwidth, 2 (n − 1) / n · bytes / s (nccl-tests, doc/PERFORMANCE.md).
    """
    import torch
    import torch.distributed as dist

    from tba_hpc.learner.trainer_group import TrainerGroup

    store.mkdir(exist_ok=True)
    group = TrainerGroup.join(store, rank=rank, ranks=ranks, deadline=deadline)
    on_gpu = group.device.type == "cuda"
    values = torch.ones(SUMMED // 4, device=group.device)

    def sum_once() -> None:
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()

    sum_once()  # the first one connects
    seconds = statistics.median([_seconds(sum_once) for _ in range(REPETITIONS)])
    expected = float(ranks) ** (1 + REPETITIONS)
    if not torch.allclose(values, torch.full_like(values, expected)):
        raise ExchangeError(
            f"{1 + REPETITIONS} all-reduces of ones over {ranks} ranks gave {values.min().item():g} to "
            f"{values.max().item():g} instead of {expected:g}: GPUs or network corrupt data; try "
            "NCCL_P2P_DISABLE: 1 under environment, and tell the administrators"
        )
    group.leave()
    return Sums(
        backend="nccl" if on_gpu else "gloo",
        ranks=ranks,
        bandwidth=2 * (ranks - 1) / ranks * SUMMED / seconds,
    )
