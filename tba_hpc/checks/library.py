"""Describes the MPI library that a process has loaded.

A rank, which has loaded the library, calls ``describe``. Other processes run the program LOOK instead, so
that they do not load the library themselves.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.core.wording import first_words

LOOK = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "import json, dataclasses; from tba_hpc.checks.library import describe; "
    "print(json.dumps(dataclasses.asdict(describe(MPI.Get_library_version()))))"
)
"""Python program that prints a Library as JSON. It does not start MPI, which some libraries refuse without a
job."""

NAME = re.compile(r"libmpi(ch|_(?!cxx)[a-z]+(_\d+)?)?\.so[.\d]*")
"""Pattern of the file names of MPI libraries. Those of Cray MPICH contain the compiler's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An MPI library.

    version: name and version, as the library reports them. path: its file, or "" if unknown. own: whether pip
    has installed it in this Python environment. pmix: whether the process has also loaded PMIx, with which
    ranks find each other under srun.
    """

    version: str
    path: str = ""
    own: bool = False
    pmix: bool = False

    @property
    def plugin(self) -> str:
        """Value of ``srun --mpi`` that fits the library; empty for an MPICH with PMIx, as several may fit."""
        if "Open MPI" in self.version:
            return "pmix"
        if self.pmix:
            return ""
        return "cray_shasta" if "CRAY" in self.version else "pmi2"


def describe(version: str) -> Library:
    """Return the MPI library of this process. version: the text of MPI_Get_library_version."""
    files = mapped_files(os.fsdecode(Path("/proc/self/maps").read_bytes()))
    path = next((file for file in files if NAME.fullmatch(file.name)), None)
    return Library(
        version=first_words(version),
        path=str(path or ""),
        own=path is not None and path.parent == Path(sys.prefix).resolve() / "lib",
        pmix=any(file.name.startswith("libpmix.so") for file in files),
    )


def mapped_files(maps: str) -> list[Path]:
    """Return the files in the text of ``/proc/PID/maps``, each once."""
    columns = [line.split(maxsplit=5) for line in maps.splitlines()]
    return list(dict.fromkeys(Path(column[5]) for column in columns if column[5:] and column[5][0] == "/"))
