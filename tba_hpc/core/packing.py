"""Lays out sequences for a model: in one row that holds every prompt once, or in a padded rectangle.

All indices are computed here, on the host, so that nothing waits for a device. Imports no torch.

Shape letters: N sequences, L length of the longest, R tokens in the row, S tokens of all sequences (each with
its prompt), T tokens of all completions, A sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tba_hpc.core.types import Ragged, offsets_of

Layout = Literal["varlen", "padded", "rectangle"]
"""Form in which a model gets sequences.

varlen: one row, with a variable-length attention kernel. padded: one row, whose attention is computed over
padded rectangles. rectangle: a padded rectangle [N, L], each sequence with its own copy of the prompt."""

Array = Any
"""A numpy array, or the tensor that ``learner.upload`` made of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Varlen:
    """Indices for variable-length attention over a row.

    A sequence's queries are its own tokens, which are contiguous in the row. Its keys are all of its tokens,
    including those of a shared prompt. The causal mask is aligned at the end: the last query sees all keys.

    key_S: int64, index in the row of each key. query_ends: int32 [N + 1], offsets of the sequences' queries
    in the row. key_ends: int32 [N + 1], offsets of their keys in ``key_S``. longest_query, longest_key: the
    largest number of queries and of keys of a sequence.
    """

    key_S: Array
    query_ends: Array
    key_ends: Array
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Indices for copying a row into padded rectangles, in which attention is computed, and back.

    Each rectangle holds sequences of similar length with their prompts.

    places: for each rectangle the indices of its tokens in the row, int64 [n, longest]; 0 where padded.
    from_R: int64, for each token of the row its index in these rectangles, flattened and joined. A token of a
    shared prompt has its index in the first sequence with the prompt.
    """

    places: tuple[Array, ...]
    from_R: Array


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences for one pass of a model.

    tokens, positions: int64 [1, R] or [N, L], each token and its position in its own sequence. attention:
    indices for attention over a row; None for a rectangle.

    For each sampled token, int64: before_A is the index into flattened ``tokens`` of the token before it,
    where the model predicts the sampled token. sampled_A is the sampled token, or a row [1 + C] of the
    sampled token and C other tokens whose log-probabilities at the same position are needed. place_A is the
    sampled token's index among the tokens of all completions.
    """

    tokens: Array
    positions: Array
    attention: Varlen | Padded | None
    before_A: Array
    sampled_A: Array
    place_A: Array


def pack(
    sequences: Ragged,
    prompt_length_N: np.ndarray,
    prompt_N: np.ndarray,
    action_T: np.ndarray,
    layout: Layout,
    *,
    begin_T: np.ndarray | None = None,
    others_TC: np.ndarray | None = None,
) -> Packed:
    """Lay out sequences for one pass of a model.

    sequences: prompts, each of at least one token, with their completions, int32. prompt_length_N: int64,
    length of each sequence's prompt. prompt_N: int64, number of each sequence's prompt; neighbours with the
    same number have the same prompt, and share it in a row. action_T: bool, whether each completion token was
    sampled. layout: form of the result. begin_T: bool, True at completion tokens with which the completion
    begins a new sequence, which does not see the tokens before; None: there are none. others_TC: int, other
    tokens whose log-probabilities are needed at the position of each completion token; None: there are none.
    """
    if begin_T is not None and begin_T.any():
        sequences, row_N = cut(sequences, prompt_length_N, begin_T)
        prompt_length_N = np.where(_is_new(row_N), prompt_length_N[row_N], 0)
        prompt_N = prompt_N[row_N]
    length_N = sequences.lengths
    row_S = np.arange(len(length_N)).repeat(length_N)
    position_S = np.arange(len(row_S)) - sequences.offsets[row_S]
    completion_S = position_S >= prompt_length_N[row_S]
    first_N = _is_new(prompt_N)
    own_S = completion_S | first_N[row_S]  # a shared prompt belongs to its first sequence
    if layout == "rectangle":
        shape = (len(length_N), int(length_N.max()))
        place_S = row_S * shape[1] + position_S
    else:
        shape = (1, int(np.count_nonzero(own_S)))
        place_S = _places_in_row(own_S, row_S, position_S, first_N, sequences.offsets)
    action_A = np.flatnonzero(completion_S)[action_T]
    sampled_A = sequences.values[action_A]
    if others_TC is not None and others_TC.shape[1]:
        sampled_A = np.column_stack([sampled_A, others_TC[action_T]])
    return Packed(
        tokens=_put(sequences.values, place_S, shape),
        positions=_put(position_S, place_S, shape),
        attention=_attention(layout, place_S, own_S, row_S, sequences),
        before_A=place_S[action_A - 1],
        sampled_A=sampled_A.astype(np.int64),
        place_A=np.flatnonzero(action_T),
    )


def _is_new(number_N: np.ndarray) -> np.ndarray:
    """Return whether each number differs from the one before it, bool [N]; for the first, True."""
    return np.append(True, number_N[1:] != number_N[:-1])


def cut(sequences: Ragged, prompt_length_N: np.ndarray, begin_T: np.ndarray) -> tuple[Ragged, np.ndarray]:
    """Cut sequences before each completion token at which ``begin_T``, bool [T], is True; see ``pack``.

    Returns the pieces in order, and for each piece the index of the sequence from which it was cut, int64.
    """
    begins = np.flatnonzero(begin_T)
    before = offsets_of(prompt_length_N)  # number of prompt tokens before each sequence
    row = np.searchsorted(sequences.offsets - before, begins, "right") - 1
    offsets = np.union1d(sequences.offsets, begins + before[row + 1])
    return Ragged(sequences.values, offsets), np.searchsorted(sequences.offsets, offsets[:-1], "right") - 1


def _places_in_row(
    own_S: np.ndarray, row_S: np.ndarray, position_S: np.ndarray, first_N: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Return the index of each token in the row, int64 [S].

    The row holds the own tokens of all sequences, one after another. The tokens of a shared prompt belong to
    the first sequence with the prompt; later sequences have the same indices for them.

    own_S: bool, whether a token is its sequence's own. row_S, position_S: int64, each token's sequence, and
    its position there. first_N: bool, whether a sequence is the first with its prompt. offsets: int64
    [N + 1], offsets of the sequences among all S tokens.
    """
    place_S = own_S.cumsum() - 1
    lender_N = np.flatnonzero(first_N)[first_N.cumsum() - 1]  # the first sequence with the same prompt
    in_lender_S = offsets[lender_N[row_S]] + position_S
    place_S[~own_S] = place_S[in_lender_S[~own_S]]
    return place_S


def _put(value_S: np.ndarray, place_S: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    found = np.zeros(shape, np.int64)
    found.reshape(-1)[place_S] = value_S
    return found


def _attention(
    layout: Layout, place_S: np.ndarray, own_S: np.ndarray, row_S: np.ndarray, sequences: Ragged
) -> Varlen | Padded | None:
    match layout:
        case "rectangle":
            return None
        case "varlen":
            queries_N = np.bincount(row_S[own_S], minlength=len(sequences))
            ends = (offsets_of(queries_N), sequences.offsets)
            query_ends, key_ends = (of.astype(np.int32) for of in ends)
            return Varlen(place_S, query_ends, key_ends, int(queries_N.max()), int(sequences.lengths.max()))
        case "padded":
            return _padded(Ragged(place_S, sequences.offsets), Ragged(own_S, sequences.offsets))


def _padded(place: Ragged, own: Ragged) -> Padded:
    from_R = np.zeros(np.count_nonzero(own.values), np.int64)
    cells, places = 0, []
    for alike in _of_similar_length(place.lengths):
        longest = int(place.lengths[alike[0]])
        place_nL = np.zeros((len(alike), longest), np.int64)
        within_nL = np.arange(longest) < place.lengths[alike][:, None]
        place_nL[within_nL] = place.take(alike).values
        own_nL = within_nL.copy()
        own_nL[within_nL] = own.take(alike).values
        from_R[place_nL[own_nL]] = cells + np.flatnonzero(own_nL)
        cells += place_nL.size
        places.append(place_nL)
    return Padded(tuple(places), from_R)


def _of_similar_length(length_N: np.ndarray) -> Iterator[np.ndarray]:
    """Yield sets of indices of sequences, longest first. A set's longest is less than twice its shortest."""
    order_N = np.argsort(-length_N, kind="stable")
    falling_N = length_N[order_N]
    start = 0
    while start < len(order_N):
        end = start + int(np.count_nonzero(2 * falling_N[start:] > falling_N[start]))
        yield order_N[start:end]
        start = end
