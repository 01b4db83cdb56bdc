"""A run on hosts that share a network and a folder alone, one of which loses its link.

``make storm`` has all faults of hosts, and real engines.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_testbed.hosts import missing

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slurm,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm cluster for tests: {missing()}"),
]
REPOSITORY = Path(__file__).parents[2]


def test_an_ordinary_users_run_on_hosts_survives_a_link_that_is_cut() -> None:
    """Two trainer ranks and two searchers, each on its own host; nothing acknowledged is lost."""
    faults = ["--faults", "1", "--kinds", "link cut"]
    nodes = ["--hosts", "--nodes", "4", "--trainer-nodes", "2"]
    command = [sys.executable, "tools/chaos.py", *faults, *nodes, "--tabular", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["survived"] for row in found["faults"]] == [1, 1]
    run = found["run"]
    assert run["trajectories"] > 0 and run["lost"] == run["doubled"] == run["problems"] == 0
