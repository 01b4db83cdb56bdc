"""Words for numbers, against English, and texts of strangers, against a terminal."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from tba_hpc.config import parse_config
from tba_hpc.core.wording import count, drop_lost_output, printable, without_fail
from tba_hpc.report.tables import Indented, Terminal, print_lines, print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.notes import Exit


def test_one_is_singular_and_none_and_many_are_plural() -> None:
    assert [count(n, "shard") for n in (0, 1, 2, 3000)] == ["0 shards", "1 shard", "2 shards", "3,000 shards"]
    assert [count(n, "trajectory") for n in (1, 2)] == ["1 trajectory", "2 trajectories"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[/]tab\tend"


def test_no_text_commands_a_terminal() -> None:
    seen = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[/]tab" + "\tend"
    assert printable(HOSTILE) == seen
    assert printable("Grüße, ⌈½⌉\n") == "Grüße, ⌈½⌉\n"

    for console in (
        Terminal(file=io.StringIO(), width=200),
        Terminal(file=io.StringIO(), width=200, no_color=True),
    ):
        print_lines([(HOSTILE, HOSTILE)], console)
        table = Table()
        table.add_column(Text(HOSTILE))
        console.print(table)
        console.print(HOSTILE, markup=False)
        assert isinstance(console.file, io.StringIO)
        assert r"\x1b]0;owned" in console.file.getvalue()
        assert not set(console.file.getvalue()) & set("\x1b\x07\x9b\r\u202e")


def test_only_a_terminal_breaks_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = f"/scratch/{'deep/' * 50}run"
    print_rows([{"run": path, "steps": 4}])
    Terminal().print(Indented(Text(f"see\n{path}"), 4))
    assert capsys.readouterr().out.split() == ["run", "steps", path, "4", "see", path]
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=20)
    terminal.print(Indented(Text("a short text of eight words in lines"), 4))
    assert isinstance(terminal.file, io.StringIO)
    assert terminal.file.getvalue() == "    a short text of \n    eight words in \n    lines\n"
    print_lines([("report", path)], terminal)
    assert terminal.file.getvalue().endswith(f"\nreport       {path}\n"), "a path to copy"


def test_a_terminal_still_has_its_own_colours() -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text("\x1b[1m", style="red"))
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "\x1b[31m\\x1b[1m\x1b[0m\n"


def test_what_is_only_shown_ends_nothing_and_complains_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with without_fail():
            raise ValueError("a line that cannot be drawn")
    assert capsys.readouterr().err == "cannot be shown: a line that cannot be drawn\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--version", "doctor --help"])
def test_output_that_takes_no_more_is_one_sentence(words: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_tba(words, PYTHONUNBUFFERED=unbuffered, stdout=full)
    said = "tba: cannot write standard output (No space left on device): redirect it elsewhere, or free space"
    assert (done.returncode, done.stderr) == (Exit.FAILED, f"{said} there\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_tba("--version", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.FAILED, "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize("command", ["status", "report"])
def test_signs_that_the_terminal_lacks_are_replaced(tmp_path: Path, encoding: str, command: str) -> None:
    tree = {"run": {"root": str(tmp_path / "π → …")}, "model": {"path": "π → …"}}
    run = RunDir.create(parse_config(tree))
    done = run_tba(command, str(run.path), PYTHONIOENCODING=encoding, stdout=subprocess.PIPE)
    assert done.returncode == 0 and "?" in done.stdout, done.stderr


def run_tba(words: str, *more: str, stdout: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tba_hpc", *words.split(), *more],
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="latin-1",
        env=os.environ | environment,
    )


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_output_that_was_closed_before_the_start_changes_no_status(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, closed, None)  # as Python does after >&-
    drop_lost_output()
