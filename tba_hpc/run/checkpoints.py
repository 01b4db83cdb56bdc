"""Checkpoints of a run: complete or not there, the newest few of them, and what they keep alive.

It must not know what the learner's files and the arrays in them mean. A checkpoint is complete only when its
last file, COMPLETE, exists.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from tba_hpc.ports import Learner
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import fsync, make_durable, write_atomic

STATE_FORMAT = 4
"""Version of state.json."""

BUFFER_FILE = "buffer.h5"
"""The replay buffer inside a checkpoint."""

PROMPTS_FILE = "prompts.h5"
"""Beside it the requests completed, which every searcher reads too."""


class StateError(ValueError):
    """Something on disk cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the trainer is; beside it a checkpoint holds the learner's files, the buffer and what is done.

    cursors: per searcher, the index of the next shard to merge; searchers of earlier attempts stay in it.
    trajectories, tokens: merged so far (completion tokens); added, duplicates, evicted: what the buffer
    did with them. train_seconds: wall time of the loop, attempts added up. save_seconds: the longest save
    of a checkpoint so far, this one included.
    """

    step: int = 0
    revision: int = 0
    cursors: Mapping[int, int] = field(default_factory=dict)
    trajectories: int = 0
    added: int = 0
    duplicates: int = 0
    evicted: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    save_seconds: float = 0.0

    def to_json(self) -> str:
        """JSON text that from_json reads."""
        return json.dumps({"format": STATE_FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """Inverse of to_json. Raises StateError for a text of another format."""
        values = json.loads(text)
        if values.pop("format") != STATE_FORMAT:
            raise StateError(
                f"state.json is not of format {STATE_FORMAT}: resume with the version that wrote it"
            )
        values["cursors"] = {int(searcher): index for searcher, index in values["cursors"].items()}
        return cls(**{known.name: values[known.name] for known in fields(cls)})


Arrays = Mapping[str, np.ndarray]
"""Arrays of any dtype and shape, by name."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Complete checkpoints of a run, the newest ``keep`` of them. write_arrays: makes a durable file."""

    run: RunDir
    keep: int
    write_arrays: Callable[[Path, Arrays], None]

    def save(self, state: TrainerState, learner: Learner, files: Mapping[str, Arrays]) -> TrainerState:
        """Write a checkpoint with ``files`` of arrays; then shards that no kept one needs are deleted.

        Returns the state that it holds. Raises DiskFullError.
        """
        began = time.monotonic()
        folder = begin_checkpoint(self.run, state.step)
        learner.save(folder)
        for name, arrays in files.items():
            self.write_arrays(folder / name, arrays)
        make_durable(folder)
        state = replace(state, save_seconds=max(state.save_seconds, time.monotonic() - began))
        prune_shards(self.run, complete_checkpoint(self.run, folder, state, keep=self.keep))
        return state

    def export_reference(self, step: int, learner: Learner) -> None:
        """Write the policy of ``step`` as the next reference; those that no checkpoint needs are deleted."""
        learner.export(self.run.reference(step))
        prune_references(self.run)


def begin_checkpoint(run: RunDir, step: int) -> Path:
    """A new folder for the files of a checkpoint; incomplete ones of earlier attempts are removed.

    ``step-000400``, or ``step-000400.1`` … where that step has a complete one already (stopped again
    right after a resume): a complete checkpoint is never written over.
    """
    for folder in checkpoint_folders(run, complete=False):
        shutil.rmtree(folder)
    name = f"step-{step:06d}"
    saves = [int(folder.suffix[1:] or 0) for folder in run.checkpoints.glob(f"{name}*")]
    again = max(saves, default=-1) + 1  # also where the first is gone: the newest must have the last name
    folder = run.checkpoints / (f"{name}.{again}" if again else name)
    folder.mkdir()
    return folder


def complete_checkpoint(run: RunDir, folder: Path, state: TrainerState, *, keep: int) -> dict[int, int]:
    """Write ``state.json`` beside files that are durable already, and only then mark ``folder`` COMPLETE.

    COMPLETE lists the files, see ``missing_files``. Checkpoints beyond the newest ``keep`` are deleted.
    Returns the cursors of the oldest one kept: shards before them are needed no more, see ``prune_shards``.
    Raises DiskFullError.
    """
    write_atomic(folder / "state.json", state.to_json())
    write_atomic(folder / "COMPLETE", _inventory(folder))
    fsync(run.checkpoints)
    kept = checkpoint_folders(run, complete=True)
    for old in kept[:-keep]:
        (old / "COMPLETE").unlink()  # first: a half-deleted checkpoint must not look complete
        shutil.rmtree(old)
    return dict(read_state(kept[-keep:][0]).cursors)


def latest_checkpoint(run: RunDir) -> Path | None:
    """The newest complete checkpoint."""
    return next(iter(reversed(checkpoint_folders(run, complete=True))), None)


def read_state(folder: Path) -> TrainerState:
    """State of a complete checkpoint. Raises StateError where another version wrote it."""
    return TrainerState.from_json((folder / "state.json").read_text())


def missing_files(folder: Path) -> list[str]:
    """Files of a complete checkpoint that are not there as they were when it was completed, by name."""
    now = set(_inventory(folder).splitlines())
    then = (folder / "COMPLETE").read_text().splitlines()
    return [line.partition(" ")[2] for line in then if line not in now]


def _inventory(folder: Path) -> str:
    """A line per file: bytes and path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "COMPLETE")
    return "".join(f"{path.stat().st_size} {path.relative_to(folder)}\n" for path in files)


def prune_shards(run: RunDir, cursors: Mapping[int, int]) -> int:
    """Delete the shards before ``cursors``; returns how many. Files set aside stay, as evidence."""
    merged = [path for (s, index), path in run.shard_files().items() if index < cursors.get(s, 0)]
    for path in merged:
        path.unlink()
    return len(merged)


def prune_references(run: RunDir) -> None:
    """Delete the references before the one in force at the oldest complete checkpoint."""
    oldest = next(iter(checkpoint_folders(run, complete=True)), None)
    end = read_state(oldest).step if oldest else 0
    folders = {int(path.name.removeprefix("step-")): path for path in run.references.glob("step-*")}
    in_force = max((step for step in folders if step <= end), default=0)
    for step, folder in folders.items():
        if step < in_force:
            shutil.rmtree(folder)


def checkpoint_folders(run: RunDir, *, complete: bool) -> list[Path]:
    """The complete checkpoints, or the others, by (step, save), ascending."""
    named = {
        folder: re.fullmatch(r"step-(\d+)(?:\.(\d+))?", folder.name) for folder in run.checkpoints.iterdir()
    }
    found = {
        (int(name[1]), int(name[2] or 0)): folder
        for folder, name in named.items()
        if name and (folder / "COMPLETE").exists() == complete
    }
    return [found[key] for key in sorted(found)]
