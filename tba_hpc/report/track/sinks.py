"""Sinks, which send figures to a tracker: TensorBoard's event files, or Weights & Biases (wandb).

A tracker's library is imported when its sink is made. A later process continues from the sink's ``state``,
which is a dict for JSON.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
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
"""Name of the horizontal axis of W&B's curves."""

ANSWER = ("prompt", "question", "answer", "correct")
"""Columns of a table of answers."""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures at an optimizer step, by name.

    answers: some answers of an evaluation, by name of the split. time: unix seconds; None if unknown. again:
    whether training resumes from this step, so that figures of later steps no longer count.
    """

    step: int
    figures: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    time: float | None = None
    again: bool = False


class TensorBoardSink:
    """Writer of event files in RUN/track/tensorboard. A resume purges the steps that it will do again."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.track / "tensorboard"
        make_folder(self._folder)
        self._sessions = 0
        self._writer = self._open(None)

    def _open(self, purge: int | None) -> SummaryWriter:
        from tensorboardX import SummaryWriter

        self._sessions += 1  # files made within the same second need different names
        return SummaryWriter(str(self._folder), purge_step=purge, filename_suffix=f".{self._sessions}")

    def log(self, points: Iterable[Point]) -> None:
        """Write scalars and flush them to disk."""
        for point in points:
            if point.again:
                self._writer.close()
                self._writer = self._open(point.step + 1)
            for name, value in point.figures.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time)
        self._writer.flush()

    def state(self) -> dict[str, Any]:
        """Return an empty dict, since a later process needs no state."""
        return {}

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def wandb_mode() -> str:
    """Return the value of W&B's variable WANDB_MODE: online, offline, …"""
    return os.environ.get("WANDB_MODE", "online")


NO_LOGIN = 3
"""Exit code of this module as a program if W&B would send figures, but has no login."""

LOGIN_SECONDS = 60
"""Time limit of that program, in seconds."""


def lacks_login(environment: Mapping[str, str], python: str) -> bool:
    """Return whether W&B would send figures but has no login; False if that cannot be found out.

    W&B itself looks into its variables, its settings and netrc, and asks no server. A process of its own does
    that, since W&B sets variables and starts threads. environment, python: those of the ranks.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-m", __name__],
            env={**environment, "WANDB_SILENT": "true"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOGIN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == NO_LOGIN


def _look_for_login() -> int:
    """Return the exit code of this module as a program: NO_LOGIN, or 0."""
    import wandb

    if wandb.login(prompt=False, verify=False):  # False if W&B is offline or disabled, too
        return 0
    return 0 if wandb.setup().settings.mode in ("offline", "dryrun", "disabled") else NO_LOGIN


class WandbSink:
    """Writer of a W&B run, which each later process continues. Offline, each process writes its own folder.

    W&B gets the config, figures and some answers, but no code, console output, machine data or environment.
    project: name of the W&B project. state: ``state()`` of the last process; empty for the first.
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
        """Return the id of the W&B run, and the number of records logged so far."""
        return {"id": self._id, "count": self._count}

    def close(self) -> None:
        """Finish this process's part of the W&B run."""
        self._run.finish()


def _table(answers: Sequence[Answer]) -> Any:
    import wandb

    rows = [[answer.prompt, answer.question, answer.text, answer.correct] for answer in answers]
    return wandb.Table(columns=list(ANSWER), data=rows)


Sink = TensorBoardSink | WandbSink


if __name__ == "__main__":
    sys.exit(_look_for_login())
