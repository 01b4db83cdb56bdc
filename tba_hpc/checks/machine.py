"""Checks of a machine: GPUs, file system, shared memory, model, network."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil

from tba_hpc.checks.facts import Facts, Finding, Level, login_python, ok, problem, warning
from tba_hpc.checks.resources import find_file, hub_cache, is_here, is_offline, resources
from tba_hpc.config import is_local
from tba_hpc.core.own_code import is_own
from tba_hpc.core.system_libraries import COMPILER, REMEDIES, missing_library
from tba_hpc.run.files import publish
from tba_hpc.run.listeners import unprotected
from tba_hpc.run.owners import BEAT_SECONDS, SILENT_OWNER_SECONDS

LOCAL = re.compile(r"tmpfs|ramfs|ext[234]|xfs|btrfs|zfs|f2fs|overlay|squashfs")
"""File systems that only one machine sees."""

VIRTUAL = re.compile(r"lo|docker\d|virbr|veth|br-|cni|flannel|cali|tun|tap|ifb|dummy|wg")
"""Beginnings of the names of interfaces that lead to no other node."""

FAST = re.compile(r"ib|hsn|opa")
"""Beginnings of the names of InfiniBand, Slingshot and Omni-Path interfaces."""

UNKNOWN = "an unknown file system"
"""Kind of a file system whose mount the kernel does not list."""

SHM = Path("/dev/shm")

OWN_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders of which every machine has its own."""

GPUS, RUN_ROOT, FILE_SYSTEM, NETWORK = "GPUs", "run root", "file system", "network"
CLOCKS = "clocks"
"""Name of a finding that other modules look for."""

LEASE_SECONDS = SILENT_OWNER_SECONDS - BEAT_SECONDS
"""Largest safe difference of clocks, s. Beyond it a rank may lose its claim between two heartbeats."""

GIB = 1 << 30
LITTLE_DISK, LITTLE_INODES, LITTLE_SHM, LITTLE_MEMORY = 10 * GIB, 10_000, GIB, 4 * GIB
"""Amounts below which a run may end early, in bytes except for inodes. A run needs disk for checkpoints,
inodes for shards, shared memory for two copies of the weights, and memory for three processes."""


def check_capacity(facts: Facts) -> Iterator[Finding]:
    """Check that a whole run fits in this machine's memory."""
    memory = psutil.virtual_memory().available
    found = f"{len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory available"
    if memory < LITTLE_MEMORY:
        yield warning("machine", found, "close other programs: the quickstart takes 3 GB")
    else:
        yield ok("machine", found)


def check_engine(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has the system libraries that vLLM needs. Compute nodes may have others."""
    if facts.in_container or (facts.config and is_own(facts.config.model.path)):
        return
    if library := missing_library():
        level: Level = "warning" if facts.on_login_node else "problem"
        found = f"vLLM needs {library}, which this machine lacks"
        yield Finding("engine", level, found, REMEDIES[library])


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """Check that kernels can be compiled if there are GPUs; engines compile them at their start."""
    if not nvidia_smi()[0] or not installed_torch()[1]:
        return
    yield from judge_compiler(facts.environment, Path(sysconfig.get_path("include")))


def judge_compiler(environment: Mapping[str, str], include: Path) -> Iterator[Finding]:
    """Check for a compiler and Python.h. include: folder of this Python's header; Triton knows it, too."""
    path = environment.get("PATH", os.defpath)
    found = environment.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    if not found:
        yield problem(
            "compiler", "the kernels of GPUs need a C compiler, which this machine lacks", REMEDIES[COMPILER]
        )
    elif not (include / "Python.h").is_file():
        remedy = "apt-get install python3-dev, dnf install python3-devel, or an interpreter of uv or conda"
        yield problem("compiler", f"the kernels of GPUs need Python.h, and {include} lacks it", remedy)


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Check that other users of this machine can be kept from the ports of a run."""
    mpiexec = facts.config is None or facts.config.one_world
    if found := unprotected(mpiexec=mpiexec):
        files = ", or set exchange.transport=files, which needs no mpiexec" if mpiexec else ""
        yield warning("ports", found, f"if others use this machine, take one for yourself{files}")
    else:
        yield ok("ports", "closed to others once ranks are up")


# --- GPUs ---


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Check that there are as many GPUs as the site says, and that torch was built for their driver."""
    names, driver, newest, error = nvidia_smi()
    yield judge_gpus(facts.site.gpus_per_node, names, driver, newest, error, *installed_torch())


def judge_gpus(
    expected: int, names: tuple[str, ...], driver: str, newest: str, error: str, torch: str, built: str
) -> Finding:
    """Judge GPUs. newest: newest CUDA that the driver runs. built: CUDA of ``torch``, empty for none."""
    if expected and "rocm" in torch:
        return ok(GPUS, f"torch {torch}; AMD GPUs are not checked")
    if len(names) < expected:
        return problem(
            GPUS,
            f"gpus_per_node: {expected}, but a job gets {len(names)}" + (f" ({error})" if error else ""),
            "check gpu_request in the site file; on a cluster without GPUs, set gpus_per_node: 0",
        )
    if not names:
        return ok(GPUS, f"none here, torch {torch}: the work is done on the CPU")
    if _major(built) > _major(newest):
        found = f"torch {torch} is for CUDA {built}, driver {driver} runs up to {newest}"
        return problem(GPUS, found, "ask for a newer driver, or install torch for the older CUDA")
    if torch and not built:
        return _built_for_cpu(torch)
    return ok(GPUS, f"{len(names)} × {names[0]}, driver {driver} (CUDA {newest}), torch {torch} for {built}")


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that the torch which the nodes will use was built for their GPUs."""
    torch, site = installed_torch()[0], facts.site
    if site.gpus_per_node and site.python == [sys.executable] and torch.endswith("+cpu"):
        yield _built_for_cpu(torch)


def _built_for_cpu(torch: str) -> Finding:
    found = f"torch {torch} is built for the CPU, and there are GPUs to use"
    return problem(GPUS, found, "install this project with its extra for GPUs: pip install '.[gpu]'")


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def nvidia_smi() -> tuple[tuple[str, ...], str, str, str]:
    """Return names of the GPUs, driver, newest CUDA that it runs, and nvidia-smi's error if it lists none."""
    if shutil.which("nvidia-smi") is None:
        return (), "", "", "nvidia-smi is not on PATH"
    listed, table = _output("nvidia-smi", "-L"), _output("nvidia-smi")
    names = tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE))
    found = [re.search(rf"{words} Version:\s*([\d.]+)", table) for words in ("Driver", r"CUDA(?: UMD)?")]
    driver, newest = (match[1] if match else "" for match in found)
    return names, driver, newest, "" if names else " ".join(listed.split())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def installed_torch() -> tuple[str, str]:
    """Return the installed torch's version, by its metadata, and its CUDA's; empty for none."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return "", ""
    text = Path(str(torch.locate_file("torch/version.py"))).read_text()
    built = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return torch.version, built[1] if built else ""


# --- The run root ---


def check_folder(facts: Facts) -> Iterator[Finding]:
    """Check that the run root is writable, private, seen by all nodes, and has room.

    The check does there what a run does, or in the nearest existing parent if the root does not exist.
    """
    if facts.root is None:
        return
    root = facts.root.absolute()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    kind = mount_kind(parent.resolve())
    try:
        yield from judge_folder(root, parent, kind)
    except OSError as error:
        found = f"cannot write to {root}: {error.strerror or error}"
        yield problem(RUN_ROOT, found, "choose another folder with --run-root")
        return
    yield judge_kind(root, kind, shared=facts.shared and not facts.alone)
    space = os.statvfs(parent)
    yield judge_space(space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None)


def _links(path: Path) -> bool:
    """Return whether hard links work: a file can get a second name, but not an existing one."""
    other = path.with_name("link")
    try:
        os.link(path, other)
    except OSError:
        return False
    with suppress(FileExistsError):
        os.link(path, other)
        return False
    return True


def judge_folder(root: Path, parent: Path, kind: str) -> Iterator[Finding]:
    """Do what a run does, in a folder that is removed afterwards, and judge the result. Raises OSError."""
    elsewhere = "choose another folder with --run-root"
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=parent) as name:
        file, began = Path(name) / "file", time.monotonic()
        publish(file, b"text")
        took = time.monotonic() - began
        private = not stat.S_IMODE(Path(name).stat().st_mode) & 0o077
        links = _links(file)
    if private:
        yield ok(RUN_ROOT, f"{root}: writable, private, renames after fsync ({1000 * took:.1f} ms)")
    else:
        found = f"{root} ({kind}) does not keep file modes: others may read a run"
        yield warning(RUN_ROOT, found, elsewhere)
    if not links:
        found = f"{kind} has no atomic hard links, by which two starts of a run are kept apart"
        yield problem("hard links", found, elsewhere)


def judge_clocks(stamps: Mapping[str, float]) -> Iterator[Finding]:
    """Judge unix times of files that nodes wrote at the same moment; leases trust only these stamps."""
    if len(stamps) < 2:
        return
    late, *_, early = sorted(stamps, key=lambda host: stamps[host])
    if (apart := stamps[early] - stamps[late]) > LEASE_SECONDS:
        found = f"{early} stamps its files {apart:.0f} s ahead of {late}, whose ranks would be taken for dead"
        yield problem(CLOCKS, found, "set the clocks of the nodes (NTP, chrony), or leave one of them out")
    else:
        yield ok(CLOCKS, f"{len(stamps)} nodes agree within {LEASE_SECONDS:g} s")


def judge_kind(root: Path, kind: str, *, shared: bool) -> Finding:
    """Judge whether a file system lasts, and is of a kind that all nodes may see."""
    if shared and LOCAL.fullmatch(kind):
        found = f"{root} is on {kind}, which other nodes do not see"
        return warning(FILE_SYSTEM, found, "put runs on a file system that all nodes share: --run-root")
    if kind in ("tmpfs", "ramfs"):
        found = f"{root} is on {kind}: it takes memory, and is gone after a reboot"
        return warning(FILE_SYSTEM, found, "put runs on a disk: run.root")
    return ok(FILE_SYSTEM, kind)


def judge_space(free: int, inodes: int | None) -> Finding:
    """Judge the room for checkpoints and shards. free: bytes. inodes: None if they are not counted."""
    found = f"{free / 1e9:.1f} GB free" + ("" if inodes is None else f", {inodes:,} files more")
    if inodes is not None and inodes < LITTLE_INODES:
        remedy = "delete files or raise the quota: a run seals a shard every few seconds"
        return warning("disk space", found, remedy)
    if free < LITTLE_DISK:
        return warning("disk space", found, "make room or choose another --run-root: checkpoints are large")
    return ok("disk space", found)


def mount_kind(path: Path) -> str:
    """Return the file system type of ``path`` (absolute, no links); UNKNOWN as in a chroot."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), UNKNOWN)


def check_interpreter(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that jobs will find the Python and the files that they need.

    The code is not checked, since jobs have a copy of it beside their run.
    """
    if facts.in_container or facts.alone:
        return
    python = Path(login_python(facts.site))
    if own := _own_folder(python, facts) or _own_folder(python.resolve(), facts):
        found = f"the Python of the jobs is {python}, and each node has {own} of its own"
        remedy = "install on a file system that all nodes see, or name another Python with the site key venv"
        yield warning("interpreter", found, remedy)
    for one in resources(facts.config, of_custom_task=False) if facts.config else []:
        if is_here(one) and (own := _own_folder(Path(one.name).absolute(), facts)):
            remedy = "move it to a file system that all nodes see"
            yield warning("files", f"{one} is on this machine, and each node has {own} of its own", remedy)


def _own_folder(path: Path, facts: Facts) -> str | None:
    """Return a phrase if ``path`` lies where every machine has its own files, such as /tmp, or None."""
    folders = filter(None, (*OWN_FOLDERS, facts.environment.get("TMPDIR")))
    if own := next((folder for folder in folders if path.is_relative_to(folder)), None):
        return f"a {own}"
    return "memory" if mount_kind(path) in ("tmpfs", "ramfs") else None


# --- The node's own folder, model, shared memory, network ---


def check_scratch(facts: Facts) -> Iterator[Finding]:
    """Check that TMPDIR is writable and has room for what libraries put there."""
    folder = Path(facts.environment.get("TMPDIR") or "/tmp")
    remedy = "set TMPDIR, in the site file under environment, to a folder of the node's own with room"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield problem("scratch", f"cannot write to {folder} (TMPDIR): {error.strerror or error}", remedy)
        return
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        found = f"{folder} (TMPDIR) is mounted noexec, so that what engines compile there cannot be loaded"
        yield warning("scratch", found, remedy)
    elif free < LITTLE_SHM:
        yield warning("scratch", f"{folder} (TMPDIR) has {free / 1e9:.1f} GB free", remedy)
    else:
        yield ok("scratch", f"{folder}, {free / 1e9:.1f} GB free")


def model_bytes(name: str | None, environment: Mapping[str, str]) -> int:
    """Return the bytes of a model's safetensors files; 0 if the model is not on this machine.

    name: a folder or a model on the hub. environment: variables that say where the hub's cache is.
    """
    config = find_file(name, "config.json", environment) if name else None
    return sum(file.stat().st_size for file in config.parent.glob("*.safetensors")) if config else 0


def check_model(facts: Facts) -> Iterator[Finding]:
    """Check that the policy can be loaded in the environment of this machine."""
    name, environment = facts.model, facts.environment
    if name is None:
        return
    if config := find_file(name, "config.json", environment):
        yield ok("model", f"{name}: {model_bytes(name, environment) / 1e9:.2f} GB in {config.parent}")
    elif is_local(name):
        how = "has no config.json" if Path(name).is_dir() else "does not exist here"
        yield problem("model", f"model.path={name} {how}", "give a model's folder that all nodes see")
    elif is_offline(environment):
        found = (
            f"model.path={name} is not in {hub_cache(environment)}, and HF_HUB_OFFLINE=1 forbids a download"
        )
        remedy = "where there is a network, type 'tba fetch CONFIG', with --site for the jobs of a cluster"
        yield warning("model", found, remedy)
    else:
        found = f"{name} is not in {hub_cache(environment)} yet: it is loaded from the hub at the start"
        yield ok("model", found)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Check that /dev/shm holds two copies of the weights."""
    free = shutil.disk_usage(SHM).free if SHM.exists() else 0
    yield judge_shared_memory(free, model_bytes(facts.model, facts.environment))


def judge_shared_memory(free: int, weights: int) -> Finding:
    """Judge /dev/shm. free: bytes there. weights: bytes of the model, 0 if unknown."""
    needed, found = max(LITTLE_SHM, 2 * weights), f"/dev/shm has {free / 1e9:.1f} GB free"
    if free >= needed:
        third = "" if free >= 3 * weights else ": no third copy of the weights while one is evaluated"
        return ok("shared memory", found + third)
    found += f", two copies of the weights take {needed / 1e9:.1f} GB"
    remedy = "free some (in a container: --shm-size), or set exchange.transport=files"
    return problem("shared memory", found, remedy)


def check_registered_memory(facts: Facts) -> Iterator[Finding]:
    """Check, in a separate process, that CUDA registers shared memory, through which weights travel."""
    if nvidia_smi()[0] and installed_torch()[1]:
        program = "from tba_hpc.learner.registered_memory import try_a_page; print(try_a_page())"
        yield judge_registered_memory(_output(sys.executable, "-c", program))


def judge_registered_memory(said: str) -> Finding:
    """Judge the output of ``try_a_page``."""
    last = (said.splitlines() or ["no answer"])[-1]
    if last == "cudaError 0":
        return ok("registered memory", f"CUDA registers {SHM}: weights are copied at the speed of the link")
    found = f"CUDA does not register {SHM} ({last}): copies of weights take three times as long, or more"
    return warning("registered memory", found, "ask for a newer driver, or try it outside the container")


def check_network(facts: Facts) -> Iterator[Finding]:
    """Find the network that MPI and gloo should use, and check whether it must be configured."""
    speeds: dict[str, int] = {}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        own = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        usable = any(not address.startswith("fe80:") for address in own)
        if name in states and states[name].isup and usable and not VIRTUAL.match(name):
            speeds[name] = states[name].speed
    yield judge_network(speeds, facts.site.network_interface)


def judge_network(speeds: Mapping[str, int], chosen: str | None) -> Finding:
    """Judge interfaces. speeds: Mbit/s of each one that leads to other nodes, 0 if unknown."""
    if not speeds:
        return warning(NETWORK, "no interface leads to other nodes", "ask how nodes reach each other")
    names = sorted(speeds, key=lambda name: (FAST.match(name) is None, -speeds[name], name))
    best = names[0]
    if chosen and chosen not in speeds:
        found = f"network_interface: {chosen} is not here, only {', '.join(names)}"
        return problem(NETWORK, found, f"set network_interface: {best} in the site file")
    if chosen or len(names) == 1:
        return ok(NETWORK, chosen or f"{best}, the only one")
    why = "built for MPI" if FAST.match(best) else "the fastest" if speeds[best] else "the first by name"
    return warning(
        NETWORK,
        f"{', '.join(names)}: the libraries may not pick {best}, {why}",
        f"set network_interface: {best} in the site file (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
        "OMPI_MCA_btl_tcp_if_include)",
    )
