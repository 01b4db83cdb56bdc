"""Facts about a run or a cluster, checks (functions of facts), and their findings."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba_hpc.checks.library import Library
from tba_hpc.config import Config, ConfigError
from tba_hpc.launch import mpi_library
from tba_hpc.launch.plan import Plan, Site
from tba_hpc.run.slurm_queue import ask, fields

Level = Literal["ok", "warning", "problem"]

NO_SITE = Site(gpus_per_node=0, time="5", signal_seconds=60)
"""Site that requests as little as possible, for one machine or a cluster without a site file."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of level "problem" (a run would fail), "warning" (it may fail or lose something) or "ok"."""

    name: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Finding and remedy in one sentence."""
        return f"{self.found}: {self.remedy}" if self.remedy else self.found


def ok(name: str, found: str) -> Finding:
    """Make a finding that needs no action."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Make a finding for a run that may fail or loses something."""
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """Make a finding for a run that would fail."""
    return Finding(name, "problem", found, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """Slurm's ``scontrol show config``, fields of partitions by name, and ``srun --mpi=`` plugins."""

    settings: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    mpi: frozenset[str]

    @classmethod
    def look(cls) -> SlurmFacts:
        """Ask the cluster that this machine belongs to. Raises SlurmError."""
        return cls.of(
            ask("scontrol", "show", "config"),
            ask("scontrol", "--oneliner", "--all", "show", "partition"),
            ask("srun", "--mpi=list"),
        )

    @classmethod
    def of(cls, settings: str, partitions: str, mpi: str) -> SlurmFacts:
        """Parse what Slurm prints: ``Key = value`` lines; a line per partition; plugins, one per line.

        After the plugins come the versions of pmix, which are plugins, too.
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
        """Return a partition, by default the cluster's default one; None if there is none of that name."""
        if name:
            return self.partitions.get(name)
        return next((p for p in self.partitions.values() if p.get("Default") == "YES"), None)

    def used(self, site: Site) -> tuple[Mapping[str, str], ...]:
        """Return the partitions that a job on ``site`` would use; Slurm itself refuses missing ones."""
        roles = (site.trainer, site.searcher) if site.hetjob else (site.trainer,)
        names = dict.fromkeys(role.partition or site.partition for role in roles)
        return tuple(found for name in names if (found := self.partition(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Known facts; a check reports nothing about unknown ones.

    root, shared: the run root, and whether other machines must see it. model: the policy. slurm, partitions:
    Slurm's description of itself, and of the partitions that a job would use. library, no_library: the MPI
    library that ranks load, and why none can be loaded. job: fields of a job that Slurm accepted.
    environment, python: of the ranks. fetched_by: command that downloads models and data for them. beside:
    folder of the config, whose modules the config may name. seconds: timeout of the check of the task.
    """

    site: Site = NO_SITE
    config: Config | None = None
    split: Plan | None = None
    root: Path | None = None
    shared: bool = False
    model: str | None = None
    slurm: SlurmFacts | None = None
    partitions: tuple[Mapping[str, str], ...] = ()
    library: Library | None = None
    no_library: str = ""
    job: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    fetched_by: str = ""
    beside: Path | None = None
    seconds: float = 20.0

    @property
    def on_login_node(self) -> bool:
        """True if ranks run elsewhere, as jobs of Slurm."""
        return self.slurm is not None

    @property
    def alone(self) -> bool:
        """True if this machine is the only node that a job could get."""
        here = ({socket.gethostname().partition(".")[0]}, {"localhost"})
        return {partition.get("Nodes") for partition in self.partitions} in here

    @property
    def in_container(self) -> bool:
        """True if ranks run in a container, where paths may differ from those here."""
        return self.site.container is not None


Check = Callable[[Facts], Iterable[Finding]]


def judge(checks: Iterable[Check], facts: Facts) -> Iterator[Finding]:
    """Run the checks one after another and yield their findings. A crash of a check is a finding, too.

    Raises the ConfigError of a check.
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
    return warning(name, found, "a run may work all the same; report this line as a fault of the check")


def refuse(checks: Iterable[Check], facts: Facts) -> list[Finding]:
    """Run the checks and return their warnings. Raises ConfigError for the first problem."""
    warnings = []
    for finding in judge(checks, facts):
        if finding.level == "problem":
            raise ConfigError(finding.sentence)
        warnings += [finding] if finding.level == "warning" else []
    return warnings


def job_environment(site: Site) -> dict[str, str]:
    """Return the environment of the ranks, as far as it is known here."""
    own = mpi_library.variables(site.mpi_library) | site.environment
    expanded = {name: os.path.expandvars(value) for name, value in own.items()}
    return {"HF_HUB_OFFLINE": "1", **os.environ, **expanded}


def login_python(site: Site) -> str:
    """Return the Python that the ranks will use, or this process's if the site names none."""
    return os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable
