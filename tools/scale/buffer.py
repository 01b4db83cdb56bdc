"""What the replay buffer costs the trainer's loop: merges, snapshots, and the longest pause of each.

A shard holds 4 groups of 8 completions of 30 to 90 tokens; prompts come again after 31,250 groups, so that a
full buffer of a million has some 32 completions of each. All is timed on the monotonic clock, in one process.
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

CAPACITIES = (20_000, 1_000_000)
GROUP, GROUPS, PROMPTS = 8, 4, 31_250
SHARDS = 2_000
"""Timed merges."""

LARGE = 1024
"""Trajectories of the shards that fill the buffer, and turn it over once."""

TOGETHER = 16
"""Shards of a sync."""


def shards(size: int, *, seed: int = 0, first: int = 0) -> Iterator[Trajectories]:
    """Without end, numbered from ``first`` on; no two completions are equal."""
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
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def of_capacity(capacity: int) -> list[Row]:
    """Merges and checkpoints of a full buffer, of its own and by the trainer's merger."""
    buffer, revisions = ReplayBuffer(BufferSection(capacity=capacity), seed=0), itertools.count()
    large, small = shards(LARGE), shards(GROUP * GROUPS, seed=1)

    def merge(part: Trajectories) -> float:
        return seconds(lambda: buffer.merge(part, next(revisions)))

    filling = [merge(next(large)) for _ in range(capacity // LARGE + 1)]
    each = [merge(shard) for shard in itertools.islice(small, SHARDS)]
    turning = [merge(next(large)) for _ in range(len(buffer) // LARGE + 1)]
    pauses = [seconds(buffer.snapshot) for _ in range(5)]
    size = f", {capacity:,} trajectories"
    return [
        row(f"merge of a shard of 32{size}", 1e3 * statistics.median(each), "ms", "0.15"),
        *(of_merger(capacity, searchers) for searchers in (64, 256, 1024)),
        row(f"longest of {SHARDS} merges{size}", 1e3 * max(each), "ms", "50"),
        row(
            f"longest merge of 1,024, filled and turned over{size}", 1e3 * max(filling + turning), "ms", "50"
        ),
        row(f"snapshot in the loop, longest of 5{size}", 1e3 * max(pauses), "ms", "50"),
    ]


def of_merger(capacity: int, searchers: int) -> Row:
    """The trainer's merger, with the records of all merges, as busy as ``searchers`` keep it.

    Up to 64 each seals .5 shards of 32 a second; more seal larger ones, as many in all.
    """
    config, factor = parse_config({"model": {"path": "none"}}), max(1, searchers // 64)
    buffer = ReplayBuffer(BufferSection(capacity=capacity), seed=0)
    found, state = [], TrainerState()
    large, sealed = shards(LARGE), shards(GROUP * GROUPS * factor, seed=1, first=capacity + LARGE)
    with tempfile.TemporaryDirectory() as folder:
        metrics = MetricsWriter(Path(folder) / "trainer.jsonl")
        merger = Merger(buffer, CompletedRequests(), Freshness(config, buffer), metrics)
        for index in range(capacity // LARGE + 1):
            state = merger.merge(state, [Shard(0, index, next(large))], sync=state.revision)
        for index in range(SHARDS // TOGETHER // factor):
            parts = [Shard(searcher, capacity + index, next(sealed)) for searcher in range(TOGETHER)]
            began = time.perf_counter()
            state = merger.merge(state, parts, sync=state.revision)
            found.append((time.perf_counter() - began) / TOGETHER)
    share = 50 * searchers / factor * statistics.median(found)
    return row(f"share of the loop, {searchers:,} searchers, {capacity:,} trajectories", share, "%", "2")


def measure() -> list[Row]:
    """All of it."""
    return [found for capacity in CAPACITIES for found in of_capacity(capacity)]
