"""A host that freezes for longer than its leases: its successor finishes the run, and it ends as it wakes.

``TBA_FREEZES=50 pytest tests/test_frozen_runs.py`` freezes as many runs of each role.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import psutil
import pytest
import tabular_run
from forks import fork
from waiting import until

from tba_hpc.report.audit import audit
from tba_hpc.report.data import RunData
from tba_hpc.run import metrics, owners
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.owners import OwnedError, owned

FREEZES = int(os.environ.get("TBA_FREEZES", "1"))

STEPS = 150
"""So many that none is over before it is frozen."""

RANKS = ("trainer-0000", "searcher-0000", "searcher-0001")


def _live_on(host: str) -> None:
    """Be a process of that host, with short leases."""
    owners._machine = lambda: host
    owners.BEAT_SECONDS = metrics.BEAT_SECONDS = 0.1
    owners.SILENT_OWNER_SECONDS, owners.CLAIM_CHECK_SECONDS = 0.6, 0.02


def _launcher(path: Path, host: str) -> None:
    """Owns the run for as long as it lives, as soon as nobody else does."""
    _live_on(host)
    run = RunDir.open(path)
    while True:
        try:
            with owned(run):
                (run.path / f"launched-on-{host}").touch()
                signal.pause()
        except OwnedError:
            time.sleep(0.02)


def _ranks(path: Path, host: str, attempt: str) -> None:
    """All ranks of an attempt, once they own their names."""
    _live_on(host)
    os.environ[ATTEMPT] = attempt
    run = RunDir.open(path)
    with ExitStack() as names:
        for name in RANKS:
            names.enter_context(owned(run, name))
        tabular_run._live(path, None, 0, beside=True)


Start = Callable[..., ForkServerProcess]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts processes, and leaves none behind."""
    processes = []

    def start(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
        processes.append(fork(target, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


def _is_stopped(process: ForkServerProcess) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FREEZES))
@pytest.mark.parametrize("frozen", ["trainer", "launcher", "host"])
def test_a_frozen_role_loses_and_doubles_nothing_as_it_wakes(
    frozen: str, seed: int, tmp_path: Path, started: Start
) -> None:
    random = Random(f"{frozen} {seed}")
    run = RunDir.create(tabular_run.make_config(tmp_path, launch={"searchers": 2}, train={"steps": STEPS}))
    launcher = started(_launcher, run.path, "a")
    until((run.path / "launched-on-a").exists, "the launcher owns the run")
    ranks = started(_ranks, run.path, "a", run.begin_attempt().name)
    reached = random.randrange(STEPS // 2)
    until(lambda: RunData.read(run).step >= reached, f"step {reached}")
    time.sleep(random.uniform(0, 0.05))

    victims = {"trainer": [ranks], "launcher": [launcher], "host": [launcher, ranks]}[frozen]
    for victim in victims:
        os.kill(victim.pid or 0, signal.SIGSTOP)
    until(lambda: all(map(_is_stopped, victims)), "they stand still")
    assert not run.finished
    if launcher in victims:
        launcher_b = started(_launcher, run.path, "b")
        until((run.path / "launched-on-b").exists, "another launcher owns the run")
        assert launcher_b.is_alive()
    successor = started(_ranks, run.path, "b", run.begin_attempt().name)
    time.sleep(random.uniform(0, 1.5))
    for victim in victims:
        os.kill(victim.pid or 0, signal.SIGCONT)

    successor.join(120)
    assert successor.exitcode == 0 and run.finished
    for victim in [*victims, ranks]:
        victim.join(10)
        assert victim.exitcode == 1
    found = audit(run)
    assert (found.lost, found.doubled, found.problems) == (0, 0, ())
