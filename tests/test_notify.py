"""Reports of what becomes of a run, to a real command and to a real server on this machine."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from recorded import evaluate, happen, new_run, save, search, step, write
from typed import tba

from tba_hpc.config import ConfigError, load_config, parse_config
from tba_hpc.report import notify
from tba_hpc.report.run_state import QueueEntry
from tba_hpc.run.directory import RunDir
from tba_hpc.run.owners import owned
from tba_hpc.run.slurm_queue import job_states

SECRET = "T00/B00/oHsoSecret"


class Server(ThreadingHTTPServer):
    """Server that notes requests: method, path, and text of the message. answer: status that it answers."""

    answer = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, json.loads(body)["text"] if body else ""))
        self.send_response(self.server.answer)
        self.end_headers()

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("A_HOOK", server.url)
        yield server
        server.shutdown()


def run_that_tells(folder: Path, **tell: object) -> RunDir:
    run = new_run(folder)
    config = load_config(run.config_file, [f"run.notify={json.dumps(tell)}"])
    run.config_file.write_text(json.dumps(config.model_dump(mode="json")))
    return run


def to_file(folder: Path) -> list[str]:
    """Command that writes down event and message."""
    return ["sh", "-c", f'echo "$TBA_EVENT $1" >> {folder}/told', "told"]


def told(folder: Path) -> list[str]:
    return (folder / "told").read_text().splitlines() if (folder / "told").exists() else []


def begin(run: RunDir, at: float, attempt: int = 1) -> None:
    happen(run, at, "start", attempt=f"attempt-{attempt:03d}", trainers=1, searchers=2)


def no_job(_: RunDir) -> list[QueueEntry]:
    return []


def test_a_run_is_told_of_from_its_start_to_its_end(tmp_path: Path, server: Server) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path), webhook_variable="A_HOOK"), time.time()
    steps = run.config().train.steps
    with owned(run):
        told_of = notify.Notifier(run, no_job, since=now - 1)
        assert told(tmp_path) == [], "nothing has happened"
        begin(run, now)
        for _ in range(2):
            told_of.look()
        assert told(tmp_path) == [
            f"start {run.path.name}: started at step 0 of {steps} | tba status {run.path}"
        ]
        write(run.metrics_file("trainer"), [step(number, now, loss=1.0) for number in range(1, 4)])
        happen(run, now, "failed", code=1)
        begin(run, now + 1, attempt=2)
        told_of.look()
        again = f"start {run.path.name}: started again (attempt-002) at step 0 of {steps}, repeating 3 steps"
        assert told(tmp_path)[1].startswith(again)
        evaluate(run, "test", 0, (20, 21))
        evaluate(run, "test", steps, (40, 45))
        run.mark_finished()
        told_of.look()
        happen(run, now, "finished")
        told_of.leave()
    lines = told(tmp_path)
    assert (
        lines[2] == f"end {run.path.name}: finished at step 3, test 41.0 % → 85.0 % | tba report {run.path}"
    )
    assert [f"POST /{SECRET}"] * 3 == [f"{method} {path}" for method, path, _ in server.asked]
    assert [text for _, _, text in server.asked] == [line.partition(" ")[2] for line in lines]


@pytest.mark.parametrize(
    ("event", "extra", "words", "command"),
    [
        ("refused", {"sentence": "the disk is full:\nfree space"}, "the disk is full: free space", "tba run"),
        ("failed", {"code": 1}, "gave up: the ranks failed", "tba run"),
        ("stopped", {}, "stopped at step 0", "tba run"),
    ],
)
def test_an_end_comes_with_the_command_that_helps(
    tmp_path: Path, event: str, extra: dict[str, object], words: str, command: str
) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    with owned(run):
        told_of = notify.Notifier(run, no_job, since=now - 1)
        begin(run, now)
        told_of.look()
        happen(run, now, event, **extra)
        told_of.leave()
    assert len(told(tmp_path)) == 2
    assert words in told(tmp_path)[1] and told(tmp_path)[1].endswith(f" | {command} {run.path}")


def test_what_was_before_is_not_told_again(tmp_path: Path) -> None:
    run = run_that_tells(tmp_path, command=to_file(tmp_path))
    begin(run, time.time() - 100)
    happen(run, time.time() - 50, "failed", code=1)
    told_of = notify.Notifier(run, no_job, since=time.time() - 1)
    told_of.look()
    assert told(tmp_path) == []


def test_a_job_that_queues_again_says_so_and_one_that_is_gone_too(tmp_path: Path) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    entry = {"job": "7", "id": "7", "state": "RUNNING", "reason": "", "nodes": "n", "start": "", "left": ""}
    for kind in ("allocated", "start"):
        happen(run, now, kind, job="7", attempt="attempt-001", trainers=1, searchers=2, nodes="n")
    told_of = notify.Notifier(run, lambda _: [entry], since=now - 1)
    told_of.look()
    told_of.leave()
    happen(run, now, "requeue", job="7")
    told_of.leave()
    first, gone, queue = told(tmp_path)
    assert first.startswith("start ") and queue.endswith(
        f"nodes unreachable: leaves its nodes at step 0, to queue again | tba status {run.path}"
    )
    assert "job 7 is gone" in gone and gone.endswith(f"tba submit --config {run.path} --nodes 1")


@pytest.mark.parametrize(("recorded", "resumed"), [(True, False), (True, True), (False, False)])
def test_a_start_after_a_crash_is_at_the_last_checkpoint(
    tmp_path: Path, recorded: bool, resumed: bool
) -> None:
    """recorded: whether the trainer could record its checkpoint. resumed: whether it has taken two steps."""
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    begin(run, now - 60)
    write(
        run.metrics_file("trainer"),
        [
            {"time": now - 55, "event": "started", "step": 0},
            *(step(number, now - 50, loss=1.0) for number in range(1, 6)),
        ],
    )
    save(run, now - 45, 5, recorded=recorded)
    write(run.metrics_file("trainer"), [step(number, now - 40, loss=1.0) for number in range(6, 9)])
    told_of = notify.Notifier(run, no_job, since=now - 1)
    happen(run, now - 30, "failed", code=137)
    begin(run, now, attempt=2)
    if resumed:
        again = [step(number, now + 2, loss=1.0) for number in (6, 7)]
        write(run.metrics_file("trainer"), [{"time": now + 1, "event": "resumed", "step": 5}, *again])
    with owned(run):
        told_of.look()
    end = f"at step 5 of {run.config().train.steps}, repeating 3 steps | tba status {run.path}"
    assert told(tmp_path) == [f"start {run.path.name}: started again (attempt-002) {end}"]


IN_JOB = {"job": "7", "id": "7", "reason": "", "nodes": "n", "start": "", "left": ""}


@pytest.mark.parametrize(
    ("state", "elapsed", "words", "command"),
    [
        ("COMPLETING", "0:00", "back in the queue at step 0", "tba status {run}"),
        ("PENDING", "0:00", "back in the queue at step 0", "tba status {run}"),
        ("COMPLETING", "1:30", "job 7 is gone, the run is at step 0", "tba submit --config {run} --nodes 1"),
        ("UNKNOWN", "", "its job ends at step 0; without squeue here", "tba status {run}"),
    ],
)
def test_a_job_that_slurm_ends_is_gone_only_if_slurm_does_not_requeue_it(
    tmp_path: Path, state: str, elapsed: str, words: str, command: str
) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    for kind in ("allocated", "start"):
        happen(run, now, kind, job="7", attempt="attempt-001", trainers=1, searchers=2, nodes="n")
    notify.Notifier(run, lambda _: [{**IN_JOB, "state": state, "elapsed": elapsed}], since=now - 1).leave()
    (line,) = [line for line in told(tmp_path) if line.startswith("end ")]
    assert words in line and line.endswith(f" | {command.format(run=run.path)}")


@pytest.mark.parametrize(
    ("follower", "event", "words"),
    [
        ("PENDING", "stopped", "stopped at step 0; job 100 continues | tba status {run}"),
        ("CANCELLED", "stopped", "stopped at step 0 | tba submit --config {run} --nodes 1"),
        (
            "PENDING",
            "failed",
            "the ranks failed, exit status 137; see {run}/logs/latest; job 100 continues | ",
        ),
        ("CANCELLED", "failed", "gave up: the ranks failed, exit status 137; see {run}/logs/latest | "),
    ],
)
def test_in_a_chain_the_next_job_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follower: str, event: str, words: str
) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text("99\n")
    (run.path / "slurm/chain").write_text("99\n100\n101\n")
    rows = [f"{job}|{state}||||||{run.path}" for job, state in ((99, "RUNNING"), (100, follower))]
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '%s\\n' '{rows[0]}' '{rows[1]}'\n")
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for kind in ("allocated", "start"):
        happen(run, now, kind, job="99", attempt="attempt-001", trainers=1, searchers=2, nodes="n")
    happen(run, now, event, job="99", **({"code": 137} if event == "failed" else {}))
    notify.Notifier(run, job_states, since=now - 1).leave()
    assert told(tmp_path)[-1].startswith(f"end {run.path.name}: {words.format(run=run.path)}")


def test_a_start_that_nobody_saw_before_the_end_is_told_with_it(tmp_path: Path) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    told_of = notify.Notifier(run, no_job, since=now - 1)
    with owned(run):
        begin(run, now)
        happen(run, now, "stopped")
        told_of.leave()
    assert [line.split(": ")[1].split(" at ")[0] for line in told(tmp_path)] == ["started", "stopped"]


def test_an_alert_is_told_once_though_its_figure_changes(tmp_path: Path) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    begin(run, now)
    told_of = notify.Notifier(run, no_job, since=now - 1)
    with owned(run):
        for first in (1, 21):
            rows = [step(number, now, loss=1.0) for number in range(first, first + 20)]
            write(run.metrics_file("trainer"), [{**row, "train/skipped_steps": row["step"]} for row in rows])
            told_of.look()
        notify.Notifier(run, no_job, since=now - 1, beside=True).look()  # of the next attempt
    alerts = [line for line in told(tmp_path) if line.startswith("alert ")]
    assert len(alerts) == 1 and f"| tba report {run.path}" in alerts[0]


def test_an_alert_names_a_command_that_can_be_pasted(tmp_path: Path) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    begin(run, now)
    write(run.metrics_file("searcher", 0), [search(now, 100, 1000, rejected=10)])
    with owned(run):
        notify.Notifier(run, no_job, since=now - 1).look()
    (line,) = [line for line in told(tmp_path) if line.startswith("alert ")]
    assert f" (see tba logs {run.path} --rank searcher-0) | tba report {run.path}" in line


def test_a_watch_of_a_finished_run_says_so(tmp_path: Path) -> None:
    run = run_that_tells(tmp_path, command=to_file(tmp_path))
    run.mark_finished()
    command = [sys.executable, "-m", "tba_hpc", "watch", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, told(tmp_path)) == (0, [])
    assert done.stderr.endswith(f" {run.path} is finished: there is nothing left to report\n")


def test_an_alert_that_comes_back_after_an_hour_is_told_again(tmp_path: Path) -> None:
    run, now = run_that_tells(tmp_path, command=to_file(tmp_path)), time.time()
    begin(run, now)
    write(
        run.metrics_file("trainer"), [{**step(i, now, loss=1.0), "train/skipped_steps": i} for i in range(20)]
    )
    told_of = notify.Notifier(run, no_job, since=now - 1)
    with owned(run):
        told_of.look()
        told_of._alerts = {key: seen - 3601 for key, seen in told_of._alerts.items()}
        told_of.look()
        told_of.look()
    assert sum(line.startswith("alert ") for line in told(tmp_path)) == 2


def test_the_heartbeat_ceases_with_the_run_and_when_it_falls_silent(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_that_tells(tmp_path, command=to_file(tmp_path), heartbeat_variable="A_HOOK")
    now = time.time()
    begin(run, now)
    with owned(run):
        told_of = notify.Notifier(run, no_job, since=now - 1)
        told_of.look()
        told_of.look()
        assert server.asked == [("GET", f"/{SECRET}", "")], "once in a minute"
        told_of._beat -= 60
        told_of.look()
        assert len(server.asked) == 2
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        told_of.look()
        assert len(server.asked) == 2
        assert told(tmp_path)[1].startswith(f"silence {run.path.name}: starting")
        assert "nothing heard for 60 min" in told(tmp_path)[1]
        told_of.look()
        monkeypatch.setattr(time, "time", lambda: now)
        told_of._beat -= 60
        told_of.look()
        assert len(server.asked) == 3 and len(told(tmp_path)) == 2


def test_what_fails_costs_a_line_without_the_address(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = 404
    run = run_that_tells(tmp_path, command=["/no/such"], webhook_variable="A_HOOK", heartbeat_variable="NONE")
    told_of = notify.Notifier(run, no_job, since=time.time() - 1)
    begin(run, time.time())
    monkeypatch.setenv("NONE", f"http://127.0.0.1:1/{SECRET} x")
    with owned(run), caplog.at_level(logging.INFO):
        told_of.look()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "/no/such: No such file or directory",
        "A_HOOK: the answer was status 404",
        "NONE: no answer (ConnectError)",
    ]
    assert SECRET not in caplog.text and SECRET not in run.config_file.read_text()


def test_an_address_that_lacks_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"model": {"path": "x"}, "run": {"notify": {"webhook_variable": "A_HOOK"}}})
    with pytest.raises(ConfigError, match=r"run\.notify\.webhook_variable=A_HOOK is not set in the environ"):
        notify.require_addresses(config)
    monkeypatch.setenv("A_HOOK", "file:///etc/passwd")
    with pytest.raises(ConfigError, match="holds no address: begin it with https://") as refused:
        notify.require_addresses(config)
    assert "passwd" not in str(refused.value)
    monkeypatch.setenv("A_HOOK", "https://hooks.example/x")
    notify.require_addresses(config)


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("./mial.sh 'a run'", "./mial.sh is no executable file"),
        ("./plain.sh", "./plain.sh is no executable file"),
        ("mail.sh", "mail.sh is not on the PATH"),
        ("./mail.sh", ""),
        ("sh -c true", ""),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, rule: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("mail.sh", 0o700), ("plain.sh", 0o600)):
        Path(name).write_text("#!/bin/sh\n")
        Path(name).chmod(mode)
    config = parse_config({"model": {"path": "x"}, "run": {"notify": {"command": command}}})
    refused = pytest.raises(ConfigError, match=rf"run\.notify\.command={rule}: name one")
    with refused if rule else nullcontext():
        notify.require_command(config)


def test_a_command_is_sought_where_the_job_will_seek_it(tmp_path: Path) -> None:
    (tmp_path / "mail.sh").touch(0o700)
    config = parse_config({"model": {"path": "x"}, "run": {"notify": {"command": "mail.sh"}}})
    with pytest.raises(ConfigError, match=r"mail\.sh is not on the PATH"):
        notify.require_command(config)
    notify.require_command(config, {"PATH": str(tmp_path)})


@pytest.mark.parametrize("verb", [["--dry-run"], []])
def test_tba_run_refuses_a_mistyped_command(tmp_path: Path, verb: list[str]) -> None:
    run = new_run(tmp_path)
    refused = tba("run", str(run.config_file), *verb, "--set", "run.notify.command=./mial.sh")
    assert refused.returncode == 2
    assert "run.notify.command=./mial.sh is no executable file" in refused.stderr


def test_a_launcher_that_is_killed_is_told_of(tmp_path: Path) -> None:
    """The process beside the launcher outlives it for a moment, and reports its end."""
    run = run_that_tells(tmp_path, command=to_file(tmp_path))
    run.logs.mkdir(exist_ok=True)
    launcher = (
        "import sys, time; from pathlib import Path; from tba_hpc.run.directory import RunDir\n"
        "from tba_hpc.report.notify import notified; from tba_hpc.run.owners import owned\n"
        "from tba_hpc.run.events import log_event\n"
        "run = RunDir.open(Path(sys.argv[1]))\n"
        "with owned(run), notified(run, run.config()):\n"
        "    log_event(run, 'start', attempt='attempt-001', trainers=1, searchers=2); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher, str(run.path)])
    _until(lambda: len(told(tmp_path)) == 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _until(lambda: len(told(tmp_path)) == 2)
    assert "or its machine was lost" in told(tmp_path)[1]
    assert told(tmp_path)[1].endswith(f"| tba run {run.path}")


def test_slurms_signal_to_all_processes_of_a_job_does_not_end_the_messages(tmp_path: Path) -> None:
    """Which come before the launcher has saved: how the run ended is known only afterwards."""
    run = run_that_tells(tmp_path, command=to_file(tmp_path))
    run.logs.mkdir(exist_ok=True)
    with owned(run), notify.notified(run, run.config()):
        happen(run, time.time(), "start", attempt="attempt-001", trainers=1, searchers=2)
        _until(lambda: len(told(tmp_path)) == 1)
        (beside,) = (child for child in psutil.Process().children() if "watch" in child.cmdline())
        status = dict(
            line.split(":\t") for line in Path(f"/proc/{beside.pid}/status").read_text().splitlines()
        )
        assert int(status["SigBlk"], 16) & 1 << signal.SIGTERM - 1
        beside.terminate()
        happen(run, time.time(), "stopped")
    assert told(tmp_path)[1:] == [f"end {run.path.name}: stopped at step 0 | tba run {run.path}"]


def test_who_ends_a_watch_of_his_own_ends_no_run(tmp_path: Path) -> None:
    run = run_that_tells(tmp_path, command=to_file(tmp_path))
    with owned(run):
        command = [sys.executable, "-m", "tba_hpc", "watch", str(run.path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        begin(run, time.time())
        _until(lambda: len(told(tmp_path)) == 1)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert len(told(tmp_path)) == 1 and "messages follow when something changes" in said


def _until(done: object) -> None:
    end = time.monotonic() + 60
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.1)
