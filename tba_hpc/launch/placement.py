"""Placement of a rank: its index within its role, its GPUs, and its MPI world if the run uses MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tba_hpc.config import Config, ConfigError
from tba_hpc.core.types import Role
from tba_hpc.run.directory import SEARCHERS_FIRST

if TYPE_CHECKING:
    from tba_hpc.exchange.mpi_world import MpiWorld


def refuse_index(config: Config, role: Role, index: int | None) -> None:
    """Raise ConfigError if ``index`` is not the index of a rank of this role. None is always accepted."""
    ranks = config.launch.trainers if role == "trainer" else config.launch.searchers
    if index is not None and not 0 <= index < ranks:
        remedy = f"use an index from 0 to {ranks - 1}" if ranks else "leave out --index"
        raise ConfigError(
            f"--index {index} is no {role} of this run, which has launch.{role}s={ranks}: {remedy}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a rank.

    index: number of the rank within its role, from 0. first_gpu: number of its first GPU among the GPUs of
    the node. gpus: number of GPUs that it uses. mpi: its MPI world, or None if the run has none.
    """

    index: int
    first_gpu: int
    gpus: int
    mpi: MpiWorld | None

    @classmethod
    def join(cls, config: Config, role: Role, index: int | None) -> Placement:
        """Join the MPI world and return this rank's placement in it.

        A run over files has no MPI world. Its ranks have the number ``index``, or if that is None, the number
        that srun's variables give. Raises ConfigError without such a number, and ExchangeError if ranks are
        missing.
        """
        gpus = config.generator.tensor_parallel if role == "searcher" else 1
        if not config.one_world:
            if index is None:
                return cls._of_step(config, role, gpus)
            trainers = 0 if role == "trainer" else config.launch.trainers  # trainers have the first GPUs
            return cls(index, trainers + index * gpus, gpus, None)
        from tba_hpc.exchange.mpi_world import MpiWorld

        world = MpiWorld.join(
            role,
            trainers=config.launch.trainers,
            searchers=config.launch.searchers,
            deadline=config.launch.start_seconds,
            work_deadline=config.launch.timeout_seconds,
        )
        trainers = min(world.local_index, world.hosts[: world.trainers].count(world.hostname))
        first_gpu = trainers + (world.local_index - trainers) * config.generator.tensor_parallel
        return cls(world.index, first_gpu, gpus, world)

    @classmethod
    def _of_step(cls, config: Config, role: Role, gpus: int) -> Placement:
        """Derive the placement from the numbers that srun gives to all ranks of a step, of both roles.

        gpus: how many GPUs the rank uses. Trainers have the first numbers, or the last if the environment
        variable TBA_SEARCHERS_FIRST is 1. Raises ConfigError if srun has not started this rank, or if its
        number belongs to the other role.
        """
        if "SLURM_PROCID" not in os.environ:
            raise ConfigError(
                "without MPI (exchange.transport=files, or launch.searchers=0) a rank must be told its "
                "number: give --index, or start it with srun"
            )
        rank, local = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        trainers, searchers = config.launch.trainers, config.launch.searchers
        apart = os.environ.get(SEARCHERS_FIRST) == "1"  # in a het job, the roles share no node
        first = {"trainer": searchers if apart else 0, "searcher": 0 if apart else trainers}
        index = rank - first[role]
        if not 0 <= index < (trainers if role == "trainer" else searchers):
            raise ConfigError(
                f"rank {rank} of this Slurm step is no {role}: in a run with launch.trainers={trainers} and "
                f"launch.searchers={searchers}, the {'last' if apart else 'first'} {trainers} ranks train; "
                f"start {trainers + searchers} ranks"
            )
        if apart:
            return cls(index, local * gpus, gpus, None)
        beside = min(local, max(0, trainers - (rank - local)))  # number of trainers on this node
        return cls(index, beside + (local - beside) * gpus, gpus, None)

    @classmethod
    def alone(cls, config: Config, index: int) -> Placement:
        """Return the placement of elastic searcher ``index``.

        Its GPUs follow those of the ranks with lower numbers in the same Slurm step on this node.
        """
        gpus = config.generator.tensor_parallel
        return cls(index, int(os.environ.get("SLURM_LOCALID", "0")) * gpus, gpus, None)

    def choose_gpus(self) -> None:
        """Restrict this process to the rank's own GPUs, unless its launcher has done so.

        Call it before CUDA starts. Raises ConfigError if CUDA has already started and the rank's GPU is not
        the first one.
        """
        if not _has_gpus():
            return
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        of_mig = visible[0].startswith("MIG-")  # of several MIG instances, CUDA shows only the first
        if (count := len(visible) if of_mig else torch.cuda.device_count()) > self.gpus:
            visible = visible if visible != [""] else [*map(str, range(count))]
            mine = [visible[(self.first_gpu + number) % count] for number in range(self.gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            # CUDA reads the variable once, when it starts. If a GPU-aware MPI has started CUDA before, this
            # process uses the first GPU, whatever the variable says.
            if self.first_gpu % count and torch._C._cuda_getDeviceCount() != self.gpus:
                raise ConfigError(
                    f"this rank should use only GPU {','.join(mine)}, but CUDA has already opened all "
                    f"{count} (for a GPU-aware MPI library, or because NVML is missing): let srun give each "
                    f"rank its own GPUs, with --gpus-per-task={self.gpus} in the site key srun_arguments"
                )


def _has_gpus() -> bool:
    """Return whether this machine has an NVIDIA GPU, by its device files; this needs no torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
