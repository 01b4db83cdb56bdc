"""The replay buffer: completions per prompt, bounded in number, sampled as groups (MOP).

It must not know where trajectories come from or what is learned from them. Imports no torch. How they lie in
memory is the ``store``'s; here they are known by their slots there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle, groupby, islice, pairwise
from operator import itemgetter

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba_hpc.config import BufferSection
from tba_hpc.core.batch import rows_of, take_groups, token_ages
from tba_hpc.core.store import Column, Store, StoreSnapshot
from tba_hpc.core.types import RECORD, Ragged, Trajectories, TrajectoryBatch, offsets_of, spans

Key = int
"""What tells the live completions of a prompt apart."""

_REPLAY = int.from_bytes(b"replay")  # keeps this stream apart from others of the same seed

UNIFORM_MIX = 0.1
"""Share of uniform probability mixed into the softmax over reward."""

COMPARED_AT_ONCE = 128
"""New completions whose edit distances or cosines to all others are held at once: memory against speed."""

SPARE_SLOTS = 1 << 13
"""For trajectories that come before others have left."""

MERGED_AT_ONCE = 64
"""Shards whose arrays are brought in together: the more, the less each costs, and the longer all take."""

Embed = Callable[[Ragged], np.ndarray]
"""Embeddings of completions (int32 tokens), float32 [N, D], rows of length 1."""

ReferenceLogprobs = Callable[[TrajectoryBatch], np.ndarray]
"""log π_ref of all completion tokens of a batch, float32 [T], rows in order."""

NearAmong = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Which of some slots [M] and others [O] are near each other, bool [M, O]."""

KIND = np.dtype([("version_oldest", "<i4"), ("reference", "<i4")])
"""The fields of RECORD by which a trajectory becomes stale."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge did.

    added: trajectories merged less the duplicates. duplicates: those given up for one that is equal or near,
    whenever they came. evicted: those that left for want of room, whenever they came.
    """

    added: int
    duplicates: int
    evicted: int


def soft_values(trajectories: Trajectories, beta: float | None) -> np.ndarray:
    """float32 [N]: V̂ = β·log mean exp(r/β), over all completions of the request that each answers.

    beta: in units of the reward; V̂ goes from the highest (β → 0) to their mean (β → ∞). None: all are 0. The
    trajectories are of whole requests, as a shard's are.
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
    """Live trajectories of a run, each counted exactly once: merged = live + duplicates + evicted.

    value_beta: β of the ``soft_values`` that trajectories keep from their merge on; None: they keep none.
    embed: what ``similarity_limit`` compares completions by; each is embedded once, when it comes.
    """

    def __init__(
        self, config: BufferSection, seed: int, *, value_beta: float | None = None, embed: Embed | None = None
    ) -> None:
        assert (embed is None) == (config.similarity_limit is None), "a limit is one of embeddings"
        self._config = config
        self._embed = embed
        self._seed = seed
        self._value_beta = value_beta
        self._merged = 0
        self._duplicates = 0
        self._evicted = 0
        self._revision = self._sync = -1
        self._replay_ratio = 0.0
        self._prompts = _Prompts()
        self._store = self._new_store()
        # Per prompt with live trajectories: key to slot, oldest first. Plain dicts of numbers: the garbage
        # collector does not look into them.
        self._slots_of: dict[int, dict[Key, int]] = {}
        self._used_up: set[int] = set()  # slots, of which some may have left
        self._everyone = _Draw()
        self._recent = _Draw()

    def _new_store(self) -> Store:
        spelled = self._config.near_duplicates is not None
        return Store(self._config.capacity + SPARE_SLOTS, spelled=spelled)

    def __len__(self) -> int:
        """Live trajectories."""
        return self._merged - self._duplicates - self._evicted

    @property
    def prompts(self) -> int:
        """Prompts that have live trajectories."""
        return len(self._slots_of)

    @property
    def requests(self) -> int:
        """Requests of which trajectories live; counted when first asked for, and kept from then on."""
        return len(self._store.requests)

    @property
    def unlearned(self) -> int:
        """Requests of which trajectories live and none was ever in a batch; it looks at every live one."""
        slots = self._store.in_order()
        requests, used = self._store.record["request_id"][slots], self._store.uses[slots] > 0
        return len(np.unique(requests)) - len(np.unique(requests[used]))

    @property
    def kinds(self) -> np.ndarray:
        """KIND [M]: those that there are among the live trajectories; counted as ``requests``."""
        return np.array(list(self._store.kinds), KIND)

    @property
    def added(self) -> int:
        """Trajectories merged so far, less the duplicates."""
        return self._merged - self._duplicates

    @property
    def duplicates(self) -> int:
        """Trajectories given up so far for one that is equal or near."""
        return self._duplicates

    @property
    def evicted(self) -> int:
        """Trajectories that left for want of room, or were dropped, so far."""
        return self._evicted

    @property
    def replay_ratio(self) -> float:
        """Steps that have learned so far from a trajectory of the last batch, that batch included: the mean.

        Each trajectory counts once, however often the batch repeats it. 1: all were new.
        """
        return self._replay_ratio

    # --- Merging ---

    def merge(self, trajectories: Trajectories, revision: int, *, sync: int | None = None) -> Merged:
        """Add what arrived in ``revision``, by ``sync``; neither may be lower than that of the last merge.

        sync: numbers what arrives between two publishes, in however many revisions; None: a revision is one.
        Where it is the version published last, as the trainer's is, batches tell what is on-policy.
        A completion equal to a live one of its prompt replaces it (and is as young as it arrived), unless
        ``deduplicate`` is off: then each is stored. With ``near_duplicates`` or ``similarity_limit``, one
        that is near to live ones of its prompt replaces them if its reward is higher than all of theirs, and
        else is not stored: no two live completions of a prompt are near each other.
        Then the oldest leave: of a prompt above ``capacity_per_prompt``, and of all above ``capacity``.
        "Most recent" are from now on the live trajectories of this sync, unless it brought nothing.
        """
        (merged,) = self.merge_each([trajectories], revision, sync=sync)
        return merged

    def merge_each(
        self, parts: Sequence[Trajectories], revision: int, *, sync: int | None = None
    ) -> list[Merged]:
        """As ``merge`` of one after the other, and what each did; cheaper than so many calls."""
        sync = revision if sync is None else sync
        assert revision >= self._revision, f"revision {revision} comes after revision {self._revision}"
        assert sync >= self._sync, f"sync {sync} comes after sync {self._sync}"
        return [
            merged
            for first in range(0, len(parts), MERGED_AT_ONCE)
            for merged in self._merge_together(parts[first : first + MERGED_AT_ONCE], revision, sync)
        ]

    def _merge_together(self, parts: Sequence[Trajectories], revision: int, sync: int) -> list[Merged]:
        """All come at once; then part by part they take their places, and others leave for them."""
        found = [part for part in parts if len(part)]
        if not found:
            return [Merged(0, 0, 0)] * len(parts)
        if sync > self._sync:
            self._recent = _Draw()
        self._revision, self._sync = revision, sync
        prompts = [prompt for part in found for prompt in self._prompts.intern(part)]
        slots = self._store_all(found, prompts, revision, sync)
        keys = self._keys(found)
        new = self._all_new(slots, prompts, keys)
        if new is not None:
            merged = self._take_in_new(new, [len(part) for part in parts])
        else:
            merged = [
                self._take_in(slots[start:end], prompts[start:end], keys[start:end])
                for start, end in pairwise(accumulate(map(len, parts), initial=0))
            ]
        self._store.settle()
        return merged

    def _store_all(
        self, parts: Sequence[Trajectories], prompts: list[int], revision: int, sync: int
    ) -> list[int]:
        """Bring the arrays of all parts in; returns their slots."""
        record = np.concatenate([part.record for part in parts], dtype=RECORD)  # else it compares all fields
        record["prompt_row"] = prompts
        # Now, since of a request's equal or evicted completions there will be no trace.
        value: float | np.ndarray = 0.0
        if self._value_beta is not None:
            value = np.concatenate([soft_values(part, self._value_beta) for part in parts])
        completions = parts[0].completions
        if len(parts) > 1:
            completions = Ragged.concat([part.completions for part in parts])
        embeddings = None
        if self._embed:  # a part at a time: what comes with it must not change the last bits
            embeddings = np.concatenate([self._embed(part.completions) for part in parts])
        return self._store.add(
            record,
            completions,
            _joined([part.logprobs for part in parts]),
            _joined([part.ref_logprobs for part in parts]),
            revision=revision,
            sync=sync,
            uses=0,
            value=value,
            embeddings=embeddings,
        ).tolist()

    def _all_new(
        self, slots: list[int], prompts: list[int], keys: Sequence[Key]
    ) -> dict[int, dict[Key, int]] | None:
        """Keys and slots by prompt, where none is a duplicate and no prompt becomes too full, as most often.

        None where the order of coming and leaving must be looked at.
        """
        if self._config.near_duplicates is not None or self._config.similarity_limit is not None:
            return None
        new: dict[int, dict[Key, int]] = {}
        for slot, prompt, key in zip(slots, prompts, keys, strict=True):
            group = new.get(prompt)
            if group is None:
                group = new[prompt] = {}
            group[key] = slot
        if sum(map(len, new.values())) < len(slots):
            return None
        for prompt, group in new.items():
            live = self._slots_of.get(prompt, {})
            if len(live) + len(group) > self._config.capacity_per_prompt or not live.keys().isdisjoint(group):
                return None
        return new

    def _take_in_new(self, new: dict[int, dict[Key, int]], sizes: Sequence[int]) -> list[Merged]:
        """Enter what several shards of these sizes brought: for each leave as many as it has no room for.

        Whether the oldest leave in between or at the end is one, as none is replaced.
        """
        room = self._config.capacity - len(self)
        excess = [max(0, end - max(start, room)) for start, end in pairwise(accumulate(sizes, initial=0))]
        for prompt, group in new.items():
            if (live := self._slots_of.get(prompt)) is None:
                self._slots_of[prompt] = group
            else:
                live.update(group)
            self._everyone.add(prompt)
            self._recent.add(prompt)
        self._merged += sum(sizes)
        self._evict_oldest(())
        return [Merged(size, 0, evicted) for size, evicted in zip(sizes, excess, strict=True)]

    def _take_in(self, slots: list[int], prompts: list[int], keys: Sequence[Key]) -> Merged:
        """Enter what one shard brought, less duplicates; then the oldest leave."""
        if not slots:
            return Merged(0, 0, 0)
        duplicates = self._enter(slots, prompts, keys)
        self._merged += len(slots)
        self._duplicates += duplicates
        evicted = self._evict_oldest(dict.fromkeys(prompts))
        return Merged(len(slots) - duplicates, duplicates, evicted)

    def _keys(self, parts: Sequence[Trajectories]) -> Sequence[Key]:
        """Fingerprints; or, where equal completions are different ones, numbers that none has yet."""
        if self._config.deduplicate is False:
            return range(self._merged, self._merged + sum(map(len, parts)))
        return [key for part in parts for key in _fingerprints(part.completions)]

    def _enter(self, slots: list[int], prompts: list[int], keys: Sequence[Key]) -> int:
        """Enter trajectories, less duplicates; returns how many, new or old, were given up."""
        share, limit = self._config.near_duplicates, self._config.similarity_limit
        if share is not None:
            return self._insert_distinct(slots, prompts, keys, partial(self._near_by_edits, share=share))
        if limit is not None:
            return self._insert_distinct(slots, prompts, keys, partial(self._near_by_cosine, limit=limit))
        return self._insert(slots, prompts, keys)

    def _insert(self, slots: list[int], prompts: list[int], keys: Sequence[Key]) -> int:
        """Enter live slots under their prompts and keys; returns how many replaced an older one."""
        slots_of, replaced = self._slots_of, list[int]()
        for slot, prompt, key in zip(slots, prompts, keys, strict=True):
            group = slots_of.get(prompt)
            if group is None:
                group = slots_of[prompt] = {}
            if (older := group.pop(key, None)) is not None:
                replaced.append(older)
            group[key] = slot
        for prompt in dict.fromkeys(prompts):
            self._everyone.add(prompt)
            self._recent.add(prompt)
        self._store.remove(replaced)
        return len(replaced)

    def _insert_distinct(
        self, slots: list[int], prompts: list[int], keys: Sequence[Key], near_among: NearAmong
    ) -> int:
        """As ``_insert``, but of rows near each other only the best stays; returns how many were given up."""
        given_up = 0
        for prompt, found in groupby(zip(slots, prompts, keys, strict=True), itemgetter(1)):
            same = list(found)
            near_slots = self._near([slot for slot, _, _ in same], prompt, near_among)
            for (slot, _, key), near in zip(same, near_slots, strict=True):
                given_up += self._insert_best(slot, prompt, key, near)
        return given_up

    def _insert_best(self, slot: int, prompt: int, key: Key, near: np.ndarray) -> int:
        """Enter a trajectory if it is better than all ``near`` ones, which leave; or give it up.

        One that is there already, to the letter, it replaces instead. Returns how many were given up.
        """
        if key in self._slots_of.get(prompt, ()):
            return self._insert([slot], [prompt], [key])
        reward = self._store.record["reward"]
        if (reward[near] >= reward[slot]).any():
            self._store.remove([slot])
            return 1
        for worse in _fingerprints(self._store.texts(near)[0]):
            del self._slots_of[prompt][worse]
        self._store.remove(near)
        return len(near) + self._insert([slot], [prompt], [key])

    def _near(self, slots: Sequence[int], prompt: int, near_among: NearAmong) -> Iterator[np.ndarray]:
        """For each of these, all of ``prompt``: the live ones, int64, that are older than it and near it.

        Near: of the same prompt, and so by ``near_among``. Any may leave between one and the next. Looks at
        every older one of the prompt: for the cost see docs/lab-book.md.
        """
        for start in range(0, len(slots), COMPARED_AT_ONCE):
            mine = np.array(slots[start : start + COMPARED_AT_ONCE])
            older = np.array(list(self._slots_of.get(prompt, {}).values()), np.int64)
            others = np.concatenate([older, mine])
            for i, found in enumerate(near_among(mine, others)):
                found[len(older) + i :] = False
                yield others[found & self._store.live[others]]

    def _near_by_edits(self, mine: np.ndarray, others: np.ndarray, *, share: float) -> np.ndarray:
        """NearAmong: at an edit distance below ``share`` of both lengths together."""
        limit = share * (self._store.lengths(mine)[:, None] + self._store.lengths(others))
        word = self._store.words.__getitem__
        distance = cdist(
            [word(slot) for slot in mine.tolist()],
            [word(slot) for slot in others.tolist()],
            scorer=Levenshtein.distance,
            score_cutoff=int(limit.max()),
            dtype=np.int32,
        )
        near: np.ndarray = distance < limit
        return near

    def _near_by_cosine(self, mine: np.ndarray, others: np.ndarray, *, limit: float) -> np.ndarray:
        """NearAmong: embeddings at a cosine above ``limit``."""
        near: np.ndarray = self._store.embeddings(mine) @ self._store.embeddings(others).T > limit
        return near

    def _evict_oldest(self, touched: Iterable[int]) -> int:
        """Let the oldest leave, first of every touched prompt that is too full, then of all."""
        limit = self._config.capacity_per_prompt
        leaving = [
            slot
            for prompt in touched
            if len(self._slots_of[prompt]) > limit
            for slot in self._pop_oldest(prompt, len(self._slots_of[prompt]) - limit)
        ]
        self._store.remove(leaving)
        self._evicted += len(leaving)
        excess = max(0, len(self) - self._config.capacity)
        if excess:
            oldest = self._store.remove_oldest(excess)
            prompts = self._store.record["prompt_row"][oldest].tolist()
            for prompt, count in Counter(prompts).items():
                self._pop_oldest(prompt, count)  # the oldest of all are the oldest of their prompts
        self._evicted += excess
        return len(leaving) + excess

    def _pop_oldest(self, prompt: int, count: int) -> list[int]:
        """Take the oldest of a prompt out, as many as ``count``; returns their slots."""
        group = self._slots_of[prompt]
        if count == len(group):
            return list(self._slots_of.pop(prompt).values())
        return [group.pop(key) for key in list(islice(group, count))]

    def evict_where(self, unwanted: Callable[[np.ndarray], np.ndarray]) -> int:
        """Evict the live trajectories whose RECORD [N] is ``unwanted``, bool [N]; returns how many."""
        slots = self._store.in_order()
        return self._evict(slots[unwanted(self._store.record[slots])])

    def unlearned_lengths(self, wanted: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """int64 [N], tokens: of live completions whose RECORD [N] is ``wanted``, bool [N], of new requests.

        New: no step has learned from what lives of them.
        """
        slots = self._store.in_order()
        request_N, used_N = self._store.record["request_id"][slots], self._store.uses[slots] > 0
        new_N = ~np.isin(request_N, request_N[used_N])
        return self._store.lengths(slots[new_N & wanted(self._store.record[slots])])

    def evict_used_up(self, group_size: int) -> int:
        """Evict what ``replay_limit`` steps have learned from; returns how many trajectories.

        And what is left of their prompts where it is fewer than ``group_size``: a group of a few leftovers,
        repeated, would teach little. The cost depends on the batches since the last call alone.
        """
        leaving = np.array(sorted(self._used_up), np.int64)
        self._used_up.clear()
        leaving = leaving[self._store.live[leaving] & self._is_used_up(leaving)]
        prompts = np.unique(self._store.record["prompt_row"][leaving]).tolist()
        groups = [np.array(list(self._slots_of[prompt].values())) for prompt in prompts]
        left = [group[~self._is_used_up(group)] for group in groups]
        few = [slots for slots in left if len(slots) < group_size]
        return self._evict(np.concatenate([leaving, *few]))

    def _is_used_up(self, slots: np.ndarray) -> np.ndarray:
        limit = self._config.replay_limit
        used_up: np.ndarray = self._store.uses[slots] >= (np.inf if limit is None else limit)
        return used_up

    def _evict(self, leaving: np.ndarray) -> int:
        """Let live trajectories go; returns how many."""
        gone = set(leaving.tolist())
        prompts, counts = np.unique(self._store.record["prompt_row"][leaving], return_counts=True)
        for prompt, count in zip(prompts.tolist(), counts.tolist(), strict=True):
            group = self._slots_of[prompt]
            if count == len(group):
                del self._slots_of[prompt]
            else:
                self._slots_of[prompt] = {key: slot for key, slot in group.items() if slot not in gone}
        self._evicted += len(gone)
        self._store.remove(leaving)
        self._store.settle()
        return len(gone)

    # --- Sampling ---

    def sample(
        self, step: int, *, groups: int, group_size: int, reference: ReferenceLogprobs | None = None
    ) -> TrajectoryBatch:
        """B = ``groups`` groups of K = ``group_size`` trajectories, by MOP (TBA, §3).

        With probability ``most_on_policy`` a group's prompt is drawn among those with trajectories of the
        most recent sync, and its completions uniformly among these. Otherwise the prompt is drawn among
        all, and its completions by softmax(reward / reward_temperature) mixed with UNIFORM_MIX of
        uniform. Either way the completions are distinct while there are K, else all of them and repeats by
        the same weights; with ``recent_fill: older`` the prompt's older trajectories come before repeats.

        With ``oldest_first`` the prompts are instead those whose oldest trajectory is of the oldest weights,
        and of these what came first.

        Each of the two draws of prompts takes every prompt once before any again. A prompt comes once
        per batch while the buffer has others: a recent draw that has run out goes on among all prompts.

        To be in a batch is a use of a trajectory, see ``evict_used_up``; to be in it twice is one, too.
        On-policy is what version ``step`` sampled and its own sync brought: what came before that version was
        published, yet bears its number, is of steps that a resume took back.

        Randomness depends on (seed, step) alone. The cost depends on B, K and the trajectories of the
        drawn prompts, not on how much is stored.

        ``reference``: computes log-probabilities; it is given the groups in which some are not known yet.
        They are kept, so that it is asked for those of a trajectory once.
        """
        assert self._slots_of, "the buffer is filled before it is sampled"
        rng = np.random.default_rng([self._seed, _REPLAY, step])
        drawn = self._queued(groups) if self._config.oldest_first else self._drawn(rng, groups)
        slots = np.concatenate([self._choose(rng, prompt, group_size, recent=new) for prompt, new in drawn])
        self._count_uses(np.unique(slots))
        batch = self._batch(slots, group_size, step)
        return batch if reference is None else self._refer(slots, batch, reference)

    def _refer(
        self, slots: np.ndarray, batch: TrajectoryBatch, reference: ReferenceLogprobs
    ) -> TrajectoryBatch:
        """The batch with what it lacks of the reference's log-probabilities; the store has it then, too."""
        offsets = offsets_of(batch.completion_length_N)
        unknown_T = np.flatnonzero(np.isnan(batch.ref_logprobs))
        unknown_N = np.diff(np.searchsorted(unknown_T, offsets)) > 0
        groups = np.flatnonzero(unknown_N.reshape(batch.groups, -1).any(1))
        if not len(groups):
            return batch
        ref_logprobs = batch.ref_logprobs.copy()
        rows, unknown = rows_of(groups, batch.group_size), np.flatnonzero(unknown_N)
        ref_logprobs[spans(offsets, rows)[0]] = reference(take_groups(batch, groups))
        self._store.refer(slots[unknown], ref_logprobs[spans(offsets, unknown)[0]])
        return replace(batch, ref_logprobs=ref_logprobs)

    def _drawn(self, rng: np.random.Generator, groups: int) -> Iterator[tuple[int, bool]]:
        """Prompts by MOP, and whether a group is of the most recent sync; lazily, as ``rng`` is shared."""
        taken = set[int]()
        for most_recent in (rng.random(groups) < self._config.most_on_policy).tolist():
            if len(taken) == len(self._slots_of):
                taken.clear()
            prompt = self._recent.draw(rng, taken, self._is_recent) if most_recent else None
            recent = prompt is not None
            if prompt is None:
                prompt = self._everyone.draw(rng, taken, self._slots_of.__contains__)
            assert prompt is not None
            taken.add(prompt)
            yield prompt, recent

    def _queued(self, groups: int) -> Iterator[tuple[int, bool]]:
        """Prompts by the weights that sampled their oldest trajectory, and then by when it came."""
        record = self._store.record[self._store.in_order()]
        rows = record["prompt_row"][np.argsort(record["version_oldest"], kind="stable")].tolist()
        return ((prompt, False) for prompt in islice(cycle(dict.fromkeys(rows)), groups))

    def _count_uses(self, slots: np.ndarray) -> None:
        """One more of each."""
        self._store.uses[slots] += 1
        self._replay_ratio = float(self._store.uses[slots].mean())
        if self._config.replay_limit is not None:
            self._used_up.update(slots[self._is_used_up(slots)].tolist())

    def _is_recent(self, prompt: int) -> bool:
        """Whether the youngest live trajectory of a prompt is of the most recent sync."""
        group = self._slots_of.get(prompt)
        return group is not None and bool(self._store.sync[next(reversed(group.values()))] == self._sync)

    def _choose(self, rng: np.random.Generator, prompt: int, count: int, *, recent: bool) -> np.ndarray:
        """int64 [K] slots of a prompt.

        Gumbel top-k: the largest of log weight + Gumbel noise are a draw without replacement by weight.
        """
        group = self._slots_of[prompt]
        slots = np.fromiter(group.values(), np.int64, len(group))
        first = recent & (self._store.sync[slots] == self._sync)
        if recent:
            slots, first = slots[first], first[first]
        weight = self._weights(self._store.record["reward"][slots], equal=bool(first.all()))
        log_weight = np.log(np.maximum(weight, np.finfo(weight.dtype).tiny))
        score = np.where(first, 0.0, log_weight) + rng.gumbel(size=len(slots))
        distinct = slots[np.lexsort((-score, ~first))[:count]]
        if len(distinct) == count:
            return distinct
        repeats = rng.choice(slots, count - len(distinct), p=weight)
        return np.concatenate([distinct, repeats])

    def _weights(self, reward_N: np.ndarray, *, equal: bool) -> np.ndarray:
        """float64 [N]: probability of each trajectory of a prompt, by reward unless ``equal``."""
        uniform = np.full(len(reward_N), 1 / len(reward_N))
        temperature, mix = self._config.reward_temperature, UNIFORM_MIX
        if equal or temperature is None:
            return uniform
        odds = np.exp((reward_N.astype(np.float64) - reward_N.max()) / temperature)
        return (1 - mix) * odds / odds.sum() + mix * uniform

    def _batch(self, slots: np.ndarray, group_size: int, step: int) -> TrajectoryBatch:
        record = self._store.record[slots]
        on_policy_N = self._store.sync[slots] == step
        for end in ("version_oldest", "version_newest"):
            on_policy_N &= record[end] == step
        prompts = self._prompts.take(record["prompt_row"].astype(np.int64))
        completions, logprobs, ref_logprobs = self._store.texts(slots)
        turns = np.arange(2 * len(slots)).reshape(2, -1).T.ravel()  # prompt, completion, prompt, …
        pairs = Ragged.concat([prompts, completions]).take(turns)
        return TrajectoryBatch(
            group_size=group_size,
            sequences=Ragged(pairs.values, pairs.offsets[::2]),
            prompt_length_N=prompts.lengths,
            reward_N=record["reward"].copy(),
            value_N=self._store.value[slots],
            version_N=record["version_oldest"].copy(),
            on_policy_N=on_policy_N,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            ages=token_ages(record, completions.lengths, step),
            prompt_id_B=record["prompt_id"][::group_size].copy(),
        )

    # --- Saving ---

    def trajectories(self) -> Trajectories:
        """A copy of all live trajectories, oldest first; ``prompts`` holds every prompt ever seen."""
        snapshot = self._store.snapshot()
        return Trajectories(snapshot.columns()["record"], self._prompts.ragged, *snapshot.texts())

    def state(self) -> dict[str, np.ndarray]:
        """Plain arrays from which ``restore`` makes a buffer that goes on exactly as this one would."""
        return self.snapshot().arrays()

    def snapshot(self) -> BufferSnapshot:
        """The state of this moment, of which little is copied now; see ``BufferSnapshot``."""
        return BufferSnapshot(
            counters=(self._merged, self._duplicates, self._evicted),
            newest=(self._revision, self._sync),
            live=self._store.snapshot(),
            prompt_ids=self._prompts.ids,
            prompts=self._prompts.ragged,
            draws={"everyone": self._everyone.piles, "recent": self._recent.piles},
            embedded=self._embed is not None,
        )

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Become the buffer whose ``state`` the arrays are; what was here before is dropped."""
        completions = Ragged(arrays["completion_tokens"], arrays["completion_offsets"])
        prompts = Ragged(arrays["prompt_tokens"], arrays["prompt_offsets"])
        self._prompts = _Prompts.restore(arrays["prompt_id"], prompts)
        self._store = self._new_store()
        slots = self._store.add(
            arrays["record"],
            completions,
            arrays["logprobs"],
            arrays["ref_logprobs"],
            revision=arrays["revision"],
            sync=arrays["sync"],
            uses=arrays["uses"],
            value=arrays.get("value", 0.0),  # checkpoints of older versions have none, and no use for any
            embeddings=arrays["embeddings"] if self._embed else None,
        )
        self._slots_of, self._used_up = {}, set(slots[self._is_used_up(slots)].tolist())
        keys = _fingerprints(completions) if self._config.deduplicate is not False else range(len(slots))
        self._insert(slots.tolist(), arrays["record"]["prompt_row"].tolist(), keys)
        self._merged, self._duplicates, self._evicted = arrays["counters"].tolist()
        self._revision, self._sync = arrays["newest"].tolist()
        self._everyone = _Draw(arrays["everyone_waiting"], arrays["everyone_drawn"])
        self._recent = _Draw(arrays["recent_waiting"], arrays["recent_drawn"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """The state of a replay buffer at a moment; any thread may ask for the arrays while the buffer goes on.

    To keep it keeps the memory of what has left the buffer since.
    """

    counters: tuple[int, int, int]
    newest: tuple[int, int]
    live: StoreSnapshot
    prompt_ids: list[int]
    prompts: Ragged
    draws: Mapping[str, Mapping[str, list[int]]]
    embedded: bool

    def arrays(self) -> dict[str, np.ndarray]:
        """Plain arrays from which ``ReplayBuffer.restore`` makes the buffer of that moment; a copy of all."""
        columns = self.live.columns()
        completions, logprobs, ref_logprobs = self.live.texts()
        draws = {
            f"{draw}_{pile}": np.array(prompts, np.int64)
            for draw, piles in self.draws.items()
            for pile, prompts in piles.items()
        }
        embeddings = columns.get("embeddings", np.empty((0, 1), np.float32))
        return {
            "counters": np.array(self.counters, np.int64),
            "newest": np.array(self.newest, np.int64),
            "record": columns["record"],
            "revision": columns["revision"],
            "sync": columns["sync"],
            "uses": self.live.uses_N,
            "value": columns["value"],
            "completion_tokens": completions.values,
            "completion_offsets": completions.offsets,
            "logprobs": logprobs,
            "ref_logprobs": ref_logprobs,
            "prompt_id": np.array(self.prompt_ids, np.int64),
            "prompt_tokens": self.prompts.values,
            "prompt_offsets": self.prompts.offsets,
            **({"embeddings": embeddings} if self.embedded else {}),
            **draws,
        }


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _fingerprints(completions: Ragged) -> list[int]:
    """A number per completion that is equal where its tokens are, and (2⁻⁶⁴) only there; of this process.

    Python's own hash of bytes, which nobody can aim at: a quarter of the time of a cryptographic one.
    """
    data = completions.values.astype("<i4", copy=False).tobytes()
    ends = (completions.offsets * 4).tolist()
    return [hash(data[start:end]) for start, end in pairwise(ends)]


class _Draw:
    """Prompts in random order, each once before any comes again; a draw costs the same for any number.

    waiting: not yet drawn in this pass. drawn: the others. Prompts that have become useless are
    dropped when a draw comes upon them.
    """

    def __init__(self, waiting: Iterable[int] = (), drawn: Iterable[int] = ()) -> None:
        self._waiting = [int(prompt) for prompt in waiting]
        self._drawn = [int(prompt) for prompt in drawn]
        self._members = {*self._waiting, *self._drawn}

    @property
    def piles(self) -> dict[str, list[int]]:
        """A copy of the arguments that make an equal draw."""
        return {"waiting": self._waiting.copy(), "drawn": self._drawn.copy()}

    def add(self, prompt: int) -> None:
        """Let a prompt take part, from this pass on, unless it does already."""
        if prompt not in self._members:
            self._members.add(prompt)
            self._waiting.append(prompt)

    def draw(self, rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]) -> int | None:
        """The next useful prompt that is not taken, or None; those taken keep their turn."""
        prompt = self._pick(self._waiting, rng, taken, useful)
        if prompt is None and (prompt := self._pick(self._drawn, rng, taken, useful)) is not None:
            self._drawn += self._waiting  # only taken prompts still wait: the next pass begins
            self._waiting, self._drawn = self._drawn, []
        if prompt is not None:
            self._drawn.append(prompt)
        return prompt

    def _pick(
        self, pile: list[int], rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]
    ) -> int | None:
        """Remove a random prompt that is useful and not taken from a pile, and all useless ones met."""
        passed_over, found = [], None
        while pile and found is None:
            prompt = _pop(pile, int(rng.integers(len(pile))))
            if not useful(prompt):
                self._members.remove(prompt)
            elif prompt in taken:
                passed_over.append(prompt)
            else:
                found = prompt
        pile += passed_over
        return found


def _pop(pile: list[int], place: int) -> int:
    """Remove what is at ``place``; the last takes its place."""
    prompt, pile[place] = pile[place], pile[-1]
    pile.pop()
    return prompt


class _Prompts:
    """The tokens of every prompt seen, once each; prompts are known to the buffer by their row here."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._tokens = Column(np.int32)
        self._offsets = Column(np.int64, [0])

    @classmethod
    def restore(cls, ids: np.ndarray, prompts: Ragged) -> _Prompts:
        """Inverse of ``ids``, int64 [P], and ``ragged``."""
        made = cls()
        made._row_of = {prompt: row for row, prompt in enumerate(ids.tolist())}
        made._tokens.append(prompts.values)
        made._offsets.append(prompts.offsets[1:])
        return made

    @property
    def ids(self) -> list[int]:
        """Of all prompts, a copy."""
        return list(self._row_of)

    @property
    def ragged(self) -> Ragged:
        """A view of all prompts, which stays as it is."""
        return Ragged(self._tokens.values, self._offsets.values)

    def intern(self, trajectories: Trajectories) -> list[int]:
        """The row here of every trajectory's prompt, which is added where it is new."""
        record = trajectories.record
        there_N = record["prompt_row"].tolist()
        id_of = dict(zip(there_N, record["prompt_id"].tolist(), strict=True))
        for there in sorted(id_of):
            if id_of[there] not in self._row_of:
                self._append(id_of[there], trajectories.prompts.row(there))
        row_of = {there: self._row_of[prompt] for there, prompt in id_of.items()}
        return [row_of[there] for there in there_N]

    def _append(self, prompt: int, tokens: np.ndarray) -> None:
        self._row_of[prompt] = len(self._row_of)
        self._tokens.append(tokens)
        self._offsets.append([len(self._tokens)])

    def take(self, rows: np.ndarray) -> Ragged:
        """A copy of the given rows."""
        index_T, offsets = spans(self._offsets.values, rows)
        return Ragged(self._tokens.values[index_T], offsets)
