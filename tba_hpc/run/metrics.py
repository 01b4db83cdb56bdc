"""Writes and reads metrics: a file per rank, with one JSON object, called a record, per line.

Each record has its ``time`` in unix seconds. ``metric_table`` gives the meaning of all other names.
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
from typing import overload

from tba_hpc.run.files import FULL_DISK, DiskFullError, open_regular, parse_json_lines
from tba_hpc.run.owners import BEAT_SECONDS, end_if_superseded

log = logging.getLogger(__name__)

Value = float | int | str | Sequence[float] | None
Record = dict[str, float | int | str | list[float]]

MOST_UNWRITTEN = 64 << 20
"""Number of bytes of metrics that may wait in memory while the disk is full. With more, the rank fails."""

CHUNK = 4 << 20
"""Number of bytes of a metrics file that are read and parsed at once."""

RECORDS_PER_SECOND = 8
"""Maximum number of records (lines of metrics) that all searchers together write in a second."""


def record_seconds(searchers: int) -> float:
    """Return the seconds between two lines of a searcher's metrics, in a run with ``searchers`` searchers."""
    return max(1.0, searchers / RECORDS_PER_SECOND)


Digest = Callable[[Sequence[Record], int | None], None]
"""Callable that keeps a summary of a metrics file up to date; see ``report.digest``. It takes the new
records, and the length of the file in bytes, which is None if some records are not written yet."""


class MetricsWriter:
    """Writer that appends records (lines of metrics) to ``path``, where readers see them at once.

    On a full disk records wait in memory until there is space. ``log`` and ``sync`` may be called in
    different threads. digest: called with new records; made from those that the file already holds.
    """

    def __init__(self, path: Path, *, digest: Digest | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read()
        self._unwritten = b"" if last in (b"", b"\n") else b"\n"  # ends a line that a crash cut short
        self._full = False
        self._lock = threading.Lock()
        self._digest = digest
        self._last = time.monotonic()

    def log(self, *records: Mapping[str, Value]) -> None:
        """Append records, a line each, with the present ``time``. Values of None are left out.

        Values may be numpy scalars or arrays. Raises DiskFullError if more than MOST_UNWRITTEN bytes wait for
        space.
        """
        self._end_if_superseded()
        now = time.time()
        lines = "".join(_line({"time": now, **record}) for record in records).encode()
        with self._lock:
            self._unwritten += lines
            self._write()
            if self._digest:
                self._digest(parse_json_lines(lines), None if self._unwritten else self._file.tell())

    def _end_if_superseded(self) -> None:
        """End this process if it was frozen and another has replaced it, so that their records do not mix."""
        if time.monotonic() - self._last > BEAT_SECONDS:
            with suppress(OSError):
                end_if_superseded()
        self._last = time.monotonic()

    def _write(self) -> None:
        """Write as many bytes as there is space for. On a full disk this may be only a part of a line."""
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

        After any other OSError records may be lost, even if a later call succeeds: a disk reports a loss only
        once.
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
        # Raised outside the handler: with a full disk as its context, the error would look temporary.
        raise OSError(
            errno.EIO,
            f"records in {self._path} may be lost ({fault}): free space, then start the same run again, "
            "which resumes from its last checkpoint",
        )

    def close(self) -> None:
        """Write the records that wait in memory, as far as there is space, and close the file."""
        self._write()
        self._file.close()


def _line(record: Mapping[str, Value]) -> str:
    """Encode a record as a line of JSON; ``tolist`` converts numpy scalars and arrays."""
    known = {name: value for name, value in record.items() if value is not None}
    return json.dumps(known, default=lambda value: value.tolist()) + "\n"


class MetricsTail:
    """Reader of the records that were added to a metrics file since its last read.

    A missing file counts as empty. place: byte offset of the next record.
    """

    def __init__(self, path: Path, *, place: int = 0) -> None:
        self._path = path
        self.place = place

    @classmethod
    def from_now(cls, path: Path) -> MetricsTail:
        """Make a reader of the records that are written from now on."""
        return cls(path, place=path.stat().st_size if path.exists() else 0)

    def records(self) -> Iterator[Record]:
        """Yield the records whose lines were completed since the last read, in order."""
        while whole := self._whole_lines():
            yield from parse_json_lines(whole)

    def new(self) -> list[Record]:
        """Return what ``records`` yields, as a list."""
        return list(self.records())

    def _whole_lines(self) -> bytes:
        """Read the next complete lines, up to CHUNK bytes of them, or a single line that is longer."""
        try:
            file = open_regular(self._path)  # opened each time, since NFS shows new data only then
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
    """Read all records of a metrics file in order; none if it is missing. Incomplete lines are left out."""
    return MetricsTail(path).new()


@overload
def number(record: Mapping[str, Value], name: str) -> float | None: ...
@overload
def number(record: Mapping[str, Value], name: str, default: float) -> float: ...
def number(record: Mapping[str, Value], name: str, default: float | None = None) -> float | None:
    """Return the number called ``name`` in a record; ``default`` if it is missing, a text or a list."""
    value = record.get(name)
    return default if value is None or isinstance(value, str | Sequence) else float(value)


class Clock:
    """Stopwatch that sums the durations of blocks by name: ``with clock("learn"): …``."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent in the block since the last reset to ``name``, even if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - max(start, self._since)
            self._total[name] = self._total.get(name, 0.0) + seconds

    @property
    def wall(self) -> float:
        """Seconds since the clock was made, or since its last reset."""
        return time.perf_counter() - self._since

    def reset(self) -> dict[str, float]:
        """Return the seconds summed for each name since the last reset, and begin again at 0."""
        total, self._total = self._total, {}
        self._since = time.perf_counter()
        return total
