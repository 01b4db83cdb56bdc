"""Chooses the MPI library that ranks load: the one that pip installed, the cluster's, or a given file.

mpi4py loads the library when it is imported, and an environment variable tells it which. The variable must be
set before Python starts. ``checks/library.py`` finds out which library was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tba_hpc.launch import ONE_MACHINE

VARIABLE = "MPI4PY_LIBMPI"
"""Environment variable with which mpi4py 4.1 chooses the library (``mpi4py/_mpiabi.py``).

A path names a file, or a folder that contains libmpi. If the variable is empty, the system's loader finds
libmpi, for example through the LD_LIBRARY_PATH that modules set. If it is unset, mpi4py loads the libmpi of
this Python environment, or if there is none, the one that the loader finds."""

WHEEL, SITE = "wheel", "site"
"""Values of the site key ``mpi_library`` other than paths: the library that pip installed, and the
cluster's."""

NO_NETWORK = {**ONE_MACHINE, "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic"}
"""Variables with the effect of ONE_MACHINE that also suit Open MPI 4, in which the transport ``sm`` has
another name."""


def variables(choice: str) -> dict[str, str]:
    """Return environment variables with which mpi4py loads ``choice``, a value of the key ``mpi_library``."""
    return {} if choice == WHEEL else {VARIABLE: "" if choice == SITE else choice}


def one_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that limit ranks to shared memory, for the Open MPI that ``environment`` chooses."""
    return NO_NETWORK if VARIABLE in environment else ONE_MACHINE


def mpiexec_of(library: str) -> Path | None:
    """Return the path at which the mpiexec of a library should be; None if only the loader finds the library.

    library: a value of VARIABLE. Relative paths give None, since they would lead to a program in the working
    directory, which may be another user's.
    """
    path = Path(library)
    if not path.is_absolute():
        return None
    return (path if path.is_dir() else path.parent).parent / "bin" / "mpiexec"
