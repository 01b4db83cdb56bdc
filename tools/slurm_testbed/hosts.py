"""A cluster of hosts that share a network and a folder, and nothing else.

Each node has a network namespace with an address of its own, and /tmp, /var/tmp and /dev/shm of its own; jobs
are an ordinary user's. This checkout and its interpreter are there read-only, wherever they lie. The folder
comes from a GlusterFS server, through FUSE, if glusterfs-client is installed (``apt-get install
--no-install-recommends glusterfs-client``); else it is a bind mount. A host's link can be cut or slowed, its
way to the file server closed, and all its processes frozen.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import ClassVar

from slurm_testbed import view
from slurm_testbed.cluster import LOGIN, PORTS, Cluster, find
from slurm_testbed.cluster import missing as missing_of_cluster

_ISOLATION = """
until ip -4 addr show dev eth0 2>/dev/null | grep -q inet; do sleep .05; done
if [ -e "$1/client.vol" ]; then
    umount --lazy "$1/share" 2>/dev/null
    glusterfs --no-daemon --log-file="$1/files-$0.log" --volfile="$1/client.vol" "$1/share" &
    until mountpoint -q "$1/share" && ls "$1/share" >/dev/null 2>&1; do sleep .1; done
fi
"""

_SERVER = """
volume disk
  type storage/posix
  option directory {brick}
end-volume
volume locks
  type features/locks
  subvolumes disk
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address {address}
  option transport.socket.listen-port {port}
  option auth.addr.locks.allow *
  subvolumes locks
end-volume
"""

_CLIENT = """
volume folder
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume locks
  option ping-timeout 10
end-volume
"""

FILE_PORT = 24007

FILE_SERVER = 253
"""Number of the file server's address, so that a host can lose the way to it alone."""


def missing() -> str | None:
    """As that of a cluster."""
    if absent := [name for name in ("ip", "tc", "nsenter") if find(name) is None]:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends iproute2 util-linux"
    if why := missing_of_cluster():
        return why
    if shut := [str(path) for path in view.code() if path.stat().st_mode & 0o005 != 0o005]:
        return f"jobs of another user may not read {shut[0]}: chmod -R go+rX {quote(shut[0])}"
    bridge = ["unshare", "--net", "ip", "link", "add", "hosts", "type", "bridge"]
    made = subprocess.run(bridge, capture_output=True).returncode == 0
    return None if made else "this container may not make networks: run it privileged"


@dataclass
class Hosts(Cluster):
    """As a cluster, of hosts."""

    user: str = "nobody"
    _away: dict[str, str] = field(default_factory=dict)

    isolation: ClassVar[str] = _ISOLATION
    network: ClassVar[Mapping[str, str]] = {}
    private: ClassVar[Sequence[Path]] = (*Cluster.private, Path("/tmp"), Path("/var/tmp"))
    namespaces: ClassVar[Sequence[str]] = (*Cluster.namespaces, "--net")

    # --- Faults: each lasts until ``mend`` ---

    def cut(self, node: str) -> None:
        """Pull the network cable of a host."""
        self._away[node] = "cut"
        _ip("link", "set", self._link(node), "down")

    def slow(self, node: str, rate: str = "10mbit") -> None:
        """Limit what a host sends and receives."""
        limit = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self._link(node), "root", *limit], check=True)
        self._inside(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def cut_folder(self, node: str) -> None:
        """Take a host's way to the file server, and nothing else. Its processes wait, then see errors."""
        self._inside(node, "ip", "route", "add", "blackhole", self.address(FILE_SERVER))

    def freeze(self, node: str) -> None:
        """Stop every process of a host, as if the machine slept."""
        self._away[node] = "frozen"
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def mend(self, node: str) -> None:
        """End what ails a host, and wait until Slurm would place a job on it if Slurm had lost it.

        And until what was left there of a job is gone: on a node that still ends the last step of a job,
        Slurm does not start the same job again ("Duplicate jobid"); it drains the node and holds the job.
        """
        left = {pid for pid in self.pids(node) if _is_step(pid)} if node in self._away else set()
        if self._away.get(node) == "frozen":
            for pid in self.pids(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        _ip("link", "set", self._link(node), "up")
        subprocess.run(["tc", "qdisc", "del", "dev", self._link(node), "root"], capture_output=True)
        self._inside(node, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        self._inside(node, "ip", "route", "del", self.address(FILE_SERVER), check=False)
        if self._away.pop(node, None):
            self.until(
                lambda: self._registered(node) and not left & {*self.pids(node)},
                f"{node} to come back without {left}",
                120,
                seen=lambda: self.run("sinfo", "-N", "-l"),
            )

    def heal(self) -> None:
        """As that of a cluster."""
        for node in [*self._away]:
            self.mend(node)
        super().heal()

    @property
    def up(self) -> list[str]:
        """Names of the nodes that have neither crashed, nor been cut off or frozen."""
        return [node for node in super().up if node not in self._away]

    # --- The network ---

    def address(self, node: int) -> str:
        """On a bridge of this cluster."""
        return f"10.77.{self._number}.{node}"

    @property
    def _number(self) -> int:
        """Of this cluster among those of this machine."""
        return PORTS.index(self._ports[0]) % 250

    @property
    def _bridge(self) -> str:
        return f"hosts{self._number}"

    def _link(self, node: str) -> str:
        """This machine's end of a host's link."""
        return f"h{self._number}{node}"

    def _start_daemons(self) -> None:
        with suppress(subprocess.CalledProcessError):  # left by one that was killed
            _ip("link", "del", self._bridge)
        # An address of its own: else it is that of a port, another one with each host that comes or goes.
        own = f"02:77:00:00:00:{self._number:02x}"
        _ip("link", "add", self._bridge, "address", own, "type", "bridge")
        for number in (LOGIN, FILE_SERVER):
            _ip("addr", "add", f"{self.address(number)}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self._serve()
        super()._start_daemons()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        _ip("link", "del", self._bridge)

    def _boot(self, node: str) -> None:
        super()._boot(node)
        own, link = Path("/proc/self/ns/net").readlink(), self._link(node)
        process = self._daemons[node].pid
        self.until(lambda: Path(f"/proc/{process}/ns/net").readlink() != own, f"{node}'s network", 10)
        subprocess.run(["ip", "link", "del", link], capture_output=True)  # of a host that has crashed
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(process))
        _ip("link", "set", link, "master", self._bridge, "up")
        self._inside(node, "ip", "link", "set", "lo", "up")
        self._inside(node, "ip", "link", "set", "eth0", "up")
        address = self.address(int(node.removeprefix("node")))
        self._inside(node, "ip", "addr", "add", f"{address}/24", "dev", "eth0")

    def _inside(self, node: str, *command: str, check: bool = True) -> None:
        """A command in a host's network."""
        words = ["nsenter", "--net", "--target", str(self._daemons[node].pid), *command]
        subprocess.run(words, check=check, capture_output=True)

    # --- The folder ---

    @property
    def served(self) -> bool:
        """Whether the folder comes from a server."""
        return find("glusterfs") is not None and Path("/dev/fuse").exists()

    def _share_folder(self) -> None:
        self.share.mkdir()
        brick = self.root / "brick"
        brick.mkdir()
        self._mount_disk(brick)
        owner = pwd.getpwnam(self.user)
        os.chown(brick, owner.pw_uid, owner.pw_gid)
        if not self.served:
            subprocess.run(["mount", "--bind", brick, self.share], check=True)

    def _serve(self) -> None:
        """Start the file server, and mount the folder on this machine; hosts do so as they boot."""
        if not self.served:
            return
        values = {"brick": self.root / "brick", "address": self.address(FILE_SERVER), "port": FILE_PORT}
        (self.root / "server.vol").write_text(_SERVER.format(**values))
        (self.root / "client.vol").write_text(_CLIENT.format(**values))
        for name, program, *rest in (
            ("fileserver", "glusterfsd", f"--volfile={self.root}/server.vol"),
            ("login", "glusterfs", f"--volfile={self.root}/client.vol", str(self.share)),
        ):
            log = f"--log-file={self.root}/{name}.log"
            pid = f"--pid-file={self.root}/{name}.pid"
            self._spawn(name, [program, "--no-daemon", log, pid, *rest])
            self.until(lambda: self._answers(name), name, 10, seen=lambda: self._log(name))  # noqa: B023

    def _answers(self, name: str) -> bool:
        """Whether the file server takes calls, or this machine's mount is there."""
        with suppress(OSError):
            if name == "login":
                return self.share.is_mount() and any([True, *self.share.iterdir()])
            socket.create_connection((self.address(FILE_SERVER), FILE_PORT)).close()
            return True
        return False

    def _view(self, private: Sequence[Path]) -> str:
        """As that of a cluster, also with the way to all that users need; the code is read-only."""
        shut = view.closed([self.root, *view.code()])
        return view.script([*private, *shut], [self.root], view.code())

    def _become(self, user: bool) -> list[str]:
        as_user = super()._become(user)
        return (
            ["unshare", "--mount", "sh", "-c", f'{self._view(())}exec "$@"', "sh", *as_user]
            if as_user
            else []
        )

    @property
    def environment(self) -> dict[str, str]:
        """As that of a cluster; of a user with a home of their own, in the folder."""
        return {**super().environment, "HOME": str(self.share)}


def _is_step(pid: int) -> bool:
    """Whether a process is Slurm's keeper of a step or of a batch script."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "slurmstepd"
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
