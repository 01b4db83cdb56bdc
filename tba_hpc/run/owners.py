"""Ownership of a run: one launcher or Slurm job, and one process per rank. A second owner is refused.

Kernel locks do not work across hosts on many shared file systems. A claim is therefore a file made by
``os.link``, which succeeds for exactly one of any number of rivals. Claims of a name are numbered, and the
highest counts. The successor of a dead owner takes the next number, so that nobody removes a file that a
rival has just made. The newest file stays when its owner leaves, marked as nobody's, so that no number is
used twice.

An owner keeps the run's folder open, by which other processes of its machine recognise it: in a copied run
folder a claim names a process that is at work on another run.

An owner touches its file every BEAT_SECONDS. If it is on another host and silent for SILENT_OWNER_SECONDS,
anybody may take its claim. If it was only frozen, it ends as soon as it notices that its claim is taken. It
checks this before anything that it writes counts (``end_if_superseded``).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.files import publish, read_regular, write_atomic
from tba_hpc.run.notes import Exit
from tba_hpc.run.slurm_queue import WITH_PROCESSES, components, names

LAUNCH = "launch"
"""Name owned by ``tba run`` or a Slurm job, which starts the ranks; each rank owns its own name."""

BEAT_SECONDS = 10.0
"""Seconds between two signs of life of an owner."""

SILENT_OWNER_SECONDS = 60.0
"""Seconds without a sign of life after which an owner on another host counts as dead."""

EARLIER_OWNER_SECONDS = 10.0
"""Seconds that a rank waits for an earlier one on its machine to end, before it is refused."""

CLAIM_CHECK_SECONDS = 0.2
"""Seconds between two looks at a claim."""

_ours: dict[Path, int] = {}
"""Claims of this process, each with a descriptor that keeps the run's folder open."""


class OwnedError(ValueError):
    """Raised if another process owns a run or name; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a claim: a process or a Slurm job, or nobody if there is neither.

    machine: scope in which process numbers are unique. pid: process number, or 0 if a Slurm job is the owner
    through any of its processes. began: start of the process in clock ticks since boot, since its number may
    be reused. job, restarts: Slurm's values, or empty. since: unix seconds. elastic: several such owners may
    be at work in one job. holds: whether the process keeps the run's folder open; version 0.3.0 did not.
    ready: whether an elastic searcher's engine has loaded weights.
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

    @classmethod
    def this(cls, pid: int, *, elastic: bool = False) -> Owner:
        """Make an owner of this process, or with ``pid`` 0 of its Slurm job."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            began=_began(pid) or 0,
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=os.environ.get("SLURM_RESTART_COUNT", ""),
            since=time.time(),
            elastic=elastic,
            holds=bool(pid),
        )

    @property
    def is_here(self) -> bool:
        """Return whether the owner is a process that can be signalled from this machine."""
        return bool(self.pid) and self.machine == _machine()

    def to_json(self) -> str:
        """JSON text with all fields."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        parts = [f"process {self.pid} on {self.host}"] if self.pid else []
        parts += [f"Slurm job {self.job}"] if self.job else []
        return f"{' of '.join(parts)}, since {time.strftime('%F %T', time.localtime(self.since))}"


UNKNOWN = Owner(host="unknown", machine="unknown", pid=-1)
"""Owner of a damaged claim, which counts as alive while its file is touched."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The valid claim to a name. file: None if there has been no claim yet."""

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
    """Return the run's owner if it is alive, otherwise None. Writes nothing."""
    claim = _newest(run, LAUNCH)
    return None if _is_free(run, claim, Owner.this(os.getpid())) else claim.owner


def is_abandoned(run: RunDir) -> bool:
    """Return whether the run's owner is dead; False if there was none, or if this is unknown."""
    try:
        claim = _newest(run, LAUNCH)
        return claim.file is not None and _is_free(run, claim, Owner.this(os.getpid()))
    except OSError:  # a stranger's run, or a file server that is away
        return False


def claim_for_job(run: RunDir) -> None:
    """Make this process's Slurm job the owner of the run until the job has ended. Raises OwnedError."""
    _claim(run, LAUNCH, Owner.this(0), wait=True)


@contextmanager
def owned(run: RunDir, name: str = LAUNCH) -> Iterator[None]:
    """Own the run, or a rank's name, while the block runs. Raises OwnedError.

    A rank waits for an earlier owner of its name that may be leaving or dead. If this process was frozen and
    another has taken over meanwhile, this one ends with Exit.FAILED.
    """
    lease = Lease(_claim(run, name, Owner.this(os.getpid()), wait=name != LAUNCH))
    try:
        yield
    finally:
        lease.release()


def take_lease(run: RunDir, names: Iterable[str]) -> Lease | None:
    """Own the first free name of ``names`` until ``release``; return None if all are taken.

    Never waits; otherwise it works like ``owned``.
    """
    me = Owner.this(os.getpid(), elastic=True)
    for name in names:
        with suppress(OwnedError):
            return Lease(_claim(run, name, me, wait=False))
    return None


class Lease:
    """Claim of this process, with a thread that touches its file. number: claim number, never reused."""

    def __init__(self, file: Path) -> None:
        self.name, self.number = file.stem, _number(file)
        self._file = file
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def release(self) -> None:
        """Give up the claim: its file stays, and names nobody."""
        self._left.set()
        with suppress(OSError):  # a full disk: rivals will see anyway that this process is gone
            write_atomic(self._file, Owner().to_json())
        os.close(_ours.pop(self._file))

    def _beat(self) -> None:
        while not self._left.wait(BEAT_SECONDS):
            with suppress(OSError):  # a file server that is away for a while
                end_if_superseded()
                os.utime(self._file)


def note_ready(name: str) -> None:
    """Record in this process's claim of ``name`` that its engine has loaded weights."""
    end_if_superseded()  # else the claim would be there again
    (mine,) = (mine for mine in _ours if mine.stem == name)
    write_atomic(mine, replace(_read(mine), ready=True).to_json())


def holders(run: RunDir, names: Iterable[str], *, now: float | None = None) -> dict[str, Claim]:
    """Map names to claims whose owners gave a recent sign of life; those of this machine must have a process.

    now: unix seconds, by default this host's clock.
    """
    there = {file.stem for file in run.owners.glob("*.*")} if run.owners.is_dir() else set()
    claims = [claim for name in names if name in there and (claim := _newest(run, name)).owner.pid]
    claims = [claim for claim in claims if not claim.owner.is_here or _exists(claim.owner)]
    now = time.time() if now is None else now
    return {claim.name: claim for claim in claims if now - _last_sign(claim.file) < SILENT_OWNER_SECONDS}


def end_if_superseded() -> None:
    """End this process if another has taken over one of its names, or if it belongs to an earlier attempt.

    Call it before anything that this process wrote counts. Raises OSError if the file system cannot tell.
    """
    for mine in list(_ours):
        run = RunDir(mine.parent.parent)
        if _highest(mine) > _number(mine):
            _end(f"{mine.stem} of {run.path} has another owner: this process ends\n")
        if ATTEMPT in os.environ and run.attempt_number < run.newest_attempt:
            _end(f"{run.path} was started again: this process, {mine.stem} of {run.attempt}, ends\n")


def _exists(owner: Owner) -> bool:
    """Return whether the process of an owner on this machine exists."""
    return _began(owner.pid) == owner.began


def keeps_open(run: RunDir, pid: int) -> bool | None:
    """Return whether a process of this machine has the run's folder open; None if this user may not look."""
    folder = run.path.resolve()
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return None
    except FileNotFoundError:
        return False
    return any(_leads_to(link, folder) for link in links)


def _leads_to(link: Path, folder: Path) -> bool:
    """Return whether a link leads to ``folder``. Names are compared first, as a file's server may be away."""
    with suppress(OSError):  # the descriptor was closed just now
        return link.readlink().name == folder.name and link.samefile(folder)
    return False


def clock(run: RunDir) -> float:
    """Return unix seconds by the clock that timestamps the files of all hosts."""
    file = run.owners / f".{secrets.token_hex(8)}.tmp"
    file.touch()
    try:
        return file.stat().st_mtime
    finally:
        file.unlink()


def _end(sentence: str) -> None:
    """End this process at once, even if its standard error is closed, broken or a full pipe."""
    try:
        if sys.stderr and not sys.stderr.closed and select.select([], [sys.stderr], [], 0)[1]:
            os.write(sys.stderr.fileno(), sentence.encode())
    finally:
        os._exit(Exit.FAILED)


# --- Claims ---


def _claim(run: RunDir, name: str, me: Owner, *, wait: bool) -> Path:
    """Make ``me`` the owner, and return the claim's file. Raises OwnedError or ConfigError.

    wait: wait for an owner to leave, long enough that one still there must be at work. Sets the umask to 077.
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
    """Make the claim with that number, and remove earlier ones; return None if a rival was faster."""
    mine, taken = run.owners / f"{name}.{number:06d}", False
    folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)  # opened before anybody sees the claim
    try:
        taken = _publish(mine, me)
    finally:
        if taken and me.pid:
            _ours[mine] = folder
        else:
            os.close(folder)
    return mine if taken else None


def _publish(mine: Path, me: Owner) -> bool:
    """Write a claim and remove earlier ones; return False if a rival was faster."""
    try:
        publish(mine, me.to_json().encode(), replace=False)
    except FileExistsError:
        return False
    if _highest(mine) > _number(mine):  # a rival has removed the claim that had this number
        mine.unlink(missing_ok=True)
        return False
    for file in mine.parent.glob(f"{mine.stem}.*"):
        if _number(file) < _number(mine):
            file.unlink(missing_ok=True)
    return True


def _newest(run: RunDir, name: str) -> Claim:
    """Read the valid claim to a name. On NFS a listing may still show one that was removed."""
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
    except (ValueError, TypeError):  # truncated or corrupted by a crash or a disk
        return UNKNOWN


def _highest(claim: Path) -> int:
    """Return the highest number among the claims to the same name."""
    return max(map(_number, claim.parent.glob(f"{claim.stem}.*")), default=0)


def _number(file: Path) -> int:
    return int(file.suffix[1:])


def _last_sign(file: Path | None) -> float:
    """Return when a claim was last touched, by the file system's clock; 0 if it is gone."""
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
            f"{what} may be in use: {claim.file} is damaged and does not tell by whom; if nobody "
            f"is, try again in {SILENT_OWNER_SECONDS:.0f} s"
        )
    stop = f"kill -USR1 {owner.pid} (on {owner.host})" if owner.pid else f"scancel {owner.job}"
    unseen = owner.machine != _machine() and not owner.job
    dead = f"; if it is dead, try again in {SILENT_OWNER_SECONDS:.0f} s" if unseen else ""
    return f"{what} is already in use: {owner}; let it finish, or end it first: {stop}{dead}"


# --- Whether an owner is gone ---


def _is_free(run: RunDir, claim: Claim, me: Owner) -> bool:
    """Return whether a claim has no living owner."""
    owner = claim.owner
    if not (owner.pid or owner.job):
        return True
    if owner.pid and owner.machine == me.machine:
        left_by_us = owner.pid == me.pid and claim.file not in _ours  # an error cut a claim short
        return left_by_us or not _exists(owner) or (owner.holds and keeps_open(run, owner.pid) is False)
    if _is_of_an_earlier_start(claim, me):
        return True
    # An MPI rank starts no processes, and its launcher has asked Slurm already.
    at_work = _is_at_work(run, owner) if owner.job and claim.name == LAUNCH else None
    if at_work is False or (at_work and not owner.pid):
        return not at_work
    return _is_silent(run, claim)


def _is_silent(run: RunDir, claim: Claim) -> bool:
    """Return whether an owner has stopped giving signs of life.

    A sign from the future was made by another clock: a client's, or one that was set. In that case the owner
    is watched for longer than the time between two signs.
    """

    def sign() -> float:  # a job's launcher gives no signs, but its ranks do
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
    """Return whether the owner belongs to an earlier start of this process's Slurm job, so must be gone.

    A requeued job restarts all its processes, and a job starts its ranks in one Slurm step after another. But
    two ``tba run`` or two elastic searchers may be at work in one job at the same time.
    """
    owner = claim.owner
    several = owner.elastic or (claim.name == LAUNCH and owner.pid)
    return bool(owner.job) and owner.job == me.job and not (several and owner.restarts == me.restarts)


def _began(pid: int) -> int | None:
    """Return when a process of this machine began, in clock ticks since boot; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """Return an identifier of this machine or container, as host names need not be unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_at_work(run: RunDir, owner: Owner) -> bool | None:
    """Ask Slurm whether the owner's job has processes; None if it cannot be asked."""
    if (rows := components(owner.job)) is None:
        return None
    # Slurm reuses ids of jobs; the comment, if there is one, tells whose this is.
    return any(
        row["state"] in WITH_PROCESSES
        and (owner.pid or row["comment"] in ("", "(null)") or names(row["comment"], run))
        for row in rows
    )
