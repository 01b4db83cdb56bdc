"""Checks of a machine: its memory, libraries, ports, packages, temporary folder, model and shared memory.

A function ``check_X`` collects facts about this machine; ``judge_X`` turns them into findings.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tba_hpc.checks.facts import Facts, Finding, Level, login_python, ok, problem, warning
from tba_hpc.config import is_local
from tba_hpc.core.hub_files import find_file, hub_cache, is_offline
from tba_hpc.core.model_files import absent
from tba_hpc.core.own_code import is_own
from tba_hpc.core.system_libraries import REMEDIES, missing_library
from tba_hpc.core.wording import size
from tba_hpc.run.listeners import unprotected
from tba_hpc.run.memory import free_memory

VERSIONED = ("torch", "vllm", "deepspeed", "transformers", "numpy", "mpi4py")
"""Packages whose versions must fit together."""

SHM = Path("/dev/shm")

LITTLE_SHM, LITTLE_MEMORY = 1 << 30, 4 << 30
"""Amounts below which a run may fail, in bytes.

A run needs shared memory for two copies of the weights, and memory for three processes."""


def check_capacity(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has enough memory for a small run."""
    memory = free_memory()
    found = f"{len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory available"
    if memory < LITTLE_MEMORY:
        yield warning("machine", found, "close other programs: the quickstart takes 3 GB")
    else:
        yield ok("machine", found)


def check_allocation(facts: Facts) -> Iterator[Finding]:
    """Warn if this shell belongs to a Slurm job, but is on none of its nodes, as one that salloc started."""
    job = facts.environment.get("SLURM_JOB_ID")
    if job and "SLURMD_NODENAME" not in facts.environment:
        found = f"this shell is of Slurm job {job}, but on none of its nodes, so the run is on this machine"
        yield warning("allocation", found, "to use the job's node type srun --pty bash first")


def check_engine(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has the system libraries that vLLM needs.

    On a login node a missing library is only a warning, since compute nodes may have it.
    """
    if facts.in_container or (facts.config and is_own(facts.config.model.path)):
        return
    if library := missing_library():
        level: Level = "warning" if facts.slurm else "problem"
        found = f"vLLM needs {library}, which this machine lacks"
        yield Finding("engine", level, found, REMEDIES[library])


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Check that the ports of a run can be closed to other users of this machine."""
    mpiexec = facts.config is None or facts.config.one_world
    if found := unprotected(mpiexec=mpiexec):
        files = ", or set exchange.transport=files, which needs no mpiexec" if mpiexec else ""
        yield warning("ports", found, f"if others use this machine, run on a machine of your own{files}")
    else:
        yield ok("ports", "closed to other users once all ranks have started")


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Check that no packages from elsewhere come before those of this Python's environment.

    Packages from PYTHONPATH or the user's folder may have other versions. Environments of other Pythons are
    not checked.
    """
    if not facts.in_container and login_python(facts.site) == sys.executable:
        folders = [Path(folder) for folder in sys.path if folder]
        yield from judge_packages(folders, Path(sys.prefix), Path(__file__).parents[2])


def judge_packages(folders: Sequence[Path], prefix: Path, own: Path) -> Iterator[Finding]:
    """Yield a finding about each folder with packages that come before those of the environment.

    folders: folders in which Python looks for packages, in order. prefix: folder of the environment. own:
    folder in which tba-hpc itself is installed, as by ``pip install --user``, which gives no finding.
    """
    before: dict[Path, list[str]] = {}
    for name in VERSIONED:
        first, *others = [folder for folder in folders if (folder / name / "__init__.py").is_file()] or [
            prefix
        ]
        if not first.is_relative_to(prefix) and any(other.is_relative_to(prefix) for other in others):
            before.setdefault(first, []).append(name)
    before.pop(own, None)
    for folder, names in before.items():
        found = f"{', '.join(names)} of {folder} would be used instead of those of {prefix}"
        remedy = "unset PYTHONPATH, or set PYTHONNOUSERSITE=1 if the folder is in your home"
        yield warning("packages", found, remedy)


def check_scratch(facts: Facts) -> Iterator[Finding]:
    """Check that the folder TMPDIR is writable, may hold programs, and has space for files of libraries."""
    folder = Path(facts.environment.get("TMPDIR") or "/tmp")
    remedy = "set TMPDIR to a folder on the node with free space, in the site file under environment"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield problem("scratch", f"cannot write to {folder} (TMPDIR): {error.strerror or error}", remedy)
        return
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        found = f"{folder} (TMPDIR) is mounted noexec, so that engines cannot load what they compile there"
        yield warning("scratch", found, remedy)
    elif free < LITTLE_SHM:
        yield warning("scratch", f"{folder} (TMPDIR) has {size(free)} free", remedy)
    else:
        yield ok("scratch", f"{folder}, {size(free)} free")


def model_bytes(name: str | None, environment: Mapping[str, str]) -> int:
    """Return the size of a model's safetensors files in bytes; 0 if the model is not on this machine.

    name: a folder, or a name on the hub, or None. environment: variables that say where the hub's cache is.
    """
    config = find_file(name, "config.json", environment) if name else None
    return sum(file.stat().st_size for file in config.parent.glob("*.safetensors")) if config else 0


def check_model(facts: Facts) -> Iterator[Finding]:
    """Check that the policy is on this machine, or can be downloaded."""
    name, environment = facts.model, facts.environment
    if name is None:
        return
    config = find_file(name, "config.json", environment)
    part = absent(Path(name)) if Path(name).is_dir() else None
    if config and not part:
        yield ok("model", f"{name}: {model_bytes(name, environment) / 1e9:.2f} GB in {config.parent}")
    elif part or is_local(name):
        how = f"has no {part}" if part else "does not exist here"
        remedy = "give a folder with a model, which all nodes see, or make it: the config may say how"
        yield problem("model", f"model.path={name} {how}", remedy)
    elif is_offline(environment):
        found = (
            f"model.path={name} is not in {hub_cache(environment)}, and HF_HUB_OFFLINE=1 forbids a download"
        )
        remedy = "where there is a network, type 'tba fetch CONFIG', with --site for the jobs of a cluster"
        yield warning("model", found, remedy)
    else:
        found = f"{name} is not in {hub_cache(environment)} yet: the run downloads it when it starts"
        yield ok("model", found)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Check that /dev/shm has space for two copies of the weights."""
    free = shutil.disk_usage(SHM).free if SHM.exists() else 0
    yield judge_shared_memory(free, model_bytes(facts.model, facts.environment))


def judge_shared_memory(free: int, weights: int) -> Finding:
    """Return the finding about /dev/shm. free: its free bytes. weights: bytes of the model, 0 if unknown."""
    needed, found = max(LITTLE_SHM, 2 * weights), f"/dev/shm has {size(free)} free"
    if free >= needed:
        third = (
            ""
            if free >= 3 * weights
            else ", too little for the third copy of the weights that an evaluation may use"
        )
        return ok("shared memory", found + third)
    found += f", but two copies of the weights need {size(needed)}"
    remedy = "free some (in a container: --shm-size), or set exchange.transport=files"
    return problem("shared memory", found, remedy)
