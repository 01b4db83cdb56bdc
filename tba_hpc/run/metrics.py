"""Writes and reads metrics: one JSON line per record, with its ``time`` in unix seconds; a file per rank.

``metric_table`` says what each name means.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, overload

import numpy as np

from tba_hpc.run.files import FULL_DISK, DiskFullError, open_regular, parse_json_lines
from tba_hpc.run.owners import BEAT_SECONDS, end_if_superseded

log = logging.getLogger(__name__)

Value = float | int | str | Sequence[float] | None
Record = dict[str, float | int | str | list[float]]

PLAIN = frozenset({float, int, str, bool, type(None)})
"""Types that JSON gives back as they are."""

MOST_UNWRITTEN = 64 << 20
"""Bytes of records that wait in memory on a full disk; more end the run."""

CHUNK = 4 << 20
"""Bytes of a metrics file that are parsed at once."""

RECORDS_PER_SECOND = 8
"""Of all searchers together, at most."""


def record_seconds(searchers: int) -> float:
    """Seconds between two records of a searcher, of so many."""
    return max(1.0, searchers / RECORDS_PER_SECOND)


Digest = Callable[[Sequence[Record], int | None], None]
"""Sums up a file as it is written, for its readers: is given its new records, and its length in bytes if it
ends with them; see ``report.digest``."""


class MetricsWriter:
    """Appends records to ``path``, a line each, visible to readers at once.

    On a full disk records wait in memory, and are written once there is space. digest: of this file; it has
    taken what is there already. ``sync`` may be called in another thread.
    """

    def __init__(self, path: Path, *, digest: Digest | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read()
        self._unwritten = b"" if last in (b"", b"\n") else b"\n"  # a line torn by a crash ends here
        self._full = False
        self._lock = threading.Lock()
        self._digest = digest
        self._last = time.monotonic()

    def log(self, *records: Mapping[str, Value]) -> None:
        """Write records with ``time`` added; values of None are left out, numpy values made plain.

        Raises DiskFullError if more than MOST_UNWRITTEN bytes wait for space.
        """
        self._end_if_superseded()
        now = time.time()
        known = [_plain({"time": now, **record}) for record in records]
        with self._lock:
            self._unwritten += "".join(json.dumps(record) + "\n" for record in known).encode()
            self._write()
            if self._digest:
                self._digest(known, None if self._unwritten else self._file.tell())

    def _end_if_superseded(self) -> None:
        """A process that was frozen until another took its place would write among the other's records."""
        if time.monotonic() - self._last > BEAT_SECONDS:
            with suppress(OSError):
                end_if_superseded()
        self._last = time.monotonic()

    def _write(self) -> None:
        """Write what there is space for; a disk that fills up may take a part of a line."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            if not self._full:
                log.warning("%s: %s; its records wait in memory for space", self._path, error.strerror)
            if len(self._unwritten) > MOST_UNWRITTEN:
                raise self._no_space() from None
        self._full = bool(self._unwritten)

    def _no_space(self) -> DiskFullError:
        return DiskFullError(
            f"cannot write {self._path} ({len(self._unwritten)} bytes wait): no space is left; free space or "
            "raise the quota, then start the same run again: nothing sealed before is lost"
        )

    def sync(self) -> None:
        """Make all records durable. Raises DiskFullError if some wait for space.

        Any other OSError is final: a disk reports a loss only once, so that a later sync proves nothing.
        """
        with self._lock:
            self._write()
            if self._unwritten:
                raise self._no_space()
        try:
            os.fsync(self._file.fileno())
            return
        except OSError as error:
            fault = error.strerror
        # Outside the handler: no caller is to take this for a full disk that is worth waiting for.
        raise OSError(
            errno.EIO,
            f"records in {self._path} may be lost ({fault}): free space, then start the same run again, "
            "which resumes from its last checkpoint",
        )

    def close(self) -> None:
        """Write what is left, and release the file."""
        self._write()
        self._file.close()


def _plain(record: Mapping[str, Value]) -> Record:
    """A record as those see it who read its line."""
    values: Mapping[str, Any] = record
    return {
        name: value if type(value) in PLAIN else _plain_value(value)
        for name, value in values.items()
        if value is not None
    }


def _plain_value(value: Any) -> Any:
    """Of numpy's scalars and arrays, sequences, and subclasses of plain values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [item if type(item) in PLAIN else _plain_value(item) for item in value]
    return value


class MetricsTail:
    """Reads what was added to a metrics file since the last look; a missing file is empty.

    place: where the next record begins, in bytes.
    """

    def __init__(self, path: Path, *, place: int = 0) -> None:
        self._path = path
        self.place = place

    @classmethod
    def from_now(cls, path: Path) -> MetricsTail:
        """Of what comes from now on."""
        return cls(path, place=path.stat().st_size if path.exists() else 0)

    def records(self) -> Iterator[Record]:
        """Records completed since the last look, in order."""
        while whole := self._whole_lines():
            yield from parse_json_lines(whole)

    def new(self) -> list[Record]:
        """The same as a list."""
        return list(self.records())

    def _whole_lines(self) -> bytes:
        """The next lines that are complete, CHUNK bytes of them, or one that is longer."""
        try:
            file = open_regular(self._path)  # each time: NFS shows what is new to those who open
        except FileNotFoundError:
            return b""
        with file:
            file.seek(self.place)
            data = file.read(CHUNK)
            if b"\n" not in data:
                data += file.readline()
        whole = data[: data.rfind(b"\n") + 1]
        self.place += len(whole)
        return whole


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a file, in order; lines torn by a crash are left out, no file is no record."""
    return MetricsTail(path).new()


@overload
def number(record: Mapping[str, Value], name: str) -> float | None: ...
@overload
def number(record: Mapping[str, Value], name: str, default: float) -> float: ...
def number(record: Mapping[str, Value], name: str, default: float | None = None) -> float | None:
    """The scalar of that name; ``default`` if it is missing or no scalar."""
    value = record.get(name)
    return default if value is None or isinstance(value, str | Sequence) else float(value)


class Clock:
    """Durations by name, added up: ``with clock("learn"): …``."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to ``name``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._total[name] = self._total.get(name, 0.0) + time.perf_counter() - start

    @property
    def wall(self) -> float:
        """Seconds since the start or the last reset."""
        return time.perf_counter() - self._since

    def reset(self) -> dict[str, float]:
        """Seconds per name since the last reset, and start over."""
        total, self._total = self._total, {}
        self._since = time.perf_counter()
        return total
