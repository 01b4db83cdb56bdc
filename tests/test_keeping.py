"""Merged shards that are kept for people: which, how many, in how much room; and the audit does not mind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tabular_run
from killer import Killer, in_a_process
from test_bundles import INSPECT, bundle, seal
from test_bundles import few as few
from test_bundles import run as run

from tba_hpc.exchange.hdf5_shards import is_shard, parse_shard
from tba_hpc.report.audit import audit
from tba_hpc.run import pruning
from tba_hpc.run.bundles import Key, Place
from tba_hpc.run.directory import RunDir
from tba_hpc.run.keeping import ShardKeeper, place_of, sealed_files
from tba_hpc.run.metrics import read_metrics
from tba_hpc.run.pruning import ShardPruner

MUCH = 1 << 40


def read(file: Path | Place) -> bytes:
    return file.read() if isinstance(file, Place) else file.read_bytes()


def prune(run: RunDir, share: float, cursors: dict[int, int], most_bytes: int | None = MUCH) -> None:
    """Delete what is before the cursors, and keep a share of it."""
    pruner = ShardPruner(run, is_shard, ShardKeeper(run, share, most_bytes))
    pruner.prune(cursors)
    assert pruner.finish(60)


def test_a_share_is_spread_evenly_over_the_run_and_has_its_first_shard() -> None:
    for searcher in range(5):
        kept = [index for index in range(2000) if place_of((searcher, index)) < 0.1]
        assert len(kept) == pytest.approx(200, abs=4)
        assert max(b - a for a, b in pairwise(kept)) <= 13
    assert place_of((0, 0)) == 0


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_share_is_kept_bit_by_bit_from_files_and_from_bundles(
    run: RunDir, few: None, share: float
) -> None:
    seal(run, 0, 14)
    seal(run, 1, 5)
    before = {key: read(file) for key, file in sealed_files(run).items()}
    bundle(run, s0=14, s1=5)
    assert run.bundle_files()
    prune(run, share, {0: 12, 1: 3})
    pruned = {key for key in before if key[1] < (12, 3)[key[0]]}
    there = {key: read(file) for key, file in sealed_files(run).items()}
    assert {key for key in before if key not in pruned or place_of(key) < share} <= there.keys()
    assert all(before[key] == data for key, data in there.items())
    prune(run, share, {0: 14, 1: 5})
    assert sealed_files(run).keys() == {key for key in before if place_of(key) < share}
    assert not run.shard_files() and not run.bundle_files()


def test_nothing_is_kept_unless_it_is_asked_for(run: RunDir) -> None:
    seal(run, 0, 5)
    pruner = ShardPruner(run, is_shard)
    pruner.prune({0: 5})
    assert pruner.finish(60)
    assert not sealed_files(run) and not run.kept.exists()


def test_where_there_is_no_room_every_second_one_goes_old_and_new(run: RunDir) -> None:
    size = seal_and_measure(run, 64)
    pruner = ShardPruner(run, is_shard, ShardKeeper(run, 1.0, 20 * size))
    for end in (16, 32, 48, 64):
        pruner.prune({0: end})
    assert pruner.finish(60)
    kept = [index for _, index in sealed_files(run)]
    assert sum(path.stat().st_size for path in run.kept_files().values()) <= 20 * size
    share = next(share for share in (1 / 8, 1 / 4, 1 / 2) if max(map(of_searcher_0, kept)) < share)
    assert kept == [index for index in range(64) if of_searcher_0(index) < share]
    assert len(kept) >= 8 and kept[0] == 0 and kept[-1] > 48
    seal(run, 0, 16)
    prune(run, 1.0, {0: 80}, most_bytes=20 * size)
    assert sum(path.stat().st_size for path in run.kept_files().values()) <= 20 * size


def seal_and_measure(run: RunDir, count: int) -> int:
    """Seal shards; returns the bytes of the largest."""
    seal(run, 0, count)
    return max(path.stat().st_size for path in run.shard_files().values())


def of_searcher_0(index: int) -> float:
    return place_of((0, index))


def test_a_disk_without_room_keeps_nothing_from_being_deleted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seal(run, 0, 4)
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if ".bundle." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    prune(run, 1.0, {0: 4})
    assert not run.shard_files() and not run.kept_files()
    assert "4 merged shards could not be kept: cannot write" in caplog.text


def _prune_until_killed(path: Path, nth: int) -> None:
    pruning.LOOSE, pruning.BUNDLED = 2, 3
    run = RunDir(path)
    bundle(run, s0=8)
    pruner = ShardPruner(run, is_shard, ShardKeeper(run, 1.0, MUCH))
    Killer(path, nth)
    pruner._delete({0: 8})


def test_a_kill_before_any_change_to_files_takes_none_that_is_wanted(tmp_path: Path) -> None:
    nth, killed = 1, True
    while killed:
        run = RunDir(tmp_path / str(nth))
        run.shards.mkdir(parents=True)
        seal(run, 0, 9)
        code = in_a_process(_prune_until_killed, run.path, nth)
        assert code in (0, -signal.SIGKILL)
        killed = code != 0
        for _ in range(2):
            files = sealed_files(run)
            assert list(files) == [(0, index) for index in range(9)]
            assert all(is_shard(read(file)) for file in files.values())
            prune(run, 1.0, {0: 9})
        nth += 1
    assert nth > 5


def test_a_killed_run_keeps_all_that_it_has_trained_on_and_its_audit_is_clean(tmp_path: Path) -> None:
    config = tabular_run.make_config(tmp_path, exchange={"keep_shards": 1.0, "seal_seconds": 0.02})
    run = RunDir.create(config)
    for sent, nth in ((signal.SIGKILL, 25), (None, 0)):
        process = tabular_run.start(run, searchers=2, sent=sent, nth=nth)
        process.join(80)
        assert process.exitcode == (-sent if sent else 0)
    verdict = audit(run)
    assert verdict.clean and verdict.finished, verdict.problems
    merged = [r for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == "merged"]
    files = sealed_files(run)
    keys: set[Key] = {(r["searcher"], r["shard"]) for r in merged}  # type: ignore[misc]
    assert keys <= files.keys() and run.kept_files()
    shards = [parse_shard(Path(), read(file)) for file in files.values()]
    assert sum(len(shard.trajectories) for shard in shards) == verdict.trajectories


def test_a_run_without_a_shard_is_told_as_one(tmp_path: Path) -> None:
    run = RunDir.create(tabular_run.make_config(tmp_path))
    shown = subprocess.run([sys.executable, INSPECT, run.path], capture_output=True, text=True)
    assert shown.returncode == 2 and "keep_shards=1" in shown.stderr
    seal(run, 0, 3)
    prune(run, 1.0, {0: 3})
    shown = subprocess.run([sys.executable, INSPECT, run.path, "--json"], capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.count("kept/000000.bundle: 0, ") == 3
