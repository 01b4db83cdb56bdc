"""Elastic nodes come and go while a run trains; ``make storm`` goes on for longer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_testbed.cluster import missing

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slurm,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm cluster for tests: {missing()}"),
]
REPOSITORY = Path(__file__).parents[2]


def test_elastic_nodes_come_and_go_and_nothing_is_lost() -> None:
    often = ["--counts", "1", "0", "2", "--minutes", "1", "--pause", "8", "15"]
    command = [sys.executable, "tools/churn.py", *often, "--tabular", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["problems"], row["lost"], row["doubled"]) == (0, 0, 0)
    assert row["changes"] >= 4 and row["starts"] >= 2
    assert row["joined"] >= 1 and row["shards"] >= 1
