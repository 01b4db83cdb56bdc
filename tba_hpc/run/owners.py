"""Who is at work on a run: one launcher or Slurm job, one process for each rank; a second one is refused.

Kernel locks say nothing across hosts on many shared file systems, so an owner is a file, made whole by
``os.link``, which only one of any number of rivals can do. The files of a name are numbered, and the highest
counts; who follows a dead owner takes the next number, so that nobody removes a file that a rival has just
made. The newest file stays when its owner leaves, as nobody's: numbers are never used again.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import publish, write_atomic
from tba_hpc.run.notes import FAILED

LAUNCH = "launch"
"""What ``tba run`` or a Slurm job owns, which starts the ranks; these own their names."""

BEAT_SECONDS = 10.0
"""Time between two signs of life of an owner."""

SILENT_SECONDS = 60.0
"""An owner on another host is taken for dead after so long without a sign of life."""

LEAVE_SECONDS = 10.0
"""Time that a rank gives to one of its own name, whose launcher has died, to leave."""

GONE_SECONDS = 0.02
"""Pause before another look if a claim was gone by the time it was read."""

LOOK_SECONDS = 0.2
"""Pause between two looks at an owner who is to leave."""

SQUEUE_SECONDS = 5.0
"""Time that squeue has to answer."""

AT_WORK = {"RUNNING", "SUSPENDED", "STOPPED"}
"""Slurm's states of a job whose processes may write; one that waits in the queue has none."""


Result = TypeVar("Result")
Fallback = TypeVar("Fallback")


class OwnedError(ValueError):
    """Somebody else is at work on this; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Owner:
    """machine: where process numbers mean the same. pid 0: a Slurm job owns, through whatever process.

    began: start of the process, in clock ticks since boot, for its number comes again. job, restarts: of
    Slurm, may be empty. since: unix seconds. alike: the job may have others like it at work, on other nodes.
    With neither process nor job it is nobody.
    """

    host: str = ""
    machine: str = ""
    pid: int = 0
    began: int = 0
    job: str = ""
    restarts: str = ""
    since: float = 0.0
    alike: bool = False

    @classmethod
    def this(cls, pid: int, *, alike: bool = False) -> Owner:
        """This process, or with ``pid`` 0 the Slurm job that it is part of."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            began=_began(pid) or 0,
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=os.environ.get("SLURM_RESTART_COUNT", ""),
            since=time.time(),
            alike=alike,
        )

    @property
    def is_here(self) -> bool:
        """Whether it is a process that can be signalled from here."""
        return bool(self.pid) and self.machine == _machine()

    def to_json(self) -> str:
        """JSON text with all fields."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        parts = [f"process {self.pid} on {self.host}"] if self.pid else []
        parts += [f"Slurm job {self.job}"] if self.job else []
        return f"{' of '.join(parts)}, since {time.strftime('%F %T', time.localtime(self.since))}"


UNKNOWN = Owner(host="unknown", machine="unknown", pid=-1)
"""Who made a claim of which the file is damaged: believed for as long as it gives signs of life."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim to a name that counts: its number, its file (None: there was none yet), who made it."""

    name: str
    number: int = 0
    file: Path | None = None
    owner: Owner = Owner()


def refuse_owned(run: RunDir) -> None:
    """Raise OwnedError if somebody else is at work on the run; nothing is left behind."""
    claim = _newest(run, LAUNCH)
    if not _is_free(run, claim, Owner.this(os.getpid())):
        raise OwnedError(_sentence(run, claim))


def owner_at_work(run: RunDir) -> Owner | None:
    """Who is at work on the run, None for nobody; nothing is left behind."""
    claim = _newest(run, LAUNCH)
    return None if _is_free(run, claim, Owner.this(os.getpid())) else claim.owner


def claim_for_job(run: RunDir) -> None:
    """Make this process's Slurm job the owner of the run until the job has ended. Raises OwnedError."""
    _claim(run, LAUNCH, Owner.this(0), wait=True)


@contextmanager
def owned(run: RunDir, name: str = LAUNCH) -> Iterator[None]:
    """Own the run, or what a rank of this name owns, while the block runs. Raises OwnedError.

    A rank waits for one of its name that may be about to leave, or dead. Sets the process's umask to 077.
    A process that was frozen for so long that another took over ends as soon as it goes on, with FAILED.
    """
    os.umask(0o077)
    with _held(run, _claim(run, name, Owner.this(os.getpid()), wait=name != LAUNCH)):
        yield


@dataclass(frozen=True, slots=True)
class Lease:
    """A name that this process owns for as long as it likes. number: of the claim, which comes only once."""

    name: str
    number: int


@contextmanager
def leased(run: RunDir, names: Iterable[str], *, me: Owner | None = None) -> Iterator[Lease | None]:
    """Own the first of these names that nobody has, while the block runs; None if all are taken.

    Never waits for a holder: a name is free once that has left, is dead, or was silent for SILENT_SECONDS.
    Sets the process's umask to 077. A frozen process ends as one that ``owned`` ends. me: this process, as
    it has tried before, for a try that an error cut short may have come as far as to own a name.
    """
    os.umask(0o077)
    me = me or Owner.this(os.getpid(), alike=True)
    for name in names:
        with suppress(OwnedError):
            mine = _claim(run, name, me, wait=False)
            break
    else:
        yield None
        return
    with _held(run, mine):
        yield Lease(mine.stem, _number(mine))


def holders(run: RunDir, names: Iterable[str]) -> dict[str, Owner]:
    """Who of these has given a sign of life lately, by this host's clock; nothing is written."""
    return {claim.name: claim.owner for claim in _claims(run, names) if _is_heard_of(claim, time.time())}


def is_any_held(run: RunDir, names: Iterable[str]) -> bool:
    """Whether anybody who has one of these names has given a sign of life lately, by the files' clock."""
    claims = _claims(run, names)
    now = _clock(run) if claims else 0.0
    return any(_is_heard_of(claim, now) for claim in claims)


def _claims(run: RunDir, names: Iterable[str]) -> list[Claim]:
    """Those of processes that have not left."""
    there = {file.stem for file in run.owners.glob("*.*")} if run.owners.is_dir() else set()
    return [claim for name in names if name in there and (claim := _newest(run, name)).owner.pid]


def _is_heard_of(claim: Claim, now: float) -> bool:
    return claim.file is not None and now - _sign_of(claim.file) < SILENT_SECONDS


def _sign_of(file: Path) -> float:
    """When an owner's file was touched last; 0 if it is gone."""
    return _unless_gone(lambda: file.stat().st_mtime, otherwise=0.0)


@contextmanager
def _held(run: RunDir, mine: Path) -> Iterator[None]:
    """Give signs of life under a claim while the block runs, then leave it as nobody's."""
    left = threading.Event()
    threading.Thread(target=_beat, args=(run, mine, left), name="owner", daemon=True).start()
    try:
        yield
    finally:
        left.set()
        with suppress(OSError):  # on a full disk; that this process is gone will be seen, too
            write_atomic(mine, Owner().to_json())


def _beat(run: RunDir, mine: Path, left: threading.Event) -> None:
    """Give signs of life until ``left``; end the process if another has taken over."""
    while not left.wait(BEAT_SECONDS):
        with suppress(OSError):  # a file server that is away for a while
            if _newest(run, mine.stem).number > _number(mine):
                sentence = f"{mine.stem} of {run.path} has another owner: this process ends"
                print(sentence, file=sys.stderr, flush=True)
                os._exit(FAILED)
            os.utime(mine)


# --- Claims ---


def _claim(run: RunDir, name: str, me: Owner, *, wait: bool) -> Path:
    """Make ``me`` the owner; returns the file that says so. Raises OwnedError, ConfigError."""
    with run.writing():
        run.owners.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    while True:
        claim = _newest(run, name)
        if _is_free(run, claim, me):
            if mine := _take(run, name, claim.number + 1, me):
                return mine
        elif time.monotonic() - began > wait * _patience(claim.owner):
            raise OwnedError(_sentence(run, claim))
        else:
            time.sleep(LOOK_SECONDS)


def _patience(owner: Owner) -> float:
    """After so many seconds an owner who is there still is no leftover."""
    return LEAVE_SECONDS if owner.machine == _machine() else SILENT_SECONDS + BEAT_SECONDS


def _take(run: RunDir, name: str, number: int, me: Owner) -> Path | None:
    """Make the claim of that number, and remove earlier ones; None if a rival was faster."""
    mine = run.owners / f"{name}.{number:06d}"
    try:
        publish(mine, me.to_json().encode(), replace=False)
    except FileExistsError:
        return None
    files = list(run.owners.glob(f"{name}.*"))
    beyond = any(_number(file) > number for file in files)  # a rival removed the claim that had this number
    for file in [mine] if beyond else files:
        if beyond or _number(file) < number:
            file.unlink(missing_ok=True)
    return None if beyond else mine


def _newest(run: RunDir, name: str) -> Claim:
    """The claim to a name that counts; a listing may still show one that was superseded."""
    give_up = time.monotonic() + SILENT_SECONDS
    while file := max(run.owners.glob(f"{name}.*"), key=_number, default=None):
        owner = _unless_gone(partial(_read, file), otherwise=None)
        if owner is not None:
            return Claim(name, _number(file), file, owner)
        if time.monotonic() >= give_up:
            return Claim(name, _number(file), file, UNKNOWN)
        time.sleep(GONE_SECONDS)
    return Claim(name)


def _unless_gone(do: Callable[[], Result], *, otherwise: Fallback) -> Result | Fallback:
    """``do()``, or ``otherwise`` of a file that another host has removed; NFS may say ESTALE then."""
    try:
        return do()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return otherwise


def _read(file: Path) -> Owner:
    """Who made a claim. Raises OSError."""
    try:
        return Owner(**json.loads(file.read_bytes()))
    except (ValueError, TypeError):  # half of it, or other bits: what a crash or a disk has left
        return UNKNOWN


def _number(file: Path) -> int:
    return int(file.suffix[1:])


def _sentence(run: RunDir, claim: Claim) -> str:
    owner = claim.owner
    what = str(run.path) if claim.name == LAUNCH else f"{claim.name} of {run.path}"
    if owner == UNKNOWN:
        return (
            f"{what} may be at work already: {claim.file} is damaged and does not tell who it is; if nobody "
            f"is, try again in {SILENT_SECONDS:.0f} s"
        )
    stop = f"kill -USR1 {owner.pid} (on {owner.host})" if owner.pid else f"scancel {owner.job}"
    unseen = owner.machine != _machine() and not owner.job
    dead = f"; if it is dead, try again in {SILENT_SECONDS:.0f} s" if unseen else ""
    return f"{what} is at work already: {owner}; let it finish, or end it first: {stop}{dead}"


# --- Whether an owner is gone ---


def _is_free(run: RunDir, claim: Claim, me: Owner) -> bool:
    """Whether nobody is at work under a claim."""
    owner = claim.owner
    if owner == me or not (owner.pid or owner.job):
        return True
    if owner.pid and owner.machine == me.machine:
        return _began(owner.pid) != owner.began
    if owner.job and owner.job == me.job and not _is_beside(claim, me):
        return True
    # An MPI rank starts no processes, and its launcher has asked already.
    slurm_says = _is_working(run, owner) if owner.job and claim.name == LAUNCH else None
    if slurm_says is False or (slurm_says and not owner.pid):
        return not slurm_says
    return _is_silent(run, claim)


def _is_silent(run: RunDir, claim: Claim) -> bool:
    """Whether an owner gives no sign of life any more.

    By the clock that stamps the files, unless it has been set: then this host's agrees neither with it nor
    with the sign, and the owner is watched for longer than it goes without one.
    """
    clock, sign = _clock(run), _last_sign(run, claim)
    if -BEAT_SECONDS < clock - sign <= SILENT_SECONDS:
        return False
    if clock > sign and abs(clock - time.time()) < SILENT_SECONDS / 2:
        return True
    end = time.monotonic() + 1.5 * BEAT_SECONDS
    while time.monotonic() < end:
        if _last_sign(run, claim) != sign:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _is_beside(claim: Claim, me: Owner) -> bool:
    """Whether the owner may be at work in the same job, on another node: two ``tba run``, or two alike.

    A requeued job starts afresh, and one job starts its ranks one step after the other.
    """
    several = claim.name == LAUNCH or claim.owner.alike
    return bool(several and claim.owner.pid and claim.owner.restarts == me.restarts)


def _began(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """What tells machines, and containers on one, apart: a host's name may be that of others, too."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_working(run: RunDir, owner: Owner) -> bool | None:
    """Whether the owner's job has processes, as Slurm says; None if it cannot be asked."""
    command = ["squeue", "--noheader", f"--jobs={owner.job}", "--format=%T %k"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_SECONDS, env=plain)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if seen.returncode:
        return False if "Invalid job id" in seen.stderr else None
    parts = [line.partition(" ")[::2] for line in seen.stdout.splitlines()]
    return any(state in AT_WORK and (owner.pid or _is_of(run, comment)) for state, comment in parts)


def _is_of(run: RunDir, comment: str) -> bool:
    """Whether a job's comment, if it has one, names the run: ids come back after years."""
    return comment in ("", "(null)") or (Path(comment).exists() and run.path.samefile(comment))


def _last_sign(run: RunDir, claim: Claim) -> float:
    """When an owner last gave a sign of life, a job by its ranks; by the file system's clock."""
    if claim.owner.pid:
        return _sign_of(claim.file) if claim.file else 0.0
    ranks = (file for file in run.owners.glob("[!.]*") if not _is_leased(file))
    return max(map(_sign_of, ranks), default=0.0)


def _is_leased(file: Path) -> bool:
    """Whether it is a claim of one that comes and goes, which lives on without the run's job."""
    return _unless_gone(lambda: _read(file).alike, otherwise=False)


def _clock(run: RunDir) -> float:
    """The time by the clock that stamps the files of all hosts."""
    file = run.owners / f".{secrets.token_hex(8)}.tmp"
    file.touch()
    try:
        return file.stat().st_mtime
    finally:
        file.unlink()
