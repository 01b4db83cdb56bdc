"""Reads a run directory for the audit, in an order that gives a consistent view even of a run in progress."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core.types import make_uid
from tba_hpc.exchange.hdf5_shards import ShardError, read_arrays, read_shard
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    StateError,
    TrainerState,
    checkpoint_folders,
    misplaced,
    read_state,
)
from tba_hpc.run.directory import REFUSED, RunDir, ShardKey
from tba_hpc.run.history import EMPTY, History, Merge, ShardSize, integer
from tba_hpc.run.inventory import damage
from tba_hpc.run.metrics import MetricsTail, Record


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file with the name of a shard.

    fault: why the file is not that shard, as a phrase such as ``is damaged``; empty if it is. foreign: true
    if the file is undamaged, but another shard. size, request_ids: size and requests of the file's shard.
    """

    fault: str = ""
    foreign: bool = False
    size: ShardSize = EMPTY
    request_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path, key: ShardKey) -> ShardFile:
        """Read and verify the file that should be the shard ``key``. Raises FileNotFoundError."""
        try:
            shard = read_shard(path)
        except ShardError as error:
            return cls(fault=str(error).removeprefix(f"{path} "))
        found, fault = shard.trajectories, ""
        uids = make_uid(*key, 0) + np.arange(len(found), dtype=np.uint64)
        if (shard.searcher, shard.index) != key:
            fault = f"is a copy of shard {shard.index} of searcher {shard.searcher}"
        elif not np.array_equal(found.record["uid"], uids):
            fault = "holds trajectories that were sealed elsewhere"
        size = ShardSize(len(found), len(found.completions.values))
        return cls(fault, bool(fault), size, tuple(shard.request_ids.tolist()))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    done: ids of completed requests. buffer: the replay buffer's arrays by name. fault: why the checkpoint
    cannot be used, as a phrase; empty if it can.
    """

    name: str
    state: TrainerState
    done: frozenset[int] = frozenset()
    buffer: Mapping[str, np.ndarray] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    def read(cls, run: RunDir, folder: Path) -> Checkpoint:
        """Verify all files of a checkpoint, and read all but those of weights and optimizer."""
        state = TrainerState()
        try:
            if fault := damage(folder):
                return cls(folder.name, state, fault=f"is damaged: {fault}")
            state = read_state(folder)
            if fault := misplaced(run, folder, state):
                return cls(folder.name, TrainerState(), fault=f"is misplaced: {fault}")
            done = np.flatnonzero(np.unpackbits(read_arrays(folder / PROMPTS_FILE)["done"]))
            buffer = read_arrays(folder / BUFFER_FILE)
        except (OSError, StateError, ShardError, ValueError) as error:
            return cls(folder.name, state, fault=f"cannot be read: {error}")
        return cls(folder.name, state, frozenset(done.tolist()), buffer)


Seals = Mapping[ShardKey, list[ShardSize]]
"""Sizes that searchers recorded when they sealed a shard; several if they used its index again."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Contents of a run directory, as far as the audit needs them.

    history: the trainer's records, without those that a resume undid. sizes: size of every shard that was
    sealed, merged or on disk; EMPTY for an index that no shard has. files: shard files, by shard. refused:
    shard files that were set aside as damaged. checkpoints: complete checkpoints, oldest first.
    """

    run: RunDir
    config: Config
    finished: bool
    history: History
    seals: Seals
    sizes: dict[ShardKey, ShardSize]
    files: dict[ShardKey, ShardFile]
    refused: dict[ShardKey, ShardFile]
    checkpoints: list[Checkpoint]

    @classmethod
    def read(cls, run: RunDir) -> Evidence:
        """Read a run in any state.

        A running trainer changes files meanwhile, so the order matters. Shards are read after the metrics,
        so that every shard that the metrics mention is on disk or in a checkpoint. Checkpoints follow, since
        they contain the shards that were deleted meanwhile. Metrics added since are read last, because they
        record the merges that the checkpoints count.
        """
        finished, tail = run.finished, MetricsTail(run.metrics_file("trainer"))
        records = list(_without_figures(tail.records()))
        seals = _seals(run)
        files = _shard_files(run.shard_files())
        refused = _shard_files(run.shard_files(".h5" + REFUSED))
        checkpoints = _checkpoints(run)
        merged_by_then = [Merge.of(record) for record in records if record.get("event") == "merged"]
        return cls(
            run=run,
            config=run.config(),
            finished=finished,
            history=History.of(chain(records, _without_figures(tail.records()))),
            seals=seals,
            sizes=_sizes(merged_by_then, seals, files, refused),
            files=files,
            refused=refused,
            checkpoints=checkpoints,
        )

    @property
    def usable(self) -> list[Checkpoint]:
        """Checkpoints that can be read, oldest first."""
        return [checkpoint for checkpoint in self.checkpoints if not checkpoint.fault]

    @property
    def newest(self) -> TrainerState:
        """State of the newest usable checkpoint; that of a new run if there is none."""
        return self.usable[-1].state if self.usable else TrainerState()

    @property
    def gap(self) -> str:
        """The first gap in the trainer's records, as a phrase; empty if there is none."""
        history, saved = self.history, self.newest
        steps = [0, *(integer(taken, "step") for taken in history.steps)]
        revisions = [0, *history.revisions()]
        found = [
            *history.gaps,
            *(f"step {b} follows step {a}" for a, b in pairwise(steps) if b != a + 1),
            *(f"revision {b} follows revision {a}" for a, b in pairwise(revisions) if b - a not in (0, 1)),
        ]
        if saved.step > history.last_step or saved.revision > history.last_revision:
            found.append(
                f"a checkpoint is of step {saved.step}, revision {saved.revision}, but the records end at "
                f"step {history.last_step}, revision {history.last_revision}"
            )
        if not self.uncounted:
            merged = {merge.key for merge in self.saved_merges}
            found += [
                f"a checkpoint counts shard {index} of searcher {searcher}, but no merge of it is on record"
                for (searcher, index), size in self.sizes.items()
                if size.trajectories and self.passed((searcher, index)) and (searcher, index) not in merged
            ]
        return found[0] if found else ""

    def passed(self, key: ShardKey) -> bool:
        """Return whether the newest checkpoint counts a shard as merged, by its cursors."""
        return key[1] < self.newest.cursors.get(key[0], 0)

    @property
    def uncounted(self) -> int:
        """Number of sealed trajectories that the newest checkpoint should count as merged, but does not.

        This is the number in all shards before the checkpoint's cursors, minus the checkpoint's count.
        Checkpoints are trusted more than the records, since only their files have checksums.
        """
        sealed = sum(size.trajectories for key, size in self.sizes.items() if self.passed(key))
        return max(0, sealed - self.newest.trajectories)

    @property
    def saved_merges(self) -> list[Merge]:
        """Merges that the newest checkpoint contains."""
        return self.history.until(self.newest.revision)

    @property
    def waiting(self) -> dict[ShardKey, ShardFile]:
        """Undamaged shards at or beyond the newest checkpoint's cursors. The next start would merge them."""
        cursors = self.newest.cursors
        return {
            (searcher, index): file
            for (searcher, index), file in self.files.items()
            if index >= cursors.get(searcher, 0) and not file.fault
        }

    @property
    def pending(self) -> int:
        """Number of trajectories in the ``waiting`` shards."""
        return sum(file.size.trajectories for file in self.waiting.values())


def _without_figures(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the trainer's records without the figures of steps, which take gigabytes in a long run."""
    for record in records:
        if "event" in record:
            yield record
        elif "step" in record:
            yield {"step": record["step"]}


def _seals(run: RunDir) -> Seals:
    """Read from the searchers' records which shards were sealed, and their sizes."""
    seals = defaultdict[ShardKey, list[ShardSize]](list)
    for searcher, path in run.searcher_files().items():
        for record in MetricsTail(path).records():
            if record.get("event") == "sealed":
                size = ShardSize(integer(record, "trajectories"), integer(record, "tokens"))
                seals[searcher, integer(record, "shard")].append(size)
    return seals


def _sizes(
    merges: Iterable[Merge],
    seals: Seals,
    files: Mapping[ShardKey, ShardFile],
    refused: Mapping[ShardKey, ShardFile],
) -> dict[ShardKey, ShardSize]:
    """Return the size of every shard that was sealed, merged or is on disk; EMPTY for skipped indices.

    If sizes differ, the searcher's record is believed first, the trainer's second, and the file last. Foreign
    files that no record mentions are left out.
    """
    on_disk = [*refused.items(), *files.items()]
    known = {key: file.size for key, file in on_disk if not file.foreign}
    known |= {merge.key: ShardSize(merge.trajectories, merge.tokens) for merge in merges}
    known |= {key: sizes[-1] for key, sizes in seals.items()}
    ends: dict[int, int] = {}
    for searcher, index in known:
        ends[searcher] = max(index, ends.get(searcher, 0))
    foreign = {key for key, file in on_disk if file.foreign and key not in known}
    passed = {(searcher, index): EMPTY for searcher, end in ends.items() for index in range(end)}
    return {key: size for key, size in sorted((passed | known).items()) if key not in foreign}


def _shard_files(paths: Mapping[ShardKey, Path]) -> dict[ShardKey, ShardFile]:
    """Read the shard files at these paths; those that were deleted meanwhile are left out."""
    found = {}
    for key, path in paths.items():
        try:
            found[key] = ShardFile.read(path, key)
        except FileNotFoundError:
            continue
    return found


def _checkpoints(run: RunDir) -> list[Checkpoint]:
    """Read the complete checkpoints, oldest first, without those that were deleted meanwhile."""
    read = [(folder, Checkpoint.read(run, folder)) for folder in checkpoint_folders(run, complete=True)]
    there = checkpoint_folders(run, complete=True)
    kept = [checkpoint for folder, checkpoint in read if folder in there]
    all_deleted = read and not kept
    return _checkpoints(run) if all_deleted else kept
