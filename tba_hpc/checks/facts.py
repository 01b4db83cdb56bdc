"""Facts of a run or a cluster, and findings: what a check, a function of facts, says of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.library import Library
from tba_hpc.config import Config, ConfigError
from tba_hpc.launch import mpi_library
from tba_hpc.launch.plan import Plan, Site

Level = Literal["ok", "warning", "problem"]

NO_SITE = Site(gpus_per_node=0, time="5", signal_seconds=60)
"""Asks for as little as possible: for one machine, or a cluster without a site file."""


@dataclass(frozen=True, slots=True)
class Finding:
    """problem: a run would fail; warning: it may, or loses something. Both say what to do in ``remedy``."""

    name: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Both in one."""
        return f"{self.found}: {self.remedy}" if self.remedy else self.found


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """A run may fail, or loses something."""
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(name, "problem", found, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known; a check says nothing of what is not.

    root, shared: the run root, and whether other machines must see it. model: the policy. slurm, partitions:
    what Slurm says of itself, and of the partitions that a job would use. library, no_library: the MPI
    library that ranks load, and why none can be loaded. job: the fields of a job that Slurm took.
    environment, python: of the ranks. fetched_by: the command that brings models and data to them. beside:
    the folder of the config, whose modules it may name. seconds: timeout of the look at the task.
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
    def in_container(self) -> bool:
        """Whether ranks run where paths may be others than here."""
        return self.site.container is not None


Check = Callable[[Facts], Iterable[Finding]]


def judge(checks: Iterable[Check], facts: Facts) -> Iterator[Finding]:
    """What the checks find, one after the other."""
    return (finding for check in checks for finding in check(facts))


def refuse(checks: Iterable[Check], facts: Facts) -> list[Finding]:
    """The warnings that checks find. Raises ConfigError for the first problem."""
    warnings = []
    for finding in judge(checks, facts):
        if finding.level == "problem":
            raise ConfigError(finding.sentence)
        warnings += [finding] if finding.level == "warning" else []
    return warnings


def job_environment(site: Site) -> dict[str, str]:
    """Environment of the ranks, as far as it is known here."""
    own = mpi_library.variables(site.mpi_library) | site.environment
    expanded = {name: os.path.expandvars(value) for name, value in own.items()}
    return {"HF_HUB_OFFLINE": "1", **os.environ, **expanded}


def login_python(site: Site) -> str:
    """The Python that the ranks will use, or this one if only a container has that."""
    return os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable
