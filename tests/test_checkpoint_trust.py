"""Checkpoints are verified before they are believed: no damage is loaded, and the one before is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM

import numpy as np
import pytest
import tabular_run
import test_background

from tba_hpc.loops.restoring import verify_checkpoints
from tba_hpc.report.audit import audit
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.report.status import facts
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    StateError,
    TrainerState,
    begin_checkpoint,
    checkpoint_folders,
    complete_checkpoint,
    damaged_checkpoints,
    latest_checkpoint,
    read_state,
    set_aside,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

# --- Every kind of damage ---

Harm = Callable[[Path, np.random.Generator], None]
"""Damages a file, which is another one afterwards for certain."""


def truncate(path: Path, random: np.random.Generator) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.integers(len(data))])


def flip_a_bit(path: Path, random: np.random.Generator) -> None:
    data = np.fromfile(path, np.uint8)
    data[random.integers(len(data))] ^= 1 << random.integers(8)
    data.tofile(path)


def zero_a_block(path: Path, random: np.random.Generator) -> None:
    data = np.fromfile(path, np.uint8)
    start = random.choice(np.flatnonzero(data)) // 512 * 512
    data[start : start + 512] = 0
    data.tofile(path)


def delete(path: Path, random: np.random.Generator) -> None:
    path.unlink()


def replace_by_another_version(path: Path, random: np.random.Generator) -> None:
    """Of the same size; the format or schema of ours is another number, where a file has one."""
    data = path.read_bytes()
    known = [(b'"step": ', b'"stop": '), (b"schema=3", b"schema=4"), (b"inventory", b"inventorY")]
    for ours, other in [*known, (data, bytes(reversed(data))), (data, bytes(byte ^ 1 for byte in data))]:
        if (changed := data.replace(ours, other, 1)) != data:
            path.write_bytes(changed)
            return


KINDS = (truncate, flip_a_bit, zero_a_block, delete, replace_by_another_version)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with the checkpoints of steps 3 and 6."""
    run = RunDir.create(tabular_run.make_config(tmp_path_factory.mktemp("saved")))
    for step in (3, 6):
        test_background.save(run, step)
    return run


def damaged(saved: RunDir, copy: Path, name: str, harm: Harm, seed: int) -> RunDir:
    """A copy of the run, with a file of its newest checkpoint damaged."""
    run = RunDir(shutil.copytree(saved.path, copy))
    folder = latest_checkpoint(run)
    assert folder is not None
    harm(folder / name, np.random.default_rng(seed))
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_random_damages_are_met_and_the_checkpoint_before_is_used(saved: RunDir, tmp_path: Path) -> None:
    newest = latest_checkpoint(saved)
    assert newest is not None
    files = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    assert {"COMPLETE", "state.json", BUFFER_FILE, PROMPTS_FILE} < set(files)
    for case in range(60):
        harm, name = KINDS[case % len(KINDS)], files[case // len(KINDS) % len(files)]
        run = damaged(saved, tmp_path / str(case), name, harm, case)
        verify_checkpoints(run)
        folder = latest_checkpoint(run)
        assert folder is not None and names(run) == ["damaged-step-000006-1", "step-000003"], (harm, name)
        (event,) = read_metrics(run.metrics_file("trainer"))
        assert (event["event"], event["step"], event["checkpoint"]) == ("damaged", 6, "step-000006")
        assert name in str(event["fault"]), (harm, name, event)
        test_background.check_whole(run, 3)
        assert read_state(folder).cursors == {0: 3}
        shutil.rmtree(run.path)


# --- None left, one that was never finished ---


def test_where_none_is_whole_a_sentence_says_so_and_nothing_is_changed(saved: RunDir, tmp_path: Path) -> None:
    run = damaged(saved, tmp_path / "run", "state.json", truncate, 1)
    flip_a_bit(run.checkpoints / "step-000003" / BUFFER_FILE, np.random.default_rng(0))
    for _ in range(2):  # the second start meets the same
        with pytest.raises(
            StateError, match=r"step-000006: state.json has \d+ bytes, not .*step-000003: buf"
        ):
            verify_checkpoints(run)
        assert names(run) == ["step-000003", "step-000006"] and not run.metrics_file("trainer").exists()


def test_a_run_whose_checkpoints_were_all_set_aside_is_not_started_afresh(run: RunDir) -> None:
    verify_checkpoints(run)  # a fresh one has nothing to verify
    save(run, 4)
    set_aside(run, run.checkpoints / "step-000004")
    with pytest.raises(StateError, match=r"is whole .damaged-step-000004-1.: put a copy of one back"):
        verify_checkpoints(run)


def test_a_copy_under_a_later_name_is_set_aside(saved: RunDir, tmp_path: Path) -> None:
    """It would be resumed from again and again, while shards that it needs are deleted."""
    run = RunDir(shutil.copytree(saved.path, tmp_path / "run"))
    shutil.copytree(run.checkpoints / "step-000003", run.checkpoints / "step-000090")
    verify_checkpoints(run)
    assert names(run) == ["damaged-step-000090-1", "step-000003", "step-000006"]
    (event,) = read_metrics(run.metrics_file("trainer"))
    assert event["fault"] == "it is a copy of the checkpoint of step 3"
    test_background.check_whole(run, 6)


def test_a_checkpoint_of_another_run_is_set_aside(saved: RunDir, tmp_path: Path) -> None:
    """Its cursors are not those of this run's shards."""
    run, other = (RunDir(shutil.copytree(saved.path, tmp_path / name)) for name in ("run", "other"))
    other.identity_file.write_text("b0b\n")
    for folder in other.checkpoints.iterdir():
        shutil.rmtree(folder)
    for step in (1, 9):
        save(other, step, cursors={0: 99})
        shutil.copytree(other.checkpoints / f"step-{step:06d}", run.checkpoints / f"step-{step:06d}")
    verify_checkpoints(run)
    assert names(run) == ["damaged-step-000009-1", "step-000001", "step-000003", "step-000006"]
    (event,) = read_metrics(run.metrics_file("trainer"))
    assert event["fault"] == "it is a checkpoint of another run"
    state = TrainerState(step=8, cursors={0: 8})
    assert complete_checkpoint(run, begin_checkpoint(run, 8), state, keep=4) == {0: 3}, "what may be pruned"
    shutil.rmtree(run.checkpoints / "step-000008")
    for step in (3, 6):
        shutil.rmtree(run.checkpoints / f"step-{step:06d}")
    with pytest.raises(StateError, match=r"step-000001: it is a checkpoint of another run"):
        damaged_checkpoints(run)


def test_an_inventory_that_has_lost_its_first_line_is_damaged(run: RunDir) -> None:
    save(run, 4)
    complete = save(run, 8) / "COMPLETE"
    complete.write_text(complete.read_text().partition("\n")[2])
    assert damaged_checkpoints(run) == {complete.parent: "COMPLETE is corrupt"}


def test_a_kill_while_an_old_one_is_deleted_leaves_none_that_looks_complete(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go in any order: here the weights first, and then the trainer is killed."""

    def killed(path: Path) -> None:
        (path / "weights.bin").unlink()
        raise KeyboardInterrupt

    save(run, 4)
    save(run, 8)
    monkeypatch.setattr("tba_hpc.run.checkpoints.remove", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run, 12)
    assert [path.name for path in checkpoint_folders(run, complete=True)] == ["step-000008", "step-000012"]
    assert damaged_checkpoints(run) == {}


def test_what_a_kill_leaves_is_deleted_and_not_called_damaged(run: RunDir) -> None:
    save(run, 4)
    half = begin_checkpoint(run, 8)
    (half / "state.json").write_text("{}")
    assert damaged_checkpoints(run) == {}
    (run.checkpoints / ".step-000004.universal.tmp").mkdir()  # of a conversion
    assert begin_checkpoint(run, 12).exists()
    assert names(run) == ["step-000004", "step-000012"]


def test_the_same_step_may_be_damaged_twice(run: RunDir) -> None:
    save(run, 4)
    for _ in range(2):
        (save(run, 8) / "weights.bin").unlink()
        verify_checkpoints(run)
    assert names(run) == ["damaged-step-000008-1", "damaged-step-000008-2", "step-000004"]


def test_a_newest_checkpoint_that_is_gone_is_missed(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    """Once, if there is one before it; else the run is not started afresh."""
    save(run, 4)
    shutil.rmtree(save(run, 8))
    verify_checkpoints(run)
    assert f"{run.checkpoints / 'step-000008'} is damaged (it is gone)" in caplog.text
    (event,) = read_metrics(run.metrics_file("trainer"))
    assert (event["event"], event["step"], event["fault"]) == ("damaged", 8, "it is gone")
    verify_checkpoints(run)
    assert len(read_metrics(run.metrics_file("trainer"))) == 1 and names(run) == ["step-000004"]
    save(run, 12)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(StateError, match=r"no checkpoint in .* is whole .step-000012: it is gone.: put a"):
        verify_checkpoints(RunDir.create(run.config()))


@pytest.mark.parametrize("old, new", [("17", "99"), ("cursors", "c"), (None, "")])
def test_an_older_state_that_is_damaged_neither_ends_a_save_nor_prunes(
    run: RunDir, old: str | None, new: str
) -> None:
    """Its cursors decide which shards are needed no more."""
    state_file = save(run, 4, {0: 17}) / "state.json"
    state_file.write_text(state_file.read_text().replace(old, new) if old else new)
    folder = begin_checkpoint(run, 8)
    assert complete_checkpoint(run, folder, TrainerState(step=8, cursors={0: 23}), keep=2) == {}
    folder = begin_checkpoint(run, 12)
    assert complete_checkpoint(run, folder, TrainerState(step=12, cursors={0: 31}), keep=2) == {0: 23}
    assert [path.name for path in checkpoint_folders(run, complete=True)] == ["step-000008", "step-000012"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tabular_run.make_config(tmp_path))


def save(run: RunDir, step: int, cursors: dict[int, int] | None = None) -> Path:
    folder = begin_checkpoint(run, step)
    (folder / "weights.bin").write_bytes(b"w" * 100)
    complete_checkpoint(run, folder, TrainerState(step=step, cursors=cursors or {}), keep=2)
    return folder


# --- All ranks, whole runs ---


def test_a_run_goes_on_from_the_checkpoint_before_and_loses_nothing(run: RunDir) -> None:
    """Real loops and files: what was trained since is merged and learned from again.

    The searchers, which are there first, take their beginning from what the leader believes.
    """
    tabular_run.start(run, searchers=2, sent=SIGTERM, nth=20).join(240)
    newest, before = reversed(checkpoint_folders(run, complete=True)[-2:])
    flip_a_bit(newest / "prompts.h5", np.random.default_rng(0))
    went_back = read_state(newest).step - read_state(before).step
    assert went_back > 0 and audit(run).problems == (
        f"{newest.name} is damaged: prompts.h5 is corrupt: its checksum does not match",
    )
    tabular_run.start(run, searchers=2).join(240)

    verdict = audit(run)
    assert verdict.finished and verdict.clean, verdict.problems
    assert verdict.resumes == (went_back,)
    monitor = RunMonitor(run)
    monitor.update()
    said = facts(monitor, run_state(monitor))
    assert said["damaged"] == f"{newest.name}: prompts.h5 is corrupt: its checksum does not match"
    assert "1 × damaged checkpoint set aside" in said["faults"]
    assert f"damaged-{newest.name}-1" in names(run)
