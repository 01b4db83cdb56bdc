"""Edit distance between token sequences: one against many at once.

It must not know what the sequences mean or where they are kept. Imports no torch.

The distance is Levenshtein's: the fewest insertions, deletions and substitutions of a token that lead from
one sequence to the other.
"""

from __future__ import annotations

import numpy as np

from tba_hpc.types import Ragged

SIGNATURE_WORDS = 4
"""Words of 64 bits in a signature; the more, the fewer distances must be computed."""

HASH = np.uint32(2654435769)  # 2³² divided by the golden ratio: tokens that are neighbours go far apart
NEXT_REPEAT = np.uint32(1 << 20)  # beyond most vocabularies: a token's repeats count as other tokens
HASH_SHIFT = np.uint32(24)  # leaves 8 bits


def edit_distances(tokens: np.ndarray, others: Ragged) -> np.ndarray:
    """int32 [N]: distance of ``tokens``, int32 [T], to each of the others.

    The table of Wagner and Fischer (1974), a row of L + 1 for each token, of all the others side by side.
    What insertions make of a row is the running minimum of its values less their columns.
    """
    other_LN = _padded(others)
    column_L1 = np.arange(len(other_LN) + 1, dtype=np.int32)[:, None]
    row_LN = np.repeat(column_L1, len(others), axis=1)
    for i, token in enumerate(tokens.tolist(), start=1):
        kept_or_replaced_LN = row_LN[:-1] + (other_LN != token)
        np.minimum(row_LN[1:] + 1, kept_or_replaced_LN, out=row_LN[1:])
        row_LN[0] = i
        row_LN -= column_L1
        np.minimum.accumulate(row_LN, axis=0, out=row_LN)
        row_LN += column_L1
    return row_LN[others.lengths, np.arange(len(others))]


def signatures(rows: Ragged) -> np.ndarray:
    """uint64 [4, N]: for each row its tokens, repeats apart, hashed to bits."""
    row_T = np.repeat(np.arange(len(rows)), rows.lengths)
    order_T = np.lexsort((rows.values, row_T))
    token_T, repeat_T = rows.values[order_T], _repeats(row_T, rows.values[order_T])
    bits = np.zeros((len(rows), 64 * SIGNATURE_WORDS), bool)
    bits[row_T, (token_T.astype(np.uint32) + repeat_T * NEXT_REPEAT) * HASH >> HASH_SHIFT] = True
    return np.ascontiguousarray(np.packbits(bits, axis=1).view(np.uint64).T)


def fewest_edits(signature: np.ndarray, others: np.ndarray) -> np.ndarray:
    """int16 [N]: bounds from below of the distances between the rows of these signatures, [4, 1] and [4, N].

    An edit takes away at most one token (or one repeat) that the other sequence lacks, and brings one.
    """
    lost, gained = signature & ~others, others & ~signature
    return np.maximum(*(np.bitwise_count(bits).sum(0, dtype=np.int16) for bits in (lost, gained)))


def _repeats(row_T: np.ndarray, token_T: np.ndarray) -> np.ndarray:
    """uint32 [T]: how often each token stands before this place, where those of a row are in order."""
    place_T = np.arange(len(token_T), dtype=np.uint32)
    fresh_T = np.ones(len(token_T), bool)
    fresh_T[1:] = (np.diff(token_T) != 0) | (np.diff(row_T) != 0)
    return place_T - np.maximum.accumulate(np.where(fresh_T, place_T, 0))


def _padded(rows: Ragged) -> np.ndarray:
    """int32 [L, N]: the rows as columns, filled up with what is no token."""
    filled_NL = np.arange(rows.lengths.max(initial=0)) < rows.lengths[:, None]
    padded_NL = np.full(filled_NL.shape, -1, np.int32)
    padded_NL[filled_NL] = rows.values
    return np.ascontiguousarray(padded_NL.T)
