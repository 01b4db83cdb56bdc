"""File systems as clients see shared ones: holes in listings, files seen late, ESTALE, a full disk, clocks.

``Moods`` is the layer under the real code that makes them so.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tabular_run
from forks import fork
from test_hdf5_shards import scored, sealed
from test_loops import ReplayExchange, TrainerParts, _sealed
from test_loops import make_config as loops_config

from tba_hpc.core.prompts import CompletedRequests, Progress
from tba_hpc.core.types import Publication, Shard, WeightLayout
from tba_hpc.exchange import hdf5_shards
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import PendingShards, ShardWriter, read_shard
from tba_hpc.loops.trainer import MARGIN_SECONDS
from tba_hpc.report.audit import audit
from tba_hpc.run import files
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, discard_evaluations, find_evaluation, write_evaluation
from tba_hpc.run.files import make_folder

REAL_TIME = time.time
LAYOUT = WeightLayout.of([("a", (3, 5))], "F32")


@dataclass
class Moods:
    """What the file system does to those who call it; every rule is given a path, and may raise OSError.

    hides: whether a listing leaves an entry out. opened: before a file is opened. synced: before a file or
    folder is flushed.
    """

    hides: Callable[[Path], bool] = lambda path: False
    opened: Callable[[Path], None] = lambda path: None
    synced: Callable[[Path], None] = lambda path: None

    def install(self, put: Callable[[object, str, object], None]) -> None:
        """Come between Python and the system calls; ``put`` is setattr, or monkeypatch's."""
        scandir, opens, fsync = os.scandir, io.open, os.fsync

        def listed(folder="."):
            with scandir(folder) as entries:
                return nullcontext([entry for entry in entries if not self.hides(Path(entry.path))])

        def opening(file, *args, **kwargs):
            if isinstance(file, str | Path):
                self.opened(Path(file))
            return opens(file, *args, **kwargs)

        def syncing(descriptor):
            self.synced(Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        put(os, "scandir", listed)
        put(io, "open", opening)
        put(os, "fsync", syncing)


@pytest.fixture
def moods(monkeypatch: pytest.MonkeyPatch) -> Moods:
    moods = Moods()
    moods.install(monkeypatch.setattr)
    monkeypatch.setattr("tba_hpc.run.files.DISK_RETRY_SECONDS", 0.02)
    monkeypatch.setattr("tba_hpc.exchange.hdf5_shards.DISK_RETRY_SECONDS", 0.02)
    monkeypatch.setattr("tba_hpc.exchange.file_exchange.MANIFEST_CHECK_SECONDS", 0.0)
    return moods


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    make_folder(run.shards)
    make_folder(run.weights)
    return run


def raises(number: int, name: str, times: int = 1_000_000) -> Callable[[Path], None]:
    """A rule: that error for paths with such an end, the first few times."""
    left = [times]

    def rule(path: Path) -> None:
        if path.name.endswith(name) and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))

    return rule


def indices(shards: Iterator[Shard]) -> list[int]:
    return [shard.index for shard in shards]


# --- Shards ---


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE, errno.EIO])
def test_a_shard_that_is_seen_late_is_waited_for(run: RunDir, moods: Moods, error: int) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
        sealed(run, searcher=1, groups=1)
    moods.hides = lambda path: path == run.shard_file(0, 1)
    hidden = raises(error, "000001.h5", times=2)
    moods.opened = lambda path: hidden(path) if path.parent == run.shard_folder(0) else None
    shards = PendingShards(run, timeout=60)
    found = [(shard.searcher, shard.index) for shard in shards.read({})]
    assert found == [(0, 0), (1, 0), (1, 1), (1, 2)], "it stops there, and others go on"
    assert indices(shards.read({0: 1, 1: 3})) == []
    assert indices(shards.read({0: 1, 1: 3})) == [1, 2]


def test_a_shard_that_stays_away_is_named_and_passed_over_in_the_end(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
    run.shard_file(0, 1).unlink()
    shards = PendingShards(run, timeout=0.1)
    assert indices(shards.read({})) == [0]
    began = time.monotonic()
    assert indices(shards.read_all({0: 1})) == [2]
    assert time.monotonic() - began >= 0.1
    (warning,) = [record.message for record in caplog.records]
    assert f"{run.shard_file(0, 1)} could not be read for 0.1 s (No such file" in warning


def test_all_that_a_searcher_lacks_is_waited_for_at_once(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(24):
        sealed(run, searcher=0, groups=1)
    lacking = [index for index in range(23) if index % 8]
    for index in lacking:
        run.shard_file(0, index).unlink()
    began = time.monotonic()
    assert indices(PendingShards(run, timeout=1.0).read_all({})) == [0, 8, 16, 23]
    assert 1.0 <= time.monotonic() - began < 10  # one after another: 20
    named = [record.message.split()[0] for record in caplog.records]
    assert named == [str(run.shard_file(0, index)) for index in lacking]


def test_a_file_server_that_is_away_after_a_gap_is_waited_for(run: RunDir, moods: Moods) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
    run.shard_file(0, 0).unlink()
    moods.opened = raises(errno.ESTALE, "000001.h5", times=2)
    assert indices(PendingShards(run, timeout=0.3).read_all({})) == [1, 2]


def test_an_index_that_was_set_aside_is_no_gap(run: RunDir, moods: Moods) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
    run.shard_file(0, 1).rename(run.shard_file(0, 1).with_suffix(".h5.refused"))
    moods.hides = lambda path: path.name.endswith("refused")
    assert indices(PendingShards(run, timeout=60).read({})) == [0, 2]


def test_a_resume_looks_for_more_than_is_listed(run: RunDir, moods: Moods) -> None:
    """The last shard, and a whole folder, are not listed; a file is half there at first."""
    for searcher in (0, 1):
        for _ in range(2):
            sealed(run, searcher=searcher, groups=1)
    moods.hides = lambda path: path.name in ("000001.h5", "searcher-0001")
    path, opened = run.shard_file(0, 0), [0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])

    def show(looked_at: Path) -> None:
        opened[0] += looked_at == path
        if looked_at == path and opened[0] == 2:
            path.write_bytes(whole)

    moods.opened = show
    shards = PendingShards(run, searchers=range(2), timeout=60)
    found = [(shard.searcher, shard.index) for shard in shards.read_all({})]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_index_that_is_not_listed_is_not_used_again(run: RunDir, moods: Moods) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
    before = run.shard_file(0, 2).read_bytes()
    moods.hides = lambda path: path.name in ("000001.h5", "000002.h5")
    assert sealed(run, searcher=0, groups=2)[1].index == 3
    assert run.shard_file(0, 2).read_bytes() == before


def test_a_full_disk_is_waited_for_and_nothing_is_sealed_twice(run: RunDir, moods: Moods) -> None:
    writer = ShardWriter(run, 0, timeout=60)
    writer.append(*scored(0, 0))
    moods.synced = raises(errno.ENOSPC, ".tmp", times=3)
    first = writer.seal()
    writer.append(*scored(1, 1))
    moods.synced = raises(errno.EIO, "searcher-0000", times=1)  # it has its name already
    second = writer.seal()
    assert first and second and list(run.shard_files()) == [(0, 0), (0, 1)]
    assert {path.name for path in run.shard_folder(0).iterdir()} == {"000000.h5", "000001.h5"}
    assert read_shard(run.shard_file(0, 1)).trajectories.request_ids.tolist() == [1]


def test_the_names_of_new_folders_are_durable(tmp_path: Path, moods: Moods) -> None:
    flushed: list[Path] = []
    moods.synced = flushed.append
    run = RunDir.create(tabular_run.make_config(tmp_path / "deep" / "down"))
    ShardWriter(run, 3)
    made = {path.parent for path in (run.path, run.shards, run.shard_folder(3), tmp_path / "deep" / "down")}
    assert made <= set(flushed)


# --- The exchange over files ---


def trainer(run: RunDir, progress: Progress | None = None, attempt: str = "first") -> FileTrainerExchange:
    return FileTrainerExchange(
        run.weights,
        LAYOUT,
        attempt=attempt,
        read_pending=PendingShards(run, timeout=60).read,
        progress=progress or Progress(),
        evaluated=lambda split, step: True,
        timeout=60,
    )


def test_a_searcher_that_joins_later_learns_what_was_merged_and_pruned(run: RunDir, moods: Moods) -> None:
    before = CompletedRequests()
    before.add(np.array([70]))
    exchange = trainer(run, Progress(before, {1: 4}))
    for _ in range(2):
        sealed(run, searcher=0, groups=3)  # requests 0, 1, 2
    merged: list[Shard] = []
    while len(merged) < 2:
        exchange.gather()
        merged += exchange.collect()
    while not exchange.idle:
        time.sleep(0.01)
    for path in run.shard_files().values():
        path.unlink()
    moods.opened = raises(errno.ESTALE, "progress", times=2)
    progress = FileSearcherExchange(run.weights, 0, attempt="first", deadline=60).progress()
    assert progress.cursors == {0: 2, 1: 4}
    assert {request for request in range(100) if request in progress.completed} == {0, 1, 2, 70}
    exchange.close()


def test_the_progress_of_an_earlier_attempt_is_not_taken(run: RunDir) -> None:
    trainer(run, Progress(cursors={0: 1}))
    found: list[Progress] = []
    searcher = FileSearcherExchange(run.weights, 0, attempt="second", deadline=60)
    thread = threading.Thread(target=lambda: found.append(searcher.progress()))
    thread.start()
    time.sleep(0.3)
    assert not found
    exchange = trainer(run, Progress(cursors={0: 7}), attempt="second")
    thread.join(60)
    assert found[0].cursors == {0: 7}
    exchange.close()


def test_weights_keep_a_name_while_they_are_read(run: RunDir, moods: Moods) -> None:
    """Else a host that removes the last name of a mapped file takes its pages from others, on NFS."""
    exchange = trainer(run)

    def publish(version: int) -> None:
        while not exchange.publish(Publication(version=version), lambda out: out.fill(version)):
            pass
        while not exchange.gather():
            pass

    publish(1)
    reader = FileSearcherExchange(run.weights, 0, attempt="first", deadline=60)
    update = reader.poll()
    assert update is not None and (update.data == 1).all()
    (held,) = run.weights.glob("held-*")
    for version in range(2, 5):
        publish(version)
    assert held.stat().st_nlink == 1 and not (run.weights / "step-000001.safetensors").exists()
    del update
    assert list(run.weights.glob("held-*")) == []
    exchange.close()


def loses(name: str, times: int) -> Callable[[Path], None]:
    """A rule: the first few flushes of such a file fail, and it has a hole then, which no later one tells."""
    fails = raises(errno.EIO, name, times)

    def rule(path: Path) -> None:
        try:
            fails(path)
        except OSError:
            os.truncate(path, (size := path.stat().st_size) - 32)
            os.truncate(path, size)
            raise

    return rule


def test_weights_that_a_disk_has_lost_are_written_again(run: RunDir, moods: Moods) -> None:
    exchange = trainer(run)
    moods.synced = loses(".tmp", times=2)
    exchange.publish(Publication(version=3), lambda out: out.fill(3))
    exchange.close()
    update = FileSearcherExchange(run.weights, 0, attempt="first", deadline=60).poll()
    assert update is not None and (update.data == 3).all()


def test_an_evaluation_that_cannot_be_seen_for_a_moment_is_not_deleted(tmp_path: Path, moods: Moods) -> None:
    run = RunDir.create(tabular_run.make_config(tmp_path))
    part = Evaluation(split="validation", step=8, correct=1, total=4, tokens=9, truncated=0)
    write_evaluation(run, 0, 1, part)
    moods.opened = raises(errno.ESTALE, "-000008.json", times=2)
    discard_evaluations(run, after=20)
    moods.opened = lambda path: None
    assert find_evaluation(run, "validation", 8) == part


# --- Links and clocks ---


def test_a_rank_goes_by_what_its_launcher_said(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may hold the link of the attempt before."""
    make_folder(run.logs)
    run.config_file.touch()
    run.begin_attempt()
    second = run.begin_attempt()
    (run.logs / "latest").unlink()
    (run.logs / "latest").symlink_to("attempt-001")
    assert run.attempt_number == 1
    monkeypatch.setenv("TBA_ATTEMPT", second.name)
    assert run.attempt == second and run.attempt_number == 2


def test_a_clock_that_is_set_back_does_not_lengthen_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rarely = {"exchange": {"sync_every": 10**6}, "checkpoint": {"every": 10**6}}
    config = loops_config(tmp_path, train={"steps": 10**6}, **rarely)
    run = RunDir.create(config)
    exchange = ReplayExchange(_sealed(config, run, 2), 0)
    now, began = time.time, time.monotonic()
    trainer = TrainerParts(config, run).build(exchange, job_end=now() + MARGIN_SECONDS + 1)
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    assert not trainer.run()
    assert time.monotonic() - began < 15


# --- Whole runs ---


def moody(seed: int) -> Moods:
    """Holes in listings; off the trainer's own thread ESTALE, late files, a disk full for a second."""
    random, began = np.random.default_rng(seed), time.monotonic()
    lock = threading.Lock()

    def chance(share: float) -> bool:
        with lock:
            return bool(random.random() < share)

    def is_shard(path: Path) -> bool:
        return path.suffix == ".h5" and path.parent.parent.name == "shards"

    def opened(path: Path) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        if (path.name == "latest.json" or is_shard(path)) and chance(0.1):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if is_shard(path) and REAL_TIME() - path.stat().st_mtime < 0.05 and chance(0.5):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def synced(path: Path) -> None:
        aside = threading.current_thread() is not threading.main_thread()
        if aside and 0.5 < time.monotonic() - began < 1.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return Moods(lambda path: is_shard(path) and chance(0.3), opened, synced)


def live(path: Path, seed: int, sent: signal.Signals | None, nth: int) -> None:
    """An attempt on such a file system, while the clock is set back and forth."""
    time.time = lambda: REAL_TIME() + 3600 * (int(time.monotonic()) % 3 - 1)
    files.DISK_RETRY_SECONDS = hdf5_shards.DISK_RETRY_SECONDS = 0.05
    moody(seed).install(setattr)
    tabular_run._live(path, sent, nth)


def test_a_run_on_a_moody_file_system_loses_nothing_and_nobody(tmp_path: Path) -> None:
    """Two kills and a change of the number of searchers; the audit sees the files as they are."""
    run = RunDir.create(tabular_run.make_config(tmp_path))
    for attempt, (searchers, sent, nth) in enumerate(
        [(2, signal.SIGKILL, 13), (3, signal.SIGKILL, 9), (2, None, 0)]
    ):
        run.adapt([f"launch.searchers={searchers}"])
        run.begin_attempt()
        process = fork(live, run.path, attempt, sent, nth)
        process.join(240)
        assert process.exitcode == (-sent if sent else 0)
    verdict = audit(run)
    assert verdict.finished and verdict.clean, verdict.problems
    assert not list(run.shards.glob("*/*.refused"))
