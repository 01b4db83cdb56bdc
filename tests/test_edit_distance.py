"""Edit distances against the definition, and their bounds against them."""

from functools import cache

import numpy as np
import pytest

from tba_hpc.edit_distance import edit_distances, fewest_edits, signatures
from tba_hpc.types import Ragged


def by_definition(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Fewest edits, by trying all."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        replaced = rest(i + 1, j + 1) + (one[i] != other[j])
        return min(replaced, rest(i + 1, j) + 1, rest(i, j + 1) + 1)

    return rest(0, 0)


@pytest.mark.parametrize(("kinds", "longest"), [(2, 6), (3, 12), (50_000, 12)])
def test_distances_are_the_fewest_edits(kinds: int, longest: int) -> None:
    rng = np.random.default_rng(kinds)
    rows = [rng.integers(0, kinds, rng.integers(0, longest + 1), np.int32) for _ in range(60)]
    others = Ragged.from_rows(rows, np.int32)
    signature = signatures(others)
    for i, row in enumerate(rows[:20]):
        wanted = [by_definition(tuple(row.tolist()), tuple(other.tolist())) for other in rows]
        assert edit_distances(row, others).tolist() == wanted
        bound = fewest_edits(signature[:, i : i + 1], signature)
        assert (bound <= wanted).all()
        if kinds == 50_000:  # nothing in common: the bound leaves hardly anything open
            assert bound.mean() > 0.8 * np.mean(wanted)


def test_the_bound_tells_repeats_of_a_token_apart() -> None:
    rows = Ragged.from_rows([np.full(20, 7), np.full(2, 7)], np.int32)
    signature = signatures(rows)
    assert (
        fewest_edits(signature[:, :1], signature).tolist()
        == [0, 18]
        == edit_distances(rows.row(0), rows).tolist()
    )


def test_among_no_others() -> None:
    assert edit_distances(np.array([1, 2]), Ragged.from_rows([], np.int32)).tolist() == []
