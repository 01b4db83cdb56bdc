"""A rank of the doctor's trial start: joins the world, notes what its node has, takes part in a broadcast.

Importing it starts MPI.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from tba_hpc.checks import trial
from tba_hpc.checks.loaded import World, describe, pmix_server
from tba_hpc.checks.machine import look
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import Role, WeightLayout
from tba_hpc.exchange.background import run
from tba_hpc.exchange.mpi_world import LEADER, MpiWorld, NodeMemory, Tag, library_version
from tba_hpc.run.directory import RunDir

NBYTES = 128 << 20
"""Bytes that are broadcast, and summed."""


def greet(directory: RunDir, role: Role, *, gpus: bool) -> None:
    """Be one rank. gpus: whether each has one, so that they add up what they hold, too.

    Raises ConfigError or ExchangeError saying what is wrong with the world, or who went missing.
    """
    config = directory.config()
    trainers, searchers = config.launch.trainers, config.launch.searchers
    world = MpiWorld.join(
        role, trainers=trainers, searchers=searchers, deadline=config.launch.start_deadline_seconds
    )
    if world.local_index == 0:
        model = config.model.path
        trial.note_machine(directory, look(directory.path.parent, None if model == trial.NO_MODEL else model))
    facts = World(library=describe(library_version()), server=pmix_server(os.environ), nbytes=NBYTES)
    note(directory, world, facts)
    facts = replace(facts, broadcast=broadcast(world), nodes=len(set(world.hosts)))
    note(directory, world, facts)
    if gpus:
        store = directory.attempt / "group"
        seconds = all_reduce(store, rank=world.rank, ranks=trainers + searchers, deadline=world.deadline)
        note(directory, world, replace(facts, sum=seconds))
    if world.rank == LEADER:
        directory.mark_finished()


def note(directory: RunDir, world: MpiWorld, facts: World) -> None:
    """As the leader, write down what is known by now."""
    if world.rank == LEADER:
        trial.note_world(directory, facts)


def broadcast(world: MpiWorld) -> float:
    """Seconds until bytes of the leader are in every node's memory, sent like weights; all ranks call it.

    Raises ExchangeError if a rank is missing, or got other bytes.
    """
    memory, told = _connected(world)
    began = time.monotonic()
    _spread_once(world, memory)
    seconds = time.monotonic() - began
    if zlib.crc32(memory.slot(0)) != int(told):
        raise ExchangeError(
            f"{NBYTES} bytes came to {world.hostname} damaged: the network between the nodes corrupts data; "
            "tell the administrators"
        )
    return seconds


def _connected(world: MpiWorld) -> tuple[NodeMemory, bytes]:
    """The node's memory, at the leader filled, and the checksum of what it holds."""
    if world.rank != LEADER:
        return world.connect()
    data = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    told = str(zlib.crc32(data)).encode()
    layout = WeightLayout.of([("weights", (NBYTES // 4,))], "F32")
    memory = world.connect_peers(layout, bucket_mb=32, told=told)
    memory.slot(0)[:] = data
    return memory, told


def _spread_once(world: MpiWorld, memory: NodeMemory) -> None:
    """Back, at the leader, when all ranks have them."""
    run(memory.spread(0))
    empty = np.empty(0, np.uint8)
    if world.rank == LEADER:
        there = [world.receive(empty, rank, Tag.STATUS) for rank in world.peers]
    else:
        there = [world.send(empty, LEADER, Tag.STATUS)]
    run(world.wait_for(there, "did not receive the weights"))


def all_reduce(store: Path, *, rank: int, ranks: int, deadline: float) -> float:
    """Seconds of a sum over all ranks, by NCCL if they have GPUs, else by gloo.

    store: a folder that all see. Raises ExchangeError if a rank is missing or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from tba_hpc.learner.trainer_group import TrainerGroup

    store.mkdir(exist_ok=True)
    group = TrainerGroup.join(store, rank=rank, ranks=ranks, deadline=deadline)
    values = torch.ones(NBYTES // 4, device=group.device)
    dist.all_reduce(values)  # the first one connects
    began = time.monotonic()
    dist.all_reduce(values)
    least, most = values.min().item(), values.max().item()  # which waits for a GPU
    seconds = time.monotonic() - began
    if not least == most == ranks**2:
        raise ExchangeError(
            f"two all-reduces of ones over {ranks} ranks gave {least:g} to {most:g} instead of {ranks**2}: "
            "GPUs or network corrupt data; try NCCL_P2P_DISABLE: 1 under environment, and tell the "
            "administrators"
        )
    group.leave()
    return seconds
