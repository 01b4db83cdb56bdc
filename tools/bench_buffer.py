"""Measures what it costs the trainer to keep near duplicates out of the replay buffer.

    python tools/bench_buffer.py    CPU time to merge a completion, by live ones of its prompt (--json)

Completions are of 12 to 20 tokens, drawn as words are in English: the r-th most frequent by 1/(r + 2.7)
(Zipf and Mandelbrot). Believe the ratios, not the milliseconds.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import numpy as np
import typer

from tba_hpc.buffer import ReplayBuffer
from tba_hpc.config import BufferSection
from tba_hpc.types import RECORD, Ragged, Trajectories

LIVE = (1_000, 10_000, 100_000)
NEW = 128
VOCABULARY = 16_000
SHARE = 0.25


def completions(rng: np.random.Generator, count: int) -> Trajectories:
    """So many trajectories of one prompt."""
    odds = 1 / (np.arange(VOCABULARY) + 2.7)
    lengths = rng.integers(12, 21, count)
    tokens = rng.choice(VOCABULARY, lengths.sum(), p=odds / odds.sum()).astype(np.int32)
    rows = Ragged.from_rows(np.split(tokens, np.cumsum(lengths)[:-1]), np.int32)
    record = np.zeros(count, RECORD)
    record["reward"] = rng.random(count)
    prompt = Ragged.from_rows([np.array([1])], np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    return Trajectories(record, prompt, rows, logprobs, logprobs)


def milliseconds(live: int, share: float | None) -> float:
    """CPU time for one of NEW completions that are merged into ``live`` others."""
    rng = np.random.default_rng(live)
    plain = BufferSection(capacity=2 * live, capacity_per_prompt=2 * live)
    first = ReplayBuffer(plain, seed=0)
    first.merge(completions(rng, live), 0)
    buffer = ReplayBuffer(plain.model_copy(update={"near_duplicates": share}), seed=0)
    buffer.restore(first.state())
    buffer.merge(completions(rng, 1), 0)  # spells the words of all
    new = completions(rng, NEW)
    start = time.process_time()
    buffer.merge(new, 1)
    return (time.process_time() - start) / NEW * 1000


def main(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Without and with ``buffer.near_duplicates``."""
    rows = [
        {"live": live, "plain_ms": milliseconds(live, None), "near_ms": milliseconds(live, SHARE)}
        for live in LIVE
    ]
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'live':>8} {'plain, ms':>10} {f'near_duplicates: {SHARE}, ms':>28}")
    for row in rows:
        print(f"{row['live']:>8,} {row['plain_ms']:>10.3f} {row['near_ms']:>28.3f}")


if __name__ == "__main__":
    typer.run(main)
