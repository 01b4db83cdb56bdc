"""Submits a run to Slurm: trainer and searcher nodes in one job, which goes on by itself until it is done.

Submitting again with the same config goes on where the run stopped. Needs no torch: made for a login node.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tba_hpc import shipped
from tba_hpc.config import Config, ConfigError, load_config, require_files
from tba_hpc.doctor import slurm_checks
from tba_hpc.doctor.examine import job_environment, preflight
from tba_hpc.doctor.findings import Finding
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Plan, Site, load_site, plan, searchers_of_a_node
from tba_hpc.launch.sbatch import RANK, TBA, VISITORS_SUPERVISOR, Job, batch_script, visitors_script
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.changes import is_done, refuse_steps_behind, told
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.owners import refuse_owned
from tba_hpc.task_check import refuse_bad_task
from tba_hpc.wording import count

CHECK_SECONDS = 60.0
"""Longest look at the task: hours in the queue may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job as it is ordered.

    config: a YAML file, the name of a shipped config, or a run directory. site: a file, or the name of a
    shipped one. time, homogeneous, overrides, run_root: as the options of ``tba submit``.
    """

    config: Path
    site: Path
    nodes: int
    trainer_nodes: int | None = None
    time: str | None = None
    homogeneous: bool = False
    overrides: Sequence[str] = ()
    run_root: Path | None = None


def default(kind: shipped.Kind, name: str) -> Path:
    """The shipped file that is taken where the user names none, who is told so on stderr."""
    file = shipped.files(kind)[name]
    print(f"no --{kind.removesuffix('s')} given, so this one: {file}", file=sys.stderr)
    return file


def script(order: Order) -> str:
    """The batch script of an order; nothing is made or submitted. Raises ConfigError."""
    site = _site(order)
    config, split = _resolve(order, site)
    return _script(config, split, site)


def submit(order: Order, *, wait: bool, as_json: bool) -> bool:
    """Submit an order, unless its run is finished, and print what was done.

    wait: until the job has ended; the answer then is whether the run is finished. Raises ConfigError,
    StateError, DiskFullError, SubmitError or SlurmError with one sentence.
    """
    site = _site(order)
    config, split = _resolve(order, site)
    slurm.require_slurm()
    warnings = _check(config, split, site)
    run = RunDir.check(config)
    refuse_steps_behind(run, config)
    slurm.refuse_active(run)
    refuse_owned(run)
    if is_done(run, config):
        _tell(run, split, None, "", [], as_json)
        return True
    text, changes = _script(config, split, site), told(run, config)
    create_run(config)
    job = slurm.submit(run, text)
    again = _again(order, run)
    log_event(run, "submitted", job=job.job_id, restarts=0, command=again)
    warnings += slurm_checks.check_taken(slurm.job_fields(job.job_id), site)
    print(changes, file=sys.stderr, end="\n" if changes else "")
    _tell(run, split, job.job_id, again, warnings, as_json)
    if not wait:
        return True
    job.wait()
    if not run.finished:
        print(f"job {job.job_id} ended as {job.state}: see {run.logs}/latest", file=sys.stderr)
    return run.finished


def _site(order: Order) -> Site:
    return load_site(order.site, **({"time": order.time} if order.time else {}))


def _resolve(order: Order, site: Site) -> tuple[Config, Plan]:
    """The config of the run and its nodes; ranks follow from the nodes, and paths hold on all of them."""
    path, run_root = order.config, order.run_root
    if path.is_dir():
        run_root, path = path.absolute().parent, RunDir.open(path).config_file
    # One trainer fits every config: how many there will be is not known before the plan.
    first = load_config(path, [*order.overrides, "launch.trainers=1"])
    split = plan(first, site, order.nodes, order.trainer_nodes, homogeneous=order.homogeneous)
    root = (run_root or Path(first.run.root)).absolute()
    overrides = [*order.overrides, *split.overrides, f"run.root={json.dumps(str(root))}"]
    return load_config(path, overrides), split


def _check(config: Config, split: Plan, site: Site) -> list[Finding]:
    """What may go wrong. Raises ConfigError or SubmitError for what will, before hours in the queue."""
    if site.container is None:  # inside it paths may be others
        require_files(config)
        python = os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable
        refuse_bad_task(config, python=python, environment=job_environment(site), seconds=CHECK_SECONDS)
    findings = preflight(config, split, site)
    if problem := next((finding for finding in findings if finding.level == "problem"), None):
        raise slurm.SubmitError(problem.sentence)
    return [finding for finding in findings if finding.level == "warning"]


def _script(config: Config, split: Plan, site: Site) -> str:
    job = Job(
        name=f"tba-{config.run.name}",
        run=config.run_dir.absolute(),
        rank=[*site.python, *RANK[1:]],
        tba=[*site.python, *TBA[1:]],
    )
    return batch_script(job, split, site)


def _again(order: Order, run: RunDir) -> str:
    """What submits the run again, typed in any folder; the run's frozen config knows the settings."""
    site = shipped.find(order.site, "sites").absolute()
    words: list[object] = [*_typed(), "--config", run.path, "--site", site, "--nodes", order.nodes]
    words += ["--trainer-nodes", order.trainer_nodes] if order.trainer_nodes else []
    words += ["--time", order.time] if order.time else []
    words += ["--homogeneous"] if order.homogeneous else []
    return shlex.join(map(str, words))


def _typed() -> list[object]:
    """The program and command that were typed, ``tba submit`` or tools/submit.py, for use in any folder."""
    program = Path(sys.argv[0]).absolute()
    if program.name == "__main__.py":
        return [sys.executable, "-m", "tba_hpc", "submit"]
    return [sys.executable, program] if program.suffix else [program, "submit"]


def _tell(
    run: RunDir, split: Plan, job: str | None, again: str, warnings: list[Finding], as_json: bool
) -> None:
    """What was done, what to know about it, and the commands that come next."""
    commands = {
        "watch": shlex.join(["tba", "status", str(run.path)]),
        "log": shlex.join(["tail", "-F", f"{run.path}/slurm/job-{job}.log"]),
        "queue": f"squeue --job {job}",
        "cancel": f"scancel {job}",
        "stop": f"scancel --batch --signal=USR1 {job}",
        "resume": again,
    }
    sentences = [warning.sentence for warning in warnings]
    if as_json:
        done = {"job": job, "run": str(run.path), "commands": commands if job else {}, "warnings": sentences}
        print(json.dumps({**done, **asdict(split)}))
    elif job is None:
        print(f"finished already, nothing to submit: {run.summary}\nanother run: --set run.name=…")
    else:
        print(f"{split.why}\njob {job}, run directory {run.path}")
        for name, command in commands.items():
            print(f"  {name:7} {command}")
        for sentence in sentences:
            print(f"warning: {sentence}", file=sys.stderr)


# --- Nodes lent to a run ---


def lend(
    path: Path,
    site_file: Path,
    nodes: int,
    *,
    partition: str | None = None,
    time: str | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Submit up to ``nodes`` one-node jobs whose searchers come and go, for the run in ``path``.

    Raises ConfigError, SubmitError with one sentence.
    """
    run = RunDir.open(path)
    config, site = run.config(), _searchers_site(site_file, partition, time)
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} lends nothing: ask for at least 1")
    searcher = searchers_of_a_node(config, site)
    wanted, places = nodes * searcher.ranks, config.launch.elastic
    if wanted > places:
        raise ConfigError(
            f"--nodes {nodes} with {count(searcher.ranks, 'searcher')} each is more than the run has places "
            f"for such as come and go, launch.elastic={places}: ask for fewer, or start it with more"
        )
    job = Job(
        name=f"tba-search-{config.run.name}",
        run=run.path,
        supervisor=VISITORS_SUPERVISOR,
        rank=[*site.python, *RANK[1:]],
        tba=[*site.python, *TBA[1:]],
    )
    text = visitors_script(job, nodes, searcher, site)
    if dry_run:
        print(text, end="")
        return
    slurm.require_slurm()
    if run.finished:
        print(f"finished already, nothing to search for: {run.summary}")
        return
    number = slurm.submit_visitors(run, text)
    commands = {
        "watch": shlex.join(["tba", "status", str(run.path)]),
        "logs": shlex.join(["tail", "-F", f"{run.path}/slurm/searchers-{number}_0.log"]),
        "cancel": f"scancel {number}",
    }
    if as_json:
        print(json.dumps({"job": number, "run": str(run.path), "commands": commands}))
        return
    print(f"job {number}: up to {count(nodes, 'node')}, {count(searcher.ranks, 'searcher')} on each")
    for name, command in commands.items():
        print(f"  {name:7} {command}")


def _searchers_site(site_file: Path, partition: str | None, time: str | None) -> Site:
    site = load_site(site_file, **({"time": time} if time else {}))
    if partition is None:
        return site
    own = site.searcher.model_copy(update={"partition": partition})
    return site.model_copy(update={"searcher": own})
