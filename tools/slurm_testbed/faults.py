"""Faults for a run on the cluster: of processes, jobs, files and the disk, and second processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm_testbed.cluster import Cluster
from tba_hpc.core.types import Role
from tba_hpc.launch.sbatch import RANK
from tba_hpc.run.directory import SEARCHERS_FIRST, RunDir

ENGINE = "tba_hpc.engine.engine_process"
"""Module that the engine process of a searcher runs."""

ROLES: dict[str, Role] = {"train": "trainer", "search": "searcher"}
"""Role of a rank, by the command of ``tba`` that starts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A living rank of a run. Process ids are those outside the node's namespace.

    index: number of the rank within its role. engine: process id of its engine; None if it has none.
    """

    node: str
    role: Role
    index: int
    pid: int
    engine: int | None


def ranks(cluster: Cluster, run: RunDir) -> list[RankProcess]:
    """Return the living ranks of ``run``, trainers first."""
    found = [rank for node in cluster.up for pid in cluster.pids(node) if (rank := _rank(node, pid, run))]
    return sorted(found, key=lambda rank: (rank.role == "searcher", rank.index))


def _rank(node: str, pid: int, run: RunDir) -> RankProcess | None:
    """Return the rank that a process is; None if it is none, or is just ending."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        if command[1:-2] != list(RANK[1:]) or command[-1] != str(run.path):
            return None
        role, environment = ROLES[command[-2]], process.environ()
        number, searchers_first = int(environment["SLURM_PROCID"]), environment.get(SEARCHERS_FIRST) == "1"
        engine = next((child.pid for child in process.children() if ENGINE in child.cmdline()), None)
    except (psutil.Error, KeyError):
        return None
    launch = run.config().launch
    index = number
    if role == "searcher" and not searchers_first:
        index -= launch.trainers
    if role == "trainer" and searchers_first:
        index -= launch.searchers
    return RankProcess(node=node, role=role, index=index, pid=pid, engine=engine)


def strike(rank: RankProcess, *, engine: bool = False, sent: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a rank, or to its engine; SIGSTOP makes an engine hang."""
    pid = rank.engine if engine else rank.pid
    assert pid is not None, f"{rank.role} {rank.index} on {rank.node} has no engine process"
    os.kill(pid, sent)


@contextmanager
def held_leader(cluster: Cluster, run: RunDir) -> Iterator[None]:
    """Stop the leading trainer during the block, so that the run cannot end. The block may kill it."""
    leader = ranks(cluster, run)[:1]
    for rank in leader:
        os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in leader:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGCONT)


def preempt(cluster: Cluster, *, seconds: float = 120) -> None:
    """Preempt the run: a short job of a higher partition takes all nodes that are up. Return after it."""
    script = "#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1\n"
    high = cluster.submit(script, "-phigh", f"-N{len(cluster.up)}", "--exclusive")
    state = cluster.wait(high, seconds=seconds)
    assert state == "COMPLETED", f"the preempting job {high} ended as {state}"


def ask_to_stop(cluster: Cluster, job: int) -> None:
    """Send the signal with which users make a job checkpoint and go back to the queue."""
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))


# --- Files ---


def flip_bit(path: Path, place: float) -> None:
    """Change one bit of a file. place: position in the file, in [0, 1)."""
    with path.open("r+b") as file:
        file.seek(int(place * path.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def fill_disk(folder: Path, seconds: float) -> None:
    """Leave no byte free on the file system of ``folder`` for ``seconds``."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # repeatedly, because others may free some space
            with suppress(OSError):
                free = max(1, shutil.disk_usage(folder).free)
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
            time.sleep(0.1)
    ballast.unlink()


# --- A second process ---


def refused(cluster: Cluster, *words: str, seconds: float = 120) -> str:
    """Run ``tba WORDS`` on the login node; return its error message. Raises AssertionError if it succeeds."""
    done = cluster.done(sys.executable, "-m", "tba_hpc", *words, seconds=seconds)
    assert done.returncode, f"tba {' '.join(words)} was let in beside the one at work: {done.stdout}"
    return done.stderr
