"""Metrics of a run: one JSON line per record, one file per role and rank, names of the form ``area/what``.

Loops measure, this module writes and reads; nothing here knows what a number means. Every record has
``time`` (unix seconds). Seconds are wall time, shares lie in 0…1, ``log`` and ``nats`` are natural.

==============================  ========================================================================
name                            meaning (unit)
==============================  ========================================================================
RUN/metrics/trainer.jsonl       one record per optimizer step; long ones go on: ``.000000.gz`` comes first
step                            optimizer steps done, this one included
train/loss                      objective's loss over the batch
train/grad_norm                 global gradient norm before clipping
train/skipped_steps             steps not taken, as loss or gradient norm was not finite, so far (count);
                                such a step has no train/loss, no train/grad_norm
train/log_ratio                 mean over the batch's completions of log π_θ − p·log π_ref (nats per
                                completion); replayed data make it no KL
train/log_weight                mean over the batch's completions of log π_θ − log π_behaviour (nats per
                                completion): 0 on-policy, else minus how far the policy has moved since
train/better_log_weight         the same of completions with a reward above their group's mean: below 0 where
                                what is rewarded has become less likely; absent where the batch has none
train/ess                       effective sample size of π_θ/π_behaviour over the batch's completions,
                                (Σw)²/(N·Σw²) (share): 1 on-policy, 1/N where one outweighs all others
train/clip_share                what the objective's clip, cap or mask acts upon (share of the batch's tokens,
                                or of its completions where the ratio is of a completion), if it has one
train/flat_groups               groups of the batch whose rewards are all the same (share)
train/length                    mean length of the batch's completions (tokens)
train/replay_ratio              steps that have learned from a trajectory of the batch so far, this one
                                included (mean over the distinct ones): 1 where all are new
train/engine_gap                mean over the tokens of completions that exactly the weights of this step have
                                sampled of |log π_engine − log π_learner| (nats per token); absent where the
                                batch has none
train/log_z                     mean over groups of the estimated log Z (nats)
train/value                     mean over completions of V̂ of their requests (OAPL; units of the reward)
train/reward                    mean reward of the batch
train/learning_rate             learning rate that the step was taken with
train/beta                      KL coefficient of the step: β·T
train/reference_power           p = 1/(γ·T): power of the reference in the target policy of the step
train/tokens                    completion tokens in the batch (count)
time/step_seconds               one whole iteration of the trainer loop (s)
time/learn_seconds              of which inside ``learner.step`` (s)
time/reference_seconds          of which for the reference, where the trainer computes it (s)
train/wait_share                wall time outside forward, backward and optimizer, since warm-up (share)
sync/version                    weights last published (optimizer steps)
sync/publish_stall_seconds      time that the loop stood still in this step's publish, if it had one (s)
sync/late                       publishes put off, as the exchange's round was under way (count, so far)
sync/publishes                     publishes so far (count)
buffer/size                     trajectories in the replay buffer (count)
buffer/prompts                  distinct prompts in it (count)
buffer/added                    trajectories merged so far, less the duplicates (count)
buffer/duplicates               trajectories given up so far for one that is equal or near (count)
buffer/evicted                  trajectories evicted by capacity, or dropped as below, so far (count)
staleness/mean, staleness/max   |step − version| of the weights that sampled a trajectory (steps)
staleness/histogram             list of counts over the batch; bin i holds staleness i, the last bin
                                everything from its index up
event                           a record without the above: started, resumed, filling, waiting (no shard has
                                come for exchange.max_steps_without_data steps; one per wait), reset (the
                                policy became the reference), snapshot (what a checkpoint is to hold was
                                copied, and is written beside training), checkpoint (it is complete: its
                                ``step``), stopped, finished; with ``step``, ``buffer/size``, ``revision``
event: postponed                a checkpoint of ``step`` was not written for want of room, with ``fault``
                                (words); training goes on, and the next is tried in its turn
event: full                     the disk had no room for some records before this one, which follow them now;
seconds                         for how long (s); in the searchers' files, too
revision                        of the buffer: how often its content changed so far, by a merge of what
                                one collection brought or by an eviction of what is stale or used up (count)
event: lost                     a searcher died and the run goes on, with ``step``, ``searcher``, ``host``
event: damaged                  a checkpoint of ``step`` was set aside, and the one before is used, with
checkpoint, fault               its name, and what is wrong with it (words)
event: merged                   one per shard, with ``step``, ``revision``, and
sync                            weights published last by then (optimizer steps)
searcher, shard                 whose shard it was, and its index
trajectories, tokens            in it (count; tokens of completions)
request_ids                     list of the requests that its groups answer, by their place in the run's
                                prompt sequence
added, duplicates, evicted      what the replay buffer did with them: buffer/… went up by this
lengths                         list of counts of them by the length of their completions, in tenths of
                                generator.max_tokens
late                            of them, those dropped as older than buffer.max_age_steps (count), if any
unlearned                       these by tenths of length, if any
again, answered                 of them, those dropped because their request was answered by a shard before
                                (count), if any; these requests
event: evicted                  trajectories dropped as too stale, scored by an older reference, or learned
                                from often enough (buffer.replay_limit), with ``step``, ``revision``,
                                ``evicted``: buffer/evicted went up by this
unlearned                       of them, those too stale or of an older reference of whose request no step has
                                learned: list of counts by tenths of length, if any
RUN/metrics/searcher-0003.jsonl about one record per second; counts are since the record before
search/tokens                   tokens generated (count)
search/tokens_per_second        the same per second of wall time (tokens/s)
search/trajectories             training completions scored and appended (count)
search/groups                   training requests answered (count)
search/reward                   mean reward of these completions
search/reward/NAME              the same of one of several rewards, before its weight (task.reward)
search/truncated_share          of these, cut off by the token limit (share)
search/kl                       mean over these, less tempered ones (generator.tempered_share), of
                                log π_behaviour − log π_ref (nats per completion): an estimate of KL(π‖π_ref)
                                where sampling is at the log-probabilities' temperature; absent where what
                                samples is the reference
search/entropy                  mean over the tokens of the same of −log π_behaviour (nats per token)
search/flat_groups              of their groups, those whose rewards are all the same (share)
search/length                   their mean length (tokens)
search/reward_histogram         list of counts of their rewards; bin i holds those below REWARD_EDGES[i] and
                                not below the edge before, the last bin all others
search/engine_gap               as train/engine_gap, of some answers of an evaluation, against the learner's
                                model code under the weights that gave them; absent in records without one
search/busy_share               wall time inside the engine's step (share)
search/seal_share               wall time sealing shards (share)
search/paused_seconds           idle: waiting for weights, or back-pressure (s)
search/load_seconds             that the engine stood still for the last load of weights (s)
search/propagation_seconds      publish call to in use (s)
search/version                  weights in use (optimizer steps)
search/pending_shards           shards offered and not yet merged (count)
search/rebuilds                 engines rebuilt after a failure, so far (count)
search/rejected                 trajectories set aside, so far: the reward is not finite, or the task's code
                                raised (count)
event: started                  a record without the above, one per start of this rank, with
searchers                       searchers, or places for them, that share the prompts (count)
place                           this one's among them, where that is not its number
event: joined                   one that comes and goes is at work, with ``place``, ``host``, and ``job`` (of
                                Slurm, may be empty)
event: moved                    the trainer has started again with another number of places: its ``place``
                                now, among ``searchers``
event: left                     it has gone, with ``place``, and ``why``: told, finished, no place
event: sealed                   one per shard, with ``trajectories``, ``tokens``, ``shard`` (its index), and
search/issued                   training requests taken from the sequence since this start (count)
==============================  ========================================================================
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, overload

import numpy as np

from tba_hpc.run.beside import beside
from tba_hpc.run.files import FULL_DISK, DiskFullError, parse_json_lines
from tba_hpc.run.parts import compress_parts, finish_part, finished_part, finished_parts, open_part

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

log = logging.getLogger(__name__)

Value = float | int | str | Sequence[float] | None
Record = dict[str, float | int | str | list[float]]


REWARD_EDGES = tuple(math.sinh(i / 4) for i in range(-32, 33))
"""Edges of the bins of search/reward_histogram: as wide in asinh of the reward, from −1490 to 1490; 0 is one.

So rewards of 0 and 1 have bins of their own, and scores in the hundreds need no others.
"""

EDGES = {"search/reward_histogram": (2 * REWARD_EDGES[0], *REWARD_EDGES, 2 * REWARD_EDGES[-1])}
"""Where the bins of a histogram in TensorBoard begin and end, outer ones too; bin i of others is about i."""

TENTHS = 10
"""Bins of counts by length."""

LAST_LINES = 32
"""Lines at the end of a metrics file that are always parsed."""

SPREAD_LINES = 512
"""Lines of a metrics file, evenly spaced, that are always parsed: enough for the course of every figure."""

STARTED = b'"event": "started"'
"""In the line of a rank's start; the one before it holds what the attempt before had counted."""


PLAIN = frozenset({float, int, str, bool, type(None)})
"""Types that JSON gives back as they are."""

MOST_UNWRITTEN = 64 << 20
"""Bytes of records that may wait for room on a full disk, and as many to become durable."""

PART_BYTES = 256 << 20
"""A metrics file of so many bytes is finished, and the next one begun."""

CHUNK = 4 << 20
"""Bytes of a metrics file that are parsed at once."""


class Digest(Protocol):
    """Sums up a metrics file as it is written, for those who read it; see ``report.digest``."""

    def take(self, record: Record) -> None:
        """One more record."""

    @property
    def due(self) -> bool:
        """Whether it is time to keep what was taken."""

    def keep(self, part: int, make_durable: Callable[[], int]) -> None:
        """Keep what was taken: a part, as far as ``make_durable`` says that it is, and all before it.

        A disk without room for that keeps what was kept before.
        """


class MetricsWriter:
    """Appends records to ``path``, a line each, readable by others at once.

    On a full disk records wait in memory, which is logged as a warning and, once there is room, as the event
    ``full``. What is written stays there, too, until it is durable: a disk that has lost it tells that once,
    and it is written again. tensorboard: folder for TensorBoard event files with the same scalars and
    histograms, if wanted. digest: of this file; it has taken what is there already. ``sync`` may be called in
    another thread. A file of PART_BYTES is finished, and compressed beside the caller; see ``run.parts``.
    """

    def __init__(self, path: Path, *, tensorboard: Path | None = None, digest: Digest | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._part = finished_parts(path)
        self._compressing: Future[None] | None = None
        if any(finished_part(path, number).exists() for number in range(self._part)):
            self._compress()
        self._file = path.open("ab", buffering=0)
        # Else the first record would be lost with a torn one.
        self._unwritten = b"\n" if _torn(path) else b""
        self._undurable = bytearray()  # the end of the file
        self._lost = 0  # bytes at the end of the file that are to be written again
        self._writing = threading.Lock()
        self._flushing = threading.RLock()  # is taken before the other
        self._full_since: float | None = None
        self._digest = digest
        self._scalars = _event_files(tensorboard) if tensorboard else None
        self._count = 0

    def log(self, *records: Mapping[str, Value]) -> None:
        """Write records with ``time`` added; values of None are left out, numpy values made plain.

        Raises DiskFullError where MOST_UNWRITTEN bytes wait for room.
        """
        now = time.time()
        known = [_plain({"time": now, **record}) for record in records]
        with self._writing:
            self._append(known)
            self._write()
        if self._file.tell() >= PART_BYTES and not self._unwritten:
            self._begin_part()
        if len(self._undurable) > MOST_UNWRITTEN:
            self._make_durable()
        if self._digest and self._digest.due and not self._unwritten:
            self._digest.keep(self._part, self._make_durable)
        if self._scalars:
            for record in known:
                self._to_tensorboard(self._scalars, record)

    def _append(self, records: Sequence[Record]) -> None:
        self._unwritten += "".join(json.dumps(record) + "\n" for record in records).encode()
        if self._digest:
            for record in records:
                self._digest.take(record)

    def _write(self) -> None:
        """Write what there is room for; a disk that fills up takes a part of a line."""
        try:
            if self._lost:
                self._file.seek(self._file.truncate(self._file.tell() - self._lost))
                self._lost = 0
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._undurable += self._unwritten[:written]
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            self._wait_for_room(error)
            return
        if self._full_since is not None:
            seconds, self._full_since = time.time() - self._full_since, None
            self._append([{"time": time.time(), "event": "full", "seconds": seconds}])
            self._write()

    def _begin_part(self) -> None:
        """Finish the file and go on in a new one, unless the disk says only now that it is full."""
        with self._flushing:
            try:
                self._make_durable()
            except DiskFullError as error:
                fault = str(error).partition(";")[0]
                log.warning("%s; it grows until there is room for another", fault)
                return
            self._file.close()
            finish_part(self._path, self._part)
            self._part += 1
            self._file = self._path.open("ab", buffering=0)
        if self._digest:
            # Lest a reader look for its place in what is compressed.
            self._digest.keep(self._part, self._make_durable)
        self._compress()

    def _compress(self) -> None:
        """Have finished parts compressed beside the caller."""
        self._compressing = beside(partial(compress_parts, self._path))

    def _wait_for_room(self, error: OSError) -> None:
        if self._full_since is None:
            self._full_since = time.time()
            log.warning("%s: %s; its records wait in memory for room", self._path, error.strerror)
        if len(self._unwritten) > MOST_UNWRITTEN:
            raise self._no_room()

    def _no_room(self) -> DiskFullError:
        return DiskFullError(
            f"cannot write {self._path} ({len(self._unwritten)} bytes wait): no space is left; free space or "
            "raise the quota, then start the same run again: nothing sealed before is lost"
        )

    def _to_tensorboard(self, sink: SummaryWriter, record: Record) -> None:
        step = int(number(record, "step", self._count))
        self._count += 1
        for name in record:
            value = number(record, name)
            if "/" in name and value is not None:
                sink.add_scalar(name, value, step)
            elif name.endswith("histogram"):
                _add_histogram(sink, name, np.asarray(record[name]), step)

    def sync(self) -> None:
        """Make all records durable. Raises DiskFullError."""
        self._make_durable()

    def _make_durable(self) -> int:
        """Make all records durable, and return where they end in the file. Raises DiskFullError."""
        with self._flushing:
            with self._writing:
                self._write()
                if self._unwritten:
                    raise self._no_room()
                end, flushed = self._file.tell(), len(self._undurable)
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._write_again_later()
                if error.errno not in FULL_DISK:
                    raise
                raise self._no_room() from None
            with self._writing:
                del self._undurable[:flushed]
            return end

    def _write_again_later(self) -> None:
        """What could not be made durable may be lost, though nobody is told of it again."""
        with self._writing:
            self._lost = len(self._undurable)
            self._unwritten = bytes(self._undurable) + self._unwritten
            self._undurable.clear()

    def close(self) -> None:
        """Release the files."""
        self._write()
        if self._digest and not self._unwritten:
            self._digest.keep(self._part, self._make_durable)
        self._file.close()
        if self._scalars:
            self._scalars.close()


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


def _torn(path: Path) -> bool:
    """Whether a crash left half a line at the end."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")


def _event_files(folder: Path) -> SummaryWriter:
    from tensorboardX import SummaryWriter  # optional, and slow to import

    return SummaryWriter(str(folder))


def _add_histogram(sink: SummaryWriter, name: str, counts: np.ndarray, step: int) -> None:
    """Counts per bin; TensorBoard wants sums of the values, too, for which the middles of the bins stand."""
    edges = np.array(EDGES.get(name, np.arange(len(counts) + 1) - 0.5))
    middles, used = (edges[1:] + edges[:-1]) / 2, np.flatnonzero(counts)
    if len(used):
        sink.add_histogram_raw(
            name,
            min=edges[used[0]],
            max=edges[used[-1] + 1],
            num=counts.sum(),
            sum=counts @ middles,
            sum_squares=counts @ middles**2,
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )


class MetricsTail:
    """Reads what was added to a metrics file since the last look, all its parts; one not yet there is empty.

    part, start: where to begin, start in bytes; a line begins there.
    """

    def __init__(self, path: Path, *, part: int = 0, start: int = 0) -> None:
        self._path = path
        self._part = part
        self._offset = start
        self._finished: BinaryIO | None = None  # a part that is being read, as seeking in it takes long

    @classmethod
    def from_now(cls, path: Path) -> MetricsTail:
        """Of what comes from now on."""
        part = finished_parts(path)
        return cls(path, part=part, start=path.stat().st_size if path.exists() else 0)

    @property
    def place(self) -> tuple[int, int]:
        """Part and start of what comes next, for another tail to begin there."""
        return self._part, self._offset

    def records(self) -> Iterator[Record]:
        """Records completed since the last look, in order, CHUNK by CHUNK, however many there are."""
        while whole := self._whole_lines(CHUNK):
            yield from parse_json_lines(whole)

    def new(self, *, dull: bytes | None = None) -> list[Record]:
        """The same as a list.

        dull: of lines with these bytes only a sample is parsed, as a day's records take long: some of them
        evenly spaced, the last before a start, and the last of all.
        """
        if dull is None:
            return list(self.records())
        found: list[Record] = []
        while whole := self._whole_lines(-1):
            found += parse_json_lines(b"\n".join(_sample(whole.splitlines(), dull)))
        return found

    def _whole_lines(self, most: int) -> bytes:
        """The next ``most`` bytes (-1: all) of a part, less half a line; of a longer line, all."""
        while opened := self._open():
            file, finished = opened
            whole, end, _ = _read(file, most).rpartition(b"\n")
            self._offset += len(whole) + len(end)
            if not finished:
                file.close()
            if end or not finished:
                return whole + end
            file.close()
            self._finished, self._part, self._offset = None, self._part + 1, 0
        return b""

    def _open(self) -> tuple[BinaryIO, bool] | None:
        """The part to be read, where to go on, and whether it is finished."""
        if self._finished is None:
            # NFS shows what is new to those who open, not to a stat.
            opened = open_part(self._path, self._part)
            if opened is None or not opened[1]:
                return opened and (_at(opened[0], self._offset), False)
            self._finished = opened[0]
        return _at(self._finished, self._offset), True


def _at(file: BinaryIO, offset: int) -> BinaryIO:
    file.seek(offset)
    return file


def _read(file: BinaryIO, most: int) -> bytes:
    data = file.read(most)
    if most > 0 and b"\n" not in data:
        data += file.readline()
    return data


def _sample(lines: list[bytes], dull: bytes) -> list[bytes]:
    """All lines without ``dull``, and those with it that ``MetricsTail.new`` names."""
    stride, last = 1 + len(lines) // SPREAD_LINES, len(lines) - LAST_LINES
    return [
        line
        for i, line in enumerate(lines)
        if dull not in line or i >= last or i % stride == 0 or STARTED in lines[i + 1]
    ]


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a file, in order; lines torn by a crash are left out, no file is no record."""
    return MetricsTail(path).new()


@overload
def number(record: Mapping[str, Value], name: str) -> float | None: ...
@overload
def number(record: Mapping[str, Value], name: str, default: float) -> float: ...
def number(record: Mapping[str, Value], name: str, default: float | None = None) -> float | None:
    """The scalar of that name; ``default`` where it is missing or no scalar."""
    value = record.get(name)
    return default if value is None or isinstance(value, str | Sequence) else float(value)


def step_records(records: Sequence[Record]) -> list[Record]:
    """The records of optimizer steps, ascending; of a step done twice (by a resume) the later attempt's.

    A resume from step s also takes back what the attempt before did after s.
    """
    kept: list[Record] = []
    for record in records:
        event = record.get("event")
        if "step" not in record or event not in (None, "started", "resumed"):
            continue
        while kept and _step(kept[-1]) >= _step(record) + (event is not None):
            kept.pop()
        if event is None:
            kept.append(record)
    return kept


def _step(record: Record) -> int:
    return int(number(record, "step", 0))


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
        """Seconds per name since the last reset; counting starts anew."""
        total, self._total = self._total, {}
        self._since = time.perf_counter()
        return total
