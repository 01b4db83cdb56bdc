"""Weights in a file that the processes of a node map, each without a copy."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Literal, Self

import numpy as np

SHARED_MEMORY = Path("/dev/shm")

Mode = Literal["r", "r+", "c"]
"""As of numpy.memmap; "c": what is written stays private."""


class WeightFile:
    """Weights at the end of an open file, ``nbytes`` from ``offset`` on.

    The file needs no name: it lives as long as anybody has it open. Each object has a descriptor of its own,
    and closes it when nobody refers to the object any more. generation: how often its memory was given back,
    as its owner counts; from then on it has other pages.
    """

    def __init__(self, descriptor: int, nbytes: int, offset: int = 0) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        self.offset = offset
        self.generation = 0

    @classmethod
    def open(cls, path: str | Path, nbytes: int, *, write: bool = False) -> Self:
        """Open the last ``nbytes`` of a file."""
        descriptor = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        return cls(descriptor, nbytes, os.fstat(descriptor).st_size - nbytes)

    @classmethod
    def copy_of(cls, data: np.ndarray) -> Self:
        """Weights, uint8 [nbytes], in memory, in a file without a name."""
        file = cls(os.memfd_create("weights"), len(data))
        os.truncate(file._descriptor, file.nbytes)
        np.copyto(file.map("r+"), data)
        return file

    @property
    def path(self) -> str:
        """Opens the same file in this process and those that it has started, while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def inode(self) -> int:
        """The file's number, which is no other's while it is open or mapped."""
        return os.fstat(self._descriptor).st_ino

    @property
    def in_shared_memory(self) -> bool:
        """Tells if the file is one of SHARED_MEMORY, with or without a name."""
        return Path(self.path).readlink().is_relative_to(SHARED_MEMORY)

    def map(self, mode: Mode) -> np.ndarray:
        """uint8 [nbytes]: the weights, which stay mapped beyond this object."""
        return np.memmap(self.path, np.uint8, mode, self.offset, (self.nbytes,))

    def reader(self) -> Self:
        """The same weights; ``has_readers`` is true while the reader lives."""
        reader = self.open(self.path, self.nbytes)
        fcntl.flock(reader._descriptor, fcntl.LOCK_SH)
        return reader

    @property
    def has_readers(self) -> bool:
        """Whether there is a ``reader`` of this file in any process."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def allocate(self) -> None:
        """Take the memory or the disk space for all of it now. Raises OSError if there is not enough."""
        os.posix_fallocate(self._descriptor, self.offset, self.nbytes)

    def give_back(self) -> None:
        """Forget the contents, and take no memory until it is written again."""
        os.truncate(self._descriptor, self.offset)
        os.truncate(self._descriptor, self.offset + self.nbytes)

    def __del__(self) -> None:
        os.close(self._descriptor)
