"""The record of a step."""

import time
from pathlib import Path

import numpy as np

from tba_hpc.buffer import ReplayBuffer
from tba_hpc.config import BufferSection, TrainSection
from tba_hpc.metrics import MetricsWriter, read_metrics
from tba_hpc.step_log import StepLog
from tba_hpc.types import Ragged, TrajectoryBatch

BATCH = TrajectoryBatch(
    group_size=2,
    sequences=Ragged.from_rows([np.array([1, 2])] * 2, np.int32),
    prompt_length_N=np.ones(2, np.int64),
    reward_N=np.ones(2, np.float32),
    version_N=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    ref_logprobs=np.zeros(2, np.float32),
    prompt_id_B=np.zeros(1, np.int64),
)


def test_what_is_not_finite_in_a_skipped_step_is_no_figure(tmp_path: Path) -> None:
    """JSON knows neither NaN nor infinity, and a curve none either."""
    metrics = MetricsWriter(tmp_path / "trainer.jsonl")
    log = StepLog(TrainSection(), ReplayBuffer(BufferSection(), 0), metrics, version=0)
    with log.clock("learn"):
        learned = {"loss": np.nan, "grad_norm": np.inf, "kl": 0.5, "skipped_steps": 1.0}
    log.write(0, BATCH, learned)
    (record,) = read_metrics(tmp_path / "trainer.jsonl")
    assert (record["train/kl"], record["train/skipped_steps"]) == (0.5, 1)
    assert not {"train/loss", "train/grad_norm"} & record.keys()


def test_the_longest_step_leaves_out_waits_for_data_and_checkpoints(tmp_path: Path) -> None:
    """Else one long wait made a job stop that much before its limit, ever after."""
    metrics = MetricsWriter(tmp_path / "trainer.jsonl")
    log = StepLog(TrainSection(), ReplayBuffer(BufferSection(), 0), metrics, version=0)
    for part, seconds in (("wait", 0.4), ("checkpoint", 0.4), ("learn", 0.1)):
        with log.clock(part):
            time.sleep(seconds)
    wall = log.write(0, BATCH, {})
    assert wall >= 0.9
    assert 0.1 <= log.longest_step <= wall - 0.8
