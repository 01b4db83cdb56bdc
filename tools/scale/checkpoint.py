"""What a checkpoint costs: the trainer's stall, the writing beside it, the verification of a start.

A real learner and real files, in a temporary folder (TMPDIR chooses the disk): .67 GB and 2.7 GB of state,
for one rank and for two. Each ratio is of medians taken in turn by one process, which does nothing else while
the checkpoint is written.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gpu_acceptance import TINY, make_batch, make_model

from scale import Row, row
from tba_hpc.config import parse_config
from tba_hpc.exchange.hdf5_shards import write_arrays
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.run.checkpoints import Checkpoints, TrainerState, latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.inventory import damage

LAYERS = 10
SAVES, WARM = 8, 3
"""The first of them takes new memory for its copy, and a disk gives new blocks; medians are of the others."""

LOADS = 5


def measure(sizes: tuple[int, ...] = (40, 160), ranks: tuple[int, ...] = (1, 2)) -> list[Row]:
    """Rows for float32 policies of so many million parameters under ZeRO-2, for each number of ranks."""
    return [row for millions in sizes for count in ranks for row in _measured(millions, count)]


def _measured(millions: int, ranks: int) -> list[Row]:
    hidden = round((millions * 1e6 / LAYERS / 16) ** 0.5 / 64) * 64
    shape = replace(TINY, hidden=hidden, layers=LAYERS, head_size=64)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "store").mkdir()
        tree = {
            "run": {"root": folder, "name": "bench"},
            "model": {
                "path": str(make_model(root / "model", shape)),
                "dtype": "float32",
                "context_length": 64,
            },
            "generator": {"max_tokens": 32, "completions_per_prompt": 4},
            "train": {"prompts_per_step": TINY.groups, "completions_per_prompt": TINY.group_size},
            "launch": {"trainers": ranks},
        }
        run = RunDir.create(parse_config(tree))
        context = multiprocessing.get_context("spawn")
        rows: multiprocessing.SimpleQueue[list[Row]] = context.SimpleQueue()
        workers = [context.Process(target=_work, args=(root, run.path, rank, rows)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert all(worker.exitcode == 0 for worker in workers), "see the tracebacks above"
        return rows.get()


def _work(root: Path, path: Path, rank: int, rows: multiprocessing.SimpleQueue[list[Row]]) -> None:
    run = RunDir.open(path)
    config = run.config()
    ranks = config.launch.trainers
    learner = DeepSpeedLearner.create(config, rank=rank, ranks=ranks, store=root / "store", deadline=120)
    if rank == 0:
        rows.put(list(_lead(run, learner, ranks)))
        learner.close()
    else:
        learner.follow(lambda: np.empty(learner.layout.nbytes, np.uint8))


def _lead(run: RunDir, learner: DeepSpeedLearner, ranks: int) -> Iterator[Row]:
    learner.step(make_batch(TINY), learning_rate=1e-5, beta=0.1)  # the optimizer has no state before
    checkpoints = Checkpoints(run, 1, write_arrays)
    stalls, writes, copying, plain = [], [], [], []
    for step in range(SAVES):
        began = time.perf_counter()
        saved = checkpoints.save(TrainerState(step=step), learner, {})
        stalls.append(time.perf_counter() - began)
        saved.result()
        writes.append(time.perf_counter() - began - stalls[-1])
        sizes = _sizes(run)
        copying.append(_memcpy_seconds(sum(size for name, size in sizes.items() if "rank_0" in name)))
        plain.append(_plain_write_seconds(run.path, sum(sizes.values())))
    loads, checks = [], []
    for _ in range(LOADS):
        loads.append(_seconds(lambda: learner.load(_newest(run))))
        checks.append(_seconds(lambda: damage(_newest(run))))

    stall, write, copy, raw = (statistics.median(part[WARM:]) for part in (stalls, writes, copying, plain))
    load, check = statistics.median(loads), statistics.median(checks)
    of = f"{sum(sizes.values()) / 1e9:.2f} GB, {ranks} rank{'s' if ranks > 1 else ''}: "
    stall, write = statistics.median(stalls[1:]), statistics.median(writes[1:])
    yield row(f"{of}stall of a checkpoint", 1e3 * stall, "ms", "")
    yield row(f"{of}stall ÷ memcpy of the state", stall / copy, "", "≤ 1.5")
    yield row(f"{of}the first stall ÷ memcpy, which takes new memory", stalls[0] / copy, "", "")
    yield row(f"{of}speed of the writing ÷ plain write and fsync", raw / write, "", "≥ .8")
    yield row(f"{of}plain write and fsync", raw, "s", "")
    yield row(f"{of}verification ÷ load", check / load, "", "≤ .15")
    yield row(f"{of}load", load, "s", "")


def _memcpy_seconds(size: int) -> float:
    """One thread, between pages in use, from torch: numpy's own are larger, and faster than a model's."""
    source, target = (torch.ones(size, dtype=torch.uint8).numpy() for _ in range(2))
    return statistics.median(_seconds(lambda: np.copyto(target, source)) for _ in range(3))


def _plain_write_seconds(folder: Path, size: int) -> float:
    """One new file, by one thread."""
    data, plain = memoryview(bytes(size)), folder / "plain"

    def write() -> None:
        with plain.open("wb", buffering=0) as file:
            left = data
            while left:
                left = left[file.write(left[: 16 << 20]) :]
            os.fsync(file.fileno())

    plain.unlink(missing_ok=True)
    return _seconds(write)


def _newest(run: RunDir) -> Path:
    folder = latest_checkpoint(run)
    assert folder is not None
    return folder


def _sizes(run: RunDir) -> dict[str, int]:
    """Of the learner's files of the newest checkpoint, bytes by name."""
    return {path.name: path.stat().st_size for path in _newest(run).rglob("*.pt")}


def _seconds(task: Callable[[], object]) -> float:
    began = time.perf_counter()
    task()
    return time.perf_counter() - began
