"""Checkpoints of a run: how they are written, verified and deleted, and which files they still need.

A checkpoint is complete once its last file, COMPLETE, exists. COMPLETE holds the checksums of all other
files, and a start verifies them before it uses the checkpoint. RUN/newest-checkpoint holds the name of the
newest checkpoint, so that a start notices if its folder has disappeared.
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
    is_disk_full,
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
"""File of a checkpoint that holds the replay buffer."""

PROMPTS_FILE = "prompts.h5"
"""File of a checkpoint that holds the bitmap of completed requests."""

STATE_FILE = "state.json"
"""File of a checkpoint that holds the TrainerState."""

DAMAGED = "damaged-"
"""Prefix of the folder name of a checkpoint that was set aside because it is damaged."""

GONE = "it is gone"
"""Fault that is reported if the folder of the newest checkpoint has disappeared."""


class StateError(ValueError):
    """Error for a checkpoint, or another saved file, that cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of the trainer, as a checkpoint holds it.

    step: optimizer steps done. revision: how often merges or evictions have changed the replay buffer.
    cursors: per searcher, the index of its next shard to merge; searchers of earlier attempts are included.
    trajectories, tokens: trajectories merged so far, and their completion tokens. added, duplicates, evicted:
    how many of these trajectories the buffer has stored, dropped as duplicates, and evicted. train_seconds:
    wall time of the steps, summed over attempts. save_seconds: duration of the longest save of a checkpoint
    so far, from its copy in memory to its last file. run: identity of the run that wrote the checkpoint; 0 if
    unknown.
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
        """Return JSON text, for ``from_json``."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """Parse the text of ``to_json``."""
        values = json.loads(text)
        values["cursors"] = {int(searcher): index for searcher, index in values["cursors"].items()}
        values.setdefault("run", 0)  # version 0.3.0 wrote none
        return cls(**{known.name: values[known.name] for known in fields(cls)})


Arrays = Mapping[str, np.ndarray]
"""Arrays of any dtype and shape, by name."""


@dataclass(slots=True)
class Checkpoints:
    """Writer of a run's checkpoints, in the leading trainer. It keeps the newest ``keep`` complete ones.

    A checkpoint holds the learner's files, of which each trainer rank writes its part; the replay buffer; the
    completed requests; and the trainer's state.

    write_arrays: function that writes arrays to a file and makes it durable. kept_share: share, 0…1,
    of the shards that are kept for inspection when no checkpoint needs them; see ``pruning.prune``.
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
        """Copy what a checkpoint holds, and write the copies in a thread, while training goes on.

        Afterwards the thread deletes references that no kept checkpoint needs, and has another thread delete
        such shards. Only one save may run at a time. On a full disk nothing of the checkpoint stays.

        files: by file name, a function that returns the file's arrays; the thread calls it. records: function
        that makes the metrics durable, called before the checkpoint is completed. Returns a future of the
        state that the checkpoint holds; the future raises DiskFullError, StateError or ExchangeError.
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
                # Another thread deletes the shards, so that the next save does not wait for slow deletions.
                pruned = self._pruner.submit(partial(prune, self.run, cursors, self.kept_share))
                pruned.add_done_callback(Future.result)  # logs an error with its traceback
                prune_references(self.run)
                return saved

        begun = at_once(begin)
        return in_background(complete)

    def finish_pruning(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread that deletes shards; the next start deletes the rest."""
        self._pruner.close(seconds)

    def export_reference(self, step: int, learner: Learner) -> None:
        """Write the policy of ``step`` as the next reference, with checksums that a resume verifies."""
        folder = self.run.reference(step)
        learner.export(folder)
        write_atomic(folder / COMPLETE, with_checksum(inventory(folder)))


@contextmanager
def _or_nothing(run: RunDir) -> Iterator[None]:
    """If the disk is full in the block, remove the unfinished checkpoint and raise DiskFullError."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        with suppress(OSError):
            _remove_unfinished(run)
        if isinstance(error, DiskFullError):
            raise
        raise DiskFullError(
            f"cannot write a checkpoint to {run.checkpoints} ({error.strerror}); free space or raise the "
            "quota, then start the same run again: it resumes from the previous checkpoint"
        ) from error


def begin_checkpoint(run: RunDir, step: int) -> Path:
    """Make a new folder for the files of a checkpoint, and remove unfinished ones of earlier attempts.

    Its name is ``step-000400``. If that step has a complete checkpoint, because the run was stopped right
    after a resume, the name is ``step-000400.1`` and so on. A complete checkpoint is never overwritten.
    """
    end_if_superseded()  # before the removal: a successor may be writing the unfinished checkpoint
    _remove_unfinished(run)
    name = f"step-{step:06d}"
    saves = [int(folder.suffix[1:] or 0) for folder in run.checkpoints.glob(f"{name}*")]
    again = max(saves, default=-1) + 1  # not len(saves): the newest must sort last even if one was deleted
    folder = run.checkpoints / (f"{name}.{again}" if again else name)
    folder.mkdir()
    return folder


def _remove_unfinished(run: RunDir) -> None:
    for left in (*checkpoint_folders(run, complete=False), *run.checkpoints.glob(".*.tmp")):
        _remove(left)


def _remove(folder: Path) -> None:
    """Delete a folder. If that fails, log a warning; the next checkpoint tries again.

    On NFS the deletion fails while anybody, such as a backup, has one of the files open.
    """
    try:
        remove(folder)
    except OSError as error:
        log.warning("cannot delete %s (%s); the next checkpoint tries again", folder, error)


def complete_checkpoint(
    run: RunDir, folder: Path, state: TrainerState, *, keep: int, known: str = ""
) -> dict[int, int]:
    """Write ``state.json`` beside files that are already durable, then the file COMPLETE.

    Checkpoints beyond the newest ``keep`` are deleted afterwards. known: lines for COMPLETE about files whose
    checksums are known already. Returns the cursors of the oldest checkpoint that is kept; no resume needs a
    shard before them. Raises DiskFullError.
    """
    listed = inventory(folder, known=known)
    fsync(run.checkpoints)  # makes the name of ``folder`` durable
    write_atomic(folder / STATE_FILE, replace(state, run=run.identity).to_json())
    end_if_superseded()
    write_atomic(folder / COMPLETE, with_checksum(listed + inventory(folder, STATE_FILE)))
    write_atomic(run.newest_checkpoint, folder.name)
    for old in checkpoint_folders(run, complete=True)[:-keep]:
        (old / COMPLETE).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look complete
        _remove(old)
    return dict(_oldest_state(run).cursors)


def latest_checkpoint(run: RunDir) -> Path | None:
    """Return the folder of the newest complete checkpoint, or None."""
    return next(iter(reversed(checkpoint_folders(run, complete=True))), None)


def read_state(folder: Path) -> TrainerState:
    """Read the state of a complete checkpoint. Raises StateError if it is damaged."""
    if fault := damage(folder, STATE_FILE):
        raise StateError(
            f"{folder} is damaged ({fault}): start the same run again to resume from another one"
        )
    return TrainerState.from_json((folder / STATE_FILE).read_text())


def _oldest_state(run: RunDir) -> TrainerState:
    """Return the state of the oldest complete checkpoint of this run.

    If there is none, or one cannot be read, the state of a new run is returned, so that nothing is deleted.
    """
    try:
        states = ((folder, read_state(folder)) for folder in checkpoint_folders(run, complete=True))
        ours = (state for folder, state in states if not misplaced(run, folder, state))
        return next(ours, TrainerState())
    except (ValueError, LookupError) as error:
        log.warning("neither shards nor references are deleted: %s", error)
        return TrainerState()


def damaged_checkpoints(run: RunDir) -> dict[Path, str]:
    """Map each damaged checkpoint that is newer than the newest intact one to its fault.

    Reads every byte of the damaged ones and of the newest intact one, but no older checkpoint. Raises
    StateError if there are checkpoints, but none is intact.
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
    """Return a fault if a checkpoint belongs to another run, or to another step than its folder's name says.

    Returns "" for a checkpoint in its place. state: the state in the checkpoint ``folder``.
    """
    if of_two_runs(state.run, run.identity):
        return "it is a checkpoint of another run"
    return "" if step_of(folder) == state.step else f"it is a copy of the checkpoint of step {state.step}"


def set_aside(run: RunDir, folder: Path) -> Path:
    """Rename a damaged checkpoint, so that later starts ignore it; return its new path."""
    name = f"{DAMAGED}{folder.name}"
    aside = folder.with_name(f"{name}-{1 + len(list(folder.parent.glob(f'{name}-*')))}")
    if folder.exists():
        folder.rename(aside)
        fsync(folder.parent)
    run.newest_checkpoint.unlink(missing_ok=True)
    return aside


def prune_references(run: RunDir) -> None:
    """Delete the references that no kept checkpoint needs.

    A checkpoint of step s needs the newest reference made before s, even if a reset made another one at s.
    Later steps use the new reference, but if the run ends at s, its last evaluation uses the earlier one.
    """
    end = _oldest_state(run).step
    folders = {int(path.name.removeprefix("step-")): path for path in run.references.glob("step-*")}
    in_force = max((step for step in folders if step < end), default=0)
    for step, folder in folders.items():
        if step < in_force:
            _remove(folder)


def checkpoint_folders(run: RunDir, *, complete: bool) -> list[Path]:
    """List the folders of complete or of unfinished checkpoints by ascending step.

    ``step-000400.1`` comes after ``step-000400``. The checkpoint that RUN/newest-checkpoint names counts as
    complete even if it has lost its COMPLETE: it is damaged, not unfinished.
    """
    newest = _named_newest(run)
    there = sorted(filter(_order, run.checkpoints.glob("step-*")), key=_order)
    return [folder for folder in there if ((folder / COMPLETE).exists() or folder == newest) == complete]


def _named_newest(run: RunDir) -> Path | None:
    """Return the folder of the checkpoint that was completed last, or None if that is unknown."""
    try:
        folder = run.checkpoints / read_regular(run.newest_checkpoint).decode(errors="replace")
    except FileNotFoundError:
        return None
    return folder if _order(folder) else None


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return next(iter(_order(folder)))


def _order(folder: Path) -> tuple[int, int] | tuple[()]:
    """Return (400, 1) for a folder named ``step-000400.1``; empty if it is not the name of a checkpoint.

    The second number counts the checkpoints of that step, from 0.
    """
    name = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", folder.name)
    return (int(name[1]), int(name[2] or 0)) if name else ()
