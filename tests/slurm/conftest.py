"""The cluster, up once for all tests, and as it was again before each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_testbed import hosts
from slurm_testbed.cluster import Cluster, missing
from slurm_testbed.hosts import Hosts

HOSTS = os.environ.get("TESTBED") == "hosts"
"""Whether the nodes share a network and a folder alone: TESTBED=hosts pytest tests/slurm."""


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if reason := hosts.missing() if HOSTS else missing():
        pytest.skip(f"no Slurm cluster for tests: {reason}")
    with Hosts(user="root") if HOSTS else Cluster() as cluster:
        yield cluster


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """On hosts, in the folder that they share."""
    if not HOSTS:
        return tmp_path
    return Path(tempfile.mkdtemp(dir=request.getfixturevalue("running_cluster").share))


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Six idle nodes; commands started by the test speak to them."""
    for name, value in running_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield running_cluster
    running_cluster.heal()


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the MPICH wheel's libraries, installed aside; mpi4py is told to load them."""
    folder = tmp_path_factory.mktemp("mpich")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    command = ["pip", "--python", f"{folder}/bin/python", "install", "--quiet", "mpich==5.0.2"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"the mpich wheel cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "lib"
