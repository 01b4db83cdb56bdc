"""Merges sealed shards into the replay buffer, each exactly once, and evicts what is stale or used up.

Every change leaves a line in the trainer's metrics. ``tba audit`` follows these lines, because merged shards
are deleted. A group whose request was answered before is left out. Such groups come from an elastic searcher
that was frozen while another took its slot, so that both issued the same request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Shard
from tba_hpc.loops.freshness import Freshness
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.metrics import MetricsWriter, Value

if TYPE_CHECKING:
    from tba_hpc.loops.restoring import Restored

MERGED_AT_ONCE = 32
"""Largest number of pending shards that are in memory at a time when an attempt begins."""


@dataclass
class Merger:
    """Changes the buffer. Methods take the trainer's state before a change and return the state after it."""

    buffer: ReplayBuffer
    completed: CompletedRequests
    freshness: Freshness
    metrics: MetricsWriter

    def merge(self, state: TrainerState, shards: Sequence[Shard], *, sync: int) -> TrainerState:
        """Merge shards that were collected together; return the state with the next revision of the buffer.

        The revision is the number of merges and evictions so far; all of these shards share one. Shards that
        were merged before are left out. sync: version of the last published weights.
        """
        shards = [shard for shard in shards if shard.index >= state.cursors.get(shard.searcher, 0)]
        if not shards:
            return state
        revision = state.revision + 1
        self.metrics.log(*(self._merge(shard, state.step, revision, sync) for shard in shards))
        return replace(
            state,
            revision=revision,
            cursors={**state.cursors, **{shard.searcher: shard.index + 1 for shard in shards}},
            trajectories=state.trajectories + sum(len(shard.trajectories) for shard in shards),
            added=self.buffer.added,
            duplicates=self.buffer.duplicates,
            evicted=self.buffer.evicted,
            tokens=state.tokens + sum(len(shard.trajectories.completions.values) for shard in shards),
        )

    def evict_stale(self, state: TrainerState) -> TrainerState:
        """Evict the trajectories that the next step must not learn from; return the state after that.

        If there are no such trajectories, ``state`` is returned unchanged. Otherwise the new state has the
        next revision; see ``merge``.
        """
        evicted = self.freshness.evict_stale(state.step)
        if not evicted:
            return state
        step, revision = state.step, state.revision + 1
        self.metrics.log({"event": "evicted", "step": step, "revision": revision, "evicted": evicted})
        return replace(state, revision=revision, evicted=self.buffer.evicted)

    def _merge(self, shard: Shard, step: int, revision: int, sync: int) -> dict[str, Value]:
        """Merge a shard, except groups whose request was answered before, and mark its requests as completed.

        revision, sync: as in ``ReplayBuffer.merge``. Returns the metrics record of the merge.
        """
        arrived = shard.trajectories
        requests, kept = shard.request_ids, arrived
        answered = requests[self.completed.among(requests)]
        self.completed.add(requests)
        if len(answered):
            kept = arrived.take(np.flatnonzero(~np.isin(arrived.record["request_id"], answered)))
        merged = self.buffer.merge(kept, revision, sync=sync)
        return {
            "event": "merged",
            "step": step,
            "revision": revision,
            "sync": sync,
            "searcher": shard.searcher,
            "shard": shard.index,
            "trajectories": len(arrived),
            "tokens": len(arrived.completions.values),
            "request_ids": requests.tolist(),
            "added": merged.added,
            "duplicates": merged.duplicates,
            "evicted": merged.evicted,
            "again": len(arrived) - len(kept) or None,
            "answered": np.unique(answered).tolist() or None,
        }


def merge_pending(
    config: Config, pending: Iterable[Shard], saved: Restored, metrics: MetricsWriter
) -> TrainerState:
    """Begin an attempt: merge the shards that an earlier attempt left, few at a time; return the new state.

    pending: all shards that the checkpoint ``saved`` does not contain, from its cursors on.
    """
    state, buffer = saved.state, saved.buffer
    metrics.log(state_event("resumed" if state != TrainerState() else "started", state, buffer))
    freshness = Freshness(config, buffer)
    freshness.update_reference(state.step)
    merger = Merger(buffer, saved.completed, freshness, metrics)
    shards, version = iter(pending), state.step
    state = merger.evict_stale(state)
    while some := list(islice(shards, MERGED_AT_ONCE)):
        state = merger.merge(state, some, sync=version)
    return merger.evict_stale(state)


def state_event(event: str, state: TrainerState, buffer: ReplayBuffer) -> dict[str, Value]:
    """Return a line for the trainer's metrics about an event of the run, as values by name."""
    return {"event": event, "step": state.step, "revision": state.revision, "buffer/size": len(buffer)}
