"""Prints the logs of a run's ranks and batch scripts: the last lines of each, or new lines as they come."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba_hpc.config import ConfigError
from tba_hpc.core.wording import printable
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.files import open_regular
from tba_hpc.run.notes import log_file, rank_name

LOG_CHECK_SECONDS = 0.5
"""Pause between two checks of followed files."""

MOST_BYTES = 1 << 22
"""Largest number of bytes that are read from a log's end to find its last lines."""

BATCH = "batch"
"""Value of ``--rank`` that selects the batch script's log."""

ELASTIC = "elastic"
"""Value of ``--rank`` that selects the logs of elastic searchers' jobs."""

RANK = re.compile(r"(trainer|searcher)-(\d+)")


def log_files(run: RunDir, rank: str | None, attempt: int | None) -> list[Path]:
    """List the requested logs that exist: the newest batch script's, the elastic searchers', then the ranks'.

    rank: ``trainer-0``, ``searcher-3``, ``mpiexec``, ``batch`` or ``elastic``; None: all of these, but the
    last two only if ``attempt`` is None, and those of elastic searchers only since the run's last start.
    attempt: number of an attempt; None: the newest. Links that lead out of the run are left out. Raises
    ConfigError if ``rank`` is another name or the attempt has no logs.
    """
    scripts = sorted((run.path / "slurm").glob("job-*.log"), key=lambda path: path.stat().st_mtime_ns)[-1:]
    elastic = sorted((run.path / "slurm").glob("searchers-*.log"))
    folder = run.logs / (f"attempt-{attempt:03d}" if attempt is not None else "latest")
    if attempt is not None and not folder.is_dir():
        kept = ", ".join(path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*")))
        raise ConfigError(f"--attempt {attempt} has no logs in {run.logs}; available: {kept or 'none'}")
    folder = folder.resolve()
    if rank in (BATCH, ELASTIC):
        files = scripts if rank == BATCH else elastic
    elif rank is None:
        files = [*scripts, *_since_the_last_start(run, elastic)] if attempt is None else []
        files += sorted(folder.glob("*.log"))
    else:
        files = [log_file(folder, _name(rank))]
    return [file for file in files if file.is_file() and file.resolve().is_relative_to(run.path.resolve())]


def _since_the_last_start(run: RunDir, logs: Sequence[Path]) -> list[Path]:
    """Return the logs that were written to since the run's ranks were started last."""
    last = max((event["time"] for event in read_events(run) if event["event"] == "start"), default=0.0)
    return [log for log in logs if log.stat().st_mtime >= last]


def _name(rank: str) -> str:
    """Return the name of a rank's log: ``trainer-0000`` for ``trainer-0``. Raises ConfigError."""
    if match := RANK.fullmatch(rank):
        return rank_name("trainer" if match[1] == "trainer" else "searcher", int(match[2]))
    if rank == "mpiexec":
        return rank
    raise ConfigError(f"--rank {rank} is no rank: give trainer-0, searcher-3, mpiexec, {BATCH} or {ELASTIC}")


def show_logs(run: RunDir, rank: str | None, attempt: int | None, *, lines: int, follow: bool) -> None:
    """Print the last lines of each log under its path.

    rank, attempt: see ``log_files``. lines: number of lines per log. follow: whether to go on with new lines,
    also of later attempts and jobs unless ``attempt`` is given, until the run is finished. Raises ConfigError
    if ``log_files`` does, or if there is no log and ``follow`` is False.
    """
    files, printer = log_files(run, rank, attempt), Printer()
    if not files and not follow:
        known = ", ".join(file.stem for file in log_files(run, None, attempt))
        others = f"; there are: {known}" if known else ""
        raise ConfigError(f"{run.path} has no log{f' of {rank}' if rank else ''} yet{others}")
    for file in files:
        printer.show(file, last=lines, unfinished=not follow)
    while follow:
        over = run.finished_file.exists()  # asked before the last lines are read
        for file in log_files(run, rank, attempt):
            printer.show(file)
        if over:
            return
        time.sleep(LOG_CHECK_SECONDS)


@dataclass
class Printer:
    """Printer of new lines of several files, with a heading whenever the file changes.

    offsets: number of bytes already read, by file. file: the file printed last.
    """

    offsets: dict[Path, int] = field(default_factory=dict)
    file: Path | None = None

    def show(self, file: Path, *, last: int | None = None, unfinished: bool = False) -> None:
        """Print the lines written since the last call.

        last: largest number of lines to print; None for all. unfinished: print an unfinished line, too,
        instead of leaving it for the next call.
        """
        lines = self._new_lines(file, near_end=last is not None, unfinished=unfinished)
        lines = lines if last is None else lines[max(0, len(lines) - last) :]
        if lines and file != self.file:
            print(f"{'' if self.file is None else chr(10)}==> {printable(str(file))} <==", flush=True)
            self.file = file
        for line in lines:
            print(printable(line), flush=True)

    def _new_lines(self, path: Path, *, near_end: bool, unfinished: bool) -> list[str]:
        """Read new lines as a terminal would show them, with only the last state of a progress bar.

        near_end: skip all but the last MOST_BYTES of a file that is read for the first time. unfinished: see
        ``show``.
        """
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = self.offsets.get(path, max(0, size - MOST_BYTES) if near_end else 0)
            start = start if start <= size else 0  # if the file has become shorter, it is a new one
            file.seek(start)
            data = file.read()
        new = data if unfinished else data[: data.rfind(b"\n") + 1]
        self.offsets[path] = start + len(new)
        lines = new.replace(b"\0", b"").decode(errors="replace").removesuffix("\n").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines] if new else []
