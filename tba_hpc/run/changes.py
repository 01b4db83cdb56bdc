"""Changes that a resume makes to a run's config, their consequences, and the event that records them."""

from __future__ import annotations

from typing import Any

from tba_hpc.config import Config, ConfigError, differences, value_text
from tba_hpc.core import schedules
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import OF_A_START, RunDir
from tba_hpc.run.events import log_event


def create(config: Config) -> RunDir:
    """Call ``RunDir.create``, and record the changes to the config as an event. Raises ConfigError."""
    run = RunDir.check(config)
    refuse_steps_behind(run, config)
    changed = changes(run, config)
    RunDir.create(config)
    if changed:
        log_event(run, "changed", keys=changed)
    return run


def is_done(run: RunDir, config: Config) -> bool:
    """Return whether the run is finished and ``config`` has no further steps."""
    return run.finished and config.train.steps <= run.config().train.steps


def reached(run: RunDir) -> int:
    """Step of the checkpoint that a resume would start from; 0 without a checkpoint."""
    folder = latest_checkpoint(run) if run.checkpoints.is_dir() else None
    return int(folder.stem.removeprefix("step-")) if folder else 0


def going_on(run: RunDir) -> str:
    """Sentence that says from which step a resume starts; empty for a run without a checkpoint."""
    return f"resuming; the newest checkpoint is of step {step}" if (step := reached(run)) else ""


def refuse_steps_behind(run: RunDir, config: Config) -> None:
    """Raise ConfigError if ``train.steps`` lies before the step that the run has reached."""
    if run.config_file.exists() and config.train.steps < (step := reached(run)):
        raise ConfigError(
            f"train.steps={config.train.steps} lies behind step {step}, which {run.path} has reached: give "
            f"at least {step} to resume it, or choose another run.name to start afresh"
        )


def changes(run: RunDir, config: Config) -> dict[str, tuple[Any, Any]]:
    """Map dotted keys to (old, new value) if ``config`` resumes a run; empty if it has produced nothing.

    Keys of ranks and places are left out, since every start has its own.
    """
    if not run.config_file.exists() or run.came_to_nothing:
        return {}
    pairs = differences(run.config(), config)
    return {key: pair for key, pair in pairs.items() if not key.startswith(OF_A_START)}


def consequences(run: RunDir, config: Config) -> str:
    """Sentence that names the changes and their consequences; empty if there are none."""
    changed = changes(run, config)
    if not changed:
        return ""
    keys = ", ".join(
        f"{key}={value_text(new)} (was {value_text(old)})" for key, (old, new) in changed.items()
    )
    rescored = [key for key in ("evaluate.test_prompts", "evaluate.validation_prompts") if key in changed]
    scores = f"; scores from here on are of other prompts than before ({', '.join(rescored)})"
    return f"resuming with {keys}{_of_the_rate(run, config)}{scores if rescored else ''}"


def _of_the_rate(run: RunDir, config: Config) -> str:
    """Phrase about a learning rate whose decay now ends at another step; empty if that is unchanged."""
    old, new, step = run.config().train, config.train, reached(run)
    before, after = (schedules.decay_end(train) for train in (old, new))
    if old.learning_rate.schedule == "constant" or before == after:
        return ""
    was, now = (schedules.learning_rate(train, step) for train in (old, new))
    there = "" if was == now else f": at step {step} it is {now:.3g} instead of {was:.3g}"
    return (
        f"; the learning rate ({old.learning_rate.schedule}) is laid out for {after} steps from here on, no "
        f"more for {before}{there}"
    )
