"""The replay buffer: a bounded number of completions per prompt, sampled as groups. Imports no torch.

``live_store`` holds the trajectories, ``duplicates`` finds duplicates, ``replay_sampler`` chooses batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, islice

import numpy as np

from tba_hpc.config import BufferSection, ConfigError
from tba_hpc.core.batch import rows_of, take_groups
from tba_hpc.core.duplicates import Duplicates
from tba_hpc.core.live_store import LiveStore, Row, prompt_of
from tba_hpc.core.replay_sampler import Sampler
from tba_hpc.core.types import LIVE_RECORD, Ragged, Trajectories, TrajectoryBatch, as_record, spans

Embed = Callable[[Ragged], np.ndarray]
"""Function from the sampled tokens of N completions, int32, to embeddings of norm 1, float32 [N, D]."""

ReferenceLogprobs = Callable[[TrajectoryBatch], np.ndarray]
"""Function from a batch to log π_ref of all its completion tokens, float32 [T], in the order of its rows."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge, in numbers of trajectories.

    added: trajectories given to the merge, minus duplicates. duplicates: those dropped because an equal or
    similar one stays. evicted: those removed because the buffer was full or their prompt's tokens changed.
    ``duplicates`` and ``evicted`` include trajectories of earlier merges.
    """

    added: int
    duplicates: int
    evicted: int


def soft_values(trajectories: Trajectories, beta: float | None) -> np.ndarray:
    """Return the soft value V̂ = β·log mean exp(r/β) of each trajectory's request, float32 [N].

    The mean is over the request's completions, all of which must be given. V̂ lies between the mean reward
    (β → ∞) and the highest reward (β → 0). If ``beta`` is None, the result is 0.
    """
    if beta is None:
        return np.zeros(len(trajectories), np.float32)
    _, request_N = np.unique(trajectories.record["request_id"], return_inverse=True)
    completions_R = np.bincount(request_N)
    log_sum_R = np.full(len(completions_R), -np.inf)
    np.logaddexp.at(log_sum_R, request_N, trajectories.record["reward"].astype(np.float64) / beta)
    value_R = beta * (log_sum_R - np.log(completions_R))
    return value_R[request_N].astype(np.float32)


class ReplayBuffer:
    """Trajectories from which the trainer samples its batches.

    A trajectory is live while it can be sampled. Every merged trajectory is counted exactly once: merged =
    live + duplicates + evicted.

    queue: whether batches take the oldest trajectories first. value_beta: β of the ``soft_values`` that a
    merge stores; None: it stores 0. embed: function that computes embeddings to find duplicates; given if and
    only if ``config.embedding_model`` is set. duplicates, evicted: totals so far. replay_ratio: mean number
    of times that the last batch's trajectories have been used, this batch included; 1 if all were new.
    """

    def __init__(
        self,
        config: BufferSection,
        seed: int,
        *,
        queue: bool = False,
        value_beta: float | None = None,
        embed: Embed | None = None,
    ) -> None:
        assert (embed is None) == (config.embedding_model is None), "the config decides whether to embed"
        self._config = config
        self._rule = Duplicates(config)
        self._new_sampler = partial(Sampler, config, seed, queue=queue)
        self._embed = embed
        self._value_beta = value_beta
        self._merged = 0
        self.duplicates = 0
        self.evicted = 0
        self.replay_ratio = 0.0
        self._revision = -1
        self._clear()

    def _clear(self) -> None:
        self._store = LiveStore()
        self._sampler = self._new_sampler(self._store)
        self._used_up: set[int] = set()  # numbers of groups with used-up trajectories, even evicted ones

    def __len__(self) -> int:
        """Return the number of live trajectories."""
        return self._merged - self.duplicates - self.evicted

    @property
    def prompts(self) -> int:
        """Number of prompts that have live trajectories."""
        return len(self._store.live)

    @property
    def requests(self) -> int:
        """Number of requests of which at least one trajectory is still in the buffer."""
        return len(self._store.groups)

    @property
    def unlearned(self) -> int:
        """Number of requests none of whose live trajectories was in a batch yet. Scans the whole buffer."""
        record = self._store.record()
        used = record["request_id"][record["uses"] > 0]
        return self.requests - len(np.unique(used))

    @property
    def kinds(self) -> np.ndarray:
        """Distinct pairs of live trajectories' oldest version and reference, ``live_store.KIND`` [M]."""
        return self._store.kinds

    @property
    def added(self) -> int:
        """Number of trajectories merged so far, minus duplicates."""
        return self._merged - self.duplicates

    # --- Merging ---

    def merge(self, trajectories: Trajectories, revision: int, *, sync: int | None = None) -> Merged:
        """Add trajectories, drop duplicates, and evict what exceeds the capacities.

        revision: number of this change of the buffer. sync: number shared by all merges between two
        publications of weights; None: the revision. The trajectories of the newest sync that added any are
        the "most recent" ones. Neither number may decrease.

        Unless duplicates are kept, a completion replaces an equal live one of its prompt, and counts as newly
        arrived. Similar completions may count as duplicates, too, by edit distance or embeddings. A
        completion then replaces all similar live ones of its prompt if its reward is higher than each of
        theirs; otherwise it is not stored. Finally the oldest trajectories above ``capacity_per_prompt`` and
        ``capacity`` are evicted.
        """
        sync = revision if sync is None else sync
        assert revision >= self._revision, f"revision {revision} is below revision {self._revision}"
        assert sync >= self._sampler.sync, f"sync {sync} is below sync {self._sampler.sync}"
        if not len(trajectories):
            return Merged(0, 0, 0)
        self._sampler.begin_sync(sync)
        self._revision, before = revision, self.evicted
        arrived = replace(trajectories, record=self._live_record(trajectories))
        duplicates = sum(self._enter(group) for group in self._split(arrived))
        self._merged += len(trajectories)
        self.duplicates += duplicates
        self._evict_excess(set(arrived.record["prompt_id"].tolist()))
        return Merged(len(trajectories) - duplicates, duplicates, self.evicted - before)

    def _live_record(self, arrived: Trajectories) -> np.ndarray:
        """Return what the buffer stores of new trajectories, a row for each.

        This includes their embeddings if duplicates are found by embeddings.
        """
        dtype, fields = LIVE_RECORD, dict[str, int | np.ndarray]()
        if self._embed:
            fields["embedding"] = embedding_ND = self._embed(arrived.actions)
            dtype = np.dtype([*LIVE_RECORD.descr, ("embedding", "<f4", embedding_ND.shape[1:])])
        if self._value_beta is not None:
            # Before duplicates are dropped and others evicted, since V̂ needs all completions of a request.
            fields["value"] = soft_values(arrived, self._value_beta)
        record = as_record(arrived.record, dtype)
        for name, value in {**fields, "revision": self._revision, "sync": self._sampler.sync}.items():
            record[name] = value
        return record

    def _split(self, arrived: Trajectories) -> Iterator[Trajectories]:
        """Split trajectories into one group per request, each holding only its own prompt."""
        record = arrived.record
        changes = (np.diff(record["request_id"]) != 0) | (np.diff(record["prompt_id"]) != 0)
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        prompt_ids, prompt_rows = record["prompt_id"][starts].tolist(), record["prompt_row"][starts].tolist()
        ends = [*starts[1:], len(record)]
        for start, end, prompt, row in zip(starts, ends, prompt_ids, prompt_rows, strict=True):
            tokens = arrived.prompts.row(row)
            prompts = self._stored_prompt(prompt, tokens) or Ragged.from_rows([tokens], np.int32)
            group = arrived.between(start, end, prompts)
            group.record["prompt_row"] = 0
            yield group

    def _stored_prompt(self, prompt: int, tokens: np.ndarray) -> Ragged | None:
        """Return the stored row of a prompt's tokens, which its groups share; None if there is none.

        prompt: the prompt's id. tokens: its tokens in new trajectories. If they differ from the stored ones,
        the data set has changed, and the prompt's live trajectories are evicted.
        """
        live = self._store.live.get(prompt)
        if not live:
            return None
        stored = self._store.group(next(iter(live.values()))).prompts
        if np.array_equal(stored.row(0), tokens):
            return stored
        groups = self._store.groups_of(prompt)
        self._evict((number, np.ones(len(group), bool)) for number, group in groups.items())
        return None

    def _enter(self, group: Trajectories) -> int:
        """Store a new group. Drop duplicates among new and live trajectories; return how many."""
        prompt, keys = prompt_of(group), self._rule.keys(group)
        dropped, live = 0, self._store.live.get(prompt, {})
        if self._rule.possible(live, keys):
            older = self._store.groups_of(prompt)
            stays = self._rule.stays(live, [*older.values()], keys, group)
            dropped = int((~stays).sum())
            for number, one in older.items():
                self._store.remove(number, ~stays[: len(one)])
                stays = stays[len(one) :]
            group, keys = group.take(np.flatnonzero(stays)), list(compress(keys, stays))
        if len(group):
            self._add(group, keys)
            self._sampler.arrived(prompt)
        return dropped

    def _add(self, group: Trajectories, keys: Sequence[int]) -> None:
        number = self._store.add(group, keys)
        self._note_used_up(number, group.record["uses"])

    # --- Evicting ---

    def _evict_excess(self, touched: Iterable[int]) -> None:
        """Evict the oldest trajectories above the capacity of each ``touched`` prompt, then of the buffer."""
        limit = self._config.capacity_per_prompt
        for prompt in touched:
            if (excess := len(self._store.live.get(prompt, ())) - limit) > 0:
                self._evict_oldest(self._store.groups_of(prompt), excess)
        excess = max(0, len(self) - self._config.capacity)
        self._evict_oldest(list(islice(self._store.groups, excess)), excess)

    def _evict_oldest(self, numbers: Iterable[int], excess: int) -> None:
        """Evict the first ``excess`` trajectories of the groups with the given ``numbers``, in that order."""
        for number in numbers:
            size = len(self._store.groups[number][0])
            excess -= self._evict([(number, np.arange(size) < excess)])
            if not excess:
                return

    def evict_where(self, unwanted: Callable[[np.ndarray], np.ndarray]) -> int:
        """Evict the live trajectories that ``unwanted`` marks; return how many.

        unwanted: function from LIVE_RECORD [N] of all live trajectories to bool [N].
        """
        return self._evict(self._store.parts(unwanted(self._store.record())))

    def evict_used_up(self, group_size: int) -> int:
        """Evict trajectories from which ``replay_limit`` steps have learned; return how many were evicted.

        If a prompt would keep fewer than ``group_size`` trajectories, these are evicted, too: a group would
        have to repeat them, which teaches little. A call takes time only for the batches since the last one.
        """
        used_up = [number for number in self._used_up if number in self._store.groups]
        self._used_up.clear()
        leaving = list[tuple[int, np.ndarray]]()
        for prompt in {prompt_of(self._store.group(number)) for number in used_up}:
            groups = self._store.groups_of(prompt)
            leaves = [self._is_used_up(group.record["uses"]) for group in groups.values()]
            few = sum(int((~one).sum()) for one in leaves) < group_size
            leaving += [(number, one | few) for number, one in zip(groups, leaves, strict=True)]
        return self._evict(leaving)

    def _note_used_up(self, number: int, uses: np.ndarray) -> None:
        if self._config.replay_limit is not None and self._is_used_up(uses).any():
            self._used_up.add(number)

    def _is_used_up(self, uses: np.ndarray) -> np.ndarray:
        used_up: np.ndarray = uses >= self._config.replay_limit
        return used_up

    def _evict(self, leaving: Iterable[tuple[int, np.ndarray]]) -> int:
        """Evict marked trajectories, given each group's number and mask, bool [K]; return how many."""
        gone = sum(self._store.remove(number, leaves_K) for number, leaves_K in leaving)
        self.evicted += gone
        return gone

    # --- Sampling ---

    def sample(
        self, step: int, *, groups: int, group_size: int, reference: ReferenceLogprobs | None = None
    ) -> TrajectoryBatch:
        """Sample a batch of B = ``groups`` groups of K = ``group_size`` trajectories.

        ``replay_sampler.Sampler.sample`` says how they are chosen. Randomness depends only on (seed, step). A
        batch counts as one use of a trajectory, even if it holds the trajectory several times. reference:
        function that computes log π_ref for groups that lack it; the buffer stores the result. The buffer
        must not be empty.
        """
        assert self.prompts, "the buffer is filled before it is sampled"
        rows = self._sampler.sample(step, groups=groups, group_size=group_size)
        uses = self._store.count_uses(set(rows))
        for number, uses_K in uses.items():
            self._note_used_up(number, uses_K)
        self.replay_ratio = float(np.concatenate([*uses.values()]).mean())
        found = self._store.gather(rows)
        found = replace(found, record=as_record(found.record, LIVE_RECORD))  # without embeddings
        batch = TrajectoryBatch.of(found.columns, group_size=group_size, step=step)
        return batch if reference is None else self._refer(rows, batch, reference)

    def _refer(
        self, rows: Sequence[Row], batch: TrajectoryBatch, reference: ReferenceLogprobs
    ) -> TrajectoryBatch:
        """Compute missing reference log-probabilities, store them, and return the batch with them."""
        offsets = batch.completions.offsets
        unknown_T = np.flatnonzero(np.isnan(batch.ref_logprobs) & batch.action_T)
        unknown_N = np.diff(np.searchsorted(unknown_T, offsets)) > 0
        groups = np.flatnonzero(unknown_N.reshape(batch.groups, -1).any(1))
        if not len(groups):
            return batch
        ref_logprobs = batch.ref_logprobs.copy()
        whole_T, _ = spans(offsets, rows_of(groups, batch.group_size))
        ref_logprobs[whole_T] = reference(take_groups(batch, groups))
        for place in np.flatnonzero(unknown_N).tolist():
            number, row = rows[place]
            group = self._store.group(number)
            kept = group.ref_logprobs.copy()
            start, end = group.completions.offsets[row : row + 2]
            kept[start:end] = ref_logprobs[offsets[place] : offsets[place + 1]]
            self._store.groups[number] = replace(group, ref_logprobs=kept).columns
        return replace(batch, ref_logprobs=ref_logprobs)

    # --- Saving ---

    def state(self) -> dict[str, np.ndarray]:
        """Return arrays from which ``restore`` makes a buffer that behaves exactly like this one."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that returns the present ``state``, even after the buffer has changed.

        The call copies little; the function copies the trajectories, and may be called in any thread.
        Trajectories that leave the buffer stay in memory while the function exists.
        """
        counters = np.array([self._merged, self.duplicates, self.evicted], np.int64)
        newest = np.array([self._revision, self._sampler.sync], np.int64)
        groups, draws = self._store.columns(), self._sampler.state()

        def arrays() -> dict[str, np.ndarray]:
            return {
                "counters": counters,
                "newest": newest,
                **Trajectories.concat(groups).to_arrays(),
                **draws,
            }

        return arrays

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the contents by a ``state``. Raises ConfigError if its fields are not LIVE_RECORD's."""
        self._clear()
        stored = Trajectories.from_arrays(arrays)
        fields = [field for field in stored.record.dtype.descr if field[0] != "embedding"]
        if fields != LIVE_RECORD.descr:
            raise ConfigError(
                "the checkpoint's buffer is of another version of tba-hpc (its records have the fields "
                f"{', '.join(name for name, *_ in fields)}): use the version that wrote it"
            )
        for group in self._split(stored) if len(stored) else ():
            self._add(group, self._rule.keys(group))
        self._merged, self.duplicates, self.evicted = arrays["counters"].tolist()
        self._revision, sync = arrays["newest"].tolist()
        self._sampler.restore(arrays, sync)
