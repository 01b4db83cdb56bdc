"""Where a rank sits: its number within the role, its GPUs, and its MPI world where there is one.

It must not know what the rank does there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_hpc.config import Config, ConfigError
from tba_hpc.types import Role

if TYPE_CHECKING:
    from tba_hpc.backends.mpi_world import MpiWorld


def refuse_index(config: Config, role: Role, index: int | None) -> None:
    """Raise ConfigError where a rank's number is none of its role; None: MPI numbers the ranks."""
    ranks = config.launch.trainers if role == "trainer" else config.launch.searchers
    if index is not None and not 0 <= index < ranks:
        raise ConfigError(
            f"--index {index} is no {role} of this run, which has launch.{role}s={ranks}: they are numbered "
            f"from 0 to {ranks - 1}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """index: within the role. first_gpu, gpus: of those that the ranks of a node see. mpi: None for files."""

    index: int
    first_gpu: int
    gpus: int
    mpi: MpiWorld | None

    @classmethod
    def join(cls, config: Config, role: Role, index: int | None) -> Placement:
        """Join the MPI world, or sit where ``index`` says (files). Raises ConfigError, ExchangeError."""
        gpus = config.generator.tensor_parallel if role == "searcher" else 1
        if config.exchange.transport == "files":
            if index is None:
                raise ConfigError("exchange.transport=files has no MPI to number the ranks: give --index")
            return cls(index, index * gpus, gpus, None)
        from tba_hpc.backends.mpi_world import MpiWorld  # importing it starts MPI

        world = MpiWorld.join(
            role,
            trainers=config.launch.trainers,
            searchers=config.launch.searchers,
            deadline=config.launch.start_deadline_seconds,
            work_deadline=config.exchange.deadline_seconds,
        )
        trainers = min(world.local_index, world.hosts[: world.trainers].count(world.hostname))
        first_gpu = trainers + (world.local_index - trainers) * config.generator.tensor_parallel
        return cls(world.index, first_gpu, gpus, world)

    def choose_gpus(self) -> None:
        """Of the GPUs that all ranks of a node see, take this one's; a launcher may have chosen already."""
        import torch

        if (count := torch.cuda.device_count()) > self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            mine = [visible[(self.first_gpu + number) % count] for number in range(self.gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
