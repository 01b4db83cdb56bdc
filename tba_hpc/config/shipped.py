"""The configs and site files that come with the package.

``tba_hpc/configs`` and ``tba_hpc/sites`` are links in a clone, to ``configs`` and ``slurm/sites``, and
folders in what a wheel installs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["configs", "sites"]


def files(kind: Kind) -> dict[str, Path]:
    """The files by name, such as ``math_gsm8k`` and ``generic``."""
    folder = (Path(__file__).parents[1] / kind).resolve()
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find(path: Path, kind: Kind) -> Path:
    """``path``; or, where nothing is there and it is the name of a shipped file, that file."""
    file = files(kind).get(str(path))
    return path if file is None or path.exists() else file
