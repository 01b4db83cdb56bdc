"""What tests of whole runs share."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A job in the background of a shell ignores Ctrl-C, and so would everything that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen a few problems, enough for real engines and a real trainer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tool = Path(__file__).parents[1] / "tools" / "make_tiny_model.py"
    subprocess.run([sys.executable, tool, "--steps", "60", "--out", folder], check=True, capture_output=True)
    return folder
