"""Host memory that CUDA copies to and from at the speed of the link, because it knows the pages.

Registered pages stay the same until they are unregistered, even if their file is truncated and gets others:
then a copy would go nowhere. Whoever truncates maps the file anew (``exchange.mpi_world.NodeMemory``), and
the old map's pages are unregistered with it.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tba_hpc.core.weight_files import WeightFile

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: whatever the device."""

MAPS_KEPT = 2
"""A node's weights are in two files that take turns."""


class RegisteredMemory:
    """The pages that this process has registered. cudart: CUDA's runtime; None without a GPU."""

    def __init__(self, cudart: Any = None) -> None:
        self._cudart: Any = cudart or (torch.cuda.cudart() if torch.cuda.is_available() else None)
        self._pages: set[int] = set()  # the first of each range
        self._refused = False

    @property
    def works(self) -> bool:
        """True with a GPU, as long as CUDA has refused no memory."""
        return self._cudart is not None and not self._refused

    def register(self, memory: np.ndarray, start: int = 0, end: int | None = None) -> None:
        """Register the pages of bytes [start, end) of an array, uint8, for as long as it lives.

        Does nothing the second time, so call it before each copy. If CUDA refuses, that is noted once, and
        copies are made as without.
        """
        first = (memory.ctypes.data + start) // mmap.PAGESIZE * mmap.PAGESIZE
        last = memory.ctypes.data + (memory.nbytes if end is None else end)
        if not self.works or first in self._pages or last <= first:
            return
        nbytes = -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE
        if error := int(self._cudart.cudaHostRegister(first, nbytes, PORTABLE)):
            self._give_up(nbytes, error)
            return
        self._pages.add(first)
        weakref.finalize(_owner(memory), self._unregister, first).atexit = False  # the process ends them all

    def _unregister(self, first: int) -> None:
        self._pages.discard(first)
        self._cudart.cudaHostUnregister(first)

    def _give_up(self, nbytes: int, error: int) -> None:
        log.warning(
            "CUDA does not register %.1f GB of shared memory (cudaError %d): weights are copied at a third "
            "of the link's speed, or less",
            *(nbytes / 1e9, error),
        )
        self._refused = True
        with suppress(RuntimeError, AssertionError):  # CUDA would tell it again to the next kernel: this one
            torch.ones(1, device="cuda").add_(1)


class KeptMaps:
    """Maps weight files; those of a node's memory stay mapped and registered until MAPS_KEPT others came."""

    def __init__(self, memory: RegisteredMemory) -> None:
        self._memory = memory
        self._maps: dict[tuple[int, int], np.ndarray] = {}

    def map(self, file: WeightFile) -> np.ndarray:
        """uint8 [nbytes]: the weights, which must not be written to."""
        if not (self._memory.works and file.in_shared_memory):
            return file.map("c")  # torch wants memory that it could write to
        key = file.inode, file.generation
        found = self._maps.pop(key, None)
        if found is None:
            found = file.map("r+")  # of a private map, registering would copy every page
        self._memory.register(found)
        self._maps = dict([*self._maps.items(), (key, found)][-MAPS_KEPT:])
        return found


def _owner(memory: np.ndarray) -> np.ndarray:
    """The array whose end unmaps the memory."""
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory
