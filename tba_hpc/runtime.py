"""Builds what a rank needs from the frozen config, and runs its loop.

No other module imports both the roles' loops and the code that trains and samples. A rank is started by
``tba train RUN`` or ``tba search RUN``. vllm and deepspeed are imported only by the role that needs them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from tba_hpc.config import FIRST_ELASTIC, Config
from tba_hpc.core import schedules
from tba_hpc.core.hub_files import find_file
from tba_hpc.core.ports import (
    Generator,
    Learner,
    Reference,
    SearcherExchange,
    SharedLearner,
    Task,
    TrainerExchange,
    Victim,
    decoder,
)
from tba_hpc.core.prompts import (
    Progress,
    prompt_room,
    refuse_few_prompts,
    refuse_long_prompts,
    training_requests,
)
from tba_hpc.core.types import Publication, Request, Split, WeightLayout
from tba_hpc.engine.hf_backend import make_backend
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import (
    EVERYBODY,
    PendingShards,
    ShardWriter,
    seal_interval,
    with_image,
    write_arrays,
)
from tba_hpc.exchange.hybrid_exchange import HybridTrainerExchange
from tba_hpc.launch.placement import Placement
from tba_hpc.launch.rank import as_rank, end_imports, explained, stoppable
from tba_hpc.loops.elastic import (
    ElasticSearchers,
    ElasticStay,
    Slot,
    has_no_launcher,
    leased_slot,
    leaving_at_once,
)
from tba_hpc.loops.ending import end_run
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import merge_pending
from tba_hpc.loops.online_evaluation import OnlineEvaluator
from tba_hpc.loops.restoring import restore, trainer_metrics, verify_checkpoints
from tba_hpc.loops.scorer import Scorer
from tba_hpc.loops.searcher import Searcher
from tba_hpc.loops.trainer import Trainer
from tba_hpc.report.digest import KeptDigest, SearcherDigest
from tba_hpc.report.track.follow import tracked
from tba_hpc.run.background import in_background
from tba_hpc.run.bounded_output import bound_output
from tba_hpc.run.checkpoints import Checkpoints
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, find_evaluation, read_part, write_evaluation
from tba_hpc.run.files import retry
from tba_hpc.run.inputs import require_same_model, require_same_prompts
from tba_hpc.run.metrics import MetricsWriter, Value, record_seconds
from tba_hpc.run.notes import note_at_work
from tba_hpc.run.signals import StopFlag
from tba_hpc.run.stacks import watched, watched_inside, write_stacks_to_log
from tba_hpc.run.underway import Underway
from tba_hpc.tasks import load_task

if TYPE_CHECKING:
    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 2
"""Number of prompts queued in an engine beyond those that it decodes, so that it never waits for a prompt."""

KEPT_ANSWERS = 4
"""Number of prompts of each split whose answers evaluations keep as text, for the report."""

PRUNING_SECONDS = 10.0
"""Longest wait, at the end of a run, for the deletion of shards that no checkpoint needs."""


# --- The trainer ---


def train(run: RunDir, index: int | None) -> None:
    """Run a trainer rank of ``run`` until the run is finished or stopped.

    index: number of the rank among the trainers; None: the number that MPI or srun gives it. Rank 0 leads: it
    runs the loop, exports the model and writes the report. The others follow its learner. Raises ConfigError,
    ExchangeError and similar errors with a one-sentence message.
    """
    with as_rank(run, "trainer", index) as (config, placement):
        # Checkpoints are verified in a thread while libraries and the model are loaded: checksums release
        # Python's lock.
        verified = in_background(partial(verify_checkpoints, run)) if placement.index == 0 else None
        learner = make_learner(run, config, placement.index, config.launch.trainers)
        if verified:
            verified.result()
            with tracked(run, config):
                _lead(run, config, placement, learner)
        else:
            with stoppable():
                _follow(placement, learner)


def make_learner(run: RunDir, config: Config, rank: int, ranks: int) -> SharedLearner:
    """Build the learner of trainer ``rank`` of ``ranks``, which meet in a folder of this attempt."""
    folder = run.attempt / "rendezvous"
    folder.mkdir(exist_ok=True)
    return make_backend(run, config).learner(rank=rank, ranks=ranks, store=folder, folder_of=run.reference)


def _lead(run: RunDir, config: Config, placement: Placement, learner: Learner) -> None:
    """Restore the newest checkpoint, train, and end the run, as the leading trainer."""
    end_imports()
    elastic = ElasticSearchers(run, config)
    open_exchange = partial(_open_trainer, run, config, placement, learner.layout, elastic)
    with leading(run, config, learner, open_exchange, elastic_leases=elastic.ready) as trainer:
        finished = trainer.run()
        end_run(run, config, trainer, finished=finished)


@contextmanager
def leading(
    run: RunDir,
    config: Config,
    learner: Learner,
    open_exchange: Callable[[Progress], TrainerExchange],
    *,
    freshness: type[Freshness] = Freshness,
    elastic_leases: Callable[[], dict[int, int]] = dict,
) -> Iterator[Trainer]:
    """Yield a trainer that continues from the newest checkpoint, as a context manager.

    Within its block, signals ask the trainer to stop.

    open_exchange: function that opens the trainer's end of an exchange, given the run's progress. freshness:
    class that decides which data are too old, and what a step waits for. elastic_leases: function that
    returns, for each elastic searcher that has loaded weights, the number of its lease, by which it takes
    part.
    """
    saved, metrics = restore(run, config), trainer_metrics(run)
    pending = _pending_shards(run, config).read_all(saved.state.cursors)
    state = merge_pending(config, pending, saved, metrics)
    exchange = open_exchange(Progress(saved.completed, state.cursors))
    if saved.folder:  # loaded only now, since the other trainer ranks follow once they are in the exchange
        if find_evaluation(run, "test", 0) is None:  # was interrupted; the learner still has initial weights
            _publish_first(exchange, config, learner)
        learner.load(saved.folder)
    checkpoints = Checkpoints(
        run,
        config.checkpoint.keep,
        write_arrays,
        kept_share=config.exchange.keep_shards,
    )
    with StopFlag() as stop, watched_inside():
        note_at_work(run)
        yield Trainer(
            config,
            learner=learner,
            exchange=exchange,
            buffer=saved.buffer,
            freshness=freshness(config, saved.buffer),
            completed=saved.completed,
            state=state,
            saved=saved.state,
            checkpoints=checkpoints,
            metrics=metrics,
            stop_asked=watched(lambda: stop.is_set, config.launch.stack_seconds),
            elastic_leases=elastic_leases,
            job_end=float(os.environ.get("TBA_JOB_END", "inf")),
        )
    checkpoints.finish_pruning(PRUNING_SECONDS)


def _publish_first(exchange: TrainerExchange, config: Config, learner: Learner) -> None:
    """Publish the initial weights for the first evaluation.

    If staleness is bounded, searchers may not begin training requests yet.
    """
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
    elastic: ElasticSearchers,
    progress: Progress,
) -> TrainerExchange:
    """Open the exchange over MPI, over files, or both if elastic searchers may join an MPI world."""

    def evaluated(split: Split, step: int) -> bool:
        return find_evaluation(run, split, step) is not None

    def over_files(among: range) -> FileTrainerExchange:
        return FileTrainerExchange(
            run.weights,
            layout,
            attempt=run.attempt.name,
            read_pending=elastic.reading(_pending_shards(run, config, among).read),
            progress=progress,
            evaluated=evaluated,
            timeout=config.launch.disk_seconds,
        )

    if placement.mpi is None:
        return over_files(EVERYBODY)
    from tba_hpc.exchange.mpi_exchange import MpiTrainerExchange

    world = MpiTrainerExchange(placement.mpi, layout, progress=progress)
    if not config.launch.elastic:
        return world
    files = over_files(range(FIRST_ELASTIC, EVERYBODY.stop))
    return HybridTrainerExchange(world, files, has_elastic=elastic.anybody)


def _follow(placement: Placement, learner: SharedLearner) -> None:
    """Follow the leading trainer's learner, as another trainer rank.

    Over MPI each trainer rank writes weights into its node's memory; over files only the leader writes them.
    """
    if placement.mpi is None:
        learner.follow(None)
        return
    from tba_hpc.exchange.mpi_exchange import MpiTrainerFollower

    follower = MpiTrainerFollower(placement.mpi)
    learner.follow(follower.next_weights)
    follower.close()  # not after an error: it waits for the leader, which may be gone


# --- Searchers ---


def search(run: RunDir, index: int | None) -> None:
    """Run a searcher of ``run`` until the trainer ends the run.

    index: number of the searcher; None: the number that MPI or srun gives it. If the run has slots, a
    searcher without an index that no launcher has started is elastic: it takes a free slot, and may leave
    earlier. Raises NoSlotError if no slot is free, and ConfigError, ExchangeError and similar errors.
    """
    config = run.config()
    bound_output()
    if has_no_launcher(config, index):
        _search_for_a_while(run, config)
        return
    with as_rank(run, "searcher", index) as (config, placement):
        seed = _seed(config, placement.index, run.attempt_number)
        parts = SearchParts.make(run, config, placement.index, seed=seed)
        with stoppable() as stop:
            exchange = _open_searcher(run, config, placement)
            progress = _join(run, config, placement.index, exchange)
            requests = training_requests(config, parts.task, placement.index, progress.completed)
            place = placement.index, config.launch.searchers
            parts.searcher(exchange, progress, requests, stop, place=place).run()
            parts.generator.close()


def _search_for_a_while(run: RunDir, config: Config) -> None:
    """Run an elastic searcher until it is asked to leave or the run is finished. Raises NoSlotError."""
    if run.finished:
        log.info("%s is finished: no searcher is needed", run.path)
        return
    write_stacks_to_log()
    with leaving_at_once(), leased_slot(run, config) as slot, explained():
        log.info("searcher %d, in slot %d of %s", slot.searcher, slot.searcher - FIRST_ELASTIC, run.path)
        Placement.alone(config, slot.searcher).choose_gpus()
        seed = _seed(config, slot.searcher, slot.lease)  # not of the attempt, since there may be none yet
        _stay(SearchParts.make(run, config, slot.searcher, seed=seed), slot)


def _stay(parts: SearchParts, slot: Slot) -> None:
    """Run an elastic searcher's loop in its slot until it is asked to leave or the run is finished."""
    run, config, metrics = parts.run, parts.config, parts.metrics
    with (
        stoppable() as stop,
        ElasticStay(run, config, slot, metrics=metrics, stop_asked=lambda: stop.is_set) as stay,
    ):
        progress = _join(run, config, parts.index, stay.exchange)
        parts.searcher(
            stay.exchange,
            progress,
            stay.requests(parts.task, progress),
            stop,
            wanted=stay.exchange.still_wants,
            weights_in_use=stay.note_ready,
        ).run()
        log.info("leaving: %s", stay.why)
    parts.generator.close()


@dataclass(frozen=True, slots=True)
class SearchParts:
    """Parts of a searcher that do not depend on its exchange.

    reference: model that gives log π_ref; None if searchers hold none. underway: file that says which call of
    the task's code is in progress. decode: function that makes text of tokens, for answers that are kept.
    """

    run: RunDir
    config: Config
    index: int
    generator: Generator
    task: Task
    metrics: MetricsWriter
    reference: Reference | None
    underway: Underway
    decode: Callable[[np.ndarray], str] | None = None

    @classmethod
    def make(cls, run: RunDir, config: Config, index: int, *, seed: int) -> SearchParts:
        """Load the models and the task of searcher ``index``. seed: the engine's seed. Raises ConfigError."""
        if file := find_file(config.model.path, "config.json", os.environ):
            require_same_model(run, config.model.path, file.parent)
        underway = Underway(run, index)
        backend = make_backend(run, config)
        # The generator comes first: its process builds the engine while this process imports torch.
        generator = backend.generator(seed=seed)
        metrics = _metrics(run, index)
        metrics.log(started(config, index))
        if stage := getattr(generator, "stage", ""):  # the searcher's loop logs later stages
            metrics.log({"event": "engine", "stage": stage})
        serve = partial(_serve, seed=seed)
        task = load_task(config.task, backend.tokenizer(), serve, room=prompt_room(config))
        refuse_long_prompts(task, config)
        refuse_few_prompts(task, config)
        tokenizer = backend.tokenizer()  # another one, since the task uses its tokenizer in another thread
        decode = decoder(tokenizer, special=config.task.special_tokens)
        prompts = {split: task.prompts(split) for split in get_args(Split)}
        require_same_prompts(run, prompts)
        generator = task.converse(generator, tokenizer)
        # This is the initial reference. After a resume the first weights say which one to load instead.
        reference = backend.reference(run.reference) if config.train.searcher_has_reference else None
        return cls(run, config, index, generator, task, metrics, reference, underway, decode)

    def searcher(
        self,
        exchange: SearcherExchange,
        progress: Progress,
        requests: Iterator[Request],
        stop: StopFlag,
        *,
        place: tuple[int, int] = (0, 1),
        wanted: Callable[[Split, int], bool] = lambda split, step: True,
        weights_in_use: Callable[[], None] = lambda: None,
    ) -> Searcher:
        """Build the searcher's loop, ready to run.

        exchange: the searcher's end of the exchange. progress: the run's progress, as the trainer reports it.
        requests: training requests in order. stop: flag that asks the loop to stop. place: index of this
        searcher among those that share evaluations, and their number. wanted: function that returns whether
        the result of a split at a step is still needed. weights_in_use: function that is called each time the
        engine has loaded weights.
        """
        run, config, section = self.run, self.config, self.config.generator
        first_index, patience = progress.cursors.get(self.index, 0), config.launch.disk_seconds

        def report(part: Evaluation) -> None:
            if wanted(part.split, part.step):
                retry(lambda: write_evaluation(run, *place, part), seconds=patience)

        return Searcher(
            generator=self.generator,
            scorer=Scorer(
                self.task,
                self.reference,
                ShardWriter(run, self.index, first_index=first_index, timeout=patience),
                seal_seconds=seal_interval(config),
                temperature=section.temperature,
                call_seconds=config.launch.silence_seconds,
                underway=self.underway,
            ),
            requests=requests,
            evaluator=self._evaluator(*place),
            report=report,
            exchange=exchange,
            metrics=self.metrics,
            stop_asked=watched(lambda: stop.is_set, config.launch.stack_seconds),
            sequences=(section.prompts_in_flight + PROMPTS_AHEAD) * section.completions_per_prompt,
            log_seconds=record_seconds(config.launch.places),
            weights_in_use=weights_in_use,
        )

    def _evaluator(self, place: int, places: int) -> OnlineEvaluator:
        """Build the evaluator of searcher ``place`` among ``places`` that share evaluations."""
        section = self.config.evaluate
        return OnlineEvaluator(
            self.task,
            searcher=place,
            searchers=places,
            max_tokens=self.config.generator.max_tokens,
            limits={"validation": section.validation_prompts, "test": section.test_prompts},
            done=partial(read_part, self.run, place, places),
            decode=self.decode,
            kept=KEPT_ANSWERS,
        )


def _serve(*arguments: Any, seed: int, **keywords: Any) -> Victim:
    """Serve another model by vLLM, for tasks that need one; see ``ports.Serve``. Imports vLLM when called."""
    from tba_hpc.engine.vllm_victim import VllmVictim

    return VllmVictim(*arguments, seed=seed, **keywords)


def started(config: Config, searcher: int) -> dict[str, Value]:
    """Return the metrics record of the start of the searcher with the number ``searcher``.

    A searcher's place decides which requests it takes, see ``LaunchSection.place_of``. The record has the
    number of places as ``searchers``. It has the searcher's own ``place`` only if that differs from the
    searcher's number, as for elastic searchers.
    """
    place = config.launch.place_of(searcher)
    own = {"place": place} if place != searcher else {}
    return {"event": "started", "searchers": config.launch.places, **own}


def _open_searcher(
    run: RunDir, config: Config, placement: Placement
) -> FileSearcherExchange | MpiSearcherExchange:
    """Open a searcher's end of the exchange: over MPI if the rank is in an MPI world, else over files."""
    if placement.mpi:
        from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange

        return MpiSearcherExchange(placement.mpi)
    return FileSearcherExchange(
        run.weights,
        placement.index,
        attempt=run.attempt.name,
        deadline=config.launch.timeout_seconds,
        start_deadline=config.launch.start_seconds,
    )


def _join(
    run: RunDir, config: Config, index: int, exchange: FileSearcherExchange | MpiSearcherExchange
) -> Progress:
    """Get the run's progress from the trainer, and offer the trainer this searcher's shards not yet merged.

    Returns the progress, in which the requests that these shards answer count as completed.
    """
    progress = exchange.progress()
    if exchange.closed:  # the run has ended, so that there may be no progress and no shards
        return progress
    first = progress.cursors.get(index, 0)
    for shard in _pending_shards(run, config).read_all({index: first}, [index]):
        progress.completed.add(shard.request_ids)
        exchange.offer(with_image(shard))
    return progress


def _pending_shards(run: RunDir, config: Config, among: range = EVERYBODY) -> PendingShards:
    """Return a reader of the shards not yet merged, of searchers whose numbers are in ``among``."""
    expected = [*range(config.launch.searchers), *config.launch.elastic_searchers]
    return PendingShards(run, searchers=expected, timeout=config.launch.timeout_seconds, among=among)


def _metrics(run: RunDir, searcher: int) -> MetricsWriter:
    """Open the metrics file of a searcher."""
    path = run.metrics_file("searcher", searcher)
    return MetricsWriter(path, digest=KeptDigest(path, SearcherDigest(searcher)))


def _seed(config: Config, searcher: int, *more: int) -> int:
    """Return an engine's seed, which differs between searchers, attempts, and leases of a slot.

    more: number of the attempt or, for an elastic searcher, of the lease.
    """
    return int(np.random.SeedSequence([config.run.seed, searcher, *more]).generate_state(1)[0] >> 1)
