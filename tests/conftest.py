"""What tests share: how they are spread over workers, and a model for whole runs."""

import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# As the launchers have it for every rank; two threads on tiny tensors mostly wait for each other, busily.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests submit runs of several nodes into temporary folders, which many machines have in memory.
os.environ["TBA_NODES_SHARE_TMPFS"] = "1"

# readline, which pytest imports, exports a width of 80 to workers, at which commands wrap lines.
os.environ.pop("COLUMNS", None)

# A job in the background of a shell ignores Ctrl-C, and so would everything that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: what they import stays, and looking through it takes seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# --- Several workers: make test ---

EACH_BY_ITSELF = ("tests/system/", "tests/slurm/")
"""Tests that share nothing but a cluster, of which each worker has its own."""

TOGETHER = ("tests/slurm/test_cluster.py", "tests/slurm/test_status.py")
"""Files whose tests are shorter than the start of a cluster."""

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that each scope took, for those that take over NOTED_SECONDS: the longest starts first.

In the end no worker then waits long for another. To record them anew: ``make test TESTS=--record-durations``
and ``make nightly TESTS=--record-durations``.
"""

NOTED_SECONDS = 5.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _mark_root(item)
        _mark_nightly(item)
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(_scope(item.nodeid), 0.0))
        items[:] = _interleaved(items)


def _mark_root(item: pytest.Item) -> None:
    """Skip what an ordinary user cannot run: ``pytest -m root`` as root runs that, and only that."""
    if item.get_closest_marker("slurm"):
        item.add_marker(pytest.mark.root("bringing up a Slurm cluster"))
    if (root := item.get_closest_marker("root")) and os.geteuid():
        item.add_marker(pytest.mark.skip(reason=f"needs root, for {root.args[0]}: pytest -m root"))


def _interleaved(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that wait for Slurm spread evenly among those that compute, both in their order.

    But for the last of those that compute: at the end nobody is to wait while the processor is idle.
    """
    scopes = list(dict.fromkeys(_scope(item.nodeid) for item in items))
    place: dict[str, float] = {}
    for waiting, end in ((True, 0.8), (False, 1.0)):
        alike = [scope for scope in scopes if scope.startswith("tests/slurm/") is waiting]
        place |= {scope: i / len(alike) * end for i, scope in enumerate(alike)}
    return sorted(items, key=lambda item: place[_scope(item.nodeid)])


def _scope(nodeid: str) -> str:
    """What a worker gets at once: a file, or a single test."""
    if nodeid.startswith(TOGETHER):
        return TOGETHER[0]
    return nodeid if nodeid.startswith(EACH_BY_ITSELF) else nodeid.split("::")[0]


class Scheduling(LoadScopeScheduling):
    """Hands out scopes in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


# --- Tests of make nightly ---

NIGHTLY = (
    "tests/slurm/test_storms.py",
    "tests/test_experiments.py",
    "tests/test_frozen_runs.py",
    "tests/test_gpu_tools.py",
    "tests/test_lockstep_model.py",
    "tests/test_storm_history.py",
    "tests/test_tiny_model.py",
    "tests/test_vllm_generator.py::test_models_of_other_families_follow_their_training[gpt",
)
"""Beginnings of the names of nightly tests: developers' tools, storms, long repetitions.

Other nightly tests have the mark itself: whole runs that are killed in more ways, and of a test that starts
engines, ranks or runs the settings and seeds that go through no more code.
"""


def _mark_nightly(item: pytest.Item) -> None:
    if item.nodeid.startswith(NIGHTLY):
        item.add_marker(pytest.mark.nightly)


AT_ONCE = 4
"""Tests at a time that compute, and as many that mostly wait for Slurm's daemons."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for a turn, outside of the test's timeout."""
    inputs = getattr(item.config, "workerinput", None)
    if inputs is None:
        return (yield)
    kind = "waiting" if item.get_closest_marker("slurm") else "computing"
    with _turn(f"{inputs['testrunuid']}-{kind}"):
        return (yield)


@contextmanager
def _turn(name: str) -> Iterator[None]:
    """One of AT_ONCE sockets of this name, which is free again whatever ends this worker."""
    with socket.socket(socket.AF_UNIX) as holder:
        number = 0
        while True:
            try:
                holder.bind(f"\0tba-tests-{name}-{number}")
                break
            except OSError:
                number = (number + 1) % AT_ONCE
                time.sleep(0.02)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")


_taken: Counter[str] = Counter()
"""Seconds of this run by scope, as the process knows them to which all workers report."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _taken[_scope(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace what is noted of the scopes that have run; others keep their place in the order."""
    if session.config.getoption("record_durations") and not hasattr(session.config, "workerinput"):
        noted = {k: v for k, v in json.loads(DURATIONS.read_text()).items() if k not in _taken}
        noted |= {k: round(v) for k, v in _taken.items() if v > NOTED_SECONDS}
        DURATIONS.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    config.option.loadscopereorder = False
    return Scheduling(config, log)


# --- Fixtures ---


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """A signal that a test leaves ignored would be ignored by every process that later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_code_ends_with_its_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Another test's module may have the same name; and a folder on the path stays while the process does."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, temporary = {*sys.modules}, str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(temporary):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def notes_of_servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tell fork_server.py where all workers find the servers of processes that one of them has started."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["TBA_TEST_FORKS"] = str(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen a few problems, enough for real engines and a real trainer; made once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "models" / "tiny"
    tool = Path(__file__).parents[1] / "tools" / "make_tiny_model.py"
    with (shared / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The tool makes nothing if the model is there already.
        subprocess.run(
            [sys.executable, tool, "--steps", "60", "--out", folder], check=True, capture_output=True
        )
    return folder
