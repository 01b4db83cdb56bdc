"""Searchers that are killed at chosen moments of a round: the world goes on, and nothing sealed is lost."""

from pathlib import Path

import pytest

from mpi.launch import Outcome, run_world
from tba_hpc.launch.local import SURVIVE_DEATHS

DEATHS = Path(__file__).with_name("exchange_deaths.py")

pytestmark = pytest.mark.mpi


def world(folder: Path, nodes: str, *deaths: str) -> Outcome:
    """One trainer and three searchers on (emulated) nodes, with these deaths."""
    return run_world(4, [DEATHS, folder, nodes, *deaths], environment=SURVIVE_DEATHS)


@pytest.mark.parametrize(
    ("nodes", "deaths", "lost"),
    [
        ("0000", ["2:header:3"], [2]),  # before it has answered in the round
        ("0000", ["2:weights:0"], [2]),  # during the first
        ("0000", ["2:sent:3"], [2]),  # its shards are on their way
        ("0000", ["0:evaluating:11"], [0]),  # after the last, in the evaluation that ends the run
        ("0011", ["1:weights:5"], [1]),  # the leader of the second node
        ("0000", ["1:header:2", "2:header:6"], [1, 2]),  # one after the other
    ],
)
def test_the_world_goes_on_without_a_dead_searcher(
    nodes: str, deaths: list[str], lost: list[int], tmp_path: Path
) -> None:
    outcome = world(tmp_path, nodes, *deaths)
    assert outcome.code == 0, outcome.output
    assert f"went on without {lost}" in outcome.output
    assert outcome.output.count("has left") == 3 - len(lost)


def test_the_death_of_the_last_searcher_ends_the_world_with_its_name(tmp_path: Path) -> None:
    outcome = world(tmp_path, "0000", "0:header:2", "1:header:4", "2:header:6")
    # mpiexec itself ends with 0 here, which the launcher knows: it looks for the run's summary.
    assert "refused: searcher 2 (world rank 3 on " in outcome.output and ") died: " in outcome.output
