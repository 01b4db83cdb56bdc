"""Start test programs as one MPI world, or as separate processes, and hand back what they printed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OPTIONS = ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx")
TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_btl": "^ofi",  # its start sleeps for a second
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.with_name("tools")), os.environ.get("PYTHONPATH")])
    ),
}


@dataclass(frozen=True)
class Mpi:
    """An MPI library: its mpiexec with options, and the environment in which mpi4py loads it."""

    mpiexec: Path
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


WHEEL = Mpi(Path(sys.executable).parent / "mpiexec", OPTIONS)
"""The one that is used where nobody chooses."""


@dataclass(frozen=True)
class Outcome:
    """Exit status and all output of a world."""

    code: int
    output: str


def world_command(ranks: int, program: Sequence[str | Path], mpi: Mpi = WHEEL) -> list[str]:
    """mpiexec of ``ranks`` copies of a Python program with its arguments."""
    python = [sys.executable, "-m", "mpi4py", *map(str, program)]
    return [str(mpi.mpiexec), *mpi.options, "-n", str(ranks), *python]


def run_world(
    ranks: int,
    program: Sequence[str | Path],
    *,
    timeout: float = 60,
    environment: Mapping[str, str] | None = None,
    mpi: Mpi = WHEEL,
) -> Outcome:
    """Run a program on ``ranks`` ranks to its end. subprocess.TimeoutExpired where it does not come."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # killed ranks leave files there
        private = {"OMPI_MCA_btl_sm_backing_directory": memory, **mpi.environment, **(environment or {})}
        return _outcome([_start(world_command(ranks, program, mpi), private)], timeout)


def run_processes(programs: Sequence[Sequence[str | Path]], *, timeout: float = 60) -> Outcome:
    """Run Python programs side by side to their ends; the highest exit status and all output."""
    return _outcome([_start([sys.executable, *map(str, program)], {}) for program in programs], timeout)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **environment},
    )


def _outcome(processes: Sequence[subprocess.Popen[str]], timeout: float) -> Outcome:
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # on SIGTERM mpiexec ends its ranks
            process.wait()
    return Outcome(max(abs(process.returncode) for process in processes), "\n".join(outputs))
