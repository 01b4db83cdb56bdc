"""Exchange of weights and shards over a shared file system. Searchers may come and go at any time.

The trainer publishes weights as safetensors files, and reads shards where searchers sealed them. One small
file, ``latest.json``, is the manifest. It lists the published weights, holds the cursor of each searcher (how
many of its shards are merged), and says whether the trainer has ended. Only the trainer writes the manifest,
and always replaces it as a whole. The trainer waits for no searcher, so the death of one costs nothing.

Weights that are to be evaluated stay listed, and on disk, until their evaluation is complete. If too many
wait, the oldest are removed. A searcher takes the oldest weights that wait for its evaluation. If none wait,
it takes the newest weights.

Weights that are not to be evaluated may be stored as changes: the bits that differ from the previous
publication. Such files form a chain. Its first link is a file of whole weights, and each further link is a
file of changes. All links stay on disk as long as the last one is needed. A searcher applies the links that
it lacks to its copy of the weights. It makes this copy from the first link. If a link is damaged, the
searcher keeps its present weights until a new chain begins.

The file ``progress`` holds the completed requests and the cursors, for searchers that join later. Whenever
the cursors change, the trainer writes ``progress`` first and the manifest second. No shard is deleted before
``progress`` counts it as merged.

A file system may lose an open file, show a new file late, or be full for a while. Trainer and searchers
therefore retry until their timeouts. If a flush (fsync) fails, data may be lost although a second flush would
succeed, so all data are written again.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from tba_hpc.config import ConfigError, is_elastic
from tba_hpc.core.ports import IDLE_DEADLINES, ExchangeError, Write
from tba_hpc.core.prompts import CompletedRequests, Progress
from tba_hpc.core.types import LoraWeights, Publication, Shard, Split, WeightLayout, WeightUpdate
from tba_hpc.core.weight_files import WeightFile, fault_in
from tba_hpc.exchange.weight_changes import DeltaMemory, apply_changes
from tba_hpc.run.files import (
    if_available,
    is_temporary,
    listing,
    publish,
    read_regular,
    require_regular,
    retry,
)
from tba_hpc.run.owners import end_if_superseded

log = logging.getLogger(__name__)

KEEP = 2
"""Number of newest publications that are always kept, since a searcher may be opening the second newest."""

MOST_WAITING = 4
"""Maximum number of publications that are kept because their evaluation on the validation split is
unfinished. Without this limit they would pile up, since nobody completes a dead searcher's part."""

MANIFEST_CHECK_SECONDS = 0.1
"""Minimum interval between two reads of ``latest.json`` by a searcher, in seconds.

File servers are slow and shared. While the file stays unchanged, the interval grows to a fiftieth of the time
since the last change, but not beyond ten times this minimum.
"""

STOP, HELD = "stop-", "held-"
"""Prefixes of the names of requests to stop the run, and of hard links to weights that a searcher uses."""

PROGRESS = "progress"
"""Name of the file with the completed requests and the cursors."""

WEIGHTS, CHANGES = ".safetensors", ".changes"
"""Suffixes of files with whole weights and with changes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One publication of weights, as listed in the manifest.

    sequence: number of the publication, counted over all attempts of a run. file: name of its file in the
    folder of the weights. changes: whether ``file`` holds the changes since the previous publication, not
    whole weights. checksum: CRC-32 of these changes; 0 for whole weights.
    """

    sequence: int
    file: str
    publication: Publication
    changes: bool = False
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of ``latest.json``.

    attempt: name of the attempt whose trainer wrote it. closed: whether that trainer has ended. cursors:
    index of the next shard to merge, by searcher. entries: the publications whose weights are on disk, oldest
    first.
    """

    attempt: str
    closed: bool = False
    cursors: Mapping[int, int] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest in the folder of the weights; None if no trainer of the run has started yet.

        Raises DamagedError if its contents are invalid, ConfigError if it is not a regular file, and OSError
        if it cannot be read.
        """
        try:
            return _DECODER.decode(read_regular(folder / "latest.json"))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DamagedError(f"{folder / 'latest.json'} is damaged: {error}") from None

    def write(self, folder: Path) -> None:
        """Replace the run's manifest in the folder of the weights by this one."""
        publish(folder / "latest.json", msgspec.json.encode(self))

    def chain(self, sequence: int) -> tuple[Entry, ...]:
        """Return the entries that make up the weights numbered ``sequence``: whole weights, then changes."""
        until = [entry for entry in self.entries if entry.sequence <= sequence]
        whole = max((i for i, entry in enumerate(until) if not entry.changes), default=0)
        return tuple(until[whole:])


_DECODER = msgspec.json.Decoder(Manifest)
"""Shared decoder: msgspec 0.22 crashes if two threads decode a dataclass for the first time at once."""


class FileTrainerExchange:
    """The leading trainer's end of the exchange.

    folder: folder of the weights. attempt: name of this attempt, which no other attempt of the run has.
    read_pending: function that takes cursors, and returns the shards at or beyond these that can be read, in
    order for each searcher. progress: requests completed and shards merged before this attempt. evaluated:
    function that returns whether the evaluation of a split with the weights of a version is complete.
    timeout: longest wait while a disk is full or its server is away, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        layout: WeightLayout,
        *,
        attempt: str,
        read_pending: Callable[[Mapping[int, int]], Iterable[Shard]],
        progress: Progress,
        evaluated: Callable[[Split, int], bool],
        timeout: float = 0.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._layout = layout
        self._read_pending = read_pending
        self._evaluated = evaluated
        self._retry = partial(retry, seconds=timeout)
        self._memory = DeltaMemory(layout)
        self._remove_leftovers()
        self._completed = CompletedRequests.from_array(progress.completed.to_array())  # rounds add to it
        self._manifest = self._first_manifest(attempt, progress.cursors)
        self._arrived: deque[Shard] = deque()
        self._stop_requested = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self._round: Future[None] | None = None

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round with new weights; see ports.TrainerExchange.

        ``write`` copies the weights into memory. The exchange's thread then writes them to a file, and lists
        this file in the manifest.
        """
        if not self.idle:
            return False
        copied = write(self._memory.incoming)
        self._round = self._worker.submit(self._write_and_sync, publication, copied)
        return True

    def pass_on(self, update: WeightUpdate) -> None:
        """Start a round with weights that another exchange has received. Call this only when ``idle``.

        The exchange's thread copies the weights from ``update``, and then writes them to a file.
        """
        copied = partial(np.copyto, self._memory.incoming, update.data)
        self._round = self._worker.submit(self._write_and_sync, update.publication, copied)

    @property
    def idle(self) -> bool:
        """True if no round is in progress. Raises the error of the last round, if that has failed."""
        if self._round is not None and self._round.done():
            self._round.result()
            self._round = None
        return self._round is None

    def gather(self) -> bool:
        if not self.idle:
            return False
        self._round = self._worker.submit(self._sync, None)
        return True

    def collect(self) -> list[Shard]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    @property
    def stop_requested(self) -> bool:
        """True if a searcher had asked to stop the run by the time of the last round."""
        return self._stop_requested

    def close(self) -> None:
        self._worker.shutdown()
        assert self.idle
        self._manifest = replace(self._manifest, closed=True)
        self._announce()

    # --- Weights ---

    def _write_and_sync(self, publication: Publication, copied: Callable[[], object] | None) -> None:
        """Write new weights, or only their changes, to disk. Then run a round to list them in the manifest.

        copied: function that waits until all weights are in memory; None if they are there already.
        """
        if copied:
            copied()
        changes = None
        # Weights to evaluate, and the last ones, stay on disk for long, so they are written whole.
        if publication.evaluate is None and not publication.final:
            changes = self._memory.changes()
        sequence = max((entry.sequence for entry in self._manifest.entries), default=-1) + 1
        name = f"step-{publication.version:06d}"
        pieces: list[bytes | memoryview]
        if changes is None:
            entry = Entry(sequence, name + WEIGHTS, publication)
            pieces = [safetensors_header(self._layout, publication.version), self._memory.incoming.data]
        else:
            name += f"-{sequence}{CHANGES}"
            entry = Entry(sequence, name, publication, changes=True, checksum=crc32(changes.data))
            pieces = [changes.data]
        self._retry(lambda: publish(self._folder / entry.file, *pieces))
        self._memory.keep(changes)
        self._sync(entry)

    # --- A round ---

    def _sync(self, new: Entry | None) -> None:
        """Run a round: list new weights, if any, find new shards, and write the manifest if it changed."""
        before = self._manifest
        if new is not None:
            self._manifest = replace(before, entries=(*self._still_needed(), new))
        self._find_shards()
        if self._manifest.cursors != before.cursors:
            self._write_progress(self._manifest.cursors)
        if self._manifest != before:
            self._announce()
            self._remove_superseded()
        # If the folder cannot be listed now, a later round finds the requests to stop.
        names: list[str] = if_available(lambda: listing(self._folder), otherwise=[])
        self._stop_requested |= any(name.startswith(STOP) for name in names)

    def _announce(self) -> None:
        self._retry(end_if_superseded)
        self._retry(lambda: self._manifest.write(self._folder))

    def _find_shards(self) -> None:
        cursors = dict(self._manifest.cursors)
        for shard in self._read_pending(cursors):
            self._arrived.append(shard)
            self._completed.add(shard.request_ids)
            cursors[shard.searcher] = shard.index + 1
        self._manifest = replace(self._manifest, cursors=cursors)

    def _write_progress(self, cursors: Mapping[int, int]) -> None:
        data = Progress(self._completed, cursors).to_bytes()
        self._retry(lambda: publish(self._folder / PROGRESS, data))

    def _still_needed(self) -> list[Entry]:
        """Return the entries that stay in the manifest when a new one is added, oldest first.

        These are the newest KEEP − 1 entries, those whose evaluation is incomplete (on the validation split
        at most the newest MOST_WAITING), and all entries whose files these two kinds need.
        """
        entries = self._manifest.entries
        waiting = [
            entry
            for entry in entries
            if (split := entry.publication.evaluate) and not self._evaluated(split, entry.publication.version)
        ]
        going = [entry for entry in waiting if entry.publication.evaluate != "test"][:-MOST_WAITING]
        for entry in going:
            log.warning(
                "the weights of step %d are removed before their %s is complete, because %d newer ones wait "
                "for theirs, too: a searcher has died, or an evaluation takes longer than evaluate.every "
                "steps",
                *(entry.publication.version, entry.publication.evaluate, MOST_WAITING),
            )
        kept = [*entries[-(KEEP - 1) :], *(entry for entry in waiting if entry not in going)]
        needed = {link for entry in kept for link in self._manifest.chain(entry.sequence)}
        return [entry for entry in entries if entry in needed]

    def _remove_superseded(self) -> None:
        """Delete the files of weights, or of changes of weights, that the manifest no longer lists.

        Errors of the file system are ignored: the next change of the manifest tries again.
        """
        needed = {entry.file for entry in self._manifest.entries}
        with suppress(OSError):
            for name in listing(self._folder):
                if name.endswith((WEIGHTS, CHANGES)) and name not in needed:
                    (self._folder / name).unlink(missing_ok=True)

    # --- The beginning of an attempt ---

    def _remove_leftovers(self) -> None:
        """Delete what earlier attempts left: requests to stop, unfinished files, and hard links to weights.

        The hard links of elastic searchers stay, because these searchers may still be at work.
        """
        for name in listing(self._folder):
            held = name.startswith(HELD) and not is_elastic(int(name.removeprefix(HELD).split("-")[0]))
            if name.startswith(STOP) or name.endswith(".tmp") or held:
                (self._folder / name).unlink(missing_ok=True)

    def _first_manifest(self, attempt: str, cursors: Mapping[int, int]) -> Manifest:
        """Write and return the first manifest of this attempt.

        The manifest keeps the previous attempt's newest weights, so that sequence numbers continue.
        """
        try:
            before = self._retry(lambda: Manifest.read(self._folder))
        except DamagedError as error:
            raise ConfigError(f"{error}: remove it, and start the same run again") from None
        kept = before.chain(before.entries[-1].sequence) if before and before.entries else ()
        entries = tuple(replace(entry, publication=_of_earlier_attempt(entry.publication)) for entry in kept)
        manifest = Manifest(attempt, False, dict(cursors), entries)
        self._write_progress(cursors)
        self._retry(lambda: manifest.write(self._folder))
        return manifest


def _of_earlier_attempt(publication: Publication) -> Publication:
    """Return an earlier attempt's publication without what a resume may have undone, for the new attempt.

    The result asks for no evaluation and does not count as the run's last. A reference that a step made
    becomes the initial policy. If the publication limits requests, the result permits none.
    """
    end = None if publication.budget_end is None else 0
    reference = min(0, publication.reference)
    return replace(
        publication, evaluate=None, reference=reference, budget_end=end, lease_ends={}, final=False
    )


class FileSearcherExchange:
    """A searcher's end of the exchange.

    folder: folder of the weights, which need not exist yet. searcher: number of this searcher. attempt: name
    of this attempt, whose trainer has started once the manifest holds this name. deadline: longest wait for
    another rank, in seconds; the trainer may take IDLE_DEADLINES times as long between two rounds.
    start_deadline: longest wait for the trainer's start, in seconds; None: ``deadline``.
    """

    def __init__(
        self,
        folder: Path,
        searcher: int,
        *,
        attempt: str,
        deadline: float,
        start_deadline: float | None = None,
    ) -> None:
        self._folder = folder
        self._searcher = searcher
        self._attempt = attempt
        self._deadline = deadline
        self._start_deadline = start_deadline or deadline
        self._manifest: Manifest | None = None
        self._manifest = self._read_manifest()
        self._looked = self._changed = time.monotonic()
        self._seen = -1  # sequence number of the publication taken last
        self._own: WeightFile | None = None  # copy of the weights, to which changes are applied
        self._own_sequence = -1  # sequence number of the weights in that copy
        self._offered: list[int] = []
        with suppress(OSError):  # links that stay are removed by the next trainer
            for left in folder.glob(f"{HELD}{searcher:04d}-*"):  # of a killed searcher with this number
                left.unlink(missing_ok=True)

    def progress(self) -> Progress:
        """Wait until the trainer has started; return the completed requests and the cursors of the run.

        Both are empty if the run ends meanwhile. Raises ExchangeError for the reasons given at ``poll``.
        """
        while not self._ended:
            if self._has_started:
                with suppress(FileNotFoundError):  # the file system does not show the file yet
                    read = partial(read_regular, self._folder / PROGRESS)
                    return Progress.from_bytes(retry(read, seconds=self._deadline))
            time.sleep(MANIFEST_CHECK_SECONDS)
            self._look()
        return Progress()

    def offer(self, shard: Shard) -> None:
        """Count a sealed shard as pending; the trainer finds it on disk."""
        self._offered.append(shard.index)

    def poll(self) -> WeightUpdate | None:
        """Return weights that were not returned before, mapped read-only; None if there are none.

        Returns the oldest weights that are to be evaluated; if there are none, the newest weights. Raises
        ExchangeError if the trainer has not started within ``start_deadline``, or has not changed the
        manifest for IDLE_DEADLINES times ``deadline``.
        """
        self._look()
        entry = self._next_entry()
        if entry is None:
            return None
        try:
            layout, file = self._patched(entry) if entry.changes else self._held(entry)
        except OSError as error:  # the file was removed since the manifest was read, or is not visible yet
            _refuse_lasting(error)
            return None
        except DamagedError as error:
            log.warning("%s: this searcher continues with the weights that it has", error)
            self._seen = entry.sequence
            return None
        self._seen, data = entry.sequence, file.map("r")
        fault_in(data)  # now, so that the engine need not wait for the disk
        return WeightUpdate(entry.publication, layout, data, file)

    def _patched(self, entry: Entry) -> tuple[WeightLayout, WeightFile]:
        """Bring this searcher's copy of the weights up to ``entry``; return their layout and the copy.

        Raises DamagedError or OSError before any changes are applied.
        """
        assert self._manifest is not None
        whole, *links = self._manifest.chain(entry.sequence)
        layout, file = self._held(whole)
        if self._own is None or self._own_sequence not in [one.sequence for one in (whole, *links)]:
            self._own, self._own_sequence = WeightFile.copy_of(file.map("r")), whole.sequence
        missed = [link for link in links if link.sequence > self._own_sequence]
        # Read all changes before any is applied. If one is damaged, the copy must keep the version that the
        # engine was given, because an engine that replaces a dead one loads the copy.
        for link, changes in [(link, self._changes(link)) for link in missed]:
            apply_changes(changes, self._own.map("r+"))
            self._own_sequence = link.sequence
        return layout, self._own

    def _changes(self, link: Entry) -> np.ndarray:
        """Read a file with changes of weights, and verify its checksum; return its contents, uint8 [bytes].

        Raises DamagedError if the checksum is wrong, and OSError if the file cannot be read.
        """
        changes = np.frombuffer(read_regular(self._folder / link.file), np.uint8)
        if crc32(changes.data) != link.checksum:
            raise DamagedError(f"{self._folder / link.file} is not what was written")
        return changes

    def _held(self, entry: Entry) -> tuple[WeightLayout, WeightFile]:
        """Open whole weights through a hard link that only this searcher uses.

        On NFS a mapped file can no longer be read once another host has deleted it. The link keeps the file.
        Raises DamagedError or OSError.
        """
        path = self._folder / entry.file
        require_regular(path)
        own = self._folder / f"{HELD}{self._searcher:04d}-{entry.sequence}-{secrets.token_hex(2)}"
        with suppress(FileExistsError):  # the link is ours, since names are unique: NFS repeated the request
            os.link(path, own)
        layout, file = read_weights(own)
        weakref.finalize(file, _remove_name, own)
        return layout, file

    def request_stop(self) -> None:
        """Create a file that the trainer finds in its next round. Call this again until the run stops."""
        try:
            if self._folder.exists():
                (self._folder / f"{STOP}searcher-{self._searcher:04d}").touch()
        except OSError as error:
            _refuse_lasting(error)

    @property
    def pending(self) -> int:
        self._look()
        merged = self._manifest.cursors.get(self._searcher, 0) if self._manifest else 0
        self._offered = [index for index in self._offered if index >= merged]
        return len(self._offered)

    @property
    def ended(self) -> bool:
        self._look()
        return self._ended

    @property
    def closed(self) -> bool:
        return self.ended and self._next_entry() is None

    @property
    def _has_started(self) -> bool:
        """True if this attempt's trainer has started; before, the manifest is that of an earlier attempt."""
        return self._manifest is not None and self._manifest.attempt == self._attempt

    @property
    def _ended(self) -> bool:
        return self._has_started and self._manifest is not None and self._manifest.closed

    def _next_entry(self) -> Entry | None:
        """Return the oldest unseen publication that is to be evaluated, or else the newest unseen one."""
        unseen = [e for e in self._manifest.entries if e.sequence > self._seen] if self._manifest else []
        to_evaluate = (entry for entry in unseen if entry.publication.evaluate)
        return next(to_evaluate, unseen[-1] if unseen else None)

    def _look(self) -> None:
        """Read the manifest again, unless it was read a moment ago.

        Raises ExchangeError if the manifest has not changed for longer than ``_timeout``.
        """
        now = time.monotonic()
        pause = min(max(MANIFEST_CHECK_SECONDS, (now - self._changed) / 50), 10 * MANIFEST_CHECK_SECONDS)
        if now - self._looked < pause:
            return
        self._looked, manifest = now, self._read_manifest()
        if manifest != self._manifest:
            self._manifest, self._changed = manifest, now
        elif not self._ended and now - self._changed > self._timeout:
            raise ExchangeError(
                f"the trainer has not changed {self._folder / 'latest.json'} for {self._timeout:g} s: "
                f"{self._remedy}"
            )

    def _read_manifest(self) -> Manifest | None:
        """Read the manifest; return the one read last if the file cannot be read at the moment."""
        try:
            return Manifest.read(self._folder) or self._manifest
        except (OSError, ValueError) as error:
            _refuse_lasting(error)
            return self._manifest

    _remedy = "it has ended or hangs; see its log, and start the same run again"

    @property
    def _timeout(self) -> float:
        """Longest time without a change of the manifest, in seconds; before the start, ``start_deadline``."""
        return self._deadline * IDLE_DEADLINES if self._has_started else self._start_deadline


class ElasticSearcherExchange(FileSearcherExchange):
    """An elastic searcher's end of the exchange. It waits while no trainer runs, and never stops the run.

    lease: number of the lease by which this searcher holds its slot. timeout: longest absence of the trainer,
    in seconds. leaving, finished, evaluates: functions that return whether this searcher must leave, whether
    the run is finished, and whether this searcher takes part in evaluations.
    """

    _remedy = "start the run again, or raise launch.timeout_seconds if its job waits in the queue"

    def __init__(
        self,
        folder: Path,
        searcher: int,
        *,
        lease: int,
        timeout: float,
        leaving: Callable[[], bool],
        finished: Callable[[], bool],
        evaluates: Callable[[], bool],
    ) -> None:
        self._lease = lease
        self._leaving = leaving
        self._finished = finished
        self._evaluates = evaluates
        self._run_is_over = False
        self._away = ""  # attempt whose trainer's early stop was logged last
        self._asked: dict[tuple[Split, int], tuple[int, str]] = {}  # evaluations taken: sequence and attempt
        super().__init__(folder, searcher, attempt="", deadline=timeout)
        if self._manifest is None:
            log.info("no trainer is ready on this run: waiting up to %g s for one", timeout)

    @property
    def attempt(self) -> str:
        """Name of the newest attempt whose trainer has started; empty before the first."""
        self._look()
        return self._manifest.attempt if self._manifest else ""

    def poll(self) -> WeightUpdate | None:
        """Return weights to evaluate, if this searcher evaluates; otherwise the newest unseen ones."""
        update = super().poll()
        if update is None or self._manifest is None:
            return None
        if split := update.publication.evaluate:
            self._asked[split, update.publication.version] = self._seen, self._manifest.attempt
        return replace(update, publication=update.publication.for_lease(self._searcher, self._lease))

    def still_wants(self, split: Split, version: int) -> bool:
        """Return whether an evaluation that ``poll`` handed out is still wanted.

        It is not wanted once the trainer of a later attempt has started, because that trainer may make
        different weights of the same version.
        """
        self._manifest = self._read_manifest()
        _, attempt = self._asked[split, version]
        return self._manifest is not None and self._manifest.attempt == attempt

    def request_stop(self) -> None:
        """Do nothing: only this searcher leaves, and the run continues."""

    @property
    def closed(self) -> bool:
        """True if this searcher must leave, or if the run is finished."""
        return self.ended

    @property
    def _has_started(self) -> bool:
        return self._manifest is not None

    @property
    def _ended(self) -> bool:
        return self._leaving() or self._run_is_over

    @property
    def _timeout(self) -> float:
        return self._deadline

    def _next_entry(self) -> Entry | None:
        """Return the publication to take next, or None if there is no new one.

        A searcher that evaluates gets the oldest publication whose evaluation it has not begun. If none is
        left, or if only others evaluate, it gets the newest unseen publication, without an evaluation.
        """
        entries = self._manifest.entries if self._manifest else ()
        taken = {sequence for sequence, _ in self._asked.values()}
        to_evaluate = (e for e in entries if e.publication.evaluate and e.sequence not in taken)
        if (entry := next(to_evaluate, None)) and self._evaluates():
            return entry
        if not entries or entries[-1].sequence <= self._seen:
            return None
        return replace(entries[-1], publication=replace(entries[-1].publication, evaluate=None))

    def _read_manifest(self) -> Manifest | None:
        manifest = super()._read_manifest()
        closed = manifest is not None and manifest.closed
        self._run_is_over = closed and self._finished()
        if manifest and closed and not self._run_is_over and manifest.attempt != self._away:
            self._away = manifest.attempt
            log.info("the run has stopped or is requeued: waiting %g s at most for a resume", self._deadline)
        return manifest


class DamagedError(ValueError):
    """Error for a damaged manifest, file of weights or file of changes."""


def _refuse_lasting(error: OSError | ValueError) -> None:
    """Raise ``error`` if it is lasting; return if a later read may succeed.

    A file that is missing or damaged now may be complete once the file system shows all of it.
    """
    passing = isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and is_temporary(error))
    if isinstance(error, OSError | ConfigError) and not passing:
        raise error


def read_weights(path: Path) -> tuple[WeightLayout, WeightFile]:
    """Open a safetensors file of whole weights; return its layout and the file.

    Raises DamagedError if its header is invalid or does not fit its size, OSError if it cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as opened:
            lora = json.loads((opened.metadata() or {}).get("lora", "null"))
            tensors = {name: opened.get_slice(name) for name in opened.offset_keys()}
            shapes = [(name, tuple(tensor.get_shape())) for name, tensor in tensors.items()]
            (dtype,) = {tensor.get_dtype() for tensor in tensors.values()}
            layout = WeightLayout.of(shapes, dtype, lora and LoraWeights(**lora))
    except (SafetensorError, KeyError, ValueError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    return layout, WeightFile.open(path, layout.nbytes)


def _remove_name(path: Path) -> None:
    with suppress(OSError):  # if this fails, the next trainer removes the link
        path.unlink(missing_ok=True)


def safetensors_header(layout: WeightLayout, version: int) -> bytes:
    """Return the header of a safetensors file: 8 bytes with the length of the JSON, then the JSON.

    The JSON is padded with spaces, so that the weights behind it begin at a multiple of 64 bytes.
    """
    tensors = {
        slot.name: {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": (slot.start, slot.end)}
        for slot in layout.slots
    }
    metadata = {"format": "pt", "version": str(version)}
    if layout.lora:
        metadata["lora"] = json.dumps(asdict(layout.lora))
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    return len(text).to_bytes(8, "little") + text
