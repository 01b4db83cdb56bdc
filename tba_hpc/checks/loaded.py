"""Which MPI library a process has loaded, from where, and which PMIx beside it; what a world of ranks found.

It must not import mpi4py: a process that has loaded it describes itself, by ``describe``.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tba_hpc.core.wording import first_words

LOOK = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "from tba_hpc.checks.loaded import describe; print(describe(MPI.Get_library_version()).to_json())"
)
"""Program that loads MPI without starting it, which some libraries refuse outside of a job."""

LIBRARY = re.compile(r"libmpi(ch|_(?!cxx)[a-z]+(_\d+)?)?\.so[.\d]*")
"""File names of MPI libraries; MPICH's may have names of their own, and those of Cray the compiler's."""

VERSION = re.compile(r"\d+\.\d+[.\w]*")

SERVER = "PMIX_VERSION"
"""Variable by which a PMIx server tells its version to the ranks that it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An MPI library. version: as it calls itself. path: its file.

    own: whether it came with packages of this Python. pmix: version of the PMIx that came with it, by
    which ranks under srun find each other; empty for none, or for one that is built in and does not say.
    """

    version: str
    path: str = ""
    own: bool = False
    pmix: str = ""

    @property
    def needs_plugin(self) -> str:
        """Its name if only one plugin of srun fits it; empty for an MPICH that was built with PMIx, too."""
        return "" if self.pmix and not self.version.startswith("Open MPI") else self.version

    def to_json(self) -> str:
        """JSON text that from_json reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Library:
        """Inverse of to_json."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the ranks of a trial start found out together. server: version of Slurm's PMIx, empty for none.

    broadcast: seconds until ``nbytes`` from the leader were on each of ``nodes``; None until then.
    """

    library: Library
    server: str = ""
    nodes: int = 0
    nbytes: int = 0
    broadcast: float | None = None


def describe(version: str) -> Library:
    """The library of this process, given the text of MPI_Get_library_version."""
    files = mapped_files(Path("/proc/self/maps").read_text())
    path = next((file for file in files if LIBRARY.fullmatch(file.name)), None)
    pmix = next((file for file in files if file.name.startswith("libpmix.so")), None)
    return Library(
        version=first_words(version),
        path=str(path or ""),
        own=path is not None and path.parent == Path(sys.prefix).resolve() / "lib",
        pmix=_version_of(pmix) if pmix else "",
    )


def mapped_files(maps: str) -> list[Path]:
    """Files of the text of /proc/PID/maps, each once."""
    columns = [line.split(maxsplit=5) for line in maps.splitlines()]
    return list(dict.fromkeys(Path(column[5]) for column in columns if column[5:] and column[5][0] == "/"))


def _version_of(pmix: Path) -> str:
    """What a PMIx library that is loaded already says of itself."""
    say = ctypes.CDLL(str(pmix)).PMIx_Get_version
    say.restype = ctypes.c_char_p
    return version_in(say().decode())


def version_in(text: str) -> str:
    """``5.0.11rc1`` of a text that holds more; empty for none."""
    found = VERSION.search(text)
    return found[0] if found else ""


def pmix_server(environment: Mapping[str, str]) -> str:
    """Version of the PMIx server that started the rank with this environment, empty for none."""
    return version_in(environment.get(SERVER, ""))
