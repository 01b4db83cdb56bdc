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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tba_hpc import schedules
from tba_hpc.backends.behaviour_reference import BehaviourReference
from tba_hpc.backends.file_exchange import FileSearcherExchange, FileTrainerExchange, FileTrainerFollower
from tba_hpc.backends.hdf5_shards import ShardError, ShardWriter, read_arrays, read_pending, write_arrays
from tba_hpc.buffer import ReplayBuffer
from tba_hpc.config import Config, ConfigError
from tba_hpc.metrics import MetricsWriter
from tba_hpc.online_evaluation import OnlineEvaluator
from tba_hpc.ports import (
    EngineError,
    ExchangeError,
    Learner,
    Reference,
    SearcherExchange,
    Task,
    TrainerExchange,
)
from tba_hpc.prompts import CompletedRequests, PromptOrder
from tba_hpc.report import summary
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    StateError,
    TrainerState,
    begin_checkpoint,
    complete_checkpoint,
    latest_checkpoint,
    prune_references,
    prune_shards,
    read_state,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import discard_evaluations, find_evaluation, write_evaluation
from tba_hpc.run.files import DiskFullError, make_durable
from tba_hpc.run.notes import FAILED, REFUSED, rank_name, redirect_output, write_note
from tba_hpc.run.signals import StopFlag
from tba_hpc.scorer import Scorer
from tba_hpc.searcher import Searcher
from tba_hpc.tasks import load_task
from tba_hpc.trainer import Trainer
from tba_hpc.types import Request, Role, Sampling, Split, WeightLayout

if TYPE_CHECKING:
    from tba_hpc.backends.mpi_exchange import MpiTrainerFollower
    from tba_hpc.backends.mpi_world import MpiWorld

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 2
"""Prompts queued in an engine beyond those it decodes, so that it never waits for the next one."""

POLL_SECONDS = 0.1
"""Pause between two looks for the last evaluation."""

_TEMPERATURE = int.from_bytes(b"warm")  # keeps this stream apart from others of the same seed

REFUSALS = (ConfigError, StateError, ShardError, DiskFullError)
"""Errors that only the user can mend; the message is a sentence that says how."""

FAULTS = (EngineError, ExchangeError, OSError)
"""Errors that another start may not meet again; the message is a sentence, too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's place: its number within the role, its first GPU, and the MPI world where there is one."""

    index: int
    gpu: int
    mpi: MpiWorld | None

    @classmethod
    def take(cls, config: Config, role: Role, index: int | None) -> Placement:
        """Join the MPI world, or sit where ``index`` says (files). Raises ConfigError, ExchangeError."""
        if config.exchange.transport == "files":
            if index is None:
                raise ConfigError("exchange.transport=files has no MPI to number the ranks: give --index")
            return cls(index, index * _gpus(config, role), None)
        from tba_hpc.backends.mpi_world import MpiWorld  # importing it starts MPI

        world = MpiWorld.join(
            role,
            trainers=config.launch.trainers,
            searchers=config.launch.searchers,
            deadline=config.exchange.deadline_seconds,
        )
        trainers = min(world.local_index, world.hosts[: world.trainers].count(world.hostname))
        gpu = trainers + (world.local_index - trainers) * config.generator.tensor_parallel
        return cls(world.index, gpu, world)


def train(run: RunDir, index: int | None) -> None:
    """Be trainer rank ``index`` (None: as MPI says) of ``run`` until it is finished or stopped.

    The leader runs the loop, exports and reports; the other ranks follow its learner. Raises
    ConfigError, ExchangeError and the like with one sentence.
    """
    config = run.config()
    with errors_reported(run, "trainer", index or 0):
        placement = Placement.take(config, "trainer", index)
    redirect_output(run, "trainer", placement.index)
    with errors_reported(run, "trainer", placement.index):
        _choose_gpus(placement.gpu, _gpus(config, "trainer"))
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
    """Restore what the last checkpoint holds, train, and leave a model, a summary and a report."""
    buffer, completed, state = (
        ReplayBuffer(config.buffer, config.run.seed),
        CompletedRequests(),
        TrainerState(),
    )
    folder = latest_checkpoint(run)
    if folder:
        state = read_state(folder)
        completed = _read_completed(folder)
        buffer.restore(read_arrays(folder / BUFFER_FILE))
        require_reference(run, config, state.step)
    discard_evaluations(run, after=state.step)
    pending = list(read_pending(run, state.cursors))
    cursors = {**state.cursors, **{shard.searcher: shard.index + 1 for shard in pending}}
    exchange = _open_trainer(run, config, placement, learner.layout, cursors)
    if folder:  # only now, since the other trainer ranks follow once they are in the exchange
        if find_evaluation(run, "test", 0) is None:  # it was cut short; these are still the first weights
            _publish_first(exchange, config, learner)
        learner.load(folder)
    metrics = _metrics(run, config, "trainer", 0)
    with StopFlag() as stop:
        trainer = Trainer(
            config,
            learner=learner,
            exchange=exchange,
            buffer=buffer,
            completed=completed,
            state=state,
            pending=pending,
            checkpoints=Checkpoints(run, config.checkpoint.keep),
            metrics=metrics,
            stop_asked=lambda: stop.is_set,
            job_end=float(os.environ.get("TBA_JOB_END", "inf")),
        )
        reached_end = trainer.run()
        if reached_end:
            learner.export(run.export)
        learner.close()
        if reached_end and not _last_evaluation_arrives(run, config, trainer):
            metrics.log({"event": "stopped", "step": config.train.steps})  # a resume has only that left to do
        exchange.close()
        summary.write_summary(run, summary.summarise(run, config))
        from tba_hpc.report.page import write_report  # matplotlib costs every start a second

        write_report(run)


def search(run: RunDir, index: int | None) -> None:
    """Be searcher rank ``index`` (None: as MPI says) of ``run`` until the trainer ends it."""
    config = run.config()
    with errors_reported(run, "searcher", index or 0):
        placement = Placement.take(config, "searcher", index)
    redirect_output(run, "searcher", placement.index)
    with errors_reported(run, "searcher", placement.index):
        _choose_gpus(placement.gpu, _gpus(config, "searcher"))
        from tba_hpc.backends.vllm_generator import VllmGenerator

        state, completed = _progress(run)
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
    quota = None if config.exchange.max_staleness is None else 0
    reference = schedules.reference(config.train, 0)
    exchange.publish(0, learner.write_weights, evaluate="test", reference=reference, quota=quota)


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


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Complete checkpoints of a run, the newest ``keep`` of them."""

    run: RunDir
    keep: int

    def save(
        self, state: TrainerState, learner: Learner, buffer: ReplayBuffer, completed: CompletedRequests
    ) -> TrainerState:
        """Write a checkpoint; then shards that no kept checkpoint needs are deleted."""
        began = time.monotonic()
        folder = begin_checkpoint(self.run, state.step)
        learner.save(folder)
        write_arrays(folder / BUFFER_FILE, buffer.state())
        write_arrays(folder / PROMPTS_FILE, {"done": completed.to_array()})
        make_durable(folder)
        state = replace(state, save_seconds=max(state.save_seconds, time.monotonic() - began))
        prune_shards(self.run, complete_checkpoint(self.run, folder, state, keep=self.keep))
        return state

    def export_reference(self, step: int, learner: Learner) -> None:
        """Write the policy of ``step`` as the next reference; those that no checkpoint needs are deleted."""
        learner.export(self.run.reference(step))
        prune_references(self.run)


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
    except (*REFUSALS, *FAULTS) as error:
        log.exception("%s ends", rank_name(role, index))
        mendable = isinstance(error, REFUSALS)
        write_note(run, role, index, str(error), "refused" if mendable else "failed")
        raise SystemExit(REFUSED if mendable else FAILED) from None


def training_requests(
    config: Config, task: Task, searcher: int, completed: CompletedRequests
) -> Iterator[Request]:
    """The prompts of one searcher, without end, in the run's order, less those done before."""
    prompts = task.prompts("train")
    order = PromptOrder(config.run.seed, len(prompts))
    section = config.generator
    for request_id in order.request_ids(searcher, config.launch.searchers, completed):
        prompt, temperature = prompts[order.prompt_at(request_id)], _temperature(config, request_id)
        sampling = Sampling(temperature, section.top_p, section.max_tokens, section.min_tokens)
        yield Request(prompt, request_id, section.completions_per_prompt, sampling)


def _temperature(config: Config, request_id: int) -> float:
    """Sampling temperature at ``request_id`` of the prompt sequence, a function of seed and request_id."""
    section = config.generator
    random = np.random.default_rng([config.run.seed, _TEMPERATURE, request_id])
    if random.random() >= section.tempered_share:
        return section.temperature
    return float(random.uniform(*section.tempered_range))


def refuse_long_prompts(task: Task, config: Config) -> None:
    """Raise ConfigError where a prompt leaves no room for its completion."""
    room = config.model.context_length - config.generator.max_tokens
    for split in ("train", "validation", "test"):
        longest = max(task.prompts(split), key=lambda prompt: len(prompt.tokens), default=None)
        if longest is not None and len(longest.tokens) > room:
            raise ConfigError(
                f"{split} prompt {longest.id} has {len(longest.tokens)} tokens, but model.context_length="
                f"{config.model.context_length} less generator.max_tokens={config.generator.max_tokens} "
                f"leaves {room}: raise the first or lower the second"
            )


def refuse_few_prompts(task: Task, config: Config) -> None:
    """Raise ConfigError where a step that must have groups of different prompts never could."""
    prompts, wanted = len(task.prompts("train")), config.train.prompts_per_step
    if config.selective and prompts < wanted:
        raise ConfigError(
            f"train.prompts_per_step={wanted} is more than the {prompts} training prompts, and with "
            "max_staleness or a reference that is reset each gives a step one group: lower it"
        )


def _progress(run: RunDir) -> tuple[TrainerState, CompletedRequests]:
    """State of the last checkpoint, and every request_id of the prompt sequence sealed so far."""
    state, completed = TrainerState(), CompletedRequests()
    if folder := latest_checkpoint(run):
        state = read_state(folder)
        completed = _read_completed(folder)
    for shard in read_pending(run, state.cursors):
        completed.add(shard.trajectories.record["request_id"])
    return state, completed


def _read_completed(folder: Path) -> CompletedRequests:
    return CompletedRequests.from_array(read_arrays(folder / PROMPTS_FILE)["done"])


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
        last_step=config.train.steps,
    )


def _last_evaluation_arrives(run: RunDir, config: Config, trainer: Trainer) -> bool:
    """Wait until every searcher's part of the last evaluation is on disk; False when asked to stop before."""
    patience, began = config.exchange.deadline_seconds, time.monotonic()
    while find_evaluation(run, "test", config.train.steps) is None:
        if trainer.stopping:
            return False
        if trainer.tend():
            began = time.monotonic()  # the others begin anew, with larger shares
        if time.monotonic() - began > patience:
            raise ExchangeError(
                f"the last evaluation is incomplete after {patience:g} s: see which "
                f"searcher's part is missing in {run.evaluations}, and its log; the model is in {run.export}"
            )
        time.sleep(POLL_SECONDS)
    return True


def _rendezvous(run: RunDir) -> Path:
    """The folder where the trainer ranks of this attempt meet."""
    folder = run.attempt / "rendezvous"
    folder.mkdir(exist_ok=True)
    return folder


def _metrics(run: RunDir, config: Config, role: Role, index: int) -> MetricsWriter:
    events = run.metrics / "tensorboard" / rank_name(role, index) if config.metrics.tensorboard else None
    return MetricsWriter(run.metrics_file(role, index), tensorboard=events)


def _gpus(config: Config, role: Role) -> int:
    """GPUs of a rank."""
    return config.generator.tensor_parallel if role == "searcher" else 1


def _choose_gpus(first: int, wanted: int) -> None:
    """Of the GPUs that all ranks of a node see, take ``wanted``; a launcher may have chosen already."""
    import torch

    if (count := torch.cuda.device_count()) > wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        mine = [visible[number % count] for number in range(first, first + wanted)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _seed(config: Config, searcher: int, revision: int) -> int:
    """The engine's seed: another one for each searcher and after each resume."""
    return int(np.random.SeedSequence([config.run.seed, searcher, revision]).generate_state(1)[0] >> 1)
