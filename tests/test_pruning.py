"""Shards that no resume needs: what is deleted, what is kept for people; kills."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest
import tabular_run
from killer import Killer, in_a_process
from test_hdf5_shards import sealed

from tba_hpc.core.types import Shard
from tba_hpc.exchange.hdf5_shards import SEARCHERS_AT_FULL_RATE, read_shard, seal_interval
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.pruning import position, prune


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.shards.mkdir(parents=True)
    return run


def seal(run: RunDir, searcher: int, count: int) -> list[Shard]:
    """So many more shards of a searcher."""
    return [sealed(run, searcher, groups=1)[1] for _ in range(count)]


def write(run: RunDir, searcher: int, count: int, size: int) -> None:
    """Files under the names of shards."""
    run.shard_folder(searcher).mkdir(exist_ok=True)
    for index in range(count):
        run.shard_file(searcher, index).write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("searchers", "elastic", "seconds"), [(1, 0, 2), (64, 0, 2), (96, 32, 4), (1024, 0, 32)]
)
def test_a_run_of_any_size_seals_as_many_shards_a_second(
    tmp_path: Path, searchers: int, elastic: int, seconds: float
) -> None:
    launch = {"searchers": searchers, "elastic": elastic}
    config = tabular_run.make_config(tmp_path, launch=launch, exchange={"seal_seconds": 2.0})
    assert seal_interval(config) == seconds
    assert (searchers + elastic) / seconds <= SEARCHERS_AT_FULL_RATE / 2.0


def test_a_share_is_spread_evenly_over_the_run_and_has_its_first_shard() -> None:
    for searcher in range(5):
        kept = [index for index in range(2000) if position((searcher, index)) < 0.1]
        assert len(kept) == pytest.approx(200, abs=4)
        assert max(b - a for a, b in pairwise(kept)) <= 13
    assert position((0, 0)) == 0


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_the_share_is_kept_bit_by_bit_and_the_rest_is_deleted(run: RunDir, share: float) -> None:
    seal(run, 0, 14)
    seal(run, 1, 5)
    before = {key: path.read_bytes() for key, path in run.sealed_files().items()}
    for cursors in ({0: 12, 1: 3}, {0: 14, 1: 5}):
        prune(run, cursors, share)
        left = {key for key in before if key[1] >= cursors[key[0]] or position(key) < share}
        assert {key: path.read_bytes() for key, path in run.sealed_files().items()} == {
            key: before[key] for key in sorted(left)
        }
    assert not run.shard_files() and run.kept.exists() == (share > 0)


def test_what_cannot_be_deleted_is_named_and_tried_again(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of a shard; those beside it go. Once that is gone the next call takes it."""
    write(run, 0, 6, 0)
    run.shard_file(0, 2).unlink()
    run.shard_file(0, 2).mkdir()
    run.shard_file(0, 1).rename(run.shard_folder(0) / "000001.h5.refused")
    prune(run, {0: 4, 7: 3})  # of searcher 7 nothing is left
    assert sorted(run.shard_files()) == [(0, 2), (0, 4), (0, 5)]
    assert "cannot delete 1 of the merged shards" in caplog.text and "000002.h5" in caplog.text
    run.shard_file(0, 2).rmdir()
    run.shard_file(0, 2).touch()
    prune(run, {0: 5, 7: 3})
    assert sorted(run.shard_files()) == [(0, 5)]
    assert (run.shard_folder(0) / "000001.h5.refused").exists()


def _prune_until_killed(path: Path, nth: int) -> None:
    Killer(path, nth)
    prune(RunDir(path), {0: 8}, 0.5)


def test_a_kill_before_any_change_to_files_takes_none_that_is_wanted(tmp_path: Path) -> None:
    wanted = [key for key in ((0, index) for index in range(9)) if position(key) < 0.5 or key[1] == 8]
    nth, killed = 1, True
    while killed:
        run = RunDir(tmp_path / str(nth))
        run.shards.mkdir(parents=True)
        seal(run, 0, 9)
        code = in_a_process(_prune_until_killed, run.path, nth)
        assert code in (0, -signal.SIGKILL)
        killed = code != 0
        there = list(run.shard_files())
        assert there == [key for key in there if key[1] >= there[0][1]], "the oldest go first"
        for _ in range(2):
            assert set(wanted) <= set(run.sealed_files())
            for path in run.sealed_files().values():
                read_shard(path)
            prune(run, {0: 8}, 0.5)
        assert list(run.sealed_files()) == wanted
        nth += 1
    assert nth > 5


def test_a_killed_run_keeps_all_that_it_has_trained_on_and_its_audit_is_clean(tmp_path: Path) -> None:
    config = tabular_run.make_config(tmp_path, exchange={"keep_shards": 1.0, "seal_seconds": 0.02})
    run = RunDir.create(config)
    for sent, nth in ((signal.SIGKILL, 25), (None, 0)):
        process = tabular_run.start(run, searchers=2, sent=sent, nth=nth)
        process.join(240)
        assert process.exitcode == (-sent if sent else 0)
    verdict = audit(run)
    assert verdict.clean and verdict.finished, verdict.problems
    files = run.sealed_files()
    assert {merge.key for merge in History.read(run).merges} <= files.keys() and run.kept_files()
    assert sum(len(read_shard(path).trajectories) for path in files.values()) == verdict.trajectories
