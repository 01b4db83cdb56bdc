"""Host memory registered with CUDA, which then copies to and from it at the speed of the link.

Registered pages stay the same until they are unregistered, even if their file is truncated and gets other
pages. A copy would then be lost. A process that truncates a file therefore maps it anew
(``exchange.mpi_world.NodeMemory``), and the old map's pages are unregistered with it.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tba_hpc.core.weight_files import SHARED_MEMORY, WeightFile

log = logging.getLogger(__name__)

PORTABLE = 1
"""Flag cudaHostRegisterPortable: registered for every device."""

MAPS_KEPT = 2
"""Number of maps that stay: a node's weights are in two files that take turns."""


class RegisteredMemory:
    """The pages that this process has registered. cudart: CUDA's runtime; None: torch's, if it has a GPU."""

    def __init__(self, cudart: Any = None) -> None:
        self._cudart: Any = cudart or (torch.cuda.cudart() if torch.cuda.is_available() else None)
        self._pages: set[int] = set()  # address of the first page of each range
        self._refused = False

    @property
    def works(self) -> bool:
        """True if there is a GPU and CUDA has refused no memory so far."""
        return self._cudart is not None and not self._refused

    def register(self, memory: np.ndarray, start: int = 0, end: int | None = None) -> None:
        """Register the pages of bytes [start, end) of an array, uint8, for as long as it lives.

        A second call does nothing, so call it before each copy. If CUDA refuses, that is logged once, and
        copies are made without registered pages.
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
        weakref.finalize(_owner(memory), self._unregister, first).atexit = False  # its end releases them all

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
        with suppress(RuntimeError, AssertionError):  # the next kernel gets the error again: this one
            torch.ones(1, device="cuda").add_(1)


class KeptMaps:
    """Maps of weight files; in shared memory they stay mapped and registered until MAPS_KEPT others came."""

    def __init__(self, memory: RegisteredMemory) -> None:
        self._memory = memory
        self._maps: dict[tuple[int, int], np.ndarray] = {}

    def map(self, file: WeightFile) -> np.ndarray:
        """Map the weights of a file, uint8 [nbytes], which must not be written to."""
        if not (self._memory.works and file.in_shared_memory):
            return file.map("c")  # torch requires writable memory
        key = file.inode, file.generation
        found = self._maps.pop(key, None)
        if found is None:
            found = file.map("r+")  # registering a private map would copy every page
        self._memory.register(found)
        self._maps = dict([*self._maps.items(), (key, found)][-MAPS_KEPT:])
        return found


def try_a_page(cudart: Any = None) -> str:
    """Register a page of shared memory with CUDA and release it; return ``cudaError N``, 0 for success."""
    cudart = cudart or torch.cuda.cudart()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(mmap.PAGESIZE)
        page = np.memmap(file, np.uint8, "r+")
    error = int(cudart.cudaHostRegister(page.ctypes.data, page.nbytes, PORTABLE))
    if not error:
        cudart.cudaHostUnregister(page.ctypes.data)
    return f"cudaError {error}"


def _owner(memory: np.ndarray) -> np.ndarray:
    """Return the array whose deletion unmaps the memory."""
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory
