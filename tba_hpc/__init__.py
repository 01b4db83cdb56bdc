"""Trajectory Balance with Asynchrony: post-train language models with reinforcement learning, on Slurm.

The command is ``tba``. In a notebook ``tba_hpc.read(run)`` gives the tables of a run. A task of your own
returns each prompt as a ``tba_hpc.Prompt`` and gets answers as ``tba_hpc.Completion``. It names the files and
models that it needs as ``tba_hpc.Resource``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_hpc.commands.frames import RunFrames
    from tba_hpc.core.types import Completion, Prompt, Resource

__all__ = ["Completion", "Prompt", "Resource", "read"]


def read(run: str | Path) -> RunFrames:
    """Return a run directory as pandas tables: ``metrics``, ``searchers``, ``evaluations``, ``samples``.

    Raises ConfigError if ``run`` is not a run directory.
    """
    from tba_hpc.commands.frames import RunFrames

    return RunFrames(Path(run))


def __getattr__(name: str) -> object:
    """Import a type of ``core.types`` on first use, so that the package itself is quick to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tba_hpc.core import types

    return getattr(types, name)
