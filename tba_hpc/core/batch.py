"""Divides a batch over trainer ranks and into micro-batches, and converts batches to arrays and back.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.packing import cut
from tba_hpc.core.types import LIVE_RECORD, TOP_LOGPROBS, TrajectoryBatch, offsets_of


def balance(batch: TrajectoryBatch, ranks: int) -> list[np.ndarray]:
    """Divide the groups of a batch over ranks; return the indices of each rank's groups, int64 [B / ranks].

    Every rank gets the same number of groups and about the same number of tokens.
    """
    assert batch.groups % ranks == 0, "Config asks for a multiple of the trainer ranks"
    completions_B = batch.completion_length_N.reshape(-1, batch.group_size).sum(1)
    tokens_B = completions_B + batch.prompt_length_N[:: batch.group_size]
    longest_first = np.argsort(-tokens_B, kind="stable")
    return [np.sort(share) for share in _dealt(tokens_B, longest_first, ranks, most=batch.groups // ranks)]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some whole groups of a batch, and the micro-batches in which they are computed.

    groups: their indices in the batch, int64. micro_batches: for each micro-batch the indices of its rows in
    the batch, int64; together they hold every row of the groups exactly once.
    """

    groups: np.ndarray
    micro_batches: tuple[np.ndarray, ...]


READ_FACTOR = 4
"""Largest number of tokens that attention reads in a micro-batch with shared prompts, as a multiple of the
micro-batch's token budget. A shared prompt is read once per completion, and its keys and values take memory
each time."""


def plan(
    batch: TrajectoryBatch,
    *,
    rank: int,
    ranks: int,
    budget: int | None,
    share_prompts: bool,
    enough: int = 0,
) -> list[Part]:
    """Plan the micro-batches of one rank, as parts that are computed in order.

    ZeRO moves weights and gradients between ranks in every micro-batch, so the ranks must compute in step.
    All ranks therefore get equally many parts, with equally many micro-batches in each.

    rank, ranks: index of the rank among the trainer ranks, and their number. budget: token limit of a
    micro-batch, padding included. None: the limit is ``enough`` tokens, or the size of the largest group if
    that is more. share_prompts: whether a group's prompt is laid out once for all of its completions, without
    padding.

    With share_prompts, attention still reads a prompt once per completion. Several groups are therefore put
    together only if attention reads at most READ_FACTOR times the budget. Without share_prompts, a trajectory
    of several sequences becomes a padded rectangle, which may exceed the budget.

    Groups larger than the budget form the first part, in several micro-batches; a rank with fewer such groups
    adds its largest others. Each further part is one micro-batch of whole groups. The largest group comes
    first, so that a lack of memory shows at once.

    Raises ConfigError if a single sequence exceeds the budget.
    """
    size, completion_N, length_N = batch.group_size, batch.completion_length_N, batch.length_N

    def shared(rows: np.ndarray) -> int:
        return int(completion_N[rows].sum() + batch.prompt_length_N[np.unique(rows // size) * size].sum())

    tokens = shared if share_prompts else _padded(batch)

    rows_BK = np.arange(len(batch)).reshape(-1, size)
    tokens_B = np.array([tokens(rows_K) for rows_K in rows_BK])
    read_B = length_N[rows_BK].sum(1)
    most = max(int(tokens_B.max()), enough) if budget is None else budget
    _require_room(batch, most)
    shares = [share[np.argsort(-tokens_B[share], kind="stable")] for share in balance(batch, ranks)]
    split = max(int((tokens_B[share] > most).sum()) for share in shares)
    most_read = max(READ_FACTOR * most, int(read_B.max()))

    def fit(groups: np.ndarray) -> bool:
        return tokens(rows_BK[groups].ravel()) <= most and int(read_B[groups].sum()) <= most_read

    parts = []
    if split:
        pieces = [_rows_longest_first(rows_BK[share[:split]], completion_N) for share in shares]
        filled = [_filled(one, lambda rows: tokens(rows) <= most) for one in pieces]
        parts = [Part(shares[rank][:split], tuple(map(np.concatenate, _alike(filled)[rank])))]
    deal = partial(_dealt, tokens_B) if share_prompts else np.array_split  # similar lengths stay together
    wholes = _packed([share[split:] for share in shares], deal, fit)[rank]
    return parts + [Part(groups, (rows_BK[groups].ravel(),)) for groups in wholes]


def _rows_longest_first(rows_BK: np.ndarray, length_N: np.ndarray) -> Sequence[np.ndarray]:
    """Return each row as an array of one index: group by group, and within a group the longest first.

    rows_BK: indices of each group's rows. length_N: length of every row of the batch.
    """
    order_BK = np.argsort(-length_N[rows_BK], axis=1, kind="stable")
    rows = np.take_along_axis(rows_BK, order_BK, 1).ravel()
    return np.split(rows, rows.size)


def _padded(batch: TrajectoryBatch) -> Callable[[np.ndarray], int]:
    """Return a function from indices of rows to the number of tokens in their padded rectangle."""
    sequences, row = cut(batch.sequences, batch.prompt_length_N, batch.begin_T)
    sequences_N = np.bincount(row)
    longest_N = np.maximum.reduceat(sequences.lengths, offsets_of(sequences_N)[:-1])
    return lambda rows: int(sequences_N[rows].sum() * longest_N[rows].max())


def _packed(
    shares: Sequence[np.ndarray],
    deal: Callable[[np.ndarray, int], list[np.ndarray]],
    fit: Callable[[np.ndarray], bool],
) -> list[list[np.ndarray]]:
    """Divide each rank's groups into as few sets as fit, equally many on all ranks; return them by rank.

    shares: indices of each rank's groups. deal: function that divides groups into a given number of sets.
    fit: function that returns whether a set is small enough.
    """
    for number in range(1, len(shares[0]) + 1):
        sets = [deal(share, number) for share in shares]
        if all(fit(one) for of_rank in sets for one in of_rank):
            return sets
    return [[] for _ in shares]


def _dealt(
    tokens_B: np.ndarray, groups: np.ndarray, number: int, *, most: int | None = None
) -> list[np.ndarray]:
    """Divide groups into ``number`` sets with about equally many tokens; return the indices in each set.

    tokens_B: number of tokens of every group of the batch. groups: indices of the groups to divide, largest
    group first. Each group goes to the set that has the fewest tokens. most: number of groups at which a set
    is full; None: a set is never full.
    """
    sets: list[list[int]] = [[] for _ in range(number)]
    load = np.zeros(number)
    for group in groups.tolist():
        least = int(load.argmin())
        sets[least].append(group)
        load[least] += np.inf if len(sets[least]) == most else tokens_B[group]
    return [np.array(one, np.int64) for one in sets]


def _require_room(batch: TrajectoryBatch, budget: int) -> None:
    longest = int(batch.length_N.argmax())
    prompt, completion = int(batch.prompt_length_N[longest]), int(batch.completion_length_N[longest])
    if prompt + completion > budget:
        raise ConfigError(
            f"train.tokens_per_micro_batch={budget} is too small for a prompt of {prompt} and a completion "
            f"of {completion} tokens: raise it to at least {prompt + completion}"
        )


def _filled(pieces: Sequence[np.ndarray], fits: Callable[[np.ndarray], bool]) -> list[list[np.ndarray]]:
    """Put pieces into micro-batches, in order; return the pieces of each micro-batch.

    A piece is an array of indices of rows of the batch. It goes to the last micro-batch, or to a new one if
    it does not fit there.
    """
    filled: list[list[np.ndarray]] = []
    for piece in pieces:
        if filled and fits(np.concatenate([*filled[-1], piece])):
            filled[-1].append(piece)
        else:
            filled.append([piece])
    return filled


def _alike(filled_of_ranks: Sequence[list[list[np.ndarray]]]) -> Sequence[list[list[np.ndarray]]]:
    """Halve micro-batches until all ranks have equally many; return each rank's micro-batches.

    filled_of_ranks: for each rank the result of ``_filled``. A rank halves its micro-batch with the most
    pieces, until it has as many micro-batches as the rank that had the most.
    """
    number = max(len(filled) for filled in filled_of_ranks)
    for filled in filled_of_ranks:
        while len(filled) < number:
            longest = max(range(len(filled)), key=lambda place: len(filled[place]))
            pieces = filled[longest]
            filled[longest : longest + 1] = [pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]]
    return filled_of_ranks


def with_reference_power(batch: TrajectoryBatch, power: float) -> TrajectoryBatch:
    """Return the batch with the reference π_ref^power.

    The probabilities of such a reference need not sum to 1, because log Ẑ absorbs any constant factor.
    """
    return replace(batch, ref_logprobs=batch.ref_logprobs * np.float32(power))


def with_top_logprobs(batch: TrajectoryBatch, k: int) -> TrajectoryBatch:
    """Keep the ``k`` likeliest tokens at each position. Raises ConfigError if the batch holds fewer."""
    recorded = batch.top_logprobs.shape[1]
    if k > recorded:
        raise ConfigError(
            f"train.score_centering={k} needs the sampler's {k} likeliest tokens at each position, but "
            f"trajectories hold {recorded}: leave it out, or use a generator that records "
            "request.sampling.top_logprobs"
        )
    return replace(batch, top_logprobs=batch.top_logprobs[:, :k])


def take_groups(batch: TrajectoryBatch, groups: np.ndarray) -> TrajectoryBatch:
    """Return the groups with the given indices, whole and in the given order, as a batch."""
    return batch.take(rows_of(groups, batch.group_size))


def rows_of(groups: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of all rows of the given groups, int64. size: number of rows of a group."""
    return (groups[:, None] * size + np.arange(size)).ravel()


def staleness(batch: TrajectoryBatch, version: int) -> np.ndarray:
    """Return the staleness of each trajectory, int32 [N]: steps from its oldest weights to ``version``.

    Weights are ahead of ``version`` if a resume has undone steps. In that case the result is how many steps
    ahead they are, so it is never negative.
    """
    return np.abs(version - batch.version_N)


def to_arrays(batch: TrajectoryBatch) -> dict[str, np.ndarray]:
    """Return the batch as contiguous arrays of plain numbers by name, the form that safetensors stores."""
    arrays = {name: np.ascontiguousarray(array) for name, array in batch.to_arrays().items()}
    form = np.array([batch.group_size, batch.step], np.int64)
    return {**arrays, **{name: arrays[name].view(np.uint8) for name in _structured(arrays)}, "form": form}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> TrajectoryBatch:
    """Inverse of ``to_arrays``."""
    group_size, step = arrays["form"].tolist()
    structured = {name: arrays[name].view(dtype) for name, dtype in _structured(arrays).items()}
    return TrajectoryBatch.from_arrays({**arrays, **structured}, group_size=group_size, step=step)


def _structured(arrays: Mapping[str, np.ndarray]) -> dict[str, np.dtype]:
    """Return the dtypes of those arrays that are structured, by name."""
    dtypes = {"record": LIVE_RECORD, "top_logprobs": TOP_LOGPROBS}
    return {name: dtype for name, dtype in dtypes.items() if name in arrays}
