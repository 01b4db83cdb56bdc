"""Checks of GPUs, and of what programs on them need.

A function ``check_X`` collects facts about this machine; ``judge_X`` turns them into findings.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tba_hpc.checks.facts import Facts, Finding, ok, problem, warning
from tba_hpc.checks.machine import SHM
from tba_hpc.core.own_code import is_own
from tba_hpc.core.system_libraries import COMPILER, REMEDIES

DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of GPUs, by NVIDIA and AMD."""

GPUS = "GPUs"
"""Name of the findings about GPUs."""


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """Check that engines can compile kernels, if this machine has GPUs."""
    if not nvidia_smi()[0] or not installed_torch()[1]:
        return
    yield from judge_compiler(facts.environment, Path(sysconfig.get_path("include")))


def judge_compiler(environment: Mapping[str, str], include: Path) -> Iterator[Finding]:
    """Check for a C compiler, by CC and PATH of ``environment``, and for Python.h. Triton needs both.

    include: folder of this Python's headers.
    """
    path = environment.get("PATH", os.defpath)
    found = environment.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    if not found:
        yield problem(
            "compiler", "GPU kernels need a C compiler, which this machine lacks", REMEDIES[COMPILER]
        )
    elif not (include / "Python.h").is_file():
        remedy = "apt-get install python3-dev, dnf install python3-devel, or an interpreter of uv or conda"
        yield problem("compiler", f"GPU kernels need Python.h, and {include} lacks it", remedy)


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Check that there are as many GPUs as the site says, and that the installed torch can use them."""
    names, driver, newest, error = nvidia_smi()
    yield judge_gpus(facts.site.gpus_per_node, names, driver, newest, error, *installed_torch())
    if names:
        yield from judge_modes(_output("nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"))


def check_dtype(facts: Facts) -> Iterator[Finding]:
    """Check that a machine without a GPU does not train in bfloat16, which is slow on CPUs."""
    model = facts.config.model if facts.config else None
    if model and model.dtype == "bfloat16" and not is_own(model.path) and not _may_have_gpu():
        found = "model.dtype=bfloat16 is slower than float32 on most CPUs, and this machine has no GPU"
        yield warning("dtype", found, "set model.dtype=float32")


def _may_have_gpu() -> bool:
    """Return whether this machine has NVIDIA's tools, or a device file of a GPU by NVIDIA or AMD."""
    return shutil.which("nvidia-smi") is not None or any(Path(device).exists() for device in DEVICES)


def judge_gpus(
    expected: int, names: tuple[str, ...], driver: str, newest: str, error: str, torch: str, built: str
) -> Finding:
    """Return the finding about GPUs.

    expected: the site's gpus_per_node. names, driver, newest, error: as ``nvidia_smi`` returns them. torch,
    built: as ``installed_torch`` returns them.
    """
    if expected and "rocm" in torch:
        return ok(GPUS, f"torch {torch}; AMD GPUs are not checked")
    if len(names) < expected:
        return problem(
            GPUS,
            f"gpus_per_node: {expected}, but a job gets {len(names)}" + (f" ({error})" if error else ""),
            "check gpu_request in the site file; on a cluster without GPUs, set gpus_per_node: 0",
        )
    if not names:
        return ok(GPUS, f"none here, torch {torch}: a run uses the CPU")
    if _major(built) > _major(newest):
        found = f"torch {torch} is built for CUDA {built}, but driver {driver} supports at most {newest}"
        return problem(GPUS, found, "ask for a newer driver, or install torch for the older CUDA")
    if torch and not built:
        return _built_for_cpu(torch)
    return ok(GPUS, f"{len(names)} × {names[0]}, driver {driver} (CUDA {newest}), torch {torch} for {built}")


def judge_modes(said: str) -> Iterator[Finding]:
    """Yield a finding unless several processes can use a GPU, as a searcher and its engine do.

    said: the compute modes of the GPUs, one per line, as nvidia-smi prints them.
    """
    if modes := sorted({mode for mode in said.split() if mode.startswith(("Exclusive", "Prohibited"))}):
        found = (
            f"the compute mode of GPUs is {' and '.join(modes)}, but a searcher shares its with its engine"
        )
        remedy = "ask for the mode Default: --gpu_cmode=shared under sbatch_options on some clusters"
        yield problem(GPUS, found, remedy)


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that jobs on GPUs will not use a torch that is built for CPUs."""
    torch, site = installed_torch()[0], facts.site
    if site.gpus_per_node and site.python == [sys.executable] and torch.endswith("+cpu"):
        yield _built_for_cpu(torch)


def _built_for_cpu(torch: str) -> Finding:
    found = f"torch {torch} is built for CPUs and cannot use the GPUs"
    remedy = "type make install TARGET=gpu, or on a cluster without GPUs, set gpus_per_node: 0"
    return problem(GPUS, found, remedy)


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


@cache
def nvidia_smi() -> tuple[tuple[str, ...], str, str, str]:
    """Return the names of the GPUs, the driver's version, the newest CUDA that it supports, and an error.

    The error is "" if nvidia-smi lists a GPU. Otherwise it is the output of nvidia-smi, or a sentence if this
    program is missing. nvidia-smi is called once per process, since it may take half a minute.
    """
    if shutil.which("nvidia-smi") is None:
        return (), "", "", "nvidia-smi is not on PATH"
    listed, table = _output("nvidia-smi", "-L"), _output("nvidia-smi")
    names = tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE))
    found = [re.search(rf"{words} Version:\s*([\d.]+)", table) for words in ("Driver", r"CUDA(?: UMD)?")]
    driver, newest = (match[1] if match else "" for match in found)
    return names, driver, newest, "" if names else " ".join(listed.split())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def installed_torch() -> tuple[str, str]:
    """Return the version of torch, and of the CUDA that it is built for; "" for none. Imports no torch."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return "", ""
    text = Path(str(torch.locate_file("torch/version.py"))).read_text()
    built = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return torch.version, built[1] if built else ""


def check_registered_memory(facts: Facts) -> Iterator[Finding]:
    """Check, in a separate process, that CUDA can register (page-lock) shared memory.

    Weights are copied through such memory.
    """
    if nvidia_smi()[0] and installed_torch()[1]:
        program = "from tba_hpc.learner.registered_memory import try_a_page; print(try_a_page())"
        yield judge_registered_memory(_output(sys.executable, "-c", program))


def judge_registered_memory(said: str) -> Finding:
    """Return the finding on whether CUDA can register shared memory, which speeds up copies of weights.

    said: output of a process that prints what ``try_a_page`` returns, or torch's error if torch has failed.
    """
    answer = re.search(r"^cudaError \d+$", said, re.MULTILINE)  # warnings may come after it
    last = answer[0] if answer else (said.splitlines() or ["no answer"])[-1]
    if last == "cudaError 0":
        return ok("registered memory", f"CUDA registers {SHM}: weights are copied at full speed")
    if not answer and "timed out after" not in last:
        remedy = "if LD_LIBRARY_PATH leads to other CUDA libraries than torch's own, unset it"
        return problem(GPUS, f"torch cannot use the GPUs ({last})", remedy)
    found = f"CUDA does not register {SHM} ({last}): copies of weights take three times as long, or more"
    return warning("registered memory", found, "ask for a newer driver, or run without the container")
