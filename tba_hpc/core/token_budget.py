"""Micro-batches filled up to a number of tokens, a group over several if need be; equally many on every rank.

Imports no torch.

Shape letters: B groups of K sequences, N in all; R rows of a group, S sequences each behind their prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.batch import balance, take_groups
from tba_hpc.core.types import TrajectoryBatch, spans


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Whole groups, and the micro-batches in which they are computed.

    groups: int64, which they are of those of all ranks. sequences: of each micro-batch, int64, which of
    ``batch`` it holds; together all, once.
    """

    batch: TrajectoryBatch
    groups: np.ndarray
    sequences: tuple[np.ndarray, ...]

    def micro_batches(self) -> Iterator[tuple[TrajectoryBatch, np.ndarray]]:
        """One by one: its sequences, and where their completions' tokens are among the part's, int64 [T]."""
        offsets = self.batch.completions.offsets
        for chosen in self.sequences:
            yield self.batch.take(chosen), spans(offsets, chosen)[0]


def most_per_row(batch: TrajectoryBatch, budget: int) -> int:
    """How many sequences of any group fit into a row of ``budget`` tokens behind their prompt.

    Raises ConfigError where a sequence alone is longer.
    """
    completion_BK = np.sort(batch.completion_length_N.reshape(-1, batch.group_size), axis=1)[:, ::-1]
    row_BK = batch.prompt_length_N[:: batch.group_size, None] + completion_BK.cumsum(1)
    longest_K = row_BK.max(0)
    if longest_K[0] > budget:
        group = int(row_BK[:, 0].argmax())
        prompt, completion = batch.prompt_length_N[group * batch.group_size], completion_BK[group, 0]
        raise ConfigError(
            f"train.tokens_per_micro_batch={budget} is below one sequence, of {prompt} tokens of the prompt "
            f"and {completion} of the completion: raise it to at least {longest_K[0]}"
        )
    return int((longest_K <= budget).sum())


def parts(batch: TrajectoryBatch, *, rank: int, ranks: int, budget: int, per_row: int) -> list[Part]:
    """What a rank computes: the same number of parts, and of micro-batches in each, as every other rank.

    A micro-batch has at most ``budget`` tokens, as rows of ``per_row`` sequences (a divisor of the group's
    size, at most ``most_per_row``) that are padded to the longest. The first part holds the groups that fit
    into none whole, if there are any, and on ranks with fewer of them other groups; each further part is one
    micro-batch of whole groups. Long rows come first, and meet rows of like length.
    """
    shares = [_Share.of(batch, groups, per_row) for groups in balance(batch, ranks)]
    split = max(int((share.tokens_B > budget).sum()) for share in shares)
    rows = _alike([_filled(share.row_tokens(split), budget) for share in shares])[rank]
    groups = _alike([_filled(share.tokens_B[split:], budget) for share in shares])[rank]
    return [
        *([shares[rank].rows(split, rows)] if split else []),
        *(shares[rank].groups(split + some) for some in groups),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """A rank's groups, those of most tokens first.

    number_B: which they are of the whole batch's. sequence_BRS: which sequences share a row, long ones first.
    tokens_BR: of such a row. tokens_B: of a group whose rows are padded to its longest.
    """

    batch: TrajectoryBatch
    number_B: np.ndarray
    sequence_BRS: np.ndarray
    tokens_BR: np.ndarray
    tokens_B: np.ndarray

    @classmethod
    def of(cls, batch: TrajectoryBatch, groups: np.ndarray, per_row: int) -> _Share:
        tokens_B, _, _ = _rows(take_groups(batch, groups), per_row)
        groups = groups[np.argsort(-tokens_B, kind="stable")]
        mine = take_groups(batch, groups)
        tokens_B, tokens_BR, sequence_BRS = _rows(mine, per_row)
        return cls(mine, groups, sequence_BRS, tokens_BR, tokens_B)

    def row_tokens(self, groups: int) -> np.ndarray:
        """Of the first groups' rows, in falling order."""
        return -np.sort(-self.tokens_BR[:groups].ravel())

    def rows(self, groups: int, chosen: Sequence[np.ndarray]) -> Part:
        """The first groups; ``chosen``: rows by their place in that order."""
        order = np.argsort(-self.tokens_BR[:groups].ravel(), kind="stable")
        sequence_RS = self.sequence_BRS[:groups].reshape(len(order), -1)[order]
        return Part(
            take_groups(self.batch, np.arange(groups)),
            self.number_B[:groups],
            tuple(sequence_RS[some].ravel() for some in chosen),
        )

    def groups(self, chosen: np.ndarray) -> Part:
        """Consecutive groups in one micro-batch."""
        first = chosen[0] * self.batch.group_size
        sequences = (self.sequence_BRS[chosen].ravel() - first,)
        return Part(take_groups(self.batch, chosen), self.number_B[chosen], sequences)


def _rows(batch: TrajectoryBatch, per_row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens_B, tokens_BR and sequence_BRS of a _Share."""
    size = batch.group_size
    completion_BK = batch.completion_length_N.reshape(-1, size)
    order_BK = np.argsort(-completion_BK, axis=1, kind="stable")
    falling_BRS = np.take_along_axis(completion_BK, order_BK, 1).reshape(batch.groups, -1, per_row)
    tokens_BR = batch.prompt_length_N[::size, None] + falling_BRS.sum(2)
    sequence_BK = order_BK + size * np.arange(batch.groups)[:, None]
    return tokens_BR.shape[1] * tokens_BR[:, 0], tokens_BR, sequence_BK.reshape(falling_BRS.shape)


def _filled(tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Runs of things of so many tokens, in falling order: as many as fit, all padded to the first."""
    runs, start = [], 0
    while start < len(tokens):
        end = min(start + budget // int(tokens[start]), len(tokens))
        runs.append(np.arange(start, end))
        start = end
    return runs


def _alike(runs_of_ranks: Sequence[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The same, in as many runs on every rank: with fewer, the longest of them are halved.

    Ranks compute in step, as ZeRO moves gradients and weights between them in every micro-batch.
    """
    number = max(len(runs) for runs in runs_of_ranks)
    for runs in runs_of_ranks:
        while len(runs) < number:
            longest = max(range(len(runs)), key=lambda place: len(runs[place]))
            runs[longest : longest + 1] = np.array_split(runs[longest], 2)
    return list(runs_of_ranks)
