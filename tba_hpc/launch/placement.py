"""Place of a rank: its number within the role, its GPUs, and its MPI world if there is one."""

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
    """Raise ConfigError if the role has no rank of this number. None: MPI numbers the ranks."""
    ranks = config.launch.trainers if role == "trainer" else config.launch.searchers
    if index is not None and not 0 <= index < ranks:
        raise ConfigError(
            f"--index {index} is no {role} of this run, which has launch.{role}s={ranks}: they are numbered "
            f"from 0 to {ranks - 1}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's place. index: within its role. first_gpu, gpus: its GPUs on the node. mpi: None over files."""

    index: int
    first_gpu: int
    gpus: int
    mpi: MpiWorld | None

    @classmethod
    def join(cls, config: Config, role: Role, index: int | None) -> Placement:
        """Join the MPI world; over files, take number ``index``, or the one that srun gives.

        Raises ConfigError or ExchangeError.
        """
        gpus = config.generator.tensor_parallel if role == "searcher" else 1
        if not config.one_world:
            if index is None:
                return cls._of_step(config, role, gpus)
            trainers = 0 if role == "trainer" else config.launch.trainers  # on one machine they come first
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
        """Derive the placement from srun's numbers of a step's ranks, over both roles. Raises ConfigError.

        Trainers come first, unless the environment says that searchers do.
        """
        if "SLURM_PROCID" not in os.environ:
            raise ConfigError(
                "ranks over files (exchange.transport=files, or launch.searchers=0) have no MPI to number "
                "them: give --index, or start them by srun"
            )
        rank, local = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        trainers, searchers = config.launch.trainers, config.launch.searchers
        apart = os.environ.get(SEARCHERS_FIRST) == "1"  # components of a job, which share no node
        first = {"trainer": searchers if apart else 0, "searcher": 0 if apart else trainers}
        index = rank - first[role]
        if not 0 <= index < (trainers if role == "trainer" else searchers):
            raise ConfigError(
                f"rank {rank} of this Slurm step is no {role}: of a run with launch.trainers={trainers} and "
                f"launch.searchers={searchers} the {'last' if apart else 'first'} {trainers} train; start "
                f"{trainers + searchers} ranks"
            )
        if apart:
            return cls(index, local * gpus, gpus, None)
        beside = min(local, max(0, trainers - (rank - local)))  # trainers on this node, which come first
        return cls(index, beside + (local - beside) * gpus, gpus, None)

    @classmethod
    def alone(cls, config: Config, index: int) -> Placement:
        """Place the elastic searcher ``index``; its GPUs follow those of earlier ranks of its Slurm step."""
        gpus = config.generator.tensor_parallel
        return cls(index, int(os.environ.get("SLURM_LOCALID", "0")) * gpus, gpus, None)

    def choose_gpus(self) -> None:
        """Restrict this rank to its own GPUs, unless a launcher has done so already.

        Raises ConfigError if CUDA has already opened all GPUs and this rank's is not the first.
        """
        if not _has_gpus():
            return
        import torch

        if (count := torch.cuda.device_count()) > self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            mine = [visible[(self.first_gpu + number) % count] for number in range(self.gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            # CUDA reads that once. If a GPU-aware MPI has started CUDA before, our GPU must be the first.
            if self.first_gpu % count and torch._C._cuda_getDeviceCount() != self.gpus:
                raise ConfigError(
                    f"this rank was to compute on GPU {','.join(mine)} alone, but all {count} were opened "
                    "before (by a GPU-aware MPI library, or because NVML is missing): have the launcher give "
                    f"each rank its own, with --gpus-per-task={self.gpus} in the site key srun_arguments"
                )


def _has_gpus() -> bool:
    """Return whether the kernel shows an NVIDIA GPU, without importing torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
