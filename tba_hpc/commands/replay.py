"""``tba replay``: trains again on the shards that a run has recorded, without searchers or engines.

The keys that determined the samples stay as recorded: task, generator, and the log-probabilities'
temperature.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_hpc import runtime
from tba_hpc.config import Config, ConfigError, differences, parse_config, value_text
from tba_hpc.core.ports import Learner
from tba_hpc.core.prompts import Progress
from tba_hpc.core.schedules import decay_end
from tba_hpc.core.types import Shard
from tba_hpc.exchange.replay_exchange import RecordedShards, Recording, ReplayExchange
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.restoring import verify_checkpoints
from tba_hpc.report.track.follow import tracked
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.changes import is_done
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.files import write_atomic
from tba_hpc.run.owners import owned

log = logging.getLogger(__name__)

RECORDED = ("task.", "generator.", "model.logprob_temperature")
"""Keys that determined the shards; a replay cannot change them."""

NOTE = "replay.json"
"""File that names the replayed run, and the order of its shards."""


def replay(
    path: Path, overrides: Sequence[str], *, delay: int = 0, at_once: bool = False, partial: bool = False
) -> tuple[RunDir, Config]:
    """Train on a run's shards by its config and ``overrides``, in a separate run in the same folder.

    Shards arrive as they did, ``delay`` steps later, or all at once. Another call resumes the replay.
    partial: replay even if shards are gone. Raises ConfigError and the errors of training.
    """
    source = RunDir.open(path)
    recorded = source.config()
    config = replay_config(source, recorded, Recording.of(source).steps, overrides)
    recording, read = read_recorded(source, recorded, config, partial=partial)
    recording = recording.at_once() if at_once else recording.delayed(delay)
    run = RunDir.check(config)
    note = json.dumps({"of": str(source.path), "delay": delay, "at_once": at_once})
    if (run.path / NOTE).exists() and (run.path / NOTE).read_text() != note:
        raise ConfigError(
            f"{run.path} replays something else ({(run.path / NOTE).read_text()}): choose another run.name"
        )
    if is_done(run, config):
        return run, config
    with owned(run):
        create_run(config)
        write_atomic(run.path / NOTE, note)
        run.begin_attempt()
        with tracked(run, config):
            train_on(run, config, recording, read)
    return run, config


class Unhurried(Freshness):
    """Freshness of a replay. Shards arrive as recorded, so no step waits for shards that it does not need."""

    def starved(self, step: int) -> bool:
        """Return False, because no further shard can be expected."""
        return False

    def overdue(self, step: int) -> int:
        """Return 0, because no request is open."""
        return 0


def train_on(
    run: RunDir,
    config: Config,
    recording: Recording,
    read: Callable[[ShardKey], Shard],
    learner: Learner | None = None,
) -> bool:
    """Train in this process on recorded shards from the newest checkpoint; return whether it was finished.

    learner: None for a DeepSpeedLearner with one rank. If the shards are used up before the last step, the
    model is exported as it is. The model is not evaluated.
    """
    verify_checkpoints(run)
    if learner is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in ranks: more threads sum in another order
        learner = runtime.make_learner(run, config, 0, 1)

    def opened(progress: Progress) -> ReplayExchange:
        return ReplayExchange(recording, read, progress.cursors, step=lambda: trainer.step)

    with runtime.leading(run, config, learner, opened, freshness=Unhurried) as trainer:
        finished = trainer.run()
        if trainer.exchange.stop_requested:
            log.warning("the recorded shards are used up: the replay ends at step %d", trainer.step)
        trainer.log_event("finished" if finished else "stopped")
        if not trainer.stop_asked():
            learner.export(run.export)
    learner.close()
    trainer.metrics.close()
    if finished:
        run.mark_finished()
    return finished


def replay_config(source: RunDir, recorded: Config, steps: int, overrides: Sequence[str]) -> Config:
    """Return the config of a replay: one trainer, and as many steps as were taken unless overridden.

    The schedule of the learning rate stays as it was.
    """
    tree = recorded.model_dump(mode="json")
    name = f"{recorded.run.name}-replay"
    ours = [f"run.name={name}", f"run.root={json.dumps(str(source.path.parent))}", "launch.trainers=1"]
    config_of = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    ours += [f"train.steps={max(1, steps)}"]
    rate, last = recorded.train.learning_rate, decay_end(recorded.train)
    if config_of.get("train.steps", "0").isdecimal():  # else it is refused below
        last = max(last, int(config_of.get("train.steps", "0")))
    if rate.schedule != "constant" and not any(key.startswith("train.learning_rate") for key in config_of):
        ours += [f"train.learning_rate.decay={[rate.decay[0] if rate.decay else rate.warmup_steps, last]}"]
    _leave_out_what_follows(tree["train"], config_of)
    config = parse_config(tree, [*ours, *overrides])
    for key, (was, now) in differences(recorded, config).items():
        if key.startswith(RECORDED):
            raise ConfigError(
                f"{key}={value_text(now)} is not how the shards of {source.path} were made, with "
                f"{value_text(was)}: leave it out"
            )
    return config


def _leave_out_what_follows(train: dict[str, Any], given: Mapping[str, str]) -> None:
    """Remove keys from ``train`` that were derived from others, so that those ``given`` determine them."""
    objective = given.get("train.objective", train["objective"]["name"])
    if "train.objective" in given:
        del train["ratio_bound"]
    if objective == "oapl":
        del train["reference"]


def read_recorded(
    source: RunDir, recorded: Config, config: Config, *, partial: bool
) -> tuple[Recording, RecordedShards]:
    """Read what a replay by ``config`` needs of a run. Raises ConfigError for what was not recorded."""
    before, now = recorded.train, config.train
    if now.reference.scored and now.reference != before.reference:
        raise ConfigError(
            f"train.reference={now.reference.name} needs log-probabilities that {source.path} did not "
            f"record, with train.reference={value_text(before.reference.model_dump())}: leave it out, or "
            "set it to behaviour"
        )
    if now.score_centering > before.score_centering:
        raise ConfigError(
            f"train.score_centering={now.score_centering} needs log-probabilities that {source.path} did not "
            f"record, with train.score_centering={before.score_centering}: leave it out"
        )
    recording = Recording.of(source)
    if config.exchange.sync_every != recorded.exchange.sync_every:
        recording = Recording(recording.arrivals, None, recording.steps)
    read = RecordedShards(source, behaviour=not now.reference.scored)
    wanted = [key for arrival in recording.arrivals for key in arrival.shards]
    there = [key for key in wanted if key in read.places]
    if not there or (len(there) < len(wanted) and not partial):
        remedy = ", or replay what is left with --partial" if there else ""
        raise ConfigError(
            f"{len(wanted) - len(there)} of the {len(wanted)} shards that {source.path} learned from are "
            f"gone, deleted once they were in a checkpoint: record with exchange.keep_shards=1{remedy}"
        )
    return recording.only(there), read
