"""A run in miniature on the real cluster: whether its ranks make one world, and what their nodes have.

The batch script is that of every run; only the ranks differ: ``tba greet`` (``rank.py``) joins the world,
notes what its node has, measures the network, and ends. It must not know what of that matters.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.checks.machine_checks import Machine
from tba_hpc.checks.mpi_checks import HASH, PMIX_TROUBLE, TELL_TRANSPORT, World, transport
from tba_hpc.config import Config, parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Plan, Site, plan
from tba_hpc.launch.sbatch import RANK, TBA, Job, batch_script
from tba_hpc.launch.sides import choose_sides
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.files import write_atomic
from tba_hpc.run.notes import first_note

NO_MODEL = "none"
"""Model of a trial whose nodes look for none."""

NODES = 2
"""Nodes of a trial: one trains, one searches."""

PROMPTS = 840
"""Prompts of a step that is never taken; every number of ranks that a node may hold divides them."""

SHORT = {"time": "10", "signal_seconds": 60, "relaunches": 0}
"""Site keys of a trial: the shorter a job, the sooner it starts; one try is enough."""

JOIN_SECONDS = 60
"""Deadline of the ranks for each other."""

WATCH_SECONDS, QUEUE_SECONDS = 0.5, 30.0
"""Pause between two looks at a job that runs, and the longest at one that waits."""

TITLE = "one MPI world"

ALONE = re.compile(r"alone in its MPI world.*--mpi=(\w+)")
"""The sentence of a rank that was started without the others, and the plugin it asks for."""

TROUBLE = re.compile(
    r"error: .*|\S+: command not found|\S+ does not (?:see|answer).*|PMIX ERROR.*|An error .*MPI_Init.*"
)
"""What in the log of a job says what went wrong."""

WORLD = "world.json"
"""Name of the leader's file in the folder of the attempt."""

_MACHINE, _WORLD = TypeAdapter(Machine), TypeAdapter(World)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a trial.

    machines: the nodes whose ranks joined. world: what these found out together, None where they made none.
    by: the way between nodes, as far as MPI tells. trouble: what its log says went wrong. job: its fields, as
    Slurm took it. better: site keys that may help.
    """

    finding: Finding
    machines: tuple[Machine, ...] = ()
    world: World | None = None
    by: str = ""
    trouble: str = ""
    job: Mapping[str, str] = field(default_factory=dict)
    better: Mapping[str, object] = field(default_factory=dict)


def note_machine(run: RunDir, machine: Machine) -> None:
    """In the first rank of a node: write down what the node has."""
    write_atomic(run.attempt / f"node-{machine.host}.json", _MACHINE.dump_json(machine).decode())


def note_world(run: RunDir, world: World) -> None:
    """In the leader: write down what the ranks have found out together so far."""
    write_atomic(run.attempt / WORLD, _WORLD.dump_json(world).decode())


def prepare(
    site: Site, root: Path, model: str | None, *, lay_out: Callable[[Plan, Site], Plan] | None = None
) -> tuple[Config, Plan, str]:
    """Config, nodes and batch script of a trial in ``root``, whose ranks look for ``model``.

    lay_out: chooses the sides of its components.
    """
    tree: dict[str, dict[str, object]] = {
        "run": {"name": f"doctor-{os.getpid()}-{site.mpi or 'default'}", "root": str(root.absolute())},
        "model": {"path": model or NO_MODEL},
        "train": {"prompts_per_step": PROMPTS},
    }
    split = plan(parse_config(tree), site, NODES)
    split = lay_out(split, site) if lay_out else split
    tree["launch"] = {
        "trainers": split.trainer.ranks,
        "searchers": split.searcher.ranks,
        "timeout_seconds": JOIN_SECONDS / 3,
    }
    config = parse_config(tree)
    job = Job(
        name="tba-doctor",
        run=config.run_dir,
        rank=[*site.python, *RANK[1:], "greet", *(["--gpus"] if site.gpus_per_node else [])],
        tba=[*site.python, *TBA[1:]],
    )
    return config, split, batch_script(job, split, site)


def attempt(site: Site, root: Path, model: str | None, *, seconds: float) -> Trial:
    """Submit a trial, and wait ``seconds`` for its end. Raises ConfigError for a read-only ``root``."""
    keys = {**SHORT, "environment": TELL_TRANSPORT | site.environment}
    config, split, script = prepare(site.model_copy(update=keys), root, model, lay_out=choose_sides)
    run = RunDir.create(config)
    try:
        job = slurm.submit(run, script)
    except slurm.SubmitError as error:
        shutil.rmtree(run.path)
        return Trial(finding=problem(TITLE, str(error), "the site file says what to ask for"))
    taken = slurm.job_fields(job.job_id)
    try:
        late = _wait(run, job.job_id, seconds)
    finally:
        job.cancel(check=False)
    trial = _read(run, site, split, late, taken)
    if trial.better or _is_whole(trial, site):  # else its logs are needed
        shutil.rmtree(run.path)
    return trial


def _read(run: RunDir, site: Site, split: Plan, late: Finding | None, job: Mapping[str, str]) -> Trial:
    """What an ended trial has left."""
    machines = [_MACHINE.validate_json(file.read_bytes()) for file in sorted(run.attempt.glob("node-*.json"))]
    note = first_note(run.attempt, "*") or ""
    log = "".join(log.read_text(errors="replace") for log in run.path.glob("slurm/job-*.log"))
    trouble = note or "; ".join(list(dict.fromkeys(TROUBLE.findall(log)))[:3])
    better: dict[str, object] = {}
    if alone := ALONE.search(note):
        better = {"mpi": alone[1]}
    elif site.mpi and site.mpi.startswith("pmix") and PMIX_TROUBLE.search(log) and not run.finished:
        better = {"environment": site.environment | HASH}
    world = run.attempt / WORLD
    return Trial(
        finding=late or _verdict(run, site, split, [machine.host for machine in machines], log, trouble),
        machines=tuple(machines),
        world=_WORLD.validate_json(world.read_bytes()) if world.exists() else None,
        by=transport(log),
        trouble=f"{trouble or 'no error in its log'}; see {run.path}",
        job=job,
        better=better,
    )


def _is_whole(trial: Trial, site: Site) -> bool:
    """Whether everything has been found out that was to be."""
    world = trial.world
    measured = world is not None and world.fabric is not None and (world.sums or not site.gpus_per_node)
    return trial.finding.level == "warning" or (trial.finding.level == "ok" and bool(measured))


def _wait(run: RunDir, job: str, seconds: float) -> Finding | None:
    """Wait until the run's job has ended or gone back to the queue; what to say where that takes too long."""
    end, pause = time.monotonic() + seconds, WATCH_SECONDS
    while (active := slurm.active_job(run)) and not any(e["event"] == "requeue" for e in read_events(run)):
        if time.monotonic() > end:
            return _too_late(job, active[1], seconds)
        # A queue may be long, and its server is asked by everybody.
        pause = min(1.5 * pause, QUEUE_SECONDS) if active[1] == "PENDING" else WATCH_SECONDS
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
    return None


def _too_late(job: str, state: str, seconds: float) -> Finding:
    reason = slurm.job_fields(job).get("Reason", "?")
    found = f"job {job} was still {state.lower()} after {seconds:g} s ({reason}) and is cancelled"
    if state == "PENDING":
        return warning(TITLE, found, "try again when the queue is shorter, or with a longer --wait")
    return problem(TITLE, found, "a node or the network may hang: try other nodes")


def _verdict(run: RunDir, site: Site, split: Plan, hosts: list[str], log: str, trouble: str) -> Finding:
    """Whether the ranks of an ended trial made one world."""
    ranks, form = split.trainer.ranks + split.searcher.ranks, split.form
    how = " ".join(["srun", *site.mpi_option])
    if run.finished and len(hosts) == NODES:
        return ok(TITLE, f"{how} joined {ranks} ranks on {' and '.join(hosts)} ({form} job)")
    if alone := ALONE.search(trouble):
        found = f"{how} started {ranks} ranks, each in a world of its own"
        return problem(TITLE, found, f"set mpi: {alone[1]} in the site file")
    if not log:
        return problem(
            TITLE,
            f"the first node wrote no log: it does not see {run.path}, or could not start the job",
            "put runs on a file system that all nodes share: --run-root",
        )
    return problem(TITLE, f"{how} failed: {trouble or 'no error in its log'}", f"see {run.path}")
