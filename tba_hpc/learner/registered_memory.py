"""Registers host memory with CUDA, so that copies to and from it run at full speed.

A registration holds for physical pages. A file that is truncated gets new pages, and whatever is copied to
the old ones is lost. A process that truncates a file must therefore map it again, as
``exchange.mpi_world.NodeMemory`` does. The old pages are unregistered when the old map is deleted.
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
"""CUDA's flag cudaHostRegisterPortable: register memory for all devices."""

MAPS_KEPT = 2
"""Number of weight files that KeptMaps keeps mapped. A node's weights alternate between two files."""


class RegisteredMemory:
    """This process's memory that is registered with CUDA. Without a GPU it does nothing.

    cudart: CUDA's runtime library; None: torch's, if there is a GPU.
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart: Any = cudart or (torch.cuda.cudart() if torch.cuda.is_available() else None)
        self._pages: set[int] = set()  # address of the first page of each registered range
        self._refused = False

    @property
    def works(self) -> bool:
        """True if there is a GPU and CUDA has refused no memory so far."""
        return self._cudart is not None and not self._refused

    def register(self, memory: np.ndarray, start: int = 0, end: int | None = None) -> None:
        """Register the pages of bytes [start, end) of an array, uint8, until the array is deleted.

        Call this before each copy; repeated calls do nothing. If ``end`` is None, it is the array's end. If
        CUDA refuses, a warning is logged once, and all later copies are slower.
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
        weakref.finalize(_owner(memory), self._unregister, first).atexit = False  # an exit frees everything

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
        with suppress(RuntimeError, AssertionError):  # CUDA reports the error again: let this kernel get it
            torch.ones(1, device="cuda").add_(1)


class KeptMaps:
    """Maps weight files. The last MAPS_KEPT files in shared memory stay mapped, and registered with CUDA."""

    def __init__(self, memory: RegisteredMemory) -> None:
        self._memory = memory
        self._maps: dict[tuple[int, int], np.ndarray] = {}

    def map(self, file: WeightFile) -> np.ndarray:
        """Return the weights in a file, uint8 [nbytes]. The caller must not change them."""
        if not (self._memory.works and file.in_shared_memory):
            return file.map("c")  # private and writable, because torch accepts no read-only memory
        key = file.inode, file.generation
        found = self._maps.pop(key, None)
        if found is None:
            found = file.map("r+")  # shared: registering a private map would copy every page
        self._memory.register(found)
        self._maps = dict([*self._maps.items(), (key, found)][-MAPS_KEPT:])
        return found


def try_a_page(cudart: Any = None) -> str:
    """Register a page of shared memory with CUDA, and release it.

    Returns the text ``cudaError N``; N is 0 for success.
    """
    cudart = cudart or torch.cuda.cudart()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(mmap.PAGESIZE)
        page = np.memmap(file, np.uint8, "r+")
    error = int(cudart.cudaHostRegister(page.ctypes.data, page.nbytes, PORTABLE))
    if not error:
        cudart.cudaHostUnregister(page.ctypes.data)
    return f"cudaError {error}"


def _owner(memory: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view. Deleting that array unmaps the memory."""
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory
