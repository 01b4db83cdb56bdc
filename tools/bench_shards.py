"""Measures what durability costs.

python tools/bench_shards.py rates    records/s sealed and read, against write() + fsync of the bytes
python tools/bench_shards.py write    seal without end, for the test that kills it
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling
from tba_hpc.exchange.hdf5_shards import ShardWriter, read_shard
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.directory import RunDir

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

COMPLETIONS = 16
"""Completions per group."""

Folder = Annotated[Path | None, typer.Option(help="Folder on the file system to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def rates(
    shards: Annotated[int, typer.Option(min=2, help="Shards per workload.")] = 60,
    records: Annotated[int, typer.Option(min=COMPLETIONS, help="Trajectories per shard.")] = 256,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Seal and read rates of two workloads: rollouts of 177 tokens, and the quickstart's of 26."""
    with _scratch(folder) as scratch:
        rows = [_rates(RunDir(scratch / str(tokens)), tokens, shards, records) for tokens in (177, 26)]
    print_rows(rows, as_json=as_json)


@app.command()
def write(run: Path) -> None:
    """Seal shards without end; print the uids of each once it is sealed."""
    writer = ShardWriter(RunDir(run), 0)
    request_id = 0
    while True:
        writer.append(*_scored(request_id, tokens=177))
        shard = writer.seal()
        assert shard is not None
        print(*shard.trajectories.record["uid"], flush=True)
        request_id += 1


def _rates(run: RunDir, tokens: int, shards: int, records: int) -> dict[str, Cell]:
    """Seal and raw write take turns, so that both meet the same neighbours on the machine."""
    writer = ShardWriter(run, 0)
    groups = [_scored(request_id, tokens) for request_id in range(records // COMPLETIONS)]

    def seal() -> None:
        for group, rewards, ref_logprobs in groups:
            writer.append(group, rewards, ref_logprobs)
        writer.seal()

    sealing, writing = [], []
    for turn in range(shards):
        sealing.append(_seconds(seal))
        data = list(run.shard_files().values())[-1].read_bytes()
        writing.append(_seconds(lambda: _write_raw(run.shards / f"raw-{turn}", data)))  # noqa: B023
    read = statistics.median(_seconds(lambda: read_shard(path)) for path in run.shard_files().values())  # noqa: B023
    return {
        "tokens": tokens,
        "shard, bytes": len(data),
        "seal, ms": 1e3 * statistics.median(sealing),
        "raw, ms": 1e3 * statistics.median(writing),
        "seal ÷ raw": statistics.median(s / r for s, r in zip(sealing, writing, strict=True)),
        "sealed/s": round(records / statistics.median(sealing)),
        "read/s": round(records / read),
    }


def _write_raw(path: Path, data: bytes) -> None:
    """The least that could make the same bytes durable."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _scored(request_id: int, tokens: int) -> tuple[Group, list[float], list[np.ndarray]]:
    """A group like a searcher's; completion lengths spread around ``tokens`` by half."""
    generator = np.random.default_rng(request_id)
    prompt = Prompt(request_id, generator.integers(0, 32_000, 60, np.int32), "")
    completions = tuple(
        Completion(
            generator.integers(0, 32_000, length, np.int32),
            -generator.exponential(0.5, length).astype(np.float32),
            "stop",
        )
        for length in generator.integers(tokens // 2, tokens + tokens // 2, COMPLETIONS)
    )
    request = Request(prompt, request_id, COMPLETIONS, Sampling(1.0, 1.0, 2 * tokens))
    group = Group(request, completions, np.zeros((COMPLETIONS, 2), np.int32))
    return group, generator.random(COMPLETIONS).tolist(), [c.logprobs - 0.1 for c in completions]


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench_shards-", dir=folder or Path.cwd()) as path:
        yield Path(path)


if __name__ == "__main__":
    app()
