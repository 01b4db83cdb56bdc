"""A trajectory is one record from the shard to the micro-batch: whatever field it has arrives there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as wire

from tba_hpc.config import BufferSection
from tba_hpc.core.batch import from_arrays, plan, to_arrays
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import (
    BEGIN,
    FINISH_REASONS,
    LIVE_RECORD,
    PER_TOKEN,
    RECORD,
    TOP_LOGPROBS,
    Completion,
    Group,
    Prompt,
    Ragged,
    Request,
    Sampling,
    ScoredGroup,
    Shard,
    Trajectories,
)
from tba_hpc.exchange.hdf5_shards import SCHEMA, read_shard, write_shard
from tba_hpc.run.directory import FORMAT

GROUPS, SIZE = 5, 4


ON_DISK = (
    (
        ("uid", "<u8"),
        ("prompt_id", "<i8"),
        ("request_id", "<i8"),
        ("prompt_row", "<u4"),
        ("reward", "<f4"),
        ("version_oldest", "<i4"),
        ("version_newest", "<i4"),
        ("truncated", "|u1"),
        ("reference", "<i4"),
    ),
    (("revision", "<i8"), ("sync", "<i8"), ("uses", "<i4"), ("value", "<f4")),
    {"hdf5_shards.SCHEMA": 3, "directory.FORMAT": 4},
)
"""RECORD, what LIVE_RECORD adds to it, and the versions by which a reader knows them."""


def test_another_record_is_another_version_on_disk() -> None:
    record = tuple(RECORD.descr)
    versions = {"hdf5_shards.SCHEMA": SCHEMA, "directory.FORMAT": FORMAT}
    assert (record, tuple(LIVE_RECORD.descr[len(record) :]), versions) == ON_DISK, (
        "RECORD and LIVE_RECORD are how shards and checkpoints lie on disk: if one changes, raise "
        "run.directory.FORMAT, and with RECORD exchange.hdf5_shards.SCHEMA too; then write all of them here"
    )


def test_of_groups_fills_every_field_but_the_uid() -> None:
    completion = Completion(np.ones(2, np.int32), np.zeros(2, np.float32), FINISH_REASONS[1])
    scored = [
        ScoredGroup(
            Group(
                Request(Prompt(number, np.ones(3, np.int32), ""), 5 + number, 1, Sampling(1.0, 1.0, 2)),
                (completion,),
                np.array([[3, 4]], np.int32),
            ),
            [0.5],
            [np.zeros(2, np.float32)],
            reference=2,
        )
        for number in (1, 2)
    ]
    record = Trajectories.of_groups(scored).record
    empty = {name for name in RECORD.names or () if not record[name].any()}
    assert empty == {"uid"}, "core.types.Trajectories.of_groups fills every field of RECORD but the uid"


def random_trajectories(random: np.random.Generator, likeliest: int = 3) -> Trajectories:
    """Random bytes in every field but those that say which prompt and request it is."""
    number = GROUPS * SIZE
    record = random.integers(0, 100, (number, RECORD.itemsize), np.uint8).view(RECORD)[:, 0]
    record["prompt_id"] = record["request_id"] = record["prompt_row"] = np.arange(number) // SIZE
    record["reward"] = random.random(number)
    prompts = Ragged.from_rows([random.integers(0, 99, 3) for _ in range(GROUPS)], np.int32)
    completions = Ragged.from_rows([random.integers(0, 99, random.integers(1, 9)) for _ in record], np.int32)
    logprobs, ref_logprobs = random.random((2, len(completions.values)), np.float32)
    logprobs[completions.offsets[1:-1:2] - 1] = BEGIN
    top = np.zeros((len(logprobs), likeliest), TOP_LOGPROBS)
    top["token"], top["logprob"] = random.integers(0, 99, top.shape), random.random(top.shape)
    return Trajectories(record, prompts, completions, logprobs, ref_logprobs, top)


def by_uid(trajectories: Trajectories) -> dict[int, tuple[object, ...]]:
    """All that is known of each, but for where its prompt lies."""
    found = {}
    for row, record in enumerate(trajectories.record):
        start, end = trajectories.completions.offsets[row : row + 2]
        found[int(record["uid"])] = (
            *(record[name] for name in RECORD.names or () if name != "prompt_row"),
            trajectories.prompts.row(record["prompt_row"]).tolist(),
            trajectories.completions.row(row).tolist(),
            *(getattr(trajectories, name)[start:end].tolist() for name in PER_TOKEN),
        )
    return found


@pytest.mark.parametrize("likeliest", [0, 3])
def test_every_field_survives_shard_buffer_checkpoint_batch_wire_and_micro_batch(
    likeliest: int, tmp_path: Path
) -> None:
    made = random_trajectories(np.random.default_rng(0), likeliest)
    write_shard(tmp_path / "shard.h5", Shard(0, 0, made))
    first = ReplayBuffer(BufferSection(), 0)
    first.merge(read_shard(tmp_path / "shard.h5").trajectories, 0)
    buffer = ReplayBuffer(BufferSection(), 0)
    buffer.restore(first.state())
    batch = buffer.sample(7, groups=GROUPS, group_size=SIZE)
    sent = from_arrays(wire.load(wire.save(to_arrays(batch))))
    assert (sent.group_size, sent.step, sent.record.dtype) == (SIZE, 7, LIVE_RECORD)
    assert by_uid(made) == by_uid(Trajectories.from_arrays(first.state())) == by_uid(batch) == by_uid(sent)
    parts = plan(sent, rank=0, ranks=1, budget=30, share_prompts=True)
    micros = [sent.take(rows) for part in parts for rows in part.micro_batches]
    assert len(micros) > 1
    assert by_uid(made) == {uid: row for micro in micros for uid, row in by_uid(micro).items()}


def test_taking_and_joining_are_inverse() -> None:
    made = random_trajectories(np.random.default_rng(1))
    groups = [made.between(start, start + SIZE) for start in range(0, len(made), SIZE)]
    again = Trajectories.concat([group.columns for group in groups])
    assert {name: a.tobytes() for name, a in again.to_arrays().items()} == {
        name: a.tobytes() for name, a in made.to_arrays().items()
    }
    rows = np.array([7, 0, 7, 19])
    one_by_one = [made.between(row, row + 1).columns for row in rows.tolist()]
    taken = made.take(rows)
    for name, array in Trajectories.concat(one_by_one).to_arrays().items():
        assert array.tobytes() == taken.to_arrays()[name].tobytes()
