"""Sampling from the replay buffer: most-on-policy with probability m, otherwise by reward (TBA, §3).

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice

import numpy as np

from tba_hpc.config import BufferSection
from tba_hpc.core.live_store import LiveStore, Row

_REPLAY = int.from_bytes(b"replay")  # keeps this random stream apart from others of the same seed

UNIFORM_MIX = 0.1
"""Share of the uniform distribution in the probabilities with which a prompt's trajectories are drawn. The
rest is a softmax of their rewards."""


class Sampler:
    """Chooses the trajectories of each step's batch from a store.

    queue: take the oldest trajectories first instead of drawing at random. sync: number of the newest sync
    that added trajectories. The trajectories of this sync are the "most recent" ones.
    """

    def __init__(self, config: BufferSection, seed: int, store: LiveStore, *, queue: bool) -> None:
        self._config = config
        self._seed = seed
        self._store = store
        self._queue = queue
        self.sync = -1
        self._everyone, self._recent = _Draw(), _Draw()

    def begin_sync(self, sync: int) -> None:
        """Begin a new set of most recent trajectories, unless ``sync`` is still the newest sync."""
        if sync > self.sync:
            self.sync, self._recent = sync, _Draw()

    def arrived(self, prompt: int) -> None:
        """Add a prompt that got trajectories in this sync to the draws of all prompts and of recent ones."""
        self._everyone.add(prompt)
        self._recent.add(prompt)

    def sample(self, step: int, *, groups: int, group_size: int) -> list[Row]:
        """Choose B = ``groups`` groups of K = ``group_size`` trajectories, group after group.

        With probability ``most_on_policy`` a group's prompt is drawn among those with "most recent"
        trajectories, or among all prompts once none of these is left. Its completions are then drawn
        uniformly among the recent ones. Otherwise the prompt is drawn among all prompts, and its completions
        by softmax(reward / reward_temperature), mixed with a share UNIFORM_MIX of the uniform distribution.

        If a prompt has fewer than K completions, all are taken, and repeats are drawn by the same weights.
        Each of the two draws takes every prompt once before it takes any again. A batch holds a prompt twice
        only if there are fewer than B prompts. A ``queue`` takes prompts by the age of the weights that
        sampled their oldest trajectory, then by its arrival. Randomness depends only on (seed, step).
        """
        rng = np.random.default_rng([self._seed, _REPLAY, step])
        prompts = self._queued(groups) if self._queue else self._drawn(rng, groups)
        return [row for prompt, new in prompts for row in self._choose(rng, prompt, group_size, recent=new)]

    def _drawn(self, rng: np.random.Generator, groups: int) -> Iterator[tuple[int, bool]]:
        """Yield a prompt per group, and True if its completions must be "most recent".

        It is a generator because its draws from ``rng`` alternate with those of ``_choose``.
        """
        taken = set[int]()
        for most_recent in (rng.random(groups) < self._config.most_on_policy).tolist():
            if len(taken) == len(self._store.live):
                taken.clear()
            prompt = self._recent.draw(rng, taken, self._is_recent) if most_recent else None
            recent = prompt is not None
            if prompt is None:
                prompt = self._everyone.draw(rng, taken, self._store.live.__contains__)
            assert prompt is not None
            taken.add(prompt)
            yield prompt, recent

    def _is_recent(self, prompt: int) -> bool:
        """Return whether the most recent sync added a prompt's youngest live trajectory."""
        live = self._store.live.get(prompt)
        if live is None:
            return False
        record, *_ = self._store.groups[next(reversed(live.values()))]
        return bool(record["sync"][0] == self.sync)

    def _queued(self, groups: int) -> Iterator[tuple[int, bool]]:
        """Yield prompts, oldest first, in the form of ``_drawn``."""
        record = self._store.record()
        prompts = record["prompt_id"][np.argsort(record["version_oldest"], kind="stable")].tolist()
        return ((prompt, False) for prompt in islice(cycle(dict.fromkeys(prompts)), groups))

    def _choose(self, rng: np.random.Generator, prompt: int, count: int, *, recent: bool) -> list[Row]:
        """Draw ``count`` trajectories of a prompt, among all or only the most recent ones.

        The draw without replacement is Gumbel top-k: it takes those with the largest log weight plus noise.
        """
        groups = self._store.groups_of(prompt)
        rows = [(number, row) for number, group in groups.items() for row in range(len(group))]
        reward_N, sync_N = (
            np.concatenate([group.record[name] for group in groups.values()]) for name in ("reward", "sync")
        )
        among = np.flatnonzero(sync_N == self.sync) if recent else np.arange(len(rows))
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

    def state(self) -> dict[str, np.ndarray]:
        """Return both draws as arrays, for ``restore``."""
        return {**self._everyone.arrays("everyone"), **self._recent.arrays("recent")}

    def restore(self, arrays: dict[str, np.ndarray], sync: int) -> None:
        """Restore a saved ``state``, and the newest ``sync`` of that moment."""
        self.sync = sync
        self._everyone = _Draw(arrays["everyone_waiting"], arrays["everyone_drawn"])
        self._recent = _Draw(arrays["recent_waiting"], arrays["recent_drawn"])


class _Draw:
    """Draws prompts in random order, each once per pass, in constant time.

    waiting: prompts not yet drawn in this pass. drawn: the other prompts. Prompts that turn out to be useless
    are dropped.
    """

    def __init__(self, waiting: Iterable[int] = (), drawn: Iterable[int] = ()) -> None:
        self._waiting = [int(prompt) for prompt in waiting]
        self._drawn = [int(prompt) for prompt in drawn]
        self._members = {*self._waiting, *self._drawn}

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the constructor's arguments that make an equal draw, as NAME_waiting and NAME_drawn."""
        return {
            f"{name}_waiting": np.array(self._waiting, np.int64),
            f"{name}_drawn": np.array(self._drawn, np.int64),
        }

    def add(self, prompt: int) -> None:
        """Add a prompt to the present pass."""
        if prompt not in self._members:
            self._members.add(prompt)
            self._waiting.append(prompt)

    def draw(self, rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]) -> int | None:
        """Draw the next useful prompt that is not ``taken``, or return None. Taken ones keep their turn."""
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
        """Remove and return a random useful prompt that is not ``taken``; drop useless ones on the way."""
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
