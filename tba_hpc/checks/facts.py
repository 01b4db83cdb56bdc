"""Facts about a run and its machine or cluster. A check is a function that turns facts into findings."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba_hpc.config import Config, ConfigError
from tba_hpc.launch.mpi_library import Library, variables
from tba_hpc.launch.plan import Plan, Site
from tba_hpc.run.slurm_queue import ask, fields

Level = Literal["ok", "warning", "problem"]

NO_SITE = Site(gpus_per_node=0, time="5", signal_seconds=60)
"""Placeholder for the site of this machine, or of a cluster without a site file."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check.

    name: what was checked. level: "problem" if a run would fail, "warning" if it may fail or lose something,
    or "ok". found: what the check has found. remedy: what to do about it; "" for nothing.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Finding and remedy in one sentence."""
        return f"{self.found}: {self.remedy}" if self.remedy else self.found


def ok(name: str, found: str) -> Finding:
    """Return a finding with level "ok"."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Return a finding with level "warning": a run may fail or lose something."""
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """Return a finding with level "problem": a run would fail."""
    return Finding(name, "problem", found, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """Settings and partitions of a cluster, as its Slurm reports them.

    settings: values of ``scontrol show config`` by key. partitions: fields of each partition, by its name.
    mpi: values that ``srun --mpi`` accepts.
    """

    settings: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    mpi: frozenset[str]

    @classmethod
    def look(cls) -> SlurmFacts:
        """Ask the Slurm of this machine's cluster. Raises SlurmError if it does not answer."""
        return cls.of(
            ask("scontrol", "show", "config"),
            ask("scontrol", "--oneliner", "--all", "show", "partition"),
            ask("srun", "--mpi=list"),
        )

    @classmethod
    def of(cls, settings: str, partitions: str, mpi: str) -> SlurmFacts:
        """Parse the output of the three commands of ``look``.

        settings: lines ``Key = value``. partitions: a line for each partition. mpi: plugins, one per line,
        then lines with the versions of pmix. ``--mpi`` takes a plugin or a version.
        """
        found = [fields(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
        lines = [line.removeprefix("srun:").strip() for line in mpi.splitlines()]
        versions = [line.partition("available:")[2].replace(",", " ").split() for line in lines]
        return cls(
            settings={k: v.strip() for k, v in re.findall(r"^(\S+)\s*=(.*)$", settings, re.MULTILINE)},
            partitions={partition["PartitionName"]: partition for partition in found},
            mpi=frozenset(line for line in lines if re.fullmatch(r"\w+", line)).union(*versions),
        )

    def partition(self, name: str | None) -> Mapping[str, str] | None:
        """Return the fields of the partition ``name``, or of the default one; None if it does not exist."""
        if name:
            return self.partitions.get(name)
        return next((p for p in self.partitions.values() if p.get("Default") == "YES"), None)

    def used(self, site: Site) -> tuple[Mapping[str, str], ...]:
        """Return the fields of each partition that a job on ``site`` would use.

        A role without a partition uses Slurm's default one. Partitions that do not exist are left out,
        because Slurm itself refuses a job that names one.
        """
        roles = (site.trainer, site.searcher) if site.hetjob else (site.trainer,)
        names = dict.fromkeys(role.partition or site.partition for role in roles)
        return tuple(found for name in names if (found := self.partition(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run and its machine or cluster, from which checks draw their findings.

    None, or an empty value, means that a fact is unknown; checks then report nothing about it.
    """

    site: Site = NO_SITE
    config: Config | None = None
    split: Plan | None = None
    """Nodes and ranks of the run's job."""
    root: Path | None = None
    """Folder of runs."""
    shared: bool = False
    """True if other machines must see ``root``."""
    model: str | None = None
    """Path or name of the policy."""
    slurm: SlurmFacts | None = None
    """Slurm of the cluster; None if ranks run on this machine."""
    partitions: tuple[Mapping[str, str], ...] = ()
    """Fields of each partition that the job would use."""
    library: Library | None = None
    """MPI library that ranks load."""
    no_library: str = ""
    """Reason why no MPI library can be loaded."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables of the ranks."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Options of the command line that set site keys, by key, without their values, such as ``--time ``."""
    fetched_by: str = ""
    """Command that downloads the ranks' models and data."""
    beside: Path | None = None
    """Folder of the config file, with modules that the config may name."""
    seconds: float = 60.0
    """Timeout of the check of the task, in seconds. The check takes a few, but more on a busy machine."""

    @property
    def alone(self) -> bool:
        """True if this machine is the only node of the partitions."""
        here = ({socket.gethostname().partition(".")[0]}, {"localhost"})
        return {partition.get("Nodes") for partition in self.partitions} in here

    @property
    def in_container(self) -> bool:
        """True if ranks run in a container, where other paths may exist than here."""
        return self.site.container is not None


Check = Callable[[Facts], Iterable[Finding]]


def run_checks(checks: Iterable[Check], facts: Facts) -> Iterator[Finding]:
    """Run the checks one after another and yield their findings.

    Raises a check's ConfigError. Any other error of a check becomes a warning that the check failed.
    """
    for check in checks:
        try:
            yield from check(facts)
        except ConfigError:
            raise
        except Exception as error:
            yield _crash(check, error)


def _crash(check: Check, error: Exception) -> Finding:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    found = f"this could not be checked ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return warning(name, found, "a run may still work; please report this line as a fault of the check")


def refuse(checks: Iterable[Check], facts: Facts) -> list[Finding]:
    """Run the checks; return their warnings, or raise ConfigError with the first problem."""
    return [finding for finding in passed(checks, facts) if finding.level == "warning"]


def passed(checks: Iterable[Check], facts: Facts) -> list[Finding]:
    """Run the checks; return their findings, or raise ConfigError with the first problem."""
    findings = []
    for finding in run_checks(checks, facts):
        if finding.level == "problem":
            raise ConfigError(finding.sentence)
        findings.append(finding)
    return findings


def job_environment(site: Site) -> dict[str, str]:
    """Return the environment variables of a job's ranks, as far as they are known here."""
    own = variables(site.mpi_library) | site.environment
    expanded = {name: os.path.expandvars(value) for name, value in own.items()}
    return {"HF_HUB_OFFLINE": "1", **os.environ, **expanded}


def login_python(site: Site) -> str:
    """Return the path of the ranks' Python: that of the site's ``venv``, else that of this process."""
    return os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable
