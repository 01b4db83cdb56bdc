"""Trial job of ``tba doctor --launch``: finds whether its ranks form one MPI world, and what nodes lack.

The job's batch script is like that of a run, but each rank runs ``tba trial-rank`` (``rank.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from tba_hpc.checks import folders, gpus, network
from tba_hpc.checks.facts import Finding, ok, problem, warning
from tba_hpc.checks.slurm_checks import judge_job_requeue
from tba_hpc.config import Config, parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.component_nodes import separate_nodes
from tba_hpc.launch.plan import Plan, Site, plan
from tba_hpc.launch.sbatch import RANK, TBA, Job, batch_script
from tba_hpc.run import slurm_queue
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.files import write_atomic
from tba_hpc.run.notes import first_note

NO_MODEL = "none"
"""Value of model.path in a trial that checks no model."""

NODES = 2
"""Number of nodes of a trial: one trains, one searches."""

PROMPTS = 840
"""Value of train.prompts_per_step: a multiple of any likely number of ranks. No step is taken."""

SHORT = {"time": "10", "signal_seconds": 60, "relaunches": 0}
"""Site keys of a trial. Short jobs start sooner, and one start is enough."""

JOIN_SECONDS = 60
"""Seconds in which the ranks must find each other."""

JOB_CHECK_SECONDS, QUEUE_SECONDS = 0.5, 30.0
"""Pause between two checks of a running job, and the longest pause for a job in the queue, in seconds."""

TITLE, BROADCAST = "one MPI world", "MPI between nodes"
"""Titles of the findings about the ranks' MPI world and about messages between nodes."""

WORLD = "world"
"""Name of the file with findings about all ranks. Findings about a node are in a file with its name."""

ALONE = re.compile(r"alone in its MPI world.*--mpi=(\w+)")
"""Pattern of the error of a rank that is alone in its MPI world, with the plugin that it needs."""

TROUBLE = re.compile(
    r"error: .*|\S+: command not found|\S+ does not (?:see|answer).*|these nodes are unusable: .*"
    r"|PMIX ERROR.*|An error .*MPI_Init.*"
)
"""Pattern of the errors in a job's log."""

SETUP_TROUBLE = re.compile(
    r"^\S+: line \d+: (?! *\d+ ).*\S|^Lmod has detected the following error: .*\S|^ERROR: .*module.*\S",
    re.MULTILINE,
)
"""Pattern of the errors that bash or a module command prints, but not of bash's words on a killed process."""

UNREACHED = re.compile(r"did not (?:join the world|welcome all ranks)")
"""Pattern of the error of ranks that have started but cannot exchange messages."""

PMIX_TROUBLE = re.compile(r"PMIX ERROR|selected pml|An error occurred in MPI_Init")
"""Pattern of the errors of ranks that PMIx could not start or connect."""

NO_NETWORK = (
    "set network_interface in the site file to the network that all nodes share; if it is set, there may be "
    "a firewall: ask the administrators to open the ports between nodes, or try other nodes"
)
"""Remedy for ranks that cannot exchange messages."""

_FINDINGS = TypeAdapter(list[Finding])


def write_findings(run: RunDir, name: str, findings: list[Finding]) -> None:
    """Write findings to a file of the attempt. name: the node's name, or WORLD for those about all ranks."""
    write_atomic(run.attempt / f"findings-{name}.json", _FINDINGS.dump_json(findings).decode())


def prepare(site: Site, root: Path, model: str | None, *, separate: bool = False) -> tuple[Config, Plan, str]:
    """Return the config, plan and batch script of a trial.

    root: folder of runs. model: path or name of the policy that nodes look for, or None. separate: whether to
    ask Slurm for nodes, and choose those that each component of a het job may get, as for a run.
    """
    tree: dict[str, dict[str, object]] = {
        "run": {"name": f"doctor-{os.getpid()}-{site.mpi or 'default'}", "root": str(root.absolute())},
        "model": {"path": model or NO_MODEL},
        "train": {"prompts_per_step": PROMPTS},
    }
    split = plan(parse_config(tree), site, NODES)
    split = separate_nodes(split, site) if separate else split
    tree["launch"] = {
        "trainers": split.trainer.ranks,
        "searchers": split.searcher.ranks,
        "timeout_seconds": JOIN_SECONDS / 3,
    }
    config = parse_config(tree)
    job = Job(
        name="tba-doctor",
        run=config.run_dir,
        rank=[*site.python, *RANK[1:], "trial-rank"],
        tba=[*site.python, *TBA[1:]],
    )
    return config, split, batch_script(job, split, site)


def attempt(site: Site, root: Path, model: str | None, *, seconds: float) -> list[Finding]:
    """Submit a trial job, wait up to ``seconds`` for it to end, and return its findings.

    The first finding says whether the ranks formed one MPI world, or why not. Raises ConfigError if ``root``
    is not writable, and SlurmError if Slurm does not answer.
    """
    config, split, script = prepare(site.model_copy(update=SHORT), root, model, separate=True)
    run = RunDir.create(config)
    write_atomic(run.path / "site.json", site.model_dump_json())
    try:
        slurm.refuse_impossible(script)
        job = slurm.submit(run, script)
    except slurm.SubmitError as error:
        shutil.rmtree(run.path)
        return [problem(TITLE, str(error), "correct the site file")]
    accepted = slurm_queue.job_fields(job)
    try:
        late = _wait(run, job, seconds)
    finally:
        with suppress(slurm_queue.SlurmError):
            slurm_queue.ask("scancel", job)
    left = {
        file.stem.removeprefix("findings-"): _FINDINGS.validate_json(file.read_bytes())
        for file in sorted(run.attempt.glob("findings-*.json"))
    }
    world = left.pop(WORLD, None)
    stamps = {file.name.removeprefix("clock-"): file.stat().st_mtime for file in run.attempt.glob("clock-*")}
    findings = late or verdict(run, site, split, sorted(left), exchanged=world is not None)
    if findings[0].level == "warning" or run.finished:  # otherwise the user needs its logs
        shutil.rmtree(run.path)
    return [
        *findings,
        *_of_nodes(left),
        *folders.judge_clocks(stamps),
        *judge_job_requeue(site, accepted),
        *(world or []),
    ]


def _of_nodes(left: dict[str, list[Finding]]) -> list[Finding]:
    """Join the equal findings of several nodes into one finding that names these nodes.

    left: findings by host. Those with level "ok" are dropped, unless they are about GPUs or the network.
    """
    hosts: dict[Finding, list[str]] = {}
    for host, findings in left.items():
        for finding in findings:
            if finding.level != "ok" or finding.name in (gpus.GPUS, network.NETWORK):
                hosts.setdefault(finding, []).append(host)
    return [replace(finding, found=f"{', '.join(on)}: {finding.found}") for finding, on in hosts.items()]


def _wait(run: RunDir, job: str, seconds: float) -> list[Finding]:
    """Wait until the job has ended or is requeued; return a finding if that takes too long, else nothing.

    Each change of the job's state is printed to stderr.
    """
    end, pause, told = time.monotonic() + seconds, JOB_CHECK_SECONDS, ""
    while active := slurm_queue.active(components := slurm_queue.job_states(run)):
        if any(event["event"] == "requeue" for event in read_events(run)):
            break
        if time.monotonic() > end:
            return [_too_late(job, active.state, seconds)]
        if (now := _progress(active, components[0]["reason"])) != told:
            print(f"{now}; waiting up to {end - time.monotonic():.0f} s", file=sys.stderr, flush=True)
            told = now
        # All users share Slurm's controller, so a job that may wait long is checked less and less often.
        pause = min(1.5 * pause, QUEUE_SECONDS) if active.state == "PENDING" else JOB_CHECK_SECONDS
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
    return []


def _progress(active: slurm_queue.ActiveJob, reason: str) -> str:
    """Return a line on what the trial job is doing. reason: Slurm's reason why it is queued."""
    if active.waiting:
        return f"job {active.number} is queued{slurm_queue.bracketed(reason)}"
    return f"job {active.number} is running: its ranks check GPUs, network and folders"


def _too_late(job: str, state: str, seconds: float) -> Finding:
    reason = slurm_queue.bracketed(slurm_queue.job_fields(job).get("Reason", ""))
    found = f"job {job} was still {state.lower()} after {seconds:g} s{reason} and is cancelled"
    if state == "PENDING":
        return warning(TITLE, found, "try again when the queue is shorter, or with a longer --wait")
    return problem(TITLE, found, "a node or the network may be faulty: try other nodes")


def verdict(run: RunDir, site: Site, split: Plan, hosts: Sequence[str], *, exchanged: bool) -> list[Finding]:
    """Return the findings on whether the ranks of a trial that has ended formed one MPI world.

    hosts: nodes that have written findings. exchanged: whether the ranks have exchanged messages.
    """
    log = "".join(log.read_text(errors="replace") for log in run.path.glob("slurm/job-*.log"))
    refused = [str(event["sentence"]) for event in read_events(run) if event["event"] == "refused"]
    lines = list(dict.fromkeys(TROUBLE.findall(log)))[:3]
    trouble = first_note(run.attempt, "*") or "; ".join([*lines, *refused])
    trouble = trouble or "no error in its log"
    ranks, how = split.trainer.ranks + split.searcher.ranks, " ".join(["srun", *site.mpi_option])
    if len(hosts) == NODES:
        one = ok(TITLE, f"{how} joined {ranks} ranks on {' and '.join(hosts)} ({split.form} job)")
        found = f"the ranks joined, but their messages did not arrive: {trouble}; see {run.path}"
        setup = _of_setup(log)
        return [one, *setup] if exchanged else [one, problem(BROADCAST, found, NO_NETWORK), *setup]
    if alone := ALONE.search(trouble):
        found = f"{how} started {ranks} ranks, each in an MPI world of its own"
        return [problem(TITLE, found, f"set mpi: {alone[1]} in the site file")]
    if not log:
        found = f"the first node wrote no log: it does not see {run.path}, or could not start the job"
        return [problem(TITLE, found, "put runs on a file system that all nodes share: --run-root")]
    if UNREACHED.search(trouble):
        return [problem(BROADCAST, f"{how} started the ranks, but {trouble}", NO_NETWORK)]
    remedy = f"see {run.path}"
    if PMIX_TROUBLE.search(log):
        remedy += "; PMIX_MCA_gds: hash under environment in the site file may help"
    return [problem(TITLE, f"{how} failed: {trouble}", remedy)]


def _of_setup(log: str) -> list[Finding]:
    """Return a warning that quotes errors of the site's own lines; the batch script goes on after them."""
    lines = list(dict.fromkeys(SETUP_TROUBLE.findall(log)))[:3]
    found = f"the job's log has: {'; '.join(lines)}"
    return [warning("setup", found, "correct the site keys setup and modules")] if lines else []
