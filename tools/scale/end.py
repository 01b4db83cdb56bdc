"""Measures what summary, report and status cost at the end of a long run with many searchers.

The run is synthetic. Readers of metrics use digests and the last lines of each file. Digests are made by the
code of a run, but from every THINNING-th record, so that curves span the whole time. All earlier lines of a
metrics file are a hole of the same length.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scale import Row, row
from tba_hpc.config import parse_config
from tba_hpc.report.digest import KEEP_SECONDS, SearcherDigest, TrainerDigest, keep_digest
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import Record, record_seconds

SEARCHERS, HOURS = 256, 72
"""Number of searchers, and length of the run, h."""

THINNING = 50
"""One record in so many enters a digest, because entering all takes an hour."""

SHARDS_PER_SECOND = 0.5
"""Shards that a searcher seals per second."""

STEP_SECONDS = 2.0
"""Time between two optimizer steps, s."""


def search_record(second: float, version: int, rng: random.Random) -> Record:
    """Return a record of a searcher."""
    names = ("reward", "truncated_share", "kl", "entropy", "flat_groups", "busy_share")
    more = ("seal_share", "propagation_seconds", "tokens_per_second", "length")
    counts = {"version": version, "tokens": 4000, "groups": 2, "trajectories": 16, "pending_shards": 1}
    return {
        "time": 1.7e9 + second,
        **{f"search/{name}": rng.random() for name in (*names, *more)},
        **{f"search/{name}": value for name, value in counts.items()},
        **{f"search/{name}": 0.0 for name in ("rebuilds", "paused_share", "rejected")},
    }


def searcher_records(seconds: range, rng: random.Random) -> Iterator[Record]:
    """Yield the records of one searcher at these seconds, and the events of its seals."""
    for second in seconds:
        yield search_record(second, int(second / STEP_SECONDS), rng)
        if rng.random() < SHARDS_PER_SECOND * seconds.step:
            index = int(second * SHARDS_PER_SECOND)
            sealed: Record = {"event": "sealed", "shard": index, "trajectories": 32, "tokens": 6400}
            yield {"time": 1.7e9 + second, **sealed}


def trainer_records(seconds: range, searchers: int, rng: random.Random) -> Iterator[Record]:
    """Yield the trainer's records: steps, merges of all searchers' shards, and a checkpoint every 1,000 s."""
    for second in seconds:
        at = int(second / STEP_SECONDS)
        for searcher in range(searchers):
            merged: Record = {"event": "merged", "time": 1.7e9 + second, "step": at, "revision": at}
            index = int(second * SHARDS_PER_SECOND)
            what: Record = {"trajectories": 32, "tokens": 6400, "added": 30, "duplicates": 2, "evicted": 30}
            yield {**merged, "searcher": searcher, "shard": index, **what, "request_ids": [index, index + 1]}
        yield step_record(second, at + 1, rng)
        if second % 1000 < seconds.step:
            yield {"event": "checkpoint", "time": 1.7e9 + second, "step": at + 1, "revision": at}


def step_record(second: float, step: int, rng: random.Random) -> Record:
    """Return the trainer's record of a step."""
    names = ("loss", "grad_norm", "log_ratio", "ess", "clip_share", "reward", "flat_groups", "length")
    more = ("replay_ratio", "engine_gap", "wait_share", "learning_rate", "beta", "skipped_steps")
    counts = {f"buffer/{name}": 1000.0 * step for name in ("size", "added", "duplicates", "evicted")}
    return {
        **{"time": 1.7e9 + second, "step": step, "sync/publish_stall_seconds": rng.random() / 10},
        **{f"train/{name}": rng.random() for name in (*names, *more)},
        **{"train/skipped_steps": 0, "staleness/mean": 3 * rng.random(), "staleness/max": 9, **counts},
    }


def make_run(root: Path, searchers: int, seconds: int) -> RunDir:
    """Make a run with the metrics of ``seconds``, but without shards and checkpoints."""
    tree = {
        "run": {"root": str(root), "name": "long"},
        "model": {"path": "none/such"},
        "train": {"steps": int(seconds / STEP_SECONDS) + 1},
        "launch": {"searchers": searchers},
    }
    run, rng = RunDir.create(parse_config(tree)), random.Random(0)
    last = range(int(seconds - KEEP_SECONDS), seconds, int(record_seconds(searchers)))
    pick = range(0, last.start, THINNING)
    few = range(0, last.start, THINNING * int(STEP_SECONDS))
    trainer = TrainerDigest()
    for record in trainer_records(few, searchers, rng):
        trainer.take(record)
    tail = trainer_records(range(last.start, last.stop, int(STEP_SECONDS)), searchers, rng)
    every = seconds / STEP_SECONDS * (1 + searchers * SHARDS_PER_SECOND * STEP_SECONDS)
    lay_down(run.metrics_file("trainer"), trainer, list(tail), int(every))
    for index in range(searchers):
        searcher = SearcherDigest(index)
        for record in searcher_records(pick, rng):
            searcher.take(record)
        records = list(searcher_records(last, rng))
        lay_down(run.metrics_file("searcher", index), searcher, records, int(1.5 * seconds))
    run.mark_finished()
    return run


def lay_down(path: Path, digest: TrainerDigest | SearcherDigest, tail: list[Record], lines: int) -> None:
    """Write a metrics file with a hole in place of all lines but ``tail``, and the digest of those lines.

    lines: number of lines that the hole stands for.
    """
    text = "".join(json.dumps(record) + "\n" for record in tail).encode()
    hole = int(len(text) / len(tail) * lines)
    with path.open("wb") as file:
        file.seek(hole)
        file.write(b"\n" + text)
    keep_digest(path, digest, hole + 1)


WAYS = {
    "summary and report": "from tba_hpc.report.page import write_report; write_report(run)",
    "status": "from tba_hpc.report.run_state import RunMonitor as M; m = M(run); m.update()\n"
    "from tba_hpc.report.status import figures; figures(m)",
}
"""Programs of what a reader does with a run. Each runs in a process, whose peak memory is measured."""

PROGRAM = """
import resource, sys, time
from pathlib import Path
from tba_hpc.run.directory import RunDir
run = RunDir.open(Path(sys.argv[1]))
began = time.monotonic()
{way}
print(time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def cost(run: RunDir, way: str) -> tuple[float, float]:
    """Return duration, s, and peak memory, MB, of one of WAYS."""
    program = PROGRAM.format(way=WAYS[way])
    out = subprocess.run(
        [sys.executable, "-c", program, run.path], capture_output=True, text=True, check=True
    )
    seconds, megabytes = map(float, out.stdout.split())
    return seconds, megabytes


def measure(searchers: int = SEARCHERS, hours: float = HOURS) -> list[Row]:
    """Return the rows of the table."""
    named = f"{searchers} searchers, {hours:g} h"
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), searchers, int(3600 * hours))
        rows: list[Row] = []
        for way in WAYS:
            seconds, megabytes = cost(run, way)
            goals = ("≤ 5", "≤ 500") if way.startswith("summary") else ("", "")
            rows.append(row(f"{way}: {named}", seconds, "s", goals[0]))
            rows.append(row(f"{way}: peak of memory", megabytes, "MB", goals[1]))
    return rows
