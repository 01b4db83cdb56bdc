"""Where a trajectory is in the buffer's life, as far as metrics and checkpoints tell.

A run may be at work meanwhile: what is said is of the moment of the newest checkpoint that can be read, and
of the merges on record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tba_hpc.core.types import Ragged
from tba_hpc.exchange.hdf5_shards import ShardError, read_arrays
from tba_hpc.run.checkpoints import BUFFER_FILE, StateError, checkpoint_folders, read_state
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.history import History, Merge

State = Literal["waiting", "merged", "buffer", "duplicate", "evicted", "left"]
"""waiting: sealed, not merged. merged: since the newest checkpoint. buffer: in it then. duplicate: of one
that was in it then. evicted: by a rule of the buffer. left: evicted, or a duplicate, or it came too late."""


@dataclass(frozen=True, slots=True)
class Life:
    """What became of a trajectory.

    merged_step: optimizer steps done when it was merged. uses: steps that had learned from it by the newest
    checkpoint, None if that does not tell.
    """

    state: State
    merged_step: int | None = None
    uses: int | None = None


@dataclass(frozen=True)
class Lives:
    """What became of all trajectories of a run, by shard and uid.

    step: of the newest checkpoint, None without one. revision: up to which it holds merges. uses: of what is
    in its buffer, by uid. texts: what that is, see ``identity``.
    """

    merges: Mapping[ShardKey, Merge]
    step: int | None = None
    revision: int = -1
    uses: Mapping[int, int] = field(default_factory=dict)
    texts: frozenset[tuple[int, bytes]] = frozenset()

    @classmethod
    def read(cls, run: RunDir) -> Lives:
        """As of now; one checkpoint that is damaged, or deleted meanwhile, gives way to the one before."""
        merges = {merge.key: merge for merge in History.read(run).merges}
        for folder in reversed(checkpoint_folders(run, complete=True)):
            try:
                state, buffer = read_state(folder), read_arrays(folder / BUFFER_FILE)
            except (OSError, StateError, ShardError):
                continue
            record = buffer["record"]
            completions = Ragged(buffer["completion_tokens"], buffer["completion_offsets"])
            texts = {identity(record[i], completions.row(i)) for i in range(len(record))}
            uses = dict(zip(record["uid"].tolist(), record["uses"].tolist(), strict=True))
            return cls(merges, state.step, state.revision, uses, frozenset(texts))
        return cls(merges)

    def of(self, key: ShardKey, record: np.void, tokens: np.ndarray) -> Life:
        """Of a trajectory of the shard ``key``: its row of RECORD and its completion."""
        merge = self.merges.get(key)
        if merge is None:
            return Life("waiting")
        uid = int(record["uid"])
        if merge.revision > self.revision:
            return Life("merged", merge.step)
        if uid in self.uses:
            return Life("buffer", merge.step, self.uses[uid])
        if identity(record, tokens) in self.texts:
            return Life("duplicate", merge.step)
        stayed_out = merge.duplicates or merge.left_out
        return Life("left" if stayed_out else "evicted", merge.step)


def identity(record: np.void, tokens: np.ndarray) -> tuple[int, bytes]:
    """Equal for the same completion of the same prompt."""
    return int(record["prompt_id"]), tokens.astype(np.int32).tobytes()
