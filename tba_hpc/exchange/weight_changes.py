"""Compact, bit-exact changes between two flat buffers of weights.

Weights are compared as *words* of 16 bits, whatever their dtype. In bfloat16 a word is one number. An
optimizer step at a learning rate of 1e-6 changes about one number in a hundred. In float32 a word is half a
number, and nearly every lower half changes.

A buffer of weights has B blocks of 256 words. The changes of n words are one uint8 array of three parts:

    counts   uint16 [B]   number of changed words in each block
    values   uint16 [n]   new bits of each changed word
    offsets  uint8 [n]    index of each changed word within its block
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tba_hpc.core.types import WeightLayout

WORD, BLOCK = 2, 256
"""Number of bytes in a word, and number of words in a block, which is as many as a uint8 can index."""

PIECE = 1 << 18
"""Number of 16-bit words that a thread compares at once; they fit in a core's cache."""

BYTES_PER_CHANGE, BYTES_PER_BLOCK = 3, 2
"""Bytes per changed word (value and offset), and per block (count)."""

SAMPLES, SAMPLE = 64, 4096
"""Number of samples that are compared before all weights, and 16-bit words per sample."""

MOST = 0.25
"""Maximum size of changes, as a share of the size of the weights. If larger, whole weights are published."""

LONGEST_CHAIN, HEAVIEST_CHAIN = 32, 0.5
"""Limits on the files of changes that follow whole weights: their number, and their total size as a share of
the size of the weights. A searcher that joins must read all of them."""

THREADS = min(4, len(os.sched_getaffinity(0)))
"""Number of threads that compare weights in parallel; numpy releases Python's lock meanwhile."""


class DeltaMemory:
    """The weights that a trainer published last, with which the next ones are compared.

    incoming: memory for the next weights, uint8 [nbytes]. Float32 weights are always published whole, because
    nearly all of them change at every step.
    """

    def __init__(self, layout: WeightLayout) -> None:
        self.incoming = np.zeros(layout.nbytes, np.uint8)
        halves = all(slot.dtype != "F32" for slot in layout.slots)
        self._last = np.zeros(layout.nbytes, np.uint8) if halves else None
        self._sizes: list[int] | None = None  # bytes of the chain's changes; None before the first weights

    def changes(self) -> np.ndarray | None:
        """Return the changes from the last to the incoming weights; None if these are to be published whole.

        The first weights and float32 weights are published whole. So are others if too much has changed, or
        if the files of changes since the last whole weights have reached a limit (LONGEST_CHAIN).
        """
        if self._last is None or self._sizes is None or len(self._sizes) == LONGEST_CHAIN:
            return None
        changes = find_changes(self.incoming, self._last)
        if changes is None or sum(self._sizes) + len(changes) > HEAVIEST_CHAIN * len(self.incoming):
            return None
        return changes

    def keep(self, changes: np.ndarray | None) -> None:
        """Note that the incoming weights have been published; ``incoming`` may become another array.

        changes: the changes that were published; None if the weights were published whole.
        """
        if self._last is not None:
            self._sizes = [] if changes is None else [*(self._sizes or ()), len(changes)]
            self.incoming, self._last = self._last, self.incoming


def find_changes(new: np.ndarray, old: np.ndarray) -> np.ndarray | None:
    """Return the changes, uint8, from ``old`` to ``new``, both uint8 [nbytes]; None if they exceed MOST.

    Samples are compared first, because they soon show whether everything has changed.
    """
    new, old = new.view(np.uint16), old.view(np.uint16)
    most = MOST * WORD * len(new)
    starts = np.linspace(0, max(0, len(new) - SAMPLE), SAMPLES).astype(np.int64)
    share = np.mean([np.mean(new[at : at + SAMPLE] != old[at : at + SAMPLE]) for at in starts])
    if BYTES_PER_BLOCK * _blocks(len(new)) + BYTES_PER_CHANGE * float(share) * len(new) > most:
        return None
    with ThreadPoolExecutor(THREADS) as pool:
        pieces = [slice(start, start + PIECE) for start in range(0, len(new), PIECE)]
        found = list(pool.map(lambda piece: _in_piece(new[piece], old[piece]), pieces))
    parts = [part.view(np.uint8) for kind in zip(*found, strict=True) for part in kind]
    return np.concatenate(parts) if sum(map(len, parts)) <= most else None


def apply_changes(changes: np.ndarray, out: np.ndarray) -> None:
    """Apply ``changes`` to ``out``, uint8 [nbytes], in place.

    Raises ValueError, and leaves ``out`` as it is, if the sizes do not fit each other.
    """
    words = out.view(np.uint16)
    counts, values, offsets = _parts(changes, _blocks(len(words)))
    at, per_piece = 0, PIECE // BLOCK
    for first in range(0, len(counts), per_piece):
        count = counts[first : first + per_piece]
        end = at + int(count.sum(dtype=np.int64))
        index = np.repeat(np.arange(len(count)) * BLOCK, count) + offsets[at:end]
        words[first * BLOCK :][index] = values[at:end]
        at = end


def _parts(changes: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the counts, values and offsets of changes to ``blocks`` blocks, in the module's format.

    Raises ValueError if the changes are of another number of blocks.
    """
    counts_end = BYTES_PER_BLOCK * blocks
    counts = changes[:counts_end].view(np.uint16) if len(changes) >= counts_end else np.empty(0, np.uint16)
    total = int(counts.sum(dtype=np.int64))
    if len(changes) != counts_end + BYTES_PER_CHANGE * total:
        raise ValueError("changes of other weights, or damaged ones")
    values, offsets = np.split(changes[counts_end:], [WORD * total])
    return counts, values.view(np.uint16), offsets


def _in_piece(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the counts, values and offsets of the words that differ in a piece, in the module's format.

    new, old: words of the piece, uint16, at most PIECE of them.

    Four words are compared at a time, as one uint64. Only the few that differ are then compared word by word.
    The lowest eight bits of a word's index are its offset within its block.
    """
    whole = len(new) // 4 * 4
    new_4, old_4 = new[:whole].view(np.uint64), old[:whole].view(np.uint64)
    places = np.flatnonzero(new_4 != old_4)
    found = new_4[places]
    within = np.flatnonzero((found ^ old_4[places]).view(np.uint16) != 0)
    rest = np.flatnonzero(new[whole:] != old[whole:])
    index = np.concatenate([(4 * places)[within >> 2] + (within & 3), whole + rest])
    values = np.concatenate([found.view(np.uint16)[within], new[whole:][rest]])
    counts = np.bincount(index >> 8, minlength=_blocks(len(new))).astype(np.uint16)
    return counts, values, index.astype(np.uint8)


def _blocks(words: int) -> int:
    return -(-words // BLOCK)
