"""Whole groups of a batch: split over ranks and into micro-batches by token count, sent as plain arrays.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tba_hpc.core.types import LIVE_RECORD, TrajectoryBatch

GATHERED = 300
"""What gathering costs a token of a sequence, in tokens that it could have looked at instead."""

PADDED = 1.4
"""Tokens of sequences that are padded to others of like length, of those that they have."""

CAUSAL = 0.6
"""What attention costs that skips what comes later, of one that looks at everything."""

MASKED_PRICE = {False: 1.0, True: 4.0}
"""What an operation of attention costs under a mask, of one without: whether that is flash attention, which
GPUs have for bfloat16. The price there is assumed; none has been measured.
"""


def balance(batch: TrajectoryBatch, ranks: int) -> list[np.ndarray]:
    """Per rank, the groups that it gets, int64 [B / ranks], in the batch's order.

    Equally many groups each, and about equally many tokens: the longest group goes first, always to
    the rank with the fewest tokens among those that still have room.
    """
    assert batch.groups % ranks == 0, "Config asks for a multiple of the trainer ranks"
    tokens_B = _tokens_of_groups(batch)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for group in np.argsort(-tokens_B, kind="stable").tolist():
        rank = int(load.argmin())
        shares[rank].append(group)
        load[rank] += tokens_B[group] if len(shares[rank]) < batch.groups // ranks else np.inf
    return [np.array(sorted(share), np.int64) for share in shares]


def split(batch: TrajectoryBatch, ranks: int) -> list[TrajectoryBatch]:
    """The part of every rank, as ``balance`` splits it."""
    return [take_groups(batch, groups) for groups in balance(batch, ranks)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of some sequences: mean tokens of prompt and completion, and of both in the longest.

    masked_price: see MASKED_PRICE.
    """

    prompt: float
    completion: float
    longest: float
    masked_price: float

    @classmethod
    def of(cls, prompt_N: np.ndarray, whole_N: np.ndarray, *, flash: bool) -> Lengths:
        """prompt_N, whole_N: int [N], tokens of the prompts, and with their completions; see MASKED_PRICE."""
        prompt, whole = float(prompt_N.mean()), float(whole_N.mean())
        return cls(prompt, whole - prompt, float(whole_N.max()), MASKED_PRICE[flash])

    def masked(self, sequences: int, width: int) -> float:
        """What a row of so many costs in which every token meets every other, visible or not.

        It is padded to a row with the longest of all. Alone in it a sequence needs no mask. In 4·width
        operations of a layer, as below: linear maps cost a token about 24·width².
        """
        row = self.longest + (sequences - 1) * self.completion
        return row * (6 * width + (CAUSAL if sequences == 1 else self.masked_price) * row)

    def by_sequence(self, sequences: int, width: int) -> float:
        """The same where they share their prompt, nothing is padded, and attention gathers each of them."""
        row, padded = self.prompt + sequences * self.completion, PADDED * (self.prompt + self.completion)
        return row * 6 * width + sequences * padded * (CAUSAL * padded + GATHERED)


def sequences_per_row(group_size: int, *, lengths: Lengths, width: int, most: int | None = None) -> int:
    """How many of a group's sequences to put into one row: the divisor of its size that costs least.

    width: the model's hidden size. most: how many there may be, at least 1; None: all. The factors of
    ``Lengths`` fit what two CPU cores took.
    """

    def operations(sequences: int) -> float:
        return min(lengths.masked(sequences, width), lengths.by_sequence(sequences, width)) / sequences

    return min((s for s in range(1, (most or group_size) + 1) if group_size % s == 0), key=operations)


def with_reference_power(batch: TrajectoryBatch, power: float) -> TrajectoryBatch:
    """The same batch with the reference π_ref^power, which need not add up to 1: log Ẑ absorbs its sum."""
    return replace(batch, ref_logprobs=batch.ref_logprobs * np.float32(power))


def take_groups(batch: TrajectoryBatch, groups: np.ndarray) -> TrajectoryBatch:
    """The given groups, whole, in the given order."""
    return batch.take(rows_of(groups, batch.group_size))


def rows_of(groups: np.ndarray, size: int) -> np.ndarray:
    """int64: the rows of the given groups, of ``size`` rows each, in the given order."""
    return (groups[:, None] * size + np.arange(size)).ravel()


def micro_batches(batch: TrajectoryBatch, groups_per_micro_batch: int) -> Iterator[TrajectoryBatch]:
    """All groups, whole, ``groups_per_micro_batch`` at a time (the last may have fewer).

    Groups of like length meet, so that little is padding; the longest come first, so that a lack of
    memory shows at once.
    """
    order = np.argsort(-_tokens_of_groups(batch), kind="stable")
    for start in range(0, batch.groups, groups_per_micro_batch):
        yield take_groups(batch, order[start : start + groups_per_micro_batch])


def staleness(batch: TrajectoryBatch, version: int) -> np.ndarray:
    """int32 [N]: optimizer steps between the weights that sampled a trajectory and ``version``.

    A shard that survived a crash may come of weights ahead of ``version``, whose steps the resume took back.
    """
    return np.abs(version - batch.version_N)


def to_arrays(batch: TrajectoryBatch) -> dict[str, np.ndarray]:
    """The batch as named contiguous arrays of numbers, as safetensors takes them."""
    arrays = {name: np.ascontiguousarray(array) for name, array in batch.to_arrays().items()}
    form = np.array([batch.group_size, batch.step], np.int64)
    return {**arrays, "record": arrays["record"].view(np.uint8), "form": form}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> TrajectoryBatch:
    """Inverse of ``to_arrays``."""
    group_size, step = arrays["form"].tolist()
    record = arrays["record"].view(LIVE_RECORD)
    return TrajectoryBatch.from_arrays({**arrays, "record": record}, group_size=group_size, step=step)


def _tokens_of_groups(batch: TrajectoryBatch) -> np.ndarray:
    """int64 [B]: tokens of a group's completions, and of its prompt once, as the learner computes them."""
    completions_B = batch.completion_length_N.reshape(-1, batch.group_size).sum(1)
    return completions_B + batch.prompt_length_N[:: batch.group_size]
