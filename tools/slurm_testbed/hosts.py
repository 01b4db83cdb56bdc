"""A cluster of hosts that share a network and a folder, and nothing else.

Each node has a network namespace with its own address, and its own /tmp, /var/tmp and /dev/shm. Jobs run as
an ordinary user. Nodes see this checkout and its interpreter, read-only, wherever they lie. The shared folder
comes from a GlusterFS server through FUSE, if glusterfs-client is installed (``apt-get install
--no-install-recommends glusterfs-client``); otherwise it is a bind mount. The link of a host can be cut or
slowed, its route to the file server closed, and all its processes frozen.
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
"""Number in the file server's address, which is its own so that a host can lose the route to it alone."""


def missing() -> str | None:
    """Return why no cluster of hosts can be started here, and the remedy; None if one can."""
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
    """A cluster whose nodes are hosts."""

    user: str = "nobody"
    _away: dict[str, str] = field(default_factory=dict)

    isolation: ClassVar[str] = _ISOLATION
    network: ClassVar[Mapping[str, str]] = {}
    private: ClassVar[Sequence[Path]] = (*Cluster.private, Path("/tmp"), Path("/var/tmp"))
    namespaces: ClassVar[Sequence[str]] = (*Cluster.namespaces, "--net")

    # --- Faults: each lasts until ``mend`` ---

    def cut(self, node: str) -> None:
        """Cut a host's link to the network."""
        self._away[node] = "cut"
        _ip("link", "set", self._link(node), "down")

    def slow(self, node: str, rate: str = "10mbit") -> None:
        """Limit the rate at which a host sends and receives."""
        limit = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self._link(node), "root", *limit], check=True)
        self._inside(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def cut_folder(self, node: str) -> None:
        """Close a host's route to the file server alone. Its processes wait, and then get errors."""
        self._inside(node, "ip", "route", "add", "blackhole", self.address(FILE_SERVER))

    def freeze(self, node: str) -> None:
        """Stop every process of a host, as if the machine were asleep."""
        self._away[node] = "frozen"
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def mend(self, node: str) -> None:
        """End every fault of a host. If Slurm had lost the host, wait until it would place a job there again.

        Also wait until steps that were left there have ended. If Slurm starts a job again on a node that is
        still ending the last step of this job, it drains the node and holds the job ("Duplicate jobid").
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
        """Mend all hosts; then do what a cluster's ``heal`` does."""
        for node in [*self._away]:
            self.mend(node)
        super().heal()

    @property
    def up(self) -> list[str]:
        """Names of the nodes that have not crashed, and are neither cut off nor frozen."""
        return [node for node in super().up if node not in self._away]

    # --- The network ---

    def address(self, node: int) -> str:
        """Return a node's address on the bridge of this cluster."""
        return f"10.77.{self._number}.{node}"

    @property
    def _number(self) -> int:
        """Number of this cluster among those on this machine."""
        return PORTS.index(self._ports[0]) % 250

    @property
    def _bridge(self) -> str:
        return f"hosts{self._number}"

    def _link(self, node: str) -> str:
        """Return the name of this machine's end of a host's link."""
        return f"h{self._number}{node}"

    def _start_daemons(self) -> None:
        with suppress(subprocess.CalledProcessError):  # left by a cluster that was killed
            _ip("link", "del", self._bridge)
        # A fixed address: by default a bridge has that of a port, which changes when hosts come or go.
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
        subprocess.run(["ip", "link", "del", link], capture_output=True)  # left by a host that has crashed
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(process))
        _ip("link", "set", link, "master", self._bridge, "up")
        self._inside(node, "ip", "link", "set", "lo", "up")
        self._inside(node, "ip", "link", "set", "eth0", "up")
        address = self.address(int(node.removeprefix("node")))
        self._inside(node, "ip", "addr", "add", f"{address}/24", "dev", "eth0")

    def _inside(self, node: str, *command: str, check: bool = True) -> None:
        """Run a command in the network namespace of a host."""
        words = ["nsenter", "--net", "--target", str(self._daemons[node].pid), *command]
        subprocess.run(words, check=check, capture_output=True)

    # --- The folder ---

    @property
    def served(self) -> bool:
        """True if the folder comes from a server."""
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
        """Return whether the file server answers (``fileserver``), or the mount works (``login``)."""
        with suppress(OSError):
            if name == "login":
                return self.share.is_mount() and any([True, *self.share.iterdir()])
            socket.create_connection((self.address(FILE_SERVER), FILE_PORT)).close()
            return True
        return False

    def _view(self, private: Sequence[Path]) -> str:
        """Return the commands of a cluster's ``_view``; the code is read-only, and users can reach it."""
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
        """Environment of a cluster, with the shared folder as the user's home."""
        return {**super().environment, "HOME": str(self.share)}


def _is_step(pid: int) -> bool:
    """Return whether a process is slurmstepd, which runs a step or a batch script."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "slurmstepd"
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
