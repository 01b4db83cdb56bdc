"""Metrics files: what is written is read back, also after a crash, a resume, or while it is written."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from tba_hpc.report import digest
from tba_hpc.run import metrics
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.metrics import (
    REWARD_EDGES,
    Clock,
    MetricsTail,
    MetricsWriter,
    number,
    read_metrics,
    step_records,
)


def test_records_are_read_back_in_order_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "trainer.jsonl"
    writer = MetricsWriter(path)
    before = time.time()
    writer.log({"step": 1, "train/loss": np.float32(0.5), "staleness/histogram": np.array([3, 0, 1])})
    writer.log({"event": "stopped", "step": 1, "train/log_ratio": None})
    first, second = read_metrics(path)  # the writer is still open: every record is visible at once
    assert before <= number(first, "time", 0) <= time.time()
    assert {**first, "time": 0} == {"time": 0, "step": 1, "train/loss": 0.5, "staleness/histogram": [3, 0, 1]}
    assert {**second, "time": 0} == {"time": 0, "event": "stopped", "step": 1}
    assert path.read_text().count("\n") == 2


class Taken:
    """A digest that only remembers."""

    def __init__(self) -> None:
        self.records: list[metrics.Record] = []
        self.due = False

    def take(self, record: metrics.Record) -> None:
        self.records.append(record)

    def keep(self, part: int, file: FileIO) -> None:
        pass


def test_a_digest_takes_what_a_reader_of_the_file_sees(tmp_path: Path) -> None:
    """To the type: what it sums up is compared with what others fold from the lines."""
    taken, path = Taken(), tmp_path / "m.jsonl"
    writer = MetricsWriter(path, digest=taken)
    writer.log({"step": np.int64(3), "train/loss": np.float64(0.1), "train/beta": np.float32(0.1)})
    writer.log(
        {"event": "merged", "request_ids": [np.int64(7), 8], "ok": True, "text": "β"},
        {"staleness/histogram": (1, 2.5), "empty": np.array([]), "no": None, "far": float("inf")},
    )
    read = read_metrics(path)
    assert len(read) == 3 and taken.records == read
    for there, here in zip(read, taken.records, strict=True):
        assert [type(value) for value in here.values()] == [type(value) for value in there.values()]
    assert [type(value) for value in taken.records[1]["request_ids"]] == [int, int]
    assert read[1]["time"] == read[2]["time"]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2):
        writer.log({"step": step})
    writer.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_metrics(path)] == [1]
    MetricsWriter(path).log({"step": 3})
    after = [record["step"] for record in read_metrics(path)]
    assert after == ([1, 2, 3] if cut == 1 else [1, 3])  # without its line end alone, 2 is whole again


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes: the system writes what fits, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_tears_no_line_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.log({"step": 1})
    with room(path.stat().st_size + 10):
        for step in (2, 3, 4):
            writer.log({"step": step})
        assert len(read_metrics(path)) == 1 and not path.read_bytes().endswith(b"\n")
        with pytest.raises(DiskFullError, match=r"m.jsonl \(\d+ bytes wait\): no space is left; free space"):
            writer.sync()  # a checkpoint must not be believed whose records are not there
    writer.log({"step": 5})
    writer.sync()
    found = read_metrics(path)
    assert [record.get("step") for record in found] == [1, 2, 3, 4, 5, None]
    assert found[-1]["event"] == "full" and 0 <= number(found[-1], "seconds", -1) < 10
    assert len(caplog.records) == 1 and "its records wait in memory for room" in caplog.text
    assert path.read_bytes().count(b"\n") == 6


def test_records_do_not_wait_for_room_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_UNWRITTEN", 1000)
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with room(100), pytest.raises(DiskFullError, match="nothing sealed before is lost"):
        for step in range(100):
            writer.log({"step": step})


def test_a_digest_waits_for_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "KEEP_SECONDS", 0.0)
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path, digest=digest.KeptDigest(path, digest.TrainerDigest()))
    writer.log({"step": 1})
    with room(path.stat().st_size + 10):
        writer.log({"step": 2})
        assert digest.kept_digest(path, digest.TrainerDigest())[0].step == 1
    writer.log({"step": 3})
    found, tail = digest.kept_digest(path, digest.TrainerDigest())
    assert found.step == 3 and tail.new() == []


def test_a_disk_found_full_only_by_making_durable_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a write is taken and only fsync says that there was no room for it."""
    monkeypatch.setattr(digest, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "PART_BYTES", 150)
    path, fsync = tmp_path / "m.jsonl", os.fsync
    writer = MetricsWriter(path, digest=digest.KeptDigest(path, digest.TrainerDigest()))
    writer.log({"step": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for step in (2, 3, 4, 5):
        writer.log({"step": step})
    assert path.stat().st_size > 150 and digest.read_digest(path, digest.TrainerDigest())[0].step == 5
    assert digest.kept_digest(path, digest.TrainerDigest())[0].step == 1
    monkeypatch.setattr(os, "fsync", fsync)
    for step in (6, 7):
        writer.log({"step": step})
    assert path.stat().st_size < 150  # another part
    assert [number(record, "step", 0) for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert digest.kept_digest(path, digest.TrainerDigest())[0].step == 7


class Losing:
    """A disk that takes what is written and, where a flush fails, has lost all since the one before."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.durable, self.full, self._fsync = path, 0, 0, os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == self.path:
            if self.full:
                self.full -= 1
                os.truncate(self.path, self.durable)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.durable = self.path.stat().st_size
        self._fsync(descriptor)


@pytest.mark.parametrize("who", ["the digest", "another part", "a checkpoint"])
def test_records_that_a_disk_has_lost_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Whoever is told of it: nobody is a second time, and a checkpoint counts what they say."""
    monkeypatch.setattr(digest, "KEEP_SECONDS", 0.0 if who == "the digest" else 60.0)
    monkeypatch.setattr(metrics, "PART_BYTES", 100 if who == "another part" else 1 << 20)
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path, digest=digest.KeptDigest(path, digest.TrainerDigest()))
    disk = Losing(path, monkeypatch)
    writer.log({"step": 1})
    writer.sync()
    disk.full = 1
    writer.log({"step": 2})
    writer.log({"step": 3})
    if who == "a checkpoint":
        with pytest.raises(DiskFullError, match="no space is left"):
            writer.sync()
    assert disk.full == 0
    writer.sync()
    assert [record.get("step") for record in read_metrics(path)] == [1, 2, 3]
    assert digest.read_digest(path, digest.TrainerDigest())[0].step == 3


def test_what_a_disk_may_have_lost_is_not_remembered_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_UNWRITTEN", 1000)
    path = tmp_path / "m.jsonl"
    writer, disk = MetricsWriter(path), Losing(path, monkeypatch)
    for step in range(100):
        writer.log({"step": step})
    assert disk.durable > 2000
    disk.full = 1
    with pytest.raises(DiskFullError, match="nothing sealed before is lost"):
        for step in range(100, 200):
            writer.log({"step": step})
    writer.sync()
    found = [int(number(record, "step", -1)) for record in read_metrics(path)]
    assert found == list(range(len(found))) and len(found) > 100


def test_a_tail_gives_each_record_once_and_no_half_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert tail.new() == []
    text = "".join(json.dumps({"step": step, "note": "β" * step}) + "\n" for step in range(20)).encode()
    seen = []
    with path.open("wb", buffering=0) as file:
        for byte in range(len(text)):
            file.write(text[byte : byte + 1])
            seen += tail.new()
            assert len(seen) == text[: byte + 1].count(b"\n")
    assert [record["step"] for record in seen] == list(range(20))
    assert tail.new() == []


def test_of_a_step_done_twice_the_later_attempt_counts() -> None:
    records = [
        {"event": "started", "step": 0},
        *({"step": step, "attempt": 1} for step in (1, 2, 3, 4, 5)),
        {"event": "checkpoint", "step": 5},
        {"event": "resumed", "step": 2},
        *({"step": step, "attempt": 2} for step in (3, 4)),
    ]
    found = [(record["step"], record["attempt"]) for record in step_records(records)]
    assert found == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert step_records([*records, {"event": "started", "step": 0}]) == []
    without_events = [record for record in records if "event" not in record]
    assert [(r["step"], r["attempt"]) for r in step_records(without_events)] == found


@pytest.mark.parametrize(("module", "count"), [("step_log", 20), ("searcher", 11), ("search_log", 10)])
def test_every_metric_that_is_logged_is_documented(module: str, count: int) -> None:
    source = (Path(metrics.__file__).parents[1] / "loops" / f"{module}.py").read_text()
    logged = set(re.findall(r'"((?:train|time|sync|buffer|staleness|search)/\w+)"', source))
    documented = set(re.findall(r"^((?:\w+/\w+(?:, )?)+)", metrics.__doc__ or "", re.MULTILINE))
    names = {name for names in documented for name in names.split(", ")}
    assert len(logged) >= count and logged <= names


def test_number_takes_scalars_only() -> None:
    record = {"a": 2, "b": "text", "c": [1.0], "d": 0}
    assert [number(record, name) for name in "abcdx"] == [2.0, None, None, 0.0, None]
    assert number(record, "b", 7.0) == 7.0


def test_a_clock_adds_up_by_name_and_starts_anew() -> None:
    clock = Clock()
    for _ in range(2):
        with clock("sleep"):
            time.sleep(0.02)
    with pytest.raises(KeyError), clock("fail"):
        raise KeyError
    wall = clock.wall
    total = clock.reset()
    assert set(total) == {"sleep", "fail"}
    assert 0.04 <= total["sleep"] < wall and 0 < total["fail"] < wall
    assert clock.reset() == {} and clock.wall < 0.02


def test_tensorboard_gets_the_same_scalars_and_histograms(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c  # the format's checksum, as its readers check it

    writer = MetricsWriter(tmp_path / "m.jsonl", tensorboard=tmp_path / "board")
    writer.log({"step": 7, "train/loss": 0.25, "staleness/histogram": [1, 2], "event": "x"})
    rewards = np.histogram([0.0, 1.0, 1.0], REWARD_EDGES)[0].tolist()
    writer.log({"step": 8, "search/reward_histogram": [0, *rewards, 0], "staleness/histogram": [0]})
    writer.close()
    (path,) = (tmp_path / "board").iterdir()
    data, found = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found += [(event.step, value) for value in event.summary.value]
        data = data[16 + length :]
    (loss_at, loss), (stale_at, stale), (rewards_at, reward) = found
    assert (loss_at, loss.tag, loss.simple_value) == (7, "train/loss", 0.25)
    assert (stale_at, stale.tag, stale.histo.num) == (7, "staleness/histogram", 3)
    assert list(stale.histo.bucket_limit) == [0.5, 1.5] and list(stale.histo.bucket) == [1, 2]
    assert (stale.histo.min, stale.histo.max, stale.histo.sum, stale.histo.sum_squares) == (-0.5, 1.5, 2, 2)
    assert (rewards_at, reward.tag, reward.histo.num) == (8, "search/reward_histogram", 3)
    assert reward.histo.min == 0 and reward.histo.max == pytest.approx(np.sinh(1))
    bins = zip(reward.histo.bucket_limit, reward.histo.bucket, strict=True)
    assert [(limit, count) for limit, count in bins if count] == [(np.sinh(0.25), 1), (np.sinh(1.0), 2)]


def test_records_are_written_once_while_another_thread_makes_them_durable(tmp_path: Path) -> None:
    """As a checkpoint does that is written beside training."""
    writer, over = MetricsWriter(tmp_path / "trainer.jsonl"), threading.Event()

    def sync() -> None:
        while not over.is_set():
            writer.sync()

    syncing = [threading.Thread(target=sync) for _ in range(3)]
    for thread in syncing:
        thread.start()
    for step in range(3000):
        writer.log({"step": step})
    over.set()
    for thread in syncing:
        thread.join()
    writer.close()
    assert [record["step"] for record in read_metrics(tmp_path / "trainer.jsonl")] == list(range(3000))
