"""Copies a trainer rank's part of a checkpoint, so that it can be written while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils import _pytree as pytree

from tba_hpc.run.background import at_once
from tba_hpc.run.inventory import SummedFile
from tba_hpc.run.memory import free_memory

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Largest share of a machine's free memory that the copies of its ranks may take together."""


class Snapshot:
    """Copies in memory of one rank's checkpoint files. A file that does not fit is written at once instead.

    local_ranks: number of trainer ranks on this machine, all of which make copies. gpu: whether the state is
    on a GPU. If so, copies are in page-locked memory.
    """

    def __init__(self, *, local_ranks: int, gpu: bool) -> None:
        torch.serialization.set_crc32_options(False)  # the inventory has checksums
        self._local_ranks = local_ranks
        self._stager = DefaultStager(  # uses its memory again for the next copy
            StagingOptions(
                use_pinned_memory=gpu,
                use_non_blocking_copy=gpu,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        self._fits: dict[str, bool] = {}  # whether a file fits, by its name
        self._files: list[Callable[[], SummedFile]] = []

    def add(self, state_dict: dict[str, Any], path: str) -> None:
        """Copy a tree of tensors and plain values, which is to be written to ``path``.

        DeepSpeed calls this in place of the function that writes a file of a checkpoint.
        """
        file = Path(path)
        if self._has_room(file.name, state_dict):
            copy = self._stager.stage(state_dict)
            self._files.append(partial(_write_file, file, partial(torch.save, copy)))
        else:  # an error is raised later, by a function of ``take``; raised here it would leave ranks waiting
            self._files.append(at_once(partial(_write_file, file, partial(torch.save, state_dict))).result)

    def take(self) -> list[Callable[[], SummedFile]]:
        """Return a function for each file added since the last call, which writes it or raises an error."""
        files, self._files = self._files, []
        return files

    def _has_room(self, name: str, state: object) -> bool:
        """Return whether a copy of the file fits into memory.

        This is decided once per file, because later copies reuse the memory.
        """
        if name not in self._fits:
            needed, room = _bytes(state) * self._local_ranks, MEMORY_SHARE * free_memory()
            self._fits[name] = needed <= room
            if needed > room:
                log.warning(
                    "training waits while %s is written: a copy of %.1f GB for each of %d ranks is more than "
                    "half of the free memory",
                    *(name, _bytes(state) / 1e9, self._local_ranks),
                )
        return self._fits[name]


def _bytes(state: object) -> int:
    """Return the bytes of all tensors in a tree. Storage that tensors share counts once."""
    storages = (leaf.untyped_storage() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _write_file(path: Path, write: Callable[[SummedFile], object]) -> SummedFile:
    with SummedFile(path) as file:
        write(file)
    return file
