"""One owner each: who is refused, who takes over; real processes, and files as other hosts leave them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
from children import Child, children, stay
from test_hdf5_shards import scored
from waiting import until

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.exchange.hdf5_shards import PendingShards, ShardWriter
from tba_hpc.launch.placement import refuse_index
from tba_hpc.run import metrics, owners
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.files import write_atomic
from tba_hpc.run.owners import LAUNCH, OwnedError, Owner, claim_for_job, owned, refuse_owned

ELSEWHERE = Owner(host="node7", machine="another", pid=4711, began=1, since=1_700_000_000.0)
"""A process on another host."""


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    before = os.umask(0o022)
    made = RunDir.create(parse_config({"model": {"path": "tiny"}, "run": {"root": str(tmp_path)}}))
    os.umask(before)
    return made


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts a process at work on a function of this file."""
    with children() as make:
        yield make


@pytest.fixture
def hold(run: RunDir, start: Callable[..., Child]) -> Callable[..., Child]:
    """Starts a process that owns the run, or a rank's name, until the test lets it go."""
    return lambda name=LAUNCH, **options: start(_hold, run.path, name, **options)


def _hold(told: Connection, path: Path, name: str) -> None:
    owners.BEAT_SECONDS, owners.EARLIER_OWNER_SECONDS = 0.05, 0.0
    try:
        with owned(RunDir(path), name):
            stay(told, "owner")
    except OwnedError as error:
        told.send(str(error))


def claimed(run: RunDir, owner: Owner, *, ago: float = 0.0, name: str = LAUNCH) -> Path:
    """A claim as another machine would leave it, with its last sign of life ``ago`` seconds ago."""
    run.owners.mkdir(exist_ok=True)
    file = run.owners / f"{name}.000007"
    file.write_text(owner.to_json())
    os.utime(file, (time.time() - ago,) * 2)
    return file


def is_free(run: RunDir) -> bool:
    """Whether a start would be let in; both ways of asking must agree."""
    try:
        refuse_owned(run)
    except OwnedError:
        with pytest.raises(OwnedError), owned(run):
            pass
        return False
    return True


@pytest.mark.parametrize("name", [LAUNCH, "searcher-0003"])
def test_a_second_process_is_refused_until_the_first_is_gone(
    run: RunDir, hold: Callable[..., Child], name: str
) -> None:
    first = hold(name)
    assert first.said() == "owner"
    (file,) = run.owners.iterdir()
    before = file.read_bytes()
    sentence = hold(name).said()
    place = str(run.path) if name == LAUNCH else f"{name} of {run.path}"
    assert sentence.startswith(
        f"{place} is already in use: process {first.pid} on {os.uname().nodename}, since 20"
    )
    end = f"tba stop {run.path}" if name == LAUNCH else f"kill -USR1 {first.pid}"
    assert sentence.endswith(f"or end it first: {end} (on {os.uname().nodename})")
    assert [path.read_bytes() for path in run.owners.iterdir()] == [before]
    first.kill()  # it could not say that it leaves
    for _ in range(2):
        third = hold(name)
        assert third.said() == "owner" and third.let_go() == 0
    assert [path.stat().st_mode & 0o077 for path in (run.owners, *run.owners.iterdir())] == [0, 0]


def test_one_of_many_rivals_takes_over_from_a_dead_owner(run: RunDir, hold: Callable[..., Child]) -> None:
    """Each round is between six starts at once, the second after a kill: with one of them the run goes on."""
    for _ in range(2):
        holders = [hold() for _ in range(6)]
        answers = [holder.said() for holder in holders]
        winner = holders[answers.index("owner")]
        assert answers.count("owner") == 1
        assert all(f"process {winner.pid} on" in answer for answer in answers if answer != "owner")
        winner.kill()
        for holder in holders:
            holder.let_go()
    assert len([*run.owners.iterdir()]) == 1


def test_a_rank_waits_for_one_that_its_dead_launcher_left(run: RunDir, hold: Callable[..., Child]) -> None:
    first = hold("searcher-0000")
    assert first.said() == "owner"
    killer = threading.Timer(1, first.send, (signal.SIGKILL,))
    began = time.monotonic()
    killer.start()
    with owned(run, "searcher-0000"):
        assert 0.5 < time.monotonic() - began < owners.EARLIER_OWNER_SECONDS


def test_a_process_number_used_again_is_not_the_owner(run: RunDir) -> None:
    claimed(run, replace(Owner.this(os.getppid()), began=1, holds=False))
    assert is_free(run)


def test_a_copied_claim_names_nobody(run: RunDir, hold: Callable[..., Child]) -> None:
    """Its owner is at work on the run that was copied."""
    assert hold().said() == "owner"
    copy = RunDir(shutil.copytree(run.path, run.path.with_name("copy") / run.path.name))
    assert is_free(copy) and not is_free(run)


def test_a_process_of_a_version_that_kept_no_folder_open_is_believed(run: RunDir) -> None:
    claimed(run, replace(Owner.this(os.getppid()), holds=False))
    assert not is_free(run)


@pytest.mark.parametrize("content", [None, "", '{"host": "no', '{"hast": "node7"}', "[1]", "\xff\x00"])
def test_of_another_host_or_a_damaged_claim_the_last_sign_of_life_decides(
    run: RunDir, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """content: of the damaged file. A server's clock that is set makes nobody immortal."""
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.2)
    file = claimed(run, ELSEWHERE)
    sentence = r"process 4711 on node7, since 2023-11-1.*try again in 60 s"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
        sentence = rf"{file} is damaged .* try again in \d+ s$"
    now, silent = time.time(), owners.SILENT_OWNER_SECONDS
    for sign, free in ((now - silent + 20, False), (now - silent - 5, True), (now + 3600, True)):
        os.utime(file, (sign, sign))
        if not free:
            with pytest.raises(OwnedError, match=sentence):
                refuse_owned(run)
        assert is_free(run) is free


def test_an_owner_whose_clock_is_ahead_is_alive(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "BEAT_SECONDS", 20.0)
    file, left = claimed(run, ELSEWHERE), threading.Event()

    def beat() -> None:
        while not left.wait(0.1):
            os.utime(file, (time.time() + 3600,) * 2)

    os.utime(file, (time.time() + 3600,) * 2)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert not is_free(run)
    finally:
        left.set()
        thread.join()


def test_a_stale_file_handle_is_opened_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS answers of a file that another host has replaced; if it stays so, its owner is unknown."""
    left = [3]

    def read(path: Path) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return path.read_bytes()

    with owned(run):
        monkeypatch.setattr(owners, "read_regular", read)
        owner = owners.owner_at_work(run)
        assert owner and owner.pid == os.getpid() and left == [-1]
        monkeypatch.setattr(owners, "SILENT_OWNER_SECONDS", 0.1)
        left[0] = 1_000_000
        assert owners._newest(run, LAUNCH).owner == owners.UNKNOWN


# --- Frozen owners ---


def _seal(told: Connection, path: Path, stderr: str) -> None:
    """Seal shards of three requests each as searcher 3, once let in, and note what it has acknowledged."""
    owners.BEAT_SECONDS, owners.SILENT_OWNER_SECONDS, owners.CLAIM_CHECK_SECONDS = 0.1, 0.6, 0.02
    owners._machine = lambda: f"host of {os.getpid()}"
    _spoil_stderr(stderr)
    run = RunDir(path)
    told.recv()
    with owned(run, "searcher-0003"), (path / "acknowledged").open("ab", buffering=0) as acknowledged:
        state = json.loads((path / "progress").read_text())
        shards = PendingShards(run).read_all({3: state["cursor"]}, [3])
        known = {int(request) for shard in shards for request in shard.trajectories.record["request_id"]}
        known |= set(json.loads((path / "progress").read_text())["completed"])  # some may be deleted by now
        writer = ShardWriter(run, 3, first_index=state["cursor"])
        told.send("owner")
        for request in (r for r in count() if r not in known):
            writer.append(*scored(request, 0, n=1))
            if len(writer) == 3:
                writer.seal()
                acknowledged.write(b"".join(b"%d " % r for r in range(request + 1) if r not in known))
                known |= set(range(request + 1))


def _spoil_stderr(kind: str) -> None:
    """Close standard error, or make it a pipe that nobody reads: broken, or full."""
    if kind == "closed":
        sys.stderr.close()
    if kind in ("broken", "full"):
        reading, writing = os.pipe()
        os.dup2(writing, 2)
    if kind == "broken":
        os.close(reading)
    if kind == "full":
        os.set_blocking(2, False)
        with suppress(BlockingIOError):
            while True:
                os.write(2, bytes(4096))
        os.set_blocking(2, True)


class Merging(threading.Thread):
    """A trainer: merges the shards of searcher 3, and deletes those that were merged a while ago."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self.run_dir = run
        self.merged = Counter[int]()
        self.cursors = [0]
        self.over = threading.Event()
        self._save()

    def _save(self) -> None:
        progress = {"cursor": self.cursors[-1], "completed": sorted(self.merged)}
        write_atomic(self.run_dir.path / "progress", json.dumps(progress))

    def merge(self) -> None:
        shards = list(PendingShards(self.run_dir).read({3: self.cursors[-1]}))
        for shard in shards:
            self.merged.update(shard.trajectories.record["request_id"].tolist())
        self.cursors.append(self.cursors[-1] + len(shards))
        self._save()

    def run(self) -> None:
        while not self.over.wait(0.05):
            self.merge()
            for index in self.run_dir.shard_indices(3):
                if index < self.cursors[-4:][0]:
                    self.run_dir.shard_file(3, index).unlink()


def let_in(child: Child) -> Child:
    """Let a sealer claim its name; returns it as an owner."""
    child.tell("come in")
    assert child.said() == "owner"
    return child


@pytest.mark.parametrize("stderr", ["open", "closed", "broken"])
def test_a_frozen_searcher_never_acknowledges_what_its_successor_makes_again(
    run: RunDir, start: Callable[..., Child], stderr: str
) -> None:
    """Frozen at any moment for longer than its lease, it goes on alone, and ends if it has a successor."""
    random, trainer, acknowledged = Random(stderr), Merging(run), run.path / "acknowledged"
    trainer.start()
    sealer = partial(start, _seal, run.path, stderr)
    holder, heir = let_in(sealer()), sealer()
    for successor in (True, False, True, True):
        size = acknowledged.stat().st_size
        until(lambda: acknowledged.stat().st_size > size + 100)  # noqa: B023
        time.sleep(random.uniform(0, 0.1))
        holder.send(signal.SIGSTOP)
        if not successor:
            time.sleep(1)
            holder.send(signal.SIGCONT)
            continue
        frozen, holder, heir = holder, let_in(heir), sealer()
        time.sleep(random.uniform(0, 1.5))
        frozen.send(signal.SIGCONT)
        assert frozen.ended() == 1
        if not holder.alive:  # the other was frozen while it sealed, and came first
            holder, heir = let_in(heir), sealer()
    holder.kill()
    trainer.over.set()
    trainer.join()
    trainer.merge()
    wanted = {int(request) for request in acknowledged.read_text().split()}
    assert len(wanted) > 100 and wanted <= set(trainer.merged), "lost"
    assert set(trainer.merged.values()) == {1}, "doubled"


def test_a_rank_of_an_earlier_attempt_ends(run: RunDir, hold: Callable[..., Child]) -> None:
    """As one whose launcher died with its node, in a run that has fewer ranks now."""
    attempt = run.begin_attempt().name
    rank = hold("searcher-0003", environment={ATTEMPT: attempt})
    assert rank.said() == "owner"
    time.sleep(0.5)
    assert rank.alive
    run.begin_attempt()
    assert rank.ended() == 1


def test_a_frozen_launcher_ends_even_if_its_standard_error_is_full(
    run: RunDir, start: Callable[..., Child]
) -> None:
    holder = start(_hold_without_stderr, run.path)
    assert holder.said() == "owner"
    holder.send(signal.SIGSTOP)
    (file,) = run.owners.iterdir()
    file.write_text(replace(Owner(**json.loads(file.read_text())), machine="another").to_json())
    os.utime(file, (0, 0))
    with owned(run):
        holder.send(signal.SIGCONT)
        assert holder.ended() == 1
        assert len([*run.owners.iterdir()]) == 1


def _hold_without_stderr(told: Connection, path: Path) -> None:
    _spoil_stderr("full")
    _hold(told, path, LAUNCH)


# --- Slurm jobs ---


Squeue = Callable[[str], None]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """What Slurm says of every job: a program of that name, first on PATH."""
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    def answer(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)

    answer("exit 1")
    return answer


def be_job(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int = 0) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


@pytest.mark.parametrize(
    ("answer", "ago", "free"),
    [
        ("echo '17|RUNNING||||||'", 1000.0, False),  # between two starts of the ranks nobody gives a sign
        ("echo '17|SUSPENDED||||||'", 1000.0, False),
        ("echo '17|PENDING||||||'", 1.0, True),  # its turn comes again, and then it is refused
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 1.0, True),
        ("true", 1.0, True),
        ("exit 1", 1.0, False),  # Slurm does not answer: the ranks' last sign of life decides
        ("exit 1", 1000.0, True),
    ],
)
def test_slurm_says_whether_a_job_is_at_work(
    run: RunDir, squeue: Squeue, answer: str, ago: float, free: bool
) -> None:
    squeue(answer)
    claimed(run, replace(ELSEWHERE, pid=0, job="17"), ago=ago)
    claimed(run, replace(ELSEWHERE, job="17"), ago=ago, name="trainer-0000")
    if not free:
        with pytest.raises(OwnedError, match=r"Slurm job 17, since 2023-.*first: tba stop .* --wait 600$"):
            refuse_owned(run)
    assert is_free(run) == free


def test_a_job_is_not_refused_by_its_own_leftovers(
    run: RunDir, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start of its ranks, a requeue, on other nodes: at once; a second job is told of the first."""
    squeue("echo '17|RUNNING||||||'")
    monkeypatch.setattr(owners, "SILENT_OWNER_SECONDS", 0.5)
    monkeypatch.setattr(owners, "EARLIER_OWNER_SECONDS", 0.5)
    be_job(monkeypatch, "17")
    claim_for_job(run)
    claimed(run, replace(ELSEWHERE, job="17"), name="trainer-0000")
    with owned(run, "trainer-0000"):
        pass
    be_job(monkeypatch, "17", restarts=1)
    claim_for_job(run)
    refuse_owned(run)
    be_job(monkeypatch, "18")
    with pytest.raises(OwnedError, match="Slurm job 17, since"):
        claim_for_job(run)


def test_two_launchers_in_one_job_refuse_each_other(
    run: RunDir, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue("echo '17|RUNNING||||||'")
    claimed(run, replace(ELSEWHERE, job="17", restarts="0"))
    be_job(monkeypatch, "17")
    assert not is_free(run)
    be_job(monkeypatch, "17", restarts=1)
    assert is_free(run)


def test_a_rank_that_the_run_does_not_have_is_refused(run: RunDir) -> None:
    launch = {"trainers": 1, "searchers": 2}
    config = parse_config({"model": {"path": "tiny"}, "launch": launch, "exchange": {"transport": "files"}})
    for index in (None, 0, 1):
        refuse_index(config, "searcher", index)
    for index in (5, 2, -1):
        with pytest.raises(
            ConfigError, match=rf"--index {index} is no searcher .*searchers=2: .*from 0 to 1$"
        ):
            refuse_index(config, "searcher", index)
    with pytest.raises(ConfigError, match="--index 1 is no trainer"):
        refuse_index(config, "trainer", 1)
    nobody = parse_config({"model": {"path": "tiny"}, "launch": {"searchers": 0, "elastic": 1}})
    with pytest.raises(ConfigError, match=r"searchers=0: leave out --index$"):
        refuse_index(nobody, "searcher", 0)


def test_a_rank_that_was_frozen_writes_no_record_beside_its_successor(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    rank = start(_record, tmp_path)
    assert rank.said() == "ready"
    (tmp_path / "owners/trainer-0000.000002").write_text("{}")
    assert rank.let_go() == 1
    assert "has another owner" in (tmp_path / "stderr").read_text()
    assert (tmp_path / "records.jsonl").read_text().count("step") == 1


def _record(told: Connection, path: Path) -> None:
    """Write a record, and another one once the test lets go."""
    os.dup2(os.open(path / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    metrics.BEAT_SECONDS = 0
    with owned(RunDir(path), "trainer-0000"):
        writer = metrics.MetricsWriter(path / "records.jsonl")
        writer.log({"step": 1})
        stay(told, "ready")
        writer.log({"step": 2})
