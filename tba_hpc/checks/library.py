"""Describes the MPI library that a process has loaded.

This module must not import mpi4py: a process that has loaded the library calls ``describe``.
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
"""Program that prints a Library as JSON. It does not start MPI, as some libraries fail to outside a job."""

NAME = re.compile(r"libmpi(ch|_(?!cxx)[a-z]+(_\d+)?)?\.so[.\d]*")
"""File names of MPI libraries. MPICH variants have names of their own; Cray's also name the compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An MPI library. version: as the library reports it. path: its file.

    own: whether it is in ``lib`` of this Python environment, where the wheel puts it. pmix: whether the
    process has loaded PMIx, a library by which ranks find each other under srun.
    """

    version: str
    path: str = ""
    own: bool = False
    pmix: bool = False

    @property
    def plugin(self) -> str:
        """Plugin of srun with which ranks find each other; empty for an MPICH built with PMIx."""
        if "Open MPI" in self.version:
            return "pmix"
        if self.pmix:
            return ""
        return "cray_shasta" if "CRAY" in self.version else "pmi2"


def describe(version: str) -> Library:
    """Describe the library of this process, given the text of MPI_Get_library_version."""
    files = mapped_files(os.fsdecode(Path("/proc/self/maps").read_bytes()))
    path = next((file for file in files if NAME.fullmatch(file.name)), None)
    return Library(
        version=first_words(version),
        path=str(path or ""),
        own=path is not None and path.parent == Path(sys.prefix).resolve() / "lib",
        pmix=any(file.name.startswith("libpmix.so") for file in files),
    )


def mapped_files(maps: str) -> list[Path]:
    """Return the files in the text of /proc/PID/maps, each once."""
    columns = [line.split(maxsplit=5) for line in maps.splitlines()]
    return list(dict.fromkeys(Path(column[5]) for column in columns if column[5:] and column[5][0] == "/"))
