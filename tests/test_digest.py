"""Digests of metrics files: as good as the lines, however many there are, and never of other ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from recorded import search, step

from tba_hpc.report import digest as digests
from tba_hpc.report.curves import Curve
from tba_hpc.report.digest import D, KeptDigest, SearcherDigest, TrainerDigest, digest_file, kept_digest
from tba_hpc.run.metrics import MetricsTail, MetricsWriter, Record, read_metrics


def read_digest(path: Path, fresh: D) -> tuple[D, MetricsTail]:
    """The digest of all lines."""
    digest, tail = kept_digest(path, fresh)
    for record in tail.records():
        digest.take(record)
    return digest, tail


def trainer_records(steps: int) -> Iterator[Record]:
    """Three attempts, each with merges and steps, of which a resume takes some back."""
    for begin, event in ((0, "started"), (steps // 2, "resumed"), (steps // 2, "resumed")):
        yield {"event": event, "step": begin, "revision": begin, "time": float(begin)}
        for at in range(begin, steps):
            yield {
                **{"event": "merged", "step": at, "revision": at + 1, "searcher": at % 3, "shard": at // 3},
                **{"trajectories": 5, "tokens": 50 + at, "duplicates": 1, "evicted": at % 2},
            }
            yield {**step(at + 1, float(at), loss=1.0 / (at + 1), stall=0.25, seconds=0.5), "buffer/size": at}
            if at + 1 == steps // 2:
                yield {"event": "checkpoint", "step": at + 1, "revision": at + 1, "time": float(at)}


def searcher_records(count: int) -> Iterator[Record]:
    """A start, seals, and a record a second."""
    yield {"event": "started", "searchers": 1, "time": 0.0}
    for i in range(count):
        yield {"event": "sealed", "shard": i, "trajectories": 4, "tokens": 40 + i, "time": float(i)}
        yield {**search(float(i), 10, 100.0 + i, version=i // 3, kl=i / 100)}


@pytest.mark.parametrize("kind", ["trainer", "searcher"])
@pytest.mark.parametrize("kept_at", [0, 1, 77, 1000])
def test_a_digest_that_is_kept_and_taken_up_is_that_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kept_at: int
) -> None:
    monkeypatch.setattr(digests, "KEEP_SECONDS", 0)
    path = tmp_path / "m.jsonl"
    fresh = TrainerDigest if kind == "trainer" else lambda: SearcherDigest(3)
    records = list(trainer_records(400) if kind == "trainer" else searcher_records(600))
    writer = MetricsWriter(path, digest=KeptDigest(path, fresh()))
    for record in records[:kept_at]:
        writer.log(record)
    writer.close()
    plain = MetricsWriter(path)
    for record in records[kept_at:]:
        plain.log(record)
    found, tail = read_digest(path, fresh())
    expected = fresh()
    for record in read_metrics(path):
        expected.take(record)
    assert asdict(found) == asdict(expected) and tail.new() == []
    _, rest = kept_digest(path, fresh())
    assert len(rest.new()) == len(records) - kept_at or kept_at == 0


@pytest.mark.parametrize(
    "damage", ["cut", "other format", "no JSON", "longer than the file", "in a line", "flipped"]
)
def test_a_digest_that_does_not_fit_its_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(digests, "KEEP_SECONDS", 0)
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path, digest=KeptDigest(path, SearcherDigest(0)))
    for record in searcher_records(20):
        writer.log(record)
    writer.close()
    kept = digest_file(path)
    head, _, body = kept.read_bytes().partition(b"\n")
    end = path.stat().st_size

    def covering(end: int) -> bytes:
        pair = [end, digests._checksum(end, body)]
        return json.dumps({f"format {digests.FORMAT}": pair}).encode() + b"\n" + body

    assert kept.read_bytes() == covering(end)
    kept.write_bytes(
        {
            "cut": head + b"\n" + body[:-9],
            "other format": head.replace(b"format ", b"format 9") + b"\n" + body,
            "no JSON": b"\x00" * 500,
            "longer than the file": covering(end + 7),
            "in a line": covering(end - 7),
            "flipped": head + b"\n" + body.replace(b"200", b"201", 1),
        }[damage]
    )
    found, _ = read_digest(path, SearcherDigest(0))
    assert found.tokens == 200


def test_a_digest_stays_small_however_long_the_run() -> None:
    sizes = []
    for count in (2_000, 4_000):
        found, trained = SearcherDigest(0), TrainerDigest()
        for record in searcher_records(count):
            found.take(record)
        for record in trainer_records(count // 2):
            trained.take(record)
        sizes.append(len(json.dumps(asdict(found))) + len(json.dumps(asdict(trained))))
    assert sizes[1] < 1.3 * sizes[0]


def test_what_resumes_take_back_is_counted_once(tmp_path: Path) -> None:
    found = TrainerDigest()
    for record in trainer_records(40):
        found.take(record)
    merged = found.merged
    assert (found.step, found.redone, found.starts) == (40, 40, 3)
    assert (merged.shards, merged.trajectories, merged.duplicates, merged.evicted) == (40, 200, 40, 20)
    assert merged.tokens == sum(range(50, 90)) and merged.cursors == {0: 14, 1: 13, 2: 13}
    assert [(point.step, point.value) for point in found.trends.curves["train/loss"].points] == [
        (at, 1 / at) for at in range(1, 41)
    ]


def test_a_kill_between_a_checkpoint_and_its_record_takes_nothing_back() -> None:
    found = TrainerDigest()
    for record in trainer_records(40):
        if record.get("event") != "checkpoint":
            found.take(record)
        if found.step == 20:
            break
    found.take({"event": "resumed", "step": 20, "revision": 20, "time": 9.0})
    assert (found.merged.shards, found.step, found.redone) == (20, 20, 0)


def test_curves_of_parts_add_up_to_that_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    values = [
        (int(at), float(value))
        for at, value in zip(generator.integers(0, 5000, 900), generator.random(900), strict=True)
    ]
    whole, parts = Curve(), [Curve() for _ in range(3)]
    for i, (at, value) in enumerate(sorted(values)):
        whole.take(at, value)
        parts[0 if i < 20 else 1 + i % 2].take(at, value)
    total = Curve()
    for part in parts:
        total.add(part)
    assert total.width == whole.width and [p.step for p in total.points] == [p.step for p in whole.points]
    np.testing.assert_allclose(total.points, whole.points)
    assert total.mean == pytest.approx(np.mean([value for _, value in values]))


def test_a_cut_forgets_later_steps() -> None:
    curve = Curve(4)
    for at in range(8):
        curve.take(at, float(at))
    assert [(point.step, point.value) for point in curve.points] == [(0, 0.5), (2, 2.5), (4, 4.5), (6, 6.5)]
    curve.cut(4)  # the span from 4 to 5 holds a step that stays
    assert [point.step for point in curve.points] == [0, 2, 4]


def test_a_file_is_read_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.run.metrics.CHUNK", 100)
    path = tmp_path / "m.jsonl"
    records = [{"step": i, "note": "x" * (i * 37 % 250)} for i in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 60')
    tail = MetricsTail(path)
    assert list(tail.records()) == records and list(tail.records()) == []
    with path.open("a") as file:
        file.write("}\n")
    assert list(tail.records()) == [{"step": 60}]
