"""Measures the MPI exchange against plain memory copies and plain MPI, all in the same world.

    python tools/bench_exchange.py weights    publish stall and propagation of the weights
    python tools/bench_exchange.py merge      trajectories/s from offered shards to a sampled buffer
    python tools/bench_exchange.py delta      what has changed ÷ whole weights: bytes, stall, propagation
    python tools/bench_exchange.py changed    how much AdamW changes of bfloat16 weights, from sync to sync

All take ``--json`` and start mpiexec themselves. Believe the ratios, not the seconds: each ratio comes
from one run. "nodes" makes every rank a node of its own, so that the weights take the way between nodes;
on one machine that way runs at the speed of memory, and the copies before and after it weigh as much as
it does, which no network lets them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tba_hpc.config import BufferSection
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import RECORD, Publication, Ragged, Shard, Trajectories, WeightLayout, make_uid
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import with_image
from tba_hpc.exchange.weight_changes import find_changes
from tba_hpc.launch.local import child_environment, find_mpiexec

if TYPE_CHECKING:
    from mpi4py import MPI

    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange
    from tba_hpc.exchange.mpi_world import MpiWorld

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

DEADLINE = 120.0
BUCKET_MB = 64
PROMPTS, COMPLETIONS, TOKENS = 16, 16, 100
"""A synthetic shard: prompts, completions per prompt, mean tokens per completion."""

SIZES = [10.0, 100.0, 1000.0]
RANKS = [1, 4, 16, 64]
Travel = Literal["auto", "always", "never"]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Weights:
    """Medians over rounds. Rates count the bytes of the weights once.

    memcpy_ms: one copy of the weights by the trainer, before each publish. stall: publish over memcpy.
    visible_ms: from the call of publish until the last searcher's poll returns them; propagation_ms and
    gb_per_s: until it has a copy of its own. Limits in the same world: window, plain copies, one into a
    shared window and one out of it per searcher; bcast, MPI's blocking Bcast between private memories;
    bcast_shared, the same between shared memories, one per rank, where a node's only copy must lie.
    of_…: gb_per_s over the limit. busy_gb_per_s: while the trainer's main thread runs Python without pause;
    of_idle: over gb_per_s.
    """

    memory: str
    megabytes: float
    searchers: int
    memcpy_ms: float
    publish_ms: float
    stall: float
    visible_ms: float
    propagation_ms: float
    gb_per_s: float
    window_gb_per_s: float
    bcast_gb_per_s: float
    bcast_shared_gb_per_s: float
    of_window: float
    of_bcast: float
    of_bcast_shared: float
    busy_gb_per_s: float
    of_idle: float


@dataclass(frozen=True, slots=True)
class Delta:
    """Medians over rounds, of publishes that send what has changed over those that send all, but for stall.

    changed: share of the words, anywhere. bytes: sent or written, over the weights'. stall: publish over one
    memcpy, both with what has changed. visible: until the last searcher's poll returns the weights;
    propagation: until it has a copy of its own. visible_ms, whole_visible_ms: of both, for the scale.
    """

    way: str
    megabytes: float
    changed: float
    bytes: float
    stall: float
    visible: float
    propagation: float
    visible_ms: float
    whole_visible_ms: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Trajectories of ``searchers`` light ranks: offered, gathered, merged and sampled from."""

    searchers: int
    trajectories: int
    seconds: float
    trajectories_per_second: int
    rounds: int


@app.command()
def weights(
    megabytes: Annotated[list[float], typer.Option("--mb", help="Sizes of the weights, MB.")] = SIZES,
    searchers: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds per size.")] = 7,
    as_json: Json = False,
) -> None:
    """Publish stall and propagation, through a shared window and between (emulated) nodes."""
    rows = [
        Weights(**run_world(1 + searchers, ["weights-rank", memory, str(mb), str(rounds)]))
        for memory in ("shared", "nodes")
        for mb in megabytes
    ]
    show(rows, as_json)


@app.command()
def merge(
    searchers: Annotated[list[int], typer.Option(help="Numbers of searcher ranks.")] = RANKS,
    shards: Annotated[int, typer.Option(min=1, help="Shards of 256 trajectories in all.")] = 256,
    as_json: Json = False,
) -> None:
    """From sealed shards, offered at once, to a replay buffer that is sampled after every round."""
    show([Merge(**run_world(1 + n, ["merge-rank", str(max(1, shards // n))])) for n in searchers], as_json)


@app.command()
def delta(
    megabytes: Annotated[float, typer.Option("--mb", help="Size of the weights, MB.")] = 1000.0,
    changed: Annotated[
        float, typer.Option(help="Share of the words that change from one to the next.")
    ] = 0.01,
    searchers: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of either kind.")] = 5,
    folder: Annotated[Path, typer.Option(help="Where weights lie as files.")] = Path(),
    as_json: Json = False,
) -> None:
    """Changes against whole weights, between emulated nodes and over files."""
    arguments = [str(megabytes), str(changed), str(rounds)]
    rows = []
    for way in ("nodes", "files"):
        found = {
            mode: run_world(1 + searchers, ["delta-rank", way, mode, *arguments, str(folder)])
            for mode in ("never", "always")
        }
        whole, new = found["never"], found["always"]
        rows.append(
            Delta(
                way=way,
                megabytes=megabytes,
                changed=changed,
                bytes=new["bytes"],
                stall=new["publish"] / new["memcpy"],
                visible=new["visible"] / whole["visible"],
                propagation=new["copied"] / whole["copied"],
                visible_ms=new["visible"] * 1e3,
                whole_visible_ms=whole["visible"] * 1e3,
            )
        )
    show(rows, as_json)


@dataclass(frozen=True, slots=True)
class Changed:
    """What has changed from sync to sync: bytes over the weights', first and (median) in the last five."""

    parameters: int
    learning_rate: float
    sync_every: int
    first: float
    later: float


@app.command()
def changed(
    width: Annotated[int, typer.Option(help="Of a random Llama of eight layers.")] = 512,
    rate: Annotated[list[float], typer.Option(help="Learning rates.")] = [1e-6, 1e-5],  # noqa: B006
    every: Annotated[int, typer.Option(help="Steps between two syncs.")] = 2,
    syncs: Annotated[int, typer.Option(min=2)] = 15,
    as_json: Json = False,
) -> None:
    """Bytes of the changes, for gradients of random tokens on float32 masters."""
    show([changes_by_training(width, one, every, syncs) for one in rate], as_json)


def changes_by_training(width: int, rate: float, every: int, syncs: int) -> Changed:
    """Train a random model on random tokens; each step has others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=16_384,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.99), weight_decay=0)

    def published() -> np.ndarray:
        tensors = [tensor.detach().bfloat16().flatten() for tensor in model.parameters()]
        return torch.cat(tensors).view(torch.uint8).numpy()

    shares, before = [], published()
    for _ in range(syncs):
        for _ in range(every):
            tokens = torch.randint(shape.vocab_size, (4, 64))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        now = published()
        found = find_changes(now, before)
        shares.append(1.0 if found is None else len(found) / len(now))
        before = now
    return Changed(len(before) // 2, rate, every, shares[0], statistics.median(shares[-5:]))


def show(rows: list[Weights] | list[Delta] | list[Changed] | list[Merge], as_json: bool) -> None:
    """Print the rows."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("", *([""] * len(rows)), box=SIMPLE_HEAD, show_header=False)
    for name in asdict(rows[0]):
        values = [getattr(row, name) for row in rows]
        table.add_row(name, *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)


def run_world(ranks: int, arguments: list[str]) -> dict:
    """Run this file as one MPI world; returns what its trainer wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        placement = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx"]
        program = [sys.executable, "-m", "mpi4py", __file__, *arguments, str(result)]
        command = [str(find_mpiexec()), *placement, "-n", str(ranks), *program]
        environment = child_environment(os.environ, root=os.geteuid() == 0)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(f"the world of {ranks} ranks failed:\n{done.stdout}{done.stderr}")
        return json.loads(result.read_text())


# --- One rank of a world ---


def join(memory: str) -> MpiWorld:
    """The world; ``nodes`` makes every rank a node of its own."""
    from mpi4py import MPI

    from tba_hpc.exchange.mpi_world import MpiWorld, split_by_memory

    def alone(comm: MPI.Intracomm) -> MPI.Intracomm:
        return cast(MPI.Intracomm, comm.Split(comm.rank))

    return MpiWorld.join(
        "trainer" if MPI.COMM_WORLD.rank == 0 else "searcher",
        trainers=1,
        searchers=MPI.COMM_WORLD.size - 1,
        deadline=DEADLINE,
        node_split=alone if memory == "nodes" else split_by_memory,
    )


@app.command(hidden=True)
def weights_rank(memory: str, megabytes: float, rounds: int, result: Path) -> None:
    """One rank of the weights benchmark."""
    layout = WeightLayout.of([("weights", (int(megabytes * 1e6) // 2,))], "BF16")
    private = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    world = join(memory)
    seconds = (publish_weights if world.role == "trainer" else take_weights)(world, layout, private, rounds)
    window, bcast, bcast_shared = limits(world, private, rounds)
    table = np.empty((world.comm.size, *seconds.shape))
    world.comm.Gather(seconds, table, 0)
    if world.role == "searcher":
        return
    called, returned, memcpy = table[0, 1 : rounds + 1].T  # the first round warms up
    visible, copied, _ = table[1:, 1 : rounds + 1].max(axis=0).T
    copying, stall = statistics.median(memcpy), statistics.median(returned - called)
    propagation = statistics.median(copied - called)
    busy = statistics.median(table[1:, rounds + 1 :, 1].max(axis=0) - table[0, rounds + 1 :, 0])
    row = Weights(
        memory=memory,
        megabytes=layout.nbytes / 1e6,
        searchers=world.searchers,
        memcpy_ms=copying * 1e3,
        publish_ms=stall * 1e3,
        stall=stall / copying,
        visible_ms=statistics.median(visible - called) * 1e3,
        propagation_ms=propagation * 1e3,
        gb_per_s=layout.nbytes / propagation / 1e9,
        window_gb_per_s=layout.nbytes / window / 1e9,
        bcast_gb_per_s=layout.nbytes / bcast / 1e9,
        bcast_shared_gb_per_s=layout.nbytes / bcast_shared / 1e9,
        of_window=window / propagation,
        of_bcast=bcast / propagation,
        of_bcast_shared=bcast_shared / propagation,
        busy_gb_per_s=layout.nbytes / busy / 1e9,
        of_idle=propagation / busy,
    )
    result.write_text(json.dumps(asdict(row)))


def open_trainer(world: MpiWorld, layout: WeightLayout, delta: Travel = "never") -> MpiTrainerExchange:
    """The trainer's end, without a disk."""
    from tba_hpc.exchange.mpi_exchange import MpiTrainerExchange

    return MpiTrainerExchange.open(
        world,
        layout,
        bucket_mb=BUCKET_MB,
        delta=delta,
        progress=Progress(),
    )


def open_searcher(world: MpiWorld) -> MpiSearcherExchange:
    """A searcher's end."""
    from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange

    return MpiSearcherExchange.open(world)


@app.command(hidden=True)
def delta_rank(
    way: str, mode: Travel, megabytes: float, changed: float, rounds: int, folder: Path, result: Path
) -> None:
    """One rank of the delta benchmark; over files MPI only starts it."""
    layout = WeightLayout.of([("weights", (int(megabytes * 1e6) // 2,))], "BF16")
    world, place = join("nodes"), folder / "bench-delta"
    clock = np.zeros((2 + rounds, 3))
    if world.role == "trainer":
        shutil.rmtree(place, ignore_errors=True)
        world.comm.Barrier()
        share = publish_changes(world, layout, way, mode, changed, place, clock)
    else:
        world.comm.Barrier()
        take_changes(world, layout, way, place, clock)
    table = np.empty((world.comm.size, *clock.shape))
    world.comm.Gather(clock, table, 0)
    if world.role == "searcher":
        return
    shutil.rmtree(place, ignore_errors=True)
    called, returned, memcpy = table[
        0, 2:
    ].T  # the first two rounds have nothing to compare with, or to patch
    visible, copied, _ = table[1:, 2:].max(axis=0).T
    times = {
        "memcpy": memcpy,
        "publish": returned - called,
        "visible": visible - called,
        "copied": copied - called,
    }
    row = {name: statistics.median(values.tolist()) for name, values in times.items()}
    result.write_text(json.dumps({**row, "bytes": share}))


def publish_changes(
    world: MpiWorld,
    layout: WeightLayout,
    way: str,
    mode: Travel,
    changed: float,
    place: Path,
    clock: np.ndarray,
) -> float:
    """Fill the trainer's clock, s; returns the bytes of a publish over those of the weights (median)."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1 << 62, layout.nbytes // 8, np.int64).view(np.uint8)
    copy, words, shares = np.zeros_like(source), source.view(np.uint16), []
    exchange: MpiTrainerExchange | FileTrainerExchange
    if way == "nodes":
        exchange = open_trainer(world, layout, mode)
        memory = exchange._memory
    else:
        exchange = FileTrainerExchange(
            place,
            layout,
            read_pending=lambda cursors: (),
            progress=Progress(),
            evaluated=lambda split, version: True,
            delta=mode == "always",
        )
    for version in range(len(clock)):
        words[rng.integers(0, len(words), int(changed * len(words)))] ^= 1
        time.sleep(0.3)
        start = time.monotonic()
        np.copyto(copy, source)
        clock[version, 2] = time.monotonic() - start
        before = memory.travelled if way == "nodes" else 0
        clock[version, 0] = time.monotonic()
        assert exchange.publish(Publication(version=version), lambda out: np.copyto(out, source))
        clock[version, 1] = time.monotonic()
        while not exchange.gather():
            time.sleep(0.002)
        while not (place / f"taken-{version}").exists() and way == "files":
            time.sleep(0.01)
        sent = memory.travelled - before if way == "nodes" else newest_size(place)
        shares.append(sent / layout.nbytes)
    exchange.close()
    return statistics.median(shares[2:])


def newest_size(place: Path) -> int:
    """Bytes of the weights written last, or of what has changed in them."""
    return max(place.glob("step-*"), key=lambda path: path.name).stat().st_size


def take_changes(world: MpiWorld, layout: WeightLayout, way: str, place: Path, clock: np.ndarray) -> None:
    """Fill a searcher's clock, s: weights polled, weights copied."""
    private = np.zeros(layout.nbytes, np.uint8)
    exchange = (
        open_searcher(world)
        if way == "nodes"
        else FileSearcherExchange(place, world.index, deadline=DEADLINE)
    )
    while not exchange.closed:
        if update := exchange.poll():
            clock[update.publication.version, 0] = time.monotonic()
            np.copyto(private, update.data)
            clock[update.publication.version, 1] = time.monotonic()
            if way == "files":
                (place / f"taken-{update.publication.version}").touch()
        time.sleep(0.0005)


def publish_weights(world: MpiWorld, layout: WeightLayout, source: np.ndarray, rounds: int) -> np.ndarray:
    """The trainer's clock, s [1 + 2·rounds, 3]: publish called and returned, seconds of a memcpy just before.

    In the later half this thread is busy while the weights travel.
    """
    exchange = open_trainer(world, layout)
    clock, copy = np.empty((1 + 2 * rounds, 3)), np.zeros_like(source)
    for version in range(len(clock)):
        time.sleep(0.2)
        start = time.monotonic()
        np.copyto(copy, source)
        clock[version, 2] = time.monotonic() - start
        time.sleep(0.05)
        clock[version, 0] = time.monotonic()
        assert exchange.publish(
            Publication(version=version, evaluate="test"), lambda out: np.copyto(out, source)
        )
        clock[version, 1] = time.monotonic()
        pause = time.sleep if version <= rounds else spin
        while not exchange.gather():  # until the round is over
            pause(0.01)
    exchange.close()
    return clock


def spin(seconds: float) -> None:
    """Keep the interpreter busy, as bookkeeping in Python does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(i * i for i in range(1000))


def take_weights(world: MpiWorld, layout: WeightLayout, private: np.ndarray, rounds: int) -> np.ndarray:
    """A searcher's clock, s [1 + 2·rounds, 2 and 1 unused]: weights polled, weights copied."""
    exchange, clock = open_searcher(world), np.zeros((1 + 2 * rounds, 3))
    while not exchange.closed:
        if update := exchange.poll():
            clock[update.publication.version, 0] = time.monotonic()
            np.copyto(private, update.data)
            clock[update.publication.version, 1] = time.monotonic()
        time.sleep(0.0005)
    return clock


def limits(world: MpiWorld, private: np.ndarray, rounds: int) -> tuple[float, float, float]:
    """Median seconds of a copy through a shared window, and of Bcast between private and shared memories."""
    comm, trainer = world.comm, world.role == "trainer"
    window, memory = shared_memory(comm, private.nbytes if trainer else 0)

    def through_window() -> None:
        if trainer:
            np.copyto(memory, private)
        comm.Barrier()
        if not trainer:
            np.copyto(private, memory)

    copies = timed(world, through_window, rounds)
    window.Free()
    bcast = timed(world, lambda: comm.Bcast(private, 0), rounds)
    window, own = shared_memory(comm.Split(comm.rank), private.nbytes)
    own[:] = private
    return copies, bcast, timed(world, lambda: comm.Bcast(own, 0), rounds)


def shared_memory(comm: MPI.Comm, nbytes: int) -> tuple[MPI.Win, np.ndarray]:
    """A window of ``comm`` and the memory of its rank 0."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(nbytes, 1, comm=cast(MPI.Intracomm, comm))
    return window, np.frombuffer(cast(memoryview, window.Shared_query(0)[0]), np.uint8)


def timed(world: MpiWorld, work: Callable[[], None], rounds: int) -> float:
    """Median seconds from a common start to the end on the last rank; the first round warms up."""
    seconds = []
    for _ in range(rounds + 1):
        world.comm.Barrier()
        start = time.monotonic()
        work()
        world.comm.Barrier()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds[1:])


@app.command(hidden=True)
def merge_rank(shards: int, result: Path) -> None:
    """One rank of the merge benchmark."""
    world = join("shared")
    if world.role == "searcher":
        offer_shards(world, shards)
        return
    exchange = open_trainer(world, WeightLayout.of([("weights", (1,))], "F32"))
    buffer = ReplayBuffer(BufferSection(capacity=1_000_000), seed=0)
    wanted = world.searchers * shards * PROMPTS * COMPLETIONS
    merged = rounds = 0
    world.comm.Barrier()
    start = time.monotonic()
    while merged < wanted:
        exchange.gather()
        if arrived := exchange.collect():
            for shard in arrived:
                buffer.merge(shard.trajectories, rounds)
            buffer.sample(rounds, groups=8, group_size=COMPLETIONS)
            merged += sum(len(shard.trajectories) for shard in arrived)
            rounds += 1
        time.sleep(0.0005)
    seconds = time.monotonic() - start
    exchange.close()
    row = Merge(world.searchers, merged, seconds, round(merged / seconds), rounds)
    result.write_text(json.dumps(asdict(row)))


def offer_shards(world: MpiWorld, shards: int) -> None:
    """A light searcher: offers its shards as fast as it can, then polls until the end."""
    ready = [synthetic_shard(world.index, index) for index in range(shards)]
    exchange = open_searcher(world)
    world.comm.Barrier()
    for shard in ready:
        exchange.offer(shard)
    while not exchange.closed:
        time.sleep(0.005)


def synthetic_shard(searcher: int, index: int) -> Shard:
    """PROMPTS × COMPLETIONS trajectories of random tokens, all distinct."""
    rng = np.random.default_rng([searcher, index])
    n = PROMPTS * COMPLETIONS
    record = np.zeros(n, RECORD)
    record["uid"] = make_uid(searcher, index, 0) + np.arange(n, dtype=np.uint64)
    record["prompt_row"] = np.repeat(np.arange(PROMPTS), COMPLETIONS)
    record["prompt_id"] = (searcher << 20 | index) * PROMPTS + record["prompt_row"]
    record["reward"] = rng.random(n)
    lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2, n)
    completions = Ragged.from_rows([rng.integers(0, 32000, length) for length in lengths], np.int32)
    prompts = Ragged.from_rows([rng.integers(0, 32000, 64) for _ in range(PROMPTS)], np.int32)
    logprobs, ref_logprobs = -rng.random((2, len(completions.values)), np.float32)
    trajectories = Trajectories(record, prompts, completions, logprobs, ref_logprobs)
    return with_image(Shard(searcher, index, trajectories))


if __name__ == "__main__":
    app()
