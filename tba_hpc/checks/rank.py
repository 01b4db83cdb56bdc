"""A rank of the doctor's trial job: joins the MPI world, checks its node, and takes part in a broadcast.

Importing this module starts MPI.
"""

from __future__ import annotations

import time

import numpy as np

from tba_hpc.checks import mpi_checks, trial
from tba_hpc.checks.facts import Facts, ok, run_checks
from tba_hpc.checks.lists import NODE
from tba_hpc.checks.machine import model_bytes
from tba_hpc.core.types import Role, WeightLayout
from tba_hpc.core.wording import count, size
from tba_hpc.exchange.mpi_world import LEADER, MpiWorld, Tag, library_version
from tba_hpc.launch.mpi_library import describe
from tba_hpc.launch.plan import Site
from tba_hpc.run.directory import RunDir

NBYTES = 128 << 20
"""Size of the broadcast, in bytes."""


def join_trial(directory: RunDir, role: Role) -> None:
    """Run a rank of the trial job (``tba doctor --launch``): check node and MPI world, and write findings.

    directory: run directory of the trial. Raises ConfigError if the MPI world is not as planned, and
    ExchangeError with the names of missing ranks.
    """
    config = directory.config()
    trainers, searchers = config.launch.trainers, config.launch.searchers
    world = MpiWorld.join(role, trainers=trainers, searchers=searchers, deadline=config.launch.start_seconds)
    model = None if config.model.path == trial.NO_MODEL else config.model.path
    site = Site.model_validate_json((directory.path / "site.json").read_text())
    facts = Facts(site=site, root=directory.path.parent, model=model)
    if world.local_index == 0:
        (directory.attempt / f"clock-{world.hostname}").touch()
        trial.write_findings(directory, world.hostname, list(run_checks(NODE, facts)))
    seconds = broadcast(world)
    if world.rank == LEADER:
        found = f"{NBYTES >> 20} MiB to each of {count(len(set(world.hosts)), 'node')} in {seconds:.2f} s"
        if weights := model_bytes(model, facts.environment):
            took = weights * seconds / NBYTES
            how_long = f"about {took:.1f} s" if took >= 0.1 else "less than 0.1 s"
            found += f"; the {size(weights)} of {model} would take {how_long}"
        loaded = Facts(site=site, library=describe(library_version()))
        findings = [*mpi_checks.check_library(loaded), ok(trial.BROADCAST, found)]
        trial.write_findings(directory, trial.WORLD, findings)
        directory.mark_finished()


def broadcast(world: MpiWorld) -> float:
    """Broadcast NBYTES bytes from the leader to every node, as weights are; return the time in seconds.

    All ranks call this function. Raises ExchangeError if a rank does not answer.
    """
    empty = np.empty(0, np.uint8)
    if world.rank == LEADER:
        layout = WeightLayout.of([("weights", (NBYTES // 4,))], "F32")
        memory = world.connect_peers(layout, progress=b"", bucket_mb=32)
        memory.writable(0)[:] = 1
    else:
        memory, _ = world.connect()
    began = time.monotonic()
    memory.spread(0)
    if world.rank == LEADER:
        there = [world.receive(empty, rank, Tag.STATUS) for rank in world.peers]
    else:
        there = [world.send(empty, LEADER, Tag.STATUS)]
    world.wait_for(there, "did not receive the weights")
    return time.monotonic() - began
