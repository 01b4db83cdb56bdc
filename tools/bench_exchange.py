"""Compares a publication of weights over MPI with plain memory copies and plain MPI, in the same world.

    python tools/bench_exchange.py weights    publish stall and propagation

It starts mpiexec itself; ``--json`` prints JSON. The ratios, each from one run, are more reliable than the
seconds. In the rows "nodes" every rank counts as a node of its own, so that weights are broadcast between
nodes. On one machine this broadcast runs at the speed of memory, which no network reaches.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import typer

from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Publication, WeightLayout
from tba_hpc.launch.local import environment_of, find_mpiexec
from tba_hpc.report.tables import print_rows

if TYPE_CHECKING:
    from mpi4py import MPI

    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange
    from tba_hpc.exchange.mpi_world import MpiWorld


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

DEADLINE = 120.0
BUCKET_MB = 64
SIZES = [10.0, 100.0, 1000.0]


@app.command()
def weights(
    megabytes: Annotated[list[float], typer.Option("--mb", help="Sizes of the weights, MB.")] = SIZES,
    searchers: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure stall and propagation of a publication, within a node and between emulated nodes.

    All figures are medians over rounds. stall: duration of the trainer's call of publish, over that of one
    copy of the weights. visible: time until the last searcher's poll returns the weights;
    propagation: until it has a copy of its own. ÷ Bcast: the propagation over MPI's blocking Bcast between
    shared memories in the same world.
    """
    rows = [
        run_world(1 + searchers, ["weights-rank", memory, str(mb), str(rounds)])
        for memory in ("shared", "nodes")
        for mb in megabytes
    ]
    print_rows(rows, as_json=as_json)


def run_world(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """Run this file as one MPI world; return the row that its trainer wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        placement = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx"]
        program = [sys.executable, "-m", "mpi4py", __file__, *arguments, str(result)]
        command = [str(find_mpiexec()), *placement, "-n", str(ranks), *program]
        environment = environment_of(Path(folder))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(f"the world of {ranks} ranks failed:\n{done.stdout}{done.stderr}")
        return json.loads(result.read_text())


# --- One rank of a world ---


def join(memory: str) -> MpiWorld:
    """Join the world. memory: "nodes" makes every rank a node of its own, "shared" does not."""
    from mpi4py import MPI

    from tba_hpc.exchange.mpi_world import MpiWorld, split_by_memory

    def alone(comm: MPI.Intracomm) -> MPI.Intracomm:
        return cast(MPI.Intracomm, comm.Split(comm.rank))

    return MpiWorld.join(
        "trainer" if MPI.COMM_WORLD.rank == 0 else "searcher",
        trainers=1,
        searchers=MPI.COMM_WORLD.size - 1,
        deadline=DEADLINE,
        node_split=alone if memory == "nodes" else split_by_memory,
    )


def publish(exchange: MpiTrainerExchange, source: np.ndarray, clock: np.ndarray) -> None:
    """Publish one version per row of ``clock``, and fill its columns.

    They are the times at which publish was called and returned, and the duration of a copy just before, s.
    """
    copy = np.zeros_like(source)
    for version in range(len(clock)):
        time.sleep(0.2)
        start = time.monotonic()
        np.copyto(copy, source)
        clock[version, 2] = time.monotonic() - start
        time.sleep(0.05)
        clock[version, 0] = time.monotonic()
        publication = Publication(version=version, evaluate="test")
        assert exchange.publish(publication, lambda out: np.copyto(out, source))
        clock[version, 1] = time.monotonic()
        while not exchange.gather():  # until the round is over
            time.sleep(0.01)
    exchange.close()


def take(exchange: MpiSearcherExchange, nbytes: int, clock: np.ndarray) -> None:
    """Take weights until the run ends; note in ``clock`` when each version was polled and when copied."""
    private = np.zeros(nbytes, np.uint8)
    while not exchange.closed:
        if update := exchange.poll():
            version = update.publication.version
            clock[version, 0] = time.monotonic()
            np.copyto(private, update.data)
            clock[version, 1] = time.monotonic()
        time.sleep(0.0005)


def medians(world: MpiWorld, clock: np.ndarray) -> dict[str, float]:
    """Return the median durations over all rounds but the first, s, by all ranks' clocks; {} at searchers."""
    table = np.empty((world.comm.size, *clock.shape))
    world.comm.Gather(clock, table, 0)
    if world.role == "searcher":
        return {}
    called, returned, memcpy = table[0, 1:].T
    visible, copied, _ = table[1:, 1:].max(axis=0).T
    times = {
        "memcpy": memcpy,
        "publish": returned - called,
        "visible": visible - called,
        "propagation": copied - called,
    }
    found = {name: statistics.median(values.tolist()) for name, values in times.items()}
    return {**found, "stall": found["publish"] / found["memcpy"]}


@app.command(hidden=True)
def weights_rank(memory: str, megabytes: float, rounds: int, result: Path) -> None:
    """Run one rank of the benchmark ``weights``; the first round warms up."""
    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange

    layout = WeightLayout.of([("weights", (int(megabytes * 1e6) // 2,))], "BF16")
    world = join(memory)
    private = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    clock = np.zeros((1 + rounds, 3))
    if world.role == "trainer":
        exchange = MpiTrainerExchange(world, layout, bucket_mb=BUCKET_MB, progress=Progress())
        publish(exchange, private, clock)
    else:
        take(MpiSearcherExchange(world), layout.nbytes, clock)
    bcast = bcast_seconds(world, private, rounds)
    found = medians(world, clock)
    if world.role == "searcher":
        return
    row = {
        "memory": memory,
        "MB": layout.nbytes / 1e6,
        "searchers": world.searchers,
        "stall": found["stall"],
        "visible, ms": 1e3 * found["visible"],
        "propagation, ms": 1e3 * found["propagation"],
        "÷ Bcast": found["propagation"] / bcast,
    }
    result.write_text(json.dumps(row))


def bcast_seconds(world: MpiWorld, private: np.ndarray, rounds: int) -> float:
    """Return the median duration of MPI's Bcast of ``private`` between shared memories, one per rank, s."""
    from mpi4py import MPI

    comm = world.comm
    window = MPI.Win.Allocate_shared(private.nbytes, 1, comm=cast(MPI.Intracomm, comm.Split(comm.rank)))
    own = np.frombuffer(cast(memoryview, window.Shared_query(0)[0]), np.uint8)
    own[:] = private
    return timed(world, lambda: comm.Bcast(own, 0), rounds)


def timed(world: MpiWorld, work: Callable[[], None], rounds: int) -> float:
    """Return the median time from a common start to the end on the last rank, s; the first round warms up."""
    seconds = []
    for _ in range(rounds + 1):
        world.comm.Barrier()
        start = time.monotonic()
        work()
        world.comm.Barrier()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    app()
