"""References that move with every step, in whole trainings on the enumerable policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import tabular_run
from lab.lockstep import Setup, train
from lab.tabular import Table
from lab.tabular_learner import TabularLearner
from test_loops import TABLE
from test_replay import heard, in_lockstep  # noqa: F401

from tba_hpc import runtime
from tba_hpc.commands.replay import read_recorded, replay_config
from tba_hpc.config import LearningRate, TrainSection
from tba_hpc.core.types import BEHAVIOUR, TrajectoryBatch
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import step_records
from tba_hpc.run.metrics import read_metrics

DECAY = 0.8
EMA = f"train.reference={{name: ema, decay: {DECAY}}}"


class Averaging(TabularLearner):
    """Averages its own logits by the definition; what it learns from must be scored by that, to rounding."""

    average: np.ndarray | None = None
    steps = 0

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """One optimizer step."""
        before = TABLE.ref_logits_PSV.astype(np.float64) if self.average is None else self.average
        rows = [batch.sequences.row(i) for i in range(len(batch.sequences))]
        wanted = [TABLE.token_logprobs(before, row[0] - TABLE.prompt_token(0), row[1:]) for row in rows]
        np.testing.assert_allclose(batch.ref_logprobs, np.concatenate(wanted), atol=1e-6)
        metrics = super().step(batch, learning_rate=learning_rate, beta=beta)
        self.average, self.steps = DECAY * before + (1 - DECAY) * self.policy_logits, self.steps + 1
        return metrics


def replayed(
    source: RunDir, name: str, steps: int, learner_of: type[TabularLearner] = TabularLearner
) -> TabularLearner:
    """The learner after a replay against the average, which goes on where one of that name stopped."""
    overrides = [EMA, f"run.name={name}", f"train.steps={steps}"]
    config = replay_config(source, source.config(), 12, overrides)
    recording, read = read_recorded(source, source.config(), config, partial=False)
    run = RunDir.open(config.run_dir) if config.run_dir.exists() else RunDir.create(config)
    run.begin_attempt()
    learner = learner_of(TABLE, config.train)
    assert runtime.replay(run, config, recording, read, learner)
    return learner


def test_every_batch_is_scored_by_the_average_of_that_step_whatever_was_recorded(tmp_path: Path) -> None:
    """Replayed trajectories too, anew; recorded against a frozen reference; bit by bit after a resume."""
    source = in_lockstep(tmp_path)
    whole = replayed(source, "whole", 12, Averaging)
    assert isinstance(whole, Averaging) and whole.steps == 12
    replayed(source, "halves", 6)
    np.testing.assert_array_equal(replayed(source, "halves", 12).policy_logits, whole.policy_logits)


@pytest.mark.parametrize("name", ["lagged", "ema"])
def test_shards_note_what_sampled_and_a_kill_is_survived(name: str, tmp_path: Path) -> None:
    """The real loops; the learner refuses a batch that another average than its own has scored."""
    config = tabular_run.make_config(tmp_path, train={"steps": 14, "reference": name})
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
    records = step_records(read_metrics(run.metrics_file("trainer")))
    assert len(records) == 14 and all(("time/reference_seconds" in r) == (name == "ema") for r in records)


@pytest.mark.parametrize("every", [1, 10])
def test_against_what_lags_a_policy_learns_from_fresh_and_from_old_data(every: int) -> None:
    """Data 1 step old, and 10 to 19: half of the way to the best completion, by both references alike."""
    ema, lagged = (gains(name, every) for name in ("ema", "lagged"))
    assert (np.diff(lagged) > 0.1).all() and lagged[-1] > 0.5
    np.testing.assert_allclose(lagged, ema, atol=0.02)


def gains(name: str, every: int) -> list[float]:
    """Expected reward after 0, 50 and 100 steps, from that of the start (0) to the best (1)."""
    table = Table(seed=0)
    options = {"steps": 100, "completions_per_prompt": 16, "reference": name}
    settings = TrainSection(**options, learning_rate=LearningRate(peak=0.02), beta=0.05)
    setup = Setup(table=table, train=settings, buffer=None, sync_every=every)
    rewards = [(moment.policy_PC * table.reward_PC).sum(1).mean() for moment in train(setup, every=50)]
    best = table.reward_PC.max(1).mean()
    return [(reward - rewards[0]) / (best - rewards[0]) for reward in rewards]
