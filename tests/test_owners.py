"""One owner each: who is refused, who takes over; with real processes, and files as other hosts have them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch.placement import refuse_index
from tba_hpc.run import owners
from tba_hpc.run.directory import RunDir
from tba_hpc.run.owners import LAUNCH, OwnedError, Owner, claim_for_job, owned, refuse_owned

HOLDER = """
import sys, time
from pathlib import Path
from tba_hpc.run import owners
from tba_hpc.run.directory import RunDir
owners.BEAT_SECONDS, owners.LEAVE_SECONDS = 0.05, 0.0
try:
    with owners.owned(RunDir(Path(sys.argv[1])), sys.argv[2]):
        print("owner", flush=True)
        sys.stdin.read()
except owners.OwnedError as error:
    print(error, flush=True)
"""
"""Owns the run, or a rank's place, until its input ends."""

ELSEWHERE = Owner(host="node7", machine="another", pid=4711, began=1, since=1_700_000_000.0)
"""A process that nobody here can look at."""


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


def hold(run: RunDir, name: str = LAUNCH) -> subprocess.Popen[str]:
    """A holder in a process of its own."""
    command = [sys.executable, "-c", HOLDER, str(run.path), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


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


@pytest.mark.parametrize("name", [LAUNCH, "trainer-0000", "searcher-0003"])
def test_a_second_process_is_refused_until_the_first_is_gone(run: RunDir, name: str) -> None:
    first = hold(run, name)
    assert said(first) == "owner"
    files = {path: path.read_bytes() for path in run.owners.iterdir()}
    second = hold(run, name)
    sentence = said(second)
    place = str(run.path) if name == LAUNCH else f"{name} of {run.path}"
    assert sentence.startswith(
        f"{place} is at work already: process {first.pid} on {os.uname().nodename}, since 20"
    )
    assert f"kill -USR1 {first.pid}" in sentence
    assert {path: path.read_bytes() for path in run.owners.iterdir()} == files
    first.kill()  # it could not say that it leaves
    first.wait()
    third = hold(run, name)
    assert said(third) == "owner"
    third.communicate()
    fourth = hold(run, name)
    assert said(fourth) == "owner"
    fourth.communicate()
    assert [path.stat().st_mode & 0o077 for path in (run.owners, *run.owners.iterdir())] == [0, 0]


def test_different_ranks_do_not_meet(run: RunDir) -> None:
    with owned(run), owned(run, "trainer-0000"), owned(run, "searcher-0000"), owned(run, "searcher-0001"):
        assert len([*run.owners.iterdir()]) == 4


def test_of_many_that_find_a_dead_owner_one_takes_over(run: RunDir) -> None:
    """Ten rounds, each between six starts at once after a kill: with one of them the run goes on."""
    for _ in range(10):
        holders = [hold(run) for _ in range(6)]
        answers = [said(holder) for holder in holders]
        winner = holders[answers.index("owner")]
        assert answers.count("owner") == 1
        assert all(f"process {winner.pid} on" in answer for answer in answers if answer != "owner")
        winner.kill()
        for holder in holders:
            holder.communicate()
    assert len([*run.owners.iterdir()]) == 1


def test_a_rank_waits_for_one_that_its_dead_launcher_leaves_behind(run: RunDir) -> None:
    first = hold(run, "searcher-0000")
    assert said(first) == "owner"
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -KILL {first.pid}"])
    began = time.monotonic()
    with owned(run, "searcher-0000"):
        assert 0.5 < time.monotonic() - began < owners.LEAVE_SECONDS
    killer.wait()
    first.communicate()


def test_a_number_of_a_process_that_came_again_is_not_the_owner(run: RunDir) -> None:
    claimed(run, replace(Owner.this(os.getpid()), began=1))
    assert is_free(run)


def test_on_another_machine_the_last_sign_of_life_decides(run: RunDir) -> None:
    claimed(run, ELSEWHERE, ago=owners.SILENT_SECONDS - 20)
    with pytest.raises(OwnedError, match=r"process 4711 on node7, since 2023-11-1.*try again in 60 s"):
        refuse_owned(run)
    assert not is_free(run)
    claimed(run, ELSEWHERE, ago=owners.SILENT_SECONDS + 5)
    assert is_free(run)


@pytest.mark.parametrize("content", ["", '{"host": "no', '{"hast": "node7"}', "[1]", "\xff\x00"])
def test_a_damaged_claim_counts_while_there_are_signs_of_life(run: RunDir, content: str) -> None:
    file = claimed(run, ELSEWHERE)
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(OwnedError, match=rf"{file} is damaged .* try again in \d+ s$"):
        refuse_owned(run)
    assert not is_free(run)
    file = claimed(run, ELSEWHERE, ago=owners.SILENT_SECONDS + 5)
    file.write_bytes(content.encode("latin-1"))
    os.utime(file, (time.time() - owners.SILENT_SECONDS - 5,) * 2)
    assert is_free(run)


def test_a_handle_that_the_file_server_has_forgotten_is_read_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS answers of a file that another host has replaced; where it stays so, its owner is unknown."""
    left = [3]

    def read_bytes(path: Path) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return path.open("rb").read()

    with owned(run):
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        owner = owners.owner_at_work(run)
        assert owner and owner.pid == os.getpid() and left == [-1]
        assert [claim.owner.pid for claim in owners._claims(run, [owners.LAUNCH])] == [os.getpid()]
        monkeypatch.setattr(owners, "SILENT_SECONDS", 0.1)
        left[0] = 1_000_000
        assert owners._newest(run, owners.LAUNCH).owner == owners.UNKNOWN
        left[0] = 0


def test_owners_give_signs_of_life(run: RunDir) -> None:
    holder = hold(run)
    assert said(holder) == "owner"
    (file,) = run.owners.iterdir()
    os.utime(file, (0, 0))
    until(lambda: time.time() - file.stat().st_mtime < 10)
    holder.communicate()


@pytest.mark.parametrize("step", [3600.0, -3600.0])
@pytest.mark.parametrize("alive", [True, False])
def test_a_file_servers_clock_that_is_set_makes_nobody_dead_nor_immortal(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, step: float, alive: bool
) -> None:
    """The last sign is of before; the next ones of a live owner bear the new time."""
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.6)
    monkeypatch.setattr(owners, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(owners, "_clock", lambda run: time.time() + step)
    file, over = claimed(run, ELSEWHERE, ago=1), threading.Event()

    def beat() -> None:
        while not over.wait(0.3):
            os.utime(file, (time.time() + step,) * 2)

    owner = threading.Thread(target=beat)
    if alive:
        owner.start()
    began = time.monotonic()
    assert is_free(run) == (not alive)
    assert time.monotonic() - began < 5
    over.set()
    if alive:
        owner.join()


def test_who_was_frozen_while_another_took_over_ends_at_once(run: RunDir) -> None:
    holder = hold(run)
    assert said(holder) == "owner"
    holder.send_signal(signal.SIGSTOP)
    (file,) = run.owners.iterdir()
    frozen = replace(Owner(**json.loads(file.read_text())), machine="another")
    file.write_text(frozen.to_json())
    os.utime(file, (0, 0))
    with owned(run):
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(30) == 1
        assert len([*run.owners.iterdir()]) == 1
    holder.communicate()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.05)


# --- Slurm jobs ---


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What Slurm says of every job: a program of that name, first on PATH."""
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    def answer(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)

    answer("exit 1")
    return answer


Squeue = Callable[[str], None]


def be_job(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int = 0) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


@pytest.mark.parametrize(
    ("answer", "ago", "free"),
    [
        ("echo RUNNING {run}", 1000.0, False),  # between two starts of the ranks nobody gives a sign
        ("echo SUSPENDED {run}", 1000.0, False),
        ("echo PENDING {run}", 1.0, True),  # its turn comes again, and then it is refused
        ("echo RUNNING /another", 1.0, True),  # a number that came again
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 1.0, True),
        ("echo", 1.0, True),
        ("exit 1", 1.0, False),  # Slurm does not answer: the ranks' last sign of life decides
        ("exit 1", 1000.0, True),
    ],
)
def test_slurm_says_whether_a_job_is_at_work(
    run: RunDir, squeue: Squeue, answer: str, ago: float, free: bool
) -> None:
    squeue(answer.format(run=run.path))
    claimed(run, replace(ELSEWHERE, pid=0, job="17"), ago=ago)
    if not free:
        with pytest.raises(OwnedError, match=r"Slurm job 17, since 2023-.*first: scancel 17$"):
            refuse_owned(run)
    assert is_free(run) == free


def test_a_job_without_squeue_is_at_work_while_its_ranks_are(run: RunDir, squeue: Squeue) -> None:
    claimed(run, replace(ELSEWHERE, pid=0, job="17"), ago=1000)
    rank = claimed(run, replace(ELSEWHERE, job="17"), ago=5, name="searcher-0004")
    assert not is_free(run)
    os.utime(rank, (0, 0))
    assert is_free(run)


def test_a_job_is_not_refused_by_its_own_leftovers(
    run: RunDir, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start of its ranks, a requeue, on other nodes: at once; a second job is told of the first."""
    squeue(f"echo RUNNING {run.path}")
    monkeypatch.setattr(owners, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(owners, "LEAVE_SECONDS", 0.5)
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


def test_two_launchers_in_one_job_are_not_each_others_leftovers(
    run: RunDir, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(f"echo RUNNING {run.path}")
    claimed(run, replace(ELSEWHERE, job="17", restarts="0"))
    be_job(monkeypatch, "17")
    assert not is_free(run)
    be_job(monkeypatch, "17", restarts=1)
    assert is_free(run)


def test_a_job_is_refused_while_a_launcher_is_at_work(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEAVE_SECONDS", 0.5)
    holder = hold(run)
    assert said(holder) == "owner"
    be_job(monkeypatch, "18")
    with pytest.raises(OwnedError, match=f"process {holder.pid} on "):
        claim_for_job(run)
    holder.communicate()
    claim_for_job(run)


# --- Numbers of ranks ---


def test_a_rank_that_the_run_does_not_have_is_refused(run: RunDir) -> None:
    config = parse_config(
        {
            "model": {"path": "tiny"},
            "launch": {"trainers": 1, "searchers": 2},
            "exchange": {"transport": "files"},
        }
    )
    for index in (None, 0, 1):
        refuse_index(config, "searcher", index)
    for index in (5, 2, -1):
        with pytest.raises(
            ConfigError, match=rf"--index {index} is no searcher .*searchers=2: .*from 0 to 1$"
        ):
            refuse_index(config, "searcher", index)
    with pytest.raises(ConfigError, match="--index 1 is no trainer"):
        refuse_index(config, "trainer", 1)
