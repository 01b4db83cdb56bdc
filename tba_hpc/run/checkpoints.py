"""Checkpoints of a run: how they are written, verified and deleted, and which files they still need.

A checkpoint is complete once its last file, COMPLETE, exists. That file holds the checksums of all others,
which a start verifies before it uses the checkpoint. RUN/newest-checkpoint names the newest one: if that has
disappeared, a start notices.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from tba_hpc.core.ports import Learner
from tba_hpc.run.background import Worker, at_once, in_background
from tba_hpc.run.directory import RunDir, of_two_runs
from tba_hpc.run.files import (
    DiskFullError,
    fsync,
    is_for_room,
    make_durable,
    read_regular,
    remove,
    write_atomic,
)
from tba_hpc.run.inventory import COMPLETE, damage, inventory, with_checksum
from tba_hpc.run.owners import end_if_superseded
from tba_hpc.run.pruning import prune

log = logging.getLogger(__name__)

BUFFER_FILE = "buffer.h5"
"""Name of the file of the replay buffer inside a checkpoint."""

PROMPTS_FILE = "prompts.h5"
"""Name of the file of completed requests inside a checkpoint."""

STATE_FILE = "state.json"
"""Name of the file of the TrainerState inside a checkpoint."""

DAMAGED = "damaged-"
"""Prefix of the name of a checkpoint that was set aside."""

GONE = "it is gone"
"""Fault reported for the newest checkpoint if somebody has removed it."""


class StateError(ValueError):
    """Error for a file or folder that cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of the trainer. Checkpoints also hold the learner's files, the buffer and completed requests.

    cursors: per searcher, the index of the next shard to merge; it keeps searchers of earlier attempts.
    trajectories, tokens: trajectories merged so far, and their completion tokens. added, duplicates, evicted:
    what the buffer did with them. train_seconds: wall time of the loop, summed over attempts. save_seconds:
    the longest save of a checkpoint so far, this one included, from its copy in memory to its last file.
    run: identity of the run that wrote the checkpoint; 0 if unknown.
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
    run: int = 0

    def to_json(self) -> str:
        """JSON text that from_json reads."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """Inverse of to_json."""
        values = json.loads(text)
        values["cursors"] = {int(searcher): index for searcher, index in values["cursors"].items()}
        values.setdefault("run", 0)  # version 0.3.0 wrote none
        return cls(**{known.name: values[known.name] for known in fields(cls)})


Arrays = Mapping[str, np.ndarray]
"""Arrays of any dtype and shape, by name."""


@dataclass(slots=True)
class Checkpoints:
    """Writes checkpoints of a run, and keeps the newest ``keep`` complete ones.

    A checkpoint holds the learner's files, of which each trainer rank writes its part; the buffer; the
    completed requests; and the trainer's state.

    write_arrays: writes arrays to a file and makes it durable. kept_share: share of the shards no longer
    needed that is kept, see ``pruning.prune``.
    """

    run: RunDir
    keep: int
    write_arrays: Callable[[Path, Arrays], None]
    kept_share: float = 0.0
    _pruner: Worker = field(default_factory=lambda: Worker("pruner"), init=False)

    def save(
        self,
        state: TrainerState,
        learner: Learner,
        files: Mapping[str, Callable[[], Arrays]],
        *,
        records: Callable[[], None] = lambda: None,
    ) -> Future[TrainerState]:
        """Copy the state and write a checkpoint; then delete shards and references that none needs.

        Only one save may run at a time. files: file names, each with the function that returns its arrays;
        it may be called in another thread. records: makes durable the records that the checkpoint counts. A
        thread writes the copies; the future gives the state that the checkpoint holds, or raises
        DiskFullError, StateError or ExchangeError. On a full disk nothing of the checkpoint stays.
        """
        began = time.monotonic()

        def begin() -> tuple[Path, Callable[[], str]]:
            with _or_nothing(self.run):
                folder = begin_checkpoint(self.run, state.step)
                return folder, learner.save(folder)

        def complete() -> TrainerState:
            folder, write = begun.result()
            with _or_nothing(self.run):
                known = write()
                for name, arrays in files.items():
                    self.write_arrays(folder / name, arrays())
                make_durable(folder)
                records()
                seconds = max(state.save_seconds, time.monotonic() - began)
                saved = replace(state, save_seconds=seconds)
                cursors = complete_checkpoint(self.run, folder, saved, keep=self.keep, known=known)
                # In a thread, so that the next checkpoint does not wait for a slow file system.
                pruned = self._pruner.submit(partial(prune, self.run, cursors, self.kept_share))
                pruned.add_done_callback(Future.result)  # logs an error with its traceback
                prune_references(self.run)
                return saved

        begun = at_once(begin)
        return in_background(complete)

    def finish_pruning(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the pruning thread; the next start drops the remaining shards."""
        self._pruner.close(seconds)

    def export_reference(self, step: int, learner: Learner) -> None:
        """Write the policy of ``step`` as the next reference, with the COMPLETE that a resume verifies."""
        folder = self.run.reference(step)
        learner.export(folder)
        write_atomic(folder / COMPLETE, with_checksum(inventory(folder)))


@contextmanager
def _or_nothing(run: RunDir) -> Iterator[None]:
    """If the disk is full within the block, remove the unfinished checkpoint and raise DiskFullError."""
    try:
        yield
    except OSError as error:
        if not is_for_room(error):
            raise
        with suppress(OSError):
            _remove_unfinished(run)
        if isinstance(error, DiskFullError):
            raise
        raise DiskFullError(
            f"cannot write a checkpoint to {run.checkpoints} ({error.strerror}); free space or raise the "
            "quota, then start the same run again: it resumes from the checkpoint before"
        ) from error


def begin_checkpoint(run: RunDir, step: int) -> Path:
    """Make a new folder for the files of a checkpoint, and remove unfinished ones of earlier attempts.

    Its name is ``step-000400``, or ``step-000400.1`` … if that step has a complete checkpoint already: the
    run was stopped right after a resume. A complete checkpoint is never overwritten.
    """
    end_if_superseded()  # the successor's checkpoint may be among the unfinished ones
    _remove_unfinished(run)
    name = f"step-{step:06d}"
    saves = [int(folder.suffix[1:] or 0) for folder in run.checkpoints.glob(f"{name}*")]
    again = max(saves, default=-1) + 1  # even if the first is gone: the newest must sort last
    folder = run.checkpoints / (f"{name}.{again}" if again else name)
    folder.mkdir()
    return folder


def _remove_unfinished(run: RunDir) -> None:
    for left in (*checkpoint_folders(run, complete=False), *run.checkpoints.glob(".*.tmp")):
        remove(left)


def complete_checkpoint(
    run: RunDir, folder: Path, state: TrainerState, *, keep: int, known: str = ""
) -> dict[int, int]:
    """Write ``state.json`` beside files that are already durable, and only then mark ``folder`` COMPLETE.

    known: as of ``inventory``. Checkpoints beyond the newest ``keep`` are deleted. Returns the cursors of the
    oldest one kept: no resume needs shards before them. Raises DiskFullError.
    """
    listed = inventory(folder, known=known)
    fsync(run.checkpoints)  # makes the name of ``folder`` durable
    write_atomic(folder / STATE_FILE, replace(state, run=run.identity).to_json())
    end_if_superseded()
    write_atomic(folder / COMPLETE, with_checksum(listed + inventory(folder, STATE_FILE)))
    write_atomic(run.newest_checkpoint, folder.name)
    for old in checkpoint_folders(run, complete=True)[:-keep]:
        (old / COMPLETE).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look complete
        remove(old)
    return dict(_oldest_state(run).cursors)


def latest_checkpoint(run: RunDir) -> Path | None:
    """Newest complete checkpoint, or None."""
    return next(iter(reversed(checkpoint_folders(run, complete=True))), None)


def read_state(folder: Path) -> TrainerState:
    """Read the state of a complete checkpoint. Raises StateError if it is damaged."""
    if fault := damage(folder, STATE_FILE):
        raise StateError(
            f"{folder} is damaged ({fault}): start the same run again to resume from another one"
        )
    return TrainerState.from_json((folder / STATE_FILE).read_text())


def _oldest_state(run: RunDir) -> TrainerState:
    """State of the oldest complete checkpoint; if one is unreadable, that of a new run, which needs all."""
    try:
        states = ((folder, read_state(folder)) for folder in checkpoint_folders(run, complete=True))
        ours = (state for folder, state in states if not misplaced(run, folder, state))
        return next(ours, TrainerState())
    except (ValueError, LookupError) as error:
        log.warning("no shards and references are deleted: %s", error)
        return TrainerState()


def damaged_checkpoints(run: RunDir) -> dict[Path, str]:
    """Map each checkpoint newer than the newest intact one to its fault, newest first.

    Reads every byte of these and of the intact one. Raises StateError if there are checkpoints, but no intact
    one.
    """
    folders, newest = checkpoint_folders(run, complete=True), _named_newest(run)
    faults = {newest: GONE} if newest and not newest.exists() else {}
    for folder in reversed(folders):
        fault = damage(folder) or misplaced(run, folder, read_state(folder))
        if not fault:
            return {faulty: why for faulty, why in faults.items() if _order(faulty) > _order(folder)}
        faults[folder] = fault
    faulty = [f"{folder.name}: {fault}" for folder, fault in faults.items()]
    faulty += sorted(folder.name for folder in run.checkpoints.glob(f"{DAMAGED}*"))
    if faulty:
        raise StateError(
            f"no checkpoint in {run.checkpoints} is whole ({'; '.join(faulty)}): put a copy of one back, or "
            "choose another run.name to start afresh; nothing was deleted"
        )
    return {}


def misplaced(run: RunDir, folder: Path, state: TrainerState) -> str:
    """Compare a checkpoint's folder and name with its state; return the fault, or "" if they agree."""
    step = next(iter(_order(folder)))
    if of_two_runs(state.run, run.identity):
        return "it is a checkpoint of another run"
    return "" if step == state.step else f"it is a copy of the checkpoint of step {state.step}"


def set_aside(run: RunDir, folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is kept as evidence but no longer found; return its path."""
    name = f"{DAMAGED}{folder.name}"
    aside = folder.with_name(f"{name}-{1 + len(list(folder.parent.glob(f'{name}-*')))}")
    if folder.exists():
        folder.rename(aside)
        fsync(folder.parent)
    run.newest_checkpoint.unlink(missing_ok=True)
    return aside


def prune_references(run: RunDir) -> None:
    """Delete references that no complete checkpoint needs: those before the oldest checkpoint's reference.

    A reference made at that checkpoint's own step does not count, because a run that ends there uses the one
    before.
    """
    end = _oldest_state(run).step
    folders = {int(path.name.removeprefix("step-")): path for path in run.references.glob("step-*")}
    in_force = max((step for step in folders if step < end), default=0)
    for step, folder in folders.items():
        if step < in_force:
            remove(folder)


def checkpoint_folders(run: RunDir, *, complete: bool) -> list[Path]:
    """List the complete checkpoints, or else the unfinished ones, in ascending order of (step, save).

    If the newest checkpoint has lost its COMPLETE, it still counts as complete: it is damaged, not
    unfinished.
    """
    newest = _named_newest(run)
    there = sorted(filter(_order, run.checkpoints.glob("step-*")), key=_order)
    return [folder for folder in there if ((folder / COMPLETE).exists() or folder == newest) == complete]


def _named_newest(run: RunDir) -> Path | None:
    """Folder of the checkpoint that was completed last, or None if it is unknown."""
    try:
        folder = run.checkpoints / read_regular(run.newest_checkpoint).decode(errors="replace")
    except FileNotFoundError:
        return None
    return folder if _order(folder) else None


def _order(folder: Path) -> tuple[int, int] | tuple[()]:
    """Step and save number in a checkpoint's name; empty if it is not the name of a checkpoint."""
    name = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", folder.name)
    return (int(name[1]), int(name[2] or 0)) if name else ()
