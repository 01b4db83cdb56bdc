"""The run directory: what may be resumed, what counts as a checkpoint, which prompts are issued."""

import errno
import json
import logging
import math
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.cli import _open
from tba_hpc.config import Config, ConfigError, load_config, parse_config
from tba_hpc.launch.rank import as_rank
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.run import changes
from tba_hpc.run.checkpoints import (
    TrainerState,
    begin_checkpoint,
    complete_checkpoint,
    latest_checkpoint,
    read_state,
)
from tba_hpc.run.directory import ATTEMPT, FORMAT, KEPT_ATTEMPTS, RunDir
from tba_hpc.run.evaluations import (
    Evaluation,
    discard_evaluations,
    find_evaluation,
    missing_parts,
    read_part,
    write_evaluation,
)
from tba_hpc.run.events import log_event, read_events
from tba_hpc.run.files import write_atomic
from tba_hpc.run.notes import first_note
from tba_hpc.run.signals import StopFlag


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """RunDir sets the umask of the process; give it back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def config_in(root: Path, **sections: dict[str, Any]) -> Config:
    """A small config whose run directory is ``root/run-seed0``."""
    run = {"root": str(root), **sections.pop("run", {})}
    return parse_config({"model": {"path": "tiny"}, "run": run} | sections)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(config_in(tmp_path))


def modes(folder: Path) -> dict[str, set[int]]:
    """Permission bits of everything in a folder, itself included."""
    paths = [folder, *folder.rglob("*")]
    return {
        "folders": {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()},
        "files": {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()},
    }


# --- Run directory ---


def test_a_run_directory_is_private_and_holds_its_config(tmp_path: Path) -> None:
    (tmp_path / "run-seed0").mkdir(mode=0o755)  # made by the user beforehand, still empty
    config = config_in(tmp_path)
    run = RunDir.create(config)
    write_atomic(run.summary, "{}")
    run.begin_attempt()
    assert modes(run.path) == {"folders": {0o700}, "files": {0o600}}
    assert RunDir.open(run.path) == run
    assert run.config() == config


def test_a_resume_may_change_ranks_and_place_but_nothing_else(tmp_path: Path) -> None:
    RunDir.create(config_in(tmp_path))
    again = config_in(tmp_path, launch={"searchers": 3})
    assert RunDir.create(again).config().launch.searchers == 3  # the roles read the new number

    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "run-seed0").rename(moved / "run-seed0")
    assert RunDir.create(config_in(moved)).config().run.root == str(moved)

    moved_run = RunDir.open(moved / "run-seed0")
    moved_run.shard_folder(0).mkdir()
    moved_run.shard_file(0, 0).touch()
    moved_run.metrics_file("trainer").write_text('{"step": 1}\n')
    other = config_in(
        moved,
        train={"prompts_per_step": 7, "steps": 7, "loss_normaliser": "batch_tokens", "weight_decay": 0.25},
        buffer={"most_on_policy": 0.25},
        launch={"searchers": 2},
    )
    with pytest.raises(ConfigError) as caught:
        RunDir.create(other)
    assert str(caught.value) == (
        f"{moved_run.path} holds a run with another config, and a resume may not change it to "
        "buffer.most_on_policy=0.25, train.loss_normaliser=batch_tokens, train.prompts_per_step=7 and 1 more"
        ": resume with buffer.most_on_policy=0.5, train.loss_normaliser=null, train.prompts_per_step=8 and 1 "
        "more, or choose another run.name to start afresh"
    )
    with pytest.raises(
        ConfigError, match=r"not change it to model\.path=huge: resume with model\.path=tiny,"
    ):
        RunDir.create(config_in(moved, model={"path": "huge"}))
    assert moved_run.config().launch.searchers == 1  # a refusal changes nothing
    assert not moved_run.history.exists()  # nor do ranks and place belong to the run


def test_a_run_directory_keeps_the_group_of_its_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)  # as of projects whose quota goes by the group of files
    run = RunDir.create(config_in(tmp_path))
    assert modes(run.path)["folders"] == {0o2700}


@pytest.mark.root("giving a folder to another user")
def test_root_does_not_move_into_a_folder_of_another_user(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    config.run_dir.mkdir()
    os.chown(config.run_dir, 12345, -1)
    with pytest.raises(ConfigError, match=r"run-seed0 belongs to another user \(uid 12345\), who"):
        RunDir.create(config)
    assert not list(config.run_dir.iterdir())
    os.chown(config.run_dir, 0, -1)
    RunDir.create(config)


@pytest.mark.parametrize(
    "made",
    [
        *(
            "shards/searcher-0000/000000.h5",
            "shards/searcher-0000/000000.h5.refused",
            "weights/latest.json",
        ),
        *("checkpoints/step-000004/COMPLETE", "evaluations/test-step-000000/searcher-0000-of-0001.json"),
        "references/step-000005/config.json",
    ],
)
def test_a_start_that_came_to_nothing_leaves_nothing_that_refuses_the_next(run: RunDir, made: str) -> None:
    run.begin_attempt()
    log_event(run, "refused", sentence="task.name=arithmetics is none")
    for rank in ("searcher-0000", "trainer"):
        (run.metrics / f"{rank}.jsonl").write_text('{"event": "started"}\n')
    corrected = config_in(run.path.parent, train={"weight_decay": 0.25})
    assert RunDir.check(corrected) == run and not run.config().train.weight_decay  # looking changes nothing
    assert RunDir.create(corrected).config() == corrected and not run.history.exists()

    (run.path / made).parent.mkdir(parents=True, exist_ok=True)
    (run.path / made).touch()
    for start in (RunDir.check, RunDir.create):
        with pytest.raises(ConfigError, match=r"may not change it to train\.weight_decay=0\.5: it has tak"):
            start(config_in(run.path.parent, train={"weight_decay": 0.5}))


def test_a_run_without_a_step_is_to_be_removed_and_not_resumed_as_it_was(run: RunDir) -> None:
    """Its config may be the mistake that kept it from learning."""
    other = config_in(run.path.parent, task={"name": "mine:Task"})
    shard = run.shards / "searcher-0000/000000.h5"
    shard.parent.mkdir()
    shard.touch()
    metrics = run.metrics_file("trainer")
    metrics.write_text('{"event": "started", "step": 0}\n{"event": "merged", "step": 0}\n{"ste')
    with pytest.raises(ConfigError) as caught:
        RunDir.check(other)
    assert str(caught.value) == (
        f"{run.path} holds a run with another config, and a resume may not change it to task.name=mine:Task: "
        "it has taken no optimizer step, so unless it is running or queued, remove the folder "
        f"{run.path} (nothing was learned), or choose another run.name"
    )
    metrics.write_text('{"event": "started", "step": 0}\n{"step": 1, "train/loss": 0.5}\n')
    with pytest.raises(ConfigError, match=r"task\.name=mine:Task: resume with task\.name="):
        RunDir.check(other)


def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run-seed0"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"not empty and holds no run \(found thesis.tex\)"):
        RunDir.create(config_in(tmp_path))
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]

    (folder / "config.yaml").write_text("model: {path: x}\nsalad: 1\n")
    (folder / "format").write_text(f"{FORMAT}\n")
    with pytest.raises(ConfigError, match=r"cannot resume \(unknown config key 'salad'"):
        RunDir.create(config_in(tmp_path))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.yaml").touch()  # no run
    with pytest.raises(ConfigError, match=r"is not a run directory: it holds 1 run; name one, such as \S+0$"):
        RunDir.open(tmp_path)


def test_a_crash_before_the_config_was_written_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "run-seed0"
    folder.mkdir()
    (folder / ".config.yaml.1.tmp").write_text("model:")
    (folder / "format").write_text(f"{FORMAT}\n")
    assert RunDir.create(config_in(tmp_path)).config().model.path == "tiny"


def times_and_modes(folder: Path) -> dict[Path, tuple[int, int]]:
    """When everything in a folder, itself included, was changed last, and its permission bits."""
    found = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    return {path: (status.st_mtime_ns, status.st_mode) for path, status in found.items()}


def test_a_run_of_an_earlier_version_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    """Before format 2 a run directory had no file ``format``."""
    config = config_in(tmp_path)
    run = RunDir.create(config)
    run.format_file.unlink()
    run.path.chmod(0o755)
    before = times_and_modes(run.path)
    for refused in (lambda: RunDir.create(config), lambda: RunDir.open(run.path)):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert f"run of format 1, and this version of tba-hpc reads format {FORMAT}: resume it" in str(
            caught.value
        )
    assert times_and_modes(run.path) == before
    run.format_file.write_text("2\n")
    with pytest.raises(ConfigError, match="run of format 2"):
        RunDir.open(run.path)


def test_a_config_that_was_edited_or_damaged_is_refused(run: RunDir) -> None:
    before = run.config_file.read_bytes()
    for now, sentence in (
        (before.replace(b"steps: 1000", b"steps: 1001"), r"config.yaml was edited or damaged: its checksum"),
        (before.replace(b"tiny", b"t\xffny"), r"config.yaml is damaged .'utf-8' codec"),
    ):
        run.config_file.write_bytes(now)
        for refused in (run.config, lambda: RunDir.create(config_in(run.path.parent))):
            with pytest.raises(ConfigError, match=sentence):
                refused()
    run.config_file.write_bytes(before)
    assert run.config() == config_in(run.path.parent)


def test_an_edit_while_a_run_trains_can_be_undone(run: RunDir) -> None:
    """Its last start has a copy, and nobody is told to choose another name."""
    run.begin_attempt()
    run.config_file.write_bytes(run.config_file.read_bytes().replace(b"steps: 1000", b"steps: 1001"))
    for refused in (run.config, lambda: RunDir.create(config_in(run.path.parent))):
        with pytest.raises(ConfigError, match=r"; undo that \(cp \S+ \S+\), and change keys") as caught:
            refused()
        assert "run.name" not in str(caught.value)
    command = re.search(r"\((cp .*)\)", str(caught.value))
    assert command
    subprocess.run(command[1].split(), check=True)
    assert run.config() == config_in(run.path.parent)


@pytest.mark.parametrize("what", ["format", "config"])
def test_a_rank_that_meets_another_version_or_config_leaves_its_sentence(
    run: RunDir, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade, or an edit, while the run trains: its launcher shows the note."""
    monkeypatch.setenv(ATTEMPT, run.begin_attempt().name)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # this process has its own log
    if what == "format":
        run.format_file.write_text("99\n")
    else:
        run.config_file.write_bytes(run.config_file.read_bytes() + b"# a remark\n")
    with pytest.raises(SystemExit), as_rank(_open(run.path, "searcher", 1), "searcher", 1):
        pass
    said = {"format": "holds a run of format 99, and", "config": "config.yaml was edited or damaged"}
    assert said[what] in str(first_note(run.attempt, "refused"))


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ConfigError, match=r"cannot write to the run directory .*: Not a directory; choose"
        ):
            RunDir.create(config_in(root))


def test_a_file_system_without_hard_links_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match=r"cannot write to the run directory .*: Operation not permitted"):
        RunDir.create(config_in(tmp_path))
    assert not [*tmp_path.iterdir()]


# --- A run that goes on with another config ---


def left_at(run: RunDir, step: int, *, finished: bool = False) -> None:
    """Make it a run that has reached a step."""
    run.metrics_file("trainer").write_text(json.dumps({"step": step, "time": 1.0}) + "\n")
    checkpoint(run, replace(STATE, step=step))
    if finished:
        write_atomic(run.summary, json.dumps({"finished": True, "steps": step}))
        run.mark_finished()
        log_event(run, "finished")


def test_a_resume_follows_a_model_that_was_moved_but_no_other_model(tmp_path: Path) -> None:
    """Every start compares the contents, see tests of ``inputs``."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    run = RunDir.create(config_in(tmp_path, model={"path": str(old)}))
    left_at(run, 1)
    moved = config_in(tmp_path, model={"path": str(new)})
    with pytest.raises(ConfigError, match=r"may not change it to model\.path"):
        RunDir.create(moved)  # the new folder is missing
    new.mkdir()
    with pytest.raises(ConfigError, match=r"may not change it to model\.path"):
        RunDir.create(moved)  # the old one is still there
    old.rmdir()
    assert RunDir.create(moved).config() == moved


def test_a_finished_run_goes_on_to_more_steps(run: RunDir) -> None:
    linear = {"schedule": "linear", "peak": 0.5}
    first, longer = (
        config_in(run.path.parent, train={"steps": steps, "learning_rate": linear}) for steps in (80, 100)
    )
    changes.create(first)
    left_at(run, 80, finished=True)
    assert changes.is_done(run, first) and changes.consequences(run, first) == ""
    assert not changes.is_done(run, longer) and run.finished  # looking changes nothing

    assert changes.consequences(run, longer) == (
        "resuming with train.steps=100 (was 80); the learning rate (linear) now decays until step 100 "
        "instead of 80: at step 80 it is 0.1 instead of 0"
    )
    monitor = RunMonitor(run)
    assert changes.create(longer) == run and run.config() == longer
    assert not run.finished and not changes.is_done(run, longer)
    kept = run.history / "config-0001.yaml"
    assert load_config(kept) == first
    assert json.loads((run.history / "summary-0001.json").read_text())["steps"] == 80
    assert (read_events(run)[-1]["event"], read_events(run)[-1]["keys"]) == (
        "changed",
        {"train.steps": [80, 100]},
    )
    monitor.update()
    now = run_state(monitor)
    assert (now.state, now.words) == (
        "stopped",
        "stopped at step 80, its config or code changed: it will continue to step 100",
    )
    assert monitor.config == longer


def test_a_run_does_not_end_before_the_step_that_it_has_reached(run: RunDir) -> None:
    left_at(run, 80)
    with pytest.raises(
        ConfigError, match=r"train\.steps=79 is less than the 80 steps that .* has done: give at"
    ):
        changes.create(config_in(run.path.parent, train={"steps": 79}))
    assert changes.create(config_in(run.path.parent, train={"steps": 80})).config().train.steps == 80


def test_every_config_that_was_changed_is_kept(run: RunDir) -> None:
    left_at(run, 1)
    for every in range(1, 4):
        changes.create(config_in(run.path.parent, checkpoint={"every": every}, evaluate={"every": 7}))
    kept = sorted(run.history.iterdir())
    assert [path.name for path in kept] == [f"config-{number:04d}.yaml" for number in (1, 2, 3)]
    assert [load_config(path).checkpoint.every for path in kept] == [100, 1, 2]
    more = config_in(run.path.parent, launch={"searchers": 5, "elastic": 2}, checkpoint={"every": 3})
    slots = changes.changes(run, more)
    assert slots["launch.elastic"] == (0, 2) and "launch.searchers" not in slots, "each start's own"
    told = changes.consequences(run, config_in(run.path.parent, evaluate={"test_prompts": 9}))
    assert told == (
        "resuming with checkpoint.every=100 (was 3), evaluate.every=50 (was 7), "
        "evaluate.test_prompts=9 (was null); scores from here on are of other prompts than before "
        "(evaluate.test_prompts)"
    )


# --- Links ---


def test_a_link_in_place_of_a_folder_is_removed_and_never_followed(run: RunDir, tmp_path: Path) -> None:
    """Of an unfinished checkpoint, of an old one, of what a kill left, and of an evaluation."""
    treasure = tmp_path / "home" / "thesis.tex"
    treasure.parent.mkdir()
    treasure.write_text("years of work")
    links = [run.checkpoints / "step-000001", run.checkpoints / ".step-000001.universal.tmp"]
    links += [run.evaluations / "test-step-000009"]
    for link in links:
        link.symlink_to(treasure.parent)
    discard_evaluations(run, after=3)
    for step in (2, 3):
        checkpoint(run, replace(STATE, step=step))
    moved = tmp_path / "scratch"
    (run.checkpoints / "step-000002").rename(moved)
    (run.checkpoints / "step-000002").symlink_to(moved)
    checkpoint(run, replace(STATE, step=4))
    assert names(run) == ["step-000003", "step-000004"]
    assert treasure.read_text() == "years of work" and (moved / "sub" / "weights.bin").exists()
    assert not any(link.is_symlink() for link in links)


# --- Checkpoints ---


STATE = TrainerState(
    step=400, revision=200, cursors={0: 17, 3: 5}, trajectories=900, added=800, duplicates=100,
    evicted=4, tokens=12345, train_seconds=67.25, save_seconds=1.5,
)  # fmt: skip


def checkpoint(run: RunDir, state: TrainerState, keep: int = 2) -> dict[int, int]:
    folder = begin_checkpoint(run, state.step)
    (folder / "sub").mkdir()
    (folder / "sub" / "weights.bin").write_bytes(b"w" * 100)
    return complete_checkpoint(run, folder, state, keep=keep)


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_run_has_one_identity_for_good(run: RunDir) -> None:
    """Of one that an earlier version began none is made up: its shards would be another run's."""
    identity, config = run.identity, run.config()
    checkpoint(run, STATE)
    assert RunDir.create(config).identity == identity != 0
    run.identity_file.unlink()
    assert RunDir.create(config).identity == 0


def test_state_round_trips(run: RunDir) -> None:
    assert TrainerState.from_json(STATE.to_json()) == STATE
    assert TrainerState.from_json(TrainerState().to_json()) == TrainerState()
    checkpoint(run, STATE)
    folder = latest_checkpoint(run)
    assert folder is not None and read_state(folder) == replace(STATE, run=run.identity)


def test_only_complete_checkpoints_count(run: RunDir) -> None:
    assert latest_checkpoint(run) is None
    checkpoint(run, replace(STATE, step=100))
    half = begin_checkpoint(run, 200)
    (half / "weights.bin").write_bytes(b"w")
    write_atomic(half / "state.json", STATE.to_json())  # killed here: all but COMPLETE is there
    latest = latest_checkpoint(run)
    assert latest is not None and latest.name == "step-000100"

    again = begin_checkpoint(run, 200)
    assert again == half and list(again.iterdir()) == []  # the half one is gone
    complete_checkpoint(run, again, replace(STATE, step=200), keep=2)
    assert latest_checkpoint(run) == again


@pytest.mark.root("mounting a file, which cannot be deleted then, as an open one on NFS")
def test_an_old_checkpoint_that_is_in_use_is_deleted_later(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (100, 200):
        checkpoint(run, replace(STATE, step=step), keep=1)
    in_use = run.checkpoints / "step-000200/sub/weights.bin"
    subprocess.run(["mount", "--bind", in_use, in_use], check=True)
    try:
        checkpoint(run, replace(STATE, step=300), keep=1)
        checkpoint(run, replace(STATE, step=400), keep=1)
        latest = latest_checkpoint(run)
        assert latest is not None and latest.name == "step-000400"
        assert names(run) == ["step-000200", "step-000400"] and in_use.exists()
        assert "cannot delete" in caplog.text and "the next checkpoint tries again" in caplog.text
    finally:
        subprocess.run(["umount", in_use], check=True)
    checkpoint(run, replace(STATE, step=500), keep=1)
    assert names(run) == ["step-000500"]


def test_the_newest_are_kept_by_step_not_by_name(run: RunDir) -> None:
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoint(run, replace(STATE, step=step), keep=2)
    assert names(run) == ["step-1000000", "step-1000001"]


def test_a_second_checkpoint_of_a_step_leaves_the_first_alone(run: RunDir) -> None:
    checkpoint(run, STATE)
    later = replace(STATE, cursors={0: 20})
    folder = begin_checkpoint(run, 400)
    first = latest_checkpoint(run)
    assert first is not None and (folder.name, first.name) == ("step-000400.1", "step-000400")
    complete_checkpoint(run, folder, later, keep=1)
    assert names(run) == ["step-000400.1"]
    assert read_state(folder) == replace(later, run=run.identity)
    complete_checkpoint(run, begin_checkpoint(run, 400), later, keep=1)
    assert names(run) == ["step-000400.2"]  # not the name of the first, which would make it the oldest


def test_shards_are_needed_from_the_oldest_kept_checkpoint_on(run: RunDir) -> None:
    states = [replace(STATE, step=step, cursors={0: step, 3: 2 * step}) for step in (1, 3, 5)]
    assert [checkpoint(run, state, keep=2) for state in states] == [
        states[0].cursors,
        states[0].cursors,
        states[1].cursors,
    ]


# --- Evaluations ---


def part(step: int, correct: int, total: int) -> Evaluation:
    return Evaluation(split="test", step=step, correct=correct, total=total, tokens=10 * total, truncated=1)


def test_the_results_of_all_prompts_are_those_of_all_parts(run: RunDir) -> None:
    for searcher, results in enumerate(({0: 0.25, 2: 1.0}, {1: -3.5})):
        write_evaluation(run, searcher, 2, replace(part(80, correct=1, total=2), results=results))
    whole = find_evaluation(run, "test", 80)
    assert whole is not None and whole.results == {0: 0.25, 1: -3.5, 2: 1.0}


def test_an_evaluation_is_there_when_all_parts_are(run: RunDir) -> None:
    write_evaluation(run, 0, 2, part(80, correct=3, total=5))
    assert find_evaluation(run, "test", 80) is None
    write_evaluation(run, 1, 3, part(80, correct=9, total=9))  # of an attempt with three searchers
    assert find_evaluation(run, "test", 80) is None
    write_evaluation(run, 1, 2, part(80, correct=1, total=3))
    whole = find_evaluation(run, "test", 80)
    assert whole == replace(part(80, correct=4, total=8), truncated=2)
    assert whole is not None and whole.score == 0.5
    assert find_evaluation(run, "validation", 80) is None
    assert [path.name for path in run.evaluations.iterdir()] == ["test-step-000080.json"]  # one file of all
    write_evaluation(run, 0, 2, part(80, correct=3, total=5))  # by an attempt that evaluates again
    assert find_evaluation(run, "test", 80) == whole
    assert len(list(run.evaluations.iterdir())) == 1


def test_parts_without_a_reference_model_have_no_perplexity() -> None:
    known = replace(part(80, 3, 5), ref_logprob=-5.0)
    assert known.perplexity == pytest.approx(math.exp(5.0 / 50)) == (known + known).perplexity
    assert (known + part(80, 1, 3)).perplexity is part(80, 1, 3).perplexity is None


def test_a_correct_answer_that_was_cut_off_did_not_end_by_itself() -> None:
    whole = replace(part(80, 3, 5), cut_correct=2) + part(80, 1, 3)
    assert (whole.score, whole.ended_score) == (4 / 8, 2 / 8)
    assert part(80, 3, 5).ended_score == part(80, 3, 5).score
    assert math.isnan(part(80, 0, 0).ended_score)


def test_a_resume_discards_evaluations_of_steps_it_takes_again(run: RunDir) -> None:
    for step in (80, 100, 120):
        write_evaluation(run, 0, 1, part(step, 1, 1))
    write_evaluation(run, 0, 2, replace(part(90, 1, 1), split="validation"))  # the other part never came
    discard_evaluations(run, after=100)
    assert not list(run.evaluations.glob("*-000090*"))
    found = [step for step in (80, 100, 120) if find_evaluation(run, "test", step)]
    assert found == [80, 100]


def test_a_held_out_evaluation_cut_short_is_gone_on_with(run: RunDir) -> None:
    mine = part(100, 1, 1)
    write_evaluation(run, 1, 3, mine)
    discard_evaluations(run, after=100)
    assert read_part(run, 1, 3, "test", 100) == mine and read_part(run, 0, 3, "test", 100) is None
    assert missing_parts(run, "test", 100, 3) == [0, 2] and missing_parts(run, "test", 100, 2) == [0, 1]
    for searcher in (0, 2):
        write_evaluation(run, searcher, 3, mine)
    assert missing_parts(run, "test", 100, 3) == [] and read_part(run, 1, 3, "test", 100) is None
    discard_evaluations(run, after=99)
    assert list(run.evaluations.iterdir()) == []


def test_logs_of_the_newest_attempts_are_kept(run: RunDir) -> None:
    for _ in range(KEPT_ATTEMPTS + 5):
        newest = run.begin_attempt()
    names = sorted(path.name for path in run.logs.glob("attempt-*"))
    assert len(names) == KEPT_ATTEMPTS + 1 and names[-1] == newest.name == f"attempt-{KEPT_ATTEMPTS + 5:03d}"
    assert run.attempt == newest


# --- Signals ---


STOPPABLE = """
import os, signal, sys
from tba_hpc.run.signals import StopFlag
number = signal.Signals[sys.argv[1]]
with StopFlag() as stop:
    before = stop.is_set
    os.kill(os.getpid(), number)
    print(before, stop.is_set)
os.kill(os.getpid(), number)
"""


@pytest.mark.parametrize("name", [number.name for number in StopFlag.SIGNALS])
def test_signals_set_the_flag_and_later_nothing(name: str) -> None:
    """In a process of its own, down to the end of the interpreter."""
    command = [sys.executable, "-c", STOPPABLE, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True\n", "")


# --- Events ---


def test_events_are_lines_that_a_crash_may_tear(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_events(run) == []
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    log_event(run, "start", attempt="attempt-001", trainers=1, searchers=2)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    log_event(run, "refused", sentence='no "model" at C:\\\nmodels')
    with run.events_file.open("a") as file:
        file.write('{"time": 1.0, "ev')
    first, second = read_events(run)
    assert abs(first.pop("time") - time.time()) < 60 and second.pop("time") > 0
    assert first == {
        **{"event": "start", "job": "", "restarts": 0},
        **{"attempt": "attempt-001", "trainers": 1, "searchers": 2},
    }
    assert second == {
        **{"event": "refused", "job": "17", "restarts": 2},
        **{"sentence": 'no "model" at C:\\\nmodels'},
    }


@pytest.mark.parametrize(
    "content", ["", "{", '{"split": "test"}', '{"split": "test", "step": "x"}', "\x00\xff"]
)
def test_a_damaged_evaluation_counts_for_nothing_and_is_written_over(
    run: RunDir, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_evaluation(run, 0, 1, part(80, 1, 1))
    write_evaluation(run, 1, 2, part(100, 1, 1))
    broken = [run.evaluations / "test-step-000080.json"]
    broken += (run.evaluations / "test-step-000100").iterdir()
    for path in broken:
        path.write_bytes(content.encode("latin-1"))
    assert find_evaluation(run, "test", 80) is find_evaluation(run, "test", 100) is None
    # An empty file may be one that is not to be seen yet.
    assert (f"{broken[0]} is damaged" in caplog.text) == bool(content)
    assert (missing_parts(run, "test", 80, 1), missing_parts(run, "test", 100, 2)) == ([0], [0, 1])
    discard_evaluations(run, after=100)
    for step, searchers in ((80, 1), (100, 2)):
        for searcher in range(searchers):
            write_evaluation(run, searcher, searchers, part(step, 1, 1))
    assert find_evaluation(run, "test", 80) == part(80, 1, 1)
    assert find_evaluation(run, "test", 100) == part(100, 1, 1) + part(100, 1, 1)
