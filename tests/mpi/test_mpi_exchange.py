"""The MPI exchange where something is wrong, or large: what a user would read, and how soon."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi.launch import ENVIRONMENT, Outcome, run_world
from tba_hpc.run import directory

SEARCHERS_FIRST = {directory.SEARCHERS_FIRST: "1"}
FAULTS = Path(__file__).with_name("exchange_faults.py")

pytestmark = pytest.mark.mpi


def world(case: str, ranks: int = 3, **environment: str) -> tuple[Outcome, float]:
    """Outcome of a case and the seconds that it took."""
    began = time.monotonic()
    outcome = run_world(ranks, [FAULTS, case], environment=environment)
    return outcome, time.monotonic() - began


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            "wrong_size",
            "the MPI world has 3 ranks, but launch.trainers=1 and launch.searchers=3 need 4: "
            "start exactly that many",
        ),
        (
            "wrong_role",
            "world rank 1 was started as a trainer, but with launch.trainers=1 it must be a searcher",
        ),
        ("never_joins", r"searcher 1 \(world rank 2\) did not join the world within 2 s: it did not"),
        (
            "never_connects",
            r"searcher 1 \(world rank 2 on \S+\) joined the world, but did not get ready "
            r"\(loading model and engine\) within 2 s: see its log",
        ),
        (
            "trainer_never_connects",
            r"trainer 0 \(world rank 0 on \S+\) did not send the layout .* within 4 s",
        ),
        (
            "stops_answering",
            r"searcher 1 \(world rank 2 on \S+\) did not \w+ .*round \d+ within 2 s: .*see its log",
        ),
        (
            "main_thread_hangs",
            r"searcher 1 \(world rank 2 on \S+\) did not confirm round \d+ within 2 s: its main thread or "
            "its engine hangs; see its log",
        ),
        (
            "hangs_after_the_end",
            r"searcher 1 \(world rank 2 on \S+\) did not end with the run within 4 s: its process or",
        ),
    ],
)
def test_a_missing_peer_is_named_within_the_deadline(case: str, sentence: str) -> None:
    outcome, seconds = world(case)
    assert outcome.code != 0
    assert re.search("refused: " + sentence, outcome.output), outcome.output
    assert "searcher 0 (" not in outcome.output, "a healthy searcher was accused"
    assert seconds < 25


def test_a_rank_alone_in_its_world_is_told_what_to_try() -> None:
    alone = subprocess.run(
        [sys.executable, FAULTS, "wrong_size"], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert alone.returncode != 0
    assert "alone in its MPI world, but 4 ranks were expected" in alone.stdout
    assert re.search(r"srun --mpi=(pmix|pmi2)", alone.stdout)


def test_a_library_without_threads_is_refused() -> None:
    outcome, _ = world("describes_itself", MPI4PY_RC_THREAD_LEVEL="single")
    assert outcome.code != 0
    assert re.search(r"refused: this MPI library \(Open MPI .*use another one, or .*files", outcome.output)


def test_a_long_evaluation_is_no_fault() -> None:
    outcome, seconds = world("slow_evaluation")
    assert outcome.code == 0, outcome.output
    assert "patient" in outcome.output
    assert seconds > 14, "an evaluation of seven deadlines"


def test_a_stop_during_loads_ends_the_last_round() -> None:
    """Weights may not be overwritten while they are read: two old versions held for good would block it."""
    outcome, _ = world("stops_during_loads")
    assert outcome.code == 0 and "closed" in outcome.output, outcome.output


def test_the_end_of_a_run_waits_for_no_evaluation() -> None:
    outcome, _ = world("ends_during_evaluation")
    assert outcome.code == 0 and "closed after 0 s" in outcome.output, outcome.output


def test_many_buckets_between_nodes_where_mpi_numbers_searchers_first() -> None:
    outcome, _ = world("large_weights", **SEARCHERS_FIRST)
    assert outcome.code == 0, outcome.output
    for searcher in range(2):
        assert f"searcher {searcher} has version 2" in outcome.output


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [pytest.param({}, (0, 1, 2), marks=pytest.mark.nightly), (SEARCHERS_FIRST, (2, 0, 1))],
    ids=["trainer-first", "searchers-first"],
)
def test_every_rank_knows_its_place(environment: dict[str, str], numbers: tuple[int, ...]) -> None:
    """Its number is that of its role, whatever MPI's is."""
    outcome, _ = world("describes_itself", **environment)
    assert outcome.code == 0, outcome.output
    for line, number in zip(
        ("[0 trainer 0 local 0 1 host", "[1 searcher 0 local 1 1 host", "[2 searcher 1 local 2 1 host"),
        numbers,
        strict=True,
    ):
        assert f"{line} MPI {number}]" in outcome.output
