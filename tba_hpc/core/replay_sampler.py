"""Choice of batches from the replay buffer: most-on-policy with probability m, otherwise by reward (TBA, §3).

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, cycle, islice

import numpy as np

from tba_hpc.config import BufferSection
from tba_hpc.core.live_store import LiveStore, Row
from tba_hpc.core.types import Trajectories

_REPLAY = int.from_bytes(b"replay")  # keeps this random stream apart from others of the same seed

UNIFORM_MIX = 0.1
"""Weight of the uniform distribution when a prompt's trajectories are drawn by reward. The softmax of their
rewards has the remaining weight."""


class Sampler:
    """Chooses the trajectories of each step's batch from a store.

    queue: whether prompts are taken by age instead of at random. sync: number of the newest sync that added
    trajectories; −1: none has. The trajectories of this sync are the "most recent" ones.
    """

    def __init__(self, config: BufferSection, seed: int, store: LiveStore, *, queue: bool) -> None:
        self._config = config
        self._seed = seed
        self._store = store
        self._queue = queue
        self.sync = -1
        self._everyone, self._recent = _Draw(), _Draw()

    def begin_sync(self, sync: int) -> None:
        """Note that the trajectories merged from now on belong to ``sync``."""
        if sync > self.sync:
            self.sync, self._recent = sync, _Draw()

    def arrived(self, prompt: int) -> None:
        """Note that a prompt got trajectories in this sync, so that it can be drawn."""
        self._everyone.add(prompt)
        self._recent.add(prompt)

    def sample(self, step: int, *, groups: int, group_size: int) -> list[Row]:
        """Choose B = ``groups`` groups of K = ``group_size`` trajectories, group after group.

        With probability ``most_on_policy`` a group is recent: its prompt is drawn among those with "most
        recent" trajectories, and its completions uniformly among these trajectories. Otherwise, or if the
        batch already holds all such prompts, the prompt is drawn among all prompts, and its completions
        are drawn by softmax(reward / reward_temperature), mixed with a share UNIFORM_MIX of the uniform
        distribution.

        If there are fewer than K completions to draw from, all are taken, and then some of them again, by the
        same weights. Each of the two draws of prompts takes every prompt once before it takes one again. A
        batch holds a prompt twice only if there are fewer than B prompts.

        A ``queue`` takes requests by the version of their oldest trajectory instead, lowest first, and those
        with equal versions in the order of arrival. Randomness depends only on (seed, step).
        """
        rng = np.random.default_rng([self._seed, _REPLAY, step])
        if not self._queue:
            drawn = self._drawn(rng, groups)
            return [row for prompt, new in drawn for row in self._choose(rng, prompt, group_size, recent=new)]
        rows, taken = list[Row](), set[Row]()
        for prompt in self._queued(groups, group_size):
            rows += self._choose(rng, prompt, group_size, taken=taken)
            taken.update(rows[-group_size:])
        return rows

    def _drawn(self, rng: np.random.Generator, groups: int) -> Iterator[tuple[int, bool]]:
        """Yield a prompt per group, and whether its completions must be "most recent" ones.

        This is a generator because draws of prompts and of completions from ``rng`` alternate.
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
        """Return whether a prompt has live trajectories of the newest sync."""
        live = self._store.live.get(prompt)
        if live is None:
            return False
        record, *_ = self._store.groups[next(reversed(live.values()))]
        return bool(record["sync"][0] == self.sync)

    def _queued(self, groups: int, group_size: int) -> Iterator[int]:
        """Yield the prompt of each group of a batch, in the order of their requests: oldest weights first.

        A prompt comes once for each of its requests, but no more often than it has ``group_size`` completions
        for each time, and at least once. If that makes too few groups, the prompts are repeated.
        """
        left = {prompt: len(live) for prompt, live in self._store.live.items()}
        requests = sorted(self._store.columns(), key=lambda columns: columns[0]["version_oldest"].min())
        prompts, seen = list[int](), dict[int, None]()
        for record, *_ in requests:
            prompt = int(record["prompt_id"][0])
            if left[prompt] >= group_size or prompt not in seen:
                prompts.append(prompt)
                seen[prompt] = None
                left[prompt] -= group_size
        return islice(chain(prompts, cycle(seen)), groups)

    def _choose(
        self,
        rng: np.random.Generator,
        prompt: int,
        count: int,
        *,
        recent: bool = False,
        taken: Set[Row] | None = None,
    ) -> list[Row]:
        """Draw ``count`` trajectories of a prompt, among all of them or only the most recent ones.

        taken: in a queue, the trajectories that the batch holds already. Then the draw is among the others of
        the oldest requests, of as many requests as needed. To draw without replacement, Gumbel noise is added
        to the log weights, and the largest sums are taken.
        """
        groups = self._store.groups_of(prompt)
        rows = [(number, row) for number, group in groups.items() for row in range(len(group))]
        reward_N, sync_N = (
            np.concatenate([group.record[name] for group in groups.values()]) for name in ("reward", "sync")
        )
        among = np.flatnonzero(sync_N == self.sync) if recent else np.arange(len(rows))
        if taken is not None:
            among = _oldest(groups, rows, taken, count)
        weight = self._weights(reward_N[among], equal=recent)
        log_weight = np.log(np.maximum(weight, np.finfo(weight.dtype).tiny))
        chosen = among[np.argsort(-log_weight - rng.gumbel(size=len(among)))[:count]]
        if len(chosen) < count:
            chosen = np.concatenate([chosen, rng.choice(among, count - len(chosen), p=weight)])
        return [rows[place] for place in chosen.tolist()]

    def _weights(self, reward_N: np.ndarray, *, equal: bool) -> np.ndarray:
        """Return the probabilities of a prompt's trajectories, float64 [N]: by reward, or all ``equal``."""
        uniform = np.full(len(reward_N), 1 / len(reward_N))
        temperature, mix = self._config.reward_temperature, UNIFORM_MIX
        if equal or temperature is None:
            return uniform
        odds = np.exp((reward_N.astype(np.float64) - reward_N.max()) / temperature)
        return (1 - mix) * odds / odds.sum() + mix * uniform

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of both draws of prompts, among recent ones and among all, for ``restore``."""
        return {**self._everyone.arrays("everyone"), **self._recent.arrays("recent")}

    def restore(self, arrays: dict[str, np.ndarray], sync: int) -> None:
        """Restore a saved ``state``. sync: the newest sync when it was saved."""
        self.sync = sync
        self._everyone = _Draw(arrays["everyone_waiting"], arrays["everyone_drawn"])
        self._recent = _Draw(arrays["recent_waiting"], arrays["recent_drawn"])


def _oldest(
    groups: Mapping[int, Trajectories], rows: Sequence[Row], taken: Set[Row], count: int
) -> np.ndarray:
    """Return the places of rows of the oldest groups, as many groups as have ``count`` rows not in ``taken``.

    groups: a prompt's groups by number. rows: their rows. Returns all places, ascending, if none is free.
    """
    found = list[int]()
    for number in sorted(groups, key=lambda number: groups[number].record["version_oldest"].min()):
        found += [place for place, row in enumerate(rows) if row[0] == number and row not in taken]
        if len(found) >= count:
            break
    return np.array(sorted(found) or range(len(rows)))


class _Draw:
    """Draws every prompt once, in random order, and then all again in a new pass.

    A draw takes constant time. waiting: prompts not yet drawn in this pass. drawn: the others. A prompt that
    is no longer useful, such as one without live trajectories, is dropped when it is drawn.
    """

    def __init__(self, waiting: Iterable[int] = (), drawn: Iterable[int] = ()) -> None:
        self._waiting = [int(prompt) for prompt in waiting]
        self._drawn = [int(prompt) for prompt in drawn]
        self._members = {*self._waiting, *self._drawn}

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the constructor's two arguments as arrays, under the keys NAME_waiting and NAME_drawn."""
        return {
            f"{name}_waiting": np.array(self._waiting, np.int64),
            f"{name}_drawn": np.array(self._drawn, np.int64),
        }

    def add(self, prompt: int) -> None:
        """Add a prompt to the present pass, unless it is there already."""
        if prompt not in self._members:
            self._members.add(prompt)
            self._waiting.append(prompt)

    def draw(self, rng: np.random.Generator, taken: set[int], useful: Callable[[int], bool]) -> int | None:
        """Draw a random prompt that is ``useful`` and not ``taken``; return its id, or None if there is none.

        Prompts that this pass has not yet drawn come first; if none of them will do, the next pass begins.
        Taken prompts can still be drawn by a later call. A prompt found to be useless is dropped until
        ``add`` adds it again.
        """
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
        """Take a random prompt that is ``useful`` and not ``taken`` out of ``pile``; None if there is none.

        A useless prompt that is picked on the way is dropped. A taken one goes back to the pile.
        """
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
