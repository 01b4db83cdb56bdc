"""What one machine has (GPUs, file systems, shared memory, network, model) and what of it would hurt a run.

``look`` gathers the facts, here or on a node; the rules are functions of the facts and a site. It must not
know Slurm.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil

from tba_hpc.checks.commands import ask
from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.checks.resources import hub_cache
from tba_hpc.config import is_local
from tba_hpc.launch.plan import Site
from tba_hpc.run.files import publish

SHARED = re.compile(
    r"nfs4?|lustre|gpfs|beegfs\w*|fhgfs|ceph|cifs|smb3|afs|panfs|pvfs2|orangefs|wekafs|glusterfs|gfs2|ocfs2|9p"
    r"|virtiofs|fuse\..*"
)
"""File systems that other nodes may see too."""

LOCAL = re.compile(r"tmpfs|ramfs|ext[234]|xfs|btrfs|zfs|f2fs|overlay|squashfs")
"""File systems of one machine."""

VIRTUAL = re.compile(r"lo|docker\d|virbr|veth|br-|cni|flannel|cali|tun|tap|ifb|dummy|wg")
"""How interfaces begin that lead to no other node."""

FAST = re.compile(r"ib|hsn|opa")
"""How interfaces of InfiniBand, Slingshot and Omni-Path begin."""

LEFTOVER = re.compile(r"(sm|vader)_segment\..+")
"""Open MPI's files in /dev/shm."""

REMOVE_LEFTOVERS = "for f in /dev/shm/*_segment.*; do [ -O $f ] && ! fuser -s $f 2>/dev/null && rm $f; done"
"""Deletes those of the user that no process has mapped."""

MODEL_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
"""What decides where the Hugging Face libraries look for a model."""

GPUS, RUN_ROOT, FILE_SYSTEM, NETWORK = "GPUs", "run root", "file system", "network"
"""Names of findings that others look for."""

SHM = Path("/dev/shm")

ADAPTERS = Path("/sys/class")
"""Where the kernel lists what is plugged in."""

GIB = 1 << 30
LITTLE_DISK, LITTLE_INODES, LITTLE_SHM, LITTLE_MEMORY = 10 * GIB, 10_000, GIB, 4 * GIB
"""Below this a run may end in the middle: checkpoints, shards, two copies of the weights, three processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of a machine, and what is installed to use them.

    names: as ``nvidia-smi -L`` lists them. driver, cuda: its version, and the newest CUDA that it runs.
    error: what nvidia-smi said instead. torch, torch_cuda: version installed and the CUDA that it was built
    for, empty for none.
    """

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    error: str = ""
    torch: str = ""
    torch_cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The file system of the run root. error: why it cannot be written, else empty; the rest is then unknown.

    private: whether mode 0700 keeps others out. locks: whether flock works. fsync_seconds: one publish.
    free: bytes; inodes: files that may still be made, None where they are not counted. kind: such as lustre.
    """

    path: str
    error: str = ""
    private: bool = True
    locks: bool = True
    fsync_seconds: float = 0.0
    free: int = 0
    inodes: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """/dev/shm. leftovers, leftover_bytes: the user's files of MPI worlds that are dead."""

    free: int
    leftovers: int = 0
    leftover_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up. address: IPv4, else IPv6. speed: Mbit/s, 0 where it does not say."""

    name: str
    address: str
    speed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Where the policy lies. place: the folder that holds it, empty for none; nbytes: its weights."""

    name: str
    place: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. memory: bytes available; environment: the variables that matter to a run.

    fabric: its adapters of networks that are more than Ethernet.
    """

    host: str
    cores: int
    memory: int
    gpus: Gpus
    folder: Folder
    shm: SharedMemory
    interfaces: tuple[Interface, ...]
    model: Model | None = None
    environment: dict[str, str] = field(default_factory=dict)
    fabric: tuple[str, ...] = ()


# --- Facts ---


def look(root: Path, model: str | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """The facts of this machine, for runs in ``root`` from ``model`` (none: not asked)."""
    return Machine(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().available,
        gpus=find_gpus(),
        folder=try_folder(root),
        shm=measure_shm(),
        interfaces=find_interfaces(),
        model=find_model(model, environment) if model else None,
        environment={key: environment[key] for key in MODEL_VARIABLES if key in environment},
        fabric=find_fabric(ADAPTERS),
    )


def find_gpus() -> Gpus:
    """GPUs and driver by nvidia-smi, torch by its metadata."""
    version, cuda = _torch()
    if shutil.which("nvidia-smi") is None:
        return Gpus(torch=version, torch_cuda=cuda, error="nvidia-smi is not on PATH")
    listed, table = (ask("nvidia-smi", *options).text for options in (["-L"], []))
    driver, newest = parse_driver(table)
    names = parse_gpus(listed)
    error = "" if names else " ".join(listed.split())
    return Gpus(names=names, driver=driver, cuda=newest, error=error, torch=version, torch_cuda=cuda)


def parse_gpus(text: str) -> tuple[str, ...]:
    """Names from ``nvidia-smi -L``: ``GPU 0: NVIDIA A100-SXM4-40GB (UUID: …)``."""
    return tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", text, re.MULTILINE))


def parse_driver(text: str) -> tuple[str, str]:
    """Driver and newest CUDA from the head of nvidia-smi's table; empty where it has none."""
    found = [re.search(rf"{words} Version:\s*([\d.]+)", text) for words in ("Driver", r"CUDA(?: UMD)?")]
    driver, cuda = (match[1] if match else "" for match in found)
    return driver, cuda


def _torch() -> tuple[str, str]:
    """Version of the torch installed, and of its CUDA; empty for none."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return "", ""
    built = re.search(
        r"^cuda\b.*'([\d.]+)'", Path(str(torch.locate_file("torch/version.py"))).read_text(), re.M
    )
    return torch.version, built[1] if built else ""


def try_folder(root: Path) -> Folder:
    """Do in ``root``, or in the folder where it would be made, what a run does: write, sync, rename, lock."""
    root = root.absolute()
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    kind = mount_kind(place.resolve(), Path("/proc/mounts").read_text())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as name:
            began = time.monotonic()
            publish(Path(name) / "file", b"text")
            seconds = time.monotonic() - began
            private = not stat.S_IMODE(Path(name).stat().st_mode) & 0o077
            locks = _locks(Path(name) / "file")
    except OSError as error:
        return Folder(path=str(root), error=error.strerror or str(error), kind=kind)
    space = os.statvfs(place)
    return Folder(
        path=str(root),
        private=private,
        locks=locks,
        fsync_seconds=seconds,
        free=space.f_bavail * space.f_frsize,
        inodes=space.f_favail if space.f_files else None,
        kind=kind,
    )


def _locks(path: Path) -> bool:
    """Whether a file can be locked; some file systems of clusters cannot."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def mount_kind(path: Path, mounts: str) -> str:
    """File system type of ``path`` (absolute, no links), given the text of /proc/mounts."""
    kinds: dict[Path, str] = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        kinds[Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point))] = kind
    return next(kinds[folder] for folder in (path, *path.parents) if folder in kinds)


def measure_shm() -> SharedMemory:
    """Room in /dev/shm, and what worlds that died have left in it."""
    if not SHM.exists():
        return SharedMemory(free=0)
    dead = dead_segments(SHM, mapped())
    return SharedMemory(
        free=shutil.disk_usage(SHM).free, leftovers=len(dead), leftover_bytes=sum(dead.values())
    )


def dead_segments(folder: Path, in_use: set[str]) -> dict[Path, int]:
    """The user's files of Open MPI that no process has mapped, with their bytes."""
    mine = [path for path in folder.iterdir() if LEFTOVER.fullmatch(path.name) and str(path) not in in_use]
    sizes = {}
    for path in mine:
        with suppress(FileNotFoundError):  # its world may be ending just now
            if (status := path.stat()).st_uid == os.getuid():
                sizes[path] = status.st_size
    return sizes


def mapped() -> set[str]:
    """Files in /dev/shm that processes of this user have mapped; of others nothing may be known."""
    paths: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            paths |= set(re.findall(r"/dev/shm/\S+", (entry / "maps").read_text(errors="replace")))
    return paths


def find_interfaces() -> tuple[Interface, ...]:
    """Interfaces that are up, have an address and lead out of this machine; the best for a run first."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        own = [
            a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family
        ]
        usable = [address for address in own if not address.startswith("fe80:")]
        if name in states and states[name].isup and usable and not VIRTUAL.match(name):
            found.append(Interface(name=name, address=usable[0], speed=states[name].speed))
    return tuple(sorted(found, key=preference))


def preference(interface: Interface) -> tuple[bool, int, str]:
    """Key by which the best interface comes first: built for MPI, then fast."""
    return FAST.match(interface.name) is None, -interface.speed, interface.name


def find_fabric(classes: Path) -> tuple[str, ...]:
    """Adapters of InfiniBand, Omni-Path, EFA (``mlx5_0``, ``hfi1_0`` …) and Slingshot (``cxi0``)."""
    verbs = [
        adapter.name
        for adapter in classes.glob("infiniband/*")
        if any(layer.read_text().strip() != "Ethernet" for layer in adapter.glob("ports/*/link_layer"))
    ]
    return tuple(sorted([*verbs, *(adapter.name for adapter in classes.glob("cxi/*"))]))


def find_model(name: str, environment: Mapping[str, str]) -> Model:
    """Where a model lies: its folder, or in the cache of the Hugging Face hub."""
    cached = hub_cache(environment) / f"models--{name.replace('/', '--')}" / "snapshots"
    folders = [Path(name), *sorted(cached.glob("*"))]
    place = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if place is None:
        return Model(name=name)
    return Model(
        name=name, place=str(place), nbytes=sum(file.stat().st_size for file in place.glob("*.safetensors"))
    )


# --- Rules ---


def judge(machine: Machine, site: Site | None, *, computes: bool = True) -> list[Finding]:
    """Every rule. site: None for a machine without Slurm. computes: False for a login node.

    A login node is not asked for GPUs, network and shared memory; the nodes that take part in a trial have
    shown by that that they share the file system.
    """
    findings = [
        check_gpus(machine.gpus, site) if computes else check_torch(machine.gpus, site),
        *check_folder(machine.folder, shared=site is not None and not computes),
    ]
    if computes:
        findings.append(check_shm(machine.shm, machine.model))
    if machine.model:
        findings.append(check_model(machine.model, machine.environment))
    if site and computes:
        findings.append(check_interfaces(machine.interfaces, site.network_interface))
    return findings


def check_gpus(gpus: Gpus, site: Site | None) -> Finding:
    """Whether there are as many as the site says, and torch was built for their driver."""
    expected = site.gpus_per_node if site else 0
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


def check_torch(gpus: Gpus, site: Site | None) -> Finding:
    """On a login node: whether the torch that the nodes will use was built for their GPUs."""
    if site and site.gpus_per_node and site.python == [sys.executable] and gpus.torch.endswith("+cpu"):
        return _built_for_cpu(gpus)
    return ok(GPUS, f"torch {gpus.torch or 'not here'}; those of the nodes: --launch")


def _built_for_cpu(gpus: Gpus) -> Finding:
    found = f"torch {gpus.torch} is built for the CPU, and there are GPUs to use"
    return problem(GPUS, found, "install this project with its extra for GPUs: pip install '.[gpu]'")


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def check_folder(folder: Folder, *, shared: bool) -> list[Finding]:
    """Whether runs can live there. shared: whether other nodes must see it, too."""
    if folder.error:
        return [
            problem(
                RUN_ROOT,
                f"cannot write to {folder.path}: {folder.error}",
                "choose another place with --run-root",
            )
        ]
    if not folder.private:
        private = warning(
            RUN_ROOT,
            f"{folder.path} ({folder.kind}) does not keep file modes: others may read a run",
            "choose another place with --run-root",
        )
    else:
        milliseconds = 1000 * folder.fsync_seconds
        private = ok(
            RUN_ROOT,
            f"{folder.path}: writable, private, renames after fsync ({milliseconds:.1f} ms)",
        )
    return [private, check_kind(folder, shared=shared), *_check_locks(folder), _check_space(folder)]


def check_kind(folder: Folder, *, shared: bool) -> Finding:
    """Whether the file system is one that all nodes may see."""
    if shared and LOCAL.fullmatch(folder.kind):
        return warning(
            FILE_SYSTEM,
            f"{folder.path} is on {folder.kind}, which other nodes do not see",
            "put runs on a file system that all nodes share: --run-root",
        )
    if folder.kind in ("tmpfs", "ramfs"):
        return warning(
            FILE_SYSTEM,
            f"{folder.path} is on {folder.kind}: it takes memory, and is gone after a reboot",
            "put runs on a disk: run.root",
        )
    return ok(FILE_SYSTEM, f"{folder.kind}{', shared' if SHARED.fullmatch(folder.kind) else ''}")


def _check_locks(folder: Folder) -> list[Finding]:
    if folder.locks:
        return []
    return [
        warning(
            "file locks",
            f"{folder.kind} locks no files",
            "submit a run from one terminal at a time, and keep HDF5_USE_FILE_LOCKING=FALSE as batch "
            "scripts set it",
        )
    ]


def _check_space(folder: Folder) -> Finding:
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


def check_shm(shm: SharedMemory, model: Model | None) -> Finding:
    """Whether /dev/shm holds two copies of the weights."""
    free = f"/dev/shm has {shm.free / 1e9:.1f} GB free"
    needed = max(LITTLE_SHM, 2 * model.nbytes if model else 0)
    if shm.free < needed:
        return problem(
            "shared memory",
            f"{free}, two copies of the weights take {needed / 1e9:.1f} GB",
            "free some (in a container: --shm-size), or set exchange.transport=files",
        )
    if shm.leftovers:
        return warning(
            "shared memory",
            f"{free}; {shm.leftovers} files, {shm.leftover_bytes / 1e6:.0f} MB, are left of dead MPI worlds",
            REMOVE_LEFTOVERS,
        )
    return ok("shared memory", free)


def check_model(model: Model, environment: Mapping[str, str]) -> Finding:
    """Whether the policy can be loaded, in that environment, here."""
    if model.place:
        return ok("model", f"{model.name}: {model.nbytes / 1e9:.2f} GB in {model.place}")
    if is_local(model.name):
        how = "has no config.json" if Path(model.name).is_dir() else "does not exist here"
        return problem("model", f"model.path={model.name} {how}", "give a model's folder that all nodes see")
    cache = hub_cache(environment)
    if environment.get("HF_HUB_OFFLINE", "0") in ("0", ""):
        return ok("model", f"{model.name} is not in {cache} yet: it is loaded from the hub at the start")
    return warning(
        "model",
        f"model.path={model.name} is not in {cache}, and HF_HUB_OFFLINE=1 forbids to load it from the hub",
        "where there is a network, type 'tba fetch CONFIG', with --site where jobs of a cluster will need it",
    )


def check_interfaces(interfaces: Sequence[Interface], chosen: str | None) -> Finding:
    """Which network MPI and gloo should take, and whether they need to be told."""
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
        "network",
        f"{', '.join(names)}: the libraries may not pick {best.name} ({best.address}), {why}",
        f"set network_interface: {best.name} in the site file (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
        "OMPI_MCA_btl_tcp_if_include)",
    )


def check_capacity(machine: Machine) -> Finding:
    """Whether a whole run fits on this machine."""
    found = f"{machine.cores} cores, {machine.memory / 1e9:.1f} GB of memory available"
    if machine.memory < LITTLE_MEMORY:
        return warning("machine", found, "close other programs: the quickstart takes 3 GB")
    return ok("machine", found)
