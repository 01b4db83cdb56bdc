"""The store by which trainer ranks find each other: two ends of one folder."""

from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
import torch.distributed as dist

from tba_hpc.learner.folder_store import FolderStore


@pytest.fixture
def stores(tmp_path: Path) -> tuple[FolderStore, FolderStore]:
    """Of two ranks."""
    return FolderStore(tmp_path, deadline=10), FolderStore(tmp_path, deadline=10)


def test_a_value_set_by_one_rank_is_read_by_the_other(stores: tuple[FolderStore, FolderStore]) -> None:
    one, other = stores
    Timer(0.1, one.set, ("group/0//rank", b"\0address")).start()
    assert other.get("group/0//rank") == b"\0address"
    assert other.check(["group/0//rank"]) and not other.check(["group/0//rank", "group/0"])


def test_what_ranks_add_is_summed_by_key(stores: tuple[FolderStore, FolderStore]) -> None:
    one, other = stores
    assert [one.add("a", 1), other.add("a", 1), one.add("a+b", 5), other.add("a", 0)] == [1, 2, 5, 2]


def test_a_wait_for_a_rank_that_is_missing_ends(stores: tuple[FolderStore, FolderStore]) -> None:
    with pytest.raises(dist.DistStoreError, match="s for rank/1"):
        stores[0].wait(["rank/1"], timedelta(seconds=0.1))
