"""Which MPI library ranks load: the wheel's beside Python, the site's, or one that is named.

mpi4py's wheel decides when it is imported, by an environment variable; so all is said before Python starts.
What the library is ``checks/library.py`` finds out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tba_hpc.launch import ONE_MACHINE

VARIABLE = "MPI4PY_LIBMPI"
"""Where mpi4py 4.1 looks (``mpi4py/_mpiabi.py``). A path: that file, or libmpi in that folder. Empty: libmpi
as the system's loader finds it (LD_LIBRARY_PATH, which modules set). Unset: beside Python, else as before."""

WHEEL, SITE = "wheel", "site"
"""Values of the site key ``mpi_library`` that are no paths."""

NO_NETWORK = {**ONE_MACHINE, "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic"}
"""ONE_MACHINE for every Open MPI: release 4 calls the way through memory ``vader`` and refuses ``sm``."""


def variables(choice: str) -> dict[str, str]:
    """Environment in which mpi4py loads the library that the site key ``mpi_library`` names."""
    return {} if choice == WHEEL else {VARIABLE: "" if choice == SITE else choice}


def one_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which ranks of the Open MPI that ``environment`` chooses meet in memory alone."""
    return NO_NETWORK if VARIABLE in environment else ONE_MACHINE


def mpiexec_of(library: str) -> Path:
    """Where the mpiexec of a library (a value of the variable) is, if that has a folder of its own."""
    path = Path(library)
    return (path if path.is_dir() else path.parent).parent / "bin" / "mpiexec"
