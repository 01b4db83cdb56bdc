"""Store of the replay buffer: its live trajectories, by request and by prompt. Imports no torch.

A group holds the live completions of one request. It is never changed: when completions are evicted or used,
a new group takes its place. A list of all groups is therefore a snapshot.

A group is stored as a bare tuple of arrays, the columns of its ``Trajectories``, because Python's garbage
collector does not look into such a tuple. Inspecting the objects of a million trajectories would hold up the
loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

from tba_hpc.core.types import LIVE_RECORD, Columns, Ragged, Trajectories, joined, offsets_of

KIND = np.dtype([("version_oldest", "<i4"), ("reference", "<i4")])
"""Fields of RECORD that decide whether a trajectory is stale: its oldest version and its reference's step."""

Row = tuple[int, int]
"""Position of a live trajectory in the store: the number of its group, and its row in the group."""

_NO_TOKENS = Ragged.from_rows([], np.int32)
_NOTHING = Trajectories(
    np.empty(0, LIVE_RECORD), _NO_TOKENS, _NO_TOKENS, np.empty(0, np.float32), np.empty(0, np.float32)
).columns


class LiveStore:
    """Groups of live trajectories.

    groups: columns of each group by the group's number, oldest first; a group holds only its own prompt.
    live: for each prompt a dictionary from the keys of its completions, oldest first, to the numbers of their
    groups. ``duplicates.Duplicates.keys`` makes the keys.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Columns] = {}
        self.live: dict[int, dict[int, int]] = {}
        self._numbers = count()
        self._kinds = Counter[tuple[int, int]]()

    @property
    def kinds(self) -> np.ndarray:
        """Distinct pairs of live trajectories' oldest version and reference, KIND [M]."""
        return np.array(list(self._kinds), KIND)

    def group(self, number: int) -> Trajectories:
        """Return a group by its number."""
        return Trajectories.of(self.groups[number])

    def groups_of(self, prompt: int) -> dict[int, Trajectories]:
        """Return the groups of a prompt by their numbers, oldest first."""
        return {number: self.group(number) for number in dict.fromkeys(self.live.get(prompt, {}).values())}

    def columns(self) -> list[Columns]:
        """Return the columns of all groups, oldest first; if there are none, those of one empty group."""
        return list(self.groups.values()) or [_NOTHING]

    def record(self) -> np.ndarray:
        """Return LIVE_RECORD [N] of all live trajectories, oldest first."""
        return joined([record for record, *_ in self.columns()])

    def parts(self, marked_N: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Split a mask of all live trajectories, bool [N], by group.

        Yields the number of each group with a marked trajectory, and the group's mask, bool [K].
        """
        numbers, offsets = list(self.groups), offsets_of(len(record) for record, *_ in self.groups.values())
        for place in np.unique(np.searchsorted(offsets, np.flatnonzero(marked_N), "right") - 1).tolist():
            yield numbers[place], marked_N[offsets[place] : offsets[place + 1]]

    def gather(self, rows: Sequence[Row]) -> Trajectories:
        """Copy trajectories in the given order; repeats are allowed."""
        numbers = list(dict.fromkeys(number for number, _ in rows))
        groups = [self.groups[number] for number in numbers]
        starts = offsets_of(len(record) for record, *_ in groups)[:-1].tolist()
        start_of = dict(zip(numbers, starts, strict=True))
        return Trajectories.concat(groups).take(np.array([start_of[number] + row for number, row in rows]))

    def add(self, group: Trajectories, keys: Iterable[int]) -> int:
        """Add a group; return its number. keys: one per completion, all new for its prompt."""
        number = next(self._numbers)
        self.groups[number] = group.columns
        self.live.setdefault(prompt_of(group), {}).update(dict.fromkeys(keys, number))
        self._kinds.update(_kinds(group.record))
        return number

    def count_uses(self, rows: set[Row]) -> dict[int, np.ndarray]:
        """Count one more use of each of ``rows``; return the new counts, int32, by the group's number."""
        chosen = dict[int, list[int]]()
        for number, row in rows:
            chosen.setdefault(number, []).append(row)
        uses = dict[int, np.ndarray]()
        for number, some in chosen.items():
            record, *others = self.groups[number]
            record = joined([record])
            record["uses"][some] += 1
            self.groups[number] = (record, *others)
            uses[number] = record["uses"][some]
        return uses

    def remove(self, number: int, leaves_K: np.ndarray) -> int:
        """Remove those trajectories of a group that the mask ``leaves_K``, bool, marks; return how many."""
        gone = leaves_K.nonzero()[0].tolist()
        if not gone:
            return 0
        group = self.group(number)
        prompt = prompt_of(group)
        live = self.live[prompt]
        keys = [key for key, of in live.items() if of == number]  # in the order of the rows
        kinds = list(_kinds(group.record))
        for row in gone:
            del live[keys[row]]
            self._kinds[kinds[row]] -= 1
            if not self._kinds[kinds[row]]:
                del self._kinds[kinds[row]]
        if not live:
            del self.live[prompt]
        if len(gone) < len(group):
            self.groups[number] = group.take((~leaves_K).nonzero()[0]).columns
        else:
            del self.groups[number]
        return len(gone)


def prompt_of(group: Trajectories) -> int:
    """Return the id of a group's prompt."""
    return int(group.record["prompt_id"][0])


def _kinds(record: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(record["version_oldest"].tolist(), record["reference"].tolist(), strict=True)
