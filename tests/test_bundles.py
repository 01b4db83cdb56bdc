"""Bundles of merged shards: few files, and every shard is there whatever happens, until none needs it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tabular_run
from killer import Killer, in_a_process
from test_hdf5_shards import assert_equal, scored, sealed

from tba_hpc.core.types import Shard
from tba_hpc.exchange.hdf5_shards import PendingShards, ShardWriter, is_shard
from tba_hpc.report.audit import audit
from tba_hpc.report.summary import summarise
from tba_hpc.run import metrics, pruning
from tba_hpc.run.bundles import BundleError, Bundles, contents, pack
from tba_hpc.run.checkpoints import checkpoint_folders
from tba_hpc.run.directory import RunDir
from tba_hpc.run.pruning import ShardPruner

INSPECT = Path(__file__).parents[1] / "tools" / "inspect_shards.py"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.shards.mkdir(parents=True)
    return run


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files of their own at most, three in a bundle."""
    monkeypatch.setattr(pruning, "LOOSE", 4)
    monkeypatch.setattr(pruning, "BUNDLED", 3)


def seal(run: RunDir, searcher: int, count: int) -> list[Shard]:
    """So many more shards of a searcher."""
    return [sealed(run, searcher, groups=1)[1] for _ in range(count)]


def bundle(run: RunDir, **cursors: int) -> None:
    """All that is to be bundled once these are merged."""
    settle(ShardPruner(run, is_shard), {int(searcher[1:]): end for searcher, end in cursors.items()})


def settle(pruner: ShardPruner, cursors: dict[int, int]) -> None:
    """Tell of merges, and wait for the bundles."""
    pruner.merged(cursors)
    end = time.monotonic() + 60
    while pruner._ends != cursors or len(pruner._loose) >= pruning.LOOSE + pruning.BUNDLED:
        assert time.monotonic() < end
        time.sleep(0.001)


def there(run: RunDir) -> list[tuple[int, int]]:
    """The shards that a start of the leader finds, in order."""
    return sorted((shard.searcher, shard.index) for shard in PendingShards(run).read_all({}))


# --- A bundle ---


FILES = {(0, 7): b"seven" * 30, (3, 1): b"one", (0, 8): b""}


def test_a_bundle_gives_back_each_file(tmp_path: Path) -> None:
    path = tmp_path / "000000.bundle"
    path.write_bytes(pack(FILES))
    found = contents(path)
    assert list(found) == list(FILES) and {key: place.read() for key, place in found.items()} == FILES
    head = path.read_bytes().split(b"\n")[:2]
    assert head[0].startswith(b"tba-hpc bundle table=") and json.loads(head[1]) == [
        [0, 7, 150],
        [3, 1, 3],
        [0, 8, 0],
    ]


def test_no_flipped_bit_costs_more_than_the_file_that_it_lies_in(tmp_path: Path) -> None:
    path, data = tmp_path / "x.bundle", bytearray(pack(FILES))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        found = {key: place.read() for key, place in contents(path).items()}
        assert list(found) == list(FILES)
        assert sum(found[key] != FILES[key] for key in FILES) <= 1
        data[bit // 8] ^= 1 << bit % 8


def test_a_bundle_with_both_tables_damaged_is_refused(tmp_path: Path) -> None:
    path, data = tmp_path / "x.bundle", bytearray(pack(FILES))
    for seed in range(100):
        draw = random.Random(seed)
        broken = bytearray(data)
        broken[draw.randrange(60)] ^= 1 << draw.randrange(8)
        broken[-1 - draw.randrange(60)] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(BundleError, match=r"x\.bundle is damaged: neither of its two tables"):
            contents(path)
    for size in range(40):
        path.write_bytes(data[:size])
        with pytest.raises(BundleError):
            contents(path)


# --- Bundling ---


def test_the_oldest_merged_shards_are_bundled_where_there_are_many(run: RunDir, few: None) -> None:
    shards = {shard.index: shard for shard in seal(run, 0, 12)}
    other = seal(run, 1, 2)
    bundle(run, s0=11, s1=1)
    assert len(run.shard_files()) <= 4 + 3 - 1 + 2
    assert (0, 11) in run.shard_files() and (1, 1) in run.shard_files(), "they are not merged"
    bundled = [key for path in run.bundle_files().values() for key in contents(path)]
    assert sorted([*bundled, *run.shard_files()]) == [(0, i) for i in range(12)] + [(1, 0), (1, 1)]
    for shard in PendingShards(run).read_all({}):
        assert_equal(shard.trajectories, (other if shard.searcher else shards)[shard.index].trajectories)


def test_a_run_of_few_shards_has_no_bundles(run: RunDir) -> None:
    seal(run, 0, 5)
    pruner = ShardPruner(run, is_shard)
    pruner.merged({0: 5})
    assert pruner.finish(60)
    assert len(run.shard_files()) == 5 and not run.bundles.exists()


def test_files_stay_few_however_many_are_merged(run: RunDir, few: None) -> None:
    """The thread itself: what was merged is told, and nothing waited for."""
    pruner, most = ShardPruner(run, lambda data: True), 0
    run.shard_folder(0).mkdir()
    for index in range(300):
        run.shard_file(0, index).write_bytes(b"%d" % index)
        if index % 10 == 9:
            settle(pruner, {0: index + 1})
        most = max(most, len(run.shard_files()))
    assert most <= 7 + 10
    assert len(run.bundle_files()) >= 95
    pruner.prune({0: 290})
    assert pruner.finish(60)
    left = [key for path in run.bundle_files().values() for key in contents(path)] + list(run.shard_files())
    assert {(0, index) for index in range(290, 300)} <= set(left) and len(left) <= 12


def test_what_no_checkpoint_needs_goes_a_bundle_at_a_time_also_at_the_next_start(
    run: RunDir, few: None
) -> None:
    seal(run, 0, 10)
    seal(run, 1, 4)
    bundle(run, s0=10, s1=4)
    (run.bundles / ".000099.bundle.12.tmp").write_bytes(b"half")
    numbers = run.bundle_files()
    held = {number: contents(path) for number, path in numbers.items()}
    pruner = ShardPruner(run, is_shard)
    pruner.prune({0: 7, 1: 0})
    assert pruner.finish(60)
    kept = {number for number, keys in held.items() if any(index >= {0: 7, 1: 0}[s] for s, index in keys)}
    assert set(run.bundle_files()) == kept and kept < set(numbers)
    assert [path for path in run.bundles.iterdir() if path.suffix == ".tmp"] == []
    assert there(run)[-7:] == [(0, 7), (0, 8), (0, 9), (1, 0), (1, 1), (1, 2), (1, 3)]
    seal(run, 0, 10)
    bundle(run, s0=20, s1=4)
    assert not kept - set(run.bundle_files()), "no number comes twice"


@pytest.mark.parametrize("damage", ["truncated", "gone", "aside"])
def test_what_is_not_whole_is_not_bundled(run: RunDir, few: None, damage: str) -> None:
    """A client of a shared file system may see half of a file that is whole."""
    seal(run, 0, 9)
    path = run.shard_file(0, 1)
    whole = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(whole[:-10])
        case "gone":
            path.unlink()
        case "aside":
            path.rename(path.with_name(path.name + ".refused"))
    bundle(run, s0=9)
    assert run.bundle_files() and all((0, 1) not in contents(path) for path in run.bundle_files().values())
    if damage != "aside":
        path.write_bytes(whole)
    assert there(run) == [(0, index) for index in range(9) if index != 1 or damage != "aside"]


def test_a_full_disk_leaves_all_as_it_is(
    run: RunDir, few: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seal(run, 0, 9)
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if ".bundle." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    pruner = ShardPruner(run, is_shard)
    for _ in range(5):
        while not pruner._asked.empty() or pruner._not_before == 0:
            pruner.merged({0: 9})
    assert pruner.finish(60)
    assert len(run.shard_files()) == 9 and list(run.bundles.iterdir()) == []
    assert caplog.text.count("merged shards stay as they are (cannot write") == 1


def _bundle_until_killed(path: Path, nth: int) -> None:
    pruning.LOOSE, pruning.BUNDLED = 2, 3
    Killer(path, nth)
    run = RunDir(path)
    bundle(run, s0=8, s1=3)
    pruner = ShardPruner(run, is_shard)
    pruner._delete({0: 4, 1: 1})


def test_a_kill_before_any_change_to_files_loses_nothing(tmp_path: Path) -> None:
    nth, killed = 1, True
    while killed:
        run = RunDir(tmp_path / str(nth))
        run.shards.mkdir(parents=True)
        seal(run, 0, 9)
        seal(run, 1, 3)
        code = in_a_process(_bundle_until_killed, run.path, nth)
        assert code in (0, -signal.SIGKILL)
        killed = code != 0
        wanted = [(0, index) for index in range(4, 9)] + [(1, 1), (1, 2)]
        assert [key for key in there(run) if key in wanted] == wanted
        pruner = ShardPruner(run, is_shard)
        pruner._delete({0: 9, 1: 3})
        assert not run.shard_files() and not run.bundle_files()
        assert not list(run.shards.rglob("*.*"))
        nth += 1
    assert nth > 30


# --- Damage ---


def test_a_damaged_shard_in_a_bundle_is_set_aside_alone(
    run: RunDir, few: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_hpc.exchange.hdf5_shards.AGAIN_SECONDS", 0.01)
    seal(run, 0, 9)
    bundle(run, s0=9)
    place = contents(run.bundle_file(0))[0, 1]
    data = bytearray(place.bundle.read_bytes())
    data[place.start + place.size // 2] ^= 4
    place.bundle.write_bytes(data)
    assert there(run) == [(0, index) for index in range(9) if index != 1]
    assert "000001.h5 is corrupt: its checksum does not match its contents; set aside" in caplog.text
    assert run.shard_file(0, 1).with_name("000001.h5.refused").read_bytes() == place.read()
    assert there(run) == [(0, index) for index in range(9) if index != 1]

    shown = subprocess.run([sys.executable, INSPECT, run.path, "--json"], capture_output=True, text=True)
    lines = {line["file"]: line["broken"] for line in json.loads(shown.stdout)["shards"]}
    broken = {name for name, fault in lines.items() if fault}
    assert shown.returncode == 1 and len(lines) == 10
    assert broken == {"bundles/000000.bundle: 0, 1", "searcher-0000/000001.h5.refused"}


def test_where_a_file_and_its_copy_are_there_the_whole_one_is_read(run: RunDir, few: None) -> None:
    """As a kill leaves them between the two."""
    seal(run, 0, 9)
    files = {path: path.read_bytes() for path in run.shard_files().values()}
    bundle(run, s0=9)
    for path, data in files.items():
        path.write_bytes(data)
    place = contents(run.bundle_file(0))[0, 1]
    data = bytearray(place.bundle.read_bytes())
    data[place.start + 700] ^= 4
    place.bundle.write_bytes(data)
    run.shard_file(0, 2).write_bytes(b"")
    assert there(run) == [(0, index) for index in range(9)]


def test_a_bundle_without_a_table_is_set_aside(
    run: RunDir, few: None, caplog: pytest.LogCaptureFixture
) -> None:
    seal(run, 0, 9)
    bundle(run, s0=9)
    run.bundle_file(0).write_bytes(b"\0" * 4096)
    found = Bundles(run)
    found.look({})
    assert found.find(0, 1) is None and "neither of its two tables is whole; set aside as" in caplog.text
    assert 0 not in run.bundle_files()


def test_of_what_is_before_the_cursors_nothing_is_kept(run: RunDir, few: None) -> None:
    seal(run, 0, 12)
    bundle(run, s0=12)
    found = Bundles(run)
    found.look({0: 2})
    assert found.find(0, 1) is None and found.find(0, 2) is not None and found.find(0, 11) is None
    assert 3 <= found.end(0) <= 12 and found.end(1) == 0


# --- Whole runs ---


def live(path: Path, sent: signal.Signals | None, nth: int) -> None:
    """A start as of a run that is a thousand times larger: bundles, and metrics of many parts."""
    pruning.LOOSE, pruning.BUNDLED, metrics.PART_BYTES = 3, 2, 4000
    tabular_run._live(path, sent, nth)


def attempts(run: RunDir) -> Iterator[RunDir]:
    """Three starts with another number of searchers, the first two killed."""
    context = multiprocessing.get_context("forkserver")
    for searchers, sent, nth in [(2, signal.SIGKILL, 19), (3, signal.SIGKILL, 9), (1, None, 0)]:
        run.adapt([f"launch.searchers={searchers}"])
        run.begin_attempt()
        process = context.Process(target=live, args=(run.path, sent, nth))
        process.start()
        process.join(80)
        assert process.exitcode == (-sent if sent else 0)
        yield run


def test_a_run_that_bundles_is_killed_and_loses_nothing_nor_with_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = RunDir.create(tabular_run.make_config(tmp_path))
    bundled = []
    for attempt, _ in enumerate(attempts(run)):
        bundled.append(len(run.bundle_files()))
        verdict = audit(run)
        assert verdict.clean, verdict.problems
        if attempt == 0:
            newest = checkpoint_folders(run, complete=True)[-1]
            data = bytearray((newest / "buffer.h5").read_bytes())
            data[-5] ^= 1
            (newest / "buffer.h5").write_bytes(data)
    assert verdict.finished and min(bundled[:2]) > 0
    assert len(list(run.metrics.glob("trainer.jsonl.*.gz"))) > 3
    assert summarise(run, run.config()).trajectories == verdict.trajectories
    assert not list(run.shards.glob("*/*.refused"))


def test_a_searcher_looks_into_no_bundle(run: RunDir, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bundled was merged, and the leader has told it so: its own next index is beyond."""
    seal(run, 0, 9)
    bundle(run, s0=9)
    monkeypatch.setattr(Bundles, "look", lambda *_: pytest.fail("a thousand searchers would read them all"))
    assert [shard.index for shard in PendingShards(run).read_all({0: 9}, [0])] == []
    writer = ShardWriter(run, 0, first_index=9)
    writer.append(*scored(1, 1))
    shard = writer.seal()
    assert shard is not None and shard.index == 9
