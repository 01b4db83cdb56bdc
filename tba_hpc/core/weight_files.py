"""Files of weights that the processes of a node share by mapping them into memory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Literal, Self

import numpy as np

SHARED_MEMORY = Path("/dev/shm")

PAGE = 4096
"""Bytes of a memory page."""

Mode = Literal["r", "r+", "c"]
"""Mode of numpy.memmap: "c" is copy-on-write."""


class WeightFile:
    """Weights in an open file: its last ``nbytes`` bytes, from ``offset`` on.

    The file needs no name: it exists as long as a process has it open. Each object has its own descriptor,
    which is closed when the object is deleted. generation: counter that the file's owner increases whenever
    the file gets new memory pages; others then know that their mapping still has the old pages.
    """

    def __init__(self, descriptor: int, nbytes: int, offset: int = 0) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        self.offset = offset
        self.generation = 0

    @classmethod
    def open(cls, path: str | Path, nbytes: int, *, write: bool = False) -> Self:
        """Open the file at ``path``, whose last ``nbytes`` bytes are weights."""
        descriptor = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        return cls(descriptor, nbytes, os.fstat(descriptor).st_size - nbytes)

    @classmethod
    def copy_of(cls, data: np.ndarray) -> Self:
        """Copy weights, uint8 [nbytes], into a file in memory that has no name."""
        file = cls(os.memfd_create("weights"), len(data))
        os.truncate(file._descriptor, file.nbytes)
        np.copyto(file.map("r+"), data)
        return file

    @property
    def path(self) -> str:
        """Path at which this process and its children can open the file while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def inode(self) -> int:
        """Inode number of the file, which no other file has while this one is open or mapped."""
        return os.fstat(self._descriptor).st_ino

    @property
    def in_shared_memory(self) -> bool:
        """True if the file lies in SHARED_MEMORY (/dev/shm), with or without a name."""
        return Path(self.path).readlink().is_relative_to(SHARED_MEMORY)

    def map(self, mode: Mode) -> np.ndarray:
        """Return the weights, uint8 [nbytes], as a memory map, which may outlive this object."""
        return np.memmap(self.path, np.uint8, mode, self.offset, (self.nbytes,))

    def reader(self) -> Self:
        """Open the same file again. While the returned object exists, ``has_readers`` is True."""
        reader = self.open(self.path, self.nbytes)
        fcntl.flock(reader._descriptor, fcntl.LOCK_SH)
        return reader

    @property
    def has_readers(self) -> bool:
        """True if any process holds a ``reader`` of this file. Locks the file for a moment."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def allocate(self) -> None:
        """Reserve memory or disk space for all weights now. Raises OSError if there is not enough."""
        os.posix_fallocate(self._descriptor, self.offset, self.nbytes)

    def give_back(self) -> None:
        """Release the weights' memory or disk space; the file keeps its length, with zeros."""
        os.truncate(self._descriptor, self.offset)
        os.truncate(self._descriptor, self.offset + self.nbytes)

    def __del__(self) -> None:
        os.close(self._descriptor)


def fault_in(weights: np.ndarray) -> None:
    """Load all pages of mapped weights, uint8 [nbytes], now, so that their next user does not wait."""
    weights[::PAGE].max(initial=0)  # reads a byte of each page
