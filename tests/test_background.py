"""Checkpoints written beside training: killed anywhere, damaged by nothing that training does meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tabular_run
import test_loops
import torch
from killer import Killer, in_a_process
from lab.tabular_learner import STATE_FILE, TabularLearner
from test_loops import ReplayExchange, TrainerParts

from tba_hpc.exchange.hdf5_shards import read_arrays, write_arrays
from tba_hpc.learner.snapshot import Snapshot
from tba_hpc.loops.trainer import MARGIN_SECONDS, Trainer
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    Arrays,
    Checkpoints,
    TrainerState,
    checkpoint_folders,
    damaged_checkpoints,
    latest_checkpoint,
    read_state,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import DiskFullError, replacing
from tba_hpc.run.inventory import READ_BYTES, SummedFile, inventory
from tba_hpc.run.memory import free_memory, oom_kills
from tba_hpc.run.metrics import number, read_metrics

# --- Files that are summed up while they are written ---


@pytest.mark.parametrize("size", [0, 1, READ_BYTES, READ_BYTES + 1])
def test_a_file_summed_up_while_written_has_the_checksum_of_one_read_back(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    cuts = sorted(np.random.default_rng(7).integers(0, size + 1, 9).tolist())
    with SummedFile(tmp_path / "file") as file:
        for start, end in zip([0, *cuts], [*cuts, size], strict=True):
            assert file.write(data[start:end]) == end - start
    assert (tmp_path / "file").read_bytes() == data
    assert file.line(tmp_path) == inventory(tmp_path)
    (tmp_path / "other").write_bytes(b"read back")
    assert sorted(inventory(tmp_path, known=file.line(tmp_path)).splitlines()) == sorted(
        inventory(tmp_path).splitlines()
    )


# --- Kills ---


def arrays(step: int) -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(step)
    return {BUFFER_FILE: {"values": random.random(500)}, PROMPTS_FILE: {"done": np.full(9, step, np.uint8)}}


def learner_at(step: int) -> TabularLearner:
    learner = TabularLearner(tabular_run.TABLE)
    with torch.no_grad():
        learner._logits += step
    return learner


def weights_of(learner: TabularLearner) -> bytes:
    out = np.empty(learner.layout.nbytes, np.uint8)
    learner.write_weights(out)
    return out.tobytes()


def save(run: RunDir, step: int) -> None:
    """Save ``step``; once that has begun, the weights and the arrays become others."""
    learner = learner_at(step)
    files = {name: partial(dict, part) for name, part in arrays(step).items()}
    state = TrainerState(step=step, revision=step, cursors={0: step})
    saved = Checkpoints(run, 2, write_arrays).save(state, learner, files)
    with torch.no_grad():
        learner._logits.fill_(np.nan)
    assert saved.result(60).step == step


def save_and_die(path: Path, step: int, nth: int) -> None:
    run = RunDir.open(path)
    Killer(path, nth)
    save(run, step)
    os._exit(0)


def check_whole(run: RunDir, step: int) -> None:
    """The newest checkpoint is that of ``step``, bit by bit."""
    assert damaged_checkpoints(run) == {}
    folder = latest_checkpoint(run)
    assert folder is not None and read_state(folder).step == step
    learner = TabularLearner(tabular_run.TABLE)
    learner.load(folder)
    assert weights_of(learner) == weights_of(learner_at(step))
    for name, expected in arrays(step).items():
        np.testing.assert_equal(read_arrays(folder / name), expected)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tabular_run.make_config(tmp_path))


def test_a_kill_before_any_change_of_the_disk_leaves_the_checkpoint_before(
    run: RunDir, tmp_path: Path
) -> None:
    for step in (3, 6):
        save(run, step)
    newest = []
    for nth in range(1, 1000):
        copy = RunDir(shutil.copytree(run.path, tmp_path / f"kill-{nth}", symlinks=True))
        code = in_a_process(save_and_die, copy.path, 9, nth)
        folder = latest_checkpoint(copy)
        assert folder is not None
        newest.append(read_state(folder).step)
        check_whole(copy, newest[-1])
        save(copy, 12)  # whatever was left is no obstacle
        check_whole(copy, 12)
        kept = [path.name for path in checkpoint_folders(copy, complete=True)]
        assert sorted(path.name for path in copy.checkpoints.iterdir()) == kept and len(kept) == 2
        shutil.rmtree(copy.path)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert newest == sorted(newest) and set(newest) == {6, 9} and len(newest) > 25


def test_a_kill_at_any_moment_of_a_replacement_leaves_no_obstacle(tmp_path: Path) -> None:
    """Whole as before or as after, or to be made again; and the next replacement leaves itself alone."""
    folder, seen = tmp_path / "export", set()
    for nth in range(1, 100):
        _replace(folder, b"old")
        code = in_a_process(_replace_and_die, folder, nth)
        if folder.exists():
            content = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert content in ({"a": b"old", "b": b"old"}, {"a": b"new", "b": b"new"})
            seen.add(content["a"])
        _replace(folder, b"next")
        assert {path.read_bytes() for path in folder.iterdir()} == {b"next"}
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
        if code == 0:
            break
    assert seen == {b"old", b"new"} and nth > 10


def _replace_and_die(folder: Path, nth: int) -> None:
    Killer(folder.parent, nth)
    _replace(folder, b"new")


def _replace(folder: Path, data: bytes) -> None:
    with replacing(folder) as temporary:
        for name in ("a", "b"):
            (temporary / name).write_bytes(data)


@pytest.mark.nightly
def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    """Real loops and files, checkpoints as often as the disk allows."""
    from tba_hpc.report.audit import audit

    run = RunDir.create(tabular_run.make_config(tmp_path, checkpoint={"every": 1}))
    for nth in (12, 9):
        tabular_run.start(run, searchers=2, sent=signal.SIGKILL, nth=nth, beside=True).join(240)
        assert audit(run).problems == ()
    tabular_run.start(run, searchers=2, beside=True).join(240)
    verdict = audit(run)
    assert verdict.finished and verdict.clean and verdict.steps == tabular_run.STEPS, verdict.problems
    events = [record for record in read_metrics(run.metrics_file("trainer")) if "event" in record]
    told = [record["step"] for record in events if record["event"] == "checkpoint"]
    assert len(told) > 2 and told[-1] == tabular_run.STEPS
    assert all(read_state(folder).save_seconds > 0 for folder in checkpoint_folders(run, complete=True))


# --- Switched off, put off, failed ---


class InAFolder(TabularLearner):
    """As DeepSpeed's: what it saves lies in a folder of its own, made before anything is copied."""

    def save(self, folder: Path) -> Callable[[], str]:
        (folder / "parts").mkdir()
        return super().save(folder)


@pytest.mark.parametrize("nth", range(10))
def test_a_disk_that_is_full_at_any_moment_of_a_save_leaves_no_half_of_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """From the mark beside it and its folder to the deletion of the one before."""
    save(run, 3)
    left, makers = [nth], {"touch": Path.touch, "mkdir": Path.mkdir}
    fsync = os.fsync

    def full() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, make in makers.items():
        monkeypatch.setattr(Path, name, lambda path, *a, make=make, **k: (full(), make(path, *a, **k))[1])
    monkeypatch.setattr(os, "fsync", lambda descriptor: (full(), fsync(descriptor))[1])
    saved = Checkpoints(run, 2, write_arrays).save(
        TrainerState(step=6),
        InAFolder(tabular_run.TABLE),
        {BUFFER_FILE: lambda: arrays(6)[BUFFER_FILE]},
    )
    with pytest.raises(DiskFullError, match=r"No space left on device\)?; free space or raise the quota"):
        saved.result(60)
    monkeypatch.undo()
    assert not (run.checkpoints / "step-000006").exists()
    check_whole(run, 3)
    save(run, 9)
    check_whole(run, 9)


def test_an_error_of_the_pruner_is_logged_and_the_save_counts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a shard of no index")

    monkeypatch.setattr("tba_hpc.run.checkpoints.prune", fail)
    checkpoints = Checkpoints(run, 2, write_arrays)
    files = {BUFFER_FILE: lambda: arrays(6)[BUFFER_FILE]}
    checkpoints.save(TrainerState(step=6), InAFolder(tabular_run.TABLE), files).result(60)
    checkpoints.finish_pruning(60)
    assert "RuntimeError: a shard of no index" in caplog.text
    assert latest_checkpoint(run) == run.checkpoints / "step-000006"


# --- The trainer's loop ---


class Held:
    """Writes arrays once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def __call__(self, path: Path, arrays: Arrays) -> None:
        assert self.let.wait(30)
        write_arrays(path, arrays)


def make_loops(root: Path, *, steps: int = 40, deadline: float = 20) -> tuple[TrainerParts, ReplayExchange]:
    """A run of a fixed sequence of shards, with a checkpoint every five steps, of which all are kept."""
    config = test_loops.make_config(
        root,
        train={"steps": steps},
        exchange={"sync_every": 20},
        launch={"timeout_seconds": deadline},
        checkpoint={"every": 5, "keep": 100},
    )
    run = RunDir.create(config)
    return TrainerParts(config, run), ReplayExchange(test_loops._sealed(config, run, 4), 0)


def make_trainer(
    root: Path,
    write: Callable[[Path, Arrays], None],
    *,
    stop: Callable[[RunDir], bool],
    **settings: float,
) -> tuple[Trainer, RunDir]:
    parts, exchange = make_loops(root, **settings)
    trainer = parts.build(exchange, lambda: stop(parts.run))
    trainer._saving.checkpoints = Checkpoints(parts.run, parts.config.checkpoint.keep, write)
    return trainer, parts.run


def steps_of(run: RunDir, event: str | None) -> list[int]:
    records = read_metrics(run.metrics_file("trainer"))
    return [int(number(record, "step", 0)) for record in records if record.get("event") == event]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_is_put_off(tmp_path: Path) -> None:
    """What is written in the end is what a trainer that waits writes, bit by bit."""
    held = Held()

    def let(run: RunDir) -> bool:
        if steps_of(run, None)[-1:] == [22]:
            held.let.set()
        return False

    trainer, run = make_trainer(tmp_path / "beside", held, stop=let)
    assert trainer.run()
    told = steps_of(run, "checkpoint")
    assert told[0] == 5 and told[1] >= 22 and told[-1] == 40
    order = [record.get("event") or record["step"] for record in read_metrics(run.metrics_file("trainer"))]
    assert order.index("checkpoint") > order.index(22)

    parts, exchange = make_loops(tmp_path / "waiting")
    waiting = parts.build(exchange, lambda: settled(waiting))
    assert waiting.run()
    assert steps_of(parts.run, "checkpoint") == [5, 10, 15, 20, 25, 30, 35, 40]
    for name in ("step-000005", "step-000040"):
        ours, expected = run.checkpoints / name, parts.run.checkpoints / name
        assert read_state(ours).revision == read_state(expected).revision
        assert (ours / STATE_FILE).read_bytes() == (expected / STATE_FILE).read_bytes()
        for file in (BUFFER_FILE, PROMPTS_FILE):
            np.testing.assert_equal(read_arrays(ours / file), read_arrays(expected / file))


def test_a_stop_waits_for_the_checkpoint_under_way_and_saves_the_last_state(tmp_path: Path) -> None:
    held = Held()
    timer = threading.Timer(0.3, held.let.set)

    def stop(run: RunDir) -> bool:
        reached = steps_of(run, None)[-1:] == [7]
        if reached and not timer.ident:
            timer.start()
        return reached

    trainer, run = make_trainer(tmp_path, held, stop=stop)
    assert not trainer.run()
    assert steps_of(run, "checkpoint") == [5, 7] and not timer.is_alive()
    folder = latest_checkpoint(run)
    assert folder is not None and read_state(folder).step == 7 and read_state(folder).save_seconds >= 0.25


def test_a_checkpoint_that_is_never_written_does_not_keep_a_stopped_run(tmp_path: Path) -> None:
    held = Held()
    trainer, run = make_trainer(tmp_path, held, stop=lambda run: len(steps_of(run, None)) == 7, deadline=0.5)
    with pytest.raises(TimeoutError, match=r"^the checkpoint of step 5 was not written within 0\.5 s: see"):
        trainer.run()
    assert latest_checkpoint(run) is None
    held.let.set()


class Disk:
    """Writes arrays while it has room: by default for the checkpoint of step 5 alone."""

    def __init__(self) -> None:
        self.full_for: Callable[[int], bool] = lambda step: step > 5
        self.turned_away = 0

    def __call__(self, path: Path, arrays: Arrays) -> None:
        if self.full_for(int(path.parent.name.removeprefix("step-").partition(".")[0])):
            self.turned_away += 1
            raise DiskFullError(f"cannot write {path} (7 bytes): No space left on device; free space")
        write_arrays(path, arrays)


def settled(trainer: Trainer) -> bool:
    """Holds the loop, which a disk may not keep up with, until no checkpoint is under way; never stops it."""
    if trainer._saving._under_way:
        assert wait([trainer._saving._under_way], 60).done
    return False


def test_checkpoints_that_a_full_disk_has_no_room_for_are_postponed_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    disk.full_for = lambda step: 5 < step < 25
    trainer, run = make_trainer(tmp_path, disk, stop=lambda run: settled(trainer))
    assert trainer.run() and steps_of(run, None)[-1] == 40
    saved, postponed = steps_of(run, "checkpoint"), steps_of(run, "postponed")
    assert (saved, postponed) == ([5, 25, 30, 35, 40], [10, 15, 20]) and disk.turned_away == 3
    found = checkpoint_folders(run, complete=True)
    assert {read_state(folder).step for folder in found} == set(saved) and damaged_checkpoints(run) == {}
    assert {path.name for path in run.checkpoints.iterdir()} == {folder.name for folder in found}
    record = next(r for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == "postponed")
    assert str(record["fault"]).endswith("buffer.h5 (7 bytes): No space left on device")
    assert "No space left on device: training continues, and the next checkpoint is tried" in caplog.text


@pytest.mark.parametrize(("steps", "comes"), [(40, True), (7, True), (7, False)])
def test_the_last_checkpoint_waits_for_room_for_half_a_deadline(
    tmp_path: Path, steps: int, comes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a run, or where it is asked to stop."""
    disk, deadline = Disk(), 20 if comes else 2
    stop = (lambda run: steps_of(run, None)[-1:] == [7]) if steps == 7 else (lambda run: False)
    disk.full_for = lambda step: step > 5 and not (comes and step == steps and disk.turned_away > 9)
    trainer, run = make_trainer(tmp_path, disk, stop=stop, deadline=deadline)
    began, asked = time.monotonic(), time.time()
    if comes:
        assert trainer.run() == (steps == 40)
        assert steps_of(run, "checkpoint") == [5, steps]
    else:
        with pytest.raises(DiskFullError, match=r"cannot write .*buffer\.h5"):
            trainer.run()
        assert time.monotonic() - began >= 1 and steps_of(run, "checkpoint") == [5]
    postponed = [r for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == "postponed"]
    (last,) = [record for record in postponed if "until" in record]  # once, not at every retry
    assert asked <= number(last, "until", 0.0) - deadline / 2 <= number(last, "time", 0.0)
    assert caplog.text.count("No space left on device: tried again until ") == 1
    assert len(postponed) < disk.turned_away and damaged_checkpoints(run) == {}


def test_while_one_is_under_way_time_is_kept_for_two(tmp_path: Path) -> None:
    parts, exchange = make_loops(tmp_path)
    trainer = parts.build(exchange, job_end=time.time() + MARGIN_SECONDS + 60)
    trainer._saving.saved = TrainerState(save_seconds=40)
    assert not trainer._is_late
    trainer._saving._under_way = Future()
    assert trainer._is_late


# --- Copies ---


@pytest.mark.parametrize("machines_ranks", [1, 10**9])
def test_a_copy_is_of_its_moment(
    tmp_path: Path, machines_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors that share memory share it in the file; what memory has no room for is written at once."""
    snapshot = Snapshot(local_ranks=machines_ranks, gpu=False)
    flat = torch.arange(1000.0)
    state = {"parts": [flat[:300], flat[300:]], "step": 7, "tied": flat[:300]}
    for start in (0.0, 5.0):  # the second copy takes the memory of the first
        flat.copy_(torch.arange(1000.0) + start)
        path = tmp_path / f"state-{start}.pt"
        snapshot.add(state, str(path))
        assert path.exists() == (machines_ranks > 1)
        flat.fill_(-1)
        (write,) = snapshot.take()
        assert write().line(tmp_path).endswith(f" {path.stat().st_size} {path.name}\n")
        loaded = torch.load(path, weights_only=True)
        assert torch.equal(torch.cat(loaded["parts"]), torch.arange(1000.0) + start) and loaded["step"] == 7
        assert loaded["tied"].data_ptr() == loaded["parts"][0].data_ptr()
    assert ("training waits while" in caplog.text) == (machines_ranks > 1)


# --- Memory ---


def group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


@pytest.mark.parametrize("used, cached, left", [(900, 0, 100), (900, 300, 400), (100, 0, 500)])
def test_the_tightest_limit_of_its_control_groups_counts(
    tmp_path: Path, used: int, cached: int, left: int
) -> None:
    """Version 2, as in a Slurm job: the step has no limit, the job one, the machine's slice another."""
    (tmp_path / "cgroup").write_text("0::/slice/job_7/step_0\n")
    groups = tmp_path / "groups"
    group(groups / "slice/job_7/step_0", memory_max="max")
    stat = f"anon 5\ninactive_file {cached}\nactive_file 9"
    group(groups / "slice/job_7", memory_max=1000, memory_current=used, memory_stat=stat)
    group(groups / "slice", memory_max=600, memory_current=used - used + 100, memory_stat="inactive_file 0")
    assert free_memory(tmp_path, groups) == min(left, 500)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/job\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 1000), ("usage_in_bytes", 700)):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 250\n")
    assert free_memory(tmp_path, tmp_path) == 550


def test_kills_for_lack_of_memory_are_those_of_the_process_own_control_group(tmp_path: Path) -> None:
    process, groups = tmp_path / "process", tmp_path / "groups"
    assert oom_kills(process, groups) == 0, "no control groups"
    process.mkdir()
    (process / "cgroup").write_text("0::/job_7/step_0\n")
    assert oom_kills(process, groups) == 0, "as in the outermost group"
    group(groups / "job_7/step_0", memory_events="low 0\noom 4\noom_kill 3\noom_group_kill 0")
    group(groups / "job_8", memory_events="oom_kill 5")  # of another program
    assert oom_kills(process, groups) == 3
    (process / "cgroup").write_text("0::/\n")
    group(groups, memory_events="oom_kill 2")
    assert oom_kills(process, groups) == 2, "in a container"
    (process / "cgroup").write_text("3:memory:/docker/f00\n0::/\n")
    group(groups / "memory", memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 7")
    assert oom_kills(process, groups) == 7, "version 1, in a container"


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) > 1 << 20
