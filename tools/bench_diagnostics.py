"""Measures what the trainer's figures about a batch cost, as a share of the optimizer step that makes them.

    python tools/bench_diagnostics.py [--model FOLDER] [--objective grpo] [--rounds 40] [--json]

Quickstart's shapes: 8 groups of 16 completions of about 20 tokens behind a prompt of 27, two groups to a
micro-batch. Seconds are of the CPU, so that what else runs on the machine does not count: medians of whole
steps of the learner, and of what they hold of ``moments`` and, with an objective that clips, its share.
MODEL: see tools/make_tiny_model.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tba_hpc.config import Config, load_config
from tba_hpc.core.batch import micro_batches
from tba_hpc.core.types import LIVE_RECORD, Ragged, TrajectoryBatch
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.objectives import Groups
from tba_hpc.objectives.common import clip_acts, token_share
from tba_hpc.objectives.diagnostics import moments
from tba_hpc.report.tables import print_rows

ROOT = Path(__file__).parents[1]
PROMPT, COMPLETION = 27, 20


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(1)  # as the launchers have it for every rank
    overrides = [f"model.path={options.model}", f"train.objective={options.objective}"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    batch = _batch(config)
    micros = list(micro_batches(batch, config.train.groups_per_micro_batch))
    with tempfile.TemporaryDirectory() as store:
        learner = DeepSpeedLearner.create(config, rank=0, ranks=1, store=Path(store), deadline=60)
        step = _seconds(lambda: learner.step(batch, learning_rate=1e-5, beta=0.1), options.rounds)
        learner.close()
    groups = [_groups(micro, batch) for micro in micros]
    figures = _seconds(lambda: [moments(part) for part in groups], options.rounds)
    clipped = _seconds(lambda: [_clip_share(part) for part in groups], options.rounds)
    row = {"step ms": 1000 * step, "moments ms": 1000 * figures, "clip share ms": 1000 * clipped}
    print_rows([{**row, "share": (figures + clipped) / step}], as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / ".cache" / "tiny-model-seed0"))
    parser.add_argument("--objective", default="grpo")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """Median CPU time, after three calls that warm up."""
    found = []
    for _ in range(rounds + 3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found[3:])


def _batch(config: Config) -> TrajectoryBatch:
    random, size = np.random.default_rng(0), config.train.completions_per_prompt
    groups = config.train.prompts_per_step
    length_N = np.clip(random.gamma(4, COMPLETION / 4, groups * size).astype(np.int64), 1, 40)
    prompts = Ragged.from_rows(list(random.integers(3, 60, (groups, PROMPT))), np.int32)
    completions = Ragged.from_rows([random.integers(3, 60, n) for n in length_N], np.int32)
    logprobs = random.normal(-1, 0.3, length_N.sum()).astype(np.float32)
    record = np.zeros(len(length_N), LIVE_RECORD)
    record["prompt_id"] = record["prompt_row"] = np.arange(len(record)) // size
    record["reward"] = random.integers(0, 2, len(record))
    return TrajectoryBatch(record, prompts, completions, logprobs, logprobs, group_size=size, step=0)


def _groups(micro: TrajectoryBatch, batch: TrajectoryBatch) -> Groups:
    policy_NL = torch.from_numpy(micro.logprob_NL).clone().requires_grad_()
    return Groups.of(policy_NL, micro, batch_tokens=float(batch.completion_length_N.mean()))


def _clip_share(groups: Groups) -> torch.Tensor:
    advantage_BK1 = (groups.reward_BK - 0.5)[:, :, None]
    return token_share(clip_acts(groups.token_ratio_BKL.detach(), advantage_BK1, 0.2), groups)


if __name__ == "__main__":
    main()
