"""What tests share: how they are spread over workers, and a model for whole runs."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# A job in the background of a shell ignores Ctrl-C, and so would everything that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# --- Several workers: make test ---

LONGEST_FIRST = (
    "tests/slurm/test_chaos.py",
    "tests/slurm/test_training.py",
    "tests/slurm/test_submit.py",  # waits, while others compute
    "tests/system/test_run.py",
    "tests/test_vllm_generator.py",
    "tests/test_tiny_model.py",
    "tests/test_deepspeed_learner.py",
    "tests/test_lora.py",
    "tests/mpi",
    "tests/test_local_launch.py",
    "tests/test_references.py",
)
"""Files in the order in which they start: in the end no worker waits long for another."""

ONE_AFTER_THE_OTHER = (
    "tests/slurm/test_cluster.py",
    "tests/slurm/test_doctor.py",
    "tests/slurm/test_status.py",
)
"""Short files that share a cluster, which takes longer to bring up than some of them run."""

EACH_BY_ITSELF = "tests/system/test_run.py"
"""Long tests that share nothing; those of any other file share what its fixtures have made."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    found = (i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
    return next(found, len(LONGEST_FIRST))


class Scheduling(LoadScopeScheduling):
    """A worker gets a file, or a single test where each goes by itself, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ONE_AFTER_THE_OTHER):
            return ONE_AFTER_THE_OTHER[0]
        return nodeid if nodeid.startswith(EACH_BY_ITSELF) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    config.option.loadscopereorder = False
    return Scheduling(config, log)


# --- Fixtures ---


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen a few problems, enough for real engines and a real trainer; made once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "models" / "tiny"
    tool = Path(__file__).parents[1] / "tools" / "make_tiny_model.py"
    with (shared / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The tool makes nothing where the model is there already.
        subprocess.run(
            [sys.executable, tool, "--steps", "60", "--out", folder], check=True, capture_output=True
        )
    return folder
