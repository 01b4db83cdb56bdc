"""Measures what durability costs and proves that it holds.

    python tools/bench_shards.py rates        records/s sealed and read, against write() + fsync of the bytes
    python tools/bench_shards.py durability   kill a real writer 50 times, then read all that it acknowledged

Both take ``--json``. ``--folder`` chooses the file system (default: a temporary folder here).
SIGKILL proves the order of steps, not the disk's own cache: for that, trust fsync or cut the power.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ParamSpec

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling
from tba_hpc.exchange.hdf5_shards import ShardError, ShardWriter, read_shard
from tba_hpc.run.directory import RunDir

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

P = ParamSpec("P")

COMPLETIONS = 16
"""Completions per group."""

Folder = Annotated[Path | None, typer.Option(help="Folder on the file system to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians over the shards of rollouts that are ``tokens`` long on average."""

    tokens: int
    shard_bytes: int
    seal_ms: float
    raw_ms: float
    seal_over_raw: float
    sealed_per_second: int
    read_per_second: int


@dataclass(frozen=True, slots=True)
class Durability:
    """What was found after the last kill."""

    kills: int
    acknowledged: int
    lost: int
    bad_files: int
    doubled: int
    shards: int


@app.command()
def rates(
    shards: Annotated[int, typer.Option(min=2, help="Shards per workload.")] = 60,
    records: Annotated[int, typer.Option(min=COMPLETIONS, help="Trajectories per shard.")] = 256,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Commit and read rates of two workloads: rollouts of 177 tokens, and the quickstart's of 26."""
    with _scratch(folder) as scratch:
        results = [_rates(RunDir(scratch / str(tokens)), tokens, shards, records) for tokens in (177, 26)]
    _show(f"shards of {records} trajectories", [asdict(result) for result in results], as_json)


@app.command()
def durability(
    kills: Annotated[int, typer.Option(min=1, help="Writers killed.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the moments at which they are killed.")] = 0,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Kill writers at random moments; exit code 1 where anything acknowledged is lost or a file is bad."""
    moments = random.Random(seed)
    with _scratch(folder) as scratch:
        run = RunDir(scratch / "run")
        acknowledged = {uid for _ in range(kills) for uid in _kill_a_writer(run, moments.uniform(0, 0.08))}
        result = _survey(run, kills, acknowledged)
    _show(f"{kills} × SIGKILL", [asdict(result)], as_json)
    if not as_json:
        print(f"{result.bad_files} bad files, {result.lost} lost of {result.acknowledged} acknowledged")
    raise typer.Exit(int(result.bad_files + result.lost + result.doubled > 0))


@app.command()
def write(run: Path) -> None:
    """The writer that gets killed: seals shards without end, prints the uids of each once it is sealed."""
    writer = ShardWriter(RunDir(run), 0)
    request_id = 0
    while True:
        writer.append(*_scored(request_id, tokens=177))
        shard = writer.seal()
        assert shard is not None
        print(*shard.trajectories.record["uid"], flush=True)
        request_id += 1


def _rates(run: RunDir, tokens: int, shards: int, records: int) -> Rates:
    """Seal and raw write take turns, so that both meet the same neighbours on the machine."""
    writer = ShardWriter(run, 0)
    groups = [_scored(request_id, tokens) for request_id in range(records // COMPLETIONS)]
    seal, raw = [], []
    for turn in range(shards):
        seal.append(_seconds(_seal, writer, groups))
        data = list(run.shard_files().values())[-1].read_bytes()
        raw.append(_seconds(_write_raw, run.shards / f"raw-{turn}", data))
    read = statistics.median(_seconds(read_shard, path) for path in run.shard_files().values())
    sealing, writing = statistics.median(seal), statistics.median(raw)
    return Rates(
        tokens=tokens,
        shard_bytes=len(data),
        seal_ms=1e3 * sealing,
        raw_ms=1e3 * writing,
        seal_over_raw=statistics.median(s / r for s, r in zip(seal, raw, strict=True)),
        sealed_per_second=round(records / sealing),
        read_per_second=round(records / read),
    )


def _seal(writer: ShardWriter, groups: list[tuple[Group, list[float], list[np.ndarray]]]) -> None:
    """All that a searcher pays, the packing of its groups included."""
    for group, rewards, ref_logprobs in groups:
        writer.append(group, rewards, ref_logprobs)
    writer.seal()


def _write_raw(path: Path, data: bytes) -> None:
    """The least that could make the same bytes durable."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def _seconds(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    start = time.perf_counter()
    call(*args, **kwargs)
    return time.perf_counter() - start


def _kill_a_writer(run: RunDir, delay: float) -> list[int]:
    """Uids that a writer acknowledged before it was killed, ``delay`` seconds after the first of them."""
    command = [sys.executable, __file__, "write", str(run.path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline()]
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.wait()
    return [int(uid) for line in lines if line.endswith("\n") for uid in line.split()]


def _survey(run: RunDir, kills: int, acknowledged: set[int]) -> Durability:
    """Read every visible file."""
    found: list[int] = []
    bad_files = 0
    paths = list(run.shard_files().values())
    for path in paths:
        try:
            found += read_shard(path).trajectories.record["uid"].tolist()
        except ShardError as error:
            print(error, file=sys.stderr)
            bad_files += 1
    return Durability(
        kills=kills,
        acknowledged=len(acknowledged),
        lost=len(acknowledged - set(found)),
        bad_files=bad_files,
        doubled=len(found) - len(set(found)),
        shards=len(paths),
    )


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


def _show(title: str, rows: list[dict[str, str | int | float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title, box=SIMPLE_HEAD)
    for name in rows[0]:
        heading = name.replace("_per_second", "/s").replace("_over_", " ÷ ").replace("_", " ")
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def _cell(value: str | int | float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app()
