"""Whole runs on the tabular policy: the real loops and files, one process a start, which may be killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import safetensors.numpy
from forks import fork
from lab.tabular import Table, TabularGenerator, TabularReference, TabularTask
from lab.tabular_learner import TabularLearner

from tba_hpc import runtime
from tba_hpc.config import Config, parse_config
from tba_hpc.core import schedules
from tba_hpc.core.ports import Generator
from tba_hpc.core.prompts import training_requests
from tba_hpc.core.types import TrajectoryBatch
from tba_hpc.exchange import file_exchange
from tba_hpc.loops import elastic
from tba_hpc.report import digest, page
from tba_hpc.run import checkpoints
from tba_hpc.run.background import at_once
from tba_hpc.run.directory import RunDir
from tba_hpc.run.signals import StopFlag
from tba_hpc.run.underway import Underway

TABLE = Table()
STEPS, EVERY = 40, 8


def make_config(root: Path, **sections: dict[str, object]) -> Config:
    """Four prompts, a buffer that is soon full, a checkpoint every eight steps."""
    tree: dict[str, dict[str, object]] = {
        "run": {"root": str(root), "name": "tabular"},
        "model": {"path": "tabular", "dtype": "float32", "context_length": 8},
        "generator": {"completions_per_prompt": 12, "temperature": 1.0, "max_tokens": TABLE.length},
        "buffer": {"initial_completions": 15, "capacity_per_prompt": 14, "capacity": 50},
        "train": {"steps": STEPS, "prompts_per_step": 4, "completions_per_prompt": 8},
        "exchange": {
            "transport": "files",
            "sync_every": 2,
            "seal_seconds": 0.02,
        },
        "launch": {"timeout_seconds": 60},
        "checkpoint": {"every": EVERY},
        "evaluate": {"every": 10, "validation_prompts": 4},
    }
    return parse_config(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


class MarkedLearner(TabularLearner):
    """In its ``nth`` step of a start, or while it loads a checkpoint (0), it sends its own process a signal.

    It refuses batches that are staler than the run allows, or scored by another reference than the one in
    force, bit by bit.
    """

    def __init__(self, run: RunDir, sent: signal.Signals | None, nth: int) -> None:
        super().__init__(TABLE, run.config().train, folder_of=run.reference)
        self._run = run
        self._sent = sent
        self._left = nth

    def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        if self._left == 0 and self._sent:
            os.kill(os.getpid(), self._sent)
        super().load(folder)

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """One optimizer step."""
        self._left -= 1
        if self._left == 0 and self._sent:
            os.kill(os.getpid(), self._sent)
        self._refuse_stale(batch)
        return super().step(batch, learning_rate=learning_rate, beta=beta)

    def _refuse_stale(self, batch: TrajectoryBatch) -> None:
        config, step = self._run.config(), self._optimizer.steps
        bound = config.exchange.max_staleness
        assert bound is None or (abs(step - batch.version_N) <= bound).all(), (step, batch.version_N)
        reference = schedules.reference(config.train, step)
        expected = batch.logprobs if reference < 0 else reference_logprobs(self._run, batch, reference)
        np.testing.assert_array_equal(batch.ref_logprobs, expected)


def reference_logprobs(run: RunDir, batch: TrajectoryBatch, step: int) -> np.ndarray:
    """float32 [T]: of all completions, under the policy that became the reference at ``step``."""
    logits = TABLE.ref_logits_PSV
    if step:
        logits = safetensors.numpy.load_file(run.reference(step) / "model.safetensors")["logits"]
    rows = [batch.sequences.row(i) for i in range(len(batch.sequences))]
    return np.concatenate(
        [TABLE.token_logprobs(logits, row[0] - TABLE.prompt_token(0), row[1:]) for row in rows]
    ).astype(np.float32)


def start(
    run: RunDir,
    *,
    searchers: int,
    sent: signal.Signals | None = None,
    nth: int = 0,
    beside: bool = False,
    generator: Callable[[int], Generator] | None = None,
) -> ForkServerProcess:
    """A process with the trainer and ``searchers``, which gets the signal ``sent`` in its ``nth`` step.

    beside: whether checkpoints are written while training goes on; if not, counts are exact. generator: of
    each searcher, by its number; None for that of the table.
    """
    run.adapt([f"launch.searchers={searchers}"])
    run.begin_attempt()
    return fork(_live, run.path, sent, nth, beside, generator)


def _live(
    path: Path,
    sent: signal.Signals | None,
    nth: int,
    beside: bool = False,
    generator: Callable[[int], Generator] | None = None,
) -> None:
    """All ranks of a start, as ``runtime`` builds them, less the engine and the optimizer's sharding."""
    run = RunDir.open(path)
    config = run.config()
    if not beside:
        checkpoints.in_background = at_once
    page.render = lambda *_: ""  # plots take longer than all the rest
    file_exchange.MANIFEST_CHECK_SECONDS = 0.01  # this disk is not shared
    elastic.ELASTIC_CHECK_SECONDS = 0.2
    digest.KEEP_SECONDS = 0.1  # a start lasts a second or two
    made = generator or (lambda seed: TabularGenerator(TABLE, seed=seed))
    ranks = [
        threading.Thread(target=_search, args=(run, config, s, made(s)))
        for s in range(config.launch.searchers)
    ]
    for rank in ranks:
        rank.start()
    runtime.verify_checkpoints(run)
    runtime._lead(run, config, runtime.Placement(0, 0, 1, None), MarkedLearner(run, sent, nth))
    for rank in ranks:
        rank.join()


def _search(run: RunDir, config: Config, index: int, generator: Generator) -> None:
    exchange = runtime._open_searcher(run, config, runtime.Placement(index, index, 1, None))
    progress = runtime._join(run, config, index, exchange)
    parts = _parts(run, config, index, generator)
    requests = training_requests(config, parts.task, index, progress.completed)
    place = index, config.launch.searchers
    searcher = parts.searcher(exchange, progress, requests, StopFlag(), place=place)
    searcher.sequences, searcher.pending_shards = 24, 4
    searcher.run()


def _parts(run: RunDir, config: Config, index: int, generator: Generator) -> runtime.SearchParts:
    metrics = runtime._metrics(run, index)
    metrics.log(runtime.started(config, index))
    reference = TabularReference(TABLE, run.reference) if config.train.searcher_has_reference else None
    underway = Underway(run, index)
    return runtime.SearchParts(
        run, config, index, generator, TabularTask(TABLE), metrics, reference, underway
    )


def visit(run: RunDir) -> ForkServerProcess:
    """A process with a searcher that comes, and goes when told to or with the run."""
    return fork(_visit, run.path)


def _visit(path: Path) -> None:
    """As ``runtime`` has it, less the engine."""
    run = RunDir.open(path)
    config = run.config()
    file_exchange.MANIFEST_CHECK_SECONDS = 0.01
    elastic.EVALUATOR_RETRY_SECONDS = 0.05
    digest.KEEP_SECONDS = 0.1
    with elastic.leaving_at_once(), elastic.leased_slot(run, config) as place:
        generator = TabularGenerator(TABLE, seed=place.searcher + place.lease)
        runtime._stay(_parts(run, config, place.searcher, generator), place)
