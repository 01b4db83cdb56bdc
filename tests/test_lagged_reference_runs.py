"""The reference that lags behind the policy, in whole trainings on the enumerable one."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import tabular_run
from lab.lockstep import Setup, train
from lab.tabular import Table
from test_replay import heard, in_lockstep  # noqa: F401

from tba_hpc.config import LearningRate, TrainSection
from tba_hpc.core.types import BEHAVIOUR
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History


def test_shards_note_what_sampled_and_a_kill_is_survived(tmp_path: Path) -> None:
    config = tabular_run.make_config(tmp_path, train={"steps": 14, "reference": "lagged"})
    run = RunDir.create(config)
    for sent, code in ((SIGKILL, -SIGKILL), (None, 0)):
        process = tabular_run.start(run, searchers=2, sent=sent, nth=10)
        process.join(240)
        assert process.exitcode == code
    assert run.finished and audit(run).problems == ()
    for path in run.shard_files().values():
        shard = read_shard(path).trajectories
        assert (shard.record["reference"] == BEHAVIOUR).all()
        np.testing.assert_array_equal(shard.ref_logprobs, shard.logprobs)
    records = History.read(run).steps
    assert len(records) == 14 and not any("time/reference_seconds" in record for record in records)


@pytest.mark.parametrize("every", [1, 10])
def test_against_what_lags_a_policy_learns_from_fresh_and_from_old_data(every: int) -> None:
    """Data 1 step old, and 10 to 19: half of the way to the best completion."""
    table = Table(seed=0)
    options = {"steps": 100, "completions_per_prompt": 16, "reference": "lagged"}
    settings = TrainSection(**options, learning_rate=LearningRate(peak=0.02), beta=0.05)
    setup = Setup(table=table, train=settings, buffer=None, sync_every=every)
    rewards = [(moment.policy_PC * table.reward_PC).sum(1).mean() for moment in train(setup, every=50)]
    gains = (np.array(rewards) - rewards[0]) / (table.reward_PC.max(1).mean() - rewards[0])
    assert (np.diff(gains) > 0.1).all() and gains[-1] > 0.5
