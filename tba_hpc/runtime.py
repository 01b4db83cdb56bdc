"""The composition root: builds what a rank needs from the frozen config, then runs its loop.

The only module that sees both loops and the backends. A rank is started by ``tba train RUN`` or
``tba search RUN``; vllm and deepspeed are imported by the role that needs them, after the world is checked.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tba_hpc import schedules
from tba_hpc.backends.behaviour_reference import BehaviourReference
from tba_hpc.backends.file_exchange import FileSearcherExchange, FileTrainerExchange, FileTrainerFollower
from tba_hpc.backends.hdf5_shards import ShardError, ShardWriter, read_arrays, read_pending, write_arrays
from tba_hpc.buffer import Embed, ReplayBuffer
from tba_hpc.config import Config, ConfigError
from tba_hpc.ending import end_run
from tba_hpc.metrics import MetricsWriter
from tba_hpc.online_evaluation import OnlineEvaluator
from tba_hpc.placement import Placement, refuse_index
from tba_hpc.ports import (
    EngineError,
    ExchangeError,
    Learner,
    Reference,
    SearcherExchange,
    Task,
    TrainerExchange,
)
from tba_hpc.prompts import CompletedRequests, refuse_few_prompts, refuse_long_prompts, training_requests
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    Checkpoints,
    StateError,
    TrainerState,
    damaged_checkpoints,
    latest_checkpoint,
    read_state,
    set_aside,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import discard_evaluations, find_evaluation, write_evaluation
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.notes import FAILED, REFUSED, rank_name, redirect_output, write_note
from tba_hpc.run.owners import owned
from tba_hpc.run.signals import StopFlag
from tba_hpc.scorer import Scorer
from tba_hpc.searcher import Searcher
from tba_hpc.tasks import load_task
from tba_hpc.trainer import Trainer
from tba_hpc.types import Publication, Ragged, Role, Split, WeightLayout

if TYPE_CHECKING:
    from tba_hpc.backends.mpi_exchange import MpiTrainerFollower

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 2
"""Prompts queued in an engine beyond those it decodes, so that it never waits for the next one."""

EMBEDDED_AT_ONCE = 64
"""Completions per forward pass of the model that tells near duplicates apart."""

PRUNING_SECONDS = 10.0
"""Longest wait for shards that are still to be deleted when all else is done."""

POLL_SECONDS = 0.1
"""Pause between two looks whether the leader has verified the checkpoints."""

REFUSALS = (ConfigError, StateError, ShardError, DiskFullError)
"""Errors that only the user can mend; the message is a sentence that says how."""

FAILURES = (EngineError, ExchangeError, OSError)
"""Errors that another start may not meet again; the message is a sentence, too."""


def train(run: RunDir, index: int | None) -> None:
    """Be trainer rank ``index`` (None: as MPI says) of ``run`` until it is finished or stopped.

    The leader runs the loop, exports and reports; the other ranks follow its learner. Raises
    ConfigError, ExchangeError and the like with one sentence.
    """
    with _placed(run, "trainer", index) as (config, placement):
        if placement.index == 0:
            verify_checkpoints(run, config)
            _verified(run).touch()
        from tba_hpc.backends.deepspeed_learner import DeepSpeedLearner

        learner = DeepSpeedLearner.create(
            config,
            rank=placement.index,
            ranks=config.launch.trainers,
            store=_rendezvous(run),
            deadline=config.exchange.deadline_seconds,
        )
        if placement.index == 0:
            _lead(run, config, placement, learner)
        else:
            with _led():
                follower = _open_follower(run, placement, learner.layout)
                learner.follow(follower.slot)
                follower.close()


def _lead(run: RunDir, config: Config, placement: Placement, learner: Learner) -> None:
    """Restore what the last checkpoint holds, train, and bring the run to its end."""
    folder, state, completed, buffer = _restore(run, config)
    pending = list(read_pending(run, state.cursors))
    cursors = {**state.cursors, **{shard.searcher: shard.index + 1 for shard in pending}}
    exchange = _open_trainer(run, config, placement, learner.layout, cursors)
    if folder:  # only now, since the other trainer ranks follow once they are in the exchange
        if find_evaluation(run, "test", 0) is None:  # it was cut short; these are still the first weights
            _publish_first(exchange, config, learner)
        learner.load(folder)
    checkpoints = Checkpoints(run, config.checkpoint.keep, write_arrays)
    with StopFlag() as stop:
        trainer = Trainer(
            config,
            learner=learner,
            exchange=exchange,
            buffer=buffer,
            completed=completed,
            state=state,
            pending=pending,
            checkpoints=checkpoints,
            metrics=_metrics(run, config, "trainer", 0),
            stop_asked=lambda: stop.is_set,
            job_end=float(os.environ.get("TBA_JOB_END", "inf")),
        )
        finished = trainer.run()
        end_run(run, config, finished=finished, trainer=trainer, learner=learner, exchange=exchange)
    checkpoints.pruner.finish(PRUNING_SECONDS)


def verify_checkpoints(run: RunDir, config: Config) -> None:
    """Set aside the checkpoints that are damaged, down to the newest whole one, which is the latest then.

    Raises StateError where there were checkpoints and none is whole; all stay as they are then.
    """
    for folder, fault in damaged_checkpoints(run).items():
        metrics, step = _metrics(run, config, "trainer", 0), int(folder.stem.removeprefix("step-"))
        # First: a rank that dies between the two tells it twice, not never.
        metrics.log({"event": "damaged", "step": step, "checkpoint": folder.name, "fault": fault})
        metrics.close()
        log.warning("%s is damaged (%s): set aside as %s", folder, fault, set_aside(folder))


def _verified(run: RunDir) -> Path:
    """What the leader leaves once this attempt may believe the latest checkpoint."""
    return run.attempt / "checkpoints-verified"


def await_verified_checkpoints(run: RunDir, index: int, deadline: float) -> None:
    """Wait until the leader has verified the checkpoints, if there are any: all ranks then take the same one.

    ``deadline``: longest wait, s. Raises ExchangeError past it.
    """
    give_up = time.monotonic() + deadline
    # A listing, since NFS may deny for a minute a file that was looked for before it was there.
    while any(run.checkpoints.iterdir()) and _verified(run) not in run.attempt.iterdir():
        if time.monotonic() > give_up:
            raise ExchangeError(
                f"searcher {index} waited {deadline:.0f} s for trainer rank 0 to verify the checkpoints: see "
                "its log, or raise exchange.deadline_seconds"
            )
        time.sleep(POLL_SECONDS)


def _restore(
    run: RunDir, config: Config
) -> tuple[Path | None, TrainerState, CompletedRequests, ReplayBuffer]:
    """The newest checkpoint, if there is one, and what the trainer goes on from. Raises StateError."""
    folder = latest_checkpoint(run)
    buffer = ReplayBuffer(
        config.buffer, config.run.seed, value_beta=config.train.value_beta, embed=make_embed(config)
    )
    state, completed = _progress(folder)
    if folder:
        buffer.restore(read_arrays(folder / BUFFER_FILE))
        require_reference(run, config, state.step)
    discard_evaluations(run, after=state.step)
    return folder, state, completed, buffer


def make_embed(config: Config) -> Embed | None:
    """What embeds completions for the buffer, where near duplicates are told by that. Raises ConfigError."""
    if config.buffer.embedding_model is None:
        return None
    from tba_hpc.backends.hf_model import load_tokenizer
    from tba_hpc.tasks.embedder import Embedder

    embedder = Embedder(config.buffer.embedding_model, batch=EMBEDDED_AT_ONCE, key="buffer.embedding_model")
    decode = load_tokenizer(config.model.path).decode

    def embed(completions: Ragged) -> np.ndarray:
        return embedder([decode(completions.row(i)).strip() for i in range(len(completions))])

    return embed


def search(run: RunDir, index: int | None) -> None:
    """Be searcher rank ``index`` (None: as MPI says) of ``run`` until the trainer ends it."""
    with _placed(run, "searcher", index) as (config, placement):
        from tba_hpc.backends.vllm_generator import VllmGenerator

        await_verified_checkpoints(run, placement.index, config.exchange.deadline_seconds)
        state, completed = _progress(latest_checkpoint(run))
        for shard in read_pending(run, state.cursors):
            completed.add(shard.trajectories.record["request_id"])
        # First of all, since its process builds the engine while this one imports torch.
        generator = VllmGenerator(
            config.model, config.generator, seed=_seed(config, placement.index, state.revision)
        )
        from tba_hpc.backends.hf_model import load_tokenizer
        from tba_hpc.backends.vllm_victim import VllmVictim

        serve = partial(VllmVictim, seed=_seed(config, placement.index, state.revision))
        task = load_task(config.task, load_tokenizer(config.model.path), serve)
        refuse_long_prompts(task, config)
        refuse_few_prompts(task, config)
        metrics = _metrics(run, config, "searcher", placement.index)
        metrics.log({"event": "started", "searchers": config.launch.searchers})
        scorer = Scorer(
            task,
            _load_reference(run, config),
            ShardWriter(run, placement.index, first_index=state.cursors.get(placement.index, 0)),
            seal_seconds=config.exchange.seal_seconds,
            max_rejected_groups=config.task.max_rejected_groups,
        )
        with _led() as stop:
            searcher = Searcher(
                generator=generator,
                scorer=scorer,
                requests=training_requests(config, task, placement.index, completed),
                evaluator=_online_evaluator(config, task, placement.index),
                report=partial(write_evaluation, run),
                exchange=_open_searcher(run, config, placement),
                metrics=metrics,
                stop_asked=lambda: stop.is_set,
                sequences=(config.generator.prompts_in_flight + PROMPTS_AHEAD)
                * config.generator.completions_per_prompt,
                pending_shards=config.exchange.pending_shards,
            )
            searcher.run()
            generator.close()


def _load_reference(run: RunDir, config: Config) -> Reference:
    """The reference that a run begins with; a resume gets the one in force with its first weights."""
    if config.train.reference == "behaviour":
        return BehaviourReference()
    from tba_hpc.backends.hf_model import load_policy
    from tba_hpc.backends.hf_reference import HfReference

    return HfReference(
        load_policy(config.model.path, config.model.dtype),
        chunk_tokens=config.train.logprob_chunk_tokens,
        temperature=config.model.policy_temperature,
        policy_of=lambda step: load_policy(str(run.reference(step)), config.model.dtype),
    )


def require_reference(run: RunDir, config: Config, step: int) -> None:
    """Raise StateError where a resume at ``step`` would miss the reference of an earlier step."""
    reference = schedules.reference(config.train, step)
    if 0 < reference < step and not run.reference(reference).is_dir():
        raise StateError(
            f"{run.reference(reference)} is gone, the reference of step {step}: put it back, or start "
            "another run"
        )


def _publish_first(exchange: TrainerExchange, config: Config, learner: Learner) -> None:
    """Give out the initial weights for the first evaluation alone, where staleness is bounded."""
    publication = Publication(
        version=0,
        published=time.time(),
        evaluate="test",
        reference=schedules.reference(config.train, 0),
        budget_end=None if config.exchange.max_staleness is None else 0,
    )
    exchange.publish(publication, learner.write_weights)


def _open_trainer(
    run: RunDir, config: Config, placement: Placement, layout: WeightLayout, cursors: Mapping[int, int]
) -> TrainerExchange:
    pending = partial(read_pending, run)

    def evaluated(split: Split, step: int) -> bool:
        return find_evaluation(run, split, step) is not None

    if placement.mpi is None:
        return FileTrainerExchange(
            run.weights, layout, read_pending=pending, cursors=cursors, evaluated=evaluated
        )
    from tba_hpc.backends.mpi_exchange import MpiTrainerExchange

    return MpiTrainerExchange.open(
        placement.mpi,
        layout,
        bucket_mb=config.exchange.bucket_mb,
        read_pending=pending,
        cursors=cursors,
        evaluated=evaluated,
    )


def _open_follower(
    run: RunDir, placement: Placement, layout: WeightLayout
) -> MpiTrainerFollower | FileTrainerFollower:
    if placement.mpi is None:
        return FileTrainerFollower(run.weights, layout)
    from tba_hpc.backends.mpi_exchange import MpiTrainerFollower

    return MpiTrainerFollower.open(placement.mpi)


def _open_searcher(run: RunDir, config: Config, placement: Placement) -> SearcherExchange:
    if placement.mpi:
        from tba_hpc.backends.mpi_exchange import MpiSearcherExchange

        return MpiSearcherExchange.open(placement.mpi)
    return FileSearcherExchange(run.weights, placement.index, deadline=config.exchange.deadline_seconds)


@contextmanager
def _placed(run: RunDir, role: Role, index: int | None) -> Iterator[tuple[Config, Placement]]:
    """A rank in its place, with its own log and GPUs; an error ends it with a note for the launcher.

    None of a rank that is one too many: log and notes are those of the ranks at work.
    """
    config = run.config()
    refuse_index(config, role, index)
    with errors_reported(run, role, index or 0):
        placement = Placement.join(config, role, index)
    with owned(run, rank_name(role, placement.index)):
        redirect_output(run, role, placement.index)
        with errors_reported(run, role, placement.index):
            placement.choose_gpus()
            yield config, placement


@contextmanager
def _led() -> Iterator[StopFlag]:
    """While the leader may take steps it alone ends the run; this rank leaves when let go.

    Whoever is missing after a request to stop was still starting, and had nothing to save.
    """
    with StopFlag() as stop:
        try:
            yield stop
        except ExchangeError as error:
            if not stop.is_set:
                raise
            log.info("asked to stop, and so were the others: %s", error)


@contextmanager
def errors_reported(run: RunDir, role: Role, index: int) -> Iterator[None]:
    """Leave an error to the launcher as its sentence; the traceback goes to the log.

    The name of its note tells ``job_supervisor.sh`` whether to start the ranks again.
    """
    try:
        yield
    except (*REFUSALS, *FAILURES) as error:
        log.exception("%s ends", rank_name(role, index))
        mendable = isinstance(error, REFUSALS)
        write_note(run, role, index, str(error), "refused" if mendable else "failed")
        raise SystemExit(REFUSED if mendable else FAILED) from None


def _progress(folder: Path | None) -> tuple[TrainerState, CompletedRequests]:
    """What a checkpoint counts, and the requests completed by then."""
    if folder is None:
        return TrainerState(), CompletedRequests()
    return read_state(folder), CompletedRequests.from_array(read_arrays(folder / PROMPTS_FILE)["done"])


def _online_evaluator(config: Config, task: Task, searcher: int) -> OnlineEvaluator:
    return OnlineEvaluator(
        task,
        searcher=searcher,
        searchers=config.launch.searchers,
        max_tokens=config.generator.max_tokens,
        limits={
            "validation": config.evaluate.validation_prompts,
            "test": config.evaluate.test_prompts,
        },
    )


def _rendezvous(run: RunDir) -> Path:
    """The folder where the trainer ranks of this attempt meet."""
    folder = run.attempt / "rendezvous"
    folder.mkdir(exist_ok=True)
    return folder


def _metrics(run: RunDir, config: Config, role: Role, index: int) -> MetricsWriter:
    events = run.metrics / "tensorboard" / rank_name(role, index) if config.metrics.tensorboard else None
    return MetricsWriter(run.metrics_file(role, index), tensorboard=events)


def _seed(config: Config, searcher: int, revision: int) -> int:
    """The engine's seed: another one for each searcher and after each resume."""
    return int(np.random.SeedSequence([config.run.seed, searcher, revision]).generate_state(1)[0] >> 1)
