"""What a batch script does next: ``tba supervise TURN RUN``, which ``job_supervisor.sh`` asks at every turn.

It may run in a container that lacks Slurm's commands: it knows the files of the run and what the script tells
it, as KEY=VALUE. The last line of its output is the answer: ``go`` (start the ranks), ``look`` (at the nodes
once more), ``again`` (start the ranks again), ``queue`` (back to the queue) or ``exit``, and what belongs to
it. Light to import: only the turns ``begin`` and ``start`` need configs.
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
from tba_hpc.run.notes import AT_WORK, Exit, first_note

FIRST_ELASTIC = 5000
"""Number of the first elastic searcher (``config``)."""

LONG_SECONDS = 300
"""A searcher that lived for so long has not failed in a row."""

NEAR_END_SECONDS = 120
"""With so little time left besides that for a save, an allocation was too short rather than preempted."""

READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "str": str,
    "bool": "1".__eq__,
    "list[str]": str.split,
}
"""How a value that the script tells is read, by the type of its field."""


@dataclass(kw_only=True)
class Turn:
    """What the script tells.

    code: status of the ranks that have ended after ``seconds``, and so many ``failures`` in a row. stop,
    ending: whether the job was asked to stop, and whether Slurm ends it. chained: whether it follows another
    job of a chain. nodes: how many it asked for. hosts: of component 0, or the job; others: of component 1;
    ascending: all in Slurm's order; answers: those that start a process, with "!" if they do not see RUN,
    with "?" if they fail the check of their health. array_job: of elastic searchers, their own of the array.
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
    def read(cls, run: Path, words: Sequence[str]) -> Turn:
        """From KEY=VALUE words."""
        kinds = {one.name: str(one.type) for one in fields(cls)}
        pairs = (word.partition("=")[::2] for word in words)
        return cls(run=run, **{key: READ[kinds[key]](value) for key, value in pairs})  # type: ignore[arg-type]

    def log(self, event: str, **extra: object) -> None:
        """A line of the run's history."""
        append_event(self.run / "events.jsonl", event, **extra)

    def refuse(self, sentence: str, code: Exit = Exit.REFUSED) -> str:
        """End the job for good, with what the user is to do."""
        self.log("refused", sentence=sentence)
        say(sentence)
        return self.end(code)

    def end(self, code: Exit = Exit.DONE) -> str:
        """End the job for good, and the jobs of its chain that wait."""
        links = self.links
        self.mark("chain").unlink(missing_ok=True)
        return f"exit {code} {' '.join(links)}".strip()

    @property
    def links(self) -> list[str]:
        """The jobs of the chain that follow this one."""
        job, jobs = os.environ["SLURM_JOB_ID"], _read(self.mark("chain")).split()
        return jobs[jobs.index(job) + 1 :] if job in jobs else []

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return "finished" in listing(self.run)

    def mark(self, name: str) -> Path:
        """A file of the job's; its time says when something happened, by the clock of the file system."""
        return self.run / "slurm" / name


def say(sentence: str) -> None:
    """A line of the job's log."""
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"[{time.strftime('%F %T')} job {job} restart {restarts}] {sentence}", file=sys.stderr, flush=True)


# --- Turns ---


def begin(turn: Turn) -> str:
    """The job has its nodes, ``hosts``: it takes the run, unless another job is at work on it.

    ``go`` comes with the name of its folder of caches.
    """
    from tba_hpc.run.directory import RunDir
    from tba_hpc.run.owners import claim_for_job

    if turn.chained and os.environ["SLURM_JOB_ID"] not in _read(turn.mark("chain")).split():
        say("the chain of this job has ended: nothing to do")
        return f"exit {Exit.DONE}"
    claim_for_job(RunDir.open(turn.run))
    write_atomic(turn.mark("job"), os.environ["SLURM_JOB_ID"] + "\n")
    turn.mark("allocated").touch()
    turn.log("allocated", nodes=",".join(turn.hosts))
    if turn.finished:
        say(f"the run is finished already: {turn.run}/summary.json")
        return turn.end()
    if _for_good(turn):
        turn.log("stopped")
        return turn.end()
    return f"go {_caches(turn)}"


def _caches(turn: Turn) -> str:
    """Name of the folder in which engines keep what they compile; the same at each start, on all nodes.

    It may lie in /tmp, which is everybody's, and is run as code: nobody can guess the name.
    """
    note = turn.mark("caches")
    with suppress(FileExistsError):  # of several jobs the first one names it
        publish(note, f"tba-{secrets.token_hex(8)}\n".encode(), replace=False)
    return note.read_text().strip()


def start(turn: Turn) -> str:
    """Which nodes answer is known: place the ranks on them.

    ``go`` comes with the number of nodes, that of searchers, and the attempt.
    """
    blind = [answer[1:] for answer in turn.answers if answer[0] == "!"]
    if blind and not turn.mark("start").exists():  # else it is the node's fault
        sentence = f"{blind[0]} does not see {turn.run}: put run.root on a file system that all nodes share"
        return turn.refuse(sentence)
    hosts = [*turn.hosts, *turn.others]
    missing = [host for host in hosts if host not in turn.answers]
    if missing and not turn.last_look:
        say(f"no answer yet from {' '.join(missing)}: asking again")
        return "look"
    for host in missing:
        sick = f"?{host}" in turn.answers or host in blind
        turn.log("unhealthy" if sick else "unreachable", nodes=host)
        why = "cannot write to its /dev/shm or /tmp, or has GPUs with errors (nvidia-smi)"
        why = f"does not see {turn.run} any more" if host in blind else why
        say(f"{host} {f'{why}: it is excluded from the next start' if sick else 'does not answer'}")
    return _het(turn, missing) if turn.het else _homogeneous(turn, missing)


def _unfit(why: str) -> str:
    """These nodes will not do."""
    say(f"these nodes are unusable: {why}")
    return "queue"


def _het(turn: Turn, missing: Sequence[str]) -> str:
    """Every node is needed, since Slurm requeues the whole job if one is lost."""
    hosts = [*turn.hosts, *turn.others]
    if not (turn.hosts and turn.others):
        return _unfit("Slurm names no nodes of one component")
    if missing:
        return _unfit(f"{' '.join(missing)} cannot be used")
    if len({*hosts}) < len(hosts):  # a component 0 that was restarted alone; srun starts no step on that
        return _unfit("its components share a node")
    if hosts == turn.ascending:
        return _go(turn, len(hosts), turn.searchers)
    # PMIx takes the nodes of a het step in Slurm's own order, srun in that of the components (22.05 to 26.05
    # at least): if they differ, the first collective hangs.
    return _unfit(
        f"they are not in Slurm's own order, component 0 first: {' '.join(hosts)}; 'tba submit' and the "
        "script of 'tba submit --print' give each component its side of the nodes"
    )


def _homogeneous(turn: Turn, missing: Sequence[str]) -> str:
    """The first nodes train, and any number of others search; without own searchers all must train."""
    there = [host for host in turn.hosts if host not in missing]
    if turn.searchers_per_node == 0:
        if missing:
            return _unfit(f"{' '.join(missing)} cannot be used")
        train, search, searchers = there, [], 0
    elif turn.nodes == 1:
        train, search, searchers = there, there, turn.searchers
    else:
        train, search = there[: turn.trainer_nodes], there[turn.trainer_nodes :]
        searchers = len(search) * turn.searchers_per_node
    if turn.searchers_per_node and not search:
        return _unfit("no node is left to search")
    ranks = [*spread(turn.trainers, train), *spread(searchers, search)]
    turn.mark("hosts").write_text("".join(f"{host}\n" for host in ranks))
    return _go(turn, len(there), searchers)


def spread(ranks: int, hosts: Sequence[str]) -> list[str]:
    """The host of each rank, in blocks as even as can be."""
    return [hosts[rank * len(hosts) // ranks] for rank in range(ranks)]


def _go(turn: Turn, nodes: int, searchers: int) -> str:
    """Set how many ranks there are, and begin their logs."""
    from tba_hpc.run.directory import RunDir

    run = RunDir.open(turn.run)
    run.adapt([f"launch.trainers={turn.trainers}", f"launch.searchers={searchers}"])
    logs = run.begin_attempt()
    turn.log("start", attempt=logs.name, trainers=turn.trainers, searchers=searchers)
    turn.mark("start").touch()
    say(f"starting {turn.trainers} trainer ranks and {searchers} searchers; their logs: {run.logs}/latest")
    return f"go {nodes} {searchers} {logs.name}"


def ended(turn: Turn) -> str:
    """The ranks have ended with status ``code``, after so many ``failures`` in a row."""
    if turn.finished:
        turn.log("finished")
        say(f"the run is finished: {turn.run}/report.html")
        return turn.end()
    logs = turn.run / "logs/latest"
    listing(logs)
    sentence = first_note(logs, "refused")
    # Killed on their way out, with their checkpoint completed; or asked to stop before they listened to it,
    # by whatever status, unless they hung. The leader says when all have come together.
    saved = _newer(turn.run / "checkpoints", "COMPLETE", turn.mark("asked"))
    unheard = turn.code != 128 + signal.SIGKILL and not sentence and not (logs / AT_WORK).exists()
    if turn.code == 0 or (turn.stop and (saved or unheard)):
        turn.log("stopped")
        return "queue"
    if sentence:
        return turn.refuse(sentence)
    if turn.ending:
        return "queue"
    turn.log("failed", code=turn.code)
    failures = (0 if _progress(turn, "start") else turn.failures) + 1
    say(f"the ranks ended with status {turn.code} (failure {failures} in a row): see {logs}")
    if turn.stop:
        return "queue"
    if failures <= turn.relaunches:
        return f"again {failures}"
    say("giving up")
    return turn.end(Exit.NO_PROGRESS)


def leave(turn: Turn) -> str:
    """The job is about to go back to the queue, unless that is of no use or not wanted."""
    if _for_good(turn):
        try:
            _draw(turn)
        except Exception as error:  # a stop is a stop, with or without a picture
            say(f"the report could not be written ({error}): try tba report {turn.run}")
        return turn.end()
    idle, goes_on = _count_idle(turn), turn.requeue != "no" or bool(turn.links)
    if idle > (turn.relaunches if goes_on else 0):
        turn.mark("idle").unlink()
        return turn.refuse(
            f"nothing was sealed in {count(idle, 'allocation')} in a row: see the job's log, give it more "
            "time (--time, site key time) or, if its nodes were rejected, other nodes or no het job "
            "(--homogeneous), and submit the same run again",
            Exit.NO_PROGRESS,
        )
    if turn.requeue == "no":
        say(f"stopped; {f'job {turn.links[0]} continues' if goes_on else 'submit the same run to resume'}")
        return f"exit {Exit.UNFINISHED}"
    turn.log("requeue")
    return "queue"


def _count_idle(turn: Turn) -> int:
    """Allocations in a row that sealed nothing, leaving out those that a preemption cut short."""
    noted = _read(turn.mark("idle")).strip()
    idle = int(noted) if noted.isdecimal() else 0
    seconds_left = float(os.environ.get("TBA_JOB_END", "inf")) - time.time()
    if _progress(turn, "allocated"):
        idle = 0
    elif not turn.stop or seconds_left < turn.save_seconds + NEAR_END_SECONDS:
        idle += 1
    write_atomic(turn.mark("idle"), f"{idle}\n")
    return idle


def _for_good(turn: Turn) -> bool:
    """Whether ``tba stop`` has named this job, which then ends."""
    listing(turn.run / "slurm")
    note = turn.mark("stop")
    if _read(note).strip() != os.environ["SLURM_JOB_ID"]:
        return False
    note.unlink()
    say("stopped for good, as asked: submit the same run again to resume")
    return True


def _read(note: Path) -> str:
    """Text of a file; empty if there is none."""
    return note.read_text() if note.exists() else ""


def _draw(turn: Turn) -> None:
    """The report, for which the ranks had no time."""
    from tba_hpc.report.page import write_report
    from tba_hpc.run.directory import RunDir

    write_report(RunDir.open(turn.run))


def _progress(turn: Turn, mark: str) -> bool:
    """Whether this job has sealed anything after a mark: a checkpoint or a shard.

    Elastic searchers seal whatever becomes of this job.
    """
    since = turn.mark(mark)
    folders = (turn.run / "shards").glob("searcher-*")
    own = (folder for folder in folders if int(folder.name.rpartition("-")[2]) < FIRST_ELASTIC)
    return _newer(turn.run / "checkpoints", "COMPLETE", since) or any(
        _newer(folder, "*.h5", since) for folder in own
    )


def _newer(folder: Path, pattern: str, mark: Path) -> bool:
    """Whether a file below a folder has changed after a mark."""
    since = mark.stat().st_mtime_ns if mark.exists() else time.time_ns()
    for file in folder.rglob(pattern):
        with suppress(FileNotFoundError):  # pruned meanwhile
            if file.stat().st_mtime_ns > since:
                return True
    return False


# --- Elastic searchers ---


def join(turn: Turn) -> str:
    """A job of elastic searchers has its node, which ``answers`` names if it fails the check of its health.

    ``go`` comes with the name of its folder of caches.
    """
    if turn.finished:
        say("the run is finished: there is nothing to search for")
        return f"exit {Exit.DONE}"
    note = turn.mark(f"unfit-{turn.array_job}")
    if not turn.answers:
        note.unlink(missing_ok=True)
        return "queue" if turn.stop else f"go {_caches(turn)}"
    unfit = [*_read(note).split(), *(answer[1:] for answer in turn.answers)]
    if len(unfit) <= turn.relaunches:
        with suppress(OSError):  # without a note it is only counted less
            write_atomic(note, " ".join(unfit))
        return "queue"
    say(f"giving up: these nodes have failed their check, one after the other: {' '.join(unfit)}")
    note.unlink(missing_ok=True)
    return f"exit {Exit.NO_PROGRESS}"


def searched(turn: Turn) -> str:
    """A node's elastic searchers, each restarted as often as it may be, have ended with status ``code``."""
    if turn.finished:
        say("the run is finished")
        return f"exit {Exit.DONE}"
    # Preempted by a plain TERM, searchers leave in peace before the script has heard of anything.
    if turn.stop or turn.ending or turn.code == 0:
        return "queue"
    if turn.code == Exit.NO_SLOT:
        say("all slots for elastic searchers are taken: this job is not needed")
        return f"exit {Exit.DONE}"
    failures = (0 if turn.seconds >= LONG_SECONDS else turn.failures) + 1
    say(f"the searchers ended with status {turn.code} (failure {failures} in a row)")
    if turn.code != Exit.REFUSED and failures <= turn.relaunches:  # srun may fail, before any searcher begins
        return f"again {failures}"
    return f"exit {Exit.REFUSED if turn.code == Exit.REFUSED else Exit.NO_PROGRESS}"


# --- The command ---

TURNS = {turn.__name__: turn for turn in (begin, start, ended, leave, join, searched)}


def main(words: Sequence[str]) -> int:
    """``TURN RUN KEY=VALUE …``; the exit status."""
    name, turn = words[0], Turn.read(Path(words[1]), words[2:])
    for number in (signal.SIGUSR1, signal.SIGTERM):  # what the job is asked, its script passes on
        signal.signal(number, signal.SIG_IGN)
    try:
        print(TURNS[name](turn))
    except ValueError as error:  # ConfigError, OwnedError, DiskFullError
        say(str(error))
        return Exit.REFUSED
    return 0
