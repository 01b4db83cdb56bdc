"""Words for numbers, against English."""

from tba_hpc.wording import count


def test_one_is_singular_and_none_and_many_are_plural() -> None:
    assert [count(n, "shard") for n in (0, 1, 2, 3000)] == ["0 shards", "1 shard", "2 shards", "3,000 shards"]
    assert [count(n, "trajectory") for n in (1, 2)] == ["1 trajectory", "2 trajectories"]
