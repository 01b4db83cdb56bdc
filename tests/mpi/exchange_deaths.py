"""Worlds in which searchers die: ``exchange_deaths.py FOLDER NODES DEATH…``, one trainer, three searchers.

NODES says on which (emulated) node each rank is, as in ``0011``. A DEATH is ``SEARCHER:MOMENT:VERSION``: the
searcher kills itself at that moment of the round that brings that version. Each searcher seals and offers
a shard whenever weights arrive; the trainer asserts that everything sealed has come, once and in order.
"""

import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from contracts.exchange_program import LAYOUT, same_shard, shard_of, until, weights_of
from mpi4py import MPI

from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Publication
from tba_hpc.exchange.hdf5_shards import PendingShards, write_shard
from tba_hpc.exchange.mpi_exchange import MpiSearcherExchange, MpiTrainerExchange
from tba_hpc.exchange.mpi_world import MpiWorld
from tba_hpc.run.directory import RunDir

VERSIONS = 12
EVALUATED = {0: "test", 4: "validation", 5: "validation", VERSIONS - 1: "test"}


class Mortal(MpiSearcherExchange):
    """A searcher's end that dies on the communication thread at a moment of a round."""

    deaths: frozenset[str] = frozenset()

    def _die(self, moment: str, version: int) -> None:
        if f"{moment}:{version}" in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def _prepare(self, header):
        self._header = header
        self._die("header", _version(header))
        return super()._prepare(header)

    def _show(self, header):
        self._die("weights", _version(header))
        super()._show(header)

    def _handed_over(self):
        self._die("sent", _version(self._header))
        super()._handed_over()

    def _is_free(self):
        self._die("shown", _version(self._header))
        return super()._is_free()


def _version(header) -> int:
    """Of the weights of a round; 0 where none travel."""
    text = header["publication"]
    return Publication.from_json(text).version if text else 0


def part(folder: Path, version: int, place: int, places: int) -> Path:
    """File that says that a part of an evaluation is complete."""
    return folder / f"evaluated-{version}-{place}-of-{places}"


def evaluated(folder: Path, version: int) -> bool:
    """Whether all parts are there, for any number of parts."""
    sets = [all(part(folder, version, i, n).exists() for i in range(n)) for n in (1, 2, 3)]
    return any(sets)


def train(world: MpiWorld, run: RunDir, deaths: list[str]) -> None:
    """Publish all versions, then check what has come."""
    trainer = MpiTrainerExchange.open(
        world,
        LAYOUT,
        bucket_mb=1,
        delta="always",
        read_pending=PendingShards(run).read,
        progress=Progress(),
        evaluated=lambda split, version: evaluated(run.path, version),
    )
    shards, lost, began = [], [], time.monotonic()

    def poll() -> None:
        shards.extend(trainer.collect())
        lost.extend(trainer.lost())

    def write(version: int, out: np.ndarray) -> None:
        np.copyto(out, weights_of(version))

    for version in range(VERSIONS):
        until(
            lambda: trainer.publish(
                Publication(version=version, evaluate=EVALUATED.get(version)),  # noqa: B023
                partial(write, version),  # noqa: B023
            ),
            "publish",
        )
        poll()

    def complete() -> bool:
        trainer.gather()
        poll()
        return evaluated(run.path, VERSIONS - 1)

    until(complete, "the last evaluation")
    shards += trainer.close()
    lost.extend(trainer.lost())
    sealed = sorted(run.shard_files())
    came = [(shard.searcher, shard.index) for shard in shards]
    assert len(set(came)) == len(came), f"doubled: {came}"
    assert sorted(came) == sealed, f"missing: {set(sealed) - set(came)}"
    assert all(same_shard(shard, shard_of(shard.searcher, shard.index)) for shard in shards)
    for searcher in range(3):
        mine = [index for owner, index in came if owner == searcher]
        assert mine == sorted(mine)
    dead = sorted({int(death[0]) for death in deaths})
    assert sorted(searcher for searcher, _ in lost) == dead, lost
    print(f"went on without {dead} in {time.monotonic() - began:.2f} s, {len(came)} shards", flush=True)


def search(world: MpiWorld, run: RunDir, deaths: list[str]) -> None:
    """Take weights, check them, seal and offer a shard each time."""
    Mortal.deaths = frozenset(death[2:] for death in deaths if int(death[0]) == world.index)
    exchange = Mortal.open(world)
    run.shard_folder(world.index).mkdir(parents=True, exist_ok=True)
    seen, sealed = -1, 0
    while not exchange.closed:
        update = exchange.poll()
        if update is None:
            time.sleep(0.001)
            continue
        version = update.publication.version
        assert np.array_equal(update.data, weights_of(version)), f"wrong bytes of {version}"
        assert version >= seen
        if version > seen:
            shard = shard_of(world.index, sealed)
            write_shard(run.shard_file(world.index, sealed), shard)
            sealed += 1
            exchange._die("sealed", version)
            exchange.offer(shard)
        seen = version
        if update.publication.evaluate:
            until_evaluated = time.monotonic() + 0.1
            while time.monotonic() < until_evaluated:
                assert exchange.pending >= 0
                time.sleep(0.005)
            exchange._die("evaluating", version)
            part(run.path, version, *update.share).touch()
    assert seen == VERSIONS - 1
    exchange.close()
    print(f"searcher {world.index} has left", flush=True)


def main() -> None:
    """Play one rank."""
    folder, nodes, *deaths = sys.argv[1:]
    rank, run = MPI.COMM_WORLD.rank, RunDir(Path(folder))
    world = MpiWorld.join(
        "searcher" if rank else "trainer",
        trainers=1,
        searchers=3,
        deadline=20.0,
        node_split=lambda comm: comm.Split(int(nodes[comm.rank])),
    )
    (search if rank else train)(world, run, deaths)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        main()
    except ExchangeError as error:
        print(f"refused: {error}", flush=True)
        time.sleep(0.3)
        MPI.COMM_WORLD.Abort(3)
