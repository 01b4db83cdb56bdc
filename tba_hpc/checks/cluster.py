"""What Slurm says of a cluster: its settings, partitions and MPI plugins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tba_hpc.launch.plan import Site
from tba_hpc.launch.slurm_queue import ask, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """settings: ``scontrol show config``. partitions: their fields by name. mpi: ``srun --mpi=`` plugins."""

    settings: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    mpi: frozenset[str]

    @classmethod
    def look(cls) -> SlurmFacts:
        """Ask the cluster that this machine belongs to. Raises SlurmError."""
        return cls(
            settings=parse_settings(ask("scontrol", "show", "config")),
            partitions=parse_partitions(ask("scontrol", "--oneliner", "--all", "show", "partition")),
            mpi=parse_mpi(ask("srun", "--mpi=list")),
        )

    def partition(self, name: str | None) -> Mapping[str, str] | None:
        """A partition, or the default one; None if there is none of that name."""
        if name:
            return self.partitions.get(name)
        return next((p for p in self.partitions.values() if p.get("Default") == "YES"), None)

    def used(self, site: Site) -> tuple[Mapping[str, str], ...]:
        """The partitions that a job on ``site`` would use; Slurm itself refuses those that do not exist."""
        roles = (site.trainer, site.searcher) if site.hetjob else (site.trainer,)
        names = dict.fromkeys(role.partition or site.partition for role in roles)
        return tuple(found for name in names if (found := self.partition(name)))


def parse_settings(text: str) -> dict[str, str]:
    """``Key   = value`` lines."""
    return {key: value.strip() for key, value in re.findall(r"^(\S+)\s*=(.*)$", text, re.MULTILINE)}


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """One line per partition."""
    found = [fields(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {partition["PartitionName"]: partition for partition in found}


def parse_mpi(text: str) -> frozenset[str]:
    """The plugins, one a line, and the versions of pmix, which are plugins too."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    versions = [line.partition("available:")[2].replace(",", " ").split() for line in lines]
    return frozenset(line for line in lines if re.fullmatch(r"\w+", line)).union(*versions)
