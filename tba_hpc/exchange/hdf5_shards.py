"""Shards and arrays on disk as HDF5, sealed and verified as a whole. The only module that imports h5py.

A file consists of a header of 512 bytes, which HDF5 calls a user block, and an HDF5 image. The header holds
one line of text: kind of file, schema, size, and a BLAKE2b checksum of the image. So a damaged file is
refused before HDF5 parses it, ``head -1`` shows what a file is, and every HDF5 tool since 1.8 can read it.
Images are made and parsed in memory, so that a full disk makes only a plain ``write`` fail, and HDF5 locks
no file.

Anybody can compute the checksum, so an intact file may still be hostile. Therefore only plain arrays inside
the image are read; links and references to other files are refused.
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
from tba_hpc.core.types import (
    COLUMNS,
    RECORD,
    TOP_LOGPROBS,
    Group,
    ScoredGroup,
    Shard,
    Trajectories,
    make_uid,
)
from tba_hpc.run.directory import REFUSED, RunDir, ShardKey, of_two_runs
from tba_hpc.run.files import (
    DISK_RETRY_SECONDS,
    fsync,
    if_available,
    is_temporary,
    make_folder,
    publish,
    retry,
)
from tba_hpc.run.owners import end_if_superseded

log = logging.getLogger(__name__)

SCHEMA = 3
"""Version of the layout and of RECORD; readers refuse other versions."""

HEADER_BYTES = 512
"""Size of a file's header, in bytes. HDF5 allows powers of two from 512."""

LIBVER = ("earliest", "v110")
"""Range of HDF5 formats to write: the oldest that can hold the data, and none newer than HDF5 1.10."""

EVERYBODY = range(1 << 20)
"""All possible searcher numbers, limited by the bits in a uid."""

SEARCHERS_AT_FULL_RATE = 64
"""Number of searchers up to which each seals a shard every ``exchange.seal_seconds``. If there are more, each
seals less often, so that all searchers together seal no more shards per second."""

_DTYPES = dict(
    zip(
        COLUMNS,
        (RECORD, np.int32, np.int64, np.int32, np.int64, np.float32, np.float32, TOP_LOGPROBS),
        strict=True,
    )
)
_MAX_ROWS = 1 << 20  # a uid has 20 bits for the row
_MAGIC = b"tba-hpc "
_START = re.compile(_MAGIC + rb"(\w+) schema=(\d+) bytes=(\d+) ")


class ShardError(ValueError):
    """Error for an unusable file: truncated, corrupt, foreign or of another version."""


class AnotherVersionError(ShardError):
    """Error for an intact file that another version of tba-hpc wrote. Such a file is not set aside."""


# --- Files ---


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as one durable file with a checksum. Raises DiskFullError."""
    publish(path, _encode("arrays", {}, arrays))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays that ``write_arrays`` wrote. Raises ShardError."""
    return _decode(path, "arrays", _bytes(path))[1]


def _bytes(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never return
        raise ShardError(f"{path} is not a regular file: remove it")
    return path.read_bytes()


def write_shard(path: Path, shard: Shard) -> None:
    """Seal a shard as ``path``: the file is durable when this returns, and is never replaced.

    Raises ValueError if the check fails, FileExistsError if ``path`` has other data, or DiskFullError.
    """
    data = shard.image or with_image(shard).image
    assert data is not None
    try:
        publish(path, data, replace=False)
    except FileExistsError:
        if path.read_bytes() != data:
            raise
        fsync(path.parent)  # an earlier call wrote the file, and then failed


def with_image(shard: Shard) -> Shard:
    """Check a shard, and add ``image``, the bytes of its file. Raises ValueError if the check fails."""
    trajectories = shard.trajectories
    trajectories.check()
    attributes = {"searcher": shard.searcher, "index": shard.index, "count": len(trajectories)}
    attributes |= {"run": shard.run} if shard.run else {}
    aside = {"set_aside": np.array(shard.set_aside)} if shard.set_aside else {}
    return replace(shard, image=_encode("shard", attributes, trajectories.to_arrays() | aside))


def read_shard(path: Path) -> Shard:
    """Read a shard. Raises ShardError if it is unusable, and OSError if it cannot be read."""
    return parse_shard(path, _bytes(path))


def read_sealed(run: RunDir, key: ShardKey) -> Shard:
    """Read a shard of ``run`` from RUN/shards or, if it has been moved there, from RUN/kept.

    Raises ShardError if it is damaged or was deleted, OSError if it cannot be read.
    """
    path = run.shard_file(*key)
    for place in (path, run.kept_file(*key)):
        with contextlib.suppress(FileNotFoundError):
            return read_shard(place)
    raise ShardError(
        f"{path} was deleted by its run after this command had begun: let the run keep its shards "
        "(exchange.keep_shards=1)"
    )


def parse_shard(path: Path, data: bytes) -> Shard:
    """Return the shard in ``data``, the bytes of a file. path: its name in errors. Raises ShardError."""
    attributes, arrays = _decode(path, "shard", data)
    wrong = _DTYPES.keys() - arrays - {"top_logprobs"}
    form = {name: (dtype, 2 if name == "top_logprobs" else 1) for name, dtype in _DTYPES.items()}
    form["set_aside"] = np.int64, 1
    wrong |= {n for n in form.keys() & arrays if (arrays[n].dtype, arrays[n].ndim) != form[n]}
    if wrong:
        raise AnotherVersionError(
            f"{path} is of another version of tba-hpc ({min(wrong)} is missing or of another type): "
            "use the version that wrote it"
        )
    try:
        trajectories = Trajectories.from_arrays(arrays)
        trajectories.check()
        aside = tuple(arrays.get("set_aside", np.empty(0, np.int64)).tolist())
        return Shard(attributes["searcher"], attributes["index"], trajectories, attributes["run"], aside)
    except ValueError as error:
        raise ShardError(f"{path}: {error}") from None


def _encode(kind: str, attributes: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Return the bytes of a file. The same values give the same bytes. kind: "shard" or "arrays"."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver=LIBVER, userblock_size=HEADER_BYTES) as file:
        file.attrs.update({"format": f"tba-hpc {kind}", "schema": SCHEMA, **attributes})
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    data = image.getbuffer()
    data[:HEADER_BYTES] = _header(kind, data[HEADER_BYTES:], SCHEMA)
    return data


def _decode(path: Path, kind: str, data: bytes) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Verify a file; return its attributes (empty unless it is a shard) and arrays. Raises ShardError."""
    schema = _verify(path, kind, data)
    try:
        # The low-level interface takes 0.6 ms for a shard, h5py.File over the same bytes 1.1 ms.
        with contextlib.closing(h5py.h5f.open_file_image(data)) as file:
            group = h5py.h5g.open(file, b"/")
            _require_schema(path, schema, _number(group, "schema"))
            arrays = {name.decode(): _array(group, name, len(data)) for name in group}
            return _numbers(group) if kind == "shard" else {}, arrays
    except (OSError, RuntimeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path} was not written by tba-hpc ({error}): move it elsewhere") from None


def _require_schema(path: Path, schema: int, sealed: int) -> None:
    """Check a file's schema, which the image and the first line state; the checksum covers only the image.

    path: name of the file in errors. schema: schema in the file's first line. sealed: schema in the image.
    Raises ShardError if the two differ, and AnotherVersionError if they are not SCHEMA.
    """
    if schema != sealed:
        raise ShardError(f"{path} is corrupt: its first line is damaged")
    if schema != SCHEMA:
        raise AnotherVersionError(
            f"{path} is of another version of tba-hpc (schema {schema}, this one reads schema {SCHEMA}): "
            "use the version that wrote it"
        )


def _numbers(group: h5py.h5g.GroupID) -> dict[str, int]:
    """Read the attributes of a shard. ``run`` is 0 for shards of version 0.3.0, which lack this attribute."""
    run = {} if h5py.h5a.exists(group, b"run") else {"run": 0}
    return run | {name: _number(group, name) for name in ("searcher", "index", "run") if name not in run}


def _number(group: h5py.h5g.GroupID, name: str) -> int:
    """Read an attribute. Raises TypeError unless it is one integer; h5py would convert anything else."""
    attribute = h5py.h5a.open(group, name.encode())
    if attribute.shape != () or attribute.dtype.kind not in "iu":
        raise TypeError(f"attribute {name} is no number")
    value = np.empty((), attribute.dtype)
    attribute.read(value)
    return int(value)


def _array(group: h5py.h5g.GroupID, name: bytes, room: int) -> np.ndarray:
    """Read an array. Raises TypeError unless it is stored in one piece within this file.

    room: size of the file, in bytes. HDF5 by itself would also follow links, and read other files.
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
        raise TypeError(f"{name.decode()} is not stored as a plain array")
    values = np.empty(shape, dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def _header(kind: str, body: memoryview, schema: int) -> bytes:
    checksum = hashlib.blake2b(body, digest_size=16).hexdigest()
    line = f"{_MAGIC.decode()}{kind} schema={schema} bytes={len(body)} blake2b={checksum}\n"
    return line.encode().ljust(HEADER_BYTES, b"\0")


def _verify(path: Path, kind: str, data: bytes) -> int:
    """Verify a file by its header; return the schema that the first line states.

    path: name of the file in errors. kind: ``shard`` or ``arrays``, which the file must be. data: its bytes.
    Raises ShardError unless the file is of this kind and whole, and its checksum is right. The checksum does
    not cover the schema itself: see ``_require_schema``.
    """
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
        raise ShardError(f"{path} is a file of kind {found}, not {kind}: check the path")
    if data[:HEADER_BYTES] != _header(kind, memoryview(data)[HEADER_BYTES:], schema):
        raise ShardError(f"{path} is corrupt: its checksum does not match its contents")
    return schema


# --- The searcher's side ---


def seal_interval(config: Config) -> float:
    """Return the longest time until a scored completion is sealed, in seconds; see SEARCHERS_AT_FULL_RATE."""
    return config.exchange.seal_seconds * max(1.0, config.launch.places / SEARCHERS_AT_FULL_RATE)


class ShardWriter:
    """Collects a searcher's scored groups and seals them as shards.

    A trajectory is acknowledged, and from then on never lost, when ``seal`` returns its shard. Indices of
    shards go up by one, and none is used twice in a run. They begin at ``first_index``, the trainer's cursor
    of this searcher, since shards below it may be deleted. If files on disk go further, even some that were
    set aside, indices begin after the last file. timeout: longest wait while a disk is full, in seconds.
    clock: function that returns the time, in seconds.
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
        retry(lambda: make_folder(folder), seconds=timeout)
        for stale in folder.glob(".*.tmp"):  # left by a writer that was killed
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
        """Return the number of completions not yet sealed."""
        return sum(len(scored.group.completions) for scored in self._open)

    @property
    def age(self) -> float:
        """Time that the oldest unsealed completion has waited, in seconds; 0 if there is none."""
        return self._clock() - self._since if self._open else 0.0

    def append(
        self,
        group: Group,
        rewards: Sequence[float],
        ref_logprobs: Sequence[np.ndarray],
        *,
        reference: int = 0,
    ) -> None:
        """Add a group with its scores; see ``ScoredGroup`` for the arguments.

        A group may be empty because its completions were set aside. The shard then lists its request as set
        aside.
        """
        assert len(rewards) == len(ref_logprobs) == len(group.completions) == len(group.versions)
        if not self._open:
            self._since = self._clock()
        self._open.append(ScoredGroup(group, rewards, ref_logprobs, reference))

    def seal(self) -> Shard | None:
        """Seal the groups added since the last call as a shard, and return it; None if there are none.

        Raises DiskFullError if the disk stays full; the groups are kept, and a later call tries again. Raises
        ExchangeError if another process with this searcher's number has sealed a shard of the same index.
        """
        if not self._open:
            return None
        trajectories = Trajectories.of_groups(self._open)
        record = trajectories.record
        assert len(record) <= _MAX_ROWS, f"a shard holds at most {_MAX_ROWS} trajectories"
        record["uid"] = np.arange(len(record))
        record["uid"] += np.uint64(make_uid(self._searcher, self._index, 0))
        aside = tuple(one.group.request.id for one in self._open if not one.group.completions)
        shard = with_image(Shard(self._searcher, self._index, trajectories, self._identity, aside))
        path = self._run.shard_file(self._searcher, self._index)

        def write() -> None:
            end_if_superseded()  # a successor's shard of this index may be merged and deleted already
            write_shard(path, shard)
            end_if_superseded()  # a successor that starts from now on finds this shard

        try:
            retry(write, seconds=self._timeout)
        except FileExistsError:
            raise ExchangeError(
                f"{path} is sealed already, by an earlier process of searcher {self._searcher} that had been "
                "frozen: start this searcher again, and it continues after that shard"
            ) from None
        self._index += 1
        self._open = []
        return shard


def _next_free_index(run: RunDir, searcher: int) -> int:
    """Return the first free index of a searcher's shards.

    The listing of a shared folder may lag, so the names after the last listed one are tried, too.
    """
    listed = [*run.shard_indices(searcher), *run.shard_indices(searcher, ".h5" + REFUSED)]
    index = max(listed, default=-1) + 1
    while (path := run.shard_file(searcher, index)).exists() or _aside(path).exists():
        index += 1
    return index


# --- The trainer's side ---


class PendingShards:
    """Reads shards that are not merged yet: in order for each searcher, and one in memory at a time.

    A searcher's indices have no gaps, but a shared file system may show a file late, even after later ones.
    If a file is missing and others follow, reading stops there for up to ``timeout`` seconds. Then the file
    is skipped, with a warning, as are others of this searcher that are missing at that moment. An unusable
    file is set aside (renamed), with a warning; several ranks may do so at once. searchers: numbers of
    searchers whose folders are read even if the listing of folders, which may lag, lacks them. among: numbers
    of the searchers that may be read; all others are ignored.
    """

    def __init__(
        self, run: RunDir, *, searchers: Sequence[int] = (), timeout: float = 0.0, among: range = EVERYBODY
    ) -> None:
        self._run = run
        self._identity = run.identity
        self._searchers = searchers
        self._among = among
        self._timeout = timeout
        self._missed: dict[Path, float] = {}  # when each was first found missing, on the monotonic clock
        self._given_up: set[Path] = set()

    def read(self, cursors: Mapping[int, int]) -> Iterator[Shard]:
        """Yield the shards at or beyond the cursors that can be read now."""
        for searcher in self._all_searchers(cursors):
            yield from self._read(searcher, cursors.get(searcher, 0))

    def read_all(self, cursors: Mapping[int, int], searchers: Iterable[int] | None = None) -> Iterator[Shard]:
        """Yield all shards at or beyond the cursors, of the given searchers or of all; wait for missing ones.

        Call this only at the beginning of an attempt, when no searchers but elastic ones seal. Names after
        the last listed file are tried, too. Folders are listed again until they show no new shard of a
        searcher that is not elastic.
        """
        cursors, more = dict(cursors), True
        while more:
            more = False
            for searcher in self._all_searchers(cursors) if searchers is None else searchers:
                for shard in self._read(searcher, cursors.get(searcher, 0), beyond=True):
                    yield shard
                    cursors[searcher], more = shard.index + 1, more or not is_elastic(searcher)
            if self._missed:
                time.sleep(DISK_RETRY_SECONDS)
                more = True

    def _all_searchers(self, cursors: Mapping[int, int]) -> list[int]:
        listed: list[int] = if_available(self._run.shard_folders, otherwise=[])
        return sorted(number for number in {*listed, *cursors, *self._searchers} if number in self._among)

    def _read(self, searcher: int, index: int, *, beyond: bool = False) -> Iterator[Shard]:
        """Yield a searcher's shards from ``index`` to the first missing one.

        beyond: whether to try names after the last listed one, too.
        """
        end, waited = self._listed_end(searcher), False
        while end is not None and (index < end or beyond):
            path, shard = self._run.shard_file(searcher, index), None
            try:
                shard = self._load(path)
            except OSError as error:
                absent = isinstance(error, FileNotFoundError)
                if not absent and not is_temporary(error):
                    raise
                if absent and index >= end:
                    self._missed.pop(path, None)  # an earlier try may have found the server away
                    return
                if path not in self._given_up:
                    # Only the first absent file is waited for. The others had as much time to appear.
                    if not self._give_up_if_late(path, error, at_once=waited and absent):
                        return
                    waited = True
            if shard is not None:
                yield shard
            index += 1

    def _listed_end(self, searcher: int) -> int | None:
        """Return the index after a searcher's last listed shard; None if the folder cannot be listed now.

        A folder that could not be listed for ``timeout`` seconds counts as empty.
        """
        folder = self._run.shard_folder(searcher)
        try:
            end = max(self._run.shard_indices(searcher), default=-1) + 1
        except OSError as error:
            if not is_temporary(error):
                raise
            return 0 if self._give_up_if_late(folder, error) else None
        self._missed.pop(folder, None)
        return end

    def _load(self, path: Path) -> Shard | None:
        """Read a shard; None if its file is unusable. Raises AnotherVersionError or OSError.

        An unusable file is set aside: renamed, so that nobody reads it again. Another rank may have done so.
        """
        shard = None
        for last in (False, True):  # twice, because this machine may have cached old contents of the file
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
                    time.sleep(DISK_RETRY_SECONDS)
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
                f"{path} holds shard {shard.index} of searcher {shard.searcher}, so it is a copy"
            )
        if of_two_runs(shard.run, self._identity):
            raise ShardError(f"{path} was sealed by another run")
        return shard

    def _give_up_if_late(self, path: Path, error: OSError, *, at_once: bool = False) -> bool:
        """Give up ``path`` if it was unreadable for ``timeout`` seconds; return whether it is given up.

        The run goes on without a file that is given up. at_once: whether to give it up without a wait.
        """
        if path in self._given_up:
            return True
        since = self._missed.setdefault(path, time.monotonic())
        if not at_once and time.monotonic() - since < self._timeout:
            return False
        del self._missed[path]
        self._given_up.add(path)
        log.warning(
            "%s could not be read for %g s (%s): the run continues without it",
            *(path, self._timeout, error.strerror),
        )
        return True


def _aside(path: Path) -> Path:
    """Return the name that a broken file gets. Readers ignore the file, but its index is not used again."""
    return path.with_name(path.name + REFUSED)


def _is_aside(path: Path) -> bool:
    with contextlib.suppress(OSError):  # the file server may be away
        return _aside(path).exists()
    return False
