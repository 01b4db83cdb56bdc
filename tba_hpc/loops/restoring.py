"""Restores what a trainer continues from: the newest intact checkpoint, and the reference that it needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core import schedules
from tba_hpc.core.buffer import Embed, ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Ragged
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
    step_of,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import discard_evaluations
from tba_hpc.run.inventory import COMPLETE, damage
from tba_hpc.run.metrics import MetricsWriter

log = logging.getLogger(__name__)

EMBEDDED_AT_ONCE = 64
"""Number of completions per forward pass of the model whose embeddings find near duplicates."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Folder and contents of a checkpoint. For a new run the folder is None, and the contents are initial."""

    folder: Path | None
    state: TrainerState
    completed: CompletedRequests
    buffer: ReplayBuffer


def restore(run: RunDir, config: Config) -> Restored:
    """Restore the newest checkpoint, and delete evaluations of later steps.

    Call ``verify_checkpoints`` first, which sets damaged checkpoints aside. Raises StateError if the
    checkpoint or its reference cannot be used, and ConfigError if the model buffer.duplicates.model does not
    exist.
    """
    folder = latest_checkpoint(run)
    value_beta, embed = config.train.value_beta, make_embed(config)
    buffer = ReplayBuffer(
        config.buffer, config.run.seed, queue=config.queue, value_beta=value_beta, embed=embed
    )
    state, completed = TrainerState(), CompletedRequests()
    if folder:
        state = read_state(folder)
        completed = CompletedRequests.from_array(read_arrays(folder / PROMPTS_FILE)["done"])
        buffer.restore(read_arrays(folder / BUFFER_FILE))
        require_reference(run, config, state.step)
    discard_evaluations(run, after=state.step)
    return Restored(folder, state, completed, buffer)


def verify_checkpoints(run: RunDir) -> None:
    """Set aside damaged checkpoints until the newest one is intact.

    Raises StateError, and changes nothing, if there are checkpoints but none is intact.
    """
    for folder, fault in damaged_checkpoints(run).items():
        metrics, step = trainer_metrics(run), step_of(folder)
        # Logged first: if this process dies before the next line, the damage is reported twice, not never.
        metrics.log({"event": "damaged", "step": step, "checkpoint": folder.name, "fault": fault})
        metrics.close()
        log.warning("%s is damaged (%s): set aside as %s", folder, fault, set_aside(run, folder))


def require_reference(run: RunDir, config: Config, step: int) -> None:
    """Raise StateError if the reference that a resume at ``step`` needs is missing or damaged."""
    reference = schedules.reference(config.train, step)
    folder = run.reference(reference)
    if not 0 < reference < step:
        return
    if not folder.is_dir():
        raise StateError(f"{folder}, the reference of step {step}, is gone: restore it, or start another run")
    if (folder / COMPLETE).exists() and (fault := damage(folder)):
        raise StateError(
            f"{folder}, the reference of step {step}, is damaged ({fault}): put a copy of it back, or start "
            "another run"
        )


def make_embed(config: Config) -> Embed | None:
    """Return the function that embeds completions, or None if the buffer compares no embeddings.

    Raises ConfigError if a model that it needs does not exist.
    """
    if (encoder := config.buffer.embedding_model) is None:
        return None
    from tba_hpc.learner.hf_model import load_tokenizer
    from tba_hpc.tasks.text_models import Embedder

    embedder = Embedder(encoder, batch=EMBEDDED_AT_ONCE, key="buffer.duplicates.model")
    decode = load_tokenizer(config.model.path).decode

    def embed(completions: Ragged) -> np.ndarray:
        return embedder([decode(completions.row(i)).strip() for i in range(len(completions))])

    return embed


def trainer_metrics(run: RunDir) -> MetricsWriter:
    """Open the leading trainer's metrics file for writing."""
    path = run.metrics_file("trainer", 0)
    return MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
