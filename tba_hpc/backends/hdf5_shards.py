"""Shards and arrays on disk as HDF5: sealed whole, verified whole. The only module that imports h5py.

It must not decide when to seal or what to merge. A file is an HDF5 image behind a user block of 512
bytes, which holds one line of text: what the file is, its schema, its size and a BLAKE2b checksum of
all that follows. So a truncated or damaged file is refused before HDF5 parses a byte of it, ``head -1``
tells what a file is, and every HDF5 tool since 1.8 still reads it.

Images are made and parsed in memory: a full disk is met by one plain ``write``, HDF5's file locks are
never taken, and gzip is left off because it saves a third of the bytes for ten times the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import publish
from tba_hpc.types import RECORD, TRUNCATED, Group, Ragged, Shard, Trajectories, make_uid

log = logging.getLogger(__name__)

SCHEMA = 3
"""Version of the layout; readers refuse any other."""

HEADER_BYTES = 512
"""Size of the user block (HDF5 allows powers of two from 512)."""

LIBVER = ("earliest", "v110")
"""Oldest format that holds the data, so that a site's HDF5 1.10 reads it."""

REFUSED = ".refused"
"""Added to the name of a file that was set aside."""

_MAX_ROWS = 1 << 20  # bits of the row in a uid
_MAGIC = b"tba-hpc "
_START = re.compile(_MAGIC + rb"(\w+) schema=(\d+) bytes=(\d+) ")


class ShardError(ValueError):
    """A file cannot be used; the message is one sentence: truncated, corrupt, foreign, too new."""


# --- Files ---


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as one durable file with a checksum. Raises DiskFullError."""
    publish(path, _encode("arrays", {}, arrays))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What write_arrays wrote. Raises ShardError."""
    return _decode(path, "arrays")[1]


def write_shard(path: Path, shard: Shard) -> None:
    """Seal a shard: durable and visible when this returns.

    Raises ValueError (check), DiskFullError, and FileExistsError where ``path`` exists: what is sealed is
    never replaced.
    """
    trajectories = shard.trajectories
    trajectories.check()
    attributes = {"searcher": shard.searcher, "index": shard.index, "count": len(trajectories)}
    arrays = {
        "record": trajectories.record,
        "prompt_tokens": trajectories.prompts.values,
        "prompt_offsets": trajectories.prompts.offsets,
        "completion_tokens": trajectories.completions.values,
        "completion_offsets": trajectories.completions.offsets,
        "logprobs": trajectories.logprobs,
        "ref_logprobs": trajectories.ref_logprobs,
    }
    publish(path, _encode("shard", attributes, arrays), replace=False)


def read_shard(path: Path) -> Shard:
    """Read a shard. Raises ShardError where it is truncated, corrupt, foreign, too new, inconsistent."""
    attributes, arrays = _decode(path, "shard")
    trajectories = Trajectories(
        record=arrays["record"],
        prompts=Ragged(arrays["prompt_tokens"], arrays["prompt_offsets"]),
        completions=Ragged(arrays["completion_tokens"], arrays["completion_offsets"]),
        logprobs=arrays["logprobs"],
        ref_logprobs=arrays["ref_logprobs"],
    )
    try:
        trajectories.check()
    except ValueError as error:
        raise ShardError(f"{path}: {error}") from None
    return Shard(attributes["searcher"], attributes["index"], trajectories)


def _encode(kind: str, attributes: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Bytes of a file: header and HDF5 image. The same values give the same bytes."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver=LIBVER, userblock_size=HEADER_BYTES) as file:
        file.attrs.update({"format": f"tba-hpc {kind}", "schema": SCHEMA, **attributes})
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    data = image.getbuffer()
    data[:HEADER_BYTES] = _header(kind, data[HEADER_BYTES:])
    return data


def _decode(path: Path, kind: str) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Attributes (those that are numbers) and arrays of a file, verified first."""
    data = path.read_bytes()
    _verify(path, kind, data)
    with h5py.File(io.BytesIO(data), "r") as file:
        attributes = {name: int(value) for name, value in file.attrs.items() if name != "format"}
        return attributes, {name: dataset[()] for name, dataset in file.items()}


def _header(kind: str, body: memoryview) -> bytes:
    checksum = hashlib.blake2b(body, digest_size=16).hexdigest()
    line = f"{_MAGIC.decode()}{kind} schema={SCHEMA} bytes={len(body)} blake2b={checksum}\n"
    return line.encode().ljust(HEADER_BYTES, b"\0")


def _verify(path: Path, kind: str, data: bytes) -> None:
    """Raise ShardError unless every byte of ``data`` is as it was written."""
    start = _START.match(data)
    if not data.startswith(_MAGIC[: len(data)]):
        raise ShardError(f"{path} is not a file of tba-hpc: another program wrote it; move it elsewhere")
    if len(data) < HEADER_BYTES:
        raise ShardError(f"{path} is truncated: {len(data)} bytes are left, not even its header")
    if start is None:
        raise ShardError(f"{path} is corrupt: its first line is damaged")
    found, schema, size = start[1].decode(), int(start[2]), int(start[3])
    if schema != SCHEMA:
        raise ShardError(
            f"{path} has schema {schema}, this version reads schema {SCHEMA}: use the version that wrote it"
        )
    if len(data) - HEADER_BYTES < size:
        raise ShardError(f"{path} is truncated: {len(data)} of {size + HEADER_BYTES} bytes are left")
    if found != kind:
        raise ShardError(f"{path} holds {found}, where {kind} was expected: check the path")
    if data[:HEADER_BYTES] != _header(kind, memoryview(data)[HEADER_BYTES:]):
        raise ShardError(f"{path} is corrupt: its checksum does not match its contents")


# --- The searcher's side ---


@dataclass(frozen=True, slots=True)
class _Scored:
    group: Group
    rewards: Sequence[float]
    ref_logprobs: Sequence[np.ndarray]
    reference: int


class ShardWriter:
    """Collects a searcher's scored groups and seals them as shards: a trajectory is acknowledged by ``seal``.

    Indices go up by one and are never used twice in a run. ``first_index``: the checkpoint's cursor of
    this searcher, for shards may have been merged, checkpointed and pruned; files on disk, those set
    aside included, count as well.
    """

    def __init__(
        self,
        run: RunDir,
        searcher: int,
        *,
        first_index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = run.shard_folder(searcher)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.tmp"):  # of a writer that was killed
            stale.unlink(missing_ok=True)
        self._run = run
        self._searcher = searcher
        self._index = max(first_index, _next_free_index(run, searcher))
        self._clock = clock
        self._open: list[_Scored] = []
        self._since = 0.0

    def __len__(self) -> int:
        """Completions not yet sealed."""
        return sum(len(scored.group.completions) for scored in self._open)

    @property
    def age(self) -> float:
        """Seconds that the oldest unsealed completion has waited; 0 where there is none."""
        return self._clock() - self._since if self._open else 0.0

    def append(
        self,
        group: Group,
        rewards: Sequence[float],
        ref_logprobs: Sequence[np.ndarray],
        *,
        reference: int = 0,
    ) -> None:
        """Add a group: one finite reward and float32 [T] reference log-probabilities per completion.

        reference: optimizer step of the policy that these are of.
        A group without completions leaves no trace: its request_id stays open for a resume.
        """
        assert len(rewards) == len(ref_logprobs) == len(group.completions) == len(group.versions)
        if not group.completions:
            return
        if not self._open:
            self._since = self._clock()
        self._open.append(_Scored(group, rewards, ref_logprobs, reference))

    def seal(self) -> Shard | None:
        """Make the open shard durable and return it; None where it is empty.

        Raises DiskFullError; the groups then stay open, and a later call tries again. Raises ShardError
        where another writer of this searcher has sealed the shard of that index.
        """
        if not self._open:
            return None
        shard = Shard(self._searcher, self._index, _collect(self._open, self._searcher, self._index))
        path = self._run.shard_file(self._searcher, self._index)
        try:
            write_shard(path, shard)
        except FileExistsError:
            raise ShardError(
                f"{path} is sealed already: another process is searcher {self._searcher} of this run; end "
                "one of the two, and start this one again"
            ) from None
        self._index += 1
        self._open = []
        return shard


def _next_free_index(run: RunDir, searcher: int) -> int:
    taken = [index for s, index in [*run.shard_files(), *run.shard_files(".h5" + REFUSED)] if s == searcher]
    return max(taken, default=-1) + 1


def _collect(scored: Sequence[_Scored], searcher: int, index: int) -> Trajectories:
    """Trajectories of the groups in order, each distinct prompt once."""
    prompts = {one.group.request.prompt.id: one.group.request.prompt for one in scored}
    prompt_rows = {prompt_id: row for row, prompt_id in enumerate(prompts)}
    completions = [completion for one in scored for completion in one.group.completions]
    record = np.concatenate([_records(one, prompt_rows) for one in scored])
    assert len(record) <= _MAX_ROWS, f"a shard holds at most {_MAX_ROWS} trajectories"
    record["uid"] = np.arange(len(record), dtype=np.uint64) + np.uint64(make_uid(searcher, index, 0))
    return Trajectories(
        record=record,
        prompts=Ragged.from_rows([prompt.tokens for prompt in prompts.values()], np.int32),
        completions=Ragged.from_rows([completion.tokens for completion in completions], np.int32),
        logprobs=np.concatenate([completion.logprobs for completion in completions], dtype=np.float32),
        ref_logprobs=np.concatenate([row for one in scored for row in one.ref_logprobs], dtype=np.float32),
    )


def _records(scored: _Scored, prompt_rows: Mapping[int, int]) -> np.ndarray:
    """RECORD rows of one group, uid left open."""
    request, completions = scored.group.request, scored.group.completions
    record = np.zeros(len(completions), RECORD)
    record["prompt_id"] = request.prompt.id
    record["request_id"] = request.id
    record["prompt_row"] = prompt_rows[request.prompt.id]
    record["reward"] = scored.rewards
    record["version_oldest"], record["version_newest"] = scored.group.versions.T
    record["truncated"] = [TRUNCATED * (c.finish_reason == "length") for c in completions]
    record["reference"] = scored.reference
    return record


# --- The resume's side ---


def pending_shards(run: RunDir, cursors: Mapping[int, int]) -> list[Path]:
    """Shards at or beyond the cursors, in (searcher, index) order: those a resume merges first."""
    return [path for (s, index), path in run.shard_files().items() if index >= cursors.get(s, 0)]


def read_pending(run: RunDir, cursors: Mapping[int, int]) -> Iterator[Shard]:
    """The pending shards, one at a time; a file that cannot be used is set aside, logged, and left out.

    Several ranks may read at once: a file that another rank has just set aside is passed over.
    """
    for path in pending_shards(run, cursors):
        try:
            shard = _read_in_place(run, path)
        except FileNotFoundError:
            continue
        except ShardError as error:
            set_aside(path)
            log.warning("%s; set aside as %s%s", error, path.name, REFUSED)
            continue
        yield shard


def _read_in_place(run: RunDir, path: Path) -> Shard:
    shard = read_shard(path)
    if run.shard_file(shard.searcher, shard.index) != path:
        raise ShardError(f"{path} says that it is shard {shard.index} of searcher {shard.searcher}: a copy")
    return shard


def set_aside(path: Path) -> None:
    """Rename a broken file so that no reader meets it again; its index stays taken."""
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        path.rename(path.with_name(path.name + REFUSED))
