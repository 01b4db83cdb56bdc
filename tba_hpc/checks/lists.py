"""Lists of the checks that each command makes."""

from __future__ import annotations

from tba_hpc.checks import config_checks, folders, gpus, machine, mpi_checks, network, slurm_checks

JOBS = (
    slurm_checks.check_cluster,
    slurm_checks.check_options,
    slurm_checks.check_requeue,
    slurm_checks.check_gpu_request,
    slurm_checks.check_partitions,
)
"""Checks of what any job requests from Slurm."""

CONFIG = (config_checks.check_resources, config_checks.check_rate, config_checks.check_unused)
"""Checks of a config's models, data and learning rate, and of settings without effect."""

DOCTOR = (*CONFIG, config_checks.check_chat_template, config_checks.check_task)
"""Checks that ``tba doctor --config`` makes of the config."""

FILES = (
    config_checks.check_files,
    config_checks.check_context_length,
    config_checks.check_lora,
    config_checks.check_engine_arguments,
)
"""Checks of a config before any run, on this machine or as a job."""

RUN = (
    machine.check_allocation,
    machine.check_engine,
    machine.check_ports,
    machine.check_packages,
    gpus.check_dtype,
    config_checks.check_rate,
    config_checks.check_unused,
    config_checks.check_task,
)
"""Checks of ``tba run``, besides FILES; a dry run makes no others."""

START = (config_checks.check_hub, *RUN)
"""Checks before ``tba run`` starts ranks, besides FILES."""

SUBMIT = (
    slurm_checks.check_time,
    *FILES,
    slurm_checks.check_mpi_plugin,
    slurm_checks.check_het_jobs,
    *JOBS,
    slurm_checks.check_nodes,
    slurm_checks.check_variables,
    folders.check_folder,
    folders.check_interpreter,
    machine.check_packages,
    *CONFIG,
    config_checks.check_task,  # last, since it takes longest
)
"""Checks before ``tba submit`` puts a run into the queue, where it may wait for hours."""

ELASTIC = (*JOBS, slurm_checks.check_variables, folders.check_interpreter, config_checks.check_resources)
"""Checks before ``tba submit --elastic`` puts elastic searchers into the queue."""

MACHINE = (
    machine.check_engine,
    machine.check_packages,
    gpus.check_gpus,
    gpus.check_compiler,
    folders.check_folder,
    machine.check_scratch,
    machine.check_shared_memory,
    gpus.check_registered_memory,
    machine.check_model,
)
"""Checks that ``tba doctor`` makes of any machine on which ranks will run."""

NODE = (*MACHINE, network.check_network)
"""Checks that ``tba doctor --launch`` makes on each node of its trial job."""

LAPTOP = (
    mpi_checks.check_library,
    mpi_checks.check_mpiexec,
    machine.check_capacity,
    machine.check_ports,
    gpus.check_dtype,
    *MACHINE,
)
"""Checks that ``tba doctor`` makes on a machine without Slurm."""

LOGIN_NODE = (
    machine.check_engine,
    mpi_checks.check_library,
    slurm_checks.check_mpi_plugin,
    slurm_checks.check_het_jobs,
    *JOBS,
    slurm_checks.check_preemption,
    gpus.check_torch,
    folders.check_interpreter,
    machine.check_packages,
    folders.check_folder,
    machine.check_model,
)
"""Checks that ``tba doctor`` makes on the login node of a cluster."""
