"""Measures what it costs the trainer to keep near duplicates out of the replay buffer.

    python tools/bench_buffer.py    CPU time to merge a completion, by live ones of its prompt (--json)

Completions are of 12 to 20 tokens, drawn as words are in English: the r-th most frequent by 1/(r + 2.7)
(Zipf and Mandelbrot). Embeddings are random vectors; --embedding-model times a real one beside the table.
Believe the ratios, not the milliseconds.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import numpy as np
import typer

from tba_hpc.config import BufferSection
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import LIVE_RECORD, RECORD, Ragged, Trajectories, as_record

LIVE = (1_000, 10_000, 100_000)
NEW = 128
VOCABULARY = 16_000
SHARE = 0.25
LIMIT, SIZE = 0.4, 384
"""Of similarities, and numbers of an embedding, as all-MiniLM-L6-v2 has them."""


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


def embed(completions: Ragged) -> np.ndarray:
    """Random unit vectors, float32 [N, SIZE], hardly any of them near another."""
    rows = np.random.default_rng(len(completions)).standard_normal((len(completions), SIZE), np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def milliseconds(live: int, **nearness: object) -> float:
    """CPU time for one of NEW completions that are merged into ``live`` others."""
    rng = np.random.default_rng(live)
    plain = BufferSection(capacity=2 * live, capacity_per_prompt=2 * live)
    first = ReplayBuffer(plain, seed=0)
    first.merge(completions(rng, live), 0)
    state = first.state()
    by_embeddings = "similarity_limit" in nearness
    if by_embeddings:
        dtype = np.dtype([*LIVE_RECORD.descr, ("embedding", "<f4", (SIZE,))])
        state["record"] = as_record(state["record"], dtype)
        state["record"]["embedding"] = embed(first.trajectories().completions)
    buffer = ReplayBuffer(plain.model_copy(update=nearness), 0, embed=embed if by_embeddings else None)
    buffer.restore(state)
    new = completions(rng, NEW)
    start = time.process_time()
    buffer.merge(new, 1)
    return (time.process_time() - start) / NEW * 1000


def embedding_milliseconds(model: str) -> float:
    """CPU time of a real model for one of NEW texts of 16 words."""
    from tba_hpc.tasks.embedder import Embedder

    embedder = Embedder(model, batch=64, key="--embedding-model")
    texts = [" ".join(["word", str(i)] * 8) for i in range(NEW)]
    embedder(texts)
    start = time.process_time()
    embedder(texts)
    return (time.process_time() - start) / NEW * 1000


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    embedding_model: Annotated[str | None, typer.Option(help="Folder or hub name of an encoder.")] = None,
) -> None:
    """Without near duplicates, and with each way to tell them."""
    rows = [
        {
            "live": live,
            "plain_ms": milliseconds(live),
            "edits_ms": milliseconds(live, near_duplicates=SHARE),
            "cosine_ms": milliseconds(live, similarity_limit=LIMIT),
        }
        for live in LIVE
    ]
    if embedding_model:
        print(f"{embedding_model}: {embedding_milliseconds(embedding_model):.2f} ms to embed a completion")
    if as_json:
        print(json.dumps(rows))
        return
    print(
        f"{'live':>8} {'plain, ms':>10} {f'near_duplicates: {SHARE}':>22} {f'similarity_limit: {LIMIT}':>22}"
    )
    for row in rows:
        print(
            f"{row['live']:>8,} {row['plain_ms']:>10.3f} {row['edits_ms']:>22.3f} {row['cosine_ms']:>22.3f}"
        )


if __name__ == "__main__":
    typer.run(main)
