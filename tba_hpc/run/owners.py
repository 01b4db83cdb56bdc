"""Ownership of a run: one launcher or Slurm job owns the run, and one process owns each rank's name.

A second owner is refused. Kernel locks do not work across hosts on many shared file systems. A claim is
therefore a file made by ``os.link``, which succeeds for exactly one of any number of rivals.

Claims to the same name are numbered, and the one with the highest number is valid. The successor of a dead
owner makes a claim with the next number, and only then removes the old file. If it removed first, it could
remove the claim that a rival has just made. When an owner leaves, its file stays and names nobody, so that no
number is used twice.

An owner keeps the run's folder open. Other processes of its machine check this, because in a copied run
folder the claims name processes that work on the original.

An owner touches its file every BEAT_SECONDS. If an owner on another host is silent for SILENT_OWNER_SECONDS,
anybody may take its name. A process that was only frozen must therefore check that it has no successor before
anything that it has written counts (``end_if_superseded``).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.events import this_job
from tba_hpc.run.files import listing, publish, read_regular, write_atomic
from tba_hpc.run.notes import Exit
from tba_hpc.run.slurm_queue import WITH_PROCESSES, comment_names, components

STOP = "stop"
"""Name of the files that ask an owner of the run to end. Each has the number of the owner's claim."""

LAUNCH = "launch"
"""Name owned by whatever starts the ranks: ``tba run`` or a Slurm job. Each rank owns its ``rank_name``."""

BEAT_SECONDS = 10.0
"""Seconds after which an owner touches its claim again, as a sign of life."""

SILENT_OWNER_SECONDS = 60.0
"""Seconds without a sign of life after which an owner on another host counts as dead."""

EARLIER_OWNER_SECONDS = 10.0
"""Longest wait for an earlier owner of the same name and on the same machine to end, in seconds."""

CLAIM_CHECK_SECONDS = 0.2
"""Seconds between two looks at a claim whose owner is expected to leave."""

_ours: dict[Path, int] = {}
"""Claims of this process, each with the file descriptor that keeps the run's folder open."""


class OwnedError(ValueError):
    """Error if another process owns a run or a rank's name; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a claim: a process, a Slurm job as a whole, or nobody (neither ``pid`` nor ``job``).

    host: name of its host. machine: identifier of the machine or container in which ``pid`` is unique. pid:
    process number; 0 if the job as a whole is the owner. began: start of the process in clock ticks since
    boot, which tells it from a later process with the same number. job, restarts: id of its Slurm job, and
    how often the job was requeued; empty outside Slurm. since: when it became the owner, unix seconds.
    elastic: whether it is an elastic searcher, of which several may run in one job. holds: whether the
    process keeps the run's folder open, as all versions after 0.3.0 do. ready: whether an elastic searcher's
    engine has loaded weights. listens: whether it looks for requests to end (``is_asked_to_end``).
    """

    host: str = ""
    machine: str = ""
    pid: int = 0
    began: int = 0
    job: str = ""
    restarts: str = ""
    since: float = 0.0
    elastic: bool = False
    holds: bool = False
    ready: bool = False
    listens: bool = False

    @classmethod
    def this(cls, pid: int, *, elastic: bool = False) -> Owner:
        """Return this process, whose number is ``pid``, as an owner; with 0, its Slurm job as a whole."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            began=_began(pid) or 0,
            job=this_job(),
            restarts=os.environ.get("SLURM_RESTART_COUNT", ""),
            since=time.time(),
            elastic=elastic,
            holds=bool(pid),
        )

    @property
    def is_here(self) -> bool:
        """True if the owner is a process of this machine, so that it can be signalled from here."""
        return bool(self.pid) and self.machine == _machine()

    def to_json(self) -> str:
        """Return JSON text with all fields."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        parts = [f"process {self.pid} on {self.host}"] if self.pid else []
        parts += [f"Slurm job {self.job}"] if self.job else []
        return f"{' of '.join(parts)}, since {time.strftime('%F %T', time.localtime(self.since))}"


UNKNOWN = Owner(host="unknown", machine="unknown", pid=-1)
"""Owner of a claim whose file is damaged. It counts as alive while somebody touches the file."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Valid claim to a name: the one with the highest ``number``, in ``file``.

    If nobody has claimed the name yet, ``number`` is 0 and ``file`` is None.
    """

    name: str
    number: int = 0
    file: Path | None = None
    owner: Owner = Owner()


def refuse_owned(run: RunDir) -> None:
    """Raise OwnedError if another process owns the run. Writes nothing."""
    claim = _newest(run, LAUNCH)
    if not _is_free(run, claim, Owner.this(os.getpid())):
        raise OwnedError(_sentence(run, claim))


def owner_at_work(run: RunDir) -> Owner | None:
    """Return the owner of the run if it is alive, otherwise None. Writes nothing."""
    claim = _newest(run, LAUNCH)
    return None if _is_free(run, claim, Owner.this(os.getpid())) else claim.owner


def ask_to_end(run: RunDir) -> None:
    """Ask the present owner of the run to end, wherever it is; see ``Owner.listens``."""
    if file := _newest(run, LAUNCH).file:
        file.with_stem(STOP).touch()


def is_asked_to_end(run: RunDir) -> bool:
    """Return whether this process, as the owner of the run, is asked to end. Raises OSError."""
    asked = {mine.with_stem(STOP).name for mine in _ours if (mine.parent, mine.stem) == (run.owners, LAUNCH)}
    return not asked.isdisjoint(listing(run.owners))  # a listing is up to date


def is_abandoned(run: RunDir) -> bool:
    """Return whether the run's last owner is gone; False if there was none, or if it cannot be found out."""
    try:
        claim = _newest(run, LAUNCH)
        return claim.file is not None and _is_free(run, claim, Owner.this(os.getpid()))
    except OSError:  # another user's run, or a file server that does not answer
        return False


def claim_for_job(run: RunDir) -> None:
    """Make this process's Slurm job the owner of the run until the job ends.

    Waits for an earlier owner to end. Raises OwnedError if it is still at work when the wait is over.
    """
    _claim(run, LAUNCH, Owner.this(0), wait=True)


@contextmanager
def owned(run: RunDir, name: str = LAUNCH, *, listens: bool = False) -> Iterator[None]:
    """Own ``name`` while the block runs; the owner of LAUNCH owns the run. Raises OwnedError if it is taken.

    For all names but LAUNCH, first waits for an earlier owner, which may be about to end or be dead. If
    another process takes over while this one is frozen, this one ends with Exit.FAILED. listens: see
    ``Owner``.
    """
    me = replace(Owner.this(os.getpid()), listens=listens)
    lease = Lease(_claim(run, name, me, wait=name != LAUNCH))
    try:
        yield
    finally:
        lease.release()


def take_lease(run: RunDir, names: Iterable[str]) -> Lease | None:
    """Own the first free name of ``names``; return None if all are taken. Does not wait for owners to leave.

    The lease ends with its ``release``, or with this process.
    """
    me = Owner.this(os.getpid(), elastic=True)
    for name in names:
        with suppress(OwnedError):
            return Lease(_claim(run, name, me, wait=False))
    return None


class Lease:
    """Claim of this process, kept alive by a thread that touches its file.

    name: the name that is owned. number: number of the claim, unique among all claims to this name.
    """

    def __init__(self, file: Path) -> None:
        self.name, self.number = file.stem, _number(file)
        self._file = file
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def release(self) -> None:
        """Give up the claim. Its file stays, and names nobody."""
        self._left.set()
        with suppress(OSError):  # if the disk is full, others still see that this process is gone
            write_atomic(self._file, Owner().to_json())
            self._file.with_stem(STOP).unlink(missing_ok=True)
        os.close(_ours.pop(self._file))

    def _beat(self) -> None:
        while not self._left.wait(BEAT_SECONDS):
            with suppress(OSError):  # a file server that does not answer may answer later
                end_if_superseded()
                os.utime(self._file)


def note_ready(name: str) -> None:
    """Record in this process's claim of ``name`` that its engine has loaded weights."""
    end_if_superseded()  # otherwise a claim that a successor has removed would exist again
    (mine,) = (mine for mine in _ours if mine.stem == name)
    write_atomic(mine, replace(_read(mine), ready=True).to_json())


def holders(run: RunDir, names: Iterable[str], *, now: float | None = None) -> dict[str, Claim]:
    """Map each of ``names`` that has a living owner to its claim.

    An owner counts as living if it gave a sign of life in the last SILENT_OWNER_SECONDS and, if it is on this
    machine, its process exists. now: unix seconds; None for this host's clock.
    """
    there = {file.stem for file in run.owners.glob("*.*")} if run.owners.is_dir() else set()
    claims = [claim for name in names if name in there and (claim := _newest(run, name)).owner.pid]
    claims = [claim for claim in claims if not claim.owner.is_here or _exists(claim.owner)]
    now = time.time() if now is None else now
    return {claim.name: claim for claim in claims if now - _last_sign(claim.file) < SILENT_OWNER_SECONDS}


def end_if_superseded() -> None:
    """End this process if another has taken over one of its names, or if the run has a newer attempt.

    Call this before anything that this process has written becomes valid, such as a checkpoint. Raises
    OSError if the file system does not answer.
    """
    for mine in list(_ours):
        run = RunDir(mine.parent.parent)
        if _highest(mine) > _number(mine):
            _end(f"{mine.stem} of {run.path} has another owner: this process ends\n")
        if ATTEMPT in os.environ and run.attempt_number < run.newest_attempt:
            _end(f"{run.path} was started again: this process, {mine.stem} of {run.attempt}, ends\n")


def _exists(owner: Owner) -> bool:
    """Return whether the process of an owner, which is on this machine, exists."""
    return _began(owner.pid) == owner.began


def keeps_open(run: RunDir, pid: int) -> bool | None:
    """Return whether a process of this machine keeps the run's folder open; None if this user may not ask."""
    folder = run.path.resolve()
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return None
    except FileNotFoundError:
        return False
    return any(_leads_to(link, folder) for link in links)


def _leads_to(link: Path, folder: Path) -> bool:
    """Return whether a link of /proc leads to ``folder``.

    Names are compared first, because ``samefile`` may never return if the file's server does not answer.
    """
    with suppress(OSError):  # the descriptor has just been closed
        return link.readlink().name == folder.name and link.samefile(folder)
    return False


def clock(run: RunDir) -> float:
    """Return the time, in unix seconds, by the clock of the run's file system, which also dates claims."""
    file = run.owners / f".{secrets.token_hex(8)}.tmp"
    file.touch()
    try:
        return file.stat().st_mtime
    finally:
        file.unlink()


def _end(sentence: str) -> None:
    """Print a sentence to stderr, unless that is closed or would block, and end this process at once."""
    try:
        if sys.stderr and not sys.stderr.closed and select.select([], [sys.stderr], [], 0)[1]:
            os.write(sys.stderr.fileno(), sentence.encode())
    finally:
        os._exit(Exit.FAILED)


# --- Claims ---


def _claim(run: RunDir, name: str, me: Owner, *, wait: bool) -> Path:
    """Make ``me`` the owner of a name, and return the claim's file. Sets the process's umask to 077.

    wait: whether to wait for an owner to leave. The wait is long enough for a dead one to be recognised.
    Raises OwnedError if the name has a living owner, ConfigError if the run directory cannot be written.
    """
    os.umask(0o077)
    with run.writing():
        run.owners.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    while True:
        claim = _newest(run, name)
        if _is_free(run, claim, me):
            if mine := _take(run, name, claim.number + 1, me):
                return mine
            continue
        is_here = claim.owner.machine == me.machine
        seconds = EARLIER_OWNER_SECONDS if is_here else SILENT_OWNER_SECONDS + BEAT_SECONDS
        if not wait or time.monotonic() - began > seconds:
            raise OwnedError(_sentence(run, claim))
        time.sleep(CLAIM_CHECK_SECONDS)


def _take(run: RunDir, name: str, number: int, me: Owner) -> Path | None:
    """Make the claim of ``me`` with this number, and remove earlier claims; None if a rival was faster."""
    mine, taken = run.owners / f"{name}.{number:06d}", False
    folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)  # before others can see the claim
    try:
        taken = _publish(mine, me)
    finally:
        if taken and me.pid:
            _ours[mine] = folder
        else:
            os.close(folder)
    return mine if taken else None


def _publish(mine: Path, me: Owner) -> bool:
    """Write ``me`` into the new claim file ``mine``, and remove the files of earlier claims to its name.

    Returns whether ``me`` has the claim: False if a rival was faster, and then no earlier file is removed.
    """
    try:
        publish(mine, me.to_json().encode(), replace=False)
    except FileExistsError:
        return False
    if _highest(mine) > _number(mine):  # this number was free only because rivals had used and removed it
        mine.unlink(missing_ok=True)
        return False
    for file in mine.parent.glob(f"{mine.stem}.*"):
        if _number(file) < _number(mine):
            file.unlink(missing_ok=True)
    return True


def _newest(run: RunDir, name: str) -> Claim:
    """Read the valid claim to a name. Tries again if NFS lists a file that was removed."""
    give_up = time.monotonic() + SILENT_OWNER_SECONDS
    while file := max(run.owners.glob(f"{name}.*"), key=_number, default=None):
        try:
            return Claim(name, _number(file), file, _read(file))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        if time.monotonic() >= give_up:
            return Claim(name, _number(file), file, UNKNOWN)
        time.sleep(CLAIM_CHECK_SECONDS / 10)
    return Claim(name)


def _read(file: Path) -> Owner:
    """Read the owner from a claim's file; UNKNOWN if it is damaged. Raises OSError."""
    try:
        return Owner(**json.loads(read_regular(file)))
    except (ValueError, TypeError):  # a crash or a bad disk has damaged it
        return UNKNOWN


def _highest(claim: Path) -> int:
    """Return the highest number of any claim to the same name."""
    return max(map(_number, claim.parent.glob(f"{claim.stem}.*")), default=0)


def _number(file: Path) -> int:
    return int(file.suffix[1:])


def _last_sign(file: Path | None) -> float:
    """Return when a claim's file was last touched, by the file system's clock; 0 if it does not exist."""
    try:
        return file.stat().st_mtime if file else 0.0
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return 0.0


def _sentence(run: RunDir, claim: Claim) -> str:
    owner = claim.owner
    what = str(run.path) if claim.name == LAUNCH else f"{claim.name} of {run.path}"
    if owner == UNKNOWN:
        return (
            f"{what} may be in use: {claim.file} is damaged and does not say by whom; if nobody uses it, "
            f"try again in {SILENT_OWNER_SECONDS:.0f} s"
        )
    stop = f"kill -USR1 {owner.pid} (on {owner.host})" if owner.pid else f"scancel {owner.job}"
    if claim.name == LAUNCH:
        stop = shlex.join(["tba", "stop", str(run.path)])
        stop += f" (on {owner.host})" if owner.pid and not owner.listens else " --wait 600"
    unseen = owner.machine != _machine() and not owner.job
    dead = f"; if it is dead, try again in {SILENT_OWNER_SECONDS:.0f} s" if unseen else ""
    return f"{what} is already in use: {owner}; let it finish, or end it first: {stop}{dead}"


# --- Whether an owner is gone ---


def _is_free(run: RunDir, claim: Claim, me: Owner) -> bool:
    """Return whether a claim has no living owner, so that ``me``, this process or its job, may take it."""
    owner = claim.owner
    if not (owner.pid or owner.job):
        return True
    if owner.pid and owner.machine == me.machine:
        left_by_us = owner.pid == me.pid and claim.file not in _ours  # an error interrupted ``_take``
        return left_by_us or not _exists(owner) or (owner.holds and keeps_open(run, owner.pid) is False)
    if _is_of_an_earlier_start(claim, me):
        return True
    # A rank does not ask Slurm: under MPI it must not start processes, and its launcher has asked already.
    at_work = _is_at_work(run, owner) if owner.job and claim.name == LAUNCH else None
    if at_work is False:
        return True
    if at_work and not owner.pid:
        return False
    return _is_silent(run, claim)


def _is_silent(run: RunDir, claim: Claim) -> bool:
    """Return whether an owner has given no sign of life for SILENT_OWNER_SECONDS.

    If the last sign is dated that many seconds or more into the future, a clock was wrong. The function then
    waits for one and a half times BEAT_SECONDS; an owner without a new sign in this time counts as silent.
    """

    def sign() -> float:  # for a job that owns the run, its trainer ranks give the signs
        files = [claim.file] if claim.owner.pid else run.owners.glob("trainer-*")
        return max(map(_last_sign, files), default=0.0)

    last = sign()
    if clock(run) > last - SILENT_OWNER_SECONDS:
        return clock(run) - last > SILENT_OWNER_SECONDS
    end = time.monotonic() + 1.5 * BEAT_SECONDS
    while time.monotonic() < end:
        if sign() != last:
            return False
        time.sleep(CLAIM_CHECK_SECONDS)
    return True


def _is_of_an_earlier_start(claim: Claim, me: Owner) -> bool:
    """Return whether the owner is of an earlier start in the Slurm job of ``me``, and so must be gone.

    A job starts its ranks anew only when the earlier ones have ended. But several ``tba run`` or elastic
    searchers may work in one job at the same time, and only a requeue of the job ends them all.
    """
    owner = claim.owner
    several = owner.elastic or (claim.name == LAUNCH and owner.pid)
    return bool(owner.job) and owner.job == me.job and not (several and owner.restarts == me.restarts)


def _began(pid: int) -> int | None:
    """Return when a process of this machine began, in clock ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """Return a unique identifier of this machine or container since its boot; host names may be alike."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_at_work(run: RunDir, owner: Owner) -> bool | None:
    """Ask Slurm whether the owner's job has processes; return None if Slurm cannot be asked."""
    if (rows := components(owner.job)) is None:
        return None
    # Slurm reuses the ids of jobs. A job's comment, if it has one, tells to which run it belongs.
    return any(
        row["state"] in WITH_PROCESSES
        and (owner.pid or row["comment"] in ("", "(null)") or comment_names(row["comment"], run))
        for row in rows
    )
