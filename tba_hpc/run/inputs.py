"""Inputs that a run is held to beside its config: its prompts, its model's files, and the day it began."""

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
"""Endings of the files that make a model and its tokenizer."""

PIECES, PIECE_BYTES = 16, 64 << 10
"""Number and size of the pieces of a file that are read: evenly spaced, both ends among them."""


def first_day(run: RunDir) -> date:
    """The day on which a run began: a chat template that writes the day asks the same on every other."""
    return date.fromisoformat(_noted(run.inputs / "day", date.today().isoformat().encode()).decode())


def hold_to_prompts(run: RunDir, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
    """Note the prompts of each split when a run begins, and compare them at every later start.

    Training prompts that were added, and other held-out prompts, are told in the log. Raises ConfigError if
    training prompts have another text, target or number than when the run asked them.
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
                f"{len(others)} of {len(before)} training prompts that {run.path} began with are others now, "
                f"the first of them prompt {others[0]}: put the data back, or start another run (run.name); "
                f"to go on, delete {file}, and what answers the old ones leaves the buffer"
            )
        what = f"{added} training prompts were added" if split == "train" else f"the {split} prompts changed"
        log.warning("%s since the run's last start: later scores are not of the same prompts", what)
        publish(file, now.tobytes())


def hold_to_model(run: RunDir, path: str, folder: Path) -> None:
    """Note the model's files when a run begins, and compare them at every later start.

    path: model.path, which ``folder`` belongs to. Raises ConfigError if a file changed, came or went: the
    reference, engines and tokenizer would be others.
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


def _checksum(prompt: Prompt) -> int:
    return crc32(prompt.target.encode(errors="surrogatepass"), crc32(prompt.tokens.tobytes()))


def _noted(file: Path, data: bytes) -> bytes:
    """Read ``file``, which is made of ``data`` if it did not exist."""
    if not file.exists():
        make_folder(file.parent)
        with suppress(FileExistsError):  # another searcher was faster
            publish(file, data, replace=False)
    return file.read_bytes()


def _sampled(file: Path) -> str:
    """A digest of the file's PIECES: no second read of a large one."""
    summed, size = blake3(), file.stat().st_size
    with file.open("rb") as opened:
        for start in np.linspace(0, max(0, size - PIECE_BYTES), PIECES).astype(int).tolist():
            opened.seek(start)
            summed.update(opened.read(PIECE_BYTES))
    return summed.hexdigest(16)
