"""The composition root: builds what a rank needs from the frozen config, then runs its loop.

The only module that sees both loops and the backends. A rank is started by ``tba train RUN`` or
``tba search RUN``; vllm and deepspeed are imported by the role that needs them, after the world is checked.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_hpc.config import FIRST_ELASTIC, Config, ConfigError
from tba_hpc.core import schedules
from tba_hpc.core.buffer import Embed, ReplayBuffer
from tba_hpc.core.own_code import find_function, is_own
from tba_hpc.core.ports import (
    Backend,
    EngineError,
    ExchangeError,
    Generator,
    Learner,
    Reference,
    SearcherExchange,
    SharedLearner,
    Task,
    Tokenizer,
    TrainerExchange,
    Victim,
)
from tba_hpc.core.prompts import (
    CompletedRequests,
    Progress,
    refuse_few_prompts,
    refuse_long_prompts,
    training_requests,
)
from tba_hpc.core.types import Publication, Ragged, Request, Role, Shard, Split, WeightLayout
from tba_hpc.core.wording import printable
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange, FileTrainerFollower
from tba_hpc.exchange.hdf5_shards import (
    EVERYBODY,
    PendingShards,
    ShardError,
    ShardWriter,
    read_arrays,
    seal_interval,
    with_image,
    write_arrays,
)
from tba_hpc.exchange.hybrid_exchange import HybridTrainerExchange
from tba_hpc.exchange.replay_exchange import Recording, ReplayExchange
from tba_hpc.launch.placement import Placement, refuse_index
from tba_hpc.learner.behaviour_reference import BehaviourReference
from tba_hpc.learner.deferred_reference import DeferredReference
from tba_hpc.loops.elastic import Attendance, Visit, comes_by_itself, leased_place, leaving_at_once
from tba_hpc.loops.ending import end_run
from tba_hpc.loops.merger import merge_pending
from tba_hpc.loops.online_evaluation import OnlineEvaluator
from tba_hpc.loops.scorer import Scorer
from tba_hpc.loops.searcher import Searcher
from tba_hpc.loops.trainer import Trainer
from tba_hpc.report.digest import KeptDigest, SearcherDigest, TrainerDigest
from tba_hpc.report.track.beside import tracked
from tba_hpc.run import modules
from tba_hpc.run.beside import beside
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
from tba_hpc.run.directory import ATTEMPT, RunDir, ShardKey
from tba_hpc.run.evaluations import (
    Evaluation,
    discard_evaluations,
    find_evaluation,
    read_part,
    write_evaluation,
)
from tba_hpc.run.files import DiskFullError, insist
from tba_hpc.run.inventory import COMPLETE, damage
from tba_hpc.run.metrics import MetricsWriter, Value, record_seconds
from tba_hpc.run.notes import FAILED, REFUSED, note_at_work, rank_name, redirect_output, write_note
from tba_hpc.run.owners import owned
from tba_hpc.run.signals import StopFlag
from tba_hpc.tasks import load_task

if TYPE_CHECKING:
    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerFollower

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 2
"""Prompts queued in an engine beyond those it decodes, so that it never waits for the next one."""

KEPT_ANSWERS = 4
"""Prompts of each split whose answers are kept as text at every evaluation, for the report."""

EMBEDDED_AT_ONCE = 64
"""Completions per forward pass of the model that tells near duplicates apart."""

PRUNING_SECONDS = 10.0
"""Longest wait for shards that are still to be deleted when all else is done."""

REFUSALS = (ConfigError, StateError, ShardError, DiskFullError)
"""Errors that only the user can mend; the message is a sentence that says how."""

FAILURES = (EngineError, ExchangeError, OSError)
"""Errors that another start may not meet again; the message is a sentence, too."""


@dataclass(frozen=True, slots=True)
class HfBackend:
    """A Hugging Face model, trained by DeepSpeed and sampled by vLLM; each is imported when it is needed."""

    config: Config

    def tokenizer(self) -> Tokenizer:
        """That of the model's folder. Raises ConfigError."""
        from tba_hpc.learner.hf_model import load_tokenizer

        return load_tokenizer(self.config.model.path)

    def generator(self, *, seed: int) -> Generator:
        """On an engine of its own, which is still being built on return."""
        from tba_hpc.engine.vllm_generator import VllmGenerator

        launch = self.config.launch
        return VllmGenerator(
            self.config.model,
            self.config.generator,
            seed=seed,
            start_seconds=launch.start_seconds,
            silence_seconds=launch.silence_seconds,
        )

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """The model itself. Raises ConfigError."""
        from tba_hpc.learner.hf_reference import load_reference

        return load_reference(self.config, folder_of)

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """A rank of the group that meets in ``store``. Raises ConfigError, ExchangeError."""
        from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner

        return DeepSpeedLearner.create(
            self.config,
            rank=rank,
            ranks=ranks,
            store=store,
            references=folder_of,
            deadline=self.config.launch.timeout_seconds,
            start_deadline=self.config.launch.start_seconds,
        )


def make_backend(run: RunDir, config: Config) -> Backend:
    """What ``model.path`` stands for. Raises ConfigError where a class of the user's own is not found."""
    modules.use(run.modules)
    path = config.model.path
    if not is_own(path):
        return HfBackend(config)
    backend: Backend = find_function(f"model.path={path}", path)(config)
    return backend


def _serve(*arguments: Any, seed: int, **keywords: Any) -> Victim:
    """A ports.Serve by vLLM, imported for tasks that ask for it."""
    from tba_hpc.engine.vllm_victim import VllmVictim

    return VllmVictim(*arguments, seed=seed, **keywords)


def train(run: RunDir, index: int | None) -> None:
    """Be trainer rank ``index`` (None: as MPI says) of ``run`` until it is finished or stopped.

    The leader runs the loop, exports and reports; the other ranks follow its learner. Raises
    ConfigError, ExchangeError and the like with one sentence.
    """
    with _placed(run, "trainer", index) as (config, placement):
        # While libraries and model are loaded: summing up files leaves the interpreter to others.
        verified = beside(partial(verify_checkpoints, run, config)) if placement.index == 0 else None
        learner = make_backend(run, config).learner(
            rank=placement.index,
            ranks=config.launch.trainers,
            store=_rendezvous(run),
            folder_of=run.reference,
        )
        if verified:
            verified.result()
            with tracked(run, config):
                _lead(run, config, placement, learner)
        else:
            with _led():
                follower = _open_follower(run, placement, learner.layout)
                learner.follow(follower.slot)
                follower.close()


def _lead(run: RunDir, config: Config, placement: Placement, learner: Learner) -> None:
    """Restore what the last checkpoint holds, train, and bring the run to its end."""
    _end_imports()
    folder, saved, completed, buffer = _restore(run, config)
    metrics = _metrics(run, "trainer", 0)
    state = merge_pending(
        config,
        _pending_shards(run, config).read_all(saved.cursors),
        state=saved,
        buffer=buffer,
        completed=completed,
        metrics=metrics,
    )
    progress = Progress(completed, state.cursors)
    exchange = _open_trainer(run, config, placement, learner.layout, progress)
    note_at_work(run)
    if folder:  # only now, since the other trainer ranks follow once they are in the exchange
        if find_evaluation(run, "test", 0) is None:  # it was cut short; these are still the first weights
            _publish_first(exchange, config, learner)
        learner.load(folder)
    checkpoints = Checkpoints(
        run,
        config.checkpoint.keep,
        write_arrays,
        beside=config.checkpoint.snapshot is not None,
        kept_share=config.exchange.keep_shards,
        kept_mb=config.exchange.kept_mb,
    )
    with StopFlag() as stop:
        trainer = Trainer(
            config,
            learner=learner,
            exchange=exchange,
            buffer=buffer,
            completed=completed,
            state=state,
            saved=saved,
            checkpoints=checkpoints,
            metrics=metrics,
            stop_asked=lambda: stop.is_set,
            job_end=float(os.environ.get("TBA_JOB_END", "inf")),
        )
        finished = trainer.run()
        end_run(run, config, finished=finished, trainer=trainer, learner=learner, exchange=exchange)
    checkpoints.pruner.finish(PRUNING_SECONDS)


def replay(
    run: RunDir,
    config: Config,
    recording: Recording,
    read: Callable[[ShardKey], Shard],
    learner: Learner | None = None,
) -> bool:
    """Train in this process on recorded shards, from the newest checkpoint on; whether to the last step.

    learner: one of its own; None: DeepSpeed's, of one rank. Where the shards are used up before, the model is
    exported as it is.
    """
    verify_checkpoints(run, config)
    learner = learner or _learner_alone(run, config)
    folder, saved, completed, buffer = _restore(run, config)
    metrics = _metrics(run, "trainer", 0)
    state = merge_pending(config, (), state=saved, buffer=buffer, completed=completed, metrics=metrics)
    if folder:
        learner.load(folder)
    exchange = ReplayExchange(recording, read, state.cursors)
    with StopFlag() as stop:
        trainer = Trainer(
            config,
            learner=learner,
            exchange=exchange,
            buffer=buffer,
            completed=completed,
            state=state,
            saved=saved,
            checkpoints=Checkpoints(run, config.checkpoint.keep, write_arrays),
            metrics=metrics,
            stop_asked=lambda: stop.is_set,
        )
        exchange.step = lambda: trainer.step
        finished = trainer.run()
        if exchange.stop_requested:
            log.warning("the recorded shards are used up: the replay ends at step %d", trainer.step)
        trainer.log_event("finished" if finished else "stopped")
        if not stop.is_set:
            learner.export(run.export)
    learner.close()
    metrics.close()
    if finished:
        run.mark_finished()
    return finished


def _learner_alone(run: RunDir, config: Config) -> Learner:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as ranks have it: sums of several threads are others
    backend = make_backend(run, config)
    return backend.learner(rank=0, ranks=1, store=_rendezvous(run), folder_of=run.reference)


def verify_checkpoints(run: RunDir, config: Config) -> None:
    """Set aside the checkpoints that are damaged, down to the newest whole one, which is the latest then.

    Raises StateError where there were checkpoints and none is whole; all stay as they are then.
    """
    for folder, fault in damaged_checkpoints(run).items():
        metrics, step = _metrics(run, "trainer", 0), int(folder.stem.removeprefix("step-"))
        # First: a rank that dies between the two tells it twice, not never.
        metrics.log({"event": "damaged", "step": step, "checkpoint": folder.name, "fault": fault})
        metrics.close()
        log.warning("%s is damaged (%s): set aside as %s", folder, fault, set_aside(folder))


def _restore(
    run: RunDir, config: Config
) -> tuple[Path | None, TrainerState, CompletedRequests, ReplayBuffer]:
    """The newest checkpoint, if there is one, and what the trainer goes on from. Raises StateError."""
    folder = latest_checkpoint(run)
    buffer = ReplayBuffer(
        config.buffer, config.run.seed, value_beta=config.train.value_beta, embed=make_embed(config)
    )
    state, completed = TrainerState(), CompletedRequests()
    if folder:
        state = read_state(folder)
        completed = CompletedRequests.from_array(read_arrays(folder / PROMPTS_FILE)["done"])
        buffer.restore(read_arrays(folder / BUFFER_FILE))
        require_reference(run, config, state.step)
    discard_evaluations(run, after=state.step)
    return folder, state, completed, buffer


def make_embed(config: Config) -> Embed | None:
    """What embeds completions for the buffer, where near duplicates are told by that. Raises ConfigError."""
    if (encoder := config.buffer.embedding_model) is None:
        return None
    from tba_hpc.learner.hf_model import load_tokenizer
    from tba_hpc.tasks.embedder import Embedder

    embedder = Embedder(encoder, batch=EMBEDDED_AT_ONCE, key="buffer.duplicates.model")
    decode = load_tokenizer(config.model.path).decode

    def embed(completions: Ragged) -> np.ndarray:
        return embedder([decode(completions.row(i)).strip() for i in range(len(completions))])

    return embed


def search(run: RunDir, index: int | None) -> None:
    """Be searcher rank ``index`` (None: as MPI says) of ``run`` until the trainer ends it.

    Without index, MPI or launcher: one that comes and goes. Raises NoPlaceError where there is none for it.
    """
    config = run.config()
    if comes_by_itself(config, index):
        _search_for_a_while(run, config)
        return
    with _placed(run, "searcher", index) as (config, placement):
        parts = SearchParts.make(
            run, config, placement.index, seed=_seed(config, placement.index, run.attempt_number)
        )
        with _led() as stop:
            exchange = _open_searcher(run, config, placement)
            progress = _join(run, config, placement.index, exchange)
            parts.searcher(
                exchange,
                progress,
                requests=training_requests(config, parts.task, placement.index, progress.completed),
                evaluator=_online_evaluator(run, config, parts.task, placement.index, decode=parts.decode),
                report=partial(_report, run, config),
                stop_asked=lambda: stop.is_set,
            ).run()
            parts.generator.close()


def _search_for_a_while(run: RunDir, config: Config) -> None:
    """Come, search until told to go or the run is finished, and go; whatever happens concerns nobody else."""
    if run.finished:
        log.info("%s is finished: there is nothing to search for", run.path)
        return
    with leaving_at_once(), leased_place(run, config) as place, _errors_told():
        log.info("place %d of %s is ours", place.searcher, run.path)
        Placement.alone(config, place.searcher).choose_gpus()
        seed = _seed(config, place.searcher, place.lease)  # there may have been no attempt yet
        _stay(SearchParts.make(run, config, place.searcher, seed=seed))


def _stay(parts: SearchParts) -> None:
    """Search in a place that is held, until told to go, or the run is finished."""
    run, config, metrics = parts.run, parts.config, parts.metrics
    with (
        _led() as stop,
        Visit(run, config, parts.index, metrics=metrics, told=lambda: stop.is_set) as visit,
    ):
        progress = _join(run, config, parts.index, visit.exchange)
        parts.searcher(
            visit.exchange,
            progress,
            requests=visit.requests(parts.task, progress),
            evaluator=_online_evaluator(run, config, parts.task, decode=parts.decode),
            report=visit.report(partial(_report, run, config)),
            stop_asked=lambda: stop.is_set,
        ).run()
        log.info("leaving: %s", visit.why)
    parts.generator.close()


@dataclass(frozen=True, slots=True)
class SearchParts:
    """What a searcher works with, whoever it hands its shards to."""

    run: RunDir
    config: Config
    index: int
    generator: Generator
    task: Task
    metrics: MetricsWriter
    reference: Reference
    decode: Callable[[np.ndarray], str] | None = None

    @classmethod
    def make(cls, run: RunDir, config: Config, index: int, *, seed: int) -> SearchParts:
        """Load models and task. Raises ConfigError."""
        backend = make_backend(run, config)
        # First of all, since its process builds the engine while this one imports torch.
        generator = backend.generator(seed=seed)
        task = load_task(config.task, backend.tokenizer(), partial(_serve, seed=seed))
        refuse_long_prompts(task, config)
        refuse_few_prompts(task, config)
        metrics = _metrics(run, "searcher", index)
        metrics.log(started(config, index))
        decode = backend.tokenizer().decode  # the task's own is in use in another thread
        reference = _load_reference(run, config, backend)
        return cls(run, config, index, generator, task, metrics, reference, decode)

    def searcher(
        self,
        exchange: SearcherExchange,
        progress: Progress,
        *,
        requests: Iterator[Request],
        evaluator: OnlineEvaluator,
        report: Callable[[int, int, Evaluation], None],
        stop_asked: Callable[[], bool],
    ) -> Searcher:
        """The loop, ready to run."""
        section, run, config = self.config.generator, self.run, self.config
        return Searcher(
            generator=self.generator,
            scorer=Scorer(
                self.task,
                self.reference,
                _shard_writer(run, config, self.index, progress),
                seal_seconds=seal_interval(config),
                temperature=section.temperature,
            ),
            requests=requests,
            evaluator=evaluator,
            report=report,
            exchange=exchange,
            metrics=self.metrics,
            stop_asked=stop_asked,
            sequences=(section.prompts_in_flight + PROMPTS_AHEAD) * section.completions_per_prompt,
            log_seconds=record_seconds(config.launch.places),
        )


def started(config: Config, searcher: int) -> dict[str, Value]:
    """The event of a searcher's start: among how many the requests are shared out, and its place there."""
    place = config.launch.place_of(searcher)
    own = {"place": place} if place != searcher else {}
    return {"event": "started", "searchers": config.launch.places, **own}


def _join(
    run: RunDir, config: Config, index: int, exchange: FileSearcherExchange | MpiSearcherExchange
) -> Progress:
    """How far the run is, as the trainer says; and what it has not seen yet of this searcher's own shards."""
    progress = exchange.progress()
    if exchange.closed:  # perhaps before it was told; what it would look for may be merged and gone
        return progress
    first = progress.cursors.get(index, 0)
    for shard in _pending_shards(run, config).read_all({index: first}, [index]):
        progress.completed.add(shard.trajectories.record["request_id"])
        exchange.offer(with_image(shard))
    return progress


def _shard_writer(run: RunDir, config: Config, index: int, progress: Progress) -> ShardWriter:
    first, patience = progress.cursors.get(index, 0), config.launch.disk_seconds
    return ShardWriter(run, index, first_index=first, patience=patience)


def _report(run: RunDir, config: Config, searcher: int, searchers: int, part: Evaluation) -> None:
    """Publish a part of an evaluation, as soon as there is room on the disk."""
    patience = config.launch.disk_seconds
    insist(lambda: write_evaluation(run, searcher, searchers, part), seconds=patience)


def _pending_shards(run: RunDir, config: Config, among: range = EVERYBODY) -> PendingShards:
    """Those of the searchers of such numbers."""
    expected = [*range(config.launch.searchers), *config.launch.elastic_searchers]
    return PendingShards(run, searchers=expected, patience=config.launch.timeout_seconds, among=among)


def _load_reference(run: RunDir, config: Config, backend: Backend) -> Reference:
    """The reference that a run begins with; a resume gets the one in force with its first weights."""
    if not config.train.reference.scored:
        return BehaviourReference()
    if config.train.trainer_has_reference:
        return DeferredReference()
    return backend.reference(run.reference)


def require_reference(run: RunDir, config: Config, step: int) -> None:
    """Raise StateError where the reference that a resume at ``step`` needs is gone or damaged."""
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
    run: RunDir,
    config: Config,
    placement: Placement,
    layout: WeightLayout,
    progress: Progress,
) -> TrainerExchange:
    def evaluated(split: Split, step: int) -> bool:
        return find_evaluation(run, split, step) is not None

    def board(among: range) -> FileTrainerExchange:
        return FileTrainerExchange(
            run.weights,
            layout,
            read_pending=_pending_shards(run, config, among).read,
            progress=progress,
            evaluated=evaluated,
            patience=config.launch.disk_seconds,
            several=config.launch.trainers > 1 and placement.mpi is None,
            delta=_may_send_delta(config, layout),
        )

    if placement.mpi is None:
        return board(EVERYBODY)
    from tba_hpc.exchange.mpi_exchange import MpiTrainerExchange
    from tba_hpc.exchange.mpi_world import BUCKET_MB

    world = MpiTrainerExchange.open(
        placement.mpi,
        layout,
        bucket_mb=BUCKET_MB,
        delta=config.exchange.delta,
        progress=progress,
    )
    if not config.launch.elastic:
        return world
    elastic = board(range(FIRST_ELASTIC, EVERYBODY.stop))
    return HybridTrainerExchange(world, elastic, visited=Attendance(run, config))


def _may_send_delta(config: Config, layout: WeightLayout) -> bool:
    """Whether files may hold what has changed; of float32 weights all but everything has."""
    alone = config.launch.trainers == 1 or config.one_world
    worth = config.exchange.delta == "always" or all(slot.dtype != "F32" for slot in layout.slots)
    return alone and worth and config.exchange.delta != "never"


def _open_follower(
    run: RunDir, placement: Placement, layout: WeightLayout
) -> MpiTrainerFollower | FileTrainerFollower:
    if placement.mpi is None:
        return FileTrainerFollower(run.weights, layout)
    from tba_hpc.exchange.mpi_exchange import MpiTrainerFollower

    return MpiTrainerFollower.open(placement.mpi)


def _open_searcher(
    run: RunDir, config: Config, placement: Placement
) -> FileSearcherExchange | MpiSearcherExchange:
    if placement.mpi:
        from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange

        return MpiSearcherExchange.open(placement.mpi)
    return FileSearcherExchange(
        run.weights,
        placement.index,
        deadline=config.launch.timeout_seconds,
        start_deadline=config.launch.start_seconds,
    )


@contextmanager
def _placed(run: RunDir, role: Role, index: int | None) -> Iterator[tuple[Config, Placement]]:
    """A rank in its place, with its own log and GPUs; an error ends it with a note for the launcher.

    None of a rank that is one too many or that no launcher has started: log and notes are those of the ranks
    at work.
    """
    config = run.config()
    refuse_index(config, role, index)
    with errors_reported(run, role, index or 0) if ATTEMPT in os.environ else nullcontext():
        placement = Placement.join(config, role, index)
    with owned(run, rank_name(role, placement.index)):
        redirect_output(run, role, placement.index)
        with errors_reported(run, role, placement.index):
            placement.choose_gpus()
            yield config, placement


def _end_imports() -> None:
    """Garbage is looked for again, and among what comes from here on alone; see ``cli``."""
    gc.freeze()
    gc.enable()


@contextmanager
def _led() -> Iterator[StopFlag]:
    """While the leader may take steps it alone ends the run; this rank leaves when let go.

    Whoever is missing after a request to stop was still starting, and had nothing to save.
    """
    _end_imports()
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


@contextmanager
def _errors_told() -> Iterator[None]:
    """Tell an error by its sentence; no note is left, which would be one of the ranks at work."""
    try:
        yield
    except (*REFUSALS, *FAILURES) as error:
        mendable = isinstance(error, REFUSALS)
        if not mendable:
            log.exception("this searcher ends")
        print(f"tba: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(REFUSED if mendable else FAILED) from None


def _online_evaluator(
    run: RunDir,
    config: Config,
    task: Task,
    searcher: int | None = None,
    *,
    decode: Callable[[np.ndarray], str] | None = None,
) -> OnlineEvaluator:
    """searcher: the place among those that evaluate together; None: this one evaluates alone."""
    return OnlineEvaluator(
        task,
        searcher=searcher or 0,
        searchers=1 if searcher is None else config.launch.searchers,
        max_tokens=config.generator.max_tokens,
        limits={
            "validation": config.evaluate.validation_prompts,
            "test": config.evaluate.test_prompts,
        },
        done=partial(read_part, run),
        decode=decode,
        kept=KEPT_ANSWERS,
    )


def _rendezvous(run: RunDir) -> Path:
    """The folder where the trainer ranks of this attempt meet."""
    folder = run.attempt / "rendezvous"
    folder.mkdir(exist_ok=True)
    return folder


def _metrics(run: RunDir, role: Role, index: int) -> MetricsWriter:
    path = run.metrics_file(role, index)
    digest = (
        KeptDigest(path, TrainerDigest()) if role == "trainer" else KeptDigest(path, SearcherDigest(index))
    )
    return MetricsWriter(path, digest=digest)


def _seed(config: Config, searcher: int, *more: int) -> int:
    """The engine's seed: another one for each searcher, and in each attempt, or of each holder of a place."""
    return int(np.random.SeedSequence([config.run.seed, searcher, *more]).generate_state(1)[0] >> 1)
