"""Trainer ranks as a group: strangers at its ports cost nothing, and no two ranks have one GPU."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from socket import socket

import pytest

from tba_hpc.config import ConfigError
from tba_hpc.learner.folder_store import FolderStore
from tba_hpc.learner.trainer_group import refuse_shared_gpu
from tba_hpc.run.listeners import listeners, unprotected

FILES = 256
"""Descriptors that each rank may have."""

RANK = f"""
import resource, sys
from pathlib import Path
import numpy as np
from tba_hpc.learner.trainer_group import TrainerGroup
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
group = TrainerGroup(folder, rank=rank, ranks=ranks, deadline=60)

print("ready", flush=True)
sys.stdin.read()
print(group.total(np.ones(1))[0])
group.leave()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_connections_of_strangers_cost_no_descriptor(tmp_path: Path, ranks: int) -> None:
    """Twice as many at every port as a rank may have descriptors; then the group still works."""
    if why := unprotected(mpiexec=False):
        pytest.skip(f"this system does not allow it: {why}")
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(rank), str(ranks)], stdin=-1, stdout=-1, stderr=-1, text=True)
        for rank in range(ranks)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    ports = [place for process in processes for _, *place in listeners(process.pid, loopback=True)]
    assert ports, "gloo listens"
    for address, port in ports:
        for _ in range(2 * FILES):
            with suppress(OSError), socket() as call:
                call.setblocking(False)
                call.connect((address, port))
    for process in processes:
        assert process.stdin
        process.stdin.close()
    ended = [(process.wait(60), process.stdout.read() if process.stdout else "") for process in processes]
    assert ended == [(0, f"{float(ranks)}\n")] * ranks


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
