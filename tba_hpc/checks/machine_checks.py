"""What of a machine would hurt a run: GPUs, file system, shared memory, model, network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tba_hpc.checks.facts import Facts
from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.checks.machine import FAST, Gpus
from tba_hpc.checks.resources import hub_cache, is_offline
from tba_hpc.config import is_local

SHARED = re.compile(
    r"nfs4?|lustre|gpfs|beegfs\w*|fhgfs|ceph|cifs|smb3|afs|panfs|pvfs2|orangefs|wekafs|glusterfs|gfs2|ocfs2|9p"
    r"|virtiofs|fuse\..*"
)
"""File systems that other nodes may see too."""

LOCAL = re.compile(r"tmpfs|ramfs|ext[234]|xfs|btrfs|zfs|f2fs|overlay|squashfs")
"""File systems of one machine."""

GPUS, RUN_ROOT, FILE_SYSTEM, NETWORK = "GPUs", "run root", "file system", "network"
"""Names of findings that others look for."""

GIB = 1 << 30
LITTLE_DISK, LITTLE_INODES, LITTLE_SHM, LITTLE_MEMORY = 10 * GIB, 10_000, GIB, 4 * GIB
"""Below this a run may end in the middle: checkpoints, shards, two copies of the weights, three processes."""


def check_capacity(facts: Facts) -> Finding | None:
    """Whether a whole run fits on this machine."""
    if facts.machine is None:
        return None
    found = f"{facts.machine.cores} cores, {facts.machine.memory / 1e9:.1f} GB of memory available"
    if facts.machine.memory < LITTLE_MEMORY:
        return warning("machine", found, "close other programs: the quickstart takes 3 GB")
    return ok("machine", found)


def check_gpus(facts: Facts) -> Finding | None:
    """Whether there are as many as the site says, and torch was built for their driver."""
    if facts.machine is None:
        return None
    gpus, expected = facts.machine.gpus, facts.site.gpus_per_node
    if expected and "rocm" in gpus.torch:
        return ok(GPUS, f"torch {gpus.torch}; AMD's are not looked at")
    if len(gpus.names) < expected:
        why = f" ({gpus.error})" if gpus.error else ""
        return problem(
            GPUS,
            f"gpus_per_node: {expected}, but a job gets {len(gpus.names)}{why}",
            "check gpu_request in the site file; on a cluster without GPUs, set gpus_per_node: 0",
        )
    if not gpus.names:
        return ok(GPUS, f"none here, torch {gpus.torch}: the work is done on the CPU")
    if _major(gpus.torch_cuda) > _major(gpus.cuda):
        return problem(
            GPUS,
            f"torch {gpus.torch} is for CUDA {gpus.torch_cuda}, driver {gpus.driver} runs up to {gpus.cuda}",
            "ask for a newer driver, or install torch for the older CUDA",
        )
    if gpus.torch and not gpus.torch_cuda:
        return _built_for_cpu(gpus)
    driver = f"driver {gpus.driver} (CUDA {gpus.cuda})"
    return ok(
        GPUS, f"{len(gpus.names)} × {gpus.names[0]}, {driver}, torch {gpus.torch} for {gpus.torch_cuda}"
    )


def check_torch(facts: Facts) -> Finding | None:
    """On a login node: whether the torch that the nodes will use was built for their GPUs."""
    if facts.machine is None:
        return None
    gpus, site = facts.machine.gpus, facts.site
    if site.gpus_per_node and site.python == [sys.executable] and gpus.torch.endswith("+cpu"):
        return _built_for_cpu(gpus)
    return ok(GPUS, f"torch {gpus.torch or 'not here'}; those of the nodes: --launch")


def _built_for_cpu(gpus: Gpus) -> Finding:
    found = f"torch {gpus.torch} is built for the CPU, and there are GPUs to use"
    return problem(GPUS, found, "install this project with its extra for GPUs: pip install '.[gpu]'")


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def check_run_root(facts: Facts) -> Finding | None:
    """Whether runs can be written there, and read by nobody else."""
    folder = facts.folder
    if folder is None:
        return None
    if folder.error:
        found = f"cannot write to {folder.path}: {folder.error}"
        return problem(RUN_ROOT, found, "choose another place with --run-root")
    if not folder.private:
        found = f"{folder.path} ({folder.kind}) does not keep file modes: others may read a run"
        return warning(RUN_ROOT, found, "choose another place with --run-root")
    milliseconds = 1000 * folder.fsync_seconds
    return ok(RUN_ROOT, f"{folder.path}: writable, private, renames after fsync ({milliseconds:.1f} ms)")


def check_file_system(facts: Facts) -> Finding | None:
    """Whether the file system lasts, and is one that all nodes may see."""
    folder = facts.folder
    if folder is None or folder.error:
        return None
    if facts.shared and LOCAL.fullmatch(folder.kind):
        found = f"{folder.path} is on {folder.kind}, which other nodes do not see"
        return warning(FILE_SYSTEM, found, "put runs on a file system that all nodes share: --run-root")
    if folder.kind in ("tmpfs", "ramfs"):
        found = f"{folder.path} is on {folder.kind}: it takes memory, and is gone after a reboot"
        return warning(FILE_SYSTEM, found, "put runs on a disk: run.root")
    return ok(FILE_SYSTEM, f"{folder.kind}{', shared' if SHARED.fullmatch(folder.kind) else ''}")


def check_locks(facts: Facts) -> Finding | None:
    """Whether files can be locked."""
    folder = facts.folder
    if folder is None or folder.error or folder.locks:
        return None
    return warning(
        "file locks",
        f"{folder.kind} locks no files",
        "submit a run from one terminal at a time, and keep HDF5_USE_FILE_LOCKING=FALSE as batch scripts "
        "set it",
    )


def check_disk_space(facts: Facts) -> Finding | None:
    """Whether there is room for checkpoints and shards."""
    folder = facts.folder
    if folder is None or folder.error:
        return None
    free = f"{folder.free / 1e9:.1f} GB free"
    if folder.free < LITTLE_DISK:
        return warning("disk space", free, "make room or choose another --run-root: checkpoints are large")
    if folder.inodes is None:
        return ok("disk space", free)
    if folder.inodes < LITTLE_INODES:
        return warning(
            "disk space",
            f"{free}, but only {folder.inodes} files more",
            "delete files or raise the quota: a run seals a shard every few seconds",
        )
    return ok("disk space", f"{free}, {folder.inodes:,} files more")


def check_shared_memory(facts: Facts) -> Finding | None:
    """Whether /dev/shm holds two copies of the weights."""
    if facts.machine is None:
        return None
    free = f"/dev/shm has {facts.machine.shm / 1e9:.1f} GB free"
    model = facts.machine.model
    needed = max(LITTLE_SHM, 2 * model.nbytes if model else 0)
    if facts.machine.shm < needed:
        return problem(
            "shared memory",
            f"{free}, two copies of the weights take {needed / 1e9:.1f} GB",
            "free some (in a container: --shm-size), or set exchange.transport=files",
        )
    return ok("shared memory", free)


def check_model(facts: Facts) -> Finding | None:
    """Whether the policy can be loaded, in the environment of that machine."""
    if facts.machine is None or facts.machine.model is None:
        return None
    model, environment = facts.machine.model, facts.machine.environment
    if model.place:
        return ok("model", f"{model.name}: {model.nbytes / 1e9:.2f} GB in {model.place}")
    if is_local(model.name):
        how = "has no config.json" if Path(model.name).is_dir() else "does not exist here"
        return problem("model", f"model.path={model.name} {how}", "give a model's folder that all nodes see")
    cache = hub_cache(environment)
    if not is_offline(environment):
        return ok("model", f"{model.name} is not in {cache} yet: it is loaded from the hub at the start")
    return warning(
        "model",
        f"model.path={model.name} is not in {cache}, and HF_HUB_OFFLINE=1 forbids to load it from the hub",
        "where there is a network, type 'tba fetch CONFIG', with --site if jobs of a cluster will need it",
    )


def check_network(facts: Facts) -> Finding | None:
    """Which network MPI and gloo should take, and whether they need to be told."""
    if facts.machine is None:
        return None
    interfaces, chosen = facts.machine.interfaces, facts.site.network_interface
    if not interfaces:
        return warning(NETWORK, "no interface leads to other nodes", "ask how nodes reach each other")
    names = [interface.name for interface in interfaces]
    best = interfaces[0]
    if chosen and chosen not in names:
        return problem(
            NETWORK,
            f"network_interface: {chosen} is not here, only {', '.join(names)}",
            f"set network_interface: {best.name} in the site file",
        )
    if chosen or len(interfaces) == 1:
        return ok(NETWORK, f"{chosen or f'{best.name} ({best.address}), the only one'}")
    why = "built for MPI" if FAST.match(best.name) else "the fastest" if best.speed else "the first by name"
    return warning(
        NETWORK,
        f"{', '.join(names)}: the libraries may not pick {best.name} ({best.address}), {why}",
        f"set network_interface: {best.name} in the site file (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
        "OMPI_MCA_btl_tcp_if_include)",
    )
