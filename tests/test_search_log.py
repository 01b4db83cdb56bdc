"""What a searcher says of fresh completions, by hand."""

import math

import numpy as np
import pytest

from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling
from tba_hpc.loops.search_log import Sums


def group_of(*rows: list[float], truncated: int = 0) -> Group:
    """Completions with these log-probabilities, of which the first ones were cut off."""
    completions = tuple(
        Completion(np.zeros(len(row), np.int32), np.array(row, np.float32), "length" if cut else "stop")
        for row, cut in zip(rows, np.arange(len(rows)) < truncated, strict=True)
    )
    request = Request(Prompt(0, np.zeros(1, np.int32), ""), 0, len(rows), Sampling(1.0, 1.0, 4))
    return Group(request, completions, np.zeros((len(rows), 2), np.int32))


def reference(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_sums_of_groups_by_hand() -> None:
    one = Sums.of(group_of([-1.0, -0.5], [-2.0], truncated=1), [1.0, 0.0], reference([-1.5, -1.0], [-1.5]))
    other = Sums.of(group_of([-0.25] * 4), [1.0], reference([-0.5] * 4))
    figures = (one + other + Sums()).figures()
    assert figures == {
        "search/groups": 2,
        "search/trajectories": 3,
        "search/reward": pytest.approx(2 / 3),
        "search/truncated_share": pytest.approx(1 / 3),
        "search/kl": pytest.approx((1.0 - 0.5 + 1.0) / 3),
        "search/entropy": pytest.approx((1.5 + 2.0 + 1.0) / 7),
        "search/flat_groups": 0.5,
        "search/length": pytest.approx(7 / 3),
        "search/environment_share": 0,
        "search/turns": 1,
        "search/failed_calls": None,
        "search/engine_gap": None,
    }


def test_only_sampled_tokens_count_for_nats() -> None:
    """Two turns with one token of the environment, and one turn that ends with two; -9 is the reference's
    opinion of them.
    """
    gap = math.nan
    group = group_of([-1.0, gap, -0.5], [-2.0, gap, gap])
    rows = reference([-1.5, -9.0, -1.0], [-2.5, -9.0, -9.0])
    figures = Sums.of(group, [1.0, 0.0], rows).figures()
    assert figures["search/length"] == 1.5 and figures["search/turns"] == 1.5
    assert figures["search/environment_share"] == 0.5
    assert figures["search/kl"] == pytest.approx(1.5 / 2)
    assert figures["search/entropy"] == pytest.approx(3.5 / 3)
    assert Sums.between([group], [rows]).figures()["search/engine_gap"] == pytest.approx(0.5)


def test_what_was_tempered_says_nothing_of_entropy_or_kl() -> None:
    own = Sums.of(group_of([-1.0, -0.5]), [1.0], reference([-1.5, -1.0]))
    tempered = Sums.of(group_of([-9.0] * 6), [0.0], reference([-1.0] * 6), tempered=True)
    figures = (own + tempered).figures()
    assert figures["search/kl"] == pytest.approx(1.0) and figures["search/entropy"] == pytest.approx(0.75)
    assert figures["search/length"] == 4 and figures["search/reward"] == 0.5, "the rest is of all"
    alone = tempered.figures()
    assert alone["search/kl"] is None and alone["search/entropy"] is None


def test_without_a_reference_there_is_no_kl_and_without_completions_no_mean() -> None:
    assert Sums.of(group_of([-1.0]), [1.0]).figures()["search/kl"] is None
    some = Sums.of(group_of([-1.0], [-1.0]), [1.0, 1.0]) + Sums.of(
        group_of([-1.0]), [1.0], reference([-math.e])
    )
    assert some.figures()["search/kl"] == pytest.approx(math.e - 1)
    nothing = Sums().figures()
    assert {name for name, value in nothing.items() if value is not None} == {
        "search/groups",
        "search/trajectories",
    }


def test_the_gap_is_a_mean_over_tokens() -> None:
    groups = [group_of([-1.0, -2.0]), group_of([-3.0])]
    there = [reference([-1.5, -1.75]), reference([-3.0])]
    assert Sums.between(groups, there).figures()["search/engine_gap"] == pytest.approx(0.75 / 3)
