"""The record of a step."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tba_hpc.config import parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import LIVE_RECORD, Ragged, TrajectoryBatch
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.publish_schedule import PublishSchedule
from tba_hpc.loops.step_log import StepLog
from tba_hpc.run.metrics import MetricsWriter, Record, read_metrics


def batch_of(lengths: Sequence[int], rewards: Sequence[float]) -> TrajectoryBatch:
    """Groups of two answers of so many tokens to one prompt."""
    record = np.zeros(len(lengths), LIVE_RECORD)
    record["reward"] = rewards
    completions = Ragged.from_rows([np.ones(length) for length in lengths], np.int32)
    logprobs = np.zeros(sum(lengths), np.float32)
    prompts = Ragged.from_rows([np.ones(2)], np.int32)
    return TrajectoryBatch(record, prompts, completions, logprobs, logprobs, group_size=2, step=0)


BATCH = batch_of([1, 1], [1, 1])


def new_log(folder: Path) -> StepLog:
    config = parse_config({"model": {"path": "a"}})
    buffer = ReplayBuffer(config.buffer, 0)
    schedule = PublishSchedule(config, Freshness(config, buffer), 0)
    return StepLog(config.train, buffer, MetricsWriter(folder / "trainer.jsonl"), schedule)


def record_of(
    folder: Path, step: int, batch: TrajectoryBatch, learned: Mapping[str, float] | None = None
) -> Record:
    """What is logged of one step."""
    log = new_log(folder)
    with log.clock("learn"):
        pass
    log.write(step, batch, learned or {})
    (record,) = read_metrics(folder / "trainer.jsonl")
    return record


def test_a_reset_within_a_measured_block_forgets_what_the_block_took_before(tmp_path: Path) -> None:
    clock = new_log(tmp_path).clock
    with clock("wait"):
        time.sleep(0.2)
        clock.reset()
    assert clock.wall < 0.1 and clock.reset()["wait"] < 0.1


def test_groups_without_variance_and_lengths_are_of_the_batch(tmp_path: Path) -> None:
    """Three groups of two, one of them with two rewards; completions of 1, 2, 3, 4, 5 and 3 tokens."""
    batch = batch_of([1, 2, 3, 4, 5, 3], [0, 0, 0, 1, 1, 1])
    record = record_of(tmp_path, 0, batch)
    assert record["train/flat_groups"] == pytest.approx(2 / 3) and record["train/length"] == 3


def test_staleness_is_of_the_first_turn_and_of_the_last(tmp_path: Path) -> None:
    """Two conversations of which one began with weights 7 and ended with 9, learned from in step 10."""
    batch = batch_of([1, 1], [0, 1])
    batch.record["version_oldest"], batch.record["version_newest"] = [7, 8], [9, 8]
    record = record_of(tmp_path, 10, batch)
    assert [record[f"staleness/{which}"] for which in ("mean", "max", "end")] == [2.5, 3, 1.5]


def test_what_is_not_finite_in_a_skipped_step_is_no_figure(tmp_path: Path) -> None:
    """JSON knows neither NaN nor infinity, and a curve none either."""
    learned = {"loss": np.nan, "grad_norm": np.inf, "log_ratio": 0.5, "skipped_steps": 1.0}
    record = record_of(tmp_path, 0, BATCH, learned)
    assert (record["train/log_ratio"], record["train/skipped_steps"]) == (0.5, 1)
    assert not {"train/loss", "train/grad_norm"} & record.keys()


def test_the_longest_step_leaves_out_waits_for_data_and_checkpoints(tmp_path: Path) -> None:
    """Else one long wait made a job stop that much before its limit, ever after."""
    log = new_log(tmp_path)
    for part, seconds in (("wait", 0.4), ("checkpoint", 0.4), ("learn", 0.1)):
        with log.clock(part):
            time.sleep(seconds)
    wall = log.write(0, BATCH, {})
    assert wall >= 0.9
    assert 0.1 <= log.longest_step <= wall - 0.8
