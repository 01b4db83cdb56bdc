"""What one machine has: GPUs, the file system of the run root, shared memory, network, model."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil

from tba_hpc.checks.commands import ask
from tba_hpc.checks.resources import hub_cache
from tba_hpc.run.files import publish

VIRTUAL = re.compile(r"lo|docker\d|virbr|veth|br-|cni|flannel|cali|tun|tap|ifb|dummy|wg")
"""How interfaces begin that lead to no other node."""

FAST = re.compile(r"ib|hsn|opa")
"""How interfaces of InfiniBand, Slingshot and Omni-Path begin."""

MODEL_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
"""What decides where the Hugging Face libraries look for a model."""

SHM = Path("/dev/shm")


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
    free: bytes; inodes: files that may still be made, None if they are not counted. kind: such as lustre.
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
class Interface:
    """A network interface that is up. address: IPv4, else IPv6. speed: Mbit/s, 0 if it does not say."""

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
    """One machine. memory: bytes available; shm: bytes free in /dev/shm.

    environment: the variables by which models are found.
    """

    host: str
    cores: int
    memory: int
    gpus: Gpus
    folder: Folder
    shm: int
    interfaces: tuple[Interface, ...]
    model: Model | None = None
    environment: dict[str, str] = field(default_factory=dict)


def look(root: Path, model: str | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """The facts of this machine, for runs in ``root`` from ``model`` (none: not asked)."""
    return Machine(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().available,
        gpus=find_gpus(),
        folder=try_folder(root),
        shm=shutil.disk_usage(SHM).free if SHM.exists() else 0,
        interfaces=find_interfaces(),
        model=find_model(model, environment) if model else None,
        environment={key: environment[key] for key in MODEL_VARIABLES if key in environment},
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
    """Driver and newest CUDA from the head of nvidia-smi's table; empty if it has none."""
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
