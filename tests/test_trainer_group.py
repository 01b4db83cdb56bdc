"""Trainer ranks as a group: strangers at its ports cost nothing, and no two ranks have one GPU."""

from __future__ import annotations

import os
import re
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket

import numpy as np
import pytest
from children import children
from forks import RANKS

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import ExchangeError
from tba_hpc.learner.folder_store import FolderStore
from tba_hpc.learner.trainer_group import Command, TrainerGroup, refuse_shared_gpu
from tba_hpc.run.listeners import listeners, unprotected

FILES = 256
"""Descriptors that each rank may have."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_connections_of_strangers_cost_no_descriptor(tmp_path: Path, ranks: int) -> None:
    """Twice as many at every port as a rank may have descriptors; then the group still works."""
    if why := unprotected(mpiexec=False):
        pytest.skip(f"this system does not allow it: {why}")
    with children() as start:
        group = [start(_be_a_rank, tmp_path, rank, ranks, server=RANKS) for rank in range(ranks)]
        assert [rank.said() for rank in group] == ["ready"] * ranks
        ports = [place for rank in group for _, *place in listeners(rank.pid, loopback=True)]
        assert ports, "gloo listens"
        for address, port in ports:
            for _ in range(2 * FILES):
                with suppress(OSError), socket() as call:
                    call.setblocking(False)
                    call.connect((address, port))
        for rank in group:
            rank.tell("add up")
        assert [(rank.said(), rank.ended()) for rank in group] == [(str(float(ranks)), 0)] * ranks


def _be_a_rank(told: Connection, folder: Path, rank: int, ranks: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    group = TrainerGroup(folder, rank=rank, ranks=ranks, deadline=60)
    told.send("ready")
    told.recv()
    told.send(group.total(np.ones(1))[0])
    group.leave()


def test_a_follower_that_hangs_is_told_of_within_the_deadline(tmp_path: Path) -> None:
    """The command is larger than what the kernel keeps of a connection."""
    with children() as start:
        leader, follower = (start(_command, tmp_path, rank, server=RANKS) for rank in range(2))
        assert [leader.said(), follower.said()] == ["ready", "ready"]
        os.kill(follower.pid, signal.SIGSTOP)
        leader.tell("send")
        assert re.match(r"trainer rank 0 cannot reach the followers.* has died, hangs or was", leader.said())
        os.kill(follower.pid, signal.SIGKILL)


def _command(told: Connection, folder: Path, rank: int) -> None:
    group = TrainerGroup(folder, rank=rank, ranks=2, deadline=20)
    told.send("ready")
    if rank == 1:
        group.receive()
    told.recv()
    try:
        group.send(Command("step", arrays={"tokens": np.zeros(64 << 20, np.uint8)}))
    except ExchangeError as error:
        told.send(str(error))
        os._exit(0)


def refusals(folder: Path, gpus: list[str]) -> list[str]:
    """What each rank is told, at the same time; empty if nothing."""

    def told(rank: int) -> str:
        try:
            refuse_shared_gpu(FolderStore(folder, deadline=60), rank, len(gpus), gpus[rank])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as ranks:
        return list(ranks.map(told, range(len(gpus))))


def test_ranks_that_have_one_gpu_are_named(tmp_path: Path) -> None:
    for name in ("each", "same"):
        (tmp_path / name).mkdir()
    assert refusals(tmp_path / "each", ["a", "b", "c"]) == ["", "", ""]
    first, other, last = refusals(tmp_path / "same", ["a", "b", "a"])
    assert first == last and first.startswith("trainer ranks 0 and 2 have one GPU, a, and each needs its own")
    assert other == ""
