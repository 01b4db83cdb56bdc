"""Where the live trajectories of a replay buffer lie in memory, so that nothing it does takes long at once.

It must not know which trajectories are wanted, nor why they leave. Imports no torch.

A trajectory has a slot from its coming to its leaving; then the slot is another's. What the buffer chooses by
lies in flat columns by slot. All that never changes lies in segments, which are filled from front to back and
never written again: so a snapshot refers to them and copies only where each trajectory is. A segment without
live trajectories is dropped; where more than half of all that is stored is dead, the emptiest segments move
what is left of them to the newest, a few at a time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tba_hpc.core.types import RECORD, Ragged, offsets_of, spans

SEGMENT_TOKENS = 1 << 18
"""Completion tokens of a segment (12 bytes each): what compaction moves at a time, against their number."""

SEGMENT_ROWS = 1 << 12
"""Trajectories of a segment, at most."""

SPARE_SEGMENTS = 8
"""Segments whose memory is kept for the next ones, at most: 3 MB each."""

SMALLEST_TOKENS, SMALLEST_ROWS = 1 << 10, 1 << 6
"""Of the first segments; later ones are as large as all that lives, up to the above."""

COMPACTED_AT_ONCE = 4
"""Segments that one change of the store may compact."""

RESERVED_ROWS = 1 << 22
"""Slots that are reserved at once, at most; the system gives memory only to those that are used."""

LOOKAHEAD = 64
"""Places of the queue that are looked at beyond those wanted, since some are empty."""


class Column:
    """A one-dimensional array that grows at its end, by doubling; what is filled is never written again."""

    def __init__(self, dtype: np.typing.DTypeLike, values: Iterable[int] = ()) -> None:
        self._data = np.array(list(values), dtype)
        self._length = len(self._data)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """A view of what is filled, which stays as it is."""
        return self._data[: self._length]

    def append(self, values: np.ndarray | list[int]) -> None:
        """Add values at the end."""
        end = self._length + len(values)
        if end > len(self._data):
            self._data = _grown(self._data, end)
        self._data[self._length : end] = values
        self._length = end


def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    """A copy with room for ``needed``, and then as much as before at the least."""
    grown = np.empty((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


class Census:
    """How many live trajectories there are of each kind; counted when first asked for, and kept from then on.

    fields: those of RECORD that make a kind.
    """

    def __init__(self, *fields: str) -> None:
        self._fields = fields
        self._counts: Counter[tuple[int, ...]] | None = None

    def count(self, live: Callable[[], np.ndarray]) -> Counter[tuple[int, ...]]:
        """Live trajectories by kind, none of 0. ``live``: gives the RECORD of all."""
        if self._counts is None:
            self._counts = Counter(self._of(live()))
        return self._counts

    def add(self, record: np.ndarray) -> None:
        """Trajectories have come."""
        if self._counts is not None:
            self._counts.update(self._of(record))

    def remove(self, record: np.ndarray, rows: np.ndarray) -> None:
        """Trajectories have left."""
        if self._counts is None:
            return
        for kind, count in Counter(self._of(record[rows])).items():
            self._counts[kind] -= count
            if not self._counts[kind]:
                del self._counts[kind]

    def _of(self, record: np.ndarray) -> Iterator[tuple[int, ...]]:
        return zip(*(record[name].tolist() for name in self._fields), strict=True)


class _Queue:
    """Slots in order of arrival; one that leaves from the middle leaves its place empty.

    The places are written anew when the last is taken: then at least half of them are before the head or
    empty, or else there are twice as many from then on.
    """

    def __init__(self, room: int) -> None:
        self._slots = np.empty(2 * room, np.int32)
        self._place_of = np.empty(room, np.int32)  # by slot
        self._head = self._tail = 0

    def in_order(self) -> np.ndarray:
        """int32 [N]: the slots from the oldest on."""
        queued = self._slots[self._head : self._tail]
        return queued[queued >= 0]

    def append(self, slots: np.ndarray) -> None:
        """Add the youngest."""
        if self._tail + len(slots) > len(self._slots):
            self._write_anew(len(slots))
        end = self._tail + len(slots)
        self._slots[self._tail : end] = slots
        self._place(slots, self._tail)
        self._tail = end

    def remove(self, slots: np.ndarray) -> None:
        """Empty the places of slots, wherever they are, or were when they were taken from the head."""
        self._slots[self._place_of[slots]] = -1

    def oldest(self, count: int, live: np.ndarray) -> np.ndarray:
        """int32 [count]: take out the first that live; there are so many, and one at the least."""
        looked_at = count + LOOKAHEAD
        while True:
            ahead = self._slots[self._head : min(self._head + looked_at, self._tail)]
            place = np.flatnonzero((ahead >= 0) & live[ahead])[:count]
            if len(place) == count:
                self._head += int(place[-1]) + 1
                return ahead[place]
            looked_at *= 2

    def _write_anew(self, coming: int) -> None:
        kept = self.in_order()
        needed = 2 * (len(kept) + coming)
        if needed > len(self._slots):
            self._slots = np.empty(2 * needed, np.int32)
        self._slots[: len(kept)] = kept
        self._place(kept, 0)
        self._head, self._tail = 0, len(kept)

    def _place(self, slots: np.ndarray, first: int) -> None:
        self._place_of[slots] = np.arange(first, first + len(slots))

    def grow(self, slots: int) -> None:
        """Make room for slots of numbers up to ``slots``."""
        self._place_of = _grown(self._place_of, slots)


class Memory(NamedTuple):
    """What a segment is written to."""

    slots: np.ndarray
    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    texts: np.ndarray

    @classmethod
    def of(cls, rows: int, tokens: int, like: dict[str, np.ndarray], spare: list[Memory]) -> Memory:
        """A spare one that is as large, or new memory, which costs the system more than filling it does."""
        if spare and spare[-1].is_for(rows, tokens, like):
            return spare.pop()
        return cls(
            np.empty(rows, np.int32),
            {name: np.empty((rows, *a.shape[1:]), a.dtype) for name, a in like.items()},
            np.zeros(rows + 1, np.int64),
            np.empty((3, tokens), np.int32),
        )

    def is_for(self, rows: int, tokens: int, like: dict[str, np.ndarray]) -> bool:
        """Whether it has this size and these columns."""
        shapes = {name: (array.dtype, *array.shape[1:]) for name, array in self.columns.items()}
        same = shapes == {name: (array.dtype, *array.shape[1:]) for name, array in like.items()}
        return same and len(self.slots) == rows and self.texts.shape[1] == tokens

    def keep(self, spare: list[Memory]) -> None:
        """Nobody knows its segment any more."""
        if len(spare) < SPARE_SEGMENTS:
            spare.append(self)


class Segment:
    """Trajectories as they came; only what is beyond ``rows`` is ever written, and NaN of the reference.

    slots: int32, where each was when it came here. columns: by name, a row each: record, revision, sync,
    value and, where there are any, embeddings. offsets: as of a Ragged. texts: int32 [3, T]: tokens,
    log-probabilities and the reference's, the last two float32 bit by bit.
    """

    def __init__(self, memory: Memory) -> None:
        self.rows = 0
        self.slots, self.columns, self.offsets, self.texts = memory

    @property
    def tokens(self) -> int:
        """Filled so far."""
        return int(self.offsets[self.rows])

    def room_for(self, offsets: np.ndarray) -> int:
        """How many of the rows with these offsets, which need not begin at 0, fit in."""
        rows = min(len(offsets) - 1, len(self.slots) - self.rows)
        end = offsets[0] + self.texts.shape[1] - self.tokens
        return rows if offsets[rows] <= end else int(np.searchsorted(offsets, end, "right")) - 1

    def append(
        self,
        slots: np.ndarray,
        columns: dict[str, np.ndarray],
        offsets: np.ndarray,
        texts: Sequence[np.ndarray],
    ) -> None:
        """Add rows that fit in."""
        start, end, first = self.rows, self.rows + len(slots), self.tokens
        self.slots[start:end] = slots
        for name, column in columns.items():
            self.columns[name][start:end] = column
        self.offsets[start + 1 : end + 1] = offsets[1:] + (first - offsets[0])
        for mine, text in zip(self.texts, texts, strict=True):
            mine[first : first + len(text)] = text
        self.rows = end


COLUMNS = {
    "record": np.empty(0, RECORD),
    "revision": np.empty(0, np.int64),
    "sync": np.empty(0, np.int64),
    "value": np.empty(0, np.float32),
}
"""Those of every segment, without rows."""

DROPPED = Segment(Memory.of(0, 0, {}, []))
"""In place of a segment in which nothing lives any more."""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """The live trajectories of a moment, oldest first; may be read by another thread while the store goes on.

    segment_N, index_N: in which segment each is, int32, and at which row. uses_N: int32.
    """

    segments: list[Segment]
    segment_N: np.ndarray
    index_N: np.ndarray
    uses_N: np.ndarray
    like: dict[str, np.ndarray]

    def columns(self) -> dict[str, np.ndarray]:
        """A copy of record, revision, sync, value and embeddings, as far as there are any, a row each."""
        found = {name: np.empty((len(self.uses_N), *a.shape[1:]), a.dtype) for name, a in self.like.items()}
        for segment, row, index in self._by_segment():
            for name, column in found.items():
                column[row] = segment.columns[name][index]
        return found

    def texts(self) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """Copies of the completions, their log-probabilities and the reference's."""
        length_N = np.empty(len(self.uses_N), np.int64)
        parts = list(self._by_segment())
        for segment, row, index in parts:
            length_N[row] = segment.offsets[index + 1] - segment.offsets[index]
        offsets = offsets_of(length_N)
        found = [np.empty(offsets[-1], np.int32) for _ in range(3)]
        for segment, row, index in parts:
            source, target = _tokens_of(segment.offsets, index), _tokens_of(offsets, row)
            for text, stored in zip(found, segment.texts, strict=True):
                text[target] = stored[source]
        tokens, logprobs, ref_logprobs = found
        return Ragged(tokens, offsets), logprobs.view(np.float32), ref_logprobs.view(np.float32)

    def _by_segment(self) -> Iterator[tuple[Segment, np.ndarray, np.ndarray]]:
        """Each segment with the rows of the snapshot that it has, ascending, and their places in it."""
        row_N = np.argsort(self.segment_N, kind="stable")
        numbers, first = np.unique(self.segment_N[row_N], return_index=True)
        for number, row in zip(numbers.tolist(), np.split(row_N, first)[1:], strict=True):
            yield self.segments[number], row, self.index_N[row]


def _tokens_of(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray | slice:
    """Where the tokens of some rows lie."""
    if (np.diff(rows) == 1).all():  # most often, and the copy is several times faster then
        return slice(int(offsets[rows[0]]), int(offsets[rows[-1] + 1]))
    return spans(offsets, rows)[0]


class Store:
    """Live trajectories by slot. ``record``, ``sync``, ``uses``, ``value`` and ``live`` are the columns.

    room: trajectories that it will hold, about; for more it grows. spelled: whether ``words`` has each
    completion as a string, a character per token.
    """

    def __init__(self, room: int, *, spelled: bool = False) -> None:
        room = min(room, RESERVED_ROWS)
        self._requests = Census("request_id")
        self._kinds = Census("version_oldest", "reference")
        self.words: dict[int, str] = {}
        self._spelled = spelled
        self._columns = {
            "record": np.empty(room, RECORD),
            "sync": np.empty(room, np.int64),
            "uses": np.empty(room, np.int32),
            "value": np.empty(room, np.float32),
            "live": np.empty(room, np.bool_),
            "segment": np.empty(room, np.int32),
            "index": np.empty(room, np.int32),
            "start": np.empty(room, np.int64),
            "length": np.empty(room, np.int64),
        }
        self._queue = _Queue(room)
        self._used_slots = 0  # slots beyond were never anybody's
        self._free: list[int] = []
        self._left: list[int] = []  # since ``settle``
        self._segments: list[Segment] = []
        self._free_segments: list[int] = []
        self._spare: list[Memory] = []
        self._live_in = np.zeros((2, 1), np.int64)  # rows and tokens that live, by segment
        self._newest: int | None = None
        self._live_rows = self._live_tokens = self._stored_rows = self._stored_tokens = 0
        self._like = COLUMNS

    @property
    def record(self) -> np.ndarray:
        """RECORD."""
        return self._columns["record"]

    @property
    def sync(self) -> np.ndarray:
        """int64: the sync that brought it."""
        return self._columns["sync"]

    @property
    def uses(self) -> np.ndarray:
        """int32: steps in whose batch it was; may be written."""
        return self._columns["uses"]

    @property
    def value(self) -> np.ndarray:
        """float32: V̂ of its request, 0 where the buffer keeps none."""
        return self._columns["value"]

    @property
    def live(self) -> np.ndarray:
        """bool."""
        return self._columns["live"]

    @property
    def stored(self) -> tuple[int, int]:
        """Trajectories and completion tokens in the segments, live or dead."""
        return self._stored_rows, self._stored_tokens

    def in_order(self) -> np.ndarray:
        """int32 [N]: the slots of what lives, oldest first; after ``settle``."""
        return self._queue.in_order()

    @property
    def requests(self) -> Counter[tuple[int, ...]]:
        """Live trajectories by (request_id,)."""
        return self._requests.count(self._live_records)

    @property
    def kinds(self) -> Counter[tuple[int, ...]]:
        """Live trajectories by (version_oldest, reference)."""
        return self._kinds.count(self._live_records)

    def _live_records(self) -> np.ndarray:
        return self.record[self.in_order()]

    # --- Coming and leaving ---

    def add(
        self,
        record: np.ndarray,
        completions: Ragged,
        logprobs: np.ndarray,
        ref_logprobs: np.ndarray,
        *,
        revision: int | np.ndarray,
        sync: int | np.ndarray,
        uses: int | np.ndarray,
        value: float | np.ndarray,
        embeddings: np.ndarray | None = None,
    ) -> np.ndarray:
        """Add trajectories, the youngest from now on; returns their slots, int64 [N]. All is copied.

        record: RECORD [N]. revision, sync, uses, value: one for all, or one each. embeddings: float32 [N, D].
        """
        count = len(record)
        slots = self._take_slots(count)
        for name, values in (("record", record), ("sync", sync), ("uses", uses), ("value", value)):
            self._columns[name][slots] = values
        self.live[slots] = True
        self._queue.append(slots)
        columns = {
            "record": record,
            "revision": np.full(count, revision, np.int64),
            "sync": np.full(count, sync, np.int64),
            "value": np.full(count, value, np.float32),
            **({} if embeddings is None else {"embeddings": embeddings}),
        }
        self._like = {name: column[:0] for name, column in columns.items()}
        texts = [completions.values, logprobs.view(np.int32), ref_logprobs.view(np.int32)]
        self._live_rows += count
        self._live_tokens += len(completions.values)
        self._write(slots, columns, completions.offsets, texts)
        self._requests.add(record)
        self._kinds.add(record)
        if self._spelled:
            words = (_word(completions.row(i)) for i in range(count))
            self.words.update(zip(slots.tolist(), words, strict=True))
        return slots

    def remove(self, slots: list[int] | np.ndarray) -> None:
        """Let live trajectories go. Their slots stay theirs until ``settle``."""
        if len(slots):
            self.live[slots] = False
        self._left += slots if isinstance(slots, list) else slots.tolist()

    def remove_oldest(self, count: int) -> np.ndarray:
        """Let the live trajectories go that came first; returns their slots, int32 [count]."""
        slots = self._queue.oldest(count, self.live)
        self.remove(slots)
        return slots

    def settle(self) -> None:
        """Give away the slots of what has left, and the memory of what is mostly dead."""
        if not self._left:
            return
        slots = np.array(self._left, np.int64)
        self._left.clear()
        self._queue.remove(slots)
        self._requests.remove(self.record, slots)
        self._kinds.remove(self.record, slots)
        for slot in slots.tolist() if self._spelled else ():
            del self.words[slot]
        self._bury(self._columns["segment"][slots], self._columns["length"][slots])
        self._free += slots[::-1].tolist()  # so that the next to come lie in order
        self._compact()

    def _take_slots(self, count: int) -> np.ndarray:
        """int64 [count]: slots that were given away, then new ones."""
        again = min(count, len(self._free))
        taken = self._free[len(self._free) - again :][::-1]
        del self._free[len(self._free) - again :]
        first, self._used_slots = self._used_slots, self._used_slots + count - again
        if self._used_slots > len(self.live):
            self._columns = {name: _grown(a, self._used_slots) for name, a in self._columns.items()}
            self._queue.grow(len(self.live))
        return np.array([*taken, *range(first, self._used_slots)], np.int64)

    # --- Segments ---

    def _write(
        self,
        slots: np.ndarray,
        columns: dict[str, np.ndarray],
        offsets: np.ndarray,
        texts: Sequence[np.ndarray],
    ) -> None:
        """Write rows to the newest segment, and to as many more as they need."""
        start = 0
        while start < len(slots):
            number, segment, count = self._with_room(columns, offsets[start:])
            end, first = start + count, segment.rows
            tokens = slice(int(offsets[start]), int(offsets[end]))
            place = offsets[start:end] + (segment.tokens - offsets[start])
            segment.append(
                slots[start:end],
                {name: column[start:end] for name, column in columns.items()},
                offsets[start : end + 1],
                [text[tokens] for text in texts],
            )
            mine = slots[start:end]
            self._columns["segment"][mine] = number
            self._columns["index"][mine] = np.arange(first, segment.rows)
            self._columns["start"][mine] = place
            self._columns["length"][mine] = np.diff(offsets[start : end + 1])
            self._live_in[0, number] += count
            self._live_in[1, number] += tokens.stop - tokens.start
            self._stored_rows += count
            self._stored_tokens += tokens.stop - tokens.start
            start = end

    def _with_room(self, columns: dict[str, np.ndarray], offsets: np.ndarray) -> tuple[int, Segment, int]:
        """The newest segment, its number and how many of the rows with these offsets fit in, 1 or more."""
        if self._newest is not None:
            segment = self._segments[self._newest]
            if count := segment.room_for(offsets):
                return self._newest, segment, count
        rows = min(max(self._live_rows, SMALLEST_ROWS), SEGMENT_ROWS)
        tokens = min(max(self._live_tokens, SMALLEST_TOKENS), SEGMENT_TOKENS)
        memory = Memory.of(rows, max(tokens, int(offsets[1] - offsets[0])), columns, self._spare)
        segment = Segment(memory)
        weakref.finalize(segment, memory.keep, self._spare).atexit = False  # snapshots may know it for longer
        self._newest = self._number(segment)
        return self._newest, segment, segment.room_for(offsets)

    def _number(self, segment: Segment) -> int:
        if self._free_segments:
            number = self._free_segments.pop()
            self._segments[number] = segment
            return number
        self._segments.append(segment)
        if len(self._segments) > self._live_in.shape[1]:
            self._live_in = np.concatenate([self._live_in, np.zeros_like(self._live_in)], 1)
        return len(self._segments) - 1

    def _bury(self, segment_N: np.ndarray, length_N: np.ndarray) -> None:
        """Count what has died where, and drop the segments in which nothing lives."""
        segments = self._live_in.shape[1]
        self._live_in[0] -= np.bincount(segment_N, minlength=segments)
        self._live_in[1] -= np.bincount(segment_N, length_N, segments).astype(np.int64)  # exact up to 2⁵³
        self._live_rows -= len(length_N)
        self._live_tokens -= int(length_N.sum())
        for number in set(segment_N.tolist()):
            if not self._live_in[0, number]:
                self._drop(number)

    def _drop(self, number: int) -> Segment:
        """Forget a segment, which others may still know."""
        segment, self._segments[number] = self._segments[number], DROPPED
        self._free_segments.append(number)
        self._live_in[:, number] = 0
        self._stored_rows -= segment.rows
        self._stored_tokens -= segment.tokens
        if self._newest == number:
            self._newest = None
        return segment

    def _compact(self) -> None:
        """While more than half of all rows or tokens are dead: move what lives in the emptiest segments."""
        for _ in range(COMPACTED_AT_ONCE):
            if self._stored_rows > 2 * self._live_rows:
                self._move(self._emptiest(0))
            elif self._stored_tokens > 2 * self._live_tokens:
                self._move(self._emptiest(1))

    def _emptiest(self, what: int) -> int:
        """The segment of whose rows (0) or tokens (1) the smallest share lives."""
        stored = np.array([(s.rows, s.tokens)[what] for s in self._segments])
        share = self._live_in[what, : len(stored)] / np.maximum(stored, 1)
        return int(np.where(stored > 0, share, np.inf).argmin())

    def _move(self, number: int) -> None:
        """Write what lives in a segment to the newest, and drop it."""
        segment = self._drop(number)
        slots = segment.slots[: segment.rows].astype(np.int64)
        mine = (self._columns["segment"][slots] == number) & self.live[slots]
        index = np.flatnonzero(mine & (self._columns["index"][slots] == np.arange(segment.rows)))
        token_T, offsets = spans(segment.offsets, index)
        columns = {name: column[index] for name, column in segment.columns.items()}
        self._write(slots[index], columns, offsets, list(segment.texts[:, token_T]))

    # --- Reading ---

    def texts(self, slots: np.ndarray) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """Copies of the completions of ``slots``, their log-probabilities and the reference's."""
        start_N, length_N = self._columns["start"][slots], self._columns["length"][slots]
        segment_N, end_N = self._columns["segment"][slots].tolist(), (start_N + length_N).tolist()
        where, segments = zip(segment_N, start_N.tolist(), end_N, strict=True), self._segments
        pieces = [segments[s].texts[:, start:end] for s, start, end in where]
        tokens, logprobs, ref_logprobs = np.concatenate(pieces or [np.empty((3, 0), np.int32)], 1)
        return Ragged(tokens, offsets_of(length_N)), logprobs.view("f4"), ref_logprobs.view("f4")

    def refer(self, slots: np.ndarray, ref_logprobs: np.ndarray) -> None:
        """Keep the reference's log-probabilities of the completions of ``slots``, which had none.

        A snapshot may have them or not: whoever reads it asks for those that it lacks.
        """
        start_N, length_N = self._columns["start"][slots], self._columns["length"][slots]
        rows = np.split(ref_logprobs.view(np.int32), np.cumsum(length_N)[:-1])
        where = zip(self._columns["segment"][slots].tolist(), start_N.tolist(), rows, strict=True)
        for segment, start, row in where:
            self._segments[segment].texts[2, start : start + len(row)] = row

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        """int64: tokens of each completion."""
        length_N: np.ndarray = self._columns["length"][slots]
        return length_N

    def embeddings(self, slots: np.ndarray) -> np.ndarray:
        """float32 [N, D], of length 1."""
        where = zip(
            self._columns["segment"][slots].tolist(), self._columns["index"][slots].tolist(), strict=True
        )
        found = [self._segments[s].columns["embeddings"][i] for s, i in where]
        return np.array(found, np.float32)

    def snapshot(self) -> StoreSnapshot:
        """What lives now. The cost grows with the number of trajectories: 12 bytes are copied of each."""
        slots = self.in_order()
        return StoreSnapshot(
            segments=list(self._segments),
            segment_N=self._columns["segment"][slots],
            index_N=self._columns["index"][slots],
            uses_N=self.uses[slots],
            like=self._like,
        )


def _word(tokens: np.ndarray) -> str:
    """Tokens as characters, which is what edit distances are computed of."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
