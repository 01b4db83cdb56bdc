"""A run in miniature on the real cluster: whether its ranks make one world, and what their nodes have.

The batch script is that of every run; only the ranks differ: ``tba greet`` joins the world, notes what its
node has, and ends. It must not know what of that matters.
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

from tba_hpc.config import Config, parse_config
from tba_hpc.doctor.findings import Finding, ok, problem, warning
from tba_hpc.doctor.machine_checks import Machine, look
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

SHORT = {"time": "10", "signal_seconds": 60, "relaunches": 0}
"""Site keys of a trial: the shorter a job, the sooner it starts; one try is enough."""

JOIN_SECONDS = 60
"""Deadline of the ranks for each other."""

WATCH_SECONDS = 0.5

TITLE = "one MPI world"

ALONE = re.compile(r"alone in its MPI world.*--mpi=(\w+)")
"""The sentence of a rank that was started without the others, and the plugin it asks for."""

TROUBLE = re.compile(r"error: .*|\S+: command not found|\S+ does not (?:see|answer).*")
"""What in the log of a job says what went wrong."""

_MACHINE = TypeAdapter(Machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a trial.

    machines: the nodes whose ranks joined. job: its fields, as Slurm took it. better: the plugin that its
    ranks asked for.
    """

    finding: Finding
    machines: tuple[Machine, ...] = ()
    job: Mapping[str, str] = field(default_factory=dict)
    better: str = ""


def greet(run: RunDir, *, leader: bool) -> None:
    """In the first rank of a node, once it has joined the world: note what the node has."""
    model = run.config().model.path
    machine = look(run.path.parent, None if model == NO_MODEL else model)
    write_atomic(run.attempt / f"node-{machine.host}.json", _MACHINE.dump_json(machine).decode())
    if leader:
        run.mark_finished()


def prepare(
    site: Site, root: Path, model: str | None, *, lay_out: Callable[[Plan, Site], Plan] | None = None
) -> tuple[Config, Plan, str]:
    """Config, nodes and batch script of a trial in ``root``, whose ranks look for ``model``.

    lay_out: chooses the sides of its components.
    """
    tree: dict[str, dict[str, object]] = {
        "run": {"name": f"doctor-{os.getpid()}-{site.mpi or 'default'}", "root": str(root.absolute())},
        "model": {"path": model or NO_MODEL},
        "train": {"prompts_per_step": 1},
    }
    split = plan(parse_config(tree), site, NODES)
    split = lay_out(split, site) if lay_out else split
    tree["launch"] = {
        "trainers": split.trainer.ranks,
        "searchers": split.searcher.ranks,
        "start_deadline_seconds": JOIN_SECONDS,
    }
    config = parse_config(tree)
    job = Job(
        name="tba-doctor",
        run=config.run_dir,
        rank=[*site.python, *RANK[1:], "greet"],
        tba=[*site.python, *TBA[1:]],
    )
    return config, split, batch_script(job, split, site)


def attempt(site: Site, root: Path, model: str | None, *, seconds: float) -> Trial:
    """Submit a trial, and wait ``seconds`` for its end. Raises ConfigError for a read-only ``root``."""
    config, split, script = prepare(site.model_copy(update=SHORT), root, model, lay_out=choose_sides)
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
    machines = [_MACHINE.validate_json(file.read_bytes()) for file in sorted(run.attempt.glob("node-*.json"))]
    alone = ALONE.search(first_note(run.attempt, "*") or "")
    finding = late or _verdict(run, site, split, [machine.host for machine in machines])
    if alone or finding.level != "problem":  # else its logs are needed
        shutil.rmtree(run.path)
    return Trial(finding=finding, machines=tuple(machines), job=taken, better=alone[1] if alone else "")


def _wait(run: RunDir, job: str, seconds: float) -> Finding | None:
    """Wait until the run's job has ended or gone back to the queue; what to say where that takes too long."""
    end = time.monotonic() + seconds
    while (active := slurm.active_job(run)) and not any(e["event"] == "requeue" for e in read_events(run)):
        if time.monotonic() > end:
            return _too_late(job, active[1], seconds)
        time.sleep(WATCH_SECONDS)
    return None


def _too_late(job: str, state: str, seconds: float) -> Finding:
    reason = slurm.job_fields(job).get("Reason", "?")
    found = f"job {job} was still {state.lower()} after {seconds:g} s ({reason}) and is cancelled"
    if state == "PENDING":
        return warning(TITLE, found, "try again when the queue is shorter, or with a longer --wait")
    return problem(TITLE, found, "a node or the network may hang: try other nodes")


def _verdict(run: RunDir, site: Site, split: Plan, hosts: list[str]) -> Finding:
    """What the files of an ended trial say."""
    ranks, form = split.trainer.ranks + split.searcher.ranks, split.form
    how = " ".join(["srun", *site.mpi_option])
    if run.finished and len(hosts) == NODES:
        return ok(TITLE, f"{how} joined {ranks} ranks on {' and '.join(hosts)} ({form} job)")
    if alone := ALONE.search(note := first_note(run.attempt, "*") or ""):
        found = f"{how} started {ranks} ranks, each in a world of its own"
        return problem(TITLE, found, f"set mpi: {alone[1]} in the site file")
    logs = [log.read_text(errors="replace") for log in run.path.glob("slurm/job-*.log")]
    if not logs:
        return problem(
            TITLE,
            f"the first node wrote no log: it does not see {run.path}, or could not start the job",
            "put runs on a file system that all nodes share: --run-root",
        )
    trouble = list(dict.fromkeys(TROUBLE.findall("".join(logs))))[:3]
    return problem(
        TITLE, f"{how} failed: {note or '; '.join(trouble) or 'no error in its log'}", f"see {run.path}"
    )
