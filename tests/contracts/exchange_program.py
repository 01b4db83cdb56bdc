"""One process of the exchange's contract: ``exchange_program.py TRANSPORT FOLDER [RANK]``.

Every scenario is a function for the trainer and one for each searcher; both assert, and meet through
flags in FOLDER where the order of things matters. Ranks 0…T-1 are trainers, the two others searchers.
Each prints ``SCENARIO holds at rank RANK`` for each scenario that it has gone through.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from waiting import until

from tba_hpc.core.ports import SearcherExchange, TrainerExchange, Write
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import (
    RECORD,
    Publication,
    Ragged,
    Shard,
    Split,
    Trajectories,
    WeightLayout,
    WeightUpdate,
    make_uid,
)
from tba_hpc.exchange.file_exchange import (
    CHANGES,
    WEIGHTS,
    ElasticSearcherExchange,
    FileSearcherExchange,
    FileTrainerExchange,
)
from tba_hpc.exchange.hdf5_shards import PendingShards, with_image, write_shard
from tba_hpc.exchange.hybrid_exchange import HybridTrainerExchange
from tba_hpc.run.directory import RunDir

SEARCHERS = 2
TRAINERS = {"files": 1, "mpi": 1, "mpi-nodes-two-trainers": 2}
BOTH = "both"
"""Searcher 0 shares the trainer's MPI world, searcher 1 comes and goes over files."""

PATIENCE = 60.0

LAYOUT = WeightLayout.of(
    [("embed", (301, 64)), ("norm", (7,)), ("proj", (129, 257)), ("bias", (1,)), ("head", (64, 301))], "BF16"
)


def weights_of(version: int) -> np.ndarray:
    """uint8 [LAYOUT.nbytes]: random bytes, NaN patterns of bf16 included.

    From one version to the next few of them change, but from the sixth to the seventh, and so on, all.
    """
    weights = np.random.default_rng([1, version // 7]).integers(0, 256, LAYOUT.nbytes, np.uint8)
    rng = np.random.default_rng([3, version])
    weights[rng.integers(0, LAYOUT.nbytes, LAYOUT.nbytes // 100)] ^= 1
    return weights


def shard_of(searcher: int, index: int) -> Shard:
    """A shard with ragged random contents of 1 to 40 trajectories."""
    rng = np.random.default_rng([2, searcher, index])
    n = int(rng.integers(1, 40))
    prompts = Ragged.from_rows([rng.integers(0, 9999, rng.integers(1, 9)) for _ in range(3)], np.int32)
    completions = Ragged.from_rows([rng.integers(0, 9999, rng.integers(0, 30)) for _ in range(n)], np.int32)
    record = np.zeros(n, RECORD)
    record["uid"] = make_uid(searcher, index, 0) + np.arange(n, dtype=np.uint64)
    record["prompt_row"] = rng.integers(0, 3, n)
    record["reward"] = rng.normal(size=n)
    tokens = len(completions.values)
    logprobs, ref_logprobs = rng.normal(size=(2, tokens)).astype(np.float32)
    trajectories = Trajectories(record, prompts, completions, logprobs, ref_logprobs)
    return with_image(Shard(searcher, index, trajectories))


def same_shard(one: Shard, other: Shard) -> bool:
    """Equal to the last bit."""
    return with_image(one).image == with_image(other).image


@dataclass
class Flags:
    """Facts that the processes of a scenario tell each other."""

    folder: Path

    def set(self, name: str) -> None:
        """State a fact."""
        (self.folder / name).touch()

    def wait(self, name: str) -> None:
        """Wait until another process has stated it."""
        until((self.folder / name).exists, f"flag {name}")


@dataclass
class TrainerSide:
    """The leader's end, with a learner that writes ``weights_of(version)`` over all trainer ranks."""

    exchange: TrainerExchange
    flags: Flags
    trainers: int
    writes: int = 0

    def publish(self, version: int, evaluate: Split | None = None) -> None:
        """Publish as soon as the exchange takes it."""
        self.announce(Publication(version=version, evaluate=evaluate))

    def announce(self, publication: Publication) -> None:
        """Publish with everything that can be said of weights."""
        write = self.writer(publication.version)
        until(lambda: self.exchange.publish(publication, write), "publish")

    def writer(self, version: int) -> Write:
        """Return a Write that only begins; the exchange's thread then waits for all ranks' parts."""

        def write(out: np.ndarray) -> Callable[[], None]:
            self.writes += 1
            if self.trainers > 1:
                (self.flags.folder / f"write-{self.writes}").write_text(str(version))
            return partial(finish, out, self.writes)

        def finish(out: np.ndarray, number: int) -> None:
            for rank in range(1, self.trainers):
                self.flags.wait(f"written-{number}-{rank}")
            write_part(out, weights_of(version), self.trainers, 0)

        return write

    def settle(self) -> None:
        """Wait until no round is under way."""
        until(self.exchange.gather, "the end of a round")

    def collect(self, wanted: int) -> list[Shard]:
        """Gather until that many shards have arrived."""
        shards: list[Shard] = []

        def arrived() -> bool:
            self.exchange.gather()
            shards.extend(self.exchange.collect())
            return len(shards) >= wanted

        until(arrived, f"{wanted} shards")
        return shards

    def close(self) -> None:
        """Close, and let the followers go."""
        (self.flags.folder / f"write-{self.writes + 1}").write_text("-1")
        self.exchange.close()


def write_part(out: np.ndarray, weights: np.ndarray, trainers: int, rank: int) -> None:
    """What trainer ``rank`` owns of the weights."""
    run = LAYOUT.parts(trainers)[rank]
    out[run[0].start : run[-1].end] = weights[run[0].start : run[-1].end]


@dataclass
class SearcherSide:
    """A searcher's end; ``seal`` makes a shard durable before it is offered."""

    exchange: SearcherExchange
    index: int
    flags: Flags
    seal: Callable[[Shard], None]

    def offer(self, index: int) -> None:
        """Seal and hand over shard ``index``."""
        shard = shard_of(self.index, index)
        self.seal(shard)
        self.exchange.offer(shard)

    def take(self) -> WeightUpdate:
        """The next weights; their bytes are checked."""
        updates: list[WeightUpdate | None] = []

        def polled() -> bool:
            updates.append(self.exchange.poll())
            return updates[-1] is not None

        until(polled, "weights")
        update = updates[-1]
        assert update is not None and update.layout == LAYOUT
        version = update.publication.version
        assert np.array_equal(update.data, weights_of(version)), f"wrong bytes of {version}"
        return update

    def wait(self, flag: str) -> None:
        """Wait for another process, going on to call the exchange as a searcher at work does."""
        until(lambda: (self.exchange.pending, (self.flags.folder / flag).exists())[1], f"flag {flag}")

    def work_to_end(self) -> None:
        """Poll like a searcher at work until the trainer has closed."""
        until(lambda: (self.exchange.poll(), self.exchange.closed)[1], "the end of the run")

    def wait_for_end(self) -> None:
        """Wait until the trainer has closed and nothing is left to poll."""
        until(lambda: self.exchange.closed, "the end of the run")
        assert self.exchange.poll() is None


# --- Weights arrive bit-identical, the newest wins ---


LEASES = {1: {3: 207, 2: 100}, **{number: {1: 300} for number in range(5000, 5100)}}
NEWEST = Publication(
    version=4, published=1.7e9 + 1 / 3, reference=-1, budget_end=104, lease_ends=LEASES, final=True
)
"""Arrives as it was sent, to the bit, but for leases. An elastic searcher's own end is that of its lease."""


def weights_trainer(side: TrainerSide) -> None:
    side.publish(1)
    side.settle()
    side.flags.set("published-1")
    for searcher in range(SEARCHERS):
        side.flags.wait(f"taken-{searcher}")
    for publication in (Publication(version=2), Publication(version=3, budget_end=103), NEWEST):
        side.announce(publication)
        side.settle()
    side.flags.set("published-4")
    side.close()


def weights_searcher(side: SearcherSide) -> None:
    assert (first := side.take()).publication == Publication(version=1)
    assert side.exchange.poll() is None
    assert not first.data.flags.writeable and not side.exchange.closed
    side.flags.set(f"taken-{side.index}")
    side.wait("published-4")
    time.sleep(0.2)
    end = 207 if isinstance(side.exchange, ElasticSearcherExchange) else 104
    assert replace(side.take().publication, lease_ends={}) == replace(NEWEST, lease_ends={}, budget_end=end)
    assert np.array_equal(first.data, weights_of(1)), "overwritten while somebody refers to them"
    side.wait_for_end()


# --- Weights to evaluate are never lost ---


def evaluations_trainer(side: TrainerSide) -> None:
    for version in range(12):
        side.publish(version, {0: "test", 3: "validation", 4: "validation", 11: "test"}.get(version))
    side.close()
    assert side.exchange.collect() == []


def evaluations_searcher(side: SearcherSide) -> None:
    rng = np.random.default_rng(side.index)
    seen = []
    while not seen or seen[-1][0] < 11:
        update = side.take()
        held = update.data.copy()
        time.sleep(rng.uniform(0, 0.1))
        assert np.array_equal(update.data, held), "weights changed while they were held"
        seen.append((update.publication.version, update.publication.evaluate))
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert [entry for entry in seen if entry[1]] == [
        *((0, "test"), (3, "validation"), (4, "validation"), (11, "test"))
    ]
    side.wait_for_end()


# --- Every offered shard arrives once, in order, to the bit ---

SHARDS = 25


def shards_trainer(side: TrainerSide) -> None:
    side.publish(0)
    shards = side.collect(10)
    for version in range(1, 4):
        side.publish(version)
        shards += side.exchange.collect()
    for searcher in range(SEARCHERS):
        side.flags.wait(f"offered-{searcher}")
    shards += side.collect(SEARCHERS * SHARDS - len(shards))
    side.close()
    assert side.exchange.collect() == []
    for searcher in range(SEARCHERS):
        got = [shard for shard in shards if shard.searcher == searcher]
        assert len(got) == SHARDS
        for index, shard in enumerate(got):
            assert same_shard(shard, shard_of(searcher, index)), f"shard {index} of {searcher}"
            shard.trajectories.check()


def shards_searcher(side: SearcherSide) -> None:
    rng = np.random.default_rng(side.index)
    for index in range(SHARDS):
        side.offer(index)
        time.sleep(rng.uniform(0, 0.01))
        side.exchange.poll()
    side.flags.set(f"offered-{side.index}")
    side.work_to_end()
    assert side.exchange.pending == 0


# --- Pending shards are counted; a refused publish writes nothing ---


def pending_trainer(side: TrainerSide) -> None:
    side.publish(0)
    for searcher in range(SEARCHERS):
        side.flags.wait(f"offered-{searcher}")
    assert {shard.index for shard in side.collect(3 * SEARCHERS)} == {0, 1, 2}
    side.settle()
    for version in range(1, 30):
        written: list[int] = []
        accepted = side.exchange.publish(
            Publication(version=version),
            lambda out: written.append(len(out)),  # noqa: B023
        )
        assert written == [LAYOUT.nbytes] * accepted
    side.flags.set("over")
    side.close()


def pending_searcher(side: SearcherSide) -> None:
    assert side.exchange.pending == 0
    side.take()  # what is offered from here on is for the next round
    for index in range(3):
        side.offer(index)
    if side.index == 0:
        side.wait("checked-1")
    assert side.exchange.pending == 3
    side.flags.set(f"checked-{side.index}")
    if side.index == 1:
        side.wait("checked-0")
    side.flags.set(f"offered-{side.index}")
    until(lambda: side.exchange.pending == 0, "the gather of all shards")
    side.work_to_end()


# --- Close: the last weights are polled first, a stop is passed on ---


def ending_trainer(side: TrainerSide) -> None:
    side.publish(0)
    for searcher in range(SEARCHERS):
        side.flags.wait(f"offered-{searcher}")
    until(lambda: side.exchange.gather() and side.exchange.stop_requested, "the request to stop")
    shards = side.collect(SEARCHERS)
    assert sorted((shard.searcher, shard.index) for shard in shards) == [(0, 0), (1, 0)]
    side.publish(5, "test")
    side.close()


def ending_searcher(side: SearcherSide) -> None:
    assert side.take().publication.version == 0
    if side.index == 1:
        side.exchange.request_stop()
    side.offer(0)
    side.flags.set(f"offered-{side.index}")
    time.sleep(0.3)
    assert not side.exchange.closed, "closed before the last weights were polled"
    last = side.take()
    assert (last.publication.version, last.publication.evaluate) == (5, "test")
    side.wait_for_end()
    side.offer(1)  # too late for this run; a resume finds it on disk
    assert side.exchange.closed


SCENARIOS = {
    "weights": (weights_trainer, weights_searcher),
    "evaluations": (evaluations_trainer, evaluations_searcher),
    "shards": (shards_trainer, shards_searcher),
    "pending": (pending_trainer, pending_searcher),
    "ending": (ending_trainer, ending_searcher),
}


BESIDE_A_WORLD = ("weights", "shards")
"""Those of a trainer with searchers of both kinds: who comes and goes evaluates nothing, stops nobody, and
gets weights once the trainer calls again after their round, which it does not in ``pending``."""


def follow(next_weights: Callable[[], np.ndarray], flags: Flags, trainers: int, rank: int) -> None:
    """A following trainer rank: write its part whenever the leader says so."""
    for write in range(1, 1_000_000):
        order = flags.folder / f"write-{write}"
        until(lambda: order.exists() and order.read_text(), "the leader")  # noqa: B023
        if (version := int(order.read_text())) < 0:
            return
        write_part(next_weights(), weights_of(version), trainers, rank)
        flags.set(f"written-{write}-{rank}")


def make_run(folder: Path) -> RunDir:
    """With the folder for weights."""
    run = RunDir(folder / "run")
    run.weights.mkdir(parents=True, exist_ok=True)
    return run


def seal(run: RunDir, shard: Shard) -> None:
    """Make a shard durable."""
    run.shard_folder(shard.searcher).mkdir(parents=True, exist_ok=True)
    write_shard(run.shard_file(shard.searcher, shard.index), shard)


def open_board(run: RunDir, shards: PendingShards) -> FileTrainerExchange:
    """The trainer's end over files."""
    return FileTrainerExchange(
        run.weights,
        LAYOUT,
        attempt="first",
        read_pending=shards.read,
        progress=Progress(),
        evaluated=lambda split, version: False,
    )


def run_visitor(scenario: str, folder: Path) -> None:
    """The part of searcher 1, of transport ``both``."""
    run, flags = make_run(folder), Flags(folder)
    exchange = ElasticSearcherExchange(
        run.weights,
        1,
        lease=3,
        timeout=PATIENCE,
        leaving=lambda: False,
        finished=lambda: True,
        evaluates=lambda: False,
    )
    flags.set("open-1")
    SCENARIOS[scenario][1](SearcherSide(exchange, 1, flags, partial(seal, run)))


def run_files(scenario: str, folder: Path, rank: int) -> None:
    """This process's part over the file system."""
    run, flags = make_run(folder), Flags(folder)
    lead, search = SCENARIOS[scenario]
    if rank == 0:
        shards = PendingShards(run, timeout=PATIENCE)
        trainer = open_board(run, shards)
        for searcher_index in range(SEARCHERS):
            flags.wait(f"open-{searcher_index}")
        lead(TrainerSide(trainer, flags, trainers=1))
        if scenario == "weights":
            assert {path.suffix for path in run.weights.glob("step-*")} == {CHANGES, WEIGHTS}
    else:
        searcher = FileSearcherExchange(run.weights, rank - 1, attempt="first", deadline=PATIENCE)
        flags.set(f"open-{rank - 1}")
        search(SearcherSide(searcher, rank - 1, flags, partial(seal, run)))


def run_mpi(scenario: str, folder: Path, transport: str, trainers: int) -> int:
    """This process's part over MPI, and its rank; ``nodes`` makes every rank a node of its own."""
    from mpi4py import MPI

    from tba_hpc.exchange import mpi_exchange, mpi_world

    rank, flags = MPI.COMM_WORLD.rank, Flags(folder)
    lead, search = SCENARIOS[scenario]
    world = mpi_world.MpiWorld.join(
        "trainer" if rank < trainers else "searcher",
        trainers=trainers,
        searchers=1 if transport == BOTH else SEARCHERS,
        deadline=PATIENCE,
        node_split=(lambda comm: comm.Split(comm.rank))
        if "nodes" in transport
        else mpi_world.split_by_memory,
    )
    if rank == 0:
        trainer: TrainerExchange = mpi_exchange.MpiTrainerExchange(
            world, LAYOUT, bucket_mb=1, progress=Progress()
        )
        if transport == BOTH:
            run = make_run(folder)
            board = open_board(run, PendingShards(run, timeout=PATIENCE, among=range(1, 2)))
            flags.wait("open-1")
            trainer = HybridTrainerExchange(trainer, board, has_elastic=lambda: True)
        lead(TrainerSide(trainer, flags, trainers))
    elif rank < trainers:
        follower = mpi_exchange.MpiTrainerFollower(world)
        follow(follower.next_weights, flags, trainers, rank)
        follower.close()
    else:
        search(SearcherSide(mpi_exchange.MpiSearcherExchange(world), world.index, flags, lambda shard: None))
    return rank


def main() -> None:
    """Play one process of every scenario."""
    transport, folder, *number = sys.argv[1:]
    for scenario in BESIDE_A_WORLD if transport == BOTH else SCENARIOS:
        place = Path(folder) / scenario
        place.mkdir(exist_ok=True)
        rank = int(number[0]) if number else 0
        if not number:
            rank = run_mpi(scenario, place, transport, TRAINERS.get(transport, 1))
        elif transport == BOTH:
            run_visitor(scenario, place)
        else:
            run_files(scenario, place, rank)
        print(f"{scenario} holds at rank {rank}", flush=True)


if __name__ == "__main__":
    main()
