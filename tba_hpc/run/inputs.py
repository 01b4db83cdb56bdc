"""Checks that prompts and model files, and the date in prompts, stay the same over all starts of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from zlib import crc32

import numpy as np
from blake3 import blake3

from tba_hpc.config import ConfigError
from tba_hpc.core.types import Prompt, Split
from tba_hpc.core.wording import first_few
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import make_folder, publish

log = logging.getLogger(__name__)

MODEL_FILES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
"""Suffixes of the files in a model's folder that belong to the model or its tokenizer."""

PIECES, PIECE_BYTES = 16, 64 << 10
"""Number of pieces that are read of each model file, and their size in bytes. They are evenly spaced, the
first at the beginning of the file and the last at its end."""


def first_day(run: RunDir) -> date:
    """Return the day on which the run began, for chat templates that put the date into every prompt."""
    return date.fromisoformat(_noted(run.inputs / "day", date.today().isoformat().encode()).decode())


def require_same_prompts(run: RunDir, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
    """Record checksums of each split's prompts when a run begins, and compare them at every later start.

    Each searcher calls this. Added training prompts and changed held-out prompts are logged as a warning, and
    recorded. Raises ConfigError if earlier training prompts are missing, or have another text, target or
    position.
    """
    for split, some in prompts.items():
        file = run.inputs / f"{split}.crc32"
        now = np.array([_checksum(prompt) for prompt in some], "<u4")
        before = np.frombuffer(_noted(file, now.tobytes()), "<u4")
        if np.array_equal(before, now):
            continue
        added = len(now) - len(before)
        both = min(len(now), len(before))
        others = np.append(np.flatnonzero(before[:both] != now[:both]), np.arange(both, len(before)))
        if split == "train" and len(others):
            raise ConfigError(
                f"{len(others)} of {len(before)} training prompts that {run.path} began with have changed "
                "(the data, or how this version of tba reads them), the first of them prompt "
                f"{others[0]}: put the data back, or start another run (run.name); to go on with the new "
                f"data, delete {file}; a changed prompt then loses its old completions"
            )
        since = "since the run's last start"
        if split == "train":
            log.warning("%d training prompts were added %s", added, since)
        else:
            log.warning("the %s prompts changed %s: later scores are of other prompts", split, since)
        publish(file, now.tobytes())


def have_same_prompts(one: RunDir, other: RunDir, split: Split) -> bool:
    """Return whether two runs had equal prompts in a split when each last started; False if unknown."""
    files = [run.inputs / f"{split}.crc32" for run in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def require_same_model(run: RunDir, path: str, folder: Path) -> None:
    """Record digests of the model's files when a run begins, and compare them at every later start.

    Each searcher calls this. path: ``model.path``, for the error. folder: the model's folder. Raises
    ConfigError if a file was changed, added or removed, since references, engines and tokenizers would no
    longer agree.
    """
    note = run.inputs / "model"
    files = sorted(file for file in folder.iterdir() if file.suffix in MODEL_FILES and file.is_file())
    now = {file.name: f"{_sampled(file)} {file.stat().st_size} {file.name}" for file in files}
    before = _noted(note, "\n".join(now.values()).encode()).decode().splitlines()
    if changed := sorted({line.split(" ", 2)[2] for line in set(before) ^ set(now.values())}):
        raise ConfigError(
            f"model.path={path} is not the model that {run.path} began with ({first_few(changed)} changed): "
            f"put it back, or start another run (run.name); to go on, delete {note}"
        )


def forget_inputs(run: RunDir) -> None:
    """Delete the checksums of prompts and the digests of the model's files."""
    for file in (run.inputs / "model", *run.inputs.glob("*.crc32")):
        file.unlink(missing_ok=True)


def _checksum(prompt: Prompt) -> int:
    return crc32(prompt.target.encode(errors="surrogatepass"), crc32(prompt.tokens.tobytes()))


def _noted(file: Path, data: bytes) -> bytes:
    """Return the contents of ``file``. If it does not exist, first write ``data`` to it."""
    if not file.exists():
        make_folder(file.parent)
        with suppress(FileExistsError):  # another searcher was faster
            publish(file, data, replace=False)
    return file.read_bytes()


def _sampled(file: Path) -> str:
    """Return a digest of PIECES short pieces of a file, so that a large file need not be read as a whole."""
    summed, size = blake3(), file.stat().st_size
    with file.open("rb") as opened:
        for start in np.linspace(0, max(0, size - PIECE_BYTES), PIECES).astype(int).tolist():
            opened.seek(start)
            summed.update(opened.read(PIECE_BYTES))
    return summed.hexdigest(16)
