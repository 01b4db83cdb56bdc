"""A real Slurm cluster of several nodes on this machine, for tests: it starts in a second.

munged, slurmctld and a slurmd per node are children of this process. Each node has its own UTS, mount and PID
namespaces: its own host name, /etc/hosts, /dev/shm and process tree. So a SIGKILL of one process is the crash
of a node. The cluster needs root and Slurm's daemons; ``missing()`` says what is not there.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from slurm_testbed import view

PACKAGES = "slurmctld slurmd slurm-client munge libpmix-dev slurm-wlm-basic-plugins"
"""Debian packages that contain everything needed."""

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare", "setpriv")

GONE = "GONE"
"""State of a job that Slurm has forgotten, or never knew."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", GONE}
"""States of a job that will not run again."""

PORTS = range(12_000, 32_000, 32)
"""First ports of clusters that may exist at the same time."""

LOGIN = 254
"""Number in the address of the login node, which runs slurmctld."""

T = TypeVar("T")


def missing() -> str | None:
    """Return why no cluster can be started here, and the remedy; None if one can."""
    absent = [name for name in NEEDED if find(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {PACKAGES}"
    if not any(Path("/usr/lib").glob("**/libpmix.so")):  # the name that Slurm's plugin opens
        return f"libpmix.so not found: apt-get install --no-install-recommends {PACKAGES}"
    if os.geteuid() != 0:
        return "not root: nodes need namespaces and device files of their own"
    if not any(_routed(address) for addresses in psutil.net_if_addrs().values() for address in addresses):
        return "no interface but the loopback one has an address: Slurm resolves none without"
    probe = subprocess.run(["unshare", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else "this container may not make namespaces: run it privileged"


def over(state: str) -> bool:
    """Return whether a job in this state (of all its components) will not run again."""
    return {*state.split("+")} <= ENDED


def _routed(address: Any) -> bool:
    """Return whether an interface's address is an IPv4 address other than of the loopback."""
    return address.family == socket.AF_INET and not address.address.startswith("127.")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Return the path of a program, which may lie outside of a user's PATH; None if there is none."""
    return shutil.which(program, path=_path())


@dataclass
class Cluster:
    """Context manager that starts nodes node1, node2, …, and leaves no process, mount or file behind.

    nodes: number of nodes. gpus: number of GPUs that each node pretends to have. user: user of the jobs.
    disk: size of the file system of ``share``, which then lies in memory, so that it can be filled; empty:
    the disk.
    """

    nodes: int = 6
    gpus: int = 4
    user: str = "root"
    disk: str = ""

    isolation: ClassVar[str] = ""
    """Further shell commands of a node's first process."""

    private: ClassVar[Sequence[Path]] = (Path("/dev/shm"),)
    """Folders that are private to each node: empty, but for what ``_view`` shows in them."""

    network: ClassVar[Mapping[str, str]] = {"OMPI_MCA_btl_tcp_if_include": "lo"}
    """Variables of jobs, which keep ranks off interfaces that come and go, such as the bridge of hosts."""

    namespaces: ClassVar[Sequence[str]] = ("--uts", "--mount", "--ipc", "--pid")

    def __enter__(self) -> Cluster:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._held, self._ports = _reserve_ports(self.nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            self._share_folder()
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._daemons)):
            self._stop(name)
        self.until(lambda: not self.processes(), "every process to be gone", 10, seen=self.processes)
        for folder in self._mounted():
            subprocess.run(["umount", "--lazy", folder], check=True)
        self._held.close()
        shutil.rmtree(self.root)
        assert str(self.root) not in Path("/proc/mounts").read_text(), "the cluster left a mount behind"

    # --- Use ---

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which Slurm's commands use this cluster."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        own = {"PATH": _path(), "SLURM_CONF": str(self.root / "slurm.conf"), "TBA_NODES_SHARE_TMPFS": "1"}
        return {**inherited, **self.network, **own}

    def run(self, *command: str | Path, check: bool = True, seconds: float = 60, user: bool = False) -> str:
        """Run a command on the login node, which is this machine; return its standard output.

        check: raise AssertionError if it fails. user: whether to run it as the jobs' user, not as root.
        """
        done = self.done(*command, seconds=seconds, user=user)
        assert not check or done.returncode == 0, f"{command} failed: {done.stdout}{done.stderr}"
        return done.stdout

    def done(
        self, *command: str | Path, seconds: float = 60, user: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node; return it, whatever its exit status."""
        words = [*self._become(user), *map(str, command)]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=seconds)

    def _become(self, user: bool) -> list[str]:
        ids = [f"--reuid={self.user}", f"--regid={pwd.getpwnam(self.user).pw_gid}", "--clear-groups"]
        return ["setpriv", *ids] if user and self.user != "root" else []

    def own(self, folder: Path) -> None:
        """Give a folder, and everything in it, to the jobs' user."""
        owner = pwd.getpwnam(self.user)
        for parent, folders, files in os.walk(folder):
            for name in ("", *folders, *files):
                with suppress(FileNotFoundError):  # the run is at work, and some of its files are short-lived
                    os.chown(Path(parent, name), owner.pw_uid, owner.pw_gid, follow_symlinks=False)

    def submit(self, script: str, *options: str) -> int:
        """Submit a batch script, given as text; return its job id. Its output goes to the shared folder."""
        path = self.root / f"job-{time.monotonic_ns()}.sh"
        path.write_text(script.replace("\n", f"\n#SBATCH --output={self.share}/job-%j.log\n", 1))
        path.chmod(0o644)
        return int(self.run("sbatch", "--parsable", *options, path, user=True))

    def jobs(self, *job: int) -> list[dict[str, str]]:
        """Return what ``scontrol show job`` says of a job, or of all jobs, as a dict per component."""
        done = self.done("scontrol", "-o", "show", "job", *map(str, job), user=False)
        assert done.returncode == 0 or "Invalid job id" in done.stderr, done.stderr
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in done.stdout.splitlines() if "=" in line]

    def state(self, job: int) -> str:
        """Return the state of a job, or ``A+B`` if the states of its components differ."""
        return "+".join(dict.fromkeys(component["JobState"] for component in self.jobs(job))) or GONE

    def wait(self, job: int, *states: str, seconds: float = 480) -> str:
        """Wait until a job is in one of ``states``, or, without any, has ended; return its state.

        If srun hangs after its step, the job's supervisor needs 40 s to notice, at each start. If no rank has
        given a sign of life, it needs 160 s.
        """
        wanted = set(states) or ENDED
        state = self.until(
            lambda: found if (found := self.state(job)) in wanted or over(found) else "",
            f"job {job} to be {' or '.join(sorted(wanted))}",
            seconds,
            seen=lambda: f"{self.state(job)}\n{self.log(job)}",
        )
        assert not states or state in states, (
            f"job {job} is {state}, not {' or '.join(states)}\n{self.log(job)}"
        )
        return state

    def log(self, job: int) -> str:
        """Return what the job's batch script has printed so far."""
        files = [Path(part.get("StdOut", os.devnull)) for part in self.jobs(job)[:1]]
        return "".join(file.read_text(errors="replace") for file in files if file.is_file())

    def until(
        self,
        probe: Callable[[], T],
        what: str,
        seconds: float = 60,
        *,
        seen: Callable[[], object] = lambda: "",
        by_jobs: bool = False,
    ) -> T:
        """Wait for a true value of ``probe``, and return it. Raises AssertionError after ``seconds``.

        what, seen: what is waited for, and a function that returns what was seen, for the error. by_jobs:
        whether only a job can bring it about, so that the wait also fails when the last job has ended.
        """
        end, ended = time.monotonic() + seconds, ""
        while not (found := probe()):
            assert not ended, f"no job is left, waiting for {what}: {ended}\n{seen()}"
            assert time.monotonic() < end, f"waited {seconds} s for {what}: {seen()}"
            ended = (
                self._all_ended() if by_jobs else ""
            )  # asked before the next probe, which sees its results
            time.sleep(0.25)  # most probes are Slurm commands, and would slow down the job waited for
        return found

    def _all_ended(self) -> str:
        """Return state and last output of the last job if no job will run again, else an empty string."""
        jobs = self.jobs()
        if not all(over(job["JobState"]) for job in jobs):
            return ""
        last = max(jobs, key=lambda job: int(job["JobId"]), default={})
        leader = int(last.get("HetJobId", last.get("JobId", 0)))
        return f"job {leader} {self.state(leader)}\n{self.log(leader)[-2000:]}"

    def clear(self) -> None:
        """Cancel every job, and wait until the queue is empty."""
        self.run("scancel", f"--user={self.user}", check=False)
        self.until(lambda: not self.run("squeue", "--noheader", check=False).strip(), "an empty queue")

    def crash(self, node: str) -> None:
        """Crash a node, as by a power failure: kill everything in its namespaces at once."""
        self._stop(node)

    def start(self, node: str) -> None:
        """Boot a node again; return when Slurm would place a job on it."""
        before = self._registered(node)
        self._boot(node)
        self.until(
            lambda: self._registered(node) not in (before, None),
            f"{node} to come back",
            seen=lambda: self.run("sinfo", "-N", "-l") + self._log(node),
        )

    def _registered(self, node: str) -> str | None:
        """Return when the slurmd of a node started, according to slurmctld; None if the node takes no job."""
        seen = self.run("scontrol", "-o", "show", "node", node)
        fields = dict(re.findall(r"(\S+?)=(\S*)", seen))
        return fields["SlurmdStartTime"] if fields["State"] in ("IDLE", "MIXED", "ALLOCATED") else None

    def heal(self) -> None:
        """Restore the cluster: empty the queue, and start crashed nodes."""
        self.clear()
        for node in sorted({*self._names} - {*self.up}):
            self.start(node)

    @property
    def up(self) -> list[str]:
        """Names of the nodes that have not crashed."""
        return [node for node in self._names if node in self._daemons]

    def pids(self, node: str) -> list[int]:
        """Return the process ids, in this process's namespace, of everything that runs on a node."""
        names = _uts(self._daemons[node].pid)
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _uts(int(entry.name)) == names]

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this cluster."""
        mark = f"SLURM_CONF={self.root}/".encode()
        return [
            _read(entry / "cmdline").replace(b"\0", b" ").decode()
            for entry in Path("/proc").glob("[0-9]*")
            if mark in _read(entry / "environ")
        ]

    @property
    def share(self) -> Path:
        """Folder that all nodes see, for runs."""
        return self.root / "share"

    def address(self, node: int) -> str:
        """Return the address of node 1, 2, …, or of LOGIN."""
        return f"127.0.1.{node}"

    # --- Daemons ---

    @property
    def _names(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    def _start_daemons(self) -> None:
        (self.root / "munge").mkdir(mode=0o755)
        self._spawn("munged", ["munged", "--foreground", "--force", *self._munge_options()])
        self.until((self.root / "munge/socket").exists, "munged", 10, seen=lambda: self._log("munged"))
        # slurmctld has its own PID namespace, so that its helper process ends with it.
        self._spawn("slurmctld", ["unshare", "--pid", "--fork", "--kill-child", "slurmctld", "-D", "-i"])
        for node in self._names:
            self._boot(node)
        idle = ["sinfo", "--noheader", "--Node", "-p", "main", "-t", "idle", "-o", "%N"]
        self.until(
            lambda: len(self.run(*idle, check=False).split()) == self.nodes,
            f"{self.nodes} idle nodes",
            20,
            seen=lambda: self.run("sinfo", "-N", "-l", check=False) + self._log("slurmctld"),
        )

    def _boot(self, node: str) -> None:
        options = [*self.namespaces, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        script = _BOOT.format(view=self._view(self.private), isolation=self.isolation)
        self._spawn(node, ["unshare", *options, "sh", "-c", script, node, str(self.root)])

    def _view(self, private: Sequence[Path]) -> str:
        """Return shell commands that mount a node's private folders, and show what it needs within them."""
        hidden = [path for path in view.code() if {*private} & {*path.parents}]
        return view.script(private, [self.root], hidden)

    def _munge_options(self) -> list[str]:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": self.root / "munge/socket", "pid-file": self.root / "munge/pid"}
        files |= {"log-file": self.root / "munged.log", "seed-file": self.root / "munge/seed"}
        return [f"--{option}={path}" for option, path in files.items()]

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        """Start a daemon in the foreground. It dies with this process, however this process ends."""
        with (self.root / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _stop(self, name: str) -> None:
        """Kill a daemon; the daemon of a node takes its whole PID namespace with it."""
        inside = self.pids(name) if name in self._names else []
        self._daemons[name].kill()
        self._daemons[name].wait()
        self.until(lambda: not any(_lives(pid) for pid in inside), f"{name} to be gone", 10)
        del self._daemons[name]

    def _log(self, name: str) -> str:
        return "".join(_read(path).decode()[-2000:] for path in sorted(self.root.glob(f"{name}.*")))

    # --- Files ---

    def _write_files(self) -> None:
        os.umask(0o022)  # jobs of an ordinary user read these files
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        (self.root / "dev").mkdir()
        for gpu in range(self.gpus):
            # Slurm wants character devices; these are /dev/null by another name.
            os.mknod(self.root / f"dev/gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        hosts = "".join(f"{self.address(i)} {name}\n" for i, name in enumerate(self._names, 1))
        (self.root / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        (self.root / "gres.conf").write_text(self._gres())
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.root / "slurm.conf").write_text(self._slurm_conf(self._ports))

    def _share_folder(self) -> None:
        self.share.mkdir()
        self._mount_disk(self.share)

    def _mount_disk(self, folder: Path) -> None:
        if self.disk:
            options = f"size={self.disk},mode=755"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

    def _mounted(self) -> list[str]:
        """Return the mount points of this cluster, innermost first."""
        points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [point for point in reversed(points) if point.startswith(f"{self.root}/")]

    def _gres(self) -> str:
        files = f"{self.root}/dev/gpu[0-{self.gpus - 1}]"
        return "AutoDetect=off\n" + (
            f"NodeName=node[1-{self.nodes}] Name=gpu File={files}\n" if self.gpus else ""
        )

    def _slurm_conf(self, ports: list[int]) -> str:
        lines = [f"{key}={value}".replace("{root}", str(self.root)) for key, value in _SETTINGS.items()]
        lines += [
            f"SlurmctldHost={socket.gethostname().split('.')[0]}({self.address(LOGIN)})",
            f"SlurmctldPort={ports[0]}",
        ]
        for i, (name, port) in enumerate(zip(self._names, ports[1:], strict=True), 1):
            (self.root / "spool" / name).mkdir(parents=True)
            lines.append(
                f"NodeName={name} NodeAddr={self.address(i)} Port={port} CPUs=8 CoresPerSocket=8 "
                f"RealMemory=3500 Gres=gpu:{self.gpus} State=UNKNOWN"
            )
        lines += [
            "PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF",
            "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30",
            "PartitionName=high Nodes=ALL PriorityTier=100 PreemptMode=OFF",
        ]
        return "\n".join(lines) + "\n"


_BOOT = """
find "$1/spool/$0" -mindepth 1 -delete
{view}
hostname "$0" && mount --bind "$1/hosts" /etc/hosts || exit 1
cat /proc/sys/kernel/random/uuid > "$1/spool/$0/boot_id"
mount --bind "$1/spool/$0/boot_id" /proc/sys/kernel/random/boot_id || exit 1
{isolation}
slurmd -D -N "$0" &
wait
"""
"""Program of a node's first process, which stays as init and reaps what slurmd leaves.

The spool is emptied, as on a node without a disk: a PMIx socket left by a crash would make the step of that
number fail after the next boot. Each node has a boot id of its own, because UCX uses shared memory between
ranks with equal boot ids.
"""

_SETTINGS = {
    "ClusterName": "test",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    # A requeued job waits for cred_expire, of which 5 s is the minimum.
    "AuthInfo": "socket={root}/munge/socket,cred_expire=5",
    "CredType": "cred/munge",
    "StateSaveLocation": "{root}/state",
    "SlurmdSpoolDir": "{root}/spool/%n",
    "TmpFS": "{root}/spool/%n",  # PMIx would fail if nodes shared it
    "SlurmctldPidFile": "{root}/slurmctld.pid",
    "SlurmdPidFile": "{root}/spool/%n/pid",
    "SlurmctldLogFile": "{root}/slurmctld.log",
    "SlurmdLogFile": "{root}/%n.log",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "200",
    "GresTypes": "gpu",
    "SchedulerType": "sched/backfill",
    # Only backfill starts het jobs: with the default interval each would wait 30 s.
    "SchedulerParameters": "sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0",
    "PriorityType": "priority/basic",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SlurmctldParameters": "preempt_send_user_signal",
    "JobRequeue": "1",
    "KillWait": "5",
    "SlurmctldTimeout": "30",
    "SlurmdTimeout": "5",
    # Slurm retries connections to a crashed node for this long. The node is down after two pings.
    "MessageTimeout": "4",
    "InactiveLimit": "0",
    "MinJobAge": "300",
    "FirstJobId": "1",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
}


def _reserve_ports(count: int) -> tuple[socket.socket, list[int]]:
    """Reserve ``count`` ports in a row, also for nodes that crash; return a holder and the ports.

    They lie below the ports that the kernel hands out. The holder is an abstract Unix socket, whose name only
    one process of the machine can have. The ports are free again once it is closed, or its process has ended.
    """
    for first in PORTS:
        ports = list(range(first, first + count))
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0slurm-testbed-{first}")
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # another cluster, or another program, has one of these ports
            holder.close()
        else:
            return holder, ports
    raise OSError(f"no {count} ports in a row are free from {PORTS.start} to {PORTS.stop} for a test cluster")


def _uts(pid: int) -> str | None:
    """Return the UTS namespace of a process; None if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    except OSError:
        return None


def _lives(pid: int) -> bool:
    """Return whether a process runs. An ending one leaves its namespaces a moment before it is a zombie."""
    state = _read(Path(f"/proc/{pid}/stat")).rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X")


def _read(path: Path) -> bytes:
    """Return the bytes of a file, or none if it has vanished or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
