"""Logs as they are shown: which files, how much of each, and what comes while they are followed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import new_run

from tba_hpc.config import ConfigError
from tba_hpc.report.logs import log_files, show_logs
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts of two ranks, and two jobs."""
    made = new_run(tmp_path)
    (made.path / "slurm").mkdir()
    for number in (1, 2):
        folder = made.begin_attempt()
        for name in ("trainer-0000", "searcher-0003"):
            (folder / f"{name}.log").write_text("".join(f"{name} {number} {i}\n" for i in range(5)))
        (made.path / f"slurm/job-{number}.log").write_text(f"job {number}\n")
    return made


def test_the_newest_of_everything_is_shown_below_its_path(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    show_logs(run, None, None, lines=2, follow=False)
    latest = run.logs / "attempt-002"
    assert capsys.readouterr().out == (
        f"==> {run.path}/slurm/job-2.log <==\njob 2\n\n"
        f"==> {latest}/searcher-0003.log <==\nsearcher-0003 2 3\nsearcher-0003 2 4\n\n"
        f"==> {latest}/trainer-0000.log <==\ntrainer-0000 2 3\ntrainer-0000 2 4\n"
    )


def test_one_rank_of_one_attempt_is_shown_and_what_is_not_there_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    show_logs(run, "searcher-3", 1, lines=1, follow=False)
    assert capsys.readouterr().out.endswith("==\nsearcher-0003 1 4\n")
    assert log_files(run, "batch", None) == [run.path / "slurm/job-2.log"]
    refusals = {
        ("searcher-7", None): "has no log of searcher-7 yet; there are: job-2, searcher-0003, trainer-0000",
        ("worker-0", None): "--rank worker-0 is no rank: give trainer-0, .*, batch or elastic",
        (None, 9): "--attempt 9 has no logs in .*; available: 001, 002",
    }
    for (rank, attempt), words in refusals.items():
        with pytest.raises(ConfigError, match=words):
            show_logs(run, rank, attempt, lines=1, follow=False)


def test_logs_of_elastic_searchers_are_among_all(run: RunDir) -> None:
    logs = [run.path / f"slurm/searchers-7_{index}.log" for index in (0, 1)]
    for log in logs:
        log.write_text("joined\n")
    assert log_files(run, None, None)[:3] == [run.path / "slurm/job-2.log", *logs]
    assert log_files(run, "elastic", None) == logs
    assert not {*logs} & {*log_files(run, None, 1)}, "of that start alone"
    log_event(run, "start")
    logs[1].write_text("joined again\n")
    os.utime(logs[0], (1, 1))
    assert log_files(run, None, None)[:2] == [run.path / "slurm/job-2.log", logs[1]]
    assert log_files(run, "elastic", None) == logs


def test_a_line_is_shown_as_a_terminal_would_and_commands_nothing(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run.logs / "latest/trainer-0000.log"
    log.write_bytes(b"\xff\x1b[2J\n 10%\r 50%\r100%\nno end yet")
    show_logs(run, "trainer-0", None, lines=3, follow=False)
    assert capsys.readouterr().out.splitlines()[1:] == ["\ufffd\\x1b[2J", "100%", "no end yet"]


class Followed:
    """``tba logs RUN -f``, and the lines that it has printed."""

    def __init__(self, run: RunDir, *options: str) -> None:
        command = [sys.executable, "-m", "tba_hpc", "logs", str(run.path), "-f", "-n", "1", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self._lines: Iterator[str] = iter(self._process.stdout)
        self._guard = threading.Timer(60, self._process.kill)
        self._guard.start()

    def next_lines(self, count: int) -> list[str]:
        """The next lines that are not empty; fewer where it ended."""
        full = (line.rstrip("\n") for line in self._lines if line.strip())
        return [line for _, line in zip(range(count), full, strict=False)]

    def end(self) -> int:
        """Its exit status."""
        assert self.next_lines(1) == []
        self._guard.cancel()
        return self._process.wait()


def test_following_goes_on_over_a_new_job_and_attempt_until_the_run_is_finished(run: RunDir) -> None:
    followed = Followed(run)
    first = run.logs / "attempt-002"
    assert followed.next_lines(6) == [
        *(f"==> {run.path}/slurm/job-2.log <==", "job 2"),
        *(f"==> {first}/searcher-0003.log <==", "searcher-0003 2 4"),
        *(f"==> {first}/trainer-0000.log <==", "trainer-0000 2 4"),
    ]
    with (first / "trainer-0000.log").open("a") as log:
        log.write("half a ")
        log.flush()
        (first / "searcher-0003.log").write_text("anew\n")  # shorter than it was
        assert followed.next_lines(2) == [f"==> {first}/searcher-0003.log <==", "anew"]
        log.write("line\n")
    assert followed.next_lines(2) == [f"==> {first}/trainer-0000.log <==", "half a line"]
    (run.path / "slurm/job-3.log").write_text("job 3\n")
    assert followed.next_lines(2) == [f"==> {run.path}/slurm/job-3.log <==", "job 3"]
    (run.begin_attempt() / "trainer-0000.log").write_text("third\n")
    assert followed.next_lines(2) == [f"==> {run.logs}/attempt-003/trainer-0000.log <==", "third"]
    run.mark_finished()
    assert followed.end() == 0


def test_a_link_out_of_the_run_is_no_log_of_it(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "trainer-0000.log").write_text("secret\n")
    (run.logs / "latest/searcher-0003.log").unlink()
    (run.logs / "latest/searcher-0003.log").symlink_to(outside / "trainer-0000.log")
    assert [path.name for path in log_files(run, None, None)] == ["job-2.log", "trainer-0000.log"]
    (run.logs / "latest").unlink()
    (run.logs / "latest").symlink_to(outside)
    assert log_files(run, "trainer-0", None) == []


def test_a_run_without_any_log_says_no_more(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no log yet$"):
        show_logs(new_run(tmp_path), None, None, lines=1, follow=False)
