"""What a trainer goes on from: the newest whole checkpoint, and the reference it needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.config import Config
from tba_hpc.core import schedules
from tba_hpc.core.buffer import Embed, ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.exchange.hdf5_shards import read_arrays
from tba_hpc.report.digest import KeptDigest, TrainerDigest
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    StateError,
    TrainerState,
    damaged_checkpoints,
    latest_checkpoint,
    read_state,
    set_aside,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import discard_evaluations
from tba_hpc.run.inventory import COMPLETE, damage
from tba_hpc.run.metrics import MetricsWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """folder: the checkpoint, if there is one. The rest is what it holds, or what a new run begins with."""

    folder: Path | None
    state: TrainerState
    completed: CompletedRequests
    buffer: ReplayBuffer


def restore(run: RunDir, config: Config, embed: Embed | None) -> Restored:
    """From the newest checkpoint, which is whole. Raises StateError."""
    folder = latest_checkpoint(run)
    buffer = ReplayBuffer(config.buffer, config.run.seed, value_beta=config.train.value_beta, embed=embed)
    state, completed = TrainerState(), CompletedRequests()
    if folder:
        state = read_state(folder)
        completed = CompletedRequests.from_array(read_arrays(folder / PROMPTS_FILE)["done"])
        buffer.restore(read_arrays(folder / BUFFER_FILE))
        require_reference(run, config, state.step)
    discard_evaluations(run, after=state.step)
    return Restored(folder, state, completed, buffer)


def verify_checkpoints(run: RunDir) -> None:
    """Set aside damaged checkpoints, down to the newest whole one, which is then the latest.

    Raises StateError if there were checkpoints and none is whole; all stay as they are then.
    """
    for folder, fault in damaged_checkpoints(run).items():
        metrics, step = trainer_metrics(run), int(folder.stem.removeprefix("step-"))
        # First: a rank that dies between the two reports it twice, not never.
        metrics.log({"event": "damaged", "step": step, "checkpoint": folder.name, "fault": fault})
        metrics.close()
        log.warning("%s is damaged (%s): set aside as %s", folder, fault, set_aside(run, folder))


def require_reference(run: RunDir, config: Config, step: int) -> None:
    """Raise StateError if the reference that a resume at ``step`` needs is gone or damaged."""
    reference = schedules.reference(config.train, step)
    folder = run.reference(reference)
    if not 0 < reference < step:
        return
    if not folder.is_dir():
        raise StateError(f"{folder} is gone, the reference of step {step}: put it back, or start another run")
    if (folder / COMPLETE).exists() and (fault := damage(folder)):
        raise StateError(
            f"{folder}, the reference of step {step}, is damaged ({fault}): put a copy of it back, or start "
            "another run"
        )


def trainer_metrics(run: RunDir) -> MetricsWriter:
    """The leading trainer's."""
    path = run.metrics_file("trainer", 0)
    return MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
