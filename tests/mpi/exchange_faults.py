"""Worlds in which something is wrong: ``exchange_faults.py CASE [ARGUMENT]``, one trainer, two searchers.

A trainer that meets the error it should prints ``refused: MESSAGE`` and ends the world with status 3.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from mpi4py import MPI

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import IDLE_DEADLINES, ExchangeError
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Group, Publication, WeightLayout, WeightUpdate
from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange
from tba_hpc.exchange.mpi_world import MpiWorld
from tba_hpc.run.directory import SEARCHERS_FIRST, RunDir

SEARCHERS = 2
FIRST = SEARCHERS if os.environ.get(SEARCHERS_FIRST) == "1" else 0
RANK = (MPI.COMM_WORLD.rank - FIRST) % MPI.COMM_WORLD.size
"""As the world numbers it, the trainer before the searchers."""
DEADLINE = 2.0
LAYOUT = WeightLayout.of([("weight", (1000,))], "F32")


def join(deadline: float = DEADLINE) -> MpiWorld:
    """The world as it should be; its deadline counts from here on, however slowly the ranks started."""
    role = "trainer" if RANK == 0 else "searcher"
    return replace(MpiWorld.join(role, trainers=1, searchers=2, deadline=60.0), deadline=deadline)


def open_trainer(world: MpiWorld, layout: WeightLayout) -> MpiTrainerExchange:
    """The leader's end, without a disk."""
    return MpiTrainerExchange(world, layout, bucket_mb=1, progress=Progress())


def publish_for_ever(world: MpiWorld) -> None:
    """A trainer at work."""
    exchange = open_trainer(world, LAYOUT)
    for version in range(1_000_000):
        exchange.publish(Publication(version=version), lambda out: out.fill(1))
        time.sleep(0.01)


def search_for_ever(world: MpiWorld) -> None:
    """A searcher at work."""
    exchange = MpiSearcherExchange(world)
    while not exchange.closed:
        exchange.poll()
        time.sleep(0.01)


def wrong_size() -> None:
    """Configured for more searchers than there are ranks."""
    MpiWorld.join("trainer" if RANK == 0 else "searcher", trainers=1, searchers=3, deadline=DEADLINE)


def wrong_role() -> None:
    """Rank 1 believes that it is a trainer."""
    MpiWorld.join("searcher" if RANK == 2 else "trainer", trainers=1, searchers=2, deadline=5.0)


def never_joins() -> None:
    """Rank 2 starts, but does not get as far as join."""
    MPI.COMM_WORLD.Barrier()
    if RANK == 2:
        time.sleep(60)
    MpiWorld.join("trainer" if RANK == 0 else "searcher", trainers=1, searchers=2, deadline=DEADLINE)


def never_connects() -> None:
    """Searcher 1 joins, but its engine never gets ready."""
    world = join(DEADLINE if RANK == 0 else 60)
    if RANK == 2:
        time.sleep(60)
    publish_for_ever(world) if RANK == 0 else search_for_ever(world)


def trainer_never_connects() -> None:
    """The trainer joins and hangs; a searcher must find out."""
    world = join()
    if RANK == 0:
        time.sleep(60)
    search_for_ever(world)


def at_work(world: MpiWorld, fault: Callable[[MpiSearcherExchange], None]) -> None:
    """The trainer publishes and searcher 0 searches, for ever; ``fault`` befalls searcher 1."""
    if RANK == 0:
        publish_for_ever(world)
    if RANK == 2:
        fault(MpiSearcherExchange(world))
    search_for_ever(world)


def stops_answering() -> None:
    """All of searcher 1 is stopped, communication thread included."""

    def fault(exchange: MpiSearcherExchange) -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)

    at_work(join(), fault)


def main_thread_hangs() -> None:
    """Searcher 1's engine hangs while it holds weights; its communication thread goes on."""

    def fault(exchange: MpiSearcherExchange) -> None:
        while exchange.poll() is None:
            time.sleep(0.01)
        time.sleep(60)

    at_work(join(), fault)


def slow_evaluation() -> None:
    """Searcher 1 evaluates for longer than others wait for a round, but lives: nobody gives up."""
    world = join()
    if RANK == 0:
        exchange = open_trainer(world, LAYOUT)
        for version in range(3):
            while not exchange.publish(
                Publication(version=version, evaluate="test"), lambda out: out.fill(1)
            ):
                time.sleep(0.01)
        exchange.close()
        print("patient", flush=True)
        return
    exchange = MpiSearcherExchange(world)
    while not exchange.closed:
        if (update := exchange.poll()) and update.publication.version == 0 and RANK == 2:
            evaluated = time.monotonic() + (IDLE_DEADLINES + 1) * DEADLINE
            while time.monotonic() < evaluated:
                assert exchange.pending == 0
                time.sleep(0.01)
        time.sleep(0.01)


def stops_during_loads() -> None:
    """Searchers are asked to stop while each still loads, and so holds, another of the older weights."""
    from lab.tabular import TabularGenerator
    from lab.tabular_learner import TabularLearner
    from test_loops import TABLE, make_config, make_searcher

    class Slow(TabularGenerator):
        """Holds the weights that it loads, as vLLM's generator does; one version takes it three seconds."""

        def load(self, update: WeightUpdate) -> None:
            """Begin to load."""
            super().load(update)
            self._held = update
            slow = update.publication.version == SEARCHERS - RANK
            self._ready, self.loading = time.monotonic() + (3.0 if slow else 0.0), True

        def step(self) -> list[Group]:
            """End a load that has lasted long enough."""
            self.loading = self.loading and time.monotonic() < self._ready
            return super().step()

    world = join()
    if RANK == 0:
        exchange = open_trainer(world, TabularLearner(TABLE).layout)
        for version in range(3):
            while not exchange.publish(Publication(version=version), lambda out: out.fill(0)):
                time.sleep(0.01)
            time.sleep(0.5)  # searchers that can begin to load it do
        exchange.close()
        print("closed", flush=True)
        return
    with tempfile.TemporaryDirectory() as root:
        config, began = make_config(Path(root)), time.monotonic()
        searcher = make_searcher(
            config,
            RunDir.create(config),
            MpiSearcherExchange(world),
            generator=Slow(TABLE),
            stop_asked=lambda: time.monotonic() - began > 2.5,
        )
        searcher.run()


def ends_during_evaluation() -> None:
    """The trainer ends the run while searcher 1 evaluates, for longer than anybody wants to wait."""
    world = join()
    if RANK == 0:
        exchange = open_trainer(world, LAYOUT)
        for version in range(2):
            publication = Publication(version=version, evaluate="test")
            while not exchange.publish(publication, lambda out: out.fill(1)):
                time.sleep(0.01)
        time.sleep(0.5)  # the second round, too, is under way
        began = time.monotonic()
        exchange.close()
        print(f"closed after {time.monotonic() - began:.0f} s", flush=True)
        return
    exchange = MpiSearcherExchange(world)
    evaluated = 0.0
    while not exchange.ended:
        if time.monotonic() > evaluated and exchange.poll():
            evaluated = time.monotonic() + (15 * DEADLINE if RANK == 2 else 0)
        time.sleep(0.01)


def hangs_after_the_end() -> None:
    """Searcher 1 has heard of the end, and goes on with something else."""
    world = join()
    if RANK == 0:
        open_trainer(world, LAYOUT).close()
    else:
        exchange = MpiSearcherExchange(world)
        while not exchange.closed:
            time.sleep(0.01)
        time.sleep(60 if RANK == 2 else 0)
    world.leave()


def large_weights() -> None:
    """80 MB of bf16 in buckets of 1 MB between three one-rank nodes."""
    layout = WeightLayout.of([(f"layer{i}", (1024, 1 << 12)) for i in range(10)], "BF16")
    expected = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    world = MpiWorld.join(
        "trainer" if RANK == 0 else "searcher",
        trainers=1,
        searchers=2,
        deadline=60.0,
        node_split=lambda comm: comm.Split(comm.rank),
    )
    if RANK == 0:
        exchange = open_trainer(world, layout)
        for version in range(3):
            while not exchange.publish(
                Publication(version=version),
                lambda out: np.copyto(out, expected + version),  # noqa: B023
            ):
                time.sleep(0.001)
        exchange.close()
        return
    searcher = MpiSearcherExchange(world)
    while not searcher.closed:
        if update := searcher.poll():
            assert np.array_equal(update.data, expected + np.uint8(update.publication.version))
            print(f"searcher {world.index} has version {update.publication.version}", flush=True)
        time.sleep(0.001)


def describes_itself() -> None:
    """What every rank knows of the world."""
    world = join()
    print(
        f"[{world.rank} {world.role} {world.index} local {world.local_index} "
        f"{len(set(world.hosts))} host MPI {MPI.COMM_WORLD.rank}]",
        flush=True,
    )


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *(wrong_size, wrong_role, never_joins, never_connects, trainer_never_connects, stops_answering),
        *(main_thread_hangs, slow_evaluation, stops_during_loads, ends_during_evaluation),
        *(hangs_after_the_end, large_weights, describes_itself),
    )
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        CASES[sys.argv[1]]()
    except (ConfigError, ExchangeError) as error:
        print(f"refused: {error}", flush=True)
        time.sleep(0.3)  # so that mpiexec passes the line on before the world ends
        MPI.COMM_WORLD.Abort(3)
