"""Measures a trainer's memory and time per step with groups of 4 to 64 completions: whole, and by tokens.

    python tools/bench_micro_batches.py [--budget 512] [--completion 64] [--sizes 4,16,64] [--json]

A random Llama of a million parameters, trained by the real learner on one rank; every case is a process of
its own. Memory: how far the highest resident size, over two steps, lies above that before them, less AdamW's
state, which the first one makes; on a GPU, the highest allocation. Completions have half to all of
--completion tokens. By tokens, groups that have more than the budget are split; by groups, they are computed
whole.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scale.checkpoint import make_model

from tba_hpc.config import parse_config
from tba_hpc.core.types import LIVE_RECORD, Ragged, TrajectoryBatch
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner

PROMPT, GROUPS = 32, 2


def main() -> None:
    """Print a line per size of a group."""
    options, rows = _options(), []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 1)
        for size in map(int, options.sizes.split(",")):
            whole, split = (
                _measured(Path(folder), size, options.completion, b) for b in (None, options.budget)
            )
            rows.append({"completions": size, "whole": whole, "by_tokens": split})
            if not options.json:
                figures = "   ".join(
                    f"{name} {_text(way)}" for name, way in (("whole", whole), ("by tokens", split))
                )
                print(f"{size:4d} completions   {figures}", flush=True)
    if options.json:
        print(json.dumps(rows))


def _text(figures: dict[str, float]) -> str:
    return f"{figures['mb']:6.0f} MB {figures['seconds']:6.2f} s a step"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=int, default=512, help="train.tokens_per_micro_batch")
    parser.add_argument("--completion", type=int, default=64, help="tokens of the longest completion")
    parser.add_argument("--sizes", default="4,16,64", help="completions of a group")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    return parser.parse_args()


def _measured(model: Path, size: int, completion: int, budget: int | None) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(sender, model, size, completion, budget))
    process.start()
    sender.close()
    figures: dict[str, float] = receiver.recv()
    process.join()
    return figures


def _train(sender: object, model: Path, size: int, completion: int, budget: int | None) -> None:
    """Be that process."""
    config = parse_config(
        {
            "model": {"path": str(model), "dtype": "float32", "context_length": 2 * PROMPT + completion},
            "generator": {"max_tokens": completion, "completions_per_prompt": size},
            "buffer": {"capacity_per_prompt": size},
            "train": {
                "prompts_per_step": GROUPS,
                "completions_per_prompt": size,
                "tokens_per_micro_batch": budget,
            },
        }
    )
    with tempfile.TemporaryDirectory() as store:
        learner = DeepSpeedLearner.create(config, rank=0, ranks=1, store=Path(store), deadline=60)
        batch, before = _batch(size, completion), _peak()
        learner.step(batch, learning_rate=0.0, beta=0.1)
        started = time.perf_counter()
        learner.step(batch, learning_rate=0.0, beta=0.1)
        seconds, adam = time.perf_counter() - started, 2 * learner.layout.nbytes
        sender.send({"mb": (_peak() - before - adam) / 1e6, "seconds": seconds})  # type: ignore[attr-defined]
        learner.close()


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _batch(size: int, completion: int) -> TrajectoryBatch:
    random, number = np.random.default_rng(0), GROUPS * size
    prompts = Ragged.from_rows(list(random.integers(2, 128, (GROUPS, PROMPT))), np.int32)
    length_N = random.integers(completion // 2, completion + 1, number)
    completions = Ragged.from_rows([random.integers(2, 128, length) for length in length_N], np.int32)
    record = np.zeros(number, LIVE_RECORD)
    record["prompt_id"] = record["prompt_row"] = np.arange(number) // size
    record["reward"] = random.random(number)
    logprobs = np.full(length_N.sum(), -4.5, np.float32)
    return TrajectoryBatch(record, prompts, completions, logprobs, logprobs, group_size=size, step=1)


if __name__ == "__main__":
    main()
