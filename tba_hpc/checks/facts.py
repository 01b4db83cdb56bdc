"""The facts that checks judge, and what a check is: a function of them that finds something or nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.commands import ask
from tba_hpc.checks.findings import Finding
from tba_hpc.checks.loaded import LOOK, Library, World
from tba_hpc.checks.machine import Folder, Machine
from tba_hpc.config import Config, ConfigError
from tba_hpc.launch import mpi_library
from tba_hpc.launch.plan import Plan, Site

NO_SITE = Site(gpus_per_node=0, time="5", signal_seconds=10)
"""Asks for as little as possible: for one machine, or a cluster without a site file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is known of a run, a machine or a cluster; a check says nothing of what is not.

    shared: whether other machines must see the run root. slurm, partitions: what Slurm says of itself, and of
    the partitions that a job would use. machine, folder: this one or a node, and the file system of its run
    root. library, no_library: the MPI library that ranks load, and why none can be loaded. world, trouble,
    job: what the ranks of a trial start found out together, what their log says went wrong, and the fields of
    its job. shell: the variables of this shell. environment, python: of the ranks. fetched_by: the command
    that brings models and data to them. beside: the folder of the config, whose modules it may name. seconds:
    timeout of a look at the task.
    """

    site: Site = NO_SITE
    shared: bool = False
    config: Config | None = None
    split: Plan | None = None
    slurm: SlurmFacts | None = None
    partitions: tuple[Mapping[str, str], ...] = ()
    machine: Machine | None = None
    folder: Folder | None = None
    library: Library | None = None
    no_library: str = ""
    world: World | None = None
    trouble: str = ""
    job: Mapping[str, str] = field(default_factory=dict)
    shell: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    fetched_by: str = ""
    beside: Path | None = None
    seconds: float = 20.0

    @property
    def in_container(self) -> bool:
        """Whether ranks run where paths may be others than here."""
        return self.site.container is not None


Check = Callable[[Facts], Finding | None]


def judge(checks: Iterable[Check], facts: Facts) -> Iterator[Finding]:
    """What the checks find, one after the other."""
    return (finding for check in checks if (finding := check(facts)))


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
    return {
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **{name: os.path.expandvars(value) for name, value in own.items()},
    }


def login_python(site: Site) -> str:
    """The Python that the ranks will use, or this one if only a container has that."""
    return os.path.expandvars(f"{site.venv}/bin/python") if site.venv else sys.executable


def find_library(site: Site) -> tuple[Library | None, str]:
    """The MPI library that ranks load, as their Python loads it here; or why it loads none.

    Neither if only the nodes know.
    """
    if site.container or site.setup or (site.modules and site.mpi_library != mpi_library.WHEEL):
        return None, ""
    answer = ask(login_python(site), "-c", LOOK, environment=job_environment(site))
    if found := re.search(r"^{.*}$", answer.text, re.MULTILINE):
        return Library.from_json(found[0]), ""
    if site.modules:  # one of them may bring it
        return None, ""
    return None, (answer.text.strip().splitlines() or ["nothing said"])[-1]
