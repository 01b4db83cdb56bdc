"""What the replay buffer costs the trainer's loop: merges, samples, snapshots, and the longest pause of each.

A shard holds 4 groups of 8 completions of 30 to 90 tokens; prompts come again after 31,250 groups, so that a
full buffer of a million has some 32 completions of each. All is timed on the monotonic clock, in one process.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from scale import Row, row
from tba_hpc.config import BufferSection, Config, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import RECORD, Ragged, Shard, Trajectories, offsets_of
from tba_hpc.exchange.hdf5_shards import write_arrays
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger
from tba_hpc.report.digest import KeptDigest, TrainerDigest
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsWriter
from tba_hpc.run.pruning import ShardPruner

CAPACITY = 1_000_000
SMALL = 20_000
GROUP, GROUPS = 8, 4
PROMPTS = 31_250
SHARDS = 2_000
"""Timed merges."""

LARGE = 1024
"""Trajectories of the shards that fill the buffer, and turn it over once."""

TOGETHER = 16
"""Shards of a sync, where they are merged together."""

FILES = 50_000
"""Shards to prune."""


def shards(size: int, *, seed: int = 0) -> Iterator[Trajectories]:
    """Without end; no two completions are equal."""
    rng, first = np.random.default_rng(seed), 0
    prompt_ids = np.arange(PROMPTS)
    while True:
        number = first + np.arange(size)
        record = np.zeros(size, RECORD)
        record["uid"], record["request_id"] = number, number // GROUP
        record["prompt_id"] = prompt_ids[number // GROUP % PROMPTS]
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


class Filled:
    """A full buffer that is merged into further."""

    def __init__(self, capacity: int) -> None:
        self.buffer = ReplayBuffer(BufferSection(capacity=capacity), seed=0)
        self._revision = 0
        self._large = shards(LARGE)
        self.filling = [self.merge(next(self._large)) for _ in range(capacity // LARGE + 1)]

    def merge(self, *parts: Trajectories) -> float:
        """Seconds to merge shards in one revision."""
        self._revision += 1
        if len(parts) == 1:
            return seconds(lambda: self.buffer.merge(parts[0], self._revision))
        return seconds(lambda: self.buffer.merge_each(parts, self._revision))

    def turn_over(self) -> list[float]:
        """Seconds of each merge while as many as are held arrive."""
        return [self.merge(next(self._large)) for _ in range(len(self.buffer) // LARGE + 1)]

    def samples(self, count: int) -> list[float]:
        """Seconds of each batch of 8 groups of 20."""
        return [
            seconds(lambda: self.buffer.sample(step, groups=8, group_size=20))  # noqa: B023
            for step in range(count)
        ]


def of_merger(capacity: int) -> list[Row]:
    """The same with the records of all merges, their digest, and the requests completed."""
    config = config_of("none")
    buffer = ReplayBuffer(BufferSection(capacity=capacity), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.jsonl"
        metrics = MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
        merger = Merger(config, buffer, CompletedRequests(), Freshness(config, buffer), metrics)
        state, large, small = TrainerState(), shards(LARGE), shards(GROUP * GROUPS, seed=1)
        for index in range(capacity // LARGE + 1):
            state = merger.merge(state, [Shard(0, index, next(large))], sync=state.revision)
        found = []
        for index in range(SHARDS // TOGETHER):
            parts = [Shard(searcher, capacity + index, next(small)) for searcher in range(TOGETHER)]
            began = time.perf_counter()
            state = merger.merge(state, parts, sync=state.revision)
            found.append((time.perf_counter() - began) / TOGETHER)
    each = statistics.median(found)
    what = f"{capacity:,} trajectories, records and digest too"
    return [
        row(f"of each of {TOGETHER} in a sync, {what}", 1e3 * each, "ms", "-"),
        *(
            row(
                f"share of the loop, {searchers:,} searchers, .5 shards/s each",
                50 * searchers * each,
                "%",
                "2",
            )
            for searchers in (256, 1024)
        ),
    ]


def milliseconds(values: list[float]) -> float:
    """Their median, in ms."""
    return round(1e3 * statistics.median(values), 4)


def of_capacity(capacity: int) -> list[Row]:
    """Merges and samples of a full buffer."""
    filled, small = Filled(capacity), shards(GROUP * GROUPS, seed=1)
    ready = [next(small) for _ in range(SHARDS)]
    each = [filled.merge(shard) for shard in ready]
    ready = [next(small) for _ in range(SHARDS)]
    together = [filled.merge(*ready[i : i + TOGETHER]) / TOGETHER for i in range(0, SHARDS, TOGETHER)]
    size = f"{capacity:,} trajectories"
    found = [
        row(f"merge of a shard of 32, {size}", milliseconds(each), "ms", "0.15"),
        row(f"of each of {TOGETHER} in a sync, {size}", milliseconds(together), "ms", "0.15"),
        row(f"longest of {SHARDS} merges, {size}", round(1e3 * max(each), 2), "ms", "50"),
        row(f"sample of 8 groups of 20, {size}", milliseconds(filled.samples(300)), "ms", "as before"),
    ]
    if capacity == CAPACITY:
        turning = filled.turn_over()
        pause = max(filled.filling + turning)
        found += of_merger(capacity)
        found.append(row("longest merge of 1,024, filled and turned over", round(1e3 * pause, 1), "ms", "50"))
        found += of_saving(filled)
        gone = seconds(lambda: filled.buffer.evict_where(lambda record: record["uid"] % 5 < 3))
        after = filled.turn_over()[: CAPACITY // 4 // LARGE]
        found.append(row("three of five evicted at once", round(1e3 * gone, 1), "ms", "-"))
        found.append(row("longest merge of 1,024 after that", round(1e3 * max(after), 1), "ms", "50"))
    return found


def of_saving(filled: Filled) -> list[Row]:
    """What a checkpoint costs the loop, and what it takes beside it."""
    pauses = [seconds(filled.buffer.snapshot) for _ in range(5)]
    snapshot = filled.buffer.snapshot()
    gathering = seconds(snapshot.arrays)
    tracemalloc.start()
    arrays = snapshot.arrays()
    gathered = tracemalloc.get_traced_memory()[1]
    with tempfile.TemporaryDirectory() as folder:
        writing = seconds(lambda: write_arrays(Path(folder) / "buffer.h5", arrays))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stored = sum(array.nbytes for array in arrays.values())
    return [
        row("snapshot in the loop, longest of 5", round(1e3 * max(pauses), 1), "ms", "50"),
        row("its arrays, beside the loop", round(gathering, 2), "s", "-"),
        row("writing them, beside the loop", round(writing, 2), "s", "-"),
        row("peak memory of the arrays / their size", round(gathered / stored, 2), "ratio", "-"),
        row("peak memory of a save / their size", round(peak / stored, 2), "ratio", "-"),
    ]


def config_of(root: str) -> Config:
    """Of a run that only has shards."""
    return parse_config({"model": {"path": "none"}, "run": {"root": root, "name": "pruned"}})


def of_pruning() -> list[Row]:
    """What the loop waits for where 50,000 shards go."""
    with tempfile.TemporaryDirectory() as root:
        run = RunDir.create(config_of(root))
        for searcher in range(8):
            run.shard_folder(searcher).mkdir()
            for index in range(FILES // 8):
                run.shard_file(searcher, index).touch()
        pruner = ShardPruner(run)
        pause = seconds(lambda: pruner.prune(dict.fromkeys(range(8), FILES)))
        rest = seconds(lambda: pruner.finish(600))
        assert not run.shard_files(), "all are pruned"
    return [
        row(f"pruning {FILES:,} shards, in the loop", round(1e3 * pause, 2), "ms", "50"),
        row("and beside it", round(rest, 2), "s", "-"),
    ]


def measure() -> list[Row]:
    """All of it."""
    gc.collect()
    return [*of_capacity(SMALL), *of_capacity(CAPACITY), *of_pruning()]
