"""`tba run` as a user types it: whole runs, stopped, killed, starved of disk, and resumed.

Everything is real but the model, which is the enumerable one: launcher, mpiexec, ranks, shards, checkpoints,
and the page in the end. ``test_engines.py`` has runs of language models.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tba_hpc.exchange.hdf5_shards import read_arrays
from tba_hpc.report.audit import audit
from tba_hpc.run.checkpoints import latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TBA = Path(sys.executable).parent / "tba"
CONFIG = ROOT / "tools" / "tabular.yaml"
NAME = "tabular-seed0"
STEPS, SAMPLES = 40, 12
START_SECONDS = 240
"""Longest wait for anything on a busy machine."""


@pytest.fixture(autouse=True)
def nothing_is_left_at_work() -> Iterator[None]:
    """A run that a failed test leaves behind would take the processor from all tests that come after."""
    yield
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if str(TBA) in child.cmdline():
                child.kill()
                child.wait()


def tba(*words: str | Path, folder: Path = ROOT) -> subprocess.Popen[str]:
    """Type a command; its output goes to pipes."""
    return subprocess.Popen(
        [TBA, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(root: Path, *settings: str, more: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a run, or go on with it."""
    pairs = [f"run.root={root}", *settings]
    return tba("run", CONFIG, *(word for pair in pairs for word in ("--set", pair)), *more)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    out, err = process.communicate(timeout=START_SECONDS)
    return process.returncode, out, err


def run_to_end(root: Path, *settings: str) -> RunDir:
    """A run that must finish; its directory."""
    code, out, err = finish(start(root, *settings))
    assert code == 0, out + err
    return RunDir.open(root / NAME)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until ``what`` holds; fails if the run ends before."""
    end = time.monotonic() + START_SECONDS
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.1)


def steps_done(root: Path, name: str = NAME) -> int:
    """Optimizer steps in the metrics so far."""
    return len(History.read(RunDir(root / name)).steps)


def ranks(process: subprocess.Popen[str], verb: str) -> list[psutil.Process]:
    """Processes of one role in an MPI world, in order."""
    children = psutil.Process(process.pid).children(recursive=True)
    numbered = {}
    for child in children:
        with suppress(psutil.NoSuchProcess):  # what an engine starts for a moment
            if verb in child.cmdline() and (rank := child.environ().get("OMPI_COMM_WORLD_RANK")):
                numbered[int(rank)] = child
    return [numbered[rank] for rank in sorted(numbered)]


def assert_whole(run: RunDir, steps: int = STEPS, samples: int = SAMPLES) -> None:
    """All steps once, nothing lost or doubled, results there."""
    records = History.read(run).steps
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    summary = json.loads(run.summary.read_text())
    assert summary["finished"] and summary["steps"] == steps
    assert 0 <= summary["pass_at_1_before"] <= 1 and 0 <= summary["pass_at_1_after"] <= 1
    assert summary["train_seconds"] > 0 and summary["trajectories"] > 0 and summary["tokens"] > 0

    folder, verdict = latest_checkpoint(run), audit(run)
    assert folder is not None and verdict.clean, verdict.problems
    done = np.unpackbits(read_arrays(folder / "prompts.h5")["done"]).sum()
    assert done * samples == verdict.merged  # a prompt done twice would count twice


def stop(process: subprocess.Popen[str]) -> str:
    """Ctrl-C, obeyed; what the launcher printed."""
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, out + err
    return out


def trainer_events(root: Path, name: str = NAME) -> list[object]:
    """Events in the trainer's metrics so far."""
    records = read_metrics(root / name / "metrics" / "trainer.jsonl")
    return [record["event"] for record in records if "event" in record]


def flip_a_bit(path: Path) -> None:
    """In the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_stopped_by_ctrl_c_damaged_and_resumed(tmp_path: Path) -> None:
    """While ranks start, while they train, and in the last evaluation; the newest checkpoint is damaged.

    The run is told late how long it is, and its searcher is held in the last evaluation, so that it is
    stopped where it should be: only once the last weights are sent, which waits for a searcher.
    """
    process = start(tmp_path, "train.steps=100000")
    wait_for(lambda: bool([*tmp_path.glob("*/logs/latest/trainer-0000.log")]), process)
    assert "nothing is lost" in stop(process)
    run = RunDir.open(tmp_path / NAME)
    assert latest_checkpoint(run) is None

    process = start(tmp_path, "train.steps=100000")
    wait_for(lambda: steps_done(tmp_path) >= 5, process)
    stop(process)
    folder = latest_checkpoint(run)
    assert folder is not None
    stopped_at = read_state(folder).step
    assert 5 <= stopped_at == steps_done(tmp_path)

    flip_a_bit(folder / "tabular.pt")
    (run.evaluations / "test-step-000000.json").unlink()  # as if it had been under way
    steps = stopped_at + 40
    length = f"train.steps={steps}"
    process = start(tmp_path, length)
    wait_for(lambda: steps_done(tmp_path) > stopped_at, process)
    (searcher,) = ranks(process, "search")
    wait_for(lambda: "finished" in trainer_events(tmp_path), process)
    searcher.suspend()  # its evaluation waits a second before each token
    process.send_signal(signal.SIGINT)
    with suppress(psutil.NoSuchProcess):  # mpiexec may have let it go on, and it is gone
        searcher.resume()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert not run.finished and trainer_events(tmp_path)[-1] == "stopped"
    assert "failed" not in [event["event"] for event in read_events(run)]
    assert f"stopped at step {steps}/{steps}; to resume: tba run {run.path}" in out
    assert (run.checkpoints / f"damaged-{folder.name}-1").is_dir()
    _, out, _ = finish(tba("status", run.path, "--once"))
    assert f"{folder.name}: tabular.pt is corrupt: its checksum does not match" in out

    code, out, err = finish(start(tmp_path, length))
    assert code == 0 and "1 × damaged checkpoint set aside" in out, out + err
    assert_whole(run, steps)
    events = trainer_events(tmp_path)
    assert "resumed" in events and events.count("damaged") == 1 and events[-1] == "finished"

    # A finished run is not run again; its page needs nothing from outside.
    code, out, _ = finish(start(tmp_path, length, more=["--json"]))
    told, summary = json.loads(out), json.loads(run.summary.read_text())
    # The searchers' last records come after the summary; these do not depend on them.
    lasting = ("finished", "steps", "pass_at_1_before", "pass_at_1_after")
    assert code == 0 and [told[name] for name in lasting] == [summary[name] for name in lasting]
    page = run.report.read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert oct(run.path.stat().st_mode & 0o777) == "0o700"


@pytest.mark.nightly
def test_a_finished_run_goes_on_to_more_steps_from_any_folder(tmp_path: Path) -> None:
    """What it came to is replaced when it ends again; the audit counts all steps as one run."""
    run = run_to_end(tmp_path)
    assert_whole(run)
    before = load_file(run.export / "model.safetensors")
    go_on = ["run", run.path.name, "--set", "train.steps=50", "--set", "checkpoint.every=3"]
    code, out, err = finish(tba(*go_on, "--dry-run", folder=tmp_path))
    sentence = (
        "resuming with train.steps=50 (was 40), checkpoint.every=3 (was 4); the learning rate (linear) "
        "now decays until step 50 instead of 40: at step 40 it is "
    )
    assert code == 0 and f"# {sentence}" in out and run.finished, out + err

    code, out, err = finish(tba(*go_on, folder=tmp_path))
    assert code == 0 and sentence in out and "resuming; the newest checkpoint is of step 40" in out, out + err
    assert_whole(run, 50)
    rates = [r["train/learning_rate"] for r in History.read(run).steps]
    assert rates[39] < rates[40] > rates[41]
    after = load_file(run.export / "model.safetensors")
    assert (after["logits"] != before["logits"]).any()
    assert sorted(path.name for path in run.history.iterdir()) == ["config-0001.yaml", "summary-0001.json"]
    kinds = [event["event"] for event in read_events(run)]
    assert kinds == ["start", "finished", "changed", "start", "finished"]

    code, _, err = finish(tba("run", run.path.name, "--set", "train.steps=49", folder=tmp_path))
    assert code == 2 and "train.steps=49 is less than the 50 steps that" in err, err


@pytest.mark.nightly
def test_started_twice_and_again_after_a_kill(tmp_path: Path) -> None:
    """The second is refused while the first goes on; what a SIGKILL leaves refuses nobody."""
    settings = ("train.steps=200", "exchange.transport=files")
    process = start(tmp_path, *settings)
    wait_for(lambda: steps_done(tmp_path) >= 2, process)
    run = RunDir.open(tmp_path / NAME)
    before = (run.attempt, run.config_file.read_bytes(), run.events_file.read_bytes())
    children = psutil.Process(process.pid).children(recursive=True)
    trainer = next(child for child in children if "train" in child.cmdline())
    trainer.suspend()  # it must not finish while others try to join

    code, out, err = finish(start(tmp_path, *settings, "launch.searchers=2"))
    assert code == 2, out + err
    assert f"{run.path} is already in use: process {process.pid} on {os.uname().nodename}, since 20" in err
    for index, sentence in (("0", "searcher-0000 of"), ("5", "--index 5 is no searcher of this run")):
        code, _, err = finish(tba("search", run.path, "--index", index))
        assert code == 2 and sentence in err, err
    assert (run.attempt, run.config_file.read_bytes(), run.events_file.read_bytes()) == before
    assert not [*run.attempt.glob("refused-*"), *run.attempt.glob("failed-*")]

    assert process.poll() is None, process.communicate()
    trainer.resume()
    process.kill()
    process.communicate()
    _, out, _ = finish(tba("status", run.path, "--once"))
    assert "killed at step" in out and re.search(rf"^next +tba run {run.path}$", out, re.MULTILINE)
    assert_whole(run_to_end(tmp_path, *settings), 200)


@pytest.mark.nightly
def test_ranks_are_killed_and_their_number_changes(tmp_path: Path) -> None:
    """Over MPI. Each start goes on where the one before ended, and after a death by itself."""
    process = start(tmp_path, "train.steps=80", "launch.trainers=2")
    wait_for(lambda: steps_done(tmp_path) >= 6, process)
    ranks(process, "train")[0].kill()
    run = RunDir.open(tmp_path / NAME)
    wait_for(lambda: len(list(run.logs.glob("attempt-*"))) == 2 and steps_done(tmp_path) >= 12, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0 and "restarting all ranks from the last checkpoint" in out, out + err
    # By whoever noticed first, amidst whatever they did together.
    assert re.search(r"trainer-0000 was ended by SIGKILL|trainer rank 0,? has died", err), out + err

    process = start(tmp_path, "train.steps=80", "launch.trainers=1", "launch.searchers=2")
    wait_for(lambda: steps_done(tmp_path) >= 30, process)
    ranks(process, "search")[-1].kill()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert_whole(run, 80)
    ends = [event["event"] for event in read_events(run)]
    ends = [event for event in ends if event in ("failed", "stopped", "finished")]
    assert ends == ["failed", "stopped", "failed", "finished"]
    assert json.loads(run.summary.read_text())["test_prompts"] == 4


@pytest.mark.nightly
def test_searchers_come_and_go_while_a_run_trains(tmp_path: Path) -> None:
    """One of its own, in its MPI world; others over files: told to go, killed, there over a restart.

    How soon searchers start is not the test's to say: they share the machine with other tests. So the run is
    told late how long it is.
    """
    process = start(tmp_path, "train.steps=100000", "launch.elastic=2")
    wait_for(lambda: bool([*tmp_path.glob("*/logs/latest/trainer-0000.log")]), process)
    run = RunDir.open(tmp_path / NAME)

    def join() -> subprocess.Popen[str]:
        return tba("search", run.path)

    def left(searcher: int) -> bool:
        records = read_metrics(run.metrics_file("searcher", searcher))
        return any(record.get("event") == "left" for record in records)

    def merged() -> set[object]:
        records = read_metrics(run.metrics_file("trainer"))
        return {record["searcher"] for record in records if record.get("event") == "merged"}

    first = join()  # before there is a trainer
    wait_for(lambda: any(run.owners.glob("searcher-5000.*")), process)
    second = join()
    wait_for(lambda: any(run.owners.glob("searcher-5001.*")), process)
    code, out, err = finish(join())
    assert code == 3 and "all slots of" in out + err, out + err
    wait_for(lambda: merged() >= {0, 5000, 5001}, process)
    first.send_signal(signal.SIGUSR2)  # asks where it is, and ends nothing
    first.send_signal(signal.SIGUSR1)
    code, out, err = finish(first)
    assert code == 0 and "leaving: stopped" in out + err and left(5000), out + err
    assert 'runtime.py", line' in err and "in _stay" in err, err
    second.kill()
    second.communicate()
    last = join()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, out + err
    steps = steps_done(tmp_path) + 4
    code, out, err = finish(start(tmp_path, f"train.steps={steps}", "launch.elastic=2"))
    assert code == 0, out + err
    code, out, err = finish(last)
    assert code == 0 and "finished" in out + err, out + err
    assert_whole(run, steps)
    assert not [*run.logs.glob("*/refused-*"), *run.logs.glob("*/failed-*")]
    code, out, err = finish(join())
    assert code == 0 and "is finished: no searcher is needed" in out + err


def test_a_stop_that_waits_returns_after_the_runs_last_line(tmp_path: Path) -> None:
    process = start(tmp_path, "train.steps=100000")
    wait_for(lambda: steps_done(tmp_path) >= 2, process)
    code, out, err = finish(tba("stop", tmp_path / NAME, "--wait", "60"))
    assert code == 0 and "has ended: stopped at step" in out, out + err
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    assert f"; to resume: tba run {tmp_path / NAME}\n" in os.read(process.stdout.fileno(), 1 << 16).decode()
    process.wait(START_SECONDS)


SLOW_TO_LOAD = """
import time
from pathlib import Path
from lab.tabular import Unhurried

class Model(Unhurried):
    def learner(self, **given):
        learner = super().learner(**given)
        load = learner.load
        def slowly(folder):
            mark = Path("{mark}")
            if not mark.exists():
                mark.touch()
                time.sleep(120)
            load(folder)
        learner.load = slowly
        return learner
"""
"""A model of one's own, whose first checkpoint takes two minutes to load."""


@pytest.mark.parametrize("transport", ["mpi", "files"])
def test_a_stop_while_a_checkpoint_is_loaded_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    (tmp_path / "own.yaml").write_text(CONFIG.read_text())
    (tmp_path / "late.py").write_text(SLOW_TO_LOAD.format(mark=tmp_path / "loading"))
    settings = [f"run.root={tmp_path}", f"exchange.transport={transport}", "model.path=late:Model"]
    command = ["run", tmp_path / "own.yaml", *(word for one in settings for word in ("--set", one))]
    process = tba(*command)
    wait_for(lambda: steps_done(tmp_path) >= 6, process)
    stop(process)
    process = tba(*command)
    wait_for((tmp_path / "loading").exists, process)
    assert "nothing was trained, nothing is lost" in " ".join(stop(process).split())
    run = RunDir.open(tmp_path / NAME)
    assert [event["event"] for event in read_events(run)] == ["start", "signal", "stopped"] * 2
    code, out, err = finish(tba(*command))
    assert code == 0, out + err
    assert_whole(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container does not let root mount a file system: run it privileged")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root("mounting a small file system")
def test_a_full_disk_stops_cleanly_and_the_run_goes_on_later(small_disk: Path) -> None:
    process = start(small_disk)
    wait_for(lambda: steps_done(small_disk) >= 5, process)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(b"\0" * 4096)
    code, out, err = finish(process)
    assert code == 2 and "free space or raise the quota" in err and "Traceback" not in err, out + err
    assert "the disk is full, and each rank waits for space for up to " in out, out
    (small_disk / "ballast").unlink()
    assert_whole(run_to_end(small_disk))
