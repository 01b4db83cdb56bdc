"""``tba submit --elastic``: elastic searchers for a run, as an array of one-node Slurm jobs.

With ``--min N`` it stays, and keeps as many jobs as the trainer has use for. The jobs are found
in the queue, so that it may be stopped and started again; it gives up rather than submit without bound.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tba_hpc.checks.facts import refuse
from tba_hpc.checks.lists import ELASTIC, job_facts
from tba_hpc.commands.order import Order
from tba_hpc.commands.submit import tell, tell_warnings
from tba_hpc.config import Config, ConfigError
from tba_hpc.core.wording import count
from tba_hpc.launch import LaunchError, slurm, snapshot
from tba_hpc.launch.plan import Component, Site, searchers_of_a_node
from tba_hpc.launch.sbatch import elastic_script, job_of
from tba_hpc.launch.slurm_queue import SlurmError, ask, job_states, names
from tba_hpc.report.run_state import OVER, RunMonitor, run_state
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

ENDED = OVER - {"created", "finished"}
"""States of a run that nobody goes on with by itself: its jobs of searchers leave."""

SHORT_LOOKS, MOST_SHORT = 10, 3
"""A job that left before so many looks at it with a node was of no use; so many in a row are enough."""


def submit_elastic(
    order: Order,
    *,
    partition: str | None = None,
    least: int | None = None,
    show: bool = False,
    make: bool = False,
    as_json: bool = False,
) -> None:
    """Submit up to ``order.nodes`` one-node jobs of elastic searchers for the run in ``order.config``.

    least: stay, and keep between so many and ``order.nodes`` of them. show: print the batch script instead;
    make: print it ready for sbatch, with a copy of the code. Raises ConfigError or LaunchError, a sentence.
    """
    run, site, nodes = RunDir.open(order.config), order.load_site(), order.nodes
    own = site.searcher.model_copy(update={"partition": partition or site.searcher.partition})
    config, site = run.config(), site.model_copy(update={"searcher": own})
    searcher = _searchers(config, site, nodes)
    code = snapshot.take(run.path, order.here) if make else snapshot.place(run.path)
    job = job_of(f"tba-search-{config.run.name}", run.path, site, code, mpi=False)
    text = elastic_script(job, 1 if least is not None else nodes, searcher, site)
    if show or make:
        print(text, end="")
        return
    slurm.require_slurm()
    if run.finished:
        print(f"finished already, nothing to search for: {run.summary}")
        return
    warnings = _warnings(run, config, site, order.site)
    snapshot.take(run.path)
    if least is not None:
        tell_warnings(warnings)
        follow_demand(run, config, text, job.name, least=least, most=nodes)
        return
    number = slurm.send(run, text)
    done = {
        "job": number,
        "run": str(run.path),
        "commands": {
            "watch": shlex.join(["tba", "status", str(run.path)]),
            "logs": shlex.join(["tail", "-F", f"{run.path}/slurm/searchers-{number}_0.log"]),
            "cancel": f"scancel {number}",
        },
        "warnings": warnings,
        "why": f"up to {count(nodes, 'node')}, {count(searcher.ranks, 'searcher')} on each",
    }
    if as_json:
        print(json.dumps(done))
    else:
        tell(done)


def _searchers(config: Config, site: Site, nodes: int) -> Component:
    """The searchers of a node. Raises ConfigError if those of all nodes are more than the run takes."""
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} starts nothing: ask for at least 1")
    searcher, most = searchers_of_a_node(config, site), config.launch.elastic
    if nodes * searcher.ranks > most:
        raise ConfigError(
            f"--nodes {nodes} with {count(searcher.ranks, 'searcher')} each is more than the run takes, "
            f"launch.elastic={most}: "
            + (f"ask for --nodes {most // searcher.ranks}, or " if most >= searcher.ranks else "")
            + f"stop the run and go on with --set launch.elastic={nodes * searcher.ranks}"
        )
    return searcher


def _warnings(run: RunDir, config: Config, site: Site, site_file: Path) -> list[str]:
    """What may go wrong. Raises ConfigError for what will, before hours in the queue."""
    fetch = shlex.join(["tba", "fetch", str(run.config_file), "--site", str(site_file)])
    facts = replace(job_facts(config, site), fetched_by=fetch)
    return [finding.sentence for finding in refuse(ELASTIC, facts)]


# --- By demand ---


@dataclass
class Sent:
    """The jobs sent from here that are in the queue, and at how many looks each had its node.

    short: how many in a row have left too soon.
    """

    looks: dict[str, int] = field(default_factory=dict)
    short: int = 0

    def look(self, run: RunDir, jobs: Sequence[tuple[str, str]]) -> None:
        """Take in what is in the queue. Raises LaunchError if jobs do nothing but leave it."""
        states = {_id(job): state for job, state in jobs}
        for job in [*self.looks]:
            if job in states:
                self.looks[job] += states[job] != "PENDING"
                continue
            self.short = self.short + 1 if self.looks.pop(job) < SHORT_LOOKS else 0
            if self.short == MOST_SHORT:
                raise LaunchError(
                    f"{self.short} jobs of searchers in a row left the queue soon after their start, so no "
                    f"more are submitted: see {run.path}/slurm/searchers-{job}_0.log"
                )


def follow_demand(run: RunDir, config: Config, script: str, name: str, *, least: int, most: int) -> None:
    """Keep between ``least`` and ``most`` jobs of ``script`` in the queue until the run is over.

    name: of these jobs. Raises LaunchError if Slurm refuses a job, or jobs leave at once or are not found.
    """
    sent, before = Sent(), ""
    monitor, tail = RunMonitor(run, job_states), MetricsTail.from_now(run.metrics_file("trainer"))
    while not run.finished:
        time.sleep(LOOK_SECONDS)
        monitor.update()
        state = run_state(monitor)
        # Slurm may not know a job just after its controller has started.
        over = state.state in ENDED and (state.state != "gone" or before == "gone")
        before = state.state
        try:
            jobs = searcher_jobs(run, name)
            if over:
                if jobs:
                    ask("scancel", *(job for job, _ in jobs))
                print(f"{state.words}; jobs of searchers cancelled: {len(jobs)}")
                return
            sent.look(run, jobs)
            share, age = figures(tail.new(), waits=monitor.phase in ("filling", "waiting"))
            wish = wanted(len(jobs), share, age, config.exchange.sync_every) if state.state in AT_WORK else 0
            change = _change(run, script, name, jobs, min(max(wish, least), most), sent)
        except SlurmError as error:  # it may answer the next time
            print(error, flush=True)
        else:
            found = f"waits {share:.0%} of the time" + (f", data {age:.1f} steps old" if age else "")
            print(f"{time.strftime('%T')} {state.words}; trainer {found}; {change}", flush=True)
    print(f"the run is finished: {run.summary}")


def figures(records: Sequence[Record], *, waits: bool) -> tuple[float, float]:
    """Of the trainer's records: share of the time without learning, and mean age of its data in steps.

    waits: whether it waits for data now; else it is in a long step if it has recorded none.
    """
    steps = [record for record in records if "time/step_seconds" in record]
    seconds = sum(number(record, "time/step_seconds", 0) for record in steps)
    learning = sum(number(record, "time/learn_seconds", 0) for record in steps)
    ages = [number(record, "staleness/mean", 0) for record in steps]
    return (1 - learning / seconds, sum(ages) / len(ages)) if seconds else (float(waits), 0.0)


def wanted(jobs: int, share: float, age: float, sync_every: int) -> int:
    """How many jobs there should be, of so many there are: one more, one less, or the same."""
    if share > WAITS:
        return jobs + 1
    return jobs - 1 if share < BUSY and age > OLD_SYNCS * sync_every else jobs


def _change(
    run: RunDir, script: str, name: str, jobs: Sequence[tuple[str, str]], wish: int, sent: Sent
) -> str:
    """Submit or cancel one job if there are too few or too many; what was done, in words.

    While one waits for its node none is added: that would not be sooner there.
    """
    if wish < len(jobs):
        number, _ = next((job for job in reversed(jobs) if job[1] == "PENDING"), jobs[-1])
        ask("scancel", number)
        sent.looks.pop(_id(number), None)
        return f"job {number} leaves, of {len(jobs)}"
    if wish > len(jobs) and all(state != "PENDING" for _, state in jobs):
        number = slurm.send(run, script)
        sent.looks[number] = 0
        if number not in (_id(job) for job, _ in searcher_jobs(run, name)):
            raise LaunchError(
                f"job {number} is not found among the searchers of {run.path}, so no more are submitted: "
                "take --comment and --job-name out of the site key sbatch_options, and end the job: "
                f"scancel {number}"
            )
        return f"job {number} added to {len(jobs)}"
    return f"jobs: {len(jobs)}"


def _id(job: str) -> str:
    """The id that sbatch gave a job, which is an array of one."""
    return job.partition("_")[0]


def searcher_jobs(run: RunDir, name: str) -> list[tuple[str, str]]:
    """Ids and states of the run's jobs of elastic searchers, oldest first. Raises SlurmError."""
    said = ask("squeue", "--me", "--noheader", "--array", f"--name={name}", "--sort=V", "--format=%i|%T|%k")
    rows = [line.split("|", 2) for line in said.splitlines()]
    return [(job, state) for job, state, comment in rows if names(comment, run)]
