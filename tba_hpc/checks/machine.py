"""Checks of a machine: its libraries, GPUs, folder of runs, model, shared memory and network.

A function ``check_X`` collects facts about this machine; ``judge_X`` turns them into findings.
"""

from __future__ import annotations

import errno
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from ipaddress import ip_address
from pathlib import Path

import psutil

from tba_hpc.checks.facts import Facts, Finding, Level, login_python, ok, problem, warning
from tba_hpc.checks.resources import is_path, resources
from tba_hpc.config import is_local
from tba_hpc.core.hub_files import find_file, hub_cache, is_offline
from tba_hpc.core.own_code import is_own
from tba_hpc.core.system_libraries import COMPILER, REMEDIES, missing_library
from tba_hpc.core.wording import size
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import publish
from tba_hpc.run.listeners import unprotected
from tba_hpc.run.memory import free_memory
from tba_hpc.run.owners import BEAT_SECONDS, SILENT_OWNER_SECONDS

LOCAL = re.compile(r"tmpfs|ramfs|ext[234]|xfs|btrfs|zfs|f2fs|overlay|squashfs")
"""Pattern of the types of file systems that only one machine sees."""

IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems whose files are lost when the machine restarts."""

NODES_SHARE_MEMORY = "TBA_NODES_SHARE_TMPFS"
"""Environment variable that is set, to anything, where all nodes are one machine and share its tmpfs, as on
simulated clusters."""

VIRTUAL = re.compile(r"lo|docker\d|virbr|veth|br-|cni|flannel|cali|tun|tap|ifb|dummy|wg")
"""Pattern of name prefixes of network interfaces that lead to no other node."""

FAST = re.compile(r"ib|hsn|opa")
"""Pattern of name prefixes of InfiniBand, Slingshot and Omni-Path interfaces."""

VERSIONED = ("torch", "vllm", "deepspeed", "transformers", "numpy", "mpi4py")
"""Packages whose versions must fit together."""

UNKNOWN = "an unknown file system"
"""Type of a file system that the kernel does not list among its mounts."""

SHM = Path("/dev/shm")

OWN_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every machine has for itself."""

GPUS, RUN_ROOT, FILE_SYSTEM, NETWORK = "GPUs", "run root", "file system", "network"
CLOCKS = "clocks"
"""Names of findings."""

LEASE_SECONDS = SILENT_OWNER_SECONDS - BEAT_SECONDS
"""Largest safe difference between the clocks of two nodes, s.

If it is larger, ranks may seem dead to other nodes although they send heartbeats."""

GIB = 1 << 30
LITTLE_DISK, LITTLE_INODES, LITTLE_SHM, LITTLE_MEMORY = 10 * GIB, 10_000, GIB, 4 * GIB
"""Amounts below which a run may fail, in bytes; LITTLE_INODES is a number of files.

A run needs disk space for checkpoints, files for shards, shared memory for two copies of the weights, and
memory for three processes."""


def check_capacity(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has enough memory for a small run."""
    memory = free_memory()
    found = f"{len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory available"
    if memory < LITTLE_MEMORY:
        yield warning("machine", found, "close other programs: the quickstart takes 3 GB")
    else:
        yield ok("machine", found)


def check_engine(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has the system libraries that vLLM needs.

    On a login node a missing library is only a warning, since compute nodes may have it.
    """
    if facts.in_container or (facts.config and is_own(facts.config.model.path)):
        return
    if library := missing_library():
        level: Level = "warning" if facts.on_login_node else "problem"
        found = f"vLLM needs {library}, which this machine lacks"
        yield Finding("engine", level, found, REMEDIES[library])


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """Check that engines can compile kernels, if this machine has GPUs."""
    if not nvidia_smi()[0] or not installed_torch()[1]:
        return
    yield from judge_compiler(facts.environment, Path(sysconfig.get_path("include")))


def judge_compiler(environment: Mapping[str, str], include: Path) -> Iterator[Finding]:
    """Check for a C compiler, by CC and PATH of ``environment``, and for Python.h. Triton needs both.

    include: folder of this Python's headers.
    """
    path = environment.get("PATH", os.defpath)
    found = environment.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    if not found:
        yield problem(
            "compiler", "GPU kernels need a C compiler, which this machine lacks", REMEDIES[COMPILER]
        )
    elif not (include / "Python.h").is_file():
        remedy = "apt-get install python3-dev, dnf install python3-devel, or an interpreter of uv or conda"
        yield problem("compiler", f"GPU kernels need Python.h, and {include} lacks it", remedy)


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Check that the ports of a run can be closed to other users of this machine."""
    mpiexec = facts.config is None or facts.config.one_world
    if found := unprotected(mpiexec=mpiexec):
        files = ", or set exchange.transport=files, which needs no mpiexec" if mpiexec else ""
        yield warning("ports", found, f"if others use this machine, run on a machine of your own{files}")
    else:
        yield ok("ports", "closed to other users once all ranks have started")


# --- GPUs ---


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Check that there are as many GPUs as the site says, and that the installed torch can use them."""
    names, driver, newest, error = nvidia_smi()
    yield judge_gpus(facts.site.gpus_per_node, names, driver, newest, error, *installed_torch())
    if names:
        yield from judge_modes(_output("nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"))


def judge_gpus(
    expected: int, names: tuple[str, ...], driver: str, newest: str, error: str, torch: str, built: str
) -> Finding:
    """Return the finding about GPUs.

    expected: the site's gpus_per_node. names, driver, newest, error: as ``nvidia_smi`` returns them. torch,
    built: as ``installed_torch`` returns them.
    """
    if expected and "rocm" in torch:
        return ok(GPUS, f"torch {torch}; AMD GPUs are not checked")
    if len(names) < expected:
        return problem(
            GPUS,
            f"gpus_per_node: {expected}, but a job gets {len(names)}" + (f" ({error})" if error else ""),
            "check gpu_request in the site file; on a cluster without GPUs, set gpus_per_node: 0",
        )
    if not names:
        return ok(GPUS, f"none here, torch {torch}: a run uses the CPU")
    if _major(built) > _major(newest):
        found = f"torch {torch} is built for CUDA {built}, but driver {driver} supports at most {newest}"
        return problem(GPUS, found, "ask for a newer driver, or install torch for the older CUDA")
    if torch and not built:
        return _built_for_cpu(torch)
    return ok(GPUS, f"{len(names)} × {names[0]}, driver {driver} (CUDA {newest}), torch {torch} for {built}")


def judge_modes(said: str) -> Iterator[Finding]:
    """Yield a finding unless several processes can use a GPU, as a searcher and its engine do.

    said: the compute modes of the GPUs, one per line, as nvidia-smi prints them.
    """
    if modes := sorted({mode for mode in said.split() if mode.startswith(("Exclusive", "Prohibited"))}):
        found = (
            f"the compute mode of GPUs is {' and '.join(modes)}, but a searcher shares its with its engine"
        )
        remedy = "ask for the mode Default: --gpu_cmode=shared under sbatch_options on some clusters"
        yield problem(GPUS, found, remedy)


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that jobs on GPUs will not use a torch that is built for CPUs."""
    torch, site = installed_torch()[0], facts.site
    if site.gpus_per_node and site.python == [sys.executable] and torch.endswith("+cpu"):
        yield _built_for_cpu(torch)


def _built_for_cpu(torch: str) -> Finding:
    found = f"torch {torch} is built for CPUs and cannot use the GPUs"
    remedy = "type make install TARGET=gpu, or on a cluster without GPUs, set gpus_per_node: 0"
    return problem(GPUS, found, remedy)


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


@cache
def nvidia_smi() -> tuple[tuple[str, ...], str, str, str]:
    """Return the names of the GPUs, the driver's version, the newest CUDA that it supports, and an error.

    The error is the output of nvidia-smi if it lists no GPU, else "". The program is asked once per process,
    since it may take half a minute.
    """
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
    """Return the version of torch, and of the CUDA that it is built for; "" for none. Imports no torch."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return "", ""
    text = Path(str(torch.locate_file("torch/version.py"))).read_text()
    built = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return torch.version, built[1] if built else ""


# --- The folder of runs ---


def check_folder(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of runs is writable and private, is seen by all nodes, and has space.

    If the folder does not exist, its nearest existing parent is checked.
    """
    if facts.root is None:
        return
    root, parent, kind = _folder(facts.root)
    try:
        yield from judge_folder(root, parent, kind)
    except OSError as error:
        found = f"cannot write to {root}: {error.strerror or error}"
        yield problem(RUN_ROOT, found, _remedy_for_folder(facts, error))
        return
    yield from check_file_system(facts)
    space = os.statvfs(parent)
    yield judge_space(space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None)


def _remedy_for_folder(facts: Facts, error: OSError) -> str:
    """Return what to do if the folder of runs cannot be written: a run that exists cannot go elsewhere."""
    if facts.config is None or not RunDir(facts.config.run_dir).config_file.exists():
        return "choose another folder with --run-root"
    no_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free space there or raise the quota" if no_space else "make it writable"
    return f"{first}, then type this again"


def check_file_system(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of runs is on a file system that persists, and that all nodes see."""
    if facts.root is None:
        return
    root, _, kind = _folder(facts.root)
    one_machine = facts.alone or (kind in IN_MEMORY and NODES_SHARE_MEMORY in facts.environment)
    several = facts.split is None or facts.split.nodes > 1
    yield judge_kind(root, kind, shared=facts.shared and not one_machine, several=several)


def _folder(root: Path) -> tuple[Path, Path, str]:
    """Return a folder's absolute path, its nearest existing parent, and the file system of that parent."""
    root = root.absolute()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    return root, parent, mount_kind(parent.resolve())


def _links(path: Path) -> bool:
    """Return whether the file system of ``path`` makes hard links, and refuses them if the name exists."""
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
    """Write files as a run does, in a temporary folder in ``parent``, and yield findings.

    root: folder of runs. kind: its file system. Raises OSError if a file cannot be written.
    """
    elsewhere = "choose another folder with --run-root"
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=parent) as name:
        file, began = Path(name) / "file", time.monotonic()
        publish(file, b"text")
        took = time.monotonic() - began
        private = not stat.S_IMODE(Path(name).stat().st_mode) & 0o077
        links = _links(file)
    if private:
        yield ok(RUN_ROOT, f"{root}: writable, private; flushing a file takes {1000 * took:.1f} ms")
    else:
        found = f"{root} ({kind}) does not keep file modes, so that other users may read a run"
        yield warning(RUN_ROOT, found, elsewhere)
    if not links:
        found = f"{kind} has no atomic hard links, without which a run could be started twice at once"
        yield problem("hard links", found, elsewhere)


def judge_clocks(stamps: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the finding about the clocks of nodes.

    stamps: timestamps, in unix seconds, of files that the nodes wrote at the same moment, by host. Leases
    depend on such timestamps.
    """
    if len(stamps) < 2:
        return
    late, *_, early = sorted(stamps, key=lambda host: stamps[host])
    if (apart := stamps[early] - stamps[late]) > LEASE_SECONDS:
        found = f"{early} stamps its files {apart:.0f} s ahead of {late}, so that ranks on {late} seem dead"
        yield problem(CLOCKS, found, "synchronise the nodes' clocks (NTP, chrony), or leave out one node")
    else:
        found = f"the clocks of {len(stamps)} nodes differ by less than {LEASE_SECONDS:g} s"
        yield ok(CLOCKS, found)


def judge_kind(root: Path, kind: str, *, shared: bool, several: bool = True) -> Finding:
    """Return the finding on whether the file system of ``root`` is persistent, and may be seen by all nodes.

    shared: whether other machines must see ``root``. several: whether the job has several nodes. If both,
    a ``root`` in the memory of one machine is a problem, not only a warning.
    """
    if shared and LOCAL.fullmatch(kind):
        level: Level = "problem" if several and kind in IN_MEMORY else "warning"
        found = f"{root} is on {kind}, which other nodes do not see"
        return Finding(
            FILE_SYSTEM, level, found, "put runs on a file system that all nodes share: --run-root"
        )
    if kind in IN_MEMORY:
        found = f"{root} is on {kind}, which uses memory and is lost at a reboot"
        return warning(FILE_SYSTEM, found, "put runs on a disk: run.root")
    return ok(FILE_SYSTEM, kind)


def judge_space(free: int, inodes: int | None) -> Finding:
    """Return the finding about the space for checkpoints and shards.

    free: bytes. inodes: number of files that may still be created, or None for no limit.
    """
    found = f"{size(free)} free" + ("" if inodes is None else f", {inodes:,} more files possible")
    if inodes is not None and inodes < LITTLE_INODES:
        remedy = "delete files or raise the quota: a run seals a shard every few seconds"
        return warning("disk space", found, remedy)
    if free < LITTLE_DISK:
        return warning("disk space", found, "free space, or choose another --run-root: checkpoints are large")
    return ok("disk space", found)


def mount_kind(path: Path) -> str:
    """Return the file system type of an absolute, resolved path; UNKNOWN if no mount is listed for it."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), UNKNOWN)


def check_interpreter(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that all nodes see the Python and the files that jobs need.

    The package itself is not checked, since jobs have a copy in the run directory.
    """
    if facts.in_container or facts.alone:
        return
    python = Path(login_python(facts.site))
    if own := _own_folder(python, facts) or _own_folder(python.resolve(), facts):
        found = f"jobs use the Python {python}, but each node has {own} of its own"
        remedy = "install on a file system that all nodes see, or name another Python with the site key venv"
        yield warning("interpreter", found, remedy)
    for one in resources(facts.config, of_custom_task=False) if facts.config else []:
        if is_path(one) and (own := _own_folder(Path(one.name).absolute(), facts)):
            remedy = "move it to a file system that all nodes see"
            yield warning("files", f"{one} is on this machine, but each node has {own} of its own", remedy)


def _own_folder(path: Path, facts: Facts) -> str | None:
    """Return where ``path`` lies if each machine has its own, "a /tmp" or "memory"; None if it is shared."""
    folders = filter(None, (*OWN_FOLDERS, facts.environment.get("TMPDIR")))
    if own := next((folder for folder in folders if path.is_relative_to(folder)), None):
        return f"a {own}"
    return "memory" if mount_kind(path) in IN_MEMORY else None


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Check that no packages from elsewhere come before those of this Python's environment.

    They may come from PYTHONPATH or the user's folder, and have other versions. Environments of other Pythons
    are not checked.
    """
    if not facts.in_container and login_python(facts.site) == sys.executable:
        folders = [Path(folder) for folder in sys.path if folder]
        yield from judge_packages(folders, Path(sys.prefix), Path(__file__).parents[2])


def judge_packages(folders: Sequence[Path], prefix: Path, own: Path) -> Iterator[Finding]:
    """Yield a finding about each folder with packages that come before those of the environment.

    folders: where Python looks for packages, in order. prefix: folder of the environment. own: folder in
    which tba-hpc itself is installed, as by ``pip install --user``; it gives no finding.
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


# --- The node's own folder, model, shared memory, network ---


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
    if config := find_file(name, "config.json", environment):
        yield ok("model", f"{name}: {model_bytes(name, environment) / 1e9:.2f} GB in {config.parent}")
    elif is_local(name):
        how = "has no config.json" if Path(name).is_dir() else "does not exist here"
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


def check_registered_memory(facts: Facts) -> Iterator[Finding]:
    """Check, in a separate process, that CUDA can register (page-lock) shared memory.

    Weights are copied through such memory.
    """
    if nvidia_smi()[0] and installed_torch()[1]:
        program = "from tba_hpc.learner.registered_memory import try_a_page; print(try_a_page())"
        yield judge_registered_memory(_output(sys.executable, "-c", program))


def judge_registered_memory(said: str) -> Finding:
    """Return the finding about registered memory. said: output of ``try_a_page``, or an error of torch."""
    answer = re.search(r"^cudaError \d+$", said, re.MULTILINE)  # warnings may come after it
    last = answer[0] if answer else (said.splitlines() or ["no answer"])[-1]
    if last == "cudaError 0":
        return ok("registered memory", f"CUDA registers {SHM}: weights are copied at full speed")
    if not answer and "timed out after" not in last:
        remedy = "if LD_LIBRARY_PATH leads to other CUDA libraries than torch's own, unset it"
        return problem(GPUS, f"torch cannot use the GPUs ({last})", remedy)
    found = f"CUDA does not register {SHM} ({last}): copies of weights take three times as long, or more"
    return warning("registered memory", found, "ask for a newer driver, or run without the container")


def check_network(facts: Facts) -> Iterator[Finding]:
    """Check that MPI, gloo and NCCL can tell which network connects the nodes."""
    speeds: dict[str, int] = {}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        own = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        usable = any(not address.startswith("fe80:") for address in own)
        if name in states and states[name].isup and usable and not VIRTUAL.match(name):
            speeds[name] = states[name].speed
    yield judge_network(speeds, facts.site.network_interface)
    if facts.site.network_interface is None:
        yield from judge_host_name(_addresses(), _best_first(speeds))


def _addresses() -> set[str]:
    """Return the addresses to which this machine's host name resolves here; empty if it does not."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()


def _best_first(speeds: Mapping[str, int]) -> list[str]:
    """Return the interfaces, those that are fast by their names first, then by speed in Mbit/s."""
    return sorted(speeds, key=lambda name: (FAST.match(name) is None, -speeds[name], name))


def judge_host_name(addresses: Collection[str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if a node's name resolves to no address at which other nodes reach it.

    gloo, by which trainer ranks of several nodes connect, uses the address to which the name resolves. The
    finding omits the name, so that equal findings of several nodes can be joined. addresses: of the name.
    interfaces: names of the network interfaces that lead to other nodes, the best first.
    """
    if all(ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        where = f"leads to {' and '.join(sorted(addresses))}" if addresses else "cannot be resolved"
        found = f"the node's own name {where} there, so that trainers of other nodes do not reach it"
        chosen = ": ".join(["network_interface", *interfaces[:1]])
        yield warning("host name", found, f"set {chosen} in the site file")


def judge_network(speeds: Mapping[str, int], chosen: str | None) -> Finding:
    """Return the finding about the network.

    speeds: speed of each interface that leads to other nodes, in Mbit/s, 0 if unknown. chosen: the site's
    network_interface.
    """
    if not speeds:
        return warning(NETWORK, "no interface leads to other nodes", "ask how nodes reach each other")
    names = _best_first(speeds)
    best = names[0]
    if chosen and chosen not in speeds:
        why = "is the loopback, which other nodes cannot reach" if chosen == "lo" else "does not exist here"
        found = f"network_interface: {chosen} {why}; there is {', '.join(names)}"
        return problem(NETWORK, found, f"set network_interface: {best} in the site file")
    if chosen or len(names) == 1:
        return ok(NETWORK, chosen or f"{best}, the only one")
    why = "fast by its name" if FAST.match(best) else "the fastest" if speeds[best] else "the first by name"
    return warning(
        NETWORK,
        f"{', '.join(names)}: libraries may not choose {best}, which is {why}",
        f"set network_interface: {best} in the site file (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
        "OMPI_MCA_btl_tcp_if_include)",
    )
