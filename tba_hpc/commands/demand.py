"""``tba submit --elastic RUN --min N``: as many jobs of elastic searchers as the trainer has use for.

It stays in the foreground and looks once a minute. The jobs are found in the queue, so that it may be stopped
and started again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tba_hpc.config import Config
from tba_hpc.launch import slurm
from tba_hpc.launch.slurm_queue import SlurmError, ask, job_states
from tba_hpc.report.monitor import RunMonitor
from tba_hpc.report.run_state import run_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsTail, Record, number

LOOK_SECONDS = 60.0
"""Pause between two looks."""

WAITS, BUSY = 0.2, 0.05
"""Share of a minute that the trainer waits for data: above the first it wants more, below the second less."""

OLD_SYNCS = 4
"""Data sampled by weights of so many publications ago is old."""

AT_WORK = ("filling", "training", "evaluating")
"""States of a run that can use searchers."""


def follow_demand(run: RunDir, config: Config, script: str, name: str, *, least: int, most: int) -> None:
    """Keep between ``least`` and ``most`` jobs of ``script`` in the queue until the run is over.

    name: of these jobs. Raises LaunchError if Slurm refuses a job.
    """
    monitor, tail = RunMonitor(run, config, job_states), MetricsTail.from_now(run.metrics_file("trainer"))
    while not run.finished:
        time.sleep(LOOK_SECONDS)
        monitor.update()
        try:
            jobs = searcher_jobs(run, name)
        except SlurmError as error:  # it may answer the next time
            print(error, flush=True)
        else:
            state = run_state(monitor)
            share, age = figures(tail.new())
            wish = wanted(len(jobs), share, age, config.exchange.sync_every) if state.state in AT_WORK else 0
            change = _change(run, script, jobs, min(max(wish, least), most))
            found = f"waits {share:.0%} of the time" + (f", data {age:.1f} steps old" if age else "")
            print(f"{time.strftime('%T')} {state.words}; trainer {found}; {change}", flush=True)
    print(f"the run is finished: {run.summary}")


def figures(records: Sequence[Record]) -> tuple[float, float]:
    """Of the trainer's records: share of the time without learning, and mean age of its data in steps."""
    steps = [record for record in records if "time/step_seconds" in record]
    seconds = sum(number(record, "time/step_seconds", 0) for record in steps)
    learning = sum(number(record, "time/learn_seconds", 0) for record in steps)
    ages = [number(record, "staleness/mean", 0) for record in steps]
    return (1 - learning / seconds, sum(ages) / len(ages)) if seconds else (1.0, 0.0)


def wanted(jobs: int, share: float, age: float, sync_every: int) -> int:
    """How many jobs there should be, of so many there are: one more, one less, or the same."""
    if share > WAITS:
        return jobs + 1
    return jobs - 1 if share < BUSY and age > OLD_SYNCS * sync_every else jobs


def _change(run: RunDir, script: str, jobs: Sequence[tuple[str, str]], wish: int) -> str:
    """Submit or cancel one job if there are too few or too many; what was done, in words.

    While one waits for its node none is added: that would not be sooner there.
    """
    if wish < len(jobs):
        number, _ = next((job for job in reversed(jobs) if job[1] == "PENDING"), jobs[-1])
        ask("scancel", number)
        return f"job {number} leaves, of {len(jobs)}"
    if wish > len(jobs) and all(state != "PENDING" for _, state in jobs):
        return f"job {slurm.send(run, script)} added to {len(jobs)}"
    return f"jobs: {len(jobs)}"


def searcher_jobs(run: RunDir, name: str) -> list[tuple[str, str]]:
    """Ids and states of the run's jobs of elastic searchers, oldest first. Raises SlurmError."""
    said = ask("squeue", "--me", "--noheader", "--array", f"--name={name}", "--sort=V", "--format=%i|%T|%k")
    rows = [line.split("|", 2) for line in said.splitlines()]
    return [(job, state) for job, state, comment in rows if comment == str(run.path)]
