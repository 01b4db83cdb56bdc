"""Other users of the same machine: what a run opens to them, and what it needs that they may have taken.

The run trains an adapter: it is the one whole run that does.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.listeners import listeners
from tba_hpc.run.metrics import read_metrics

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TBA = Path(sys.executable).parent / "tba"
SETTINGS = [
    "train.steps=6",
    "buffer.initial_completions=64",
    "evaluate.validation_prompts=0",
    "evaluate.test_prompts=16",
    "launch.timeout_seconds=100",
    "launch.trainers=2",
    "launch.searchers=1",
    "model.lora={rank: 4}",
    "train.learning_rate.peak=5.0e-4",
]
SECRET = "hf_0123456789abcdefSECRET"
HEARD_SECONDS = 15.0
"""How long a port may be open to the network before it is deaf, on a busy machine; ranks live longer."""

CALLS, TOGETHER = 10_000, 500
"""Connections to every port, and how many of them at once: more than a process of the run has descriptors."""

FILES = 256
"""Descriptors that each process may have."""


def hears(address: str, port: int) -> bool:
    """Whether a stranger's call is taken, who leaves junk then."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    with suppress(OSError), socket.create_connection((host, port), timeout=0.5) as call:
        call.send(b"GET / HTTP/1.1\r\n" * 100)
        return True
    return False


def leave_junk(process: subprocess.Popen[str]) -> set[tuple[int, int]]:
    """At every port of every process of the run, of the loopback interface too; these."""
    found = set()
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            for _, address, port in listeners(child.pid, loopback=True):
                hears(address, port)
                found.add((child.pid, port))
    return found


def flood(process: subprocess.Popen[str]) -> int:
    """CALLS connections to every port of every process, which stay for a moment; how many ports."""
    ports = 0
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            for _, address, port in listeners(child.pid, loopback=True):
                ports += 1
                for _ in range(CALLS // TOGETHER):
                    with ExitStack() as calls:
                        for _ in range(TOGETHER):
                            call(address, port, calls)
    return ports


def call(address: str, port: int, until: ExitStack) -> None:
    """Ask for a connection, and do not wait for the answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    caller = until.enter_context(socket.socket(family))
    caller.setblocking(False)
    with suppress(OSError):
        caller.connect((address, port))


def few_files() -> None:
    """In the child, before it becomes the program."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@pytest.mark.nightly
def test_a_run_on_one_machine_is_deaf_to_the_network_and_needs_no_home(model: Path, tmp_path: Path) -> None:
    """Looked at while it runs: trainer ranks, searcher, engine and launcher all listen to something."""
    pairs = [f"model.path={model}", f"run.root={tmp_path}", *SETTINGS]
    words = [str(TBA), "run", "configs/quickstart.yaml", *(w for pair in pairs for w in ("--set", pair))]
    environment = {**os.environ, "HOME": "/proc/nobody", "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True, preexec_fn=few_files
    )
    heard: dict[tuple[int, str, int], float] = {}
    junk: set[tuple[int, int]] = set()
    flooded = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                for _, address, port in listeners(child.pid):
                    if hears(address, port):
                        first = heard.setdefault((child.pid, address, port), time.monotonic())
                        assert time.monotonic() - first < HEARD_SECONDS, (child.cmdline(), address, port)
        if (tmp_path / "quickstart-seed0/metrics/trainer.jsonl").exists():  # it is at work
            junk = junk or leave_junk(process)
            flooded = flooded or flood(process)
        time.sleep(0.2)
    out, err = process.communicate()
    run = RunDir.open(tmp_path / "quickstart-seed0")
    assert process.returncode == 0 and run.finished, out + err
    assert junk and flooded
    assert_trained_an_adapter(run, model)

    told = [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not told and SECRET not in out + err


def assert_trained_an_adapter(run: RunDir, model: Path) -> None:
    """That engines have it is what the evaluations' gaps say."""
    gaps = series(read_metrics(run.metrics_file("searcher", 0)), "search/engine_gap")
    assert gaps and max(gaps) < 1e-5
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.export))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in after if "_proj" in name}
    assert (run.export / "adapter" / "adapter_model.safetensors").is_file()
