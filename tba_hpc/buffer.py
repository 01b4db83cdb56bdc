"""The replay buffer: completions per prompt, bounded in number, sampled as groups (MOP).

It must not know where trajectories come from or what is learned from them. Imports no torch.

Rows lie in flat arrays in order of arrival, so a smaller row number means older. A row that leaves is
only marked; when such rows (or their tokens) outnumber the live ones, the arrays are written anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba_hpc.config import BufferSection
from tba_hpc.types import RECORD, Ragged, Trajectories, TrajectoryBatch, spans

Key = bytes | int
"""What tells the live completions of a prompt apart."""

_REPLAY = int.from_bytes(b"replay")  # keeps this stream apart from others of the same seed

COMPARED_AT_ONCE = 128
"""New completions whose edit distances or cosines to all others are held at once: memory against speed."""

Embed = Callable[[Ragged], np.ndarray]
"""Embeddings of completions (int32 tokens), float32 [N, D], rows of length 1."""

NearAmong = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Which of some rows [M] and others [O] are near each other, bool [M, O]."""


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
        self._rows = _Rows()
        # Per prompt with live rows: key to row, oldest first.
        self._rows_of: dict[int, OrderedDict[Key, int]] = {}
        self._everyone = _Draw()
        self._recent = _Draw()

    def __len__(self) -> int:
        """Live trajectories."""
        return self._merged - self._duplicates - self._evicted

    @property
    def prompts(self) -> int:
        """Prompts that have live trajectories."""
        return len(self._rows_of)

    @property
    def requests(self) -> int:
        """Requests of which trajectories live. The cost grows with what is stored."""
        return len(np.unique(self._rows.record["request_id"][self._rows.live]))

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
        sync = revision if sync is None else sync
        assert revision >= self._revision, f"revision {revision} comes after revision {self._revision}"
        assert sync >= self._sync, f"sync {sync} comes after sync {self._sync}"
        if not len(trajectories):
            return Merged(0, 0, 0)
        if sync > self._sync:
            self._recent = _Draw()
        self._revision, self._sync = revision, sync
        first = len(self._rows)
        prompt_N = self._prompts.intern(trajectories)
        # Now, since of a request's equal or evicted completions there will be no trace.
        value_N = soft_values(trajectories, self._value_beta)
        self._rows.append(trajectories, prompt_N, revision=revision, sync=sync, uses=0, value=value_N)
        if self._embed:
            self._rows.append_embeddings(self._embed(trajectories.completions))
        keys = self._keys(trajectories.completions, self._merged)
        duplicates = self._enter(range(first, len(self._rows)), prompt_N.tolist(), keys)
        self._merged += len(trajectories)
        self._duplicates += duplicates
        evicted = self._evict_oldest(dict.fromkeys(prompt_N.tolist()))
        if self._rows.mostly_dead:
            self._compact()
        return Merged(len(trajectories) - duplicates, duplicates, evicted)

    def _keys(self, completions: Ragged, first: int) -> Sequence[Key]:
        """Fingerprints; or, where equal completions are different ones, numbers from ``first`` on."""
        if self._config.deduplicate is False:
            return range(first, first + len(completions))
        return _fingerprints(completions)

    def _enter(self, rows: Iterable[int], prompts: list[int], keys: Sequence[Key]) -> int:
        """Enter new rows, less duplicates; returns how many rows, new or old, were given up."""
        share, limit = self._config.near_duplicates, self._config.similarity_limit
        if share is not None:
            return self._insert_distinct(rows, prompts, keys, partial(self._rows.near_by_edits, share=share))
        if limit is not None:
            return self._insert_distinct(rows, prompts, keys, partial(self._rows.near_by_cosine, limit=limit))
        return self._insert(rows, prompts, keys)

    def _insert(self, rows: Iterable[int], prompts: list[int], keys: Sequence[Key]) -> int:
        """Enter live rows under their prompts and keys; returns how many replaced an older row."""
        replaced = []
        for row, prompt, key in zip(rows, prompts, keys, strict=True):
            group = self._rows_of.setdefault(prompt, OrderedDict())
            if (older := group.pop(key, None)) is not None:
                replaced.append(older)
            group[key] = row
            self._everyone.add(prompt)
            self._recent.add(prompt)
        self._rows.kill(replaced)
        return len(replaced)

    def _insert_distinct(
        self, rows: Iterable[int], prompts: list[int], keys: Sequence[Key], near_among: NearAmong
    ) -> int:
        """As ``_insert``, but of rows near each other only the best stays; returns how many were given up."""
        given_up = 0
        for prompt, found in groupby(zip(rows, prompts, keys, strict=True), itemgetter(1)):
            entries = list(found)
            near_rows = self._rows.near([row for row, _, _ in entries], near_among)
            for (row, _, key), near in zip(entries, near_rows, strict=True):
                given_up += self._insert_best(row, prompt, key, near)
        return given_up

    def _insert_best(self, row: int, prompt: int, key: Key, near: np.ndarray) -> int:
        """Enter a row if it is better than all ``near`` ones, which leave; or give it up.

        One that is there already, to the letter, it replaces instead. Returns how many were given up.
        """
        if key in self._rows_of.get(prompt, ()):
            return self._insert([row], [prompt], [key])
        reward = self._rows.record["reward"]
        if (reward[near] >= reward[row]).any():
            self._rows.kill([row])
            return 1
        for worse in _fingerprints(self._rows.texts(near)[0]):
            del self._rows_of[prompt][worse]
        self._rows.kill(near)
        return len(near) + self._insert([row], [prompt], [key])

    def _evict_oldest(self, touched: Iterable[int]) -> int:
        """Let the oldest leave, first of every touched prompt that is too full, then of all."""
        leaving = [
            self._rows_of[prompt].popitem(last=False)[1]
            for prompt in touched
            for _ in range(len(self._rows_of[prompt]) - self._config.capacity_per_prompt)
        ]
        self._evicted += len(leaving)
        self._rows.kill(leaving)
        oldest = self._rows.oldest(max(0, len(self) - self._config.capacity))
        for prompt in self._rows.record[oldest]["prompt_row"].tolist():
            self._rows_of[prompt].popitem(last=False)  # the oldest of all is the oldest of its prompt
            if not self._rows_of[prompt]:
                del self._rows_of[prompt]
        self._evicted += len(oldest)
        self._rows.kill(oldest)
        return len(leaving) + len(oldest)

    def evict_where(self, unwanted: Callable[[np.ndarray], np.ndarray]) -> int:
        """Evict the live trajectories whose RECORD [N] is ``unwanted``, bool [N]; returns how many."""
        live = np.flatnonzero(self._rows.live)
        return self._evict(live[unwanted(self._rows.record[live])])

    def evict_used_up(self, group_size: int) -> int:
        """Evict what ``replay_limit`` steps have learned from; returns how many trajectories.

        And what is left of their prompts where it is fewer than ``group_size``: a group of a few leftovers,
        repeated, would teach little.
        """
        if self._config.replay_limit is None:
            return 0
        live = np.flatnonzero(self._rows.live)
        prompt_N = self._rows.record["prompt_row"][live].astype(np.int64)
        used_up_N = self._rows.uses[live] >= self._config.replay_limit
        left_P = np.bincount(prompt_N, ~used_up_N, minlength=len(self._prompts))
        touched_P = np.bincount(prompt_N, used_up_N, minlength=len(self._prompts)) > 0
        leftover_N = (touched_P & (left_P < group_size))[prompt_N]
        return self._evict(live[used_up_N | leftover_N])

    def _evict(self, leaving: np.ndarray) -> int:
        """Let live rows go; returns how many."""
        gone = set(leaving.tolist())
        for prompt in np.unique(self._rows.record["prompt_row"][leaving]).tolist():
            kept = OrderedDict((key, row) for key, row in self._rows_of[prompt].items() if row not in gone)
            if kept:
                self._rows_of[prompt] = kept
            else:
                del self._rows_of[prompt]
        self._evicted += len(gone)
        self._rows.kill(leaving)
        if self._rows.mostly_dead:
            self._compact()
        return len(gone)

    def _compact(self) -> None:
        live = np.flatnonzero(self._rows.live)
        row_after = np.cumsum(self._rows.live) - 1
        self._rows = self._rows.take(live)
        for group in self._rows_of.values():
            for key, row in group.items():
                group[key] = int(row_after[row])

    # --- Sampling ---

    def sample(self, step: int, *, groups: int, group_size: int) -> TrajectoryBatch:
        """B = ``groups`` groups of K = ``group_size`` trajectories, by MOP (TBA, §3).

        With probability ``most_on_policy`` a group's prompt is drawn among those with trajectories of the
        most recent sync, and its completions uniformly among these. Otherwise the prompt is drawn among
        all, and its completions by softmax(reward / reward_temperature) mixed with ``uniform_mix`` of
        uniform. Either way the completions are distinct while there are K, else all of them and repeats by
        the same weights; with ``recent_fill: older`` the prompt's older trajectories come before repeats.

        Each of the two draws of prompts takes every prompt once before any again. A prompt comes once
        per batch while the buffer has others: a recent draw that has run out goes on among all prompts.

        To be in a batch is a use of a trajectory, see ``evict_used_up``; to be in it twice is one, too.
        On-policy is what version ``step`` sampled and its own sync brought: what came before that version was
        published, yet bears its number, is of steps that a resume took back.

        Randomness depends on (seed, step) alone. The cost depends on B, K and the trajectories of the
        drawn prompts, not on how much is stored.
        """
        assert self._rows_of, "the buffer is filled before it is sampled"
        rng = np.random.default_rng([self._seed, _REPLAY, step])
        chosen, taken = [], set[int]()
        for most_recent in (rng.random(groups) < self._config.most_on_policy).tolist():
            if len(taken) == len(self._rows_of):
                taken.clear()
            prompt = self._recent.draw(rng, taken, self._is_recent) if most_recent else None
            recent = prompt is not None
            if prompt is None:
                prompt = self._everyone.draw(rng, taken, self._rows_of.__contains__)
            assert prompt is not None
            taken.add(prompt)
            chosen.append(self._choose(rng, prompt, group_size, recent=recent))
        rows = np.concatenate(chosen)
        distinct = np.unique(rows)
        self._rows.uses[distinct] += 1
        self._replay_ratio = float(self._rows.uses[distinct].mean())
        return self._batch(rows, group_size, step)

    def _is_recent(self, prompt: int) -> bool:
        """Whether the youngest live trajectory of a prompt is of the most recent sync."""
        group = self._rows_of.get(prompt)
        return group is not None and bool(self._rows.sync[next(reversed(group.values()))] == self._sync)

    def _choose(self, rng: np.random.Generator, prompt: int, count: int, *, recent: bool) -> np.ndarray:
        """int64 [K] rows of a prompt.

        Gumbel top-k: the largest of log weight + Gumbel noise are a draw without replacement by weight.
        """
        group = self._rows_of[prompt]
        rows = np.fromiter(group.values(), np.int64, len(group))
        first = recent & (self._rows.sync[rows] == self._sync)
        if recent and self._config.recent_fill == "repeat":
            rows, first = rows[first], first[first]
        weight = self._weights(self._rows.record["reward"][rows], equal=bool(first.all()))
        log_weight = np.log(np.maximum(weight, np.finfo(weight.dtype).tiny))
        score = np.where(first, 0.0, log_weight) + rng.gumbel(size=len(rows))
        distinct = rows[np.lexsort((-score, ~first))[:count]]
        repeats = rng.choice(rows, count - len(distinct), p=weight)
        return np.concatenate([distinct, repeats])

    def _weights(self, reward_N: np.ndarray, *, equal: bool) -> np.ndarray:
        """float64 [N]: probability of each trajectory of a prompt, by reward unless ``equal``."""
        uniform = np.full(len(reward_N), 1 / len(reward_N))
        temperature, mix = self._config.reward_temperature, self._config.uniform_mix
        if equal or temperature is None:
            return uniform
        odds = np.exp((reward_N.astype(np.float64) - reward_N.max()) / temperature)
        return (1 - mix) * odds / odds.sum() + mix * uniform

    def _batch(self, rows: np.ndarray, group_size: int, step: int) -> TrajectoryBatch:
        record = self._rows.record[rows]
        on_policy_N = self._rows.sync[rows] == step
        for end in ("version_oldest", "version_newest"):
            on_policy_N &= record[end] == step
        prompts = self._prompts.take(record["prompt_row"].astype(np.int64))
        completions, logprobs, ref_logprobs = self._rows.texts(rows)
        turns = np.arange(2 * len(rows)).reshape(2, -1).T.ravel()  # prompt, completion, prompt, …
        pairs = Ragged.concat([prompts, completions]).take(turns)
        return TrajectoryBatch(
            group_size=group_size,
            sequences=Ragged(pairs.values, pairs.offsets[::2]),
            prompt_length_N=prompts.lengths,
            reward_N=record["reward"].copy(),
            value_N=self._rows.value[rows],
            version_N=record["version_oldest"].copy(),
            on_policy_N=on_policy_N,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            prompt_id_B=record["prompt_id"][::group_size].copy(),
        )

    # --- Saving ---

    def trajectories(self) -> Trajectories:
        """A copy of all live trajectories, oldest first; ``prompts`` holds every prompt ever seen."""
        rows = np.flatnonzero(self._rows.live)
        completions, logprobs, ref_logprobs = self._rows.texts(rows)
        return Trajectories(
            self._rows.record[rows], self._prompts.ragged, completions, logprobs, ref_logprobs
        )

    def state(self) -> dict[str, np.ndarray]:
        """Plain arrays from which ``restore`` makes a buffer that goes on exactly as this one would."""
        live = self.trajectories()
        return {
            "counters": np.array([self._merged, self._duplicates, self._evicted], np.int64),
            "newest": np.array([self._revision, self._sync], np.int64),
            "record": live.record,
            "revision": self._rows.revision[self._rows.live],
            "sync": self._rows.sync[self._rows.live],
            "uses": self._rows.uses[self._rows.live],
            "value": self._rows.value[self._rows.live],
            "completion_tokens": live.completions.values,
            "completion_offsets": live.completions.offsets,
            "logprobs": live.logprobs,
            "ref_logprobs": live.ref_logprobs,
            "prompt_id": self._prompts.ids,
            "prompt_tokens": live.prompts.values,
            "prompt_offsets": live.prompts.offsets,
            **({} if self._embed is None else {"embeddings": self._rows.embeddings[self._rows.live]}),
            **{f"everyone_{name}": array for name, array in self._everyone.state().items()},
            **{f"recent_{name}": array for name, array in self._recent.state().items()},
        }

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Become the buffer whose ``state`` the arrays are; what was here before is dropped."""
        live = Trajectories(
            arrays["record"],
            Ragged(arrays["prompt_tokens"], arrays["prompt_offsets"]),
            Ragged(arrays["completion_tokens"], arrays["completion_offsets"]),
            arrays["logprobs"],
            arrays["ref_logprobs"],
        )
        prompt_N = live.record["prompt_row"].astype(np.int64)
        self._prompts = _Prompts.restore(arrays["prompt_id"], live.prompts)
        self._rows = _Rows()
        columns = {name: arrays[name] for name in ("revision", "sync", "uses")}
        value = arrays.get("value", 0.0)  # checkpoints of older versions have none, and no use for any
        self._rows.append(live, prompt_N, **columns, value=value)
        if self._embed:
            self._rows.append_embeddings(arrays["embeddings"])
        self._rows_of = {}
        self._insert(range(len(live)), prompt_N.tolist(), self._keys(live.completions, 0))
        self._merged, self._duplicates, self._evicted = arrays["counters"].tolist()
        self._revision, self._sync = arrays["newest"].tolist()
        self._everyone = _Draw(arrays["everyone_waiting"], arrays["everyone_drawn"])
        self._recent = _Draw(arrays["recent_waiting"], arrays["recent_drawn"])


def _fingerprints(completions: Ragged) -> list[bytes]:
    """16 bytes per completion that are equal where its tokens are, and (2⁻¹²⁸) only there."""
    data = completions.values.astype("<i4", copy=False).tobytes()
    ends = (completions.offsets * 4).tolist()
    return [blake2b(data[start:end], digest_size=16).digest() for start, end in pairwise(ends)]


class _Draw:
    """Prompts in random order, each once before any comes again; a draw costs the same for any number.

    waiting: not yet drawn in this pass. drawn: the others. Prompts that have become useless are
    dropped when a draw comes upon them.
    """

    def __init__(self, waiting: Iterable[int] = (), drawn: Iterable[int] = ()) -> None:
        self._waiting = [int(prompt) for prompt in waiting]
        self._drawn = [int(prompt) for prompt in drawn]
        self._members = {*self._waiting, *self._drawn}

    def state(self) -> dict[str, np.ndarray]:
        """Arguments that make an equal draw."""
        return {"waiting": np.array(self._waiting, np.int64), "drawn": np.array(self._drawn, np.int64)}

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
        self._tokens = _Column(np.int32)
        self._offsets = _Column(np.int64, [0])

    @classmethod
    def restore(cls, ids: np.ndarray, prompts: Ragged) -> _Prompts:
        """Inverse of ``ids`` and ``ragged``."""
        made = cls()
        made._row_of = {prompt: row for row, prompt in enumerate(ids.tolist())}
        made._tokens.append(prompts.values)
        made._offsets.append(prompts.offsets[1:])
        return made

    @property
    def ids(self) -> np.ndarray:
        """int64 [P]."""
        return np.array(list(self._row_of), np.int64)

    def __len__(self) -> int:
        """Prompts seen."""
        return len(self._row_of)

    @property
    def ragged(self) -> Ragged:
        """A copy of all prompts."""
        return Ragged(self._tokens.values.copy(), self._offsets.values.copy())

    def intern(self, trajectories: Trajectories) -> np.ndarray:
        """int64 [N]: the row here of every trajectory's prompt, which is added where it is new."""
        used, first = np.unique(trajectories.record["prompt_row"], return_index=True)
        row_P = np.zeros(len(trajectories.prompts), np.int64)
        ids = trajectories.record["prompt_id"][first].tolist()
        for there, prompt in zip(used.tolist(), ids, strict=True):
            if prompt not in self._row_of:
                self._row_of[prompt] = len(self._row_of)
                self._tokens.append(trajectories.prompts.row(there))
                self._offsets.append([len(self._tokens)])
            row_P[there] = self._row_of[prompt]
        return row_P[trajectories.record["prompt_row"]]

    def take(self, rows: np.ndarray) -> Ragged:
        """A copy of the given rows."""
        index_T, offsets = spans(self._offsets.values, rows)
        return Ragged(self._tokens.values[index_T], offsets)


class _Rows:
    """Trajectories in order of arrival, live and dead."""

    def __init__(self) -> None:
        self._record = _Column(RECORD)
        self._revision = _Column(np.int64)
        self._sync = _Column(np.int64)
        self._uses = _Column(np.int32)
        self._value = _Column(np.float32)
        self._live = _Column(np.bool_)
        self._offsets = _Column(np.int64, [0])
        self._tokens = _Column(np.int32)
        self._logprobs = _Column(np.float32)
        self._ref_logprobs = _Column(np.float32)
        self._words = _Column(object)  # a character per token; only edit distances need any
        self._embeddings = _Column(np.float32)  # D per row; only similarities need any
        self._embedding_size = 1
        self._dead_rows = 0
        self._dead_tokens = 0

    def __len__(self) -> int:
        return len(self._record)

    @property
    def record(self) -> np.ndarray:
        """RECORD [N]; ``prompt_row`` is the buffer's own."""
        return self._record.values

    @property
    def revision(self) -> np.ndarray:
        """int64 [N]: the buffer's revision that brought it."""
        return self._revision.values

    @property
    def sync(self) -> np.ndarray:
        """int64 [N]: the sync that brought it."""
        return self._sync.values

    @property
    def uses(self) -> np.ndarray:
        """int32 [N]: steps in whose batch it was."""
        return self._uses.values

    @property
    def value(self) -> np.ndarray:
        """float32 [N]: V̂ of its request, 0 where the buffer keeps none."""
        return self._value.values

    @property
    def live(self) -> np.ndarray:
        """bool [N]."""
        return self._live.values

    @property
    def embeddings(self) -> np.ndarray:
        """float32 [N, D], of length 1; none where they are not kept."""
        return self._embeddings.values.reshape(-1, self._embedding_size)

    @property
    def mostly_dead(self) -> bool:
        """Whether more than half of the rows, or of the tokens, are garbage."""
        return 2 * self._dead_rows > len(self) or 2 * self._dead_tokens > len(self._tokens)

    def append(
        self,
        trajectories: Trajectories,
        prompt_N: np.ndarray,
        *,
        revision: int | np.ndarray,
        sync: int | np.ndarray,
        uses: int | np.ndarray,
        value: float | np.ndarray,
    ) -> None:
        """Add live rows."""
        count, tokens = len(trajectories), len(self._tokens)
        record = trajectories.record.copy()
        record["prompt_row"] = prompt_N
        self._record.append(record)
        self._revision.append(np.broadcast_to(revision, count))
        self._sync.append(np.broadcast_to(sync, count))
        self._uses.append(np.broadcast_to(uses, count))
        self._value.append(np.broadcast_to(value, count))
        self._live.append(np.ones(count, bool))
        self._offsets.append(tokens + trajectories.completions.offsets[1:])
        self._tokens.append(trajectories.completions.values)
        self._logprobs.append(trajectories.logprobs)
        self._ref_logprobs.append(trajectories.ref_logprobs)

    def kill(self, rows: list[int] | np.ndarray) -> None:
        """Mark rows, each live until now, as dead."""
        rows = np.asarray(rows, np.int64)
        offsets = self._offsets.values
        self.live[rows] = False
        self._dead_rows += len(rows)
        self._dead_tokens += int((offsets[rows + 1] - offsets[rows]).sum())

    def oldest(self, count: int) -> np.ndarray:
        """int64 [count]: the live rows that came first."""
        return np.flatnonzero(self.live)[:count] if count else np.empty(0, np.int64)

    def texts(self, rows: np.ndarray) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """Copies of the completions of ``rows``, their log-probabilities and the reference's."""
        index_T, offsets = spans(self._offsets.values, rows)
        tokens = Ragged(self._tokens.values[index_T], offsets)
        return tokens, self._logprobs.values[index_T], self._ref_logprobs.values[index_T]

    def near(self, rows: Sequence[int], near_among: NearAmong) -> Iterator[np.ndarray]:
        """For each of these rows, of one prompt: the live ones, int64, that are older than it and near it.

        Near: of the same prompt, and so by ``near_among``. Rows may be killed between one and the next. Looks
        at every older row of the prompt: for the cost see docs/lab-book.md.
        """
        for start in range(0, len(rows), COMPARED_AT_ONCE):
            mine = np.array(rows[start : start + COMPARED_AT_ONCE])
            prompt_N = self.record["prompt_row"]
            others = np.flatnonzero(self.live & (prompt_N == prompt_N[mine[0]]))
            for found in near_among(mine, others) & (others < mine[:, None]):
                yield others[found & self.live[others]]

    def near_by_edits(self, mine: np.ndarray, others: np.ndarray, *, share: float) -> np.ndarray:
        """NearAmong: at an edit distance below ``share`` of both lengths together."""
        self._spell()
        length_N = np.diff(self._offsets.values)
        limit = share * (length_N[mine, None] + length_N[others])
        distance = cdist(
            self._words.values[mine],
            self._words.values[others],
            scorer=Levenshtein.distance,
            score_cutoff=int(limit.max()),
            dtype=np.int32,
        )
        near: np.ndarray = distance < limit
        return near

    def near_by_cosine(self, mine: np.ndarray, others: np.ndarray, *, limit: float) -> np.ndarray:
        """NearAmong: embeddings at a cosine above ``limit``."""
        near: np.ndarray = self.embeddings[mine] @ self.embeddings[others].T > limit
        return near

    def append_embeddings(self, embedding_ND: np.ndarray) -> None:
        """Add those of the rows that have none yet, float32 [N, D]."""
        self._embedding_size = embedding_ND.shape[1]
        self._embeddings.append(embedding_ND.ravel())

    def _spell(self) -> None:
        """Make words of the rows that have none yet."""
        new = self.texts(np.arange(len(self._words), len(self)))[0]
        self._words.append([_word(new.row(i)) for i in range(len(new))])

    def take(self, rows: np.ndarray) -> _Rows:
        """New rows that hold only the given ones, all live."""
        completions, logprobs, ref_logprobs = self.texts(rows)
        nothing = Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
        kept = Trajectories(self.record[rows], nothing, completions, logprobs, ref_logprobs)
        made = _Rows()
        made.append(
            kept,
            kept.record["prompt_row"],
            revision=self.revision[rows],
            sync=self.sync[rows],
            uses=self.uses[rows],
            value=self.value[rows],
        )
        if len(self._embeddings):
            made.append_embeddings(self.embeddings[rows])
        return made


def _word(tokens: np.ndarray) -> str:
    """Tokens as characters, which is what edit distances are computed of."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


class _Column:
    """A one-dimensional array that grows at its end, by doubling."""

    def __init__(self, dtype: np.typing.DTypeLike, values: Iterable[int] = ()) -> None:
        self._data = np.array(list(values), dtype)
        self._length = len(self._data)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """A view of what is filled."""
        return self._data[: self._length]

    def append(self, values: np.ndarray | list[int] | list[str]) -> None:
        """Add values at the end."""
        end = self._length + len(values)
        if end > len(self._data):
            grown = np.empty(max(end, 2 * len(self._data)), self._data.dtype)
            grown[: self._length] = self.values
            self._data = grown
        self._data[self._length : end] = values
        self._length = end
