"""One suite for both ends of the exchange, over every transport, in real processes."""

from pathlib import Path

import pytest
from mpi.launch import run_processes, run_world

from contracts.exchange_program import SCENARIOS, SEARCHERS, TRAINERS

PROGRAM = Path(__file__).with_name("exchange_program.py")


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("transport", TRAINERS)
def test_contract(transport: str, scenario: str, tmp_path: Path) -> None:
    ranks = TRAINERS[transport] + SEARCHERS
    arguments = [PROGRAM, transport, scenario, tmp_path]
    if transport.startswith("mpi"):
        outcome = run_world(ranks, arguments)
    else:
        outcome = run_processes([[*arguments, str(rank)] for rank in range(ranks)])
    assert outcome.code == 0, outcome.output
