"""What a resume costs with 256 searchers: the leader's reading and memory, a searcher's joining.

Real shards of 32 trajectories of about 500 tokens (209 kB), 20 for each searcher; figures for 500 each are
these, scaled straight.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from scale import Row, row
from tba_hpc import runtime
from tba_hpc.config import Config, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests, Progress
from tba_hpc.core.types import RECORD, Ragged, Shard, Trajectories, WeightLayout, make_uid
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import PendingShards, write_shard
from tba_hpc.loops.merger import merge_pending
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsWriter

SEARCHERS, SHARDS, PENDING = 256, 20, 500
TRAJECTORIES, TOKENS, GROUP = 32, 500, 8
CAPACITY = 20_000  # reached by either number of shards, so that what grows with that number is not the buffer


def measure() -> list[Row]:
    """Rows of the table of figures."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "run": {"root": folder, "name": "resume"},
                "model": {"path": "none"},
                "exchange": {"transport": "files"},
                "buffer": {"capacity": CAPACITY},
                "launch": {"searchers": SEARCHERS},
            }
        )
        run = RunDir.create(config)
        write_shards(run)
        seconds, base, few, many = lead_apart(run)
        joined = join_seconds(run, config)
    every = seconds * PENDING / SHARDS
    size = f"{SEARCHERS} × {PENDING}"
    return [
        row(f"a searcher joins a run resumed with {size} pending shards", joined, "s", "≤ 5"),
        row("leader's memory, 256 × 5 pending shards, its buffer included", (few - base) / 1e9, "GB", "≤ 2"),
        row("the same with 256 × 20", (many - base) / 1e9, "GB", "≤ 2"),
        row("leader reads and merges a pending shard", 1e3 * seconds / (SEARCHERS * SHARDS), "ms", "–"),
        row(f"leader reads and merges {size}, scaled from 256 × 20", every, "s", "–"),
    ]


def shard_of(searcher: int, index: int) -> Shard:
    """A shard of random tokens, four groups of eight."""
    random = np.random.default_rng([searcher, index])
    length_N = random.integers(TOKENS // 2, 3 * TOKENS // 2, TRAJECTORIES)
    completions = Ragged.from_rows([random.integers(0, 32_000, length) for length in length_N], np.int32)
    groups = TRAJECTORIES // GROUP
    prompts = Ragged.from_rows([random.integers(0, 32_000, 100) for _ in range(groups)], np.int32)
    record = np.zeros(TRAJECTORIES, RECORD)
    record["uid"] = make_uid(searcher, index, 0) + np.arange(TRAJECTORIES, dtype=np.uint64)
    record["prompt_row"] = np.arange(TRAJECTORIES) // GROUP
    record["request_id"] = (index * groups + record["prompt_row"]) * SEARCHERS + searcher
    record["prompt_id"] = record["request_id"] % 7473
    logprobs, ref_logprobs = -random.exponential(size=(2, len(completions.values))).astype(np.float32)
    return Shard(searcher, index, Trajectories(record, prompts, completions, logprobs, ref_logprobs))


@contextmanager
def unflushed() -> Iterator[None]:
    """The shards below need not outlive a crash."""
    fsync, os.fsync = os.fsync, lambda fd: None
    try:
        yield
    finally:
        os.fsync = fsync


def write_shards(run: RunDir) -> None:
    """SHARDS for each searcher."""
    with unflushed():
        for searcher in range(SEARCHERS):
            run.shard_folder(searcher).mkdir()
            for index in range(SHARDS):
                write_shard(run.shard_file(searcher, index), shard_of(searcher, index))


def lead_apart(run: RunDir) -> tuple[float, int, int, int]:
    """Seconds to read and merge all; peak bytes before, with the last five of each searcher, and with all."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        _, base, few = pool.apply(lead, (run.path, SHARDS - 5))
    with context.Pool(1) as pool:
        seconds, _, many = pool.apply(lead, (run.path, 0))
    return seconds, base, few, many


def lead(path: Path, first: int) -> tuple[float, int, int]:
    """Begin an attempt at the cursors ``first``: seconds, and peak bytes before and after."""
    run = RunDir(path)
    config, base = run.config(), peak_bytes()
    began = time.perf_counter()
    merge_pending(
        config,
        PendingShards(run, searchers=range(SEARCHERS)).read_all(dict.fromkeys(range(SEARCHERS), first)),
        state=TrainerState(),
        buffer=ReplayBuffer(config.buffer, 0),
        completed=CompletedRequests(),
        metrics=MetricsWriter(run.metrics_file("trainer")),
    )
    return time.perf_counter() - began, base, peak_bytes()


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def join_seconds(run: RunDir, config: Config) -> float:
    """From a searcher's note to its first index, with PENDING files in its folder and all of them merged."""
    one = run.shard_file(0, 0)
    for index in range(SHARDS, PENDING):
        os.link(one, run.shard_file(0, index))  # only their names are looked at
    completed = CompletedRequests()
    completed.add(np.arange(SEARCHERS * PENDING * TRAJECTORIES // GROUP))
    leader = FileTrainerExchange(
        run.weights,
        WeightLayout.of([("weight", (1000,))], "F32"),
        read_pending=PendingShards(run, searchers=range(SEARCHERS)).read,
        progress=Progress(completed, dict.fromkeys(range(SEARCHERS), PENDING)),
        evaluated=lambda split, step: True,
    )
    over = threading.Event()
    rounds = threading.Thread(target=lambda: go_on(leader, over))
    rounds.start()
    began = time.perf_counter()
    progress = runtime._join(run, config, 0, FileSearcherExchange(run.weights, 0, deadline=60))
    runtime._shard_writer(run, config, 0, progress)
    seconds = time.perf_counter() - began
    over.set()
    rounds.join()
    leader.close()
    return seconds


def go_on(leader: FileTrainerExchange, over: threading.Event) -> None:
    """Rounds, one after the other."""
    while not over.wait(0.02):
        leader.gather()
