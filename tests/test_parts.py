"""Metrics of many parts are read as one file: by whoever followed it, or comes later, whatever was killed."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from killer import Killer, in_a_process

from tba_hpc.report import digest
from tba_hpc.report.digest import KeptDigest, TrainerDigest, kept_digest, read_digest
from tba_hpc.report.summary import searcher_files
from tba_hpc.run import metrics
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsTail, MetricsWriter, read_metrics
from tba_hpc.run.parts import compress_parts, finished_part, finished_parts, open_part


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some four records to a part."""
    monkeypatch.setattr(metrics, "PART_BYTES", 200)
    monkeypatch.setattr(digest, "KEEP_SECONDS", 0.0)


def steps(records: list[metrics.Record]) -> list[object]:
    return [record["step"] for record in records]


def written(path: Path, first: int, end: int) -> MetricsWriter:
    writer = MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
    for step in range(first, end):
        writer.log({"step": step, "train/loss": step / 2})
    return writer


def test_parts_are_compressed_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    written(path, 1, 50).close()
    compress_parts(path)
    count = finished_parts(path)
    assert count > 8 and sorted(tmp_path.glob("*.gz")) == [
        path.with_name(f"trainer.jsonl.{number:06d}.gz") for number in range(count)
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".gz") == [
        "trainer.digest.json",
        path.name,
    ]
    with gzip.open(path.with_name("trainer.jsonl.000000.gz")) as part:
        assert json.loads(part.readline())["step"] == 1
    assert steps(read_metrics(path)) == list(range(1, 50))
    assert steps(list(MetricsTail(path).records())) == list(range(1, 50))


@pytest.mark.parametrize("seed", range(5))
def test_who_follows_a_file_gets_each_record_once(tmp_path: Path, seed: int) -> None:
    """However often they look, while parts are finished and compressed; and a writer begins anew."""
    path, draw = tmp_path / "m.jsonl", random.Random(seed)
    tails, seen, step = [MetricsTail(path) for _ in range(3)], [list[metrics.Record]() for _ in range(3)], 0
    for _ in range(6):
        writer = MetricsWriter(path)
        for _ in range(draw.randrange(1, 15)):
            writer.log({"step": step})
            step += 1
            for tail, found in zip(tails, seen, strict=True):
                if draw.random() < 0.3:
                    found += tail.new() if draw.random() < 0.5 else list(tail.records())
        late = MetricsTail.from_now(path)
        writer.log({"step": step})
        step += 1
        assert steps(late.new()) == [step - 1]
        if draw.random() < 0.5:
            writer.close()
    for tail, found in zip(tails, seen, strict=True):
        assert steps(found + tail.new()) == list(range(step)) and tail.new() == []


def test_two_that_compress_a_part_leave_it_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a writer begins anew while the one before still compresses; readers never see a stump."""
    path, copy = tmp_path / "m.jsonl", shutil.copyfileobj
    path.with_name("m.jsonl.000000").write_text("".join(f'{{"step": {step}}}\n' for step in range(2000)))
    path.write_text('{"step": 2000}\n')

    def slowly(lines: BinaryIO, packed: BinaryIO, size: int) -> None:
        copy(lines, packed, size)
        time.sleep(random.random() / 20)

    monkeypatch.setattr(shutil, "copyfileobj", slowly)
    with ThreadPoolExecutor(6) as pool:
        waiting = []
        for _ in range(6):
            waiting.append(pool.submit(compress_parts, path))
            time.sleep(0.004)
        while not all(one.done() for one in waiting):
            assert steps(read_metrics(path)) == list(range(2001))
    assert [found.name for found in sorted(tmp_path.iterdir())] == ["m.jsonl", "m.jsonl.000000.gz"]
    assert steps(read_metrics(path)) == list(range(2001))


def test_a_digest_goes_on_over_parts(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    for first in (1, 30, 60):
        writer = written(path, first, first + 30)
        writer.log({"event": "stopped", "step": first + 29})
        found, tail = kept_digest(path, TrainerDigest())
        assert found.step == first + 29 and tail.new() == []
        writer.close()
    compress_parts(path)
    whole = TrainerDigest()
    for record in read_metrics(path):
        whole.take(record)
    kept, tail = kept_digest(path, TrainerDigest())
    assert kept == whole and tail.new() == []
    digest.digest_file(path).unlink()
    assert read_digest(path, TrainerDigest())[0] == whole


def test_a_digest_of_parts_that_are_not_there_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    written(path, 1, 20).close()
    head, _, body = digest.digest_file(path).read_bytes().partition(b"\n")
    for end in (0, 7):
        place = json.dumps(json.loads(head) | {"part": 99, f"format {digest.FORMAT}": end}).encode()
        digest.digest_file(path).write_bytes(place + b"\n" + body)
        assert kept_digest(path, TrainerDigest())[0] == TrainerDigest()
        assert read_digest(path, TrainerDigest())[0].step == 19


def test_a_part_that_cannot_be_compressed_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, fsync = tmp_path / "m.jsonl", os.fsync
    writer = MetricsWriter(path)

    def full(descriptor: int) -> None:
        if ".gz" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for step in range(12):
        writer.log({"step": step})
    assert writer._compressing is not None
    writer._compressing.result(30)
    assert finished_part(path, 0).exists() and not list(tmp_path.glob(".*"))
    assert "m.jsonl.000000 is not compressed" in caplog.text and steps(read_metrics(path)) == list(range(12))
    monkeypatch.undo()
    again = MetricsWriter(path)
    assert again._compressing is not None
    again._compressing.result(30)
    assert not finished_part(path, 0).exists() and steps(read_metrics(path)) == list(range(12))


def _log_until_killed(path: Path, nth: int, told: int) -> None:
    metrics.PART_BYTES, digest.KEEP_SECONDS = 200, 0.0
    Killer(path.parent, nth)
    writer = MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
    for step in range(12):
        writer.log({"step": step})
        os.write(told, b".")
    writer.close()
    os._exit(0)


def test_a_kill_before_any_change_to_files_loses_no_record(tmp_path: Path) -> None:
    nth, killed = 1, True
    while killed:
        path = tmp_path / str(nth) / "searcher-0003.jsonl"
        path.parent.mkdir()
        heard, told = os.pipe()
        code = in_a_process(_log_until_killed, path, nth, told)
        os.close(told)
        count = len(os.read(heard, 1000))
        os.close(heard)
        killed = code == -signal.SIGKILL
        assert killed or code == 0
        assert not count or searcher_files(_Metrics(path.parent)) == [path]
        there = steps(read_metrics(path))
        assert there == list(range(len(there))) and len(there) - count in (0, 1)
        writer = MetricsWriter(path, digest=KeptDigest(path, TrainerDigest()))
        writer.log({"step": len(there)})
        writer.close()
        assert steps(read_metrics(path)) == list(range(len(there) + 1))
        found, tail = kept_digest(path, TrainerDigest())
        assert found.step == len(there) and tail.new() == []
        nth += 1
    assert nth > 20


class _Metrics(RunDir):
    """A run directory of which only the metrics are there."""

    @property
    def metrics(self) -> Path:
        return self.path


def test_what_is_finished_while_it_is_opened_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("first\n")
    opens = Path.open

    def finish_first(file: Path, mode: str = "r", **how: str) -> object:
        if file == path and mode == "rb" and not finished_part(path, 0).exists():
            path.rename(finished_part(path, 0))
            path.write_text("second\n")
        return opens(file, mode, **how)

    monkeypatch.setattr(Path, "open", finish_first)
    opened = open_part(path, 0)
    assert opened is not None and opened[1] and opened[0].read() == b"first\n"
