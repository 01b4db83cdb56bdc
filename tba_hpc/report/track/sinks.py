"""Where figures go: TensorBoard's event files, or Weights & Biases. The only module that imports wandb.

A library is imported when its sink is made. ``state``, JSON, is what a later process needs to go on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tba_hpc.config import Config
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer
from tba_hpc.run.files import make_folder

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

STEP = "optimizer_step"
"""Name of the figure that W&B's curves are drawn over."""

ANSWER = ("prompt", "question", "answer", "correct")
"""Columns of a table of answers."""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures by name at an optimizer step. time: unix seconds, None if unknown.

    answers: some of an evaluation's, by the name of its split. again: whether training resumes from this
    step, and what was reported of later ones is taken back.
    """

    step: int
    figures: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    time: float | None = None
    again: bool = False


class TensorBoardSink:
    """Event files in RUN/track/tensorboard; what a resume takes back is purged."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.track / "tensorboard"
        make_folder(self._folder)
        self._sessions = 0
        self._writer = self._open(None)

    def _open(self, purge: int | None) -> SummaryWriter:
        from tensorboardX import SummaryWriter

        self._sessions += 1  # two files of the same second would be one
        return SummaryWriter(str(self._folder), purge_step=purge, filename_suffix=f".{self._sessions}")

    def log(self, points: Iterable[Point]) -> None:
        """Write scalars; they are on the disk then."""
        for point in points:
            if point.again:
                self._writer.close()
                self._writer = self._open(point.step + 1)
            for name, value in point.figures.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time)
        self._writer.flush()

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def wandb_mode() -> str:
    """What W&B's own variable WANDB_MODE says: online, offline, …"""
    return os.environ.get("WANDB_MODE", "online")


class WandbSink:
    """One run of W&B, whatever number of starts: they have the same id. Offline, each start has a folder.

    It gets the config, figures and some answers; no code, console output, machine data or environment.
    """

    def __init__(self, run: RunDir, config: Config, project: str, state: Mapping[str, Any]) -> None:
        import wandb

        self._id = state.get("id") or secrets.token_hex(4)
        self._count = int(state.get("count", 0))
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            id=self._id,
            resume="allow" if wandb_mode() == "online" else None,
            dir=str(run.track),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, points: Iterable[Point]) -> None:
        """Log figures, and answers as tables; steps done again after a resume are logged again."""
        for point in points:
            tables = {f"{split}/answers": _table(answers) for split, answers in point.answers.items()}
            if point.figures or tables:
                self._run.log({**point.figures, **tables, STEP: point.step}, step=self._count)
                self._count += 1

    def state(self) -> dict[str, Any]:
        """Id and number of records."""
        return {"id": self._id, "count": self._count}

    def close(self) -> None:
        """Finish the run, as far as this process is concerned."""
        self._run.finish()


def _table(answers: Sequence[Answer]) -> Any:
    import wandb

    rows = [[answer.prompt, answer.question, answer.text, answer.correct] for answer in answers]
    return wandb.Table(columns=list(ANSWER), data=rows)


Sink = TensorBoardSink | WandbSink
