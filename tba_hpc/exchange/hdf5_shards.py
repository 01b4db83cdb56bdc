"""Shards and arrays on disk as HDF5: sealed whole, verified whole. The only module that imports h5py.

A file is an HDF5 image behind a user block of 512 bytes with one line of text: what the file is, its schema,
its size, and a BLAKE2b checksum of the rest. So a damaged file is refused before HDF5 parses a byte of
it, ``head -1`` shows what a file is, and every HDF5 tool since 1.8 still reads it. Images are made and parsed
in memory: a full disk fails one plain ``write``, and HDF5's file locks are never taken.

The checksum is no signature: only plain arrays that lie in the image are read, no links, no other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import h5py
import numpy as np

from tba_hpc.config import Config, is_elastic
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import COLUMNS, RECORD, Group, ScoredGroup, Shard, Trajectories, make_uid
from tba_hpc.run.directory import REFUSED, RunDir, of_two_runs
from tba_hpc.run.files import AGAIN_SECONDS, fsync, insist, make_folder, passes, publish, unless_away
from tba_hpc.run.owners import end_if_superseded

log = logging.getLogger(__name__)

SCHEMA = 3
"""Version of the layout and of RECORD; readers refuse any other."""

HEADER_BYTES = 512
"""Size of the user block (HDF5 allows powers of two from 512)."""

LIBVER = ("earliest", "v110")
"""Oldest format that holds the data, so that a site's HDF5 1.10 reads it."""

EVERYBODY = range(1 << 20)
"""All numbers that a searcher may have: as many as there are in a uid."""

SEARCHERS_AT_FULL_RATE = 64
"""Searchers up to which each seals every ``exchange.seal_seconds``; more of them share that rate."""

_DTYPES = dict(
    zip(COLUMNS, (RECORD, np.int32, np.int64, np.int32, np.int64, np.float32, np.float32), strict=True)
)
_MAX_ROWS = 1 << 20  # bits of the row in a uid
_MAGIC = b"tba-hpc "
_START = re.compile(_MAGIC + rb"(\w+) schema=(\d+) bytes=(\d+) ")


class ShardError(ValueError):
    """A file cannot be used; the message is one sentence: truncated, corrupt, foreign, too new."""


class AnotherVersionError(ShardError):
    """A file is whole, but of another version of tba-hpc: it holds data that must not be set aside."""


# --- Files ---


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as one durable file with a checksum. Raises DiskFullError."""
    publish(path, _encode("arrays", {}, arrays))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What write_arrays wrote. Raises ShardError."""
    return _decode(path, "arrays", _bytes(path))[1]


def _bytes(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
        raise ShardError(f"{path} is no regular file: whoever made it, remove it")
    return path.read_bytes()


def write_shard(path: Path, shard: Shard) -> None:
    """Seal a shard: durable and visible when this returns. What is sealed is never replaced.

    Raises ValueError (check), DiskFullError, and FileExistsError if ``path`` holds anything else.
    """
    data = shard.image or with_image(shard).image
    assert data is not None
    try:
        publish(path, data, replace=False)
    except FileExistsError:
        if path.read_bytes() != data:
            raise
        fsync(path.parent)  # an error came after the name was given, and this is another try


def with_image(shard: Shard) -> Shard:
    """The same shard with the bytes of its file. Raises ValueError (check)."""
    trajectories = shard.trajectories
    trajectories.check()
    attributes = {"searcher": shard.searcher, "index": shard.index, "count": len(trajectories)}
    attributes |= {"run": shard.run} if shard.run else {}
    return replace(shard, image=_encode("shard", attributes, trajectories.to_arrays()))


def read_shard(path: Path) -> Shard:
    """Read a shard. Raises ShardError if it is truncated, corrupt, foreign, too new, inconsistent."""
    return parse_shard(path, _bytes(path))


def parse_shard(path: Path, data: bytes) -> Shard:
    """Like ``read_shard``, from the bytes of a file; ``path`` is what it is called in errors."""
    attributes, arrays = _decode(path, "shard", data)
    wrong = _DTYPES.keys() - arrays
    wrong |= {n for n in _DTYPES.keys() & arrays if arrays[n].dtype != _DTYPES[n] or arrays[n].ndim != 1}
    if wrong:
        raise AnotherVersionError(
            f"{path} is of another version of tba-hpc ({min(wrong)} is missing or of another type): "
            "use the version that wrote it"
        )
    try:
        trajectories = Trajectories.from_arrays(arrays)
        trajectories.check()
        return Shard(attributes["searcher"], attributes["index"], trajectories, attributes["run"])
    except ValueError as error:
        raise ShardError(f"{path}: {error}") from None


def _encode(kind: str, attributes: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Bytes of a file: header and HDF5 image. The same values give the same bytes."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver=LIBVER, userblock_size=HEADER_BYTES) as file:
        file.attrs.update({"format": f"tba-hpc {kind}", "schema": SCHEMA, **attributes})
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    data = image.getbuffer()
    data[:HEADER_BYTES] = _header(kind, data[HEADER_BYTES:], SCHEMA)
    return data


def _decode(path: Path, kind: str, data: bytes) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Numbers of a shard, and arrays of a file, verified first."""
    schema = _verify(path, kind, data)
    try:
        # The low-level interface takes .6 ms for a shard, h5py.File over the same bytes 1.1 ms.
        with contextlib.closing(h5py.h5f.open_file_image(data)) as file:
            group = h5py.h5g.open(file, b"/")
            _require_schema(path, schema, _number(group, "schema"))
            arrays = {name.decode(): _array(group, name, len(data)) for name in group}
            return _numbers(group) if kind == "shard" else {}, arrays
    except (OSError, RuntimeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path} was not written by tba-hpc ({error}): move it elsewhere") from None


def _require_schema(path: Path, schema: int, sealed: int) -> None:
    """schema: of the first line, which has no checksum; sealed: of the body, whose checksum was right."""
    if schema != sealed:
        raise ShardError(f"{path} is corrupt: its first line is damaged")
    if schema != SCHEMA:
        raise AnotherVersionError(
            f"{path} is of another version of tba-hpc (schema {schema}, this one reads schema {SCHEMA}): "
            "use the version that wrote it"
        )


def _numbers(group: h5py.h5g.GroupID) -> dict[str, int]:
    """Attributes of a shard; version 0.3.0 wrote no run."""
    run = {} if h5py.h5a.exists(group, b"run") else {"run": 0}
    return run | {name: _number(group, name) for name in ("searcher", "index", "run") if name not in run}


def _number(group: h5py.h5g.GroupID, name: str) -> int:
    """An attribute, refused unless it is one number: h5py reads whatever there is into any array."""
    attribute = h5py.h5a.open(group, name.encode())
    if attribute.shape != () or attribute.dtype.kind not in "iu":
        raise TypeError(f"attribute {name} is no number")
    value = np.empty((), attribute.dtype)
    attribute.read(value)
    return int(value)


def _array(group: h5py.h5g.GroupID, name: bytes, room: int) -> np.ndarray:
    """A copy of an array; refused unless its numbers lie in this file of ``room`` bytes, in one piece.

    HDF5 would follow links to other files, and read arrays from files that are only named here.
    """
    if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        raise TypeError(f"{name.decode()} is a link")
    dataset = h5py.h5o.open(group, name)
    if not isinstance(dataset, h5py.h5d.DatasetID):
        raise TypeError(f"{name.decode()} is no array")
    stored = dataset.get_create_plist()
    dtype, shape = dataset.dtype, dataset.shape or ()
    nbytes = prod(shape) * dtype.itemsize
    in_one_piece = stored.get_layout() == h5py.h5d.CONTIGUOUS and stored.get_external_count() == 0
    if not in_one_piece or dtype.hasobject or not dataset.get_storage_size() == nbytes <= room:
        raise TypeError(f"{name.decode()} does not lie in it as a plain array")
    values = np.empty(shape, dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def _header(kind: str, body: memoryview, schema: int) -> bytes:
    checksum = hashlib.blake2b(body, digest_size=16).hexdigest()
    line = f"{_MAGIC.decode()}{kind} schema={schema} bytes={len(body)} blake2b={checksum}\n"
    return line.encode().ljust(HEADER_BYTES, b"\0")


def _verify(path: Path, kind: str, data: bytes) -> int:
    """Raise ShardError unless every byte of ``data`` is as it was written; returns its schema."""
    start = _START.match(data)
    if not data.startswith(_MAGIC[: len(data)]):
        raise ShardError(f"{path} is not a file of tba-hpc: another program wrote it; move it elsewhere")
    if len(data) < HEADER_BYTES:
        raise ShardError(f"{path} is truncated: {len(data)} bytes are left, not even its header")
    if start is None:
        raise ShardError(f"{path} is corrupt: its first line is damaged")
    found, schema, size = start[1].decode(), int(start[2]), int(start[3])
    if len(data) - HEADER_BYTES < size:
        raise ShardError(f"{path} is truncated: {len(data)} of {size + HEADER_BYTES} bytes are left")
    if found != kind:
        raise ShardError(f"{path} holds {found}, where {kind} was expected: check the path")
    if data[:HEADER_BYTES] != _header(kind, memoryview(data)[HEADER_BYTES:], schema):
        raise ShardError(f"{path} is corrupt: its checksum does not match its contents")
    return schema


# --- The searcher's side ---


def seal_interval(config: Config) -> float:
    """Longest wait of a completion to be sealed, s: a run of any size makes as many files a second."""
    return config.exchange.seal_seconds * max(1.0, config.launch.places / SEARCHERS_AT_FULL_RATE)


class ShardWriter:
    """Collects a searcher's scored groups and seals them as shards: a trajectory is acknowledged by ``seal``.

    Indices go up by one and are never used twice in a run. ``first_index``: the trainer's cursor of this
    searcher, since shards may have been merged, checkpointed and pruned; files on disk, those set aside
    included, count as well. timeout: how long a full disk is waited for, s.
    """

    def __init__(
        self,
        run: RunDir,
        searcher: int,
        *,
        first_index: int = 0,
        timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = run.shard_folder(searcher)
        insist(lambda: make_folder(folder), seconds=timeout)
        for stale in folder.glob(".*.tmp"):  # of a writer that was killed
            stale.unlink(missing_ok=True)
        self._run = run
        self._identity = run.identity
        self._searcher = searcher
        self._index = max(first_index, _next_free_index(run, searcher))
        self._timeout = timeout
        self._clock = clock
        self._open: list[ScoredGroup] = []
        self._since = 0.0

    def __len__(self) -> int:
        """Completions not yet sealed."""
        return sum(len(scored.group.completions) for scored in self._open)

    @property
    def age(self) -> float:
        """Seconds that the oldest unsealed completion has waited; 0 if there is none."""
        return self._clock() - self._since if self._open else 0.0

    def append(
        self,
        group: Group,
        rewards: Sequence[float],
        ref_logprobs: Sequence[np.ndarray],
        *,
        reference: int = 0,
    ) -> None:
        """Add a ``ScoredGroup``; one without completions leaves no trace: a resume asks for it again."""
        assert len(rewards) == len(ref_logprobs) == len(group.completions) == len(group.versions)
        if not group.completions:
            return
        if not self._open:
            self._since = self._clock()
        self._open.append(ScoredGroup(group, rewards, ref_logprobs, reference))

    def seal(self) -> Shard | None:
        """Make the open shard durable and return it; None if it is empty.

        Raises DiskFullError if the disk stays full; the groups then stay open, and a later call tries
        again. Raises ExchangeError if another writer of this searcher has sealed the shard of that index.
        """
        if not self._open:
            return None
        trajectories = Trajectories.of_groups(self._open)
        record = trajectories.record
        assert len(record) <= _MAX_ROWS, f"a shard holds at most {_MAX_ROWS} trajectories"
        record["uid"] = np.arange(len(record))
        record["uid"] += np.uint64(make_uid(self._searcher, self._index, 0))
        shard = with_image(Shard(self._searcher, self._index, trajectories, self._identity))
        path = self._run.shard_file(self._searcher, self._index)

        def write() -> None:
            end_if_superseded()  # the successor's shard of this index may be merged and deleted already
            write_shard(path, shard)
            end_if_superseded()  # else whoever takes over from here on finds the shard

        try:
            insist(write, seconds=self._timeout)
        except FileExistsError:
            raise ExchangeError(
                f"{path} is sealed already, by a process that was searcher {self._searcher} before and was "
                "frozen meanwhile: start this searcher again, which continues after that shard"
            ) from None
        self._index += 1
        self._open = []
        return shard


def _next_free_index(run: RunDir, searcher: int) -> int:
    """The first index beyond those taken: by the listing of the folder, and by name, as that may lag."""
    listed = [*run.shard_indices(searcher), *run.shard_indices(searcher, ".h5" + REFUSED)]
    index = max(listed, default=-1) + 1
    while (path := run.shard_file(searcher, index)).exists() or _aside(path).exists():
        index += 1
    return index


# --- The trainer's side ---


class PendingShards:
    """Reads the shards of a run that are not merged yet, in order per searcher, one in memory at a time.

    A searcher's indices have no gaps, but a client of a shared file system may see a file late, and a later
    one before it. A file that others follow is waited for ``timeout`` seconds, and only then passed over,
    with a warning, together with those of its searcher that do not exist at that time. A file that cannot be
    used is set aside, logged, and left out; several ranks may read at once. searchers: looked for even if the
    listing of their folders lags. among: no others are read.
    """

    def __init__(
        self, run: RunDir, *, searchers: Sequence[int] = (), timeout: float = 0.0, among: range = EVERYBODY
    ) -> None:
        self._run = run
        self._identity = run.identity
        self._searchers = searchers
        self._among = among
        self._timeout = timeout
        self._missed: dict[Path, float] = {}  # since when, on the monotonic clock
        self._given_up: set[Path] = set()

    def read(self, cursors: Mapping[int, int]) -> Iterator[Shard]:
        """Those at or beyond the cursors that can be read now."""
        for searcher in self._all_searchers(cursors):
            yield from self._read(searcher, cursors.get(searcher, 0))

    def read_all(self, cursors: Mapping[int, int], searchers: Iterable[int] | None = None) -> Iterator[Shard]:
        """All at or beyond the cursors, of the given searchers or of all: waits for those that are missed.

        For the beginning of an attempt, when only elastic searchers may be sealing: files are also looked for
        by name, beyond the last one listed, and the listings are read until the others bring nothing new.
        """
        cursors, more = dict(cursors), True
        while more:
            more = False
            for searcher in self._all_searchers(cursors) if searchers is None else searchers:
                for shard in self._read(searcher, cursors.get(searcher, 0), beyond=True):
                    yield shard
                    cursors[searcher], more = shard.index + 1, more or not is_elastic(searcher)
            if self._missed:
                time.sleep(AGAIN_SECONDS)
                more = True

    def _all_searchers(self, cursors: Mapping[int, int]) -> list[int]:
        listed: list[int] = unless_away(self._run.shard_folders, otherwise=[])
        return sorted(number for number in {*listed, *cursors, *self._searchers} if number in self._among)

    def _read(self, searcher: int, index: int, *, beyond: bool = False) -> Iterator[Shard]:
        """One searcher's, up to the first that is missed. beyond: look for more than is listed."""
        end, has_waited = self._listed_end(searcher), False
        while end is not None and (index < end or beyond):
            path, shard = self._run.shard_file(searcher, index), None
            try:
                shard = self._load(path)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and not passes(error):
                    raise
                if index >= end and isinstance(error, FileNotFoundError):
                    self._missed.pop(path, None)  # its server may have been away at an earlier look
                    return
                if path not in self._given_up:
                    has_waited &= isinstance(error, FileNotFoundError)
                    if not self._gives_up(path, error, has_waited=has_waited):
                        return
                    has_waited = True
            if shard is not None:
                yield shard
            index += 1

    def _listed_end(self, searcher: int) -> int | None:
        """The index after the last one listed; None if the listing is to be tried again."""
        folder = self._run.shard_folder(searcher)
        try:
            end = max(self._run.shard_indices(searcher), default=-1) + 1
        except OSError as error:
            if not passes(error):
                raise
            return 0 if self._gives_up(folder, error) else None
        self._missed.pop(folder, None)
        return end

    def _load(self, path: Path) -> Shard | None:
        """The shard; None if it is set aside. Raises AnotherVersionError; OSError if it is not readable."""
        shard = None
        for last in (False, True):  # twice: what a client has cached may lag behind what was sealed
            try:
                shard = self._read_in_place(path)
                break
            except FileNotFoundError:
                if not _is_aside(path):
                    raise
                break
            except AnotherVersionError:
                raise
            except ShardError as error:
                if not last:
                    time.sleep(AGAIN_SECONDS)
                    continue
                with contextlib.suppress(FileNotFoundError):  # another rank was faster
                    path.rename(_aside(path))
                log.warning("%s; set aside as %s%s", error, path.name, REFUSED)
        self._missed.pop(path, None)
        return shard

    def _read_in_place(self, path: Path) -> Shard:
        shard = read_shard(path)
        if self._run.shard_file(shard.searcher, shard.index) != path:
            raise ShardError(
                f"{path} says that it is shard {shard.index} of searcher {shard.searcher}: a copy"
            )
        if of_two_runs(shard.run, self._identity):
            raise ShardError(f"{path} was sealed by another run")
        return shard

    def _gives_up(self, path: Path, error: OSError, *, has_waited: bool = False) -> bool:
        """Whether something has been missed for so long that the run continues without it.

        has_waited: it does not exist, and one before it was waited for just now.
        """
        if path in self._given_up:
            return True
        since = self._missed.setdefault(path, time.monotonic())
        if not has_waited and time.monotonic() - since < self._timeout:
            return False
        del self._missed[path]
        self._given_up.add(path)
        log.warning(
            "%s could not be read for %g s (%s), and others follow it: the run continues without it",
            *(path, self._timeout, error.strerror),
        )
        return True


def _aside(path: Path) -> Path:
    """The name of a broken file that no reader meets again; its index stays taken."""
    return path.with_name(path.name + REFUSED)


def _is_aside(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a file server that is away says neither
        return _aside(path).exists()
    return False
