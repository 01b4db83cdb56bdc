"""The replay buffer: a bounded number of completions per prompt, sampled as groups (MOP). Imports no torch.

The buffer stores groups: the completions that one request brought. A group is immutable. If some of its
completions leave or are used, a new group takes its place, so a snapshot is the list of groups. A group is a
bare tuple of the columns of its ``Trajectories``, which the garbage collector does not look into: collecting
the objects of a million trajectories would hold up the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice, pairwise

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba_hpc.config import BufferSection, ConfigError
from tba_hpc.config.variants import EditDuplicates, EmbeddingDuplicates
from tba_hpc.core.batch import rows_of, take_groups
from tba_hpc.core.types import (
    LIVE_RECORD,
    Columns,
    Ragged,
    Trajectories,
    TrajectoryBatch,
    as_record,
    joined,
    offsets_of,
    spans,
)

_REPLAY = int.from_bytes(b"replay")  # keeps this random stream apart from others of the same seed

UNIFORM_MIX = 0.1
"""Share of the uniform distribution mixed into the softmax over reward."""

Embed = Callable[[Ragged], np.ndarray]
"""Function from the tokens that the policy sampled (int32) to embeddings, float32 [N, D], rows of norm 1."""

ReferenceLogprobs = Callable[[TrajectoryBatch], np.ndarray]
"""Function that returns log π_ref of all completion tokens of a batch, float32 [T], rows in order."""

KIND = np.dtype([("version_oldest", "<i4"), ("reference", "<i4")])
"""Fields of RECORD that decide when a trajectory becomes stale."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge, in numbers of trajectories.

    added: trajectories merged less the duplicates. duplicates: old or new ones dropped in favour of an equal
    or near one. evicted: old or new ones that left for lack of room.
    """

    added: int
    duplicates: int
    evicted: int


def soft_values(trajectories: Trajectories, beta: float | None) -> np.ndarray:
    """Return V̂ = β·log mean exp(r/β) over all completions of each request, float32 [N]; 0 without ``beta``.

    V̂ goes from the highest reward (β → 0) to the mean (β → ∞). The trajectories must hold whole requests, as
    those of a shard do.
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
    """Live trajectories of a run. Each one merged is counted once: merged = live + duplicates + evicted.

    queue: whether the oldest are taken first. value_beta: β of the ``soft_values`` that are stored at the
    merge; None: none are stored. embed: embeds completions to find duplicates, each once, when it arrives.
    duplicates, evicted: numbers so far. replay_ratio: mean number of steps that have learned from each
    distinct trajectory of the last batch, that batch included; 1: all were new.
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
        assert (embed is None) == (config.embedding_model is None), "a limit is one of embeddings"
        self._config = config
        self._queue = queue
        self._embed = embed
        self._seed = seed
        self._value_beta = value_beta
        self._merged = 0
        self.duplicates = 0
        self.evicted = 0
        self.replay_ratio = 0.0
        self._revision = self._sync = -1
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[int, Columns] = {}  # by number, oldest first, each with its own prompt alone
        self._numbers, self._serials = count(), count()
        self._live: dict[int, dict[int, int]] = {}  # per prompt: completion's key to group, oldest first
        self._kinds = Counter[tuple[int, int]]()  # number of trajectories of each KIND
        self._used_up: set[int] = set()  # groups with used-up trajectories; some groups may have left
        self._everyone, self._recent = _Draw(), _Draw()

    def __len__(self) -> int:
        """Return the number of live trajectories."""
        return self._merged - self.duplicates - self.evicted

    @property
    def prompts(self) -> int:
        """Number of prompts that have live trajectories."""
        return len(self._live)

    @property
    def requests(self) -> int:
        """Number of requests that have live trajectories."""
        return len(self._groups)

    @property
    def unlearned(self) -> int:
        """Number of requests whose live trajectories were never in a batch; reads every live record."""
        record = self._record()
        used = record["request_id"][record["uses"] > 0]
        return self.requests - len(np.unique(used))

    @property
    def kinds(self) -> np.ndarray:
        """Distinct kinds of the live trajectories, KIND [M]."""
        return np.array(list(self._kinds), KIND)

    @property
    def added(self) -> int:
        """Number of trajectories merged so far, less the duplicates."""
        return self._merged - self.duplicates

    def _record(self) -> np.ndarray:
        """Return LIVE_RECORD [N] of all live trajectories, oldest first."""
        return joined([columns[0] for columns in self._groups.values()] or [_NOTHING[0]])

    def _group(self, number: int) -> Trajectories:
        return Trajectories.of(self._groups[number])

    def _numbers_of(self, prompt: int) -> list[int]:
        """Return the numbers of a prompt's groups, oldest first."""
        return list(dict.fromkeys(self._live.get(prompt, {}).values()))

    # --- Merging ---

    def merge(self, trajectories: Trajectories, revision: int, *, sync: int | None = None) -> Merged:
        """Add the trajectories that arrived in ``revision``; neither it nor ``sync`` may decrease.

        sync: number shared by all that arrives between two publications; None: each revision is one. The live
        trajectories of the last sync that brought any are the "most recent" ones. Unless duplicates are kept,
        a completion equal to a live one of its prompt replaces it and counts as newly arrived. If duplicates
        are found by edits or embeddings, a completion near to live ones of its prompt replaces them if its
        reward is higher than all of theirs; otherwise it is not stored. Then the oldest leave: those of a
        prompt above ``capacity_per_prompt``, and of all above ``capacity``.
        """
        sync = revision if sync is None else sync
        assert revision >= self._revision, f"revision {revision} comes after revision {self._revision}"
        assert sync >= self._sync, f"sync {sync} comes after sync {self._sync}"
        if not len(trajectories):
            return Merged(0, 0, 0)
        if sync > self._sync:
            self._recent = _Draw()
        self._revision, self._sync, before = revision, sync, self.evicted
        arrived = replace(trajectories, record=self._live_record(trajectories))
        duplicates = sum(self._enter(group) for group in self._split(arrived))
        self._merged += len(trajectories)
        self.duplicates += duplicates
        self._evict_excess(set(arrived.record["prompt_id"].tolist()))
        return Merged(len(trajectories) - duplicates, duplicates, self.evicted - before)

    def _live_record(self, arrived: Trajectories) -> np.ndarray:
        """Make the buffer's record of trajectories that arrived; with embeddings if these are compared."""
        dtype, fields = LIVE_RECORD, dict[str, int | np.ndarray]()
        if self._embed:
            fields["embedding"] = embedding_ND = self._embed(arrived.actions)
            dtype = np.dtype([*LIVE_RECORD.descr, ("embedding", "<f4", embedding_ND.shape[1:])])
        if self._value_beta is not None:
            # Computed now, because later there is no trace of a request's equal or evicted completions.
            fields["value"] = soft_values(arrived, self._value_beta)
        record = as_record(arrived.record, dtype)
        for name, value in {**fields, "revision": self._revision, "sync": self._sync}.items():
            record[name] = value
        return record

    def _split(self, arrived: Trajectories) -> Iterator[Trajectories]:
        """Split trajectories into groups of one request each, each with its own prompt alone."""
        record = arrived.record
        changes = (np.diff(record["request_id"]) != 0) | (np.diff(record["prompt_id"]) != 0)
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        prompt_ids, prompt_rows = record["prompt_id"][starts].tolist(), record["prompt_row"][starts].tolist()
        ends = [*starts[1:], len(record)]
        for start, end, prompt, row in zip(starts, ends, prompt_ids, prompt_rows, strict=True):
            text = arrived.prompts.row(row)
            tokens = self._prompt(prompt, text) or Ragged.from_rows([text], np.int32)
            group = arrived.between(start, end, tokens)
            group.record["prompt_row"] = 0
            yield group

    def _prompt(self, prompt: int, text: np.ndarray) -> Ragged | None:
        """Return the prompt as stored with its live trajectories, if it has any.

        If the stored text differs, the data have changed since: completions of the old text are evicted.
        """
        live = self._live.get(prompt)
        if not live:
            return None
        tokens = self._group(next(iter(live.values()))).prompts
        if np.array_equal(tokens.row(0), text):
            return tokens
        numbers = self._numbers_of(prompt)
        self._evict((number, np.ones(len(self._groups[number][0]), bool)) for number in numbers)
        return None

    def _enter(self, group: Trajectories) -> int:
        """Store a group less duplicates; return how many trajectories, new or old, were dropped."""
        prompt, keys = _prompt_of(group), self._keys(group)
        live = self._live.get(prompt, {})
        dropped = 0
        near = isinstance(self._config.duplicates, EditDuplicates | EmbeddingDuplicates)
        if near or len(set(keys)) < len(keys) or not live.keys().isdisjoint(keys):
            stay, dropped = self._resolve(group, keys)
            group, keys = group.take(stay), [keys[row] for row in stay.tolist()]
        if len(group):
            self._store(group, keys)
            self._everyone.add(prompt)
            self._recent.add(prompt)
        return dropped

    def _store(self, group: Trajectories, keys: Sequence[int]) -> None:
        """Add a group that has no duplicates."""
        number, prompt = next(self._numbers), _prompt_of(group)
        self._groups[number] = group.columns
        self._live.setdefault(prompt, {}).update(dict.fromkeys(keys, number))
        self._kinds.update(_kinds(group.record))
        self._note_used_up(number)

    def _keys(self, group: Trajectories) -> list[int]:
        """Return a key per completion; equal tokens have equal keys, unless the config keeps duplicates.

        Different tokens share a key with probability 2⁻⁶⁴. The key is Python's salted hash of bytes, which
        takes a quarter of the time of a cryptographic one.
        """
        if self._config.deduplicate is False:
            return list(islice(self._serials, len(group)))
        data = group.completions.values.astype("<i4", copy=False).tobytes()
        return [
            hash(data[4 * start : 4 * end]) for start, end in pairwise(group.completions.offsets.tolist())
        ]

    def _resolve(self, group: Trajectories, keys: Sequence[int]) -> tuple[np.ndarray, int]:
        """Remove duplicates; return the new rows that stay, int64, and how many, new or old, were dropped."""
        live = self._live.get(_prompt_of(group), {})
        numbers = self._numbers_of(_prompt_of(group))
        older = [self._group(number) for number in numbers]
        all_keys, first = [*live, *keys], len(live)
        reward = np.concatenate([one.record["reward"] for one in [*older, group]])
        stays = np.arange(len(all_keys)) < first
        place_of = {key: place for place, key in enumerate(live)}
        for place, near_N in enumerate(self._near(older, group), first):
            key = all_keys[place]
            if key in place_of:
                stays[place_of[key]] = False
            else:
                rivals = np.flatnonzero(near_N & stays)
                if (reward[rivals] >= reward[place]).any():
                    continue
                stays[rivals] = False
                for rival in rivals.tolist():
                    del place_of[all_keys[rival]]
            stays[place], place_of[key] = True, place
        offsets = offsets_of(map(len, older)).tolist()
        for number, (start, end) in zip(numbers, pairwise(offsets), strict=True):
            self._remove(number, ~stays[start:end])
        return np.flatnonzero(stays[first:]), int((~stays).sum())

    def _near(self, older: Sequence[Trajectories], group: Trajectories) -> np.ndarray:
        """Tell, bool [M, N], which of the group are near which live ones of the prompt, the group included.

        Near means an edit distance below a share of both lengths together, or a cosine above a limit.
        """
        together, first = [*older, group], sum(map(len, older))
        match self._config.duplicates:
            case EditDuplicates(limit=share):
                words = [word for one in together for word in _words(one.actions)]
                length_N = np.array([len(word) for word in words])
                bound = share * (length_N[first:, None] + length_N)
                most, score = int(bound.max()), Levenshtein.distance
                edits = cdist(words[first:], words, scorer=score, score_cutoff=most, dtype=np.int32)
                return np.less(edits, bound)
            case EmbeddingDuplicates(limit=cosine):
                everyone = joined([one.record["embedding"] for one in together])
                return np.greater(group.record["embedding"] @ everyone.T, cosine)
        return np.zeros((len(group), first + len(group)), np.bool_)

    # --- Leaving ---

    def _remove(self, number: int, leaves: np.ndarray) -> int:
        """Remove the trajectories of a group that ``leaves``, bool [K], marks; return how many."""
        gone = leaves.nonzero()[0].tolist()
        if not gone:
            return 0
        group = self._group(number)
        prompt = _prompt_of(group)
        live = self._live[prompt]
        keys = [key for key, of in live.items() if of == number]  # in the order of the rows
        kinds = list(_kinds(group.record))
        for row in gone:
            del live[keys[row]]
            self._kinds[kinds[row]] -= 1
            if not self._kinds[kinds[row]]:
                del self._kinds[kinds[row]]
        if not live:
            del self._live[prompt]
        if len(gone) < len(group):
            self._groups[number] = group.take((~leaves).nonzero()[0]).columns
        else:
            del self._groups[number]
        return len(gone)

    def _evict_excess(self, touched: Iterable[int]) -> None:
        """Evict the oldest trajectories of every touched prompt that is too full, then the oldest of all."""
        limit = self._config.capacity_per_prompt
        for prompt in touched:
            if (excess := len(self._live.get(prompt, ())) - limit) > 0:
                self._evict_oldest(self._numbers_of(prompt), excess)
        excess = max(0, len(self) - self._config.capacity)
        self._evict_oldest(list(islice(self._groups, excess)), excess)

    def _evict_oldest(self, numbers: Iterable[int], excess: int) -> None:
        """Evict ``excess`` trajectories, beginning with the first of the first group."""
        for number in numbers:
            gone = self._remove(number, np.arange(len(self._groups[number][0])) < excess)
            self.evicted += gone
            excess -= gone
            if not excess:
                return

    def evict_where(self, unwanted: Callable[[np.ndarray], np.ndarray]) -> int:
        """Evict the live trajectories that ``unwanted`` marks; return how many.

        unwanted: function from LIVE_RECORD [N] of all live trajectories to bool [N].
        """
        unwanted_N = unwanted(self._record())
        offsets = offsets_of(len(columns[0]) for columns in self._groups.values())
        found = np.searchsorted(offsets, np.flatnonzero(unwanted_N), "right") - 1
        numbers = list(self._groups)
        return self._evict(
            (numbers[place], unwanted_N[offsets[place] : offsets[place + 1]])
            for place in np.unique(found).tolist()
        )

    def _evict(self, leaving: Iterable[tuple[int, np.ndarray]]) -> int:
        """Evict trajectories, given numbers of groups and a mask, bool [K], for each; return how many."""
        gone = sum(self._remove(number, leaves) for number, leaves in leaving)
        self.evicted += gone
        return gone

    def evict_used_up(self, group_size: int) -> int:
        """Evict the trajectories that ``replay_limit`` steps have learned from; return how many were evicted.

        What is left of their prompts goes, too, if fewer than ``group_size`` remain: a few leftovers,
        repeated, would teach little. The cost depends only on the batches since the last call.
        """
        touched = {_prompt_of(self._group(number)) for number in self._used_up if number in self._groups}
        self._used_up.clear()
        leaving = list[tuple[int, np.ndarray]]()
        for prompt in touched:
            numbers = self._numbers_of(prompt)
            used_up = [self._is_used_up(number) for number in numbers]
            few = sum(int((~one).sum()) for one in used_up) < group_size
            leaving += [(number, one | few) for number, one in zip(numbers, used_up, strict=True)]
        return self._evict(leaving)

    def _note_used_up(self, number: int) -> None:
        if self._config.replay_limit is not None and self._is_used_up(number).any():
            self._used_up.add(number)

    def _is_used_up(self, number: int) -> np.ndarray:
        used_up: np.ndarray = self._group(number).record["uses"] >= self._config.replay_limit
        return used_up

    # --- Sampling ---

    def sample(
        self, step: int, *, groups: int, group_size: int, reference: ReferenceLogprobs | None = None
    ) -> TrajectoryBatch:
        """Sample B = ``groups`` groups of K = ``group_size`` trajectories, by MOP (TBA, §3).

        With probability ``most_on_policy`` a group's prompt is drawn among those with "most recent"
        trajectories, and its completions uniformly among these. Otherwise the prompt is drawn among all, and
        its completions by softmax(reward / reward_temperature) mixed with UNIFORM_MIX of uniform. Completions
        are distinct if there are K of them. If not, all are taken, and repeats are drawn by the same weights.
        Each of the two draws takes every prompt once before it takes any again. A batch has a prompt twice
        only if there are fewer than B prompts. When no recent prompt is left, the draw goes on among all
        prompts. In a ``queue``, prompts are ordered by the weights that sampled their oldest trajectory, then
        by its arrival.

        Being in a batch, however often, is one use of a trajectory; see ``evict_used_up``. Randomness depends
        on (seed, step) alone. The cost depends on B, K and the trajectories of the drawn prompts.
        ``reference`` computes the log-probabilities of groups that lack them; the buffer keeps them.
        """
        assert self._live, "the buffer is filled before it is sampled"
        rng = np.random.default_rng([self._seed, _REPLAY, step])
        drawn = self._queued(groups) if self._queue else self._drawn(rng, groups)
        rows = [row for prompt, new in drawn for row in self._choose(rng, prompt, group_size, recent=new)]
        self._count_uses(set(rows))
        batch = TrajectoryBatch.from_arrays(self._gather(rows), group_size=group_size, step=step)
        return batch if reference is None else self._refer(rows, batch, reference)

    def _gather(self, rows: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
        """Gather rows, given as (group, row), into arrays, without embeddings."""
        numbers = list(dict.fromkeys(number for number, _ in rows))
        groups = [self._groups[number] for number in numbers]
        starts = offsets_of(len(record) for record, *_ in groups)[:-1].tolist()
        start_of = dict(zip(numbers, starts, strict=True))
        found = Trajectories.concat(groups).take(np.array([start_of[number] + row for number, row in rows]))
        return {**found.to_arrays(), "record": as_record(found.record, LIVE_RECORD)}

    def _refer(
        self, rows: Sequence[tuple[int, int]], batch: TrajectoryBatch, reference: ReferenceLogprobs
    ) -> TrajectoryBatch:
        """Fill in the reference's log-probabilities where they are unknown, in the batch and the buffer."""
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
            group = self._group(number)
            kept = group.ref_logprobs.copy()
            start, end = group.completions.offsets[row : row + 2]
            kept[start:end] = ref_logprobs[offsets[place] : offsets[place + 1]]
            self._groups[number] = replace(group, ref_logprobs=kept).columns
        return replace(batch, ref_logprobs=ref_logprobs)

    def _drawn(self, rng: np.random.Generator, groups: int) -> Iterator[tuple[int, bool]]:
        """Draw prompts by MOP, each with whether its group is "most recent"; lazy, as ``rng`` is shared."""
        taken = set[int]()
        for most_recent in (rng.random(groups) < self._config.most_on_policy).tolist():
            if len(taken) == len(self._live):
                taken.clear()
            prompt = self._recent.draw(rng, taken, self._is_recent) if most_recent else None
            recent = prompt is not None
            if prompt is None:
                prompt = self._everyone.draw(rng, taken, self._live.__contains__)
            assert prompt is not None
            taken.add(prompt)
            yield prompt, recent

    def _queued(self, groups: int) -> Iterator[tuple[int, bool]]:
        """Take prompts from a queue, the oldest first."""
        record = self._record()
        prompts = record["prompt_id"][np.argsort(record["version_oldest"], kind="stable")].tolist()
        return ((prompt, False) for prompt in islice(cycle(dict.fromkeys(prompts)), groups))

    def _count_uses(self, rows: set[tuple[int, int]]) -> None:
        """Count a use of each (group, row)."""
        uses = list[int]()
        chosen = dict[int, list[int]]()
        for number, row in rows:
            chosen.setdefault(number, []).append(row)
        for number, some in chosen.items():
            record, *others = self._groups[number]
            record = joined([record])
            record["uses"][some] += 1
            uses += record["uses"][some].tolist()
            self._groups[number] = (record, *others)
            self._note_used_up(number)
        self.replay_ratio = float(np.mean(uses))

    def _is_recent(self, prompt: int) -> bool:
        """Tell whether the most recent sync brought a prompt's youngest live trajectory."""
        live = self._live.get(prompt)
        return live is not None and self._group(next(reversed(live.values()))).record["sync"][0] == self._sync

    def _choose(
        self, rng: np.random.Generator, prompt: int, count: int, *, recent: bool
    ) -> list[tuple[int, int]]:
        """Draw ``count`` trajectories of a prompt, as (group, row).

        By Gumbel top-k, those with the largest log weight + Gumbel noise are a draw without replacement by
        weight.
        """
        numbers = self._numbers_of(prompt)
        groups = [self._group(number) for number in numbers]
        rows = [
            (number, row) for number, group in zip(numbers, groups, strict=True) for row in range(len(group))
        ]
        reward_N, sync_N = (
            np.concatenate([group.record[name] for group in groups]) for name in ("reward", "sync")
        )
        among = np.flatnonzero(sync_N == self._sync) if recent else np.arange(len(rows))
        weight = self._weights(reward_N[among], equal=recent)
        log_weight = np.log(np.maximum(weight, np.finfo(weight.dtype).tiny))
        chosen = among[np.argsort(-log_weight - rng.gumbel(size=len(among)))[:count]]
        if len(chosen) < count:
            chosen = np.concatenate([chosen, rng.choice(among, count - len(chosen), p=weight)])
        return [rows[place] for place in chosen.tolist()]

    def _weights(self, reward_N: np.ndarray, *, equal: bool) -> np.ndarray:
        """Return the probability of each trajectory of a prompt, float64 [N], by reward unless ``equal``."""
        uniform = np.full(len(reward_N), 1 / len(reward_N))
        temperature, mix = self._config.reward_temperature, UNIFORM_MIX
        if equal or temperature is None:
            return uniform
        odds = np.exp((reward_N.astype(np.float64) - reward_N.max()) / temperature)
        return (1 - mix) * odds / odds.sum() + mix * uniform

    # --- Saving ---

    def state(self) -> dict[str, np.ndarray]:
        """Return plain arrays from which ``restore`` makes a buffer that behaves exactly like this one."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that makes the ``state`` of this moment, in any thread, while the buffer changes.

        Little is copied now, but what leaves the buffer keeps its memory while the function exists.
        """
        counters = np.array([self._merged, self.duplicates, self.evicted], np.int64)
        newest = np.array([self._revision, self._sync], np.int64)
        groups = list(self._groups.values()) or [_NOTHING]
        draws = {**self._everyone.arrays("everyone"), **self._recent.arrays("recent")}

        def arrays() -> dict[str, np.ndarray]:
            return {
                "counters": counters,
                "newest": newest,
                **Trajectories.concat(groups).to_arrays(),
                **draws,
            }

        return arrays

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Become the buffer whose ``state`` is given. Raises ConfigError if its record fields differ."""
        self._clear()
        stored = Trajectories.from_arrays(arrays)
        fields = [field for field in stored.record.dtype.descr if field[0] != "embedding"]
        if fields != LIVE_RECORD.descr:
            raise ConfigError(
                "the checkpoint's buffer is of another version of tba-hpc (its records have the fields "
                f"{', '.join(name for name, *_ in fields)}): use the version that wrote it"
            )
        for group in self._split(stored) if len(stored) else ():
            self._store(group, self._keys(group))
        self._merged, self.duplicates, self.evicted = arrays["counters"].tolist()
        self._revision, self._sync = arrays["newest"].tolist()
        self._everyone = _Draw(arrays["everyone_waiting"], arrays["everyone_drawn"])
        self._recent = _Draw(arrays["recent_waiting"], arrays["recent_drawn"])


_NO_TOKENS = Ragged.from_rows([], np.int32)
_NOTHING = Trajectories(
    np.empty(0, LIVE_RECORD), _NO_TOKENS, _NO_TOKENS, np.empty(0, np.float32), np.empty(0, np.float32)
).columns


def _prompt_of(group: Trajectories) -> int:
    return int(group.record["prompt_id"][0])


def _kinds(record: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(record["version_oldest"].tolist(), record["reference"].tolist(), strict=True)


def _words(rows: Ragged) -> list[str]:
    """Encode rows of tokens as strings, one character per token, for edit distances."""
    text = rows.values.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return [text[start:end] for start, end in pairwise(rows.offsets.tolist())]


class _Draw:
    """Prompts in random order, each drawn once per pass, in constant time.

    waiting: prompts not yet drawn in this pass. drawn: the others. A draw drops the useless prompts that it
    meets.
    """

    def __init__(self, waiting: Iterable[int] = (), drawn: Iterable[int] = ()) -> None:
        self._waiting = [int(prompt) for prompt in waiting]
        self._drawn = [int(prompt) for prompt in drawn]
        self._members = {*self._waiting, *self._drawn}

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arguments that make an equal draw, as NAME_waiting and NAME_drawn."""
        return {
            f"{name}_waiting": np.array(self._waiting, np.int64),
            f"{name}_drawn": np.array(self._drawn, np.int64),
        }

    def add(self, prompt: int) -> None:
        """Add a prompt, which takes part from this pass on."""
        if prompt not in self._members:
            self._members.add(prompt)
            self._waiting.append(prompt)

    def draw(self, rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]) -> int | None:
        """Draw the next useful prompt that is not taken, or None; taken ones keep their turn."""
        prompt = self._pick(self._waiting, rng, taken, useful)
        if prompt is None and (prompt := self._pick(self._drawn, rng, taken, useful)) is not None:
            self._drawn += self._waiting  # only taken prompts still wait, so the next pass begins
            self._waiting, self._drawn = self._drawn, []
        if prompt is not None:
            self._drawn.append(prompt)
        return prompt

    def _pick(
        self, pile: list[int], rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]
    ) -> int | None:
        """Remove and return a random useful prompt of a pile that is not ``taken``; drop useless ones met."""
        passed_over, found = [], None
        while pile and found is None:
            place = int(rng.integers(len(pile)))
            prompt, pile[place] = pile[place], pile[-1]
            pile.pop()
            if not useful(prompt):
                self._members.remove(prompt)
            elif prompt in taken:
                passed_over.append(prompt)
            else:
                found = prompt
        pile += passed_over
        return found
