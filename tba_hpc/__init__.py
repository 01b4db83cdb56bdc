"""Trajectory Balance with Asynchrony: post-train language models with reinforcement learning, on Slurm.

``tba`` is its command. In a notebook ``tba_hpc.read(run)`` gives the tables of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_hpc.frames import RunFrames

__all__ = ["read"]


def read(run: str | Path) -> RunFrames:
    """A run directory as pandas tables: ``metrics``, ``searchers``, ``evaluations``, ``samples``.

    Raises ConfigError where it is no run.
    """
    from tba_hpc.frames import RunFrames

    return RunFrames(Path(run))
