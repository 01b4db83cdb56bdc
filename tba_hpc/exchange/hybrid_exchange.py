"""The trainer's end of both exchanges, for a run that has both an MPI world and elastic searchers.

Weights go to the MPI world first. Once they are complete in the memory of the leader's node, the next call
starts a copy to files in a thread. Elastic searchers get them a moment later, at no cost to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tba_hpc.core.ports import Write
from tba_hpc.core.types import Publication, Shard
from tba_hpc.exchange.file_exchange import FileTrainerExchange

if TYPE_CHECKING:
    from tba_hpc.exchange.mpi_exchange import MpiTrainerExchange


class HybridTrainerExchange:
    """Combines the trainer's ends over MPI and over files. Only searchers of the MPI world evaluate.

    files: exchange that finds only the shards of elastic searchers. has_elastic: returns whether there are
    elastic searchers; while there are none, weights are not copied to files.
    """

    def __init__(
        self, world: MpiTrainerExchange, files: FileTrainerExchange, *, has_elastic: Callable[[], bool]
    ) -> None:
        self._world = world
        self._files = files
        self._has_elastic = has_elastic
        self._newest: Publication | None = None  # published to the world
        self._passed_on: Publication | None = None  # copied to the files, or being copied
        self._closed = False

    def publish(self, publication: Publication, write: Write) -> bool:
        self._pass_on()
        started = self._world.publish(publication, write)
        self._newest = publication if started else self._newest
        return started

    def gather(self) -> bool:
        """Start a round without weights on both sides, to fetch shards.

        Returns False if a side is still in a round, or if elastic searchers lack the newest weights.
        """
        self._pass_on()
        started = [side.gather() for side in (self._world, self._files)]
        return all(started) and (self._passed_on is self._newest or not self._has_elastic())

    def collect(self) -> list[Shard]:
        self._pass_on()
        return self._world.collect() + self._files.collect()

    @property
    def stop_requested(self) -> bool:
        return self._world.stop_requested

    def close(self) -> None:
        """End the run on both sides; elastic searchers find out by themselves whether it is finished.

        The file side closes first: the world may wait for memory that is still being copied to files.
        """
        self._closed = True
        self._files.close()
        self._world.close()

    def _pass_on(self) -> None:
        """Begin to copy the newest weights to files, if not yet done. On a slow disk some are skipped."""
        if self._closed or not self._files.idle:
            return
        found = self._world.arrived()
        if found and found.publication is not self._passed_on and self._has_elastic():
            self._passed_on = found.publication
            self._files.pass_on(replace(found, publication=replace(found.publication, evaluate=None)))
