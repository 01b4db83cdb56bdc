"""How ``scontrol --oneliner`` prints a record, and Slurm memory."""

from __future__ import annotations

import re

MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""Size of the units of ``--mem``."""


def fields(line: str) -> dict[str, str]:
    """The fields of ``Key=Value Key=Value …``; a value ends at the first blank."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def mebibytes(memory: str) -> float:
    """Size of ``480G`` or ``3000`` as for ``sbatch --mem``, in MiB."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.upper())
    return int(match[1]) * MEBIBYTES[match[2] or "M"] if match else 0
