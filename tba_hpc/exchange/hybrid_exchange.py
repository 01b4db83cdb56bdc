"""The trainer's end where some searchers share its MPI world and others come and go over files.

It must not know how either travels. Weights go to the MPI world first; once they lie whole in the memory of
the leader's node, from however many trainer ranks, the next call copies them to the files, beside the loop.
So those who come and go may get weights a moment later, and cost the others nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from tba_hpc.core.ports import TrainerExchange
from tba_hpc.core.types import Publication, Shard
from tba_hpc.exchange.file_exchange import FileTrainerExchange

SLOTS = 2
"""Publishes after which the memory of the first is written again."""


class KeepsCopy(TrainerExchange, Protocol):
    """The exchange with those who stay, which keeps a copy of the weights that it has published."""

    def arrived(self) -> tuple[int, Publication, np.ndarray] | None:
        """What was published last, once that is over; see ``MpiTrainerExchange``."""


class HybridTrainerExchange:
    """Both ends as one. Those of the world evaluate; so whoever comes and goes is not asked to.

    board: it finds no shards but those of searchers that come and go. visited: whether any of these is there;
    where none is, nothing is copied.
    """

    def __init__(self, world: KeepsCopy, board: FileTrainerExchange, *, visited: Callable[[], bool]) -> None:
        self._world = world
        self._board = board
        self._visited = visited
        self._publishes = 0  # to the world
        self._passed_on = -1  # which of them the board has, or copies
        self._copying = False
        self._closed = False

    def publish(self, publication: Publication, write: Callable[[np.ndarray], None]) -> bool:
        """Publish to the world, from which the weights go on; see ports.TrainerExchange."""
        self._pass_on()
        overwrites = self._publishes - self._passed_on == SLOTS
        if (self._copying and overwrites) or not self._world.publish(publication, write):
            return False
        self._publishes += 1
        return True

    def gather(self) -> bool:
        """Look for shards on both sides; False where a round was under way on either."""
        self._pass_on()
        started = [side.gather() for side in (self._world, self._board)]
        return all(started) and (self._passed_on == self._publishes - 1 or not self._visited())

    def collect(self) -> list[Shard]:
        """Shards of both sides."""
        self._pass_on()
        return self._world.collect() + self._board.collect()

    @property
    def stop_requested(self) -> bool:
        """Whether a searcher of the world has asked to stop the run."""
        return self._world.stop_requested

    def close(self) -> list[Shard]:
        """End the run on both sides; those who come and go look by themselves whether it is finished."""
        self._closed = True
        return self._world.close() + self._board.close()

    def _pass_on(self) -> None:
        """Begin to copy the newest weights to the files, where they have arrived and that is not done yet.

        Where the disk is slower than the trainer, some are left out.
        """
        if self._closed or not self._board.idle:
            return
        self._copying = False
        found = self._world.arrived()
        if found is None or found[0] == self._passed_on or not self._visited():
            return
        number, publication, weights = found
        self._copying = self._board.pass_on(replace(publication, evaluate=None), weights)
        self._passed_on = number
