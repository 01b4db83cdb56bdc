"""``tba doctor``: reports what this machine or cluster has, and what would make a run fail there."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from tba_hpc.checks import folders, mpi_checks, trial
from tba_hpc.checks.facts import (
    NO_SITE,
    Facts,
    Finding,
    SlurmFacts,
    job_environment,
    ok,
    problem,
    run_checks,
    warning,
)
from tba_hpc.checks.lists import LAPTOP, LOGIN_NODE
from tba_hpc.launch import LaunchError, slurm
from tba_hpc.launch.plan import Site
from tba_hpc.report.tables import Terminal
from tba_hpc.run.slurm_queue import SlurmError

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
"""Slurm commands that batch scripts and ``tba`` call."""

STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
"""Colour of a finding, by its level."""

SLURM = "Slurm"
"""Name of the finding about the cluster itself."""


def examine(site: Site | None, root: Path, model: str | None, *, seconds: float | None) -> list[Finding]:
    """Return the findings that ``tba doctor`` reports.

    site: cluster to check. None checks this machine or, if it has Slurm, its cluster without a site file.
    root: folder of runs. model: path or name of the policy, or None to check no model. seconds: longest wait
    for a trial job; None submits no trial job.
    """
    if site is None and shutil.which("sbatch") is None:
        alone = "none here (sbatch is not on PATH): train on this machine with 'tba run CONFIG'"
        return [ok(SLURM, alone), *_this_machine(root, model)]
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        remedy = "log in to the cluster or load its Slurm module; or train here: tba run"
        return [problem(SLURM, f"{', '.join(missing)} not on PATH", remedy)]
    try:
        asked = SlurmFacts.look()
    except SlurmError as error:
        remedy = "check SLURM_CONF, ask the administrators whether slurmctld is up; or train here: tba run"
        if site is None:
            return [warning(SLURM, str(error), remedy), *_this_machine(root, model)]
        return [problem(SLURM, str(error), remedy)]
    findings = _login_node(site or NO_SITE, root, model, asked)
    if site is None:
        return findings
    if seconds is None or any(f.name == folders.RUN_ROOT and f.level == "problem" for f in findings):
        return [*findings, _check_request(site, root)]

    def check_trial(_: Facts) -> list[Finding]:
        try:
            return trial.attempt(site, root, model, seconds=seconds)
        except (LaunchError, SlurmError) as error:  # keep the other findings
            remedy = "check the nodes that the site file asks for, and whether slurmctld is up"
            return [problem(trial.TITLE, str(error), remedy)]

    return _seen_from_nodes(findings, list(run_checks([check_trial], Facts())))


def _this_machine(root: Path, model: str | None) -> list[Finding]:
    """Return the findings about this machine, for ``tba run``."""
    library, no_library = mpi_checks.find_library(NO_SITE)
    facts = Facts(root=root, model=model, library=library, no_library=no_library)
    return list(run_checks(LAPTOP, facts))


def _login_node(site: Site, root: Path, model: str | None, asked: SlurmFacts) -> list[Finding]:
    """Return the findings about a cluster that need no job."""
    library, no_library = mpi_checks.find_library(site)
    facts = Facts(
        site=site,
        root=root,
        shared=True,
        model=model,
        slurm=asked,
        partitions=asked.used(site),
        library=library,
        no_library=no_library,
        environment=job_environment(site),
    )
    known = ok(SLURM, f"{asked.settings.get('SLURM_VERSION')}, cluster {asked.settings.get('ClusterName')}")
    return [known, *run_checks(LOGIN_NODE, facts)]


def _check_request(site: Site, root: Path) -> Finding:
    """Return the finding on whether Slurm would accept a job of ``trial.NODES`` nodes."""
    try:
        answer = slurm.would_take(trial.prepare(site, root, None)[-1])
    except LaunchError as error:
        remedy = "edit the site file; docs/config.md#site-files lists every key"
        return problem("request", str(error), remedy)
    found = f"Slurm would accept a job of {trial.NODES} nodes; its answer to a dry run, which submits nothing"
    return ok("request", f"{found}: {answer}")


def _seen_from_nodes(here: Sequence[Finding], there: Sequence[Finding]) -> list[Finding]:
    """Join the findings of the login node with those of a trial job's nodes.

    What the nodes found about the MPI library and the file system replaces the login node's findings.
    """
    known = {finding.name for finding in there}
    joined = any(finding.name == trial.TITLE and finding.level == "ok" for finding in there)
    findings = []
    for finding in here:
        if joined and finding.name == folders.FILE_SYSTEM:
            findings.append(ok(folders.FILE_SYSTEM, "the nodes of the trial job see the run root"))
        elif finding.name != mpi_checks.LIBRARY or finding.name not in known:
            findings.append(finding)
    return [*findings, *there]


def print_findings(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Print findings, with remedies, as a table and a count by level, or as a JSON list."""
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
