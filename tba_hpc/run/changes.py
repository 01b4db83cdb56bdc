"""Finds which keys of a run's config a resume changes, says what follows from that, and logs an event."""

from __future__ import annotations

import shlex
from typing import Any

from tba_hpc.config import Config, ConfigError, differences, value_text
from tba_hpc.core import schedules
from tba_hpc.run.checkpoints import latest_checkpoint, step_of
from tba_hpc.run.directory import PER_START, RunDir
from tba_hpc.run.events import log_event, run_command
from tba_hpc.run.inputs import forget_inputs
from tba_hpc.run.owners import holders


def create(config: Config) -> RunDir:
    """Make or resume the run directory of a config; log an event ``changed`` if a resume changes keys.

    If the run has produced nothing, the config may name another model or other prompts. The digests of the
    earlier model and prompts are then deleted, unless searchers of the run are alive. Such searchers still
    use the earlier ones, so the digests stay, and ranks refuse a config that names others.

    Raises the ConfigErrors of ``RunDir.create`` and ``refuse_steps_behind``.
    """
    run = RunDir.check(config)
    refuse_steps_behind(run, config)
    changed = changes(run, config)
    RunDir.create(config)
    searchers = {file.stem for file in run.owners.glob("searcher-*.*")}
    if run.came_to_nothing and not holders(run, searchers):
        forget_inputs(run)
    if changed:
        log_event(run, "changed", keys=changed)
    return run


def is_done(run: RunDir, config: Config) -> bool:
    """Return whether the run is finished, and ``config`` does not ask for more optimizer steps."""
    return run.finished and config.train.steps <= run.config().train.steps


def reached(run: RunDir) -> int:
    """Return the optimizer step of the newest checkpoint, where a resume starts; 0 without a checkpoint."""
    folder = latest_checkpoint(run) if run.checkpoints.is_dir() else None
    return step_of(folder) if folder else 0


def export_notice(run: RunDir) -> str:
    """Return a sentence if the exported model is older than the newest checkpoint; otherwise empty."""
    exported, step = run.exported_step, reached(run)
    if exported is None or exported >= step:
        return ""
    newer = f"{run_command(run)} --set train.steps={step}"
    return f"this model is of step {exported}, and the run has reached step {step}; to export that: {newer}"


def resume_notice(run: RunDir) -> str:
    """Return a sentence that says where a resume starts; empty for a run without a checkpoint."""
    return f"resuming; the newest checkpoint is of step {step}" if (step := reached(run)) else ""


def refuse_steps_behind(run: RunDir, config: Config) -> None:
    """Raise ConfigError if ``train.steps`` of ``config`` is below the step of the run's newest checkpoint."""
    if run.config_file.exists() and config.train.steps < (step := reached(run)):
        raise ConfigError(
            f"train.steps={config.train.steps} is less than the {step} steps that {run.path} has done: give "
            f"at least {step} to resume it, or choose another run.name to start afresh"
        )


def refuse_replay(run: RunDir) -> None:
    """Raise ConfigError if the run is a replay, because searchers would bring it other data."""
    if run.replay_note.exists():
        raise ConfigError(
            f"{run.path} is a replay, which no searchers may join: to go on with it type {run_command(run)}; "
            "to train on from its model, start another run with model.path="
            f"{shlex.quote(str(run.export))}"
        )


def changes(run: RunDir, config: Config) -> dict[str, tuple[Any, Any]]:
    """Map each dotted key that a resume with ``config`` changes to its (old, new) value.

    Keys that each start sets for itself (PER_START) are left out. The map is empty if the run is new or has
    produced nothing.
    """
    if not run.config_file.exists() or run.came_to_nothing:
        return {}
    pairs = differences(run.config(), config)
    return {key: pair for key, pair in pairs.items() if key not in PER_START}


def consequences(run: RunDir, config: Config) -> str:
    """Return a sentence about what a resume with ``config`` changes and what follows; "" without changes."""
    changed = changes(run, config)
    if not changed:
        return ""
    keys = ", ".join(
        f"{key}={value_text(new)} (was {value_text(old)})" for key, (old, new) in changed.items()
    )
    rescored = [key for key in ("evaluate.test_prompts", "evaluate.validation_prompts") if key in changed]
    scores = f"; scores from here on are of other prompts than before ({', '.join(rescored)})"
    return f"resuming with {keys}{_rate_change(run, config)}{scores if rescored else ''}"


def _rate_change(run: RunDir, config: Config) -> str:
    """Return a phrase about the learning rate if its decay now ends at another step; otherwise ""."""
    old, new, step = run.config().train, config.train, reached(run)
    before, after = (schedules.decay_end(train) for train in (old, new))
    if old.learning_rate.schedule == "constant" or before == after:
        return ""
    was, now = (schedules.learning_rate(train, step) for train in (old, new))
    there = "" if was == now else f": at step {step} it is {now:.3g} instead of {was:.3g}"
    return (
        f"; the learning rate ({old.learning_rate.schedule}) now decays until step {after} instead of "
        f"{before}{there}"
    )
