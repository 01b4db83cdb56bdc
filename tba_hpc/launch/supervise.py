"""Decides a batch script's next action: ``job_supervisor.sh`` calls ``tba supervise TURN RUN`` at every turn.

The command may run in a container that lacks Slurm's commands. It knows only the files of the run and what
the script passes as KEY=VALUE. The last line of its output is the answer, with its arguments: ``go`` (start
the ranks), ``look`` (look at the nodes once more), ``again`` (restart the ranks), ``queue`` (go back to the
queue) or ``exit``. The module is light to import: only the turns ``begin`` and ``start`` need configs.
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

from tba_hpc.core.wording import count
from tba_hpc.run.events import append_event
from tba_hpc.run.files import listing, publish, write_atomic
from tba_hpc.run.notes import AT_WORK_FILE, Exit, first_note

FIRST_ELASTIC = 5000
"""Number of the first elastic searcher (see ``config``)."""

LONG_SECONDS = 300
"""Seconds of life after which a searcher's failure no longer counts as one in a row."""

NEAR_END_SECONDS = 120
"""Seconds left, beyond those for a save, below which an allocation counts as too short, not as preempted."""

READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "str": str,
    "bool": "1".__eq__,
    "list[str]": str.split,
}
"""Parsers of the script's values, by the type of the field."""


@dataclass(kw_only=True)
class JobState:
    """State of the job as the script passes it.

    code: exit status of the ranks that have ended after ``seconds``. failures: failures in a row before that.
    stop: whether the job was asked to stop. ending: whether Slurm ends the job. chained: whether the job
    follows another job of a chain. nodes: number of nodes that the job requested. hosts: hosts of component
    0, or of the whole job. others: hosts of component 1. ascending: all hosts in Slurm's order. answers:
    hosts that start a process, with prefix "!" if they do not see RUN, or "?" if they fail the health check.
    array_job: for elastic searchers, their own job of the array.
    """

    run: Path
    code: int = 0
    seconds: int = 0
    failures: int = 0
    stop: bool = False
    ending: bool = False
    relaunches: int = 3
    chained: bool = False
    save_seconds: int = 0
    requeue: str = "yes"
    het: bool = False
    nodes: int = 0
    hosts: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ascending: list[str] = field(default_factory=list)
    last_look: bool = False
    array_job: str = ""
    trainers: int = 0
    searchers: int = 0
    trainer_nodes: int = 0
    searchers_per_node: int = 0

    @classmethod
    def read(cls, run: Path, words: Sequence[str]) -> JobState:
        """Parse KEY=VALUE words."""
        kinds = {one.name: str(one.type) for one in fields(cls)}
        pairs = (word.partition("=")[::2] for word in words)
        return cls(run=run, **{key: READ[kinds[key]](value) for key, value in pairs})  # type: ignore[arg-type]

    def log(self, event: str, **extra: object) -> None:
        """Append an event to the run's events."""
        append_event(self.run / "events.jsonl", event, **extra)

    def refuse(self, sentence: str, code: Exit = Exit.REFUSED) -> str:
        """End the job for good, with a sentence that tells the user what to do."""
        self.log("refused", sentence=sentence)
        say(sentence)
        return self.end(code)

    def end(self, code: Exit = Exit.DONE) -> str:
        """End the job for good, and the waiting jobs of its chain."""
        links = self.links
        self.mark("chain").unlink(missing_ok=True)
        return f"exit {code} {' '.join(links)}".strip()

    @property
    def links(self) -> list[str]:
        """Ids of the jobs of the chain that follow this one."""
        job, jobs = os.environ["SLURM_JOB_ID"], _read(self.mark("chain")).split()
        return jobs[jobs.index(job) + 1 :] if job in jobs else []

    @property
    def finished(self) -> bool:
        """Return whether the run is finished."""
        return "finished" in listing(self.run)

    def mark(self, name: str) -> Path:
        """Path of a file of the job. Its timestamp records an event by the file system's clock."""
        return self.run / "slurm" / name


def say(sentence: str) -> None:
    """Write a line to the job's log."""
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"[{time.strftime('%F %T')} job {job} restart {restarts}] {sentence}", file=sys.stderr, flush=True)


# --- Turns ---


def begin(job: JobState) -> str:
    """Claim the run for a job that has got its nodes, ``hosts``, unless another job is at work on it.

    Returns ``go`` with the name of the job's folder of caches, and with ``tell`` if run.notify is set.
    Returns ``exit`` if there is nothing to do.
    """
    from tba_hpc.run.directory import RunDir
    from tba_hpc.run.owners import claim_for_job

    if job.chained and os.environ["SLURM_JOB_ID"] not in _read(job.mark("chain")).split():
        say("the chain of this job has ended: nothing to do")
        return f"exit {Exit.DONE}"
    claim_for_job(RunDir.open(job.run))
    write_atomic(job.mark("job"), os.environ["SLURM_JOB_ID"] + "\n")
    job.mark("allocated").touch()
    job.log("allocated", nodes=",".join(job.hosts))
    if job.finished:
        say(f"the run is finished already: {job.run}/summary.json")
        return job.end()
    if _for_good(job):
        job.log("stopped")
        return job.end()
    tell = " tell" if RunDir(job.run).config().run.notify.wanted else ""
    return f"go {_caches(job)}{tell}"


def _caches(job: JobState) -> str:
    """Return the name of the folder in which engines keep compiled code.

    The name is the same at each start and on all nodes. It is random because the folder may lie in /tmp,
    where everybody can write, and its content is run as code.
    """
    note = job.mark("caches")
    with suppress(FileExistsError):  # of several jobs the first one chooses the name
        publish(note, f"tba-{secrets.token_hex(8)}\n".encode(), replace=False)
    return note.read_text().strip()


def start(job: JobState) -> str:
    """Place the ranks on the nodes that answer.

    ``go`` comes with the number of nodes, the number of searchers, and the attempt.
    """
    blind = [answer[1:] for answer in job.answers if answer[0] == "!"]
    if blind and not job.mark("start").exists():  # after an earlier start it is the node's fault
        sentence = f"{blind[0]} does not see {job.run}: put run.root on a file system that all nodes share"
        return job.refuse(sentence)
    hosts = [*job.hosts, *job.others]
    missing = [host for host in hosts if host not in job.answers]
    if missing and not job.last_look:
        say(f"no answer yet from {' '.join(missing)}: asking again")
        return "look"
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
    """Place the ranks of a het job. It needs every node: Slurm requeues the whole job if one is lost."""
    hosts = [*job.hosts, *job.others]
    if not (job.hosts and job.others):
        return _unfit("Slurm names no nodes of one component")
    if missing:
        return _unfit(f"{' '.join(missing)} cannot be used")
    if len({*hosts}) < len(hosts):  # component 0 was restarted alone; srun starts no step on that
        return _unfit("its components share a node")
    if hosts == job.ascending:
        return _go(job, len(hosts), job.searchers)
    # PMIx takes the nodes of a het step in Slurm's own order, srun in that of the components (at least from
    # 22.05 to 26.05). If the two differ, the first collective hangs.
    return _unfit(
        f"they are not in Slurm's own order, component 0 first: {' '.join(hosts)}; 'tba submit' and the "
        "script of 'tba submit --print' give each component its side of the nodes"
    )


def _homogeneous(job: JobState, missing: Sequence[str]) -> str:
    """Let the first nodes train, and any number of others search. Without searchers all nodes must train."""
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
    """Return the host of each rank, in blocks as even as possible."""
    return [hosts[rank * len(hosts) // ranks] for rank in range(ranks)]


def _go(job: JobState, nodes: int, searchers: int) -> str:
    """Write the numbers of ranks to the run's config, and begin an attempt with its logs."""
    from tba_hpc.core.wording import count
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
    """Decide what follows when ranks have ended with status ``code``, after ``failures`` in a row."""
    if job.finished:
        job.log("finished")
        say(f"the run is finished: {job.run}/report.html")
        return job.end()
    logs = job.run / "logs/latest"
    listing(logs)
    sentence = first_note(logs, "refused")
    # saved: they were killed on their way out, with their checkpoint complete. unheard: they were asked to
    # stop before they listened, and ended by any status but a hang's. The leader notes when all are together.
    saved = _newer(job.run / "checkpoints", "COMPLETE", job.mark("asked"))
    unheard = job.code != 128 + signal.SIGKILL and not sentence and not (logs / AT_WORK_FILE).exists()
    if job.code == 0 or (job.stop and (saved or unheard)):
        job.log("stopped")
        return "queue"
    if sentence:
        return job.refuse(sentence)
    if job.ending:
        return "queue"
    job.log("failed", code=job.code)
    failures = (0 if _progress(job, "start") else job.failures) + 1
    say(f"the ranks ended with status {job.code} (failure {failures} in a row): see {logs.resolve()}")
    if job.stop:
        return "queue"
    if failures <= job.relaunches:
        return f"again {failures}"
    say("giving up")
    return job.end(Exit.NO_PROGRESS)


def leave(job: JobState) -> str:
    """Send the job back to the queue, unless that is useless or not wanted."""
    if _for_good(job):
        try:
            _draw(job)
        except Exception as error:  # the job stops with or without a report
            say(f"the report could not be written ({error}): try tba report {job.run}")
        return job.end()
    idle, goes_on = _count_idle(job), job.requeue != "no" or bool(job.links)
    if idle > (job.relaunches if goes_on else 0):
        job.mark("idle").unlink()
        return job.refuse(
            f"nothing was sealed in {count(idle, 'allocation')} in a row: see the job's log, give it more "
            "time (--time, site key time) or, if its nodes were rejected, other nodes or no het job "
            "(--homogeneous), and submit the same run again",
            Exit.NO_PROGRESS,
        )
    if job.requeue == "no":
        say(f"stopped; {f'job {job.links[0]} continues' if goes_on else 'submit the same run to resume'}")
        return f"exit {Exit.UNFINISHED}"
    job.log("requeue")
    return "queue"


def _count_idle(job: JobState) -> int:
    """Count the allocations in a row that sealed nothing, without those that a preemption cut short."""
    noted = _read(job.mark("idle")).strip()
    idle = int(noted) if noted.isdecimal() else 0
    seconds_left = float(os.environ.get("TBA_JOB_END", "inf")) - time.time()
    if _progress(job, "allocated"):
        idle = 0
    elif not job.stop or seconds_left < job.save_seconds + NEAR_END_SECONDS:
        idle += 1
    write_atomic(job.mark("idle"), f"{idle}\n")
    return idle


def _for_good(job: JobState) -> bool:
    """Return whether ``tba stop`` has named this job, which then ends."""
    listing(job.run / "slurm")
    note = job.mark("stop")
    if _read(note).strip() != os.environ["SLURM_JOB_ID"]:
        return False
    note.unlink()
    say("stopped for good, as asked: submit the same run again to resume")
    return True


def _read(note: Path) -> str:
    """Read the text of a file; empty if there is none."""
    return note.read_text() if note.exists() else ""


def _draw(job: JobState) -> None:
    """Write the report, for which the ranks had no time."""
    from tba_hpc.report.page import write_report
    from tba_hpc.run.directory import RunDir

    write_report(RunDir.open(job.run))


def _progress(job: JobState, mark: str) -> bool:
    """Return whether this job has sealed a checkpoint or a shard after a mark.

    Shards of elastic searchers do not count: they are sealed even if this job makes no progress.
    """
    since = job.mark(mark)
    folders = (job.run / "shards").glob("searcher-*")
    own = (folder for folder in folders if int(folder.name.rpartition("-")[2]) < FIRST_ELASTIC)
    return _newer(job.run / "checkpoints", "COMPLETE", since) or any(
        _newer(folder, "*.h5", since) for folder in own
    )


def _newer(folder: Path, pattern: str, mark: Path) -> bool:
    """Return whether a file below a folder has changed after a mark."""
    since = mark.stat().st_mtime_ns if mark.exists() else time.time_ns()
    for file in folder.rglob(pattern):
        with suppress(FileNotFoundError):  # pruned meanwhile
            if file.stat().st_mtime_ns > since:
                return True
    return False


# --- Elastic searchers ---


def join(job: JobState) -> str:
    """Admit a job of elastic searchers, unless ``answers`` says that its node fails the health check.

    ``go`` comes with the name of the job's folder of caches.
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
        with suppress(OSError):  # without the note the node is merely not counted
            write_atomic(note, " ".join(unfit))
        return "queue"
    say(f"giving up: these nodes have failed their check, one after the other: {' '.join(unfit)}")
    note.unlink(missing_ok=True)
    return f"exit {Exit.NO_PROGRESS}"


def searched(job: JobState) -> str:
    """Decide what follows when a node's elastic searchers, after all their restarts, ended with ``code``."""
    if job.finished:
        say("the run is finished")
        return f"exit {Exit.DONE}"
    # Preempted by a plain TERM, searchers end with status 0 before the script gets a signal.
    if job.stop or job.ending or job.code == 0:
        return "queue"
    if job.code == Exit.NO_SLOT:
        say("all slots for elastic searchers are taken: this job is not needed")
        return f"exit {Exit.DONE}"
    failures = (0 if job.seconds >= LONG_SECONDS else job.failures) + 1
    say(f"the searchers ended with status {job.code} (failure {failures} in a row)")
    if job.code != Exit.REFUSED and failures <= job.relaunches:  # srun may fail, before any searcher begins
        return f"again {failures}"
    return f"exit {Exit.REFUSED if job.code == Exit.REFUSED else Exit.NO_PROGRESS}"


# --- The command ---

TURNS = {turn.__name__: turn for turn in (begin, start, ended, leave, join, searched)}


def main(words: Sequence[str]) -> int:
    """Run ``TURN RUN KEY=VALUE …`` and print the answer; return the exit status."""
    name, job = words[0], JobState.read(Path(words[1]), words[2:])
    for number in (signal.SIGUSR1, signal.SIGTERM):  # the script passes on what the job is asked
        signal.signal(number, signal.SIG_IGN)
    try:
        print(TURNS[name](job))
    except ValueError as error:  # ConfigError, OwnedError, DiskFullError
        say(str(error))
        return Exit.REFUSED
    return 0
