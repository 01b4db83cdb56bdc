"""Decides what a batch script does next: ``job_supervisor.sh`` calls ``tba supervise STAGE RUN KEY=VALUE …``.

The command may run in a container that lacks Slurm's commands. It therefore knows only the files of the run
and what the script passes as KEY=VALUE. Each stage of a job has a function here, which returns what the
script does next, with arguments: ``go`` (start the ranks), ``look`` (check the nodes once more), ``again``
(restart the ranks), ``queue`` (send the job back to the queue) or ``exit``.

The module is light to import, since it runs often. Only the stages ``begin`` and ``start``, and ``leave`` if
it writes a report, import the config.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from tba_hpc.core.wording import count, drop_lost_output
from tba_hpc.run.events import append_event, this_job
from tba_hpc.run.files import is_disk_full, listing, publish, write_atomic
from tba_hpc.run.notes import AT_WORK_FILE, Exit, disk_full, first_note, refusal

FIRST_ELASTIC = 5000
"""Number of the first elastic searcher, copied from ``config``, which takes long to import."""

LONG_SECONDS = 300
"""Seconds after which a failure of elastic searchers counts as the first in a row, whatever came before."""

NEAR_END_SECONDS = 120
"""Margin, in seconds, for telling why a job was asked to stop. If less time was left than the time for a
checkpoint plus this margin, its time limit was near. Otherwise it was preempted. Slurm may ask 60 s early."""

SCRIPT_SECONDS = 270
"""Time for a checkpoint in jobs of the scripts in slurm/, in seconds. Whatever the site says, such a job is
asked to stop 300 s before its end, and the last 30 s are for the requeue."""

TOO_SLOW = (
    "see the job's log, give it more time (--time, site key time) or, if its nodes were rejected, other "
    "nodes or no het job (--homogeneous)"
)
"""Remedy for several allocations in a row that sealed neither a shard nor a checkpoint."""

TOO_EARLY = (
    "the last was asked to stop before it could seal anything, because its time limit is hardly longer than "
    "Slurm's notice before the end: raise the limit (--time, site key time), or shorten the notice (site key "
    "signal_seconds; in a script by hand also #SBATCH --signal=B:USR1@SECONDS)"
)
"""Remedy instead of TOO_SLOW if the last allocation was asked to stop near its end."""

READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "str": str,
    "bool": "1".__eq__,
    "list[str]": str.split,
}
"""Parser of a value that the script passes, for each type of a field of JobState."""


@dataclass(kw_only=True)
class JobState:
    """State of a job, passed by its batch script. Each of the STAGES gets only the fields that it needs."""

    run: Path
    code: int = 0
    """Exit status of the ranks that have just ended."""
    seconds: int = 0
    """Time for which the ranks ran, in seconds."""
    failures: int = 0
    """Number of failures in a row before the ranks ended this time."""
    stop: bool = False
    """True if the job was asked to stop."""
    ending: bool = False
    """True if Slurm is ending the job."""
    relaunches: int = 3
    """Value of the site key of this name: number of failures in a row after which ranks still restart."""
    chained: bool = False
    """True if the job follows another job of a chain."""
    save_seconds: int = 0
    """Time that the ranks get for a checkpoint once they are asked to stop, in seconds."""
    requeue: str = "yes"
    """Permission of the job to requeue itself: "yes" or "no"."""
    het: bool = False
    """True for a het job, in which each component has one role."""
    nodes: int = 0
    """Number of nodes that the job requested."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of component 0, or of the whole job if it is not a het job."""
    others: list[str] = field(default_factory=list)
    """Hosts of component 1 of a het job."""
    answers: list[str] = field(default_factory=list)
    """Hosts on which a test process has started. The prefix "!" marks those that do not see the run
    directory, and "?" those that fail the health check."""
    ascending: list[str] = field(default_factory=list)
    """All hosts of a het job in Slurm's order of names."""
    last_look: bool = False
    """True if the nodes have been checked for the second and last time."""
    array_job: str = ""
    """Id of a job of elastic searchers: that of its array, with its number there, such as 12_3."""
    trainers: int = 0
    """Number of trainer ranks."""
    searchers: int = 0
    """Number of searchers of the run itself, or of elastic searchers in their jobs."""
    trainer_nodes: int = 0
    """Number of nodes that train; unused by het jobs."""
    searchers_per_node: int = 0
    """Number of searchers on a node; unused by het jobs."""

    @classmethod
    def read(cls, run: Path, words: Sequence[str]) -> JobState:
        """Parse KEY=VALUE words; the keys are the names of the fields."""
        kinds = {one.name: str(one.type) for one in fields(cls)}
        pairs = (word.partition("=")[::2] for word in words)
        return cls(run=run, **{key: READ[kinds[key]](value) for key, value in pairs})  # type: ignore[arg-type]

    def log(self, event: str, **extra: object) -> None:
        """Append an event to the run's events."""
        append_event(self.run / "events.jsonl", event, **extra)

    def refuse(self, sentence: str, code: Exit = Exit.REFUSED) -> str:
        """Tell the user what to do, and return ``exit``: the job ends for good."""
        self.log("refused", sentence=sentence)
        say(sentence)
        return self.end(code)

    def end(self, code: Exit = Exit.DONE) -> str:
        """Return ``exit`` with a status and the ids of the chain's later jobs, which the script cancels."""
        links = self.links
        self.mark("chain").unlink(missing_ok=True)
        return f"exit {code} {' '.join(links)}".strip()

    @property
    def links(self) -> list[str]:
        """Ids of the jobs of the chain that follow this one."""
        job, jobs = this_job(), _read(self.mark("chain")).split()
        return jobs[jobs.index(job) + 1 :] if job in jobs else []

    @property
    def finished(self) -> bool:
        """True if the run is finished."""
        return "finished" in listing(self.run)

    def mark(self, name: str) -> Path:
        """Return the path of a file in RUN/slurm whose text or timestamp later stages of the job need."""
        return self.run / "slurm" / name


def say(sentence: str) -> None:
    """Write a line to the job's log, if the disk of the log has space."""
    job, restarts = this_job(), os.environ.get("SLURM_RESTART_COUNT", "0")
    line = f"[{time.strftime('%F %T')} job {job} restart {restarts}] {sentence}"
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


# --- Stages ---


def begin(job: JobState) -> str:
    """Claim the run for a job that has got its nodes, ``hosts``.

    Returns ``go`` with the name of the folder of caches, and with ``notify`` if run.notify is set. Returns
    ``exit`` if there is nothing to do. Raises OwnedError if another job is at work on the run.
    """
    from tba_hpc.run.directory import RunDir
    from tba_hpc.run.owners import claim_for_job

    if job.chained and this_job() not in _read(job.mark("chain")).split():
        say("the chain of this job has ended: nothing to do")
        return f"exit {Exit.DONE}"
    claim_for_job(RunDir.open(job.run))
    write_atomic(job.mark("job"), this_job() + "\n")
    job.mark("allocated").touch()
    job.mark("nodes").write_text(" ".join(job.hosts))
    job.log("allocated", nodes=",".join(job.hosts))
    if job.finished:
        say(f"the run is finished already: {job.run}/summary.json")
        return job.end()
    if _for_good(job):
        job.log("stopped")
        return job.end()
    notify = " notify" if RunDir(job.run).config().run.notify.wanted else ""
    return f"go {_caches(job)}{notify}"


def _caches(job: JobState) -> str:
    """Return the name of the folder of caches, in which engines keep compiled code.

    The name is the same at each start and on all nodes. It is random so that other users cannot create the
    folder beforehand: it may lie in /tmp, where everybody can write, and its content is run as code.
    """
    note = job.mark("caches")
    with suppress(FileExistsError):  # if several jobs start together, the first one chooses the name
        publish(note, f"tba-{secrets.token_hex(8)}\n".encode(), replace=False)
    return note.read_text().strip()


def start(job: JobState) -> str:
    """Place the ranks on the nodes that answer, and begin an attempt, a start of all ranks.

    Returns ``go`` with the numbers of nodes and searchers and the name of the attempt, or ``look`` if nodes
    have failed their first check. Returns ``queue`` if the nodes are unusable, or ``exit`` if a node does not
    see the run directory at the first start.
    """
    blind = [answer[1:] for answer in job.answers if answer[0] == "!"]
    if blind and not job.mark("start").exists():  # after a start, the folder is right and the node at fault
        sentence = f"{blind[0]} does not see {job.run}: put run.root on a file system that all nodes share"
        return job.refuse(sentence)
    hosts = [*job.hosts, *job.others]
    missing = [host for host in hosts if host not in job.answers]
    if missing and not job.last_look:
        say(f"no answer yet from {' '.join(missing)}: asking again")
        return "look"
    there = [host for host in hosts if host not in missing]
    for host in sorted({*_read(job.mark("nodes")).split()}.difference(hosts)):
        job.log("unreachable", nodes=host)
        say(f"{host} is lost; the job still has {' '.join(there)}")
    job.mark("nodes").write_text(" ".join(there))
    for host in missing:
        sick = f"?{host}" in job.answers or host in blind
        job.log("unhealthy" if sick else "unreachable", nodes=host)
        why = "cannot write to its /dev/shm or /tmp, or has GPUs with errors (nvidia-smi)"
        why = f"does not see {job.run} any more" if host in blind else why
        say(f"{host} {f'{why}: it is excluded from the next start' if sick else 'does not answer'}")
    return _het(job, missing) if job.het else _homogeneous(job, missing)


def _unfit(why: str) -> str:
    """Log why the nodes are unusable, and return ``queue``."""
    say(f"these nodes are unusable: {why}")
    return "queue"


def _het(job: JobState, missing: Sequence[str]) -> str:
    """Begin an attempt of a het job, and return ``go`` as ``start`` does.

    Returns ``queue`` instead if a node is missing or belongs to both components, or if the nodes, component 0
    first, are not in Slurm's order of names.
    """
    hosts = [*job.hosts, *job.others]
    if not (job.hosts and job.others):
        return _unfit("Slurm names no nodes of one component")
    if missing:
        return _unfit(f"{' '.join(missing)} cannot be used")
    if len({*hosts}) < len(hosts):  # Slurm has restarted component 0 alone, and srun starts no step
        return _unfit("its components share a node")
    if hosts == job.ascending:
        return _go(job, len(hosts), job.searchers)
    # PMIx numbers the nodes of a het step in Slurm's order of names, srun in the order of the components (in
    # all versions from 22.05 to 26.05). If the two orders differ, the first collective hangs.
    return _unfit(
        f"they are not in Slurm's own order, component 0 first: {' '.join(hosts)}; 'tba submit' and the "
        "script of 'tba submit --print' give each component its side of the nodes"
    )


def _homogeneous(job: JobState, missing: Sequence[str]) -> str:
    """Begin an attempt of a job that is a single allocation, and return ``go`` as ``start`` does.

    Of the nodes that answer, the first ones train, and all others search. A single node does both. Without
    searchers, all nodes must answer, since all of them train. Returns ``queue`` if too few answer.
    """
    there = [host for host in job.hosts if host not in missing]
    if job.searchers_per_node == 0:
        if missing:
            return _unfit(f"{' '.join(missing)} cannot be used")
        train, search, searchers = there, [], 0
    elif job.nodes == 1:
        train, search, searchers = there, there, job.searchers
    else:
        train, search = there[: job.trainer_nodes], there[job.trainer_nodes :]
        searchers = len(search) * job.searchers_per_node
    if job.searchers_per_node and not search:
        return _unfit("no node is left to search")
    ranks = [*spread(job.trainers, train), *spread(searchers, search)]
    job.mark("hosts").write_text("".join(f"{host}\n" for host in ranks))
    return _go(job, len(there), searchers)


def spread(ranks: int, hosts: Sequence[str]) -> list[str]:
    """Return the host of each rank. Ranks of a host are consecutive, and hosts get about equally many."""
    return [hosts[rank * len(hosts) // ranks] for rank in range(ranks)]


def _go(job: JobState, nodes: int, searchers: int) -> str:
    """Write the numbers of ranks to the run's config, begin an attempt with its logs, and return ``go``."""
    from tba_hpc.run.directory import RunDir

    run = RunDir.open(job.run)
    run.adapt([f"launch.trainers={job.trainers}", f"launch.searchers={searchers}"])
    logs = run.begin_attempt()
    job.log("start", attempt=logs.name, trainers=job.trainers, searchers=searchers)
    job.mark("start").touch()
    ranks = f"{count(job.trainers, 'trainer rank')} and {count(searchers, 'searcher')}"
    say(f"starting {ranks}; their logs: {run.logs / logs.name}")
    return f"go {nodes} {searchers} {logs.name}"


def ended(job: JobState) -> str:
    """Decide what follows after the ranks have ended with status ``code``.

    Returns ``exit`` if the run is finished, if only the user can solve the problem, or after too many
    failures in a row. Returns ``queue`` if the ranks have stopped without a failure, if the job was asked to
    stop, or if Slurm is ending it. Otherwise returns ``again`` with the number of failures in a row.
    """
    if job.finished:
        job.log("finished")
        say(f"the run is finished: {job.run}/report.html")
        return job.end()
    logs = job.run / "logs/latest"
    listing(logs)
    sentence = refusal(logs)
    # After a request to stop, two ways to end are no failure. saved: the ranks were killed after their
    # checkpoint was complete. unheard: they did not hang, and ended before they listened to signals. The
    # leader writes AT_WORK_FILE once it listens.
    saved = _newer(job.run / "checkpoints", "COMPLETE", job.mark("asked"))
    unheard = job.code != 128 + signal.SIGKILL and not sentence and not (logs / AT_WORK_FILE).exists()
    if job.code == 0 or (job.stop and (saved or unheard)):
        job.log("stopped")
        return "queue"
    if sentence:
        return job.refuse(sentence)
    if job.ending:
        return "queue"
    why = first_note(logs, "failed")
    job.log("failed", code=job.code, **({"sentence": why} if why else {}))
    failures = (0 if _progress(job, "start") else job.failures) + 1
    reason = f"{why}; " if why else ""
    say(f"the ranks ended with status {job.code} (failure {failures} in a row): {reason}see {logs.resolve()}")
    if job.stop:
        return "queue"
    if failures <= job.relaunches:
        return f"again {failures}"
    say("giving up")
    return job.end(Exit.NO_PROGRESS)


def leave(job: JobState) -> str:
    """Return ``queue`` for a job whose ranks have ended, or ``exit`` if a requeue is useless or unwanted."""
    if _for_good(job):
        try:
            _draw(job)
        except Exception as error:  # the job ends with or without a report
            say(f"the report could not be written ({error}): try tba report {job.run}")
        return job.end()
    idle, early = _count_idle(job)
    goes_on = job.requeue != "no" or bool(job.links)
    if idle > (job.relaunches if goes_on else 0):
        job.mark("idle").unlink()
        remedy = TOO_EARLY if early else TOO_SLOW
        why = f"nothing was sealed in {count(idle, 'allocation')} in a row: {remedy}"
        return job.refuse(f"{why}, and submit the same run again", Exit.NO_PROGRESS)
    if job.requeue == "no":
        say(f"stopped; {f'job {job.links[0]} continues' if goes_on else 'submit the same run to resume'}")
        return f"exit {Exit.UNFINISHED}"
    job.log("requeue")
    return "queue"


def _count_idle(job: JobState) -> tuple[int, bool]:
    """Count the allocations in a row, up to this one, that sealed neither a shard nor a checkpoint.

    Allocations cut short by preemption do not count. Returns their number, and whether this allocation was
    asked to stop near its end.
    """
    noted = _read(job.mark("idle")).strip()
    idle = int(noted) if noted.isdecimal() else 0
    seconds_left = float(os.environ.get("TBA_JOB_END", "inf")) - time.time()
    near_end = seconds_left < max(job.save_seconds, SCRIPT_SECONDS) + NEAR_END_SECONDS
    if _progress(job, "allocated"):
        idle = 0
    elif not job.stop or near_end:
        idle += 1
    write_atomic(job.mark("idle"), f"{idle}\n")
    return idle, job.stop and near_end


def _for_good(job: JobState) -> bool:
    """Return whether ``tba stop`` has asked this job to end without a requeue."""
    listing(job.run / "slurm")
    note = job.mark("stop")
    if _read(note).strip() != this_job():
        return False
    note.unlink()
    say("stopped for good, as asked: submit the same run again to resume")
    return True


def _read(note: Path) -> str:
    """Read the text of a file; empty if there is none."""
    return note.read_text() if note.exists() else ""


def _draw(job: JobState) -> None:
    """Write the report of a stopped run, whose ranks leave it to the launcher, since it may take long."""
    from tba_hpc.report.page import write_report
    from tba_hpc.run.directory import RunDir

    write_report(RunDir.open(job.run))


def _progress(job: JobState, mark: str) -> bool:
    """Return whether this job has sealed a checkpoint or a shard since the time of the file ``mark``.

    Shards of elastic searchers do not count, since they are sealed even if this job makes no progress.
    """
    since = job.mark(mark)
    folders = (job.run / "shards").glob("searcher-*")
    own = (folder for folder in folders if int(folder.name.rpartition("-")[2]) < FIRST_ELASTIC)
    return _newer(job.run / "checkpoints", "COMPLETE", since) or any(
        _newer(folder, "*.h5", since) for folder in own
    )


def _newer(folder: Path, pattern: str, mark: Path) -> bool:
    """Return whether a file below ``folder`` that fits ``pattern`` is newer than the file ``mark``.

    False if there is no file ``mark``.
    """
    since = mark.stat().st_mtime_ns if mark.exists() else time.time_ns()
    for file in folder.rglob(pattern):
        with suppress(FileNotFoundError):  # pruned meanwhile
            if file.stat().st_mtime_ns > since:
                return True
    return False


# --- Elastic searchers ---


def join(job: JobState) -> str:
    """Decide whether a job of elastic searchers starts them on its node.

    ``answers`` is empty, or names the node if it fails the health check. Returns ``go`` with the name of the
    folder of caches. Returns ``queue`` if the node is unfit or the job was asked to stop, or ``exit`` if the
    run is finished or after too many unfit nodes in a row.
    """
    if job.finished:
        say("the run is finished: there is nothing to search for")
        return f"exit {Exit.DONE}"
    note = job.mark(f"unfit-{job.array_job}")
    if not job.answers:
        note.unlink(missing_ok=True)
        return "queue" if job.stop else f"go {_caches(job)}"
    unfit = [*_read(note).split(), *(answer[1:] for answer in job.answers)]
    if len(unfit) <= job.relaunches:
        with suppress(OSError):  # without the note, this node is not counted
            write_atomic(note, " ".join(unfit))
        return "queue"
    say(f"giving up: these nodes have failed the health check, one after the other: {' '.join(unfit)}")
    note.unlink(missing_ok=True)
    return f"exit {Exit.NO_PROGRESS}"


def searched(job: JobState) -> str:
    """Decide what follows after all elastic searchers of a node have ended with status ``code``.

    The script has already restarted each of them after crashes. Returns ``exit``, ``queue`` or ``again``.
    """
    if job.finished:
        say("the run is finished")
        return f"exit {Exit.DONE}"
    # If a site preempts jobs with a plain TERM, searchers end with status 0 before the script gets a signal.
    if job.stop or job.ending or job.code == 0:
        return "queue"
    if job.code == Exit.NO_SLOT:
        say("all slots for elastic searchers are taken: this job is not needed")
        return f"exit {Exit.DONE}"
    failures = (0 if job.seconds >= LONG_SECONDS else job.failures) + 1
    say(f"the searchers ended with status {job.code} (failure {failures} in a row)")
    if job.code != Exit.REFUSED and failures <= job.relaunches:  # srun may have failed itself
        return f"again {failures}"
    return f"exit {Exit.REFUSED if job.code == Exit.REFUSED else Exit.NO_PROGRESS}"


# --- The command ---

STAGES = {stage.__name__: stage for stage in (begin, start, ended, leave, join, searched)}


def main(words: Sequence[str]) -> int:
    """Print what the script does next; return the exit status. words: STAGE RUN KEY=VALUE …"""
    name, job = words[0], JobState.read(Path(words[1]), words[2:])
    for number in (signal.SIGUSR1, signal.SIGTERM):  # the script itself handles them
        signal.signal(number, signal.SIG_IGN)
    try:
        print(STAGES[name](job))
        return 0
    except (ValueError, OSError) as error:  # ValueError: ConfigError, OwnedError
        full = is_disk_full(error)
        if not (full or isinstance(error, ValueError)):
            raise
        sentence = disk_full(job.run) if full else str(error)
        if full and name in ("begin", "start"):
            job.log("refused", sentence=sentence)
        say(sentence)
        return Exit.REFUSED
    finally:
        drop_lost_output()
