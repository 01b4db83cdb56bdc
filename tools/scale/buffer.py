"""Measures the cost of a replay buffer of a million for the trainer: merges, snapshots, the longest of each.

A shard holds 4 groups of 8 completions of 30 to 90 tokens. Prompts repeat after 31,250 groups, so the full
buffer has about 32 completions of each prompt. Everything runs in one process.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from scale import Row, row
from tba_hpc.config import BufferSection, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import RECORD, Ragged, Shard, Trajectories, offsets_of
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.metrics import MetricsWriter

CAPACITY = 1_000_000
GROUP, GROUPS, PROMPTS = 8, 4, 31_250
SHARDS = 2_000
"""Number of timed merges."""

LARGE = 1024
"""Trajectories per shard while the buffer is filled, and while its contents are replaced once."""

TOGETHER = 16
"""Shards per sync."""


def shards(size: int, *, seed: int = 0, first: int = 0) -> Iterator[Trajectories]:
    """Yield shards of ``size`` trajectories without end; uids count from ``first``, no completion repeats."""
    rng = np.random.default_rng(seed)
    while True:
        number = first + np.arange(size)
        record = np.zeros(size, RECORD)
        record["uid"], record["request_id"] = number, number // GROUP
        record["prompt_id"] = number // GROUP % PROMPTS
        record["prompt_row"] = np.arange(size) // GROUP
        record["reward"] = rng.random(size)
        offsets = offsets_of(rng.integers(30, 90, size))
        tokens = rng.integers(0, 100_000, offsets[-1], np.int32)
        tokens[offsets[:-1]] = number % 2**31
        logprobs = -rng.random(offsets[-1], np.float32)
        prompts = Ragged.from_rows([np.arange(20)] * (size // GROUP), np.int32)
        yield Trajectories(record, prompts, Ragged(tokens, offsets), logprobs, logprobs)
        first += size


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of one call, s."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure() -> list[Row]:
    """Measure merges into a full buffer, alone and in the trainer's merger, and copies for checkpoints."""
    buffer, revisions = ReplayBuffer(BufferSection(capacity=CAPACITY), seed=0), itertools.count()
    large, small = shards(LARGE), shards(GROUP * GROUPS, seed=1)

    def merge(part: Trajectories) -> float:
        return seconds(lambda: buffer.merge(part, next(revisions)))

    filling = [merge(next(large)) for _ in range(CAPACITY // LARGE + 1)]
    each = [merge(shard) for shard in itertools.islice(small, SHARDS)]
    turning = [merge(next(large)) for _ in range(len(buffer) // LARGE + 1)]
    pauses = [seconds(buffer.snapshot) for _ in range(5)]
    return [
        row("merge of a shard of 32", 1e3 * statistics.median(each), "ms", "0.15"),
        *(of_merger(searchers) for searchers in (64, 256, 1024)),
        row(f"longest of {SHARDS} merges", 1e3 * max(each), "ms", "50"),
        row("longest merge of 1,024, filled and turned over", 1e3 * max(filling + turning), "ms", "50"),
        row("snapshot in the loop, longest of 5", 1e3 * max(pauses), "ms", "50"),
    ]


def of_merger(searchers: int) -> Row:
    """Measure the share of the trainer's loop that merging takes, with its metrics, at this many searchers.

    Each of up to 64 searchers seals .5 shards of 32 trajectories per second. More searchers seal as many
    shards in all, but larger ones.
    """
    config, factor = parse_config({"model": {"path": "none"}}), max(1, searchers // 64)
    buffer = ReplayBuffer(BufferSection(capacity=CAPACITY), seed=0)
    found, state = [], TrainerState()
    large, sealed = shards(LARGE), shards(GROUP * GROUPS * factor, seed=1, first=CAPACITY + LARGE)
    with tempfile.TemporaryDirectory() as folder:
        metrics = MetricsWriter(Path(folder) / "trainer.jsonl")
        merger = Merger(buffer, CompletedRequests(), Freshness(config, buffer), metrics)
        for index in range(CAPACITY // LARGE + 1):
            state = merger.merge(state, [Shard(0, index, next(large))], sync=state.revision)
        for index in range(SHARDS // TOGETHER // factor):
            parts = [Shard(searcher, CAPACITY + index, next(sealed)) for searcher in range(TOGETHER)]
            began = time.perf_counter()
            state = merger.merge(state, parts, sync=state.revision)
            found.append((time.perf_counter() - began) / TOGETHER)
    share = 50 * searchers / factor * statistics.median(found)
    return row(f"share of the loop, {searchers:,} searchers", share, "%", "2")
