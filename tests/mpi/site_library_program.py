"""One world of any MPI library: ``site_library_program.py FOLDER``, a trainer and two searchers on two nodes.

Weights go out between the (emulated) nodes and shards come in. The leader leaves what it has loaded in
FOLDER/facts.json.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from contracts.exchange_program import LAYOUT, Flags, SearcherSide, TrainerSide, same_shard, shard_of
from mpi4py import MPI

from tba_hpc.checks.library import describe
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Shard
from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange
from tba_hpc.exchange.mpi_world import MpiWorld, library_version

HOSTS = ("node1", "node2", "node2")
VERSIONS = 5


def train(world: MpiWorld, folder: Path) -> None:
    """Versions out, for each of them a shard of each searcher in."""
    exchange = MpiTrainerExchange(world, LAYOUT, bucket_mb=1, progress=Progress())
    side = TrainerSide(exchange, Flags(folder), trainers=1)
    shards: list[Shard] = []
    for version in range(VERSIONS):
        side.publish(version, "test")  # which no newer version may replace
        shards += side.collect(2)
    side.close()
    assert all(same_shard(shard, shard_of(shard.searcher, shard.index)) for shard in shards)
    assert sorted((shard.index, shard.searcher) for shard in shards) == [
        (index, searcher) for index in range(VERSIONS) for searcher in range(2)
    ]


def search(world: MpiWorld, folder: Path) -> None:
    """Take every version, to the bit, and answer it with a shard."""
    side = SearcherSide(MpiSearcherExchange(world), world.index, Flags(folder), lambda shard: None)
    for version in range(VERSIONS):
        assert side.take().publication.version == version
        side.offer(version)
    side.wait_for_end()


def main() -> None:
    """Play one rank."""
    folder, comm = Path(sys.argv[1]), MPI.COMM_WORLD
    world = MpiWorld.join(
        "searcher" if comm.rank else "trainer",
        trainers=1,
        searchers=2,
        deadline=30.0,
        node_split=lambda comm: comm.Split(HOSTS.index(HOSTS[comm.rank])),
    )
    world = replace(world, hosts=HOSTS)
    if comm.rank:
        search(world, folder)
        return
    train(world, folder)
    facts = {"library": asdict(describe(library_version()))}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
