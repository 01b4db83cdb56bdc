"""Changes of weights: exact, small where few words change, and none where too many do."""

import numpy as np
import pytest

from tba_hpc.exchange.weight_changes import BLOCK, MOST, PIECE, apply_changes, find_changes


def changed(rng: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """A copy of which about this share of the words have other bits."""
    new = old.copy()
    words = new.view(np.uint16)
    words[rng.random(len(words)) < share] ^= rng.integers(1, 1 << 16, dtype=np.uint16)
    return new


def random_bytes(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("words", [1, 3, BLOCK - 1, BLOCK + 1, 5 * BLOCK, PIECE, PIECE + 2 * BLOCK + 7])
@pytest.mark.parametrize("share", [0, 0.001, 0.1])
def test_old_weights_and_their_changes_are_the_new_ones(words: int, share: float) -> None:
    """To the bit, NaN patterns included, also where the bytes do not begin at a multiple of eight."""
    rng = np.random.default_rng(words)
    memory = random_bytes(rng, 2 * words + 6)
    for old in (memory[6:], memory[: 2 * words]):
        new, patched = changed(rng, old, share), old.copy()
        changes = find_changes(new, old)
        if changes is None:  # of very few words even a block's count is a lot
            assert words < BLOCK
            continue
        apply_changes(changes, patched)
        assert np.array_equal(patched, new)


def test_size_is_two_bytes_a_block_and_three_a_change() -> None:
    old = np.zeros(2 * 100 * BLOCK, np.uint8)
    new = old.copy()
    new.view(np.uint16)[[0, 5, BLOCK - 1, 70 * BLOCK, 100 * BLOCK - 1]] = 1
    changes = find_changes(new, old)
    assert changes is not None and len(changes) == 100 * 2 + 5 * 3


def test_too_many_changes_are_none() -> None:
    """At a quarter of the bytes: where one word in six differs, spread evenly, or in one place."""
    rng, old = np.random.default_rng(0), np.zeros(2 * 8 * PIECE, np.uint8)
    assert find_changes(changed(rng, old, 0.2), old) is None
    found = find_changes(changed(rng, old, 0.15), old)
    assert found is not None and len(found) <= MOST * len(old)
    crowded = old.copy()
    crowded[: len(old) // 5] = 1
    assert find_changes(crowded, old) is None


def test_changes_of_other_weights_are_refused_and_change_nothing() -> None:
    rng = np.random.default_rng(0)
    old = random_bytes(rng, 2 * 10 * BLOCK)
    changes = find_changes(changed(rng, old, 0.05), old)
    assert changes is not None
    for damaged in (changes[:-1], changes[:7], np.concatenate([changes, changes[:3]])):
        out = old.copy()
        with pytest.raises(ValueError, match="changes of other weights, or damaged ones"):
            apply_changes(damaged, out)
        assert np.array_equal(out, old)
    with pytest.raises(ValueError, match="changes of other weights"):
        apply_changes(changes, np.zeros(2 * 9 * BLOCK, np.uint8))
