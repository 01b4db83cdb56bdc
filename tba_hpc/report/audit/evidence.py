"""Reads what lies in a run directory for the audit, in an order that a run under way cannot confuse.

It must not judge: what contradicts what is decided in ``checks``. Changes nothing on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core.types import Shard, make_uid
from tba_hpc.exchange.hdf5_shards import ShardError, parse_shard, read_arrays
from tba_hpc.report.audit.history import History, Merge, Seals, ShardKey
from tba_hpc.report.digest import Sealed
from tba_hpc.report.summary import index_of, searcher_files
from tba_hpc.run.bundles import BundleError, Place, contents
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    StateError,
    TrainerState,
    checkpoint_folders,
    read_state,
)
from tba_hpc.run.directory import REFUSED, RunDir
from tba_hpc.run.evaluations import evaluations_on_disk
from tba_hpc.run.inventory import damage
from tba_hpc.run.metrics import MetricsTail, Record


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file under the name of a shard, or in a bundle. fault: why it is not that shard, else empty.

    foreign: it is whole, but of another shard: nobody sealed it under this name.
    """

    fault: str = ""
    foreign: bool = False
    trajectories: int = 0
    tokens: int = 0
    request_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, file: Path | Place, key: ShardKey) -> ShardFile:
        """Verify a file. Raises FileNotFoundError."""
        path = file.bundle if isinstance(file, Place) else file
        data = file.read() if isinstance(file, Place) else file.read_bytes()
        try:
            shard = parse_shard(path, data)
        except ShardError as error:
            return cls(fault=str(error).removeprefix(f"{path} "))
        fault = _mistaken(shard, key)
        record = shard.trajectories
        tokens, request_ids = len(record.completions.values), tuple(record.request_ids.tolist())
        return cls(fault, bool(fault), len(record), tokens, request_ids)


def _mistaken(shard: Shard, key: ShardKey) -> str:
    """Why a whole shard is not the one of its name."""
    if (shard.searcher, shard.index) != key:
        return f"is a copy of shard {shard.index} of searcher {shard.searcher}"
    uids = make_uid(*key, 0) + np.arange(len(shard.trajectories), dtype=np.uint64)
    if not np.array_equal(shard.trajectories.record["uid"], uids):
        return "holds trajectories that were sealed elsewhere"
    return ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. fault: why it cannot be used, else empty; done: request_ids in its completed."""

    name: str
    state: TrainerState
    done: frozenset[int] = frozenset()
    buffer: Mapping[str, np.ndarray] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Verify all files, and read those that are not the learner's."""
        state = TrainerState()
        try:
            if fault := damage(folder):
                return cls(folder.name, state, fault=f"is damaged: {fault}")
            state = read_state(folder)
            done = np.flatnonzero(np.unpackbits(read_arrays(folder / PROMPTS_FILE)["done"]))
            buffer = read_arrays(folder / BUFFER_FILE)
        except (OSError, StateError, ShardError, ValueError) as error:
            return cls(folder.name, state, fault=f"cannot be read: {error}")
        return cls(folder.name, state, frozenset(done.tolist()), buffer)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a run directory tells.

    counts: of every shard that anything told of by the time the disk was looked at, 0 where nobody says how
    many. files, refused: by shard, the visible files, bundled ones too, and those set aside. broken:
    bundles of which nothing can be found any more. evaluations: steps of those on disk. leftovers: files of
    killed writers.
    """

    run: RunDir
    config: Config
    finished: bool
    history: History
    seals: dict[int, Seals]
    counts: dict[ShardKey, Sealed]
    files: dict[ShardKey, ShardFile]
    refused: dict[ShardKey, ShardFile]
    broken: list[str]
    checkpoints: list[Checkpoint]
    evaluations: list[int]
    leftovers: list[str]

    @classmethod
    def read(cls, run: RunDir) -> Evidence:
        """Read a run at any moment.

        What metrics tell of is on disk by then, so the shards are read after them. What has left their
        folders since is in a bundle, and what has left these is in a checkpoint, so they come next. What
        checkpoints count is in the metrics, which are read on.
        """
        finished, tail = run.finished, MetricsTail(run.metrics_file("trainer"))
        records = tail.new()
        seals = {index_of(path): Seals.of(MetricsTail(path).records()) for path in searcher_files(run)}
        told = _told(records, seals)
        files = _shard_files(run.shard_files())
        bundled, broken = _bundled(run)
        refused = _shard_files(run.shard_files(".h5" + REFUSED))
        for key, file in _shard_files(bundled).items():
            if (key not in files or files[key].fault) and not (file.fault and key in refused):
                files[key] = file
        checkpoints = _checkpoints(run)
        evaluations = [step for _, step in evaluations_on_disk(run).values()]
        history = History.of(records + tail.new())
        return cls(
            run=run,
            config=run.config(),
            finished=finished,
            history=history,
            seals=seals,
            counts=_counts(told, files, refused),
            files=files,
            refused=refused,
            broken=broken,
            checkpoints=checkpoints,
            evaluations=sorted(evaluations),
            leftovers=_leftovers(run),
        )

    @property
    def newest(self) -> TrainerState:
        """State of the newest checkpoint that can be read; of a fresh run where there is none."""
        states = [checkpoint.state for checkpoint in self.checkpoints if not checkpoint.fault]
        return states[-1] if states else TrainerState()

    @property
    def saved_merges(self) -> list[Merge]:
        """Merges that the newest checkpoint holds: no accident can take them back."""
        return self.history.until(self.newest.revision)

    @property
    def waiting(self) -> dict[ShardKey, ShardFile]:
        """Whole shards at or beyond the cursors of the newest checkpoint: a start would merge them first."""
        cursors = self.newest.cursors
        return {
            (searcher, index): file
            for (searcher, index), file in self.files.items()
            if index >= cursors.get(searcher, 0) and not file.fault
        }


def _told(records: Iterable[Record], seals: dict[int, Seals]) -> dict[ShardKey, Sealed]:
    """What is in every shard that a searcher sealed or the trainer merged, by their metrics."""
    merges = (Merge.of(record) for record in records if record.get("event") == "merged")
    merged = {merge.key: Sealed(merge.trajectories, merge.tokens) for merge in merges}
    sealed = {
        (searcher, index): Sealed(counts[-1], of.tokens[index])
        for searcher, of in seals.items()
        for index, counts in of.trajectories.items()
    }
    return sealed | merged | {key: seal for key, seal in sealed.items() if seal.tokens}


def _counts(
    told: dict[ShardKey, Sealed], files: dict[ShardKey, ShardFile], refused: dict[ShardKey, ShardFile]
) -> dict[ShardKey, Sealed]:
    """The same with what lies on disk, less files that nobody sealed, and with indices passed over."""
    on_disk = {
        key: Sealed(file.trajectories, file.tokens)
        for key, file in chain(refused.items(), files.items())
        if not file.foreign
    }
    known = on_disk | told
    foreign = {
        key for key, file in chain(refused.items(), files.items()) if file.foreign and key not in known
    }
    last: dict[int, int] = {}
    for searcher, index in known:
        last[searcher] = max(index, last.get(searcher, 0))
    passed = {(searcher, index): Sealed(0, 0) for searcher, end in last.items() for index in range(end)}
    return {key: sealed for key, sealed in sorted((passed | known).items()) if key not in foreign}


def _bundled(run: RunDir) -> tuple[dict[ShardKey, Place], list[str]]:
    """Where the shards of all bundles lie, and the bundles that do not tell."""
    places: dict[ShardKey, Place] = {}
    broken = []
    for path in run.bundle_files().values():
        try:
            places |= contents(path)
        except BundleError:
            broken.append(path.name)
        except FileNotFoundError:  # pruned
            continue
    return places, broken


def _shard_files(paths: Mapping[ShardKey, Path | Place]) -> dict[ShardKey, ShardFile]:
    """What lies under the names; files that were pruned meanwhile are left out."""
    found = {}
    for key, path in paths.items():
        try:
            found[key] = ShardFile.read(path, key)
        except FileNotFoundError:
            continue
    return found


def _checkpoints(run: RunDir) -> list[Checkpoint]:
    """Complete checkpoints, oldest first, less those that were dropped while they were read."""
    read = [(folder, Checkpoint.read(folder)) for folder in checkpoint_folders(run, complete=True)]
    there = checkpoint_folders(run, complete=True)
    kept = [checkpoint for folder, checkpoint in read if folder in there]
    overtaken = read and not kept
    return _checkpoints(run) if overtaken else kept


def _leftovers(run: RunDir) -> list[str]:
    """Files and folders that only a writer that was killed leaves, or one at work just now."""
    files = (Path(folder, name) for folder, _, names in os.walk(run.path) for name in names)
    temporary = [path for path in files if path.name.startswith(".") and path.suffix == ".tmp"]
    half = checkpoint_folders(run, complete=False)
    return sorted(str(path.relative_to(run.path)) for path in [*temporary, *half])
