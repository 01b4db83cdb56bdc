"""Brings sealed shards into the replay buffer, each exactly once, and takes out what is stale or used up.

It must not know how shards arrive, or what is learned from them. Every change leaves a line in the trainer's
metrics, for shards are pruned: ``tba audit`` follows these lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from tba_hpc.buffer import Merged, ReplayBuffer
from tba_hpc.config import Config
from tba_hpc.freshness import Freshness
from tba_hpc.metrics import MetricsWriter, Value
from tba_hpc.prompts import CompletedRequests
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.types import Shard

MERGED_AT_ONCE = 32
"""Pending shards in memory at a time: with the decoding of one after the other, that is little."""


class Merger:
    """Changes the buffer; every method takes the trainer's state before and returns the one after."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        completed: CompletedRequests,
        freshness: Freshness,
        metrics: MetricsWriter,
    ) -> None:
        self._buffer = buffer
        self._completed = completed
        self._freshness = freshness
        self._metrics = metrics

    def merge(self, state: TrainerState, shards: Sequence[Shard], *, sync: int) -> TrainerState:
        """Merge what was collected at once: one revision of the buffer. Shards merged before are left out.

        sync: version of the weights published last; what arrives until the next are is one sync's.
        """
        shards = [shard for shard in shards if shard.index >= state.cursors.get(shard.searcher, 0)]
        if not shards:
            return state
        revision = state.revision + 1
        merged = self._buffer.merge_each([shard.trajectories for shard in shards], revision, sync=sync)
        self._completed.add(np.concatenate([shard.trajectories.record["request_id"] for shard in shards]))
        self._metrics.log(
            *(
                _merge_event(state.step, revision, shard, what)
                for shard, what in zip(shards, merged, strict=True)
            )
        )
        return replace(
            state,
            revision=revision,
            cursors={**state.cursors, **{shard.searcher: shard.index + 1 for shard in shards}},
            trajectories=state.trajectories + sum(len(shard.trajectories) for shard in shards),
            added=self._buffer.added,
            duplicates=self._buffer.duplicates,
            evicted=self._buffer.evicted,
            tokens=state.tokens + sum(len(shard.trajectories.completions.values) for shard in shards),
        )

    def evict_stale(self, state: TrainerState) -> TrainerState:
        """Evict what the next step must not learn from; a revision of the buffer, too, if there is any."""
        evicted = self._freshness.evict_stale(state.step)
        if not evicted:
            return state
        step, revision = state.step, state.revision + 1
        self._metrics.log({"event": "evicted", "step": step, "revision": revision, "evicted": evicted})
        return replace(state, revision=revision, evicted=self._buffer.evicted)


def merge_pending(
    config: Config,
    pending: Iterable[Shard],
    *,
    state: TrainerState,
    buffer: ReplayBuffer,
    completed: CompletedRequests,
    metrics: MetricsWriter,
) -> TrainerState:
    """Begin an attempt at ``state``: merge what an earlier one left, a few shards in memory at a time.

    ``pending``: shards sealed beyond the cursors. Returns the state after; what searchers are told when they
    join follows from it, so no exchange is needed yet.
    """
    metrics.log(state_event("resumed" if state != TrainerState() else "started", state, buffer))
    freshness = Freshness(config, buffer)
    freshness.update_reference(state.step)
    merger = Merger(buffer, completed, freshness, metrics)
    shards, version = iter(pending), state.step
    state = merger.evict_stale(state)
    while some := list(islice(shards, MERGED_AT_ONCE)):
        state = merger.merge(state, some, sync=version)
    return merger.evict_stale(state)


def _merge_event(step: int, revision: int, shard: Shard, merged: Merged) -> dict[str, Value]:
    return {
        "event": "merged",
        "step": step,
        "revision": revision,
        "searcher": shard.searcher,
        "shard": shard.index,
        "trajectories": len(shard.trajectories),
        "tokens": len(shard.trajectories.completions.values),
        "request_ids": shard.trajectories.request_ids.tolist(),
        "added": merged.added,
        "duplicates": merged.duplicates,
        "evicted": merged.evicted,
    }


def state_event(event: str, state: TrainerState, buffer: ReplayBuffer) -> dict[str, Value]:
    """Record of an event of the run for the trainer's metrics; see ``metrics`` for their names."""
    return {"event": event, "step": state.step, "revision": state.revision, "buffer/size": len(buffer)}
