"""Short storms, of every kind of fault and of elastic nodes that come and go: the runs end with nothing lost.

The model is the enumerable one, which has no engines; ``make storm`` runs longer ones over a language model.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_testbed import hosts
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


def told(tool: str, options: str) -> dict[str, Any]:
    """What a storm has printed."""
    command = [sys.executable, f"tools/{tool}.py", *shlex.split(options), "--tabular", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_survives_a_storm_of_every_kind_of_fault() -> None:
    found = told("chaos", f"--faults {FAULTS} --seed {SEED} --nodes 2")
    *kinds, whole = found["faults"]
    assert len(kinds) == FAULTS and whole["struck"] == whole["survived"] == FAULTS
    run = found["run"]
    assert run["trajectories"] > 0 and run["lost"] == run["doubled"] == run["problems"] == 0
    assert run["in damaged shards"] > 0
    # How many steps that costs depends on how long the disk takes for a checkpoint, beside training.
    assert run["resumes from an older checkpoint than the newest whole one"] == 0


@pytest.mark.skipif(hosts.missing() is not None, reason=f"no hosts for tests: {hosts.missing()}")
def test_a_run_survives_a_host_that_freezes_and_one_that_loses_its_link() -> None:
    found = told("chaos", "--hosts --faults 2 --kinds 'host frozen' 'link cut' --seed 3")
    *kinds, whole = found["faults"]
    assert len(kinds) == whole["struck"] == whole["survived"] == 2
    run = found["run"]
    assert run["trajectories"] > 0 and run["lost"] == run["doubled"] == run["problems"] == 0


def test_elastic_nodes_come_and_go_and_nothing_is_lost() -> None:
    row = told("churn", "--counts 1 0 2 --minutes 1 --pause 8 15")
    assert (row["problems"], row["lost"], row["doubled"]) == (0, 0, 0)
    assert row["changes"] >= 4 and row["starts"] >= 2
    assert row["joined"] >= 1 and row["shards"] >= 1
