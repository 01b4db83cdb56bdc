"""Shows the logs of a run's ranks and batch scripts: the end of each, or new lines as they come."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from tba_hpc.config import ConfigError
from tba_hpc.core.wording import printable
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import open_regular
from tba_hpc.run.notes import log_file, rank_name

LOG_CHECK_SECONDS = 0.5
"""Pause between two checks of followed files."""

MOST_BYTES = 1 << 22
"""Largest part of a log's end that is read for its last lines."""

BATCH = "batch"
"""Name of the batch script's log; other names are of ranks."""

RANK = re.compile(r"(trainer|searcher)-(\d+)")


def log_files(run: RunDir, rank: str | None, attempt: int | None) -> list[Path]:
    """List the requested logs that exist: the newest batch script's, then the ranks'.

    rank: ``trainer-0``, ``searcher-3``, ``mpiexec`` or ``batch``; None for all. attempt: None for the newest,
    the only one to which the batch script's log belongs. Links that lead out of the run are left out. Raises
    ConfigError for a rank or an attempt that does not exist.
    """
    scripts = sorted((run.path / "slurm").glob("job-*.log"), key=lambda path: path.stat().st_mtime_ns)[-1:]
    folder = run.logs / (f"attempt-{attempt:03d}" if attempt is not None else "latest")
    if attempt is not None and not folder.is_dir():
        kept = ", ".join(path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*")))
        raise ConfigError(f"--attempt {attempt} has no logs in {run.logs}: kept are {kept or 'none'}")
    folder = folder.resolve()
    if rank == BATCH:
        files = scripts
    elif rank is None:
        files = [*(scripts if attempt is None else []), *sorted(folder.glob("*.log"))]
    else:
        files = [log_file(folder, _name(rank))]
    return [file for file in files if file.is_file() and file.resolve().is_relative_to(run.path.resolve())]


def _name(rank: str) -> str:
    """Turn ``trainer-0`` into the log's name, ``trainer-0000``. Raises ConfigError."""
    if match := RANK.fullmatch(rank):
        return rank_name("trainer" if match[1] == "trainer" else "searcher", int(match[2]))
    if rank == "mpiexec":
        return rank
    raise ConfigError(f"--rank {rank} is no rank: give trainer-0, searcher-3, mpiexec, or {BATCH}")


def show_logs(run: RunDir, rank: str | None, attempt: int | None, *, lines: int, follow: bool) -> None:
    """Print the last ``lines`` of each log, each below its path.

    follow: then print new lines, also of later attempts and jobs, until the run is finished. attempt: follow
    only this one. Raises ConfigError, without ``follow`` also if there is no log.
    """
    files, printer = log_files(run, rank, attempt), Printer()
    if not files and not follow:
        known = ", ".join(file.stem for file in log_files(run, None, attempt)) or "none"
        raise ConfigError(f"{run.path} has no log{f' of {rank}' if rank else ''} yet; there are: {known}")
    for file in files:
        printer.show(file, last=lines, unfinished=not follow)
    while follow:
        over = run.finished_file.exists()  # read first: if it is finished, this check shows the last lines
        for file in log_files(run, rank, attempt):
            printer.show(file)
        if over:
            return
        time.sleep(LOG_CHECK_SECONDS)


@dataclass
class Printer:
    """Prints new lines of several files, with a heading whenever the file changes.

    offsets: number of bytes of each file already read.
    """

    offsets: dict[Path, int] = field(default_factory=dict)
    file: Path | None = None

    def show(self, file: Path, *, last: int | None = None, unfinished: bool = False) -> None:
        """Print the lines written since the last call, or only the ``last`` ones.

        unfinished: print an unfinished line, too, instead of leaving it for the next call.
        """
        lines = self._new_lines(file, near_end=last is not None, unfinished=unfinished)
        lines = lines if last is None else lines[max(0, len(lines) - last) :]
        if lines and file != self.file:
            print(f"{'' if self.file is None else chr(10)}==> {printable(str(file))} <==", flush=True)
            self.file = file
        for line in lines:
            print(printable(line), flush=True)

    def _new_lines(self, path: Path, *, near_end: bool, unfinished: bool) -> list[str]:
        """Read new lines as a terminal shows them: progress bars in their last state, no NULs of mpiexec."""
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = self.offsets.get(path, max(0, size - MOST_BYTES) if near_end else 0)
            start = start if start <= size else 0  # a shorter file is a new one of the same name
            file.seek(start)
            data = file.read()
        new = data if unfinished else data[: data.rfind(b"\n") + 1]
        self.offsets[path] = start + len(new)
        lines = new.replace(b"\0", b"").decode(errors="replace").removesuffix("\n").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines] if new else []
