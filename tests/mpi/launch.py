"""Start test programs as one MPI world, or as separate processes, and hand back what they printed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MPIEXEC = Path(sys.executable).parent / "mpiexec"
OPTIONS = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True)
class Outcome:
    """Exit status and all output of a world."""

    code: int
    output: str


def world_command(ranks: int, program: Sequence[str | Path]) -> list[str]:
    """mpiexec of ``ranks`` copies of a Python program with its arguments."""
    return [str(MPIEXEC), *OPTIONS, "-n", str(ranks), sys.executable, "-m", "mpi4py", *map(str, program)]


def run_world(ranks: int, program: Sequence[str | Path], *, timeout: float = 60) -> Outcome:
    """Run a program on ``ranks`` ranks to its end. subprocess.TimeoutExpired where it does not come."""
    done = subprocess.run(
        world_command(ranks, program),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        timeout=timeout,
    )
    return Outcome(done.returncode, done.stdout)


def run_processes(commands: Sequence[Sequence[str | Path]], *, timeout: float = 60) -> Outcome:
    """Run Python programs side by side to their ends; the highest exit status and all output."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        for command in commands
    ]
    outputs = [process.communicate(timeout=timeout)[0] for process in started]
    return Outcome(max(abs(process.returncode) for process in started), "\n".join(outputs))
