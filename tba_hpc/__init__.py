"""Trajectory Balance with Asynchrony: post-train language models with reinforcement learning, on Slurm.

``tba`` is its command. In a notebook ``tba_hpc.read(run)`` gives the tables of a run; a task of your own
returns ``tba_hpc.Prompt`` and gets ``tba_hpc.Completion``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_hpc.commands.frames import RunFrames
    from tba_hpc.core.types import Completion, Prompt, Resource

__all__ = ["Completion", "Prompt", "Resource", "read"]


def read(run: str | Path) -> RunFrames:
    """A run directory as pandas tables: ``metrics``, ``searchers``, ``evaluations``, ``samples``.

    Raises ConfigError where it is no run.
    """
    from tba_hpc.commands.frames import RunFrames

    return RunFrames(Path(run))


def __getattr__(name: str) -> object:
    """The values of a task, imported when first asked for: the package itself costs nothing to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tba_hpc.core import types

    return getattr(types, name)
