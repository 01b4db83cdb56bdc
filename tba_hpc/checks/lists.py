"""Which checks each command makes, and the facts that they need."""

from __future__ import annotations

from pathlib import Path

from tba_hpc.checks import config_checks, machine_checks, mpi_checks, slurm_checks
from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.facts import Facts, find_library, job_environment
from tba_hpc.checks.machine import try_folder
from tba_hpc.config import Config
from tba_hpc.launch.plan import Plan, Site

FOLDER = (
    machine_checks.check_run_root,
    machine_checks.check_file_system,
    machine_checks.check_locks,
    machine_checks.check_disk_space,
)
JOBS = (
    slurm_checks.check_requeue,
    slurm_checks.check_gpu_request,
    slurm_checks.check_partitions,
)
CONFIG = (config_checks.check_resources, config_checks.check_rate)

FILES = (config_checks.check_files, config_checks.check_engine_arguments)
"""Of any config that is to be used here."""

RUN = (config_checks.check_task,)
"""Before ``tba run`` starts ranks, besides FILES."""

SUBMIT = (
    *FILES,
    slurm_checks.check_mpi_plugin,
    slurm_checks.check_het_jobs,
    *JOBS,
    slurm_checks.check_nodes,
    slurm_checks.check_variables,
    *FOLDER,
    *CONFIG,
    config_checks.check_task,  # at last: it takes longest
)
"""Before a run waits for hours in the queue."""

LEND = (*JOBS, slurm_checks.check_variables, config_checks.check_resources)
"""Before elastic searchers do, for a run that exists."""

LAPTOP = (
    machine_checks.check_capacity,
    machine_checks.check_gpus,
    *FOLDER,
    machine_checks.check_shared_memory,
    machine_checks.check_model,
)
LOGIN_NODE = (
    mpi_checks.check_library,
    slurm_checks.check_version,
    slurm_checks.check_mpi_plugin,
    slurm_checks.check_het_jobs,
    *JOBS,
    slurm_checks.check_preemption,
    slurm_checks.tell_settings,
    mpi_checks.check_pmix,
    machine_checks.check_torch,
    *FOLDER,
    machine_checks.check_model,
)
NODE = (
    machine_checks.check_gpus,
    *FOLDER,
    machine_checks.check_shared_memory,
    machine_checks.check_model,
    machine_checks.check_network,
)
WORLD = (
    slurm_checks.check_job_requeue,
    mpi_checks.check_library,
    mpi_checks.check_pmix_met,
    mpi_checks.check_broadcast,
)
"""Of a trial start."""


def before_submission(config: Config, split: Plan, site: Site) -> Facts:
    """The facts of a run as a job. Raises SlurmError."""
    slurm_facts = SlurmFacts.look()
    return Facts(
        site=site,
        shared=split.nodes > 1,
        config=config,
        split=split,
        slurm=slurm_facts,
        partitions=slurm_facts.used(site),
        folder=try_folder(Path(config.run.root)),
        library=find_library(site)[0],
        environment=job_environment(site),
    )


def before_lending(config: Config, site: Site) -> Facts:
    """The facts of one-node jobs of searchers, for a run that exists. Raises SlurmError."""
    slurm_facts = SlurmFacts.look()
    partition = slurm_facts.partition(site.searcher.partition or site.partition)
    return Facts(
        site=site,
        config=config,
        slurm=slurm_facts,
        partitions=(partition,) if partition else (),
        environment=job_environment(site),
    )
