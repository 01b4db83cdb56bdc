"""A shard as one flat message, without a copy on the side that unpacks it.

It must not know how messages travel, nor what a shard means.
"""

from __future__ import annotations

import numpy as np

from tba_hpc.core.types import RECORD, Ragged, Shard, Trajectories

PACKED = (RECORD, *map(np.dtype, (np.int32, np.int64, np.int32, np.int64, np.float32, np.float32)))
"""Types of the arrays of a message, in the order of ``_arrays``."""


def pack_shard(shard: Shard) -> np.ndarray:
    """One flat uint8 message: int64 searcher, index and array lengths, then the arrays, 8-byte aligned."""
    arrays = [np.ascontiguousarray(array).view(np.uint8) for array in _arrays(shard.trajectories)]
    header = np.array([shard.searcher, shard.index, *(array.nbytes for array in arrays)], np.int64)
    message = np.zeros(header.nbytes + sum(_aligned(array.nbytes) for array in arrays), np.uint8)
    start = 0
    for part in (header.view(np.uint8), *arrays):
        message[start : start + part.nbytes] = part
        start += _aligned(part.nbytes)
    return message


def unpack_shard(message: np.ndarray) -> Shard:
    """Inverse of pack_shard; the arrays are views of ``message``."""
    searcher, index, *sizes = message[: 8 * (2 + len(PACKED))].view(np.int64).tolist()
    parts, start = [], 8 * (2 + len(PACKED))
    for dtype, size in zip(PACKED, sizes, strict=True):
        parts.append(message[start : start + size].view(dtype))
        start += _aligned(size)
    record, prompts, prompt_offsets, completions, completion_offsets, logprobs, ref_logprobs = parts
    trajectories = Trajectories(
        record,
        Ragged(prompts, prompt_offsets),
        Ragged(completions, completion_offsets),
        logprobs,
        ref_logprobs,
    )
    return Shard(searcher, index, trajectories)


def _arrays(trajectories: Trajectories) -> tuple[np.ndarray, ...]:
    prompts, completions = trajectories.prompts, trajectories.completions
    return (
        trajectories.record,
        *(prompts.values, prompts.offsets),
        *(completions.values, completions.offsets),
        *(trajectories.logprobs, trajectories.ref_logprobs),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
