"""Metrics files: what is written is read back, also after a crash, a resume, or while it is written."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tba_hpc.objectives.diagnostics import MOMENTS
from tba_hpc.run import metrics
from tba_hpc.run.files import DiskFullError, is_disk_full
from tba_hpc.run.history import History
from tba_hpc.run.metric_table import FIELDS, METRICS, SEARCHER_EVENTS, TRAINER_EVENTS
from tba_hpc.run.metrics import (
    MetricsTail,
    MetricsWriter,
    number,
    read_metrics,
    record_seconds,
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
        self.end = 0

    def __call__(self, records: Sequence[metrics.Record], end: int | None) -> None:
        self.records += records
        self.end = self.end if end is None else end


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
    assert len(read) == 3 and taken.records == read and taken.end == path.stat().st_size
    for there, here in zip(read, taken.records, strict=True):
        assert [type(value) for value in here.values()] == [type(value) for value in there.values()]
    assert [type(value) for value in taken.records[1]["request_ids"]] == [int, int]
    assert read[1]["time"] == read[2]["time"]


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


def test_a_full_disk_loses_no_record_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, taken = tmp_path / "m.jsonl", Taken()
    writer = MetricsWriter(path, digest=taken)
    writer.log({"step": 1})
    with room(path.stat().st_size + 10):
        for step in (2, 3, 4):
            writer.log({"step": step})
        assert len(read_metrics(path)) == 1 and not path.read_bytes().endswith(b"\n")
        assert taken.end < path.stat().st_size, "a digest must not be of lines that are not there"
        with pytest.raises(DiskFullError, match=r"m.jsonl \(\d+ bytes wait\): no space is left; free space"):
            writer.sync()  # a checkpoint must not be believed whose records are not there
    writer.log({"step": 5})
    writer.sync()
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 1 and "its records wait in memory for space" in caplog.text
    assert path.read_bytes().count(b"\n") == 5 and taken.end == path.stat().st_size


def test_what_a_disk_has_lost_at_fsync_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, which says so once: a checkpoint must not be put off as for a full disk, and tried again."""

    def lost(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.log({"step": 1})
    monkeypatch.setattr(os, "fsync", lost)
    with pytest.raises(OSError, match=r"may be lost \(No space.*start the same run again") as raised:
        writer.sync()
    assert not is_disk_full(raised.value)


def test_records_do_not_wait_for_room_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_UNWRITTEN", 1000)
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with room(100), pytest.raises(DiskFullError, match="nothing sealed before is lost"):
        for step in range(100):
            writer.log({"step": step})


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
    found = [(record["step"], record["attempt"]) for record in History.of(records).steps]
    assert found == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert History.of([*records, {"event": "started", "step": 0}]).steps == []


PACKAGE = Path(metrics.__file__).parents[1]
NAME = re.compile(r'"((?:train|time|sync|buffer|staleness|search)/\w+)"')


def source(*folders: str) -> str:
    return "\n".join(
        path.read_text() for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))
    )


def test_every_metric_that_is_logged_or_read_is_in_the_table() -> None:
    logged, known = set(NAME.findall(source("loops"))), METRICS.keys() | FIELDS.keys()
    assert len(logged) >= 35 and logged <= known
    assert set(NAME.findall(source("report", "commands"))) <= known


def test_what_learner_and_objectives_measure_is_in_the_table() -> None:
    """A learner's step gives the figures of its objective; the trainer logs them as train/NAME."""
    objectives = re.sub(r'""".*?"""', "", source("objectives"), flags=re.DOTALL)
    given = set(re.findall(r'^        "(\w+)": ', objectives, re.MULTILINE))
    given |= set(re.findall(r'(?:metrics, |metrics\[|, |\{)"(\w+)"(?:: |\] = )', objectives))
    known = {f"train/{name}" for name in given - {*MOMENTS}}
    assert len(known) >= 8 and known <= METRICS.keys(), known - METRICS.keys()


def test_every_event_that_is_logged_is_in_the_table() -> None:
    text = source("loops") + (PACKAGE / "runtime.py").read_text()
    logged = set(re.findall(r'"event": "(\w+)"|_(?:event|log)\("(\w+)"|_EVENT\("(\w+)"', text))
    names = {name for found in logged for name in found if name}
    assert len(names) >= 12 and names <= TRAINER_EVENTS.keys() | SEARCHER_EVENTS.keys()


def test_all_searchers_together_log_a_bounded_number_of_records() -> None:
    assert [record_seconds(searchers) for searchers in (1, 8, 64, 1024)] == [1, 1, 8, 128]
    assert all(searchers / record_seconds(searchers) <= 8 for searchers in range(1, 2000))


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
