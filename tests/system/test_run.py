"""`tba run` as a user types it: whole runs of the main job, stopped, killed, starved of disk, and resumed.

Every test starts the real thing: mpiexec, vLLM engines, a DeepSpeed trainer, on a tiny model taught in
seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.exchange.hdf5_shards import read_arrays
from tba_hpc.report.audit import audit
from tba_hpc.run.checkpoints import latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.metrics import read_metrics, step_records

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TBA = Path(sys.executable).parent / "tba"
SAMPLES = 20
SETTINGS = [
    "train.steps=16",
    "checkpoint.every=4",
    "buffer.initial_completions=64",
    f"generator.completions_per_prompt={SAMPLES}",
    "evaluate.every=5",
    "evaluate.validation_prompts=16",
    "evaluate.test_prompts=64",
    "launch.timeout_seconds=100",
    "launch.searchers=1",  # two processes that each start takes less; some tests need more
]
START_SECONDS = 240
"""Longest wait for engines on a busy machine."""


@pytest.fixture(autouse=True)
def nothing_is_left_at_work() -> Iterator[None]:
    """A run that a failed test leaves behind would take the processor from all tests that come after."""
    yield
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if str(TBA) in child.cmdline():
                child.kill()
                child.wait()


def command(model: Path, root: Path, *settings: str) -> list[str]:
    """``tba run`` with everything set."""
    pairs = [f"model.path={model}", f"run.root={root}", *SETTINGS, *settings]
    return [str(TBA), "run", "configs/quickstart.yaml", *(word for pair in pairs for word in ("--set", pair))]


def start(model: Path, root: Path, *settings: str) -> subprocess.Popen[str]:
    """Start a run; its output goes to pipes."""
    return subprocess.Popen(
        command(model, root, *settings), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    out, err = process.communicate(timeout=START_SECONDS)
    return process.returncode, out, err


def run_to_end(model: Path, root: Path, *settings: str) -> RunDir:
    """A run that must finish; its directory."""
    code, out, err = finish(start(model, root, *settings))
    assert code == 0, out + err
    return RunDir.open(root / "quickstart-seed0")


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until ``what`` holds; fails where the run ends before."""
    end = time.monotonic() + START_SECONDS
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.1)


def steps_done(root: Path) -> int:
    """Optimizer steps in the metrics so far."""
    return len(step_records(read_metrics(root / "quickstart-seed0" / "metrics" / "trainer.jsonl")))


def ranks(process: subprocess.Popen[str], verb: str) -> list[psutil.Process]:
    """Processes of one role in an MPI world, in order."""
    children = psutil.Process(process.pid).children(recursive=True)
    numbered = {}
    for child in children:
        with suppress(psutil.NoSuchProcess):  # what an engine starts for a moment
            if verb in child.cmdline() and (rank := child.environ().get("OMPI_COMM_WORLD_RANK")):
                numbered[int(rank)] = child
    return [numbered[rank] for rank in sorted(numbered)]


def assert_whole(run: RunDir, steps: int = 16) -> None:
    """All steps once, nothing lost or doubled, results there."""
    records = step_records(read_metrics(run.metrics_file("trainer")))
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    summary = json.loads(run.summary.read_text())
    assert summary["finished"] and summary["steps"] == steps
    assert 0 <= summary["pass_at_1_before"] <= 1 and 0 <= summary["pass_at_1_after"] <= 1
    assert summary["train_seconds"] > 0 and summary["trajectories"] > 0 and summary["tokens"] > 0

    folder, verdict = latest_checkpoint(run), audit(run)
    assert folder is not None and verdict.clean, verdict.problems
    done = np.unpackbits(read_arrays(folder / "prompts.h5")["done"]).sum()
    assert done * SAMPLES == verdict.merged  # a prompt done twice would count twice


def stop(process: subprocess.Popen[str]) -> str:
    """Ctrl-C, obeyed soon; what the launcher printed."""
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert time.monotonic() - asked < 30
    return out


def trainer_events(root: Path) -> list[object]:
    """Events in the trainer's metrics so far."""
    records = read_metrics(root / "quickstart-seed0" / "metrics" / "trainer.jsonl")
    return [record["event"] for record in records if "event" in record]


def test_stopped_by_ctrl_c_and_resumed(model: Path, tmp_path: Path) -> None:
    """While the ranks start, while they train, and in the last evaluation."""
    settings = ("evaluate.test_prompts=256",)
    process = start(model, tmp_path, *settings)
    wait_for(lambda: bool([*tmp_path.glob("*/logs/latest/trainer-0000.log")]), process)
    assert "nothing is lost" in stop(process)
    run = RunDir.open(tmp_path / "quickstart-seed0")
    assert latest_checkpoint(run) is None

    process = start(model, tmp_path, *settings)
    wait_for(lambda: steps_done(tmp_path) >= 5, process)
    stop(process)
    folder = latest_checkpoint(run)
    assert folder is not None
    stopped_at = read_state(folder).step
    assert 5 <= stopped_at == steps_done(tmp_path) < 16

    (run.evaluations / "test-step-000000.json").unlink()  # as if it had been under way
    process = start(model, tmp_path, *settings)
    wait_for(lambda: "finished" in trainer_events(tmp_path), process)
    stop(process)
    assert not run.finished and trainer_events(tmp_path)[-1] == "stopped"

    assert_whole(run_to_end(model, tmp_path, *settings))
    assert "resumed" in trainer_events(tmp_path) and trainer_events(tmp_path)[-1] == "finished"

    # A finished run is not run again; its model loads; its page needs nothing from outside.
    again = [*command(model, tmp_path, *settings), "--json"]
    code, out, _ = finish(subprocess.Popen(again, cwd=ROOT, stdout=-1, stderr=-1, text=True))
    told, summary = json.loads(out), json.loads(run.summary.read_text())
    # The searchers' last records come after the summary; these do not depend on them.
    lasting = ("finished", "steps", "pass_at_1_before", "pass_at_1_after")
    assert code == 0 and [told[name] for name in lasting] == [summary[name] for name in lasting]
    policy = AutoModelForCausalLM.from_pretrained(run.export)
    assert AutoTokenizer.from_pretrained(run.export).eos_token_id is not None
    old = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(tensor, old[name]) for name, tensor in policy.state_dict().items())
    page = run.report.read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert oct(run.path.stat().st_mode & 0o777) == "0o700"


def test_a_finished_run_goes_on_to_more_steps_from_any_folder(model: Path, tmp_path: Path) -> None:
    """What it came to is replaced when it ends again; the audit counts all steps as one run."""
    run = run_to_end(model, tmp_path)
    assert_whole(run)
    before = load_file(run.export / "model.safetensors")
    longer = ["--set", "train.steps=20", "--set", "checkpoint.every=3"]
    go_on = [TBA, "run", run.path.name, *longer]
    looked = subprocess.run([*go_on, "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    sentence = (
        "going on with train.steps=20 (was 16), checkpoint.every=3 (was 4); the learning rate (linear) is "
        "laid out for 20 steps from here on, no more for 16: at step 16 it is "
    )
    assert looked.returncode == 0 and f"# {sentence}" in looked.stdout and run.finished, looked

    code, out, err = finish(subprocess.Popen(go_on, cwd=tmp_path, stdout=-1, stderr=-1, text=True))
    assert code == 0 and sentence in out, out + err
    assert_whole(run, 20)
    rates = [r["train/learning_rate"] for r in step_records(read_metrics(run.metrics_file("trainer")))]
    assert rates[15] < rates[16] > rates[17]
    after = load_file(run.export / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert sorted(path.name for path in run.history.iterdir()) == ["config-0001.yaml", "summary-0001.json"]
    kinds = [event["event"] for event in read_events(run)]
    assert kinds == ["start", "finished", "changed", "start", "finished"]

    behind = [*go_on[:3], "--set", "train.steps=19"]
    refused = subprocess.run(behind, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "train.steps=19 lies behind step 20, which" in refused.stderr, refused


def test_a_damaged_checkpoint_is_told_and_the_same_command_goes_on(model: Path, tmp_path: Path) -> None:
    """A bit of the optimizer's state, which DeepSpeed would load in silence."""
    process = start(model, tmp_path)
    wait_for(lambda: steps_done(tmp_path) >= 6, process)
    stop(process)
    run = RunDir.open(tmp_path / "quickstart-seed0")
    newest = latest_checkpoint(run)
    assert newest is not None
    (optimizer,) = newest.glob("zero/*optim_states.pt")
    data = bytearray(optimizer.read_bytes())
    data[len(data) // 2] ^= 1
    optimizer.write_bytes(data)

    code, out, err = finish(start(model, tmp_path))
    assert code == 0 and "1 × damaged checkpoint set aside" in out, out + err
    assert_whole(run)
    assert trainer_events(tmp_path).count("damaged") == 1
    assert (run.checkpoints / f"damaged-{newest.name}-1").is_dir()
    told = subprocess.run([TBA, "status", run.path, "--once"], capture_output=True, text=True)
    assert f"{newest.name}: zero/{optimizer.name} is corrupt: its checksum does not match" in told.stdout


def test_over_files_with_two_trainer_ranks_that_share_all_out(model: Path, tmp_path: Path) -> None:
    """What a large model needs: ZeRO-3, the optimizer in host memory, micro-batches by tokens."""
    large = (
        "train.zero_stage=3",
        "train.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",
        "train.tokens_per_micro_batch=512",
        "train.gradient_checkpointing=true",
    )
    run = run_to_end(model, tmp_path, "exchange.transport=files", "launch.trainers=2", *large)
    assert_whole(run)
    steps = step_records(read_metrics(run.metrics_file("trainer")))
    assert all(float(str(record["train/skipped_steps"])) == 0 for record in steps)


def test_over_files_that_hold_what_has_changed(model: Path, tmp_path: Path) -> None:
    """bfloat16 at a small rate; the engine dies amid changes, and the next one gets the weights due."""
    settings = ("exchange.transport=files", "exchange.delta=always", "model.dtype=bfloat16", "train.steps=40")
    process = start(model, tmp_path, *settings, "train.learning_rate.peak=1e-6", "evaluate.every=30")
    run = RunDir(tmp_path / "quickstart-seed0")
    wait_for(lambda: any(run.weights.glob("*.changes")) and steps_done(tmp_path) > 4, process)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "tba_hpc.engine.engine_process" in child.cmdline()
    ]
    engine.kill()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert_whole(run, steps=40)
    records = read_metrics(run.metrics_file("searcher", 0))
    assert max(record.get("search/rebuilds", 0) for record in records) == 1
    assert max(record.get("search/version", 0) for record in records) == 40


def test_an_adapter_is_trained_killed_and_goes_on_upon_its_base_alone(model: Path, tmp_path: Path) -> None:
    """LoRA all through, over files; that engines have the adapter is what the evaluations' gaps say."""
    base = Path(shutil.copytree(model, tmp_path / "model"))
    settings = ("model.lora={rank: 4}", "train.learning_rate.peak=5.0e-4", "exchange.transport=files")
    process = start(base, tmp_path, *settings)
    wait_for(lambda: steps_done(tmp_path) >= 6, process)
    process.kill()
    process.communicate()
    run = run_to_end(base, tmp_path, *settings)
    assert_whole(run)
    assert "resumed" in trainer_events(tmp_path)

    records = read_metrics(run.metrics_file("searcher", 0))
    gaps = [float(str(record["search/engine_gap"])) for record in records if "search/engine_gap" in record]
    assert gaps and max(gaps) < 1e-5
    before, after = (load_file(folder / "model.safetensors") for folder in (base, run.export))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in after if "_proj" in name}
    assert (run.export / "adapter" / "adapter_model.safetensors").is_file()

    another = {name: 1.01 * tensor for name, tensor in before.items()}
    save_file(another, base / "model.safetensors", {"format": "pt"})
    code, out, err = finish(start(base, tmp_path, *settings, "train.steps=20"))
    assert code == 2 and "holds an adapter for other weights than those of model.path=" in err, out + err


def test_the_trainer_scores_the_reference_and_searchers_hold_none(model: Path, tmp_path: Path) -> None:
    """At step 1 policy and reference are the same weights, so that the log-ratio is 0."""
    run = run_to_end(model, tmp_path, "train.reference.scored_by=trainer", "exchange.sync_every=1")
    assert_whole(run)
    steps = step_records(read_metrics(run.metrics_file("trainer")))
    first, last = steps[0], steps[-1]
    assert float(str(first["time/reference_seconds"])) > 0
    assert abs(float(str(first["train/log_ratio"]))) < 1e-5 < abs(float(str(last["train/log_ratio"])))
    assert all(float(str(record["train/skipped_steps"])) == 0 for record in steps)
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert not any({"search/kl", "search/engine_gap"} & record.keys() for record in searched)


def test_started_twice_and_again_after_a_kill(model: Path, tmp_path: Path) -> None:
    """The second is refused while the first goes on; what a SIGKILL leaves refuses nobody."""
    settings = ("train.steps=40", "exchange.transport=files")
    process = start(model, tmp_path, *settings)
    wait_for(lambda: steps_done(tmp_path) >= 2, process)
    run = RunDir.open(tmp_path / "quickstart-seed0")
    before = (run.attempt, run.config_file.read_bytes(), run.events_file.read_bytes())

    asked = time.monotonic()
    code, out, err = finish(start(model, tmp_path, *settings, "launch.searchers=2"))
    assert code == 2 and time.monotonic() - asked < 20, out + err
    assert f"{run.path} is at work already: process {process.pid} on {os.uname().nodename}, since 20" in err
    for index, sentence in (("0", "searcher-0000 of"), ("5", "--index 5 is no searcher of this run")):
        search = [str(TBA), "search", str(run.path), "--index", index]
        done = subprocess.run(search, capture_output=True, text=True, timeout=START_SECONDS)
        assert done.returncode == 2 and sentence in done.stderr, done
    assert (run.attempt, run.config_file.read_bytes(), run.events_file.read_bytes()) == before
    assert not [*run.attempt.glob("refused-*"), *run.attempt.glob("failed-*")]

    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    assert_whole(run_to_end(model, tmp_path, *settings), 40)


def test_ranks_are_killed_and_their_number_changes(model: Path, tmp_path: Path) -> None:
    """Over MPI. Each start goes on where the one before ended, and after a death by itself."""
    two_trainers = ("train.steps=24", "launch.trainers=2")
    process = start(model, tmp_path, *two_trainers)
    wait_for(lambda: steps_done(tmp_path) >= 3, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0, out + err

    process = start(model, tmp_path, *two_trainers)
    wait_for(lambda: steps_done(tmp_path) >= 8, process)
    ranks(process, "train")[0].kill()
    run = RunDir.open(tmp_path / "quickstart-seed0")
    wait_for(lambda: len(list(run.logs.glob("attempt-*"))) == 3 and steps_done(tmp_path) >= 10, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0 and "starting all ranks again, from the last checkpoint" in out, out + err
    # By whoever noticed first, amidst whatever they did together.
    assert re.search(r"trainer-0000 was ended by SIGKILL|trainer rank 0,? has died", err), out + err

    process = start(model, tmp_path, "train.steps=24", "launch.trainers=1", "launch.searchers=2")
    wait_for(lambda: steps_done(tmp_path) >= 14, process)
    ranks(process, "search")[-1].kill()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert_whole(run, 24)
    ends = [
        event["event"] for event in read_events(run) if event["event"] in ("failed", "stopped", "finished")
    ]
    assert ends == ["stopped", "failed", "stopped", "failed", "finished"]
    assert json.loads(run.summary.read_text())["test_prompts"] == 64


def test_searchers_come_and_go_while_a_run_trains(model: Path, tmp_path: Path) -> None:
    """One of its own, in its MPI world; others over files: told to go, killed, there over a restart.

    How long engines take to start, or to end what they generate, is not the test's to say: four of them share
    the machine with other tests. So the run is told late how long it is.
    """
    process = start(model, tmp_path, "train.steps=100000", "launch.elastic=2")
    wait_for(lambda: bool([*tmp_path.glob("*/logs/latest/trainer-0000.log")]), process)
    run = RunDir.open(tmp_path / "quickstart-seed0")

    def join() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [TBA, "search", run.path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def said(searcher: int, event: str) -> bool:
        records = read_metrics(run.metrics_file("searcher", searcher))
        return any(record.get("event") == event for record in records)

    first = join()  # before there is a trainer
    wait_for(lambda: any(run.owners.glob("searcher-5000.*")), process)
    second = join()
    wait_for(lambda: any(run.owners.glob("searcher-5001.*")), process)
    refused = join()
    assert "all places of" in refused.communicate(timeout=START_SECONDS)[0] and refused.returncode == 3
    wait_for(lambda: said(5000, "sealed") and said(5001, "sealed"), process)
    first.send_signal(signal.SIGUSR1)
    out, _ = first.communicate(timeout=START_SECONDS)
    assert first.returncode == 0 and "leaving: told" in out and said(5000, "left"), out
    second.kill()
    second.communicate()
    last = join()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, out + err
    steps = steps_done(tmp_path) + 4
    code, out, err = finish(start(model, tmp_path, f"train.steps={steps}", "launch.elastic=2"))
    assert code == 0, out + err
    assert "finished" in last.communicate(timeout=START_SECONDS)[0] and last.returncode == 0
    assert_whole(run, steps)
    merged = [r["searcher"] for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == "merged"]
    assert {0, 5000, 5001} <= set(merged)
    assert not [*run.logs.glob("*/refused-*"), *run.logs.glob("*/failed-*")]
    again = join()
    out, _ = again.communicate(timeout=START_SECONDS)
    assert again.returncode == 0 and "is finished: there is nothing to search for" in out


def test_a_run_of_a_trainer_alone_is_fed_and_evaluated_by_who_comes(model: Path, tmp_path: Path) -> None:
    """By the transport of the shipped configs: with no searcher of its own it goes over files."""
    process = start(model, tmp_path, "launch.searchers=0", "launch.elastic=1")
    wait_for(lambda: bool([*tmp_path.glob("*/logs/latest/trainer-0000.log")]), process)
    run = RunDir.open(tmp_path / "quickstart-seed0")
    guest = subprocess.Popen([TBA, "search", run.path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    code, out, err = finish(process)
    assert code == 0, out + err
    assert guest.wait(START_SECONDS) == 0
    assert_whole(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root; run the tests as root to include this one")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this sandbox does not allow mounts; run the tests where root may mount tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_stops_cleanly_and_the_run_goes_on_later(model: Path, small_disk: Path) -> None:
    process = start(model, small_disk)
    wait_for(lambda: steps_done(small_disk) >= 5, process)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(b"\0" * 4096)
    code, out, err = finish(process)
    assert code == 2 and "free space or raise the quota" in err and "Traceback" not in err, out + err
    (small_disk / "ballast").unlink()
    assert_whole(run_to_end(model, small_disk))
