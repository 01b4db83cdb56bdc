"""Runs programs within limits of time and memory, among them a reward program for each completion.

A reward program reads one line of JSON, with the row's fields and the completion, and writes the reward as
the last line of its output. It is started without a shell, in a new, empty folder. Of the run's environment
it gets only the variables PATH, LANG and LC_ALL.

There are limits on its time, on the memory and the processor time of each process, and on the size of each
file. There is NO limit on the network, on reading and writing other files, and on the number of its
processes. A process that starts a session of its own outlives the program. If the program executes
completions as code, run it in a container or bubblewrap.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.run.background import Worker
from tba_hpc.run.modules import find_file
from tba_hpc.run.signals import kill_session

LARGEST_FILE = 16 << 20
"""Largest size of a file that a program writes, including its output, in bytes."""

LARGEST_LINE = 1 << 16
"""Number of bytes that are read from the end of a program's error output."""

OPEN_FILES = 64
"""Largest number of files that a program may have open."""

START_SECONDS = 60.0
"""Longest wait for the process of a program to be created, in seconds."""

QUOTED = 200
"""Largest number of characters of a program's last line that an error quotes."""

# This program sets the limits, and then becomes the program that is wanted. If this process set them between
# fork and exec, it might hang, because it has threads. prctl(1, 9) has the kernel kill the program together
# with the thread that starts it.
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

# If this process is killed, processes that its programs have started would survive. The keeper kills them.
KEEPER = """
import glob, os, shutil, sys
sys.stdin.read()
for _ in range(3):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as variables:
                if f"TMPDIR={sys.argv[1]}".encode() in variables.read():
                    os.kill(int(pid), 9)
        except OSError:
            pass
for folder in glob.glob(glob.escape(sys.argv[1]) + "*"):
    shutil.rmtree(folder, ignore_errors=True)
"""


Process = subprocess.Popen[Any]


class Keeper:
    """Helper process that kills this process's programs, and their children, once this process has ended.

    The helper finds each program by the variable TMPDIR, which names the program's folder, and removes the
    folder. All programs are started by one thread that lives as long as this process, because the kernel
    kills a program together with the thread that started it.

    prefix: beginning of the names of programs' folders.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Process | None = None
        self.prefix = f"tba-program-{secrets.token_hex(8)}-"

    def ensure_started(self) -> None:
        """Start the helper, and the thread that starts programs, unless they run."""
        with self._lock:
            if self._process is None:
                self._starter = Worker("programs")
                words = [sys.executable, "-I", "-S", "-c", KEEPER, f"{tempfile.gettempdir()}/{self.prefix}"]
                quiet = subprocess.DEVNULL
                self._process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
                )

    def start(self, words: Sequence[str], **options: Any) -> Process:
        """Start the command ``words``, by Popen with ``options``, in the thread that starts all programs.

        Call ``ensure_started`` before this, since it starts that thread.
        """
        return self._starter.submit(partial(subprocess.Popen, words, **options)).result(START_SECONDS)


_keeper = Keeper()


class ProgramError(RuntimeError):
    """Raised if a program ends without giving a reward. The message says how it ended."""


class Program:
    """Reward that runs a program for each completion, up to ``concurrency`` at once.

    key: config key of the reward, for errors. Raises ConfigError if a script of the command does not exist.
    """

    def __init__(self, key: str, section: RewardSection) -> None:
        assert section.program is not None
        self._key = key
        self._section = section
        self._words = [find_word(f"{key}.program", word) for word in section.program]
        self._pool = ThreadPoolExecutor(section.concurrency, "program")

    def __call__(self, answers: Sequence[tuple[Mapping[str, object], str]]) -> list[float]:
        """Run the program for each (row, completion), and return the numbers that it writes.

        A program that was killed, such as at its time limit, gives ``when_killed``, or NaN if it is not set.
        Raises ProgramError if a program ends in another way without a number.
        """
        running = [self._pool.submit(self._run, {**row, "completion": text}) for row, text in answers]
        return [one.result() for one in running]

    def _run(self, fields: Mapping[str, object]) -> float:
        section = self._section
        text = json.dumps(fields).encode() + b"\n"
        ended = run_confined(self._words, text, seconds=section.seconds, memory_mb=section.memory_mb)
        if ended.status < 0:
            return math.nan if section.when_killed is None else section.when_killed
        return ended.reward(f"{self._key}: {self._words[0]}")


class Ended(NamedTuple):
    """Result of a program that has ended.

    status: exit status. It is negative if the program was killed, or if its output reached LARGEST_FILE.
    said: its output. last_error: last line of its error output, or a note that it wrote too much.
    """

    status: int
    said: str
    last_error: str

    def reward(self, name: str) -> float:
        """Return the number in the last line of the output.

        name: name of the program in errors. Raises ProgramError if the status is not 0, or if the line is no
        number.
        """
        last = self.said.strip().rpartition("\n")[2]
        with suppress(ValueError):
            if self.status == 0:
                return float(last)
        how = f"status {self.status}" if self.status >= 0 else signal.Signals(-self.status).name
        why = self.last_error or f"its last line was {last[:QUOTED]!r}"
        raise ProgramError(f"{name} ended with {how} and no reward: {why}")


class Confined:
    """A running program, within the limits that the module describes.

    words: its command. text: its input. seconds: limit on the processor time of each of its processes.
    memory_mb: limit on the address space of each process, in MiB. variables: additional environment
    variables.
    """

    def __init__(
        self,
        words: Sequence[str],
        text: bytes,
        *,
        seconds: float,
        memory_mb: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        limits = (os.getpid(), memory_mb << 20, math.ceil(seconds) + 1, LARGEST_FILE, OPEN_FILES)
        limiter = [sys.executable, "-I", "-S", "-c", LIMITER, *map(str, limits)]
        with tempfile.TemporaryFile() as asked, ExitStack() as files:
            asked.write(text)
            asked.seek(0)
            _keeper.ensure_started()  # first, since the keeper may have to remove the folder
            folder = files.enter_context(
                tempfile.TemporaryDirectory(prefix=_keeper.prefix, ignore_cleanup_errors=True)
            )
            self._said, self._errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self.process = _keeper.start(
                [*limiter, *words],
                stdin=asked,
                stdout=self._said,
                stderr=self._errors,
                cwd=folder,
                env=_environment(folder) | dict(variables or {}),
                start_new_session=True,
            )
            self._files = files.pop_all()

    def end(self) -> Ended:
        """Kill what is left of the program's session, and return its result. Must be called exactly once."""
        status = self.process.poll()
        kill_session(self.process.pid)
        self.process.wait()
        with self._files:
            last_error = _end_of(self._errors, LARGEST_LINE).strip().rpartition("\n")[2][:QUOTED]
            if LARGEST_FILE in (os.fstat(one.fileno()).st_size for one in (self._said, self._errors)):
                status = -signal.SIGXFSZ  # the signal of RLIMIT_FSIZE, which Python ignores
                last_error = f"it wrote more than {LARGEST_FILE >> 20} MiB of output"
            said = _end_of(self._said, LARGEST_FILE)
        return Ended(-signal.SIGKILL if status is None else status, said, last_error)


def run_confined(words: Sequence[str], text: bytes, *, seconds: float, memory_mb: int) -> Ended:
    """Run a command to its end, or for ``seconds`` at most, within the limits that the module describes.

    words: the command. text: its input. memory_mb: limit on the address space of each process, in MiB.
    """
    program = Confined(words, text, seconds=seconds, memory_mb=memory_mb)
    try:
        with suppress(subprocess.TimeoutExpired):
            program.process.wait(seconds)
    finally:
        ended = program.end()
    return ended


def find_word(key: str, word: str) -> str:
    """Resolve a word of a command: ``python`` to the run's Python, a file's relative path to an absolute one.

    Files are sought in the folders from which Python imports, first in the one with the user's code. Any
    other word stays as it is. key: config key of the command, for errors. Raises ConfigError if ``word`` is
    a relative path of a script (.py) that is in none of these folders.
    """
    if word == "python":
        return sys.executable
    found = find_file(word)
    if found is None and Path(word).suffix == ".py" and not Path(word).is_absolute():
        raise ConfigError(f"{key}: there is no file {word} beside the config: put it there")
    return str(found or word)


def require_program(key: str, words: Sequence[str]) -> None:
    """Raise ConfigError if the first word of a command is not an executable on this machine.

    key: config key of the command, for errors. words: the command, as ``find_word`` resolves it.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{key} begins with {words[0]}, which is neither a program in PATH nor an executable file: "
            "correct it, or put the interpreter before it, as in [python, my_program.py]"
        )


def _environment(folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**kept, "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _end_of(file: BinaryIO, size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode(errors="replace")
