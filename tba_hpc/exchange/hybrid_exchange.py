"""The trainer's end of the exchange for a run with both an MPI world and elastic searchers, which use files.

Weights go to the MPI world first. When that round is over, the trainer's next call of ``publish``, ``gather``
or ``collect`` starts a thread that copies them to files. So elastic searchers get the weights a moment later,
and the other searchers do not wait for the copying.
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

    world, files: the ends over MPI and over files. ``files`` finds only shards of elastic searchers.
    has_elastic: function that returns whether any elastic searcher is there; while there is none, no weights
    are copied to files.
    """

    def __init__(
        self, world: MpiTrainerExchange, files: FileTrainerExchange, *, has_elastic: Callable[[], bool]
    ) -> None:
        self._world = world
        self._files = files
        self._has_elastic = has_elastic
        self._newest: Publication | None = None  # what was published last in the MPI world
        self._passed_on: Publication | None = None  # what was copied to files last, or is being copied
        self._closed = False

    def publish(self, publication: Publication, write: Write) -> bool:
        self._pass_on()
        started = self._world.publish(publication, write)
        self._newest = publication if started else self._newest
        return started

    def gather(self) -> bool:
        """Start a round without weights over MPI, and one over files, to fetch shards.

        Returns False if an earlier round is in progress, or if elastic searchers lack the newest weights.
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
        """End this attempt over files and over MPI, in this order.

        A copy that is under way is finished first. Elastic searchers see for themselves whether the run is
        finished.
        """
        self._closed = True
        self._files.close()
        self._world.close()

    def _pass_on(self) -> None:
        """Begin to copy the newest weights to files if elastic searchers lack them and no copy is running."""
        if self._closed or not self._files.idle:
            return
        found = self._world.arrived()
        if found and found.publication is not self._passed_on and self._has_elastic():
            self._passed_on = found.publication
            self._files.pass_on(replace(found, publication=replace(found.publication, evaluate=None)))
