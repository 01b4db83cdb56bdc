"""Whole groups of a batch: split over ranks by token count, padded into micro-batches, sent as plain arrays.

It must not know how a batch was sampled or what is learned from it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tba_hpc.core.types import PaddedBatch, Ragged, TrajectoryBatch, offsets_of, spans

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
    size = batch.group_size
    rows = rows_of(groups, size)
    tokens, _ = spans(offsets_of(batch.completion_length_N), rows)
    return TrajectoryBatch(
        group_size=size,
        sequences=batch.sequences.take(rows),
        prompt_length_N=batch.prompt_length_N[rows],
        reward_N=batch.reward_N[rows],
        value_N=batch.value_N[rows],
        version_N=batch.version_N[rows],
        on_policy_N=batch.on_policy_N[rows],
        logprobs=batch.logprobs[tokens],
        ref_logprobs=batch.ref_logprobs[tokens],
        ages=batch.ages[tokens],
        prompt_id_B=batch.prompt_id_B[groups],
    )


def rows_of(groups: np.ndarray, size: int) -> np.ndarray:
    """int64: the rows of the given groups, of ``size`` rows each, in the given order."""
    return (groups[:, None] * size + np.arange(size)).ravel()


def micro_batches(batch: TrajectoryBatch, groups_per_micro_batch: int) -> Iterator[PaddedBatch]:
    """All groups, whole, ``groups_per_micro_batch`` at a time (the last may have fewer).

    Groups of like length meet, so that little is padding; the longest come first, so that a lack of
    memory shows at once.
    """
    order = np.argsort(-_tokens_of_groups(batch), kind="stable")
    for start in range(0, batch.groups, groups_per_micro_batch):
        yield pad(take_groups(batch, order[start : start + groups_per_micro_batch]))


def staleness(batch: TrajectoryBatch, version: int) -> np.ndarray:
    """int32 [N]: optimizer steps between the weights that sampled a trajectory and ``version``.

    A shard that survived a crash may come of weights ahead of ``version``, whose steps the resume took back.
    """
    return np.abs(version - batch.version_N)


def token_ages(record_N: np.ndarray, length_N: np.ndarray, step: int) -> np.ndarray:
    """int32 [T]: optimizer steps from the weights that sampled each token of some completions to ``step``.

    record_N: RECORD [N]; length_N: int64, tokens. A record has the versions of the first token and of the
    last. In between they are taken to rise evenly, to the nearest whole one: exact where one version sampled
    all, or changes come evenly. Below 0 where a resume took the steps back that made the weights.
    """
    oldest_N, newest_N = step - record_N["version_oldest"], step - record_N["version_newest"]
    place_T = np.arange(length_N.sum()) - np.repeat(offsets_of(length_N)[:-1], length_N)
    younger_N = (newest_N - oldest_N) / np.maximum(1, length_N - 1)  # from token to token
    age_T = np.repeat(oldest_N, length_N) + np.repeat(younger_N, length_N) * place_T
    return np.rint(age_T).astype(np.int32)


def to_arrays(batch: TrajectoryBatch) -> dict[str, np.ndarray]:
    """The batch as named contiguous arrays, for a wire without pickle (safetensors ignores strides)."""
    arrays = {
        "group_size": np.array(batch.group_size, np.int64),
        "tokens": batch.sequences.values,
        "offsets": batch.sequences.offsets,
        "prompt_length_N": batch.prompt_length_N,
        "reward_N": batch.reward_N,
        "value_N": batch.value_N,
        "version_N": batch.version_N,
        "on_policy_N": batch.on_policy_N,
        "logprobs": batch.logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "ages": batch.ages,
        "prompt_id_B": batch.prompt_id_B,
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> TrajectoryBatch:
    """Inverse of ``to_arrays``."""
    return TrajectoryBatch(
        group_size=int(arrays["group_size"]),
        sequences=Ragged(arrays["tokens"], arrays["offsets"]),
        prompt_length_N=arrays["prompt_length_N"],
        reward_N=arrays["reward_N"],
        value_N=arrays["value_N"],
        version_N=arrays["version_N"],
        on_policy_N=arrays["on_policy_N"],
        logprobs=arrays["logprobs"],
        ref_logprobs=arrays["ref_logprobs"],
        ages=arrays["ages"],
        prompt_id_B=arrays["prompt_id_B"],
    )


def rectangle(sequences: Ragged) -> np.ndarray:
    """int64 [N, L]: the sequences, padded on the right with 0 to the longest."""
    length_N = sequences.lengths
    tokens_NL = np.zeros((len(length_N), int(length_N.max())), np.int64)
    tokens_NL[np.arange(tokens_NL.shape[1]) < length_N[:, None]] = sequences.values
    return tokens_NL


def pad(batch: TrajectoryBatch) -> PaddedBatch:
    """All of a batch as rectangles."""
    length_N = batch.sequences.lengths
    tokens_NL = rectangle(batch.sequences)
    position_L = np.arange(tokens_NL.shape[1])
    completion_NL = (position_L < length_N[:, None]) & (position_L >= batch.prompt_length_N[:, None])
    return PaddedBatch(
        group_size=batch.group_size,
        tokens_NL=tokens_NL,
        prompt_length_N=batch.prompt_length_N,
        length_N=length_N,
        logprob_NL=_spread(batch.logprobs, completion_NL),
        ref_logprob_NL=_spread(batch.ref_logprobs, completion_NL),
        age_NL=_spread(batch.ages, completion_NL),
        reward_N=batch.reward_N,
        value_N=batch.value_N,
        on_policy_N=batch.on_policy_N,
        prompt_id_B=batch.prompt_id_B,
    )


def _tokens_of_groups(batch: TrajectoryBatch) -> np.ndarray:
    """int64 [B]: tokens of a group's completions, and of its prompt once, as the learner computes them."""
    completions_B = batch.completion_length_N.reshape(-1, batch.group_size).sum(1)
    return completions_B + batch.prompt_length_N[:: batch.group_size]


def _spread(value_T: np.ndarray, mask_NL: np.ndarray) -> np.ndarray:
    """[N, L]: the values in their places, row by row, 0 elsewhere."""
    value_NL = np.zeros(mask_NL.shape, value_T.dtype)
    value_NL[mask_NL] = value_T
    return value_NL
