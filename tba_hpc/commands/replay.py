"""``tba replay``: trains again on the shards that a run has recorded, without searchers or engines.

A replay may change the keys of training, but not those that determined the samples: the task's, the
generator's, and ``model.logprob_temperature``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.text import Text

from tba_hpc import runtime
from tba_hpc.config import Config, ConfigError, TrainSection, differences, parse_config, value_text
from tba_hpc.core.ports import Learner
from tba_hpc.core.prompts import Progress
from tba_hpc.core.schedules import decay_end
from tba_hpc.core.types import Shard
from tba_hpc.core.wording import count
from tba_hpc.exchange.hdf5_shards import read_sealed
from tba_hpc.exchange.replay_exchange import Recording, ReplayExchange, of_behaviour
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.restoring import verify_checkpoints
from tba_hpc.report.tables import Terminal
from tba_hpc.report.track.follow import tracked
from tba_hpc.run import modules
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.changes import is_done
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.events import log_event
from tba_hpc.run.files import write_atomic
from tba_hpc.run.owners import owned

RECORDED = ("task.", "generator.", "model.logprob_temperature")
"""Prefixes of the config keys that determined the samples, so that a replay cannot change them."""

USED_UP = "the recorded shards are used up"
"""Why a replay ends before its last step if nobody has asked it to."""


def replay(
    path: Path, overrides: Sequence[str], *, delay: int = 0, at_once: bool = False, partial: bool = False
) -> tuple[RunDir, Config]:
    """Train on the shards of the run at ``path``, with its config and ``overrides``, as a run of its own.

    The replay is a run directory beside the recorded one, and another call resumes it. See ``_keep_code`` for
    the user's own code.

    Each shard arrives ``delay`` steps after the step at which it arrived in the recorded run. at_once: all
    shards arrive before the first step. partial: whether to replay what is left if shards have been deleted.

    Returns the replay's run directory and config. Raises ConfigError, and the errors of training.
    """
    source = RunDir.open(path)
    recorded = source.config()
    config = replay_config(source, recorded, Recording.of(source).steps, overrides)
    _refuse_dropping(recorded, config, delay, at_once=at_once)
    recording, read = read_recorded(source, recorded, config, partial=partial)
    recording = recording.at_once() if at_once else recording.delayed(delay)
    run = RunDir.check(config)
    of = str(source.path.resolve())
    note = {"of": of, "delay": delay, "at_once": at_once}
    _refuse_another(run, note)
    if is_done(run, config):
        return run, config
    with owned(run):
        create_run(config)
        _keep_code(run, config, source)
        flags = [f"--delay={delay}"] * (delay > 0) + ["--at-once"] * at_once + ["--partial"] * partial
        settings = [word for override in overrides for word in ("--set", override)]
        command = shlex.join(["tba", "replay", of, *flags, *settings])
        write_atomic(run.replay_note, json.dumps({**note, "command": command}))
        log_event(run, "start", attempt=run.begin_attempt().name, trainers=1, searchers=0)
        shards = sum(len(arrival.shards) for arrival in recording.arrivals)
        watch = shlex.join(["tba", "status", str(run.path)])
        Terminal(stderr=True).print(Text(f"replaying {count(shards, 'shard')}; to watch: {watch}"))
        with tracked(run, config):
            train_on(run, config, recording, read)
    return run, config


def _refuse_dropping(recorded: Config, config: Config, delay: int, *, at_once: bool) -> None:
    """Raise ConfigError if ``delay`` or ``at_once`` would make data older than the replay's bound.

    Such data would be dropped. Later shards would come early instead, or the replay would end early.
    """
    bound, before = config.exchange.max_staleness, recorded.exchange.max_staleness
    if at_once and bound is not None:
        raise ConfigError(
            f"--at-once makes data as old as the replay has steps, and exchange.max_staleness={bound} would "
            "drop them: add --set exchange.max_staleness=null"
        )
    if delay and bound is not None and before is not None and bound < before + delay:
        raise ConfigError(
            f"--delay {delay} makes data up to {before + delay} steps old, which exchange.max_staleness="
            f"{bound} would drop: add --set exchange.max_staleness={before + delay}, or null"
        )


def _refuse_another(run: RunDir, wanted: Mapping[str, object]) -> None:
    """Raise ConfigError if the run directory holds results of anything but the replay with this note."""
    known = json.loads(run.replay_note.read_text()) if run.replay_note.exists() else {}
    known.pop("command", None)
    same = known and {**known, "of": str(Path(known["of"]).resolve())} == wanted
    if not (same or run.came_to_nothing):
        found = f"the replay {json.dumps(known)}" if known else "no replay"
        raise ConfigError(
            f"{run.path} holds {found}, so it cannot go on as {json.dumps(wanted)}: choose another run.name"
        )


def _keep_code(run: RunDir, config: Config, source: RunDir) -> None:
    """Keep in the replay's directory what ``config`` needs of the user's code.

    The code of rewards is the recorded run's. A loss and what it imports come from the working directory, or
    else from an earlier start of this replay or from the recorded run. Raises ConfigError if rewards and loss
    need different files of one name.
    """
    usual = config.train.model_copy(update={"objective": TrainSection().objective})
    of_rewards, _ = modules.needed(config.model_copy(update={"train": usual}), source.modules)
    places = (Path.cwd(), run.modules, source.modules)
    found = ((place, files) for place in places if (files := modules.needed_by_loss(config, place)))
    with TemporaryDirectory() as whole, TemporaryDirectory() as loss:
        modules.copy(of_rewards, source.modules, Path(whole))
        for place, files in list(found)[:1]:
            modules.copy(files, place, Path(loss))
        if unlike := modules.differing(Path(whole), Path(loss)):
            raise ConfigError(
                f"{', '.join(unlike)}, which {config.train.objective.name} needs, is not what the rewards of "
                f"{source.path} need: give it another name"
            )
        shutil.copytree(loss, whole, dirs_exist_ok=True)
        modules.keep(run, config, Path(whole))


class Unhurried(Freshness):
    """Freshness in a replay, where no step waits for data: shards arrive at their recorded steps."""

    def starved(self, step: int) -> bool:
        """Return False: no step waits for a shard, since each shard comes at its recorded step."""
        return False

    def overdue(self, step: int) -> int:
        """Return 0: no request is overdue, because a replay has no searchers to answer one."""
        return 0


def train_on(
    run: RunDir,
    config: Config,
    recording: Recording,
    read: Callable[[ShardKey], Shard],
    learner: Learner | None = None,
) -> bool:
    """Train in this process on recorded shards, from the replay's newest checkpoint if it has one.

    run, config: run directory and config of the replay. read: function that reads a shard. learner: None for
    a DeepSpeedLearner with one rank. The model is exported at the end, even if the shards are used up before
    the last step, but not evaluated. Returns whether the last step was taken.
    """
    verify_checkpoints(run)
    if learner is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in ranks, since more threads sum in another order
        learner = runtime.make_learner(run, config, 0, 1)

    def opened(progress: Progress) -> ReplayExchange:
        return ReplayExchange(recording, read, progress.cursors, step=lambda: trainer.step)

    with runtime.leading(run, config, learner, opened, freshness=Unhurried) as trainer:
        finished = trainer.run()
        used_up = trainer.exchange.stop_requested and not (finished or trainer.stop_asked())
        trainer.log_event("finished" if finished else "stopped")
        if not trainer.stop_asked():
            learner.export(run.export)
            write_atomic(run.export_step, f"{trainer.step}\n")
    learner.close()
    trainer.metrics.close()
    if finished:
        run.mark_finished()
    log_event(run, "finished" if finished else "stopped", **({"sentence": USED_UP} if used_up else {}))
    return finished


def replay_config(source: RunDir, recorded: Config, steps: int, overrides: Sequence[str]) -> Config:
    """Return the config of a replay of ``source``: its ``recorded`` config with ``overrides``.

    The replay has one trainer rank and, unless overridden, takes the ``steps`` that the run took. The
    learning rate keeps its recorded schedule. Raises ConfigError for keys that determined the samples.
    """
    tree = recorded.model_dump(mode="json")
    ours = [
        f"run.name={recorded.run.name}-replay",
        f"run.root={json.dumps(str(source.path.parent.resolve()))}",
        "launch.trainers=1",
        f"train.steps={max(1, steps)}",
    ]
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    rate, last = recorded.train.learning_rate, decay_end(recorded.train)
    if (wanted := given.get("train.steps", "")).isdecimal():  # else ``parse_config`` refuses it
        last = max(last, int(wanted))
    if rate.schedule != "constant" and not any(key.startswith("train.learning_rate") for key in given):
        ours += [f"train.learning_rate.decay={[rate.decay[0] if rate.decay else rate.warmup_steps, last]}"]
    _leave_out_what_follows(tree["train"], given)
    config = parse_config(tree, [*ours, *overrides])
    for key, (was, now) in differences(recorded, config).items():
        if key.startswith(RECORDED):
            raise ConfigError(
                f"{key}={value_text(now)} is not how the shards of {source.path} were made "
                f"({value_text(was)}): leave it out"
            )
    return config


def _leave_out_what_follows(train: dict[str, Any], given: Mapping[str, str]) -> None:
    """Remove from a ``train`` section the recorded keys whose defaults follow from the replay's objective.

    given: overrides by key. ``ratio_bound`` is removed only if they name an objective.
    """
    objective = given.get("train.objective", train["objective"]["name"])
    if "train.objective" in given:
        del train["ratio_bound"]
    if objective == "oapl":
        del train["reference"]


def read_recorded(
    source: RunDir, recorded: Config, config: Config, *, partial: bool
) -> tuple[Recording, Callable[[ShardKey], Shard]]:
    """Return the recording of ``source`` for a replay by ``config``, and a function that reads its shards.

    The recording says when each shard arrives. partial: whether shards may be gone. Raises ConfigError if
    ``config`` needs log-probabilities that were not recorded, or shards that are gone.
    """
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
    wanted = [key for arrival in recording.arrivals for key in arrival.shards]
    on_disk = source.sealed_files()
    there = [key for key in wanted if key in on_disk]
    if not there or (len(there) < len(wanted) and not partial):
        remedy = ", or replay what is left with --partial" if there else ""
        raise ConfigError(
            f"{len(wanted) - len(there)} of the {len(wanted)} shards that {source.path} learned from are "
            f"gone, deleted once a checkpoint held them: record another with exchange.keep_shards=1{remedy}"
        )

    def read(key: ShardKey) -> Shard:
        shard = read_sealed(source, key)
        return shard if now.reference.scored else of_behaviour(shard)

    return recording.only(there), read
