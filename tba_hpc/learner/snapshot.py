"""A copy of a trainer rank's state, trees of tensors, to be written while training goes on."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils import _pytree as pytree

from tba_hpc.config import ConfigError
from tba_hpc.run.beside import at_once
from tba_hpc.run.inventory import SummedFile
from tba_hpc.run.memory import free_memory

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Most of the free memory of a machine that the copies of its ranks may take."""


class Snapshot:
    """Copies of the files of one rank, to be written later.

    where: as checkpoint.snapshot. local_ranks: how many ranks of this machine do the same. gpu: whether the
    state is there. Raises ConfigError if ``where`` is a folder that cannot be used.
    """

    def __init__(self, where: str | None, *, local_ranks: int, gpu: bool) -> None:
        if where not in (None, "memory") and not os.access(where, os.W_OK | os.X_OK):
            raise ConfigError(
                f"checkpoint.snapshot={where} is no folder that can be written to on {socket.gethostname()}: "
                "make it on every node of the trainer, or choose memory"
            )
        torch.serialization.set_crc32_options(False)  # the inventory has checksums; these would cost as much
        self._where = where
        self._local_ranks = local_ranks
        self._stager = DefaultStager(  # keeps its memory for the next copy
            StagingOptions(
                use_pinned_memory=gpu,
                use_non_blocking_copy=gpu,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        self._fits: dict[str, bool] = {}  # by the name of the file
        self._files: list[Callable[[], SummedFile]] = []

    def add(self, state: dict[str, Any], path: str) -> None:
        """Copy what ``torch.save`` is to write to ``path``."""
        save = partial(torch.save, state)
        write: Callable[[], SummedFile]
        if self._where is None:
            write = partial(_write_file, Path(path), save)
        elif self._where != "memory":
            # An error is raised when it is written: here the other ranks would wait for this one.
            copy = at_once(partial(_copied, self._where, save))
            write = partial(_write_copy, Path(path), copy)
        elif self._has_room(Path(path).name, state):
            write = partial(_write_file, Path(path), partial(torch.save, self._stager.stage(state)))
        else:
            write = at_once(partial(_write_file, Path(path), save)).result
        self._files.append(write)

    def take(self) -> list[Callable[[], SummedFile]]:
        """What writes each file, as it was copied."""
        files, self._files = self._files, []
        return files

    def _has_room(self, name: str, state: object) -> bool:
        """Whether a copy fits into memory; once it does, it always will, as that memory is kept."""
        if name not in self._fits:
            needed, room = _bytes(state) * self._local_ranks, MEMORY_SHARE * free_memory()
            self._fits[name] = needed <= room
            if needed > room:
                log.warning(
                    "training waits while %s is written: a copy of %.1f GB for each of %d ranks is more than "
                    "half of the free memory; name a folder on a disk of the node in checkpoint.snapshot",
                    *(name, _bytes(state) / 1e9, self._local_ranks),
                )
        return self._fits[name]


def _bytes(state: object) -> int:
    """Of the memory behind all tensors in a tree, shared memory once."""
    storages = (leaf.untyped_storage() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _write_file(path: Path, save: Callable[[SummedFile], object]) -> SummedFile:
    with SummedFile(path) as file:
        save(file)
    return file


def _copied(folder: str, save: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """A file without a name, so that a kill leaves nothing."""
    copy = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    save(copy)
    return copy


def _write_copy(path: Path, copied: Future[IO[bytes]]) -> SummedFile:
    """Write what was copied; the copy is gone then."""
    with copied.result() as copy, SummedFile(path) as file:
        copy.seek(0)
        shutil.copyfileobj(copy, file, 16 << 20)
    return file
