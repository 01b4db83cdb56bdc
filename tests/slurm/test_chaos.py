"""A short storm: every kind of fault at least once, over a run that ends with nothing lost.

The model is the enumerable one, which has no engines; ``make storm`` runs longer ones over a language model.
"""

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
    pytest.mark.timeout(1500),
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm cluster for tests: {missing()}"),
]

REPOSITORY = Path(__file__).parents[2]
FAULTS, SEED = 13, 14
"""A storm in which some of the faults strike while the ranks start."""


def test_a_run_survives_a_storm_of_every_kind_of_fault() -> None:
    options = ["--faults", str(FAULTS), "--seed", str(SEED), "--nodes", "2", "--tabular", "--json"]
    command = [sys.executable, "tools/chaos.py", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr
    *kinds, whole = json.loads(done.stdout)["faults"]
    assert len(kinds) == FAULTS and whole["struck"] == whole["survived"] == FAULTS
    run = json.loads(done.stdout)["run"]
    assert run["trajectories"] > 0 and run["lost"] == run["doubled"] == run["problems"] == 0
    assert run["in damaged shards"] > 0
    # How many steps that costs depends on how long the disk takes for a checkpoint, beside training.
    assert run["resumes from an older checkpoint than the newest whole one"] == 0
