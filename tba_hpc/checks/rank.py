"""A rank of the doctor's trial start: joins the world, notes what its node has, takes part in a broadcast.

Importing it starts MPI.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import replace

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
"""Bytes that are broadcast."""


def greet(directory: RunDir, role: Role) -> None:
    """Be one rank.

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
    if zlib.crc32(memory.slot(0).data) != int(told):
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
    told = str(zlib.crc32(data.data)).encode()
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
