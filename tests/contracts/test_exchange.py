"""One suite for both ends of the exchange, over every transport, in real processes."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from mpi.launch import run_processes, run_world

from contracts.exchange_program import BESIDE_A_WORLD, BOTH, SCENARIOS, SEARCHERS, TRAINERS

PROGRAM = Path(__file__).with_name("exchange_program.py")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory):
    """What the processes of a transport printed; they go through all scenarios in one start."""

    @cache
    def run(transport: str) -> str:
        ranks = TRAINERS.get(transport, 1) + SEARCHERS
        arguments = [PROGRAM, transport, tmp_path_factory.mktemp(transport)]
        if transport == BOTH:
            with ThreadPoolExecutor(1) as beside:
                visitor = beside.submit(run_processes, [[*arguments, "2"]], timeout=180)
                return run_world(2, arguments, timeout=180).output + visitor.result().output
        if transport.startswith("mpi"):
            return run_world(ranks, arguments, timeout=180).output
        return run_processes([[*arguments, str(rank)] for rank in range(ranks)], timeout=180).output

    return run


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("transport", TRAINERS)
def test_contract(transport: str, scenario: str, output) -> None:
    text = output(transport)
    for rank in range(TRAINERS[transport] + SEARCHERS):
        assert f"{scenario} holds at rank {rank}" in text, text


@pytest.mark.mpi
@pytest.mark.parametrize("scenario", BESIDE_A_WORLD)
def test_contract_with_searchers_of_both_kinds(scenario: str, output) -> None:
    text = output(BOTH)
    for rank in range(1 + SEARCHERS):
        assert f"{scenario} holds at rank {rank}" in text, text
