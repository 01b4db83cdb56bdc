"""What 64 searchers that come and go cost the leading trainer: CPU time of its rounds with them.

Real shards of 32 trajectories of about 500 tokens (209 kB). Between two checkpoints 100 merged ones of each
lie in its folder, of which only the names are looked at. The rounds run beside the trainer's loop, in a
thread; what they cost it is at most their CPU time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from scale import Row, row
from scale.resume import shard_of
from tba_hpc.config import FIRST_ELASTIC
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import WeightLayout
from tba_hpc.exchange.file_exchange import FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import PendingShards, write_shard
from tba_hpc.run.directory import RunDir

VISITORS, MERGED, ROUNDS, FRESH = 64, 100, 50, 5
SYNC_SECONDS = 10.0
"""Time between two syncs that the shares are given for: two steps of 5 s."""


def measure() -> list[Row]:
    """Rows of the table of figures."""
    numbers = range(FIRST_ELASTIC, FIRST_ELASTIC + VISITORS)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for number in numbers:
            run.shard_folder(number).mkdir(parents=True)
            for index in range(MERGED):
                run.shard_file(number, index).touch()
        board = FileTrainerExchange(
            run.weights,
            WeightLayout.of([("a", (3, 5))], "F32"),
            read_pending=PendingShards(run, searchers=numbers, among=numbers).read,
            progress=Progress(cursors=dict.fromkeys(numbers, MERGED)),
            evaluated=lambda split, step: True,
        )
        quiet = [round_seconds(board) for _ in range(ROUNDS)]
        busy = []
        for fresh in range(FRESH):
            for number in numbers:
                shard = shard_of(number, MERGED + fresh)
                write_shard(run.shard_file(number, shard.index), shard)
            busy.append(round_seconds(board))
        for number in numbers:
            (run.weights / f"join-{number:04d}-00000000").touch()
        joined = round_seconds(board)
        board.close()
    idle, sync = float(np.median(quiet)), float(np.median(busy))
    return [
        row(f"a round with {VISITORS} of them and no news", 1e3 * idle, "ms CPU", "–"),
        row("a round with a shard of each", 1e3 * sync, "ms CPU", "–"),
        row("of which a shard", 1e3 * (sync - idle) / VISITORS, "ms CPU", "–"),
        row("a round in which all of them join", 1e3 * joined, "ms CPU", "–"),
        row(
            f"share of the leader's time, a sync every {SYNC_SECONDS:g} s",
            100 * sync / SYNC_SECONDS,
            "%",
            "≤ 2",
        ),
    ]


def round_seconds(board: FileTrainerExchange) -> float:
    """CPU time of this process for a whole round, s."""
    began = time.process_time()
    board.gather()
    while not board.idle:
        time.sleep(0.005)
    board.collect()
    return time.process_time() - began
