"""The prompt sequence of a run: its order, what of it is done, and how far it may be issued.

It must not know who asks for prompts or what becomes of them. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from tba_hpc.config import Config
from tba_hpc.ports import ExchangeError

_PROMPT_ORDER = int.from_bytes(b"prompt order")  # keeps this stream apart from others of the same seed


class CompletedRequests:
    """The request_ids of the prompt sequence whose groups lie in sealed shards: a growing set of bits."""

    def __init__(self) -> None:
        self._done = np.zeros(0, np.bool_)

    @classmethod
    def from_array(cls, packed: np.ndarray) -> CompletedRequests:
        """Inverse of to_array."""
        completed = cls()
        completed._done = np.unpackbits(packed).view(np.bool_)
        return completed

    def to_array(self) -> np.ndarray:
        """uint8 bitmap, eight request_ids a byte."""
        return np.packbits(self._done[: self._end])

    def add(self, request_ids: np.ndarray) -> None:
        """Mark request_ids (int64, any shape, repeats allowed) as done."""
        if request_ids.size == 0:
            return
        assert request_ids.min() >= 0, "a request_id of the prompt sequence is never negative"
        needed = int(request_ids.max()) + 1
        if needed > len(self._done):
            grown = np.zeros(max(needed, 2 * len(self._done)), np.bool_)
            grown[: len(self._done)] = self._done
            self._done = grown
        self._done[request_ids] = True

    def merge(self, other: CompletedRequests) -> None:
        """Mark what is done in ``other``."""
        self.add(np.flatnonzero(other._done))

    def done(self, request_id: int) -> bool:
        """Whether the group at ``request_id`` is sealed."""
        return request_id < len(self._done) and bool(self._done[request_id])

    def __len__(self) -> int:
        """RequestIds done."""
        return int(self._done.sum())

    @property
    def frontier(self) -> int:
        """The first request_id not done."""
        return len(self._done) if self._done.all() else int(self._done.argmin())

    @property
    def _end(self) -> int:
        return int(np.flatnonzero(self._done)[-1]) + 1 if self._done.any() else 0


class PromptOrder:
    """The run's global prompt sequence: epoch after epoch, each a permutation drawn from (seed, epoch)."""

    def __init__(self, seed: int, n_prompts: int) -> None:
        self._seed = seed
        self._n_prompts = n_prompts
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def prompt_at(self, request_id: int) -> int:
        """Id of the prompt at ``request_id``."""
        epoch, place = divmod(request_id, self._n_prompts)
        if epoch != self._epoch:
            self._epoch = epoch
            random = np.random.default_rng([self._seed, _PROMPT_ORDER, epoch])
            self._permutation = random.permutation(self._n_prompts)
        return int(self._permutation[place])

    def request_ids(self, searcher: int, searchers: int, completed: CompletedRequests) -> Iterator[int]:
        """RequestIds of one of ``searchers``, ascending without end, leaving out what is done.

        Only this searcher ever takes request_ids ≡ ``searcher`` (mod ``searchers``), so that nothing is
        issued twice in an attempt; a resume deals whatever was not sealed, to any number of searchers.
        """
        mine = itertools.count(searcher, searchers)
        return (request_id for request_id in mine if not completed.done(request_id))


class RolloutBudget:
    """How far the searchers may go in the prompt sequence where staleness is bounded: to before ``end``.

    What is begun under weights v is used by step v + n, if no more than (n + 1)·B groups are begun before
    there are newer weights (AReaL, arXiv 2505.24298, §5.1): so ``end`` is (v + n + 1)·B in a run that loses
    nothing. RequestIds that were done before, and those of searchers that were counted out, do not count:
    others are issued instead of them.

    done: when the attempt begins · step: the first of the attempt · groups: those that live in the buffer
    already, which nobody need begin.
    """

    def __init__(self, config: Config, done: CompletedRequests, *, step: int, groups: int) -> None:
        assert config.exchange.max_staleness is not None, "an unbounded staleness needs no quota"
        self.end = 0
        self._steps_ahead = config.exchange.max_staleness + 1
        self._groups_per_step = config.train.prompts_per_step
        self._first_step, self._last_step = step, config.train.steps
        self._searchers = config.launch.searchers
        self._absent: set[int] = set()
        self._done = CompletedRequests.from_array(done.to_array())
        self._allowed = groups
        self._granted = Counter[int]()
        self._arrived = Counter[int]()

    def extend(self, step: int, *, missing: int) -> int:
        """Let begin what the weights of ``step`` allow, and what is missing but not owed; returns ``end``.

        missing: groups that the buffer lacks for the next step.
        """
        ahead = min(step + self._steps_ahead, self._last_step) - self._first_step
        due = max(0, ahead * self._groups_per_step - self._allowed)
        self._allowed += due
        self._grant(max(due, missing - self.owed().total()))
        return self.end

    def _grant(self, groups: int) -> None:
        """Let so many more groups be begun by the searchers that are there."""
        while groups > 0:
            if not self._done.done(self.end):
                searcher = self.end % self._searchers
                self._granted[searcher] += 1
                groups -= searcher not in self._absent
            self.end += 1

    def arrive(self, request_ids: np.ndarray) -> None:
        """Groups have come; one from beyond ``end`` in the place of another that was set aside."""
        self._arrived.update((request_ids % self._searchers).tolist())

    def owed(self) -> Counter[int]:
        """Groups that may have been begun and have not come, by searcher, those counted out left out."""
        owed = self._granted - self._arrived
        return Counter({searcher: count for searcher, count in owed.items() if searcher not in self._absent})

    def exclude(self, searchers: set[int], why: str) -> None:
        """Expect nothing more of these. Raises ExchangeError(``why``) where no other searcher is left."""
        self._absent |= searchers
        if len(self._absent) == self._searchers:
            raise ExchangeError(why)
