"""The cluster, up once for all tests, and as it was again before each."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_testbed.cluster import Cluster, missing


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no Slurm cluster for tests: {reason}")
    with Cluster() as cluster:
        yield cluster


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
