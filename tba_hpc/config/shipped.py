"""The configs and site files that come with the package.

In a clone, ``tba_hpc/configs`` and ``tba_hpc/sites`` are links to ``configs`` and ``slurm/sites``. In a wheel
they are folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["configs", "sites"]


def files(kind: Kind) -> dict[str, Path]:
    """Return the shipped files by name, such as ``math_gsm8k`` or ``generic``."""
    folder = (Path(__file__).parents[1] / kind).resolve()
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find(path: Path, kind: Kind) -> Path:
    """Return ``path``, or the shipped file with that name if nothing exists at ``path``."""
    file = files(kind).get(str(path))
    return path if file is None or path.exists() else file
