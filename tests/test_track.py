"""What trackers are told of a run, read back from the files that they keep."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import evaluate, new_run, resumed_run, search, step, write
from tensorboardX.proto.event_pb2 import Event
from typed import tba
from waiting import until

from tba_hpc.config import Config, ConfigError, load_config
from tba_hpc.report.data import RunData
from tba_hpc.report.track.follow import OWNER, News, follow, require_login, tracked
from tba_hpc.report.track.sinks import Point
from tba_hpc.run import owners
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer
from tba_hpc.run.owners import OwnedError, owned

BLOCK = 32768


def config_of(run: RunDir, *overrides: str) -> Config:
    return load_config(run.config_file, list(overrides))


# --- News ---


def test_each_record_is_told_once_however_often_one_begins_to_read(tmp_path: Path) -> None:
    run, state, told = new_run(tmp_path), dict[str, Any](), list[Point]()
    for number in range(1, 5):
        write(run.metrics_file("trainer"), [step(number, 1000.0 + number, loss=float(number))])
        write(run.metrics_file("searcher", number % 2), [search(1.0, 10, 100, version=2, reward=number)])
        if number == 3:
            evaluate(run, "validation", 2, (30, 31))
        news = News(run, json.loads(json.dumps(state)))
        told += news.look()
        state = news.state()
        assert news.look() == []
    losses = {p.step: p.figures["train/loss"] for p in told if "train/loss" in p.figures}
    assert losses == {1: 1, 2: 2, 3: 3, 4: 4}
    assert [p.figures["search/reward"] for p in told if "search/reward" in p.figures] == [1, 2, 3, 4]
    (score,) = [p for p in told if "validation/pass@1" in p.figures]
    assert (score.step, score.figures["validation/pass@1"]) == (2, 0.61)


def test_searchers_are_told_as_their_mean_by_version_and_a_resume_takes_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    resumed_run(run)
    write(run.metrics_file("searcher", 0), [search(4666.0, 1, 1000, version=4)])
    points = News(run, {}).look()
    again = [i for i, point in enumerate(points) if point.again]
    assert len(again) == 1 and points[again[0]].step == 4
    rates = {p.step: p.figures["search/tokens_per_second"] for p in points if "search/tokens" in p.figures}
    assert rates == {0: (1000 + 3000 + 500 + 0) / 4, 4: 1000}


# --- TensorBoard ---


def events(folder: Path) -> Iterator[Event]:
    """Of all files, in the order of their names; framing: length, its checksum, data, its checksum."""
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + size])
            yield event
            data = data[16 + size :]


def test_tensorboard_gets_steps_and_scores_and_purges_what_a_resume_took_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    resumed_run(run)
    follow(run, config_of(run, "track.tensorboard=true"))
    losses: dict[int, float] = {}
    scores = {}
    for event in events(run.track / "tensorboard"):
        if event.HasField("session_log"):  # what TensorBoard does on a start
            losses = {at: loss for at, loss in losses.items() if at < event.step}
        for value in event.summary.value:
            if value.tag == "train/loss":
                assert event.step not in losses
                losses[event.step] = value.simple_value
            if value.tag == "test/pass_1":  # as the library spells it
                scores[event.step] = value.simple_value
    assert losses == {1: 100, 2: 100, 3: 100, 4: 100, **{s: s for s in range(5, 11)}}
    assert scores == {0: pytest.approx(0.41), 10: pytest.approx(0.85)}


ANSWERS = (Answer(0, "2 + 2?", "4", True), Answer(1, "a|b\n<script>", "![x](//evil)\x1b", False))


# --- Weights & Biases ---


def wandb_records(path: Path) -> Iterator[Any]:
    """Of an offline file: a header, then blocks of records, each of a checksum, a length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(run: RunDir) -> list[dict[str, Any]]:
    """What all starts have logged."""
    rows = []
    for path in sorted(run.track.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for record in wandb_records(path):
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


WANDB = "track.wandb=p"
KEY = 40 * "a"


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_wandb_gets_figures_and_answers_once_over_two_starts_and_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'wandb==0.31.0'")
    run = new_run(tmp_path)
    write(run.metrics_file("trainer"), [step(s, 1000.0, loss=float(s)) for s in (1, 2)])
    follow(run, config_of(run, WANDB))
    write(run.metrics_file("trainer"), [step(s, 1000.0, loss=float(s)) for s in (3, 4)])
    evaluate(run, "test", 4, (40, 45), answers=ANSWERS)
    monkeypatch.setenv("JUDGE_KEY", "s3cret-of-mine")
    follow(run, config_of(run, WANDB))
    rows = history(run)
    losses = [(row["optimizer_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [row["test/pass@1"] for row in rows if "test/pass@1" in row] == [0.85]
    assert [row["_step"] for row in rows] == list(range(5))
    folders = [path.name for path in run.track.glob("wandb/offline-run-*")]
    assert len(folders) == 2 and len({name.split("-")[3] for name in folders}) == 1  # …-ID, or …-ID-1
    (table,) = run.track.glob("wandb/offline-run-*/files/media/table/test/*.json")
    shown = [[a.prompt, a.question, a.text, a.correct] for a in ANSWERS]
    columns = ["prompt", "question", "answer", "correct"]
    told = json.loads(table.read_text())
    assert (told["columns"], told["data"]) == (columns, shown)
    files = [path for path in run.track.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o77 for path in files} == {0}
    assert not any(b"s3cret-of-mine" in path.read_bytes() for path in files)


# --- Beside a run ---


def test_one_process_at_a_time_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "EARLIER_OWNER_SECONDS", 0.2)
    run = new_run(tmp_path)
    with owned(run, OWNER), pytest.raises(OwnedError):
        follow(run, config_of(run, "track.tensorboard=true"))
    assert not [*run.track.glob("tensorboard*")]


def test_beside_a_trainer_all_is_told_by_its_end(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin_attempt()
    run.adapt(["track.tensorboard=true"])
    with tracked(run, run.config()):
        for number in range(1, 4):
            write(run.metrics_file("trainer"), [step(number, 1.0, loss=float(number))])
    found = [v.simple_value for e in events(run.track / "tensorboard") for v in e.summary.value]
    assert [value for value in found if value] and (run.attempt / "tracker.log").read_bytes() == b""
    assert json.loads((run.track / "tensorboard.json").read_text())["places"]["trainer"] > 0


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(tmp_path)
    run.begin_attempt()
    run.adapt(["track.tensorboard=true"])
    (run.path / "track").write_text("in the way")
    with tracked(run, run.config()):
        pass
    assert len(caplog.records) == 1 and "tracker.log, then run tba track" in caplog.text
    with tracked(run, config_of(run, "track.tensorboard=false")):
        pass
    assert len(caplog.records) == 1


def test_a_tracker_that_fails_during_the_run_is_an_alert_until_figures_are_sent(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin_attempt()
    run.adapt(["track.tensorboard=true"])
    assert RunData.read(run).alerts == []
    (run.path / "track").write_text("in the way")
    with tracked(run, run.config()):
        until(run.tracker_failed.exists)
        (alert,) = RunData.read(run).alerts
    assert alert.short == "figures are not sent to TensorBoard (see logs/latest/tracker.log)"
    assert f"See {run.logs}/attempt-001/tracker.log, then type tba track {run.path}." in alert.sentence
    (run.path / "track").unlink()
    follow(run, run.config())
    assert RunData.read(run).alerts == []
    run.tracker_failed.touch()
    run.begin_attempt()
    assert RunData.read(run).alerts == []


def test_a_run_that_w_and_b_would_not_hear_of_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'wandb==0.31.0'")
    wanted = config_of(new_run(tmp_path), WANDB)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    here = {"HOME": str(home), "PATH": os.environ["PATH"]}
    with pytest.raises(ConfigError, match=r"track\.wandb=p needs a login to W&B, .* export WANDB_"):
        require_login(wanted, here)
    require_login(wanted, here, python="/no/python")  # is not known to lack one
    require_login(config_of(new_run(tmp_path), "track.wandb=null"), here)
    require_login(wanted, here | {"WANDB_MODE": "offline"})
    require_login(wanted, here | {"WANDB_API_KEY": KEY})
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    require_login(wanted, here)
    (home / ".netrc").unlink()
    (home / "wandb").mkdir()
    (home / "wandb/settings").write_text("[default]\nmode = offline\n")  # by wandb offline
    require_login(wanted, here)


def test_the_commands_ask_for_the_login_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'wandb==0.31.0'")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE")
    done = tba("run", "quickstart", "--set", WANDB, "--set", f"run.root={tmp_path}/runs")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs a login to W&B" in done.stderr
    assert not (tmp_path / "runs").exists()
    later = tba("track", new_run(tmp_path).path, "--set", WANDB)
    assert later.returncode == 2 and later.stderr == done.stderr


def test_nothing_is_imported_until_it_is_used(tmp_path: Path) -> None:
    program = (
        "import sys, tba_hpc.cli, tba_hpc.report.track.follow; "
        "print({'wandb', 'tensorboardX'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command_tells_a_run_that_names_no_tracker(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    resumed_run(run)
    assert tba("track", run.path, "--set", "track.tensorboard=true").returncode == 0
    assert len([e for e in events(run.track / "tensorboard") if e.summary.value]) > 20
    done = tba("track", run.path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "names no tracker" in done.stderr
