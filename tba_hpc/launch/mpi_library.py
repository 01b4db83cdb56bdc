"""Choice of the MPI library that ranks load: the wheel's beside Python, the site's, or a named one.

mpi4py's wheel chooses the library when it is imported. It reads an environment variable, which must be set
before Python starts. ``checks/library.py`` finds out which library was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tba_hpc.launch import ONE_MACHINE

VARIABLE = "MPI4PY_LIBMPI"
"""Environment variable that mpi4py 4.1 reads (``mpi4py/_mpiabi.py``). A path: that file, or libmpi in that
folder. Empty: libmpi as the system's loader finds it, by the LD_LIBRARY_PATH that modules set. Unset: libmpi
beside Python, or else as the loader finds it."""

WHEEL, SITE = "wheel", "site"
"""Values of the site key ``mpi_library`` that are not paths."""

NO_NETWORK = {**ONE_MACHINE, "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic"}
"""Like ONE_MACHINE, for any Open MPI: release 4 calls shared memory ``vader`` and refuses ``sm``."""


def variables(choice: str) -> dict[str, str]:
    """Return the environment in which mpi4py loads the library named by the site key ``mpi_library``."""
    return {} if choice == WHEEL else {VARIABLE: "" if choice == SITE else choice}


def one_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that limit ranks to shared memory, for the Open MPI that ``environment`` chooses."""
    return NO_NETWORK if VARIABLE in environment else ONE_MACHINE


def mpiexec_of(library: str) -> Path | None:
    """Return the mpiexec of a library, given as a value of VARIABLE; None if the loader must find it.

    Relative paths are not used: they would lead to a program in the working directory, which may be
    anybody's.
    """
    path = Path(library)
    if not path.is_absolute():
        return None
    return (path if path.is_dir() else path.parent).parent / "bin" / "mpiexec"
