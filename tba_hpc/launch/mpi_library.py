"""Chooses the MPI library that ranks load: pip's, the cluster's, or a given file. Describes a loaded library.

mpi4py loads an MPI library as soon as it is imported. An environment variable says which one, and must be set
before Python starts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tba_hpc.core.wording import first_words

VARIABLE = "MPI4PY_LIBMPI"
"""Environment variable with which mpi4py 4.1 chooses the library (``mpi4py/_mpiabi.py``).

A path names a file, or a folder that contains libmpi. If the variable is empty, the system's loader finds
libmpi, for example through the LD_LIBRARY_PATH that modules set. If it is unset, mpi4py loads the libmpi of
this Python environment, or if there is none, the one that the loader finds."""

WHEEL, SITE = "wheel", "site"
"""Values of the site key ``mpi_library`` other than paths: the library that pip installed, and the
cluster's."""

ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
"""Environment variables that make ranks of Open MPI exchange messages through shared memory alone. Otherwise
each rank listens on every network of the machine."""

NO_NETWORK = {**ONE_MACHINE, "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic"}
"""Variables with the effect of ONE_MACHINE that also suit Open MPI 4, in which the transport ``sm`` has
another name."""

LOOK = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "import json, dataclasses; from tba_hpc.launch.mpi_library import describe; "
    "print(json.dumps(dataclasses.asdict(describe(MPI.Get_library_version()))))"
)
"""Python program that prints a Library as JSON, so that its caller need not load MPI. The program does not
start MPI, which some libraries refuse without a job."""

NAME = re.compile(r"libmpi(ch|_(?!cxx)[a-z]+(_\d+)?)?\.so[.\d]*")
"""Pattern of the file names of MPI libraries. Those of Cray MPICH contain the compiler's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An MPI library.

    version: name and version, as the library reports them. path: its file, or "" if unknown. own: whether pip
    has installed it in this Python environment. pmix: whether PMIx, with which ranks find each other under
    srun, was loaded as well.
    """

    version: str
    path: str = ""
    own: bool = False
    pmix: bool = False

    @property
    def plugin(self) -> str:
        """Value of ``srun --mpi`` that fits the library; "" for an MPICH with PMIx, which several may fit."""
        if "Open MPI" in self.version:
            return "pmix"
        if self.pmix:
            return ""
        return "cray_shasta" if "CRAY" in self.version else "pmi2"


def describe(version: str) -> Library:
    """Return the MPI library that this process has loaded. version: the text of MPI_Get_library_version."""
    files = [Path(mapped.path) for mapped in psutil.Process().memory_maps()]
    path = next((file for file in files if NAME.fullmatch(file.name)), None)
    return Library(
        version=first_words(version),
        path=str(path or ""),
        own=path is not None and path.parent == Path(sys.prefix).resolve() / "lib",
        pmix=any(file.name.startswith("libpmix.so") for file in files),
    )


def variables(choice: str) -> dict[str, str]:
    """Return environment variables that make mpi4py load ``choice``, a value of the key ``mpi_library``."""
    return {} if choice == WHEEL else {VARIABLE: "" if choice == SITE else choice}


def one_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that limit ranks to shared memory, for the Open MPI that ``environment`` chooses."""
    return NO_NETWORK if VARIABLE in environment else ONE_MACHINE


def mpiexec_of(library: str) -> Path | None:
    """Return the path at which the mpiexec of a library should be; None unless ``library`` is absolute.

    library: a value of VARIABLE. A relative path could lead to another user's program in the working
    directory.
    """
    path = Path(library)
    if not path.is_absolute():
        return None
    return (path if path.is_dir() else path.parent).parent / "bin" / "mpiexec"
