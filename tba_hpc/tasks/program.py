"""Programs run within limits of time and memory, and a reward by one that is run for each completion.

The program gets one line of JSON on its input, the row's fields and the completion, and writes the reward as
the last line of its output. It is started without a shell, in a new and empty folder, with an environment
that holds no variable of the run. Confined are: the time; the memory and
processor time of each process; the size of each file. NOT confined are: the network, what it reads and writes
elsewhere, the number of its processes, and one that begins a session of its own, which outlives it. Where
completions are run as code that nobody has read, put a container or bubblewrap into the command.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.run.modules import find_file
from tba_hpc.run.signals import kill_session

LARGEST_FILE = 16 << 20
"""Bytes of a file that a program may write, its output included."""

OPEN_FILES = 64
"""Files that it may have open."""

QUOTED = 200
"""Bytes of the end of its error output that an error quotes."""

# In a process of its own: what runs between fork and exec in one of several threads may wait for ever.
# The kernel kills it, as run.signals.die_with has it, with the thread that waits for it.
LIMITER = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(1, 9)
parent, memory, seconds, size, files = map(int, sys.argv[1:6])
if os.getppid() != parent:
    sys.exit(1)
for limit, value in (("AS", memory), ("CPU", seconds), ("FSIZE", size), ("NOFILE", files), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
try:
    os.execvp(sys.argv[6], sys.argv[6:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[6]}: {error.strerror}")
"""


class ProgramError(RuntimeError):
    """A program ended without a reward; the message says how."""


class Program:
    """A reward by running one; as many at once as its section allows. Raises ProgramError.

    key: what it is called in errors.
    """

    def __init__(self, key: str, section: RewardSection) -> None:
        assert section.program is not None
        self._key = key
        self._section = section
        self._words = [_found(key, word) for word in section.program]
        self._pool = ThreadPoolExecutor(section.concurrency, "program")

    def __call__(self, answers: Sequence[tuple[Mapping[str, object], str]]) -> list[float]:
        """What the program writes of each row and completion."""
        running = [self._pool.submit(self._run, {**row, "completion": text}) for row, text in answers]
        return [one.result() for one in running]

    def _run(self, fields: Mapping[str, object]) -> float:
        section = self._section
        text = json.dumps(fields).encode() + b"\n"
        ended = run_confined(self._words, text, seconds=section.seconds, memory_mb=section.memory_mb)
        if ended.status < 0:
            return math.nan if section.when_killed is None else section.when_killed
        last = ended.said.strip().rpartition("\n")[2]
        try:
            if ended.status == 0:
                return float(last)
        except ValueError:
            pass
        why = ended.last_error or f"its last line was {last[:QUOTED]!r}"
        status = ended.status
        raise ProgramError(f"{self._key}: {self._words[0]} ended with status {status} and no reward: {why}")


class Ended(NamedTuple):
    """How a program ended. status: negative if it was killed. said: its output. last_error: a line."""

    status: int
    said: str
    last_error: str


def run_confined(words: Sequence[str], text: bytes, *, seconds: float, memory_mb: int) -> Ended:
    """Run a command with ``text`` on its input. For the limits see the module."""
    limits = (os.getpid(), memory_mb << 20, math.ceil(seconds) + 1, LARGEST_FILE, OPEN_FILES)
    limiter = [sys.executable, "-I", "-S", "-c", LIMITER, *map(str, limits)]
    with (
        tempfile.TemporaryDirectory(prefix="tba-program-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as errors,
    ):
        asked.write(text)
        asked.seek(0)
        process = subprocess.Popen(
            [*limiter, *words],
            stdin=asked,
            stdout=said,
            stderr=errors,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            _end(process)
        last_error = _end_of(errors, QUOTED).strip().rpartition("\n")[2]
        return Ended(status, _end_of(said, LARGEST_FILE), last_error)


def _found(key: str, word: str) -> str:
    """The interpreter of the run, a file beside the config, or the word itself."""
    if word == "python":
        return sys.executable
    found = find_file(word)
    if found is None and Path(word).suffix == ".py" and not Path(word).is_absolute():
        raise ConfigError(f"{key}.program: there is no file {word} beside the config: put it there")
    return str(found or word)


def _environment(folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**kept, "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of its session."""
    kill_session(process.pid)
    process.wait()


def _end_of(file: BinaryIO, size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode(errors="replace")
