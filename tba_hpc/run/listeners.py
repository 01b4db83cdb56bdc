"""Makes the kernel drop whatever arrives at sockets on which a library listens without need.

Each connection that such a library accepts may use up a file descriptor forever. With enough connections any
user of the machine could make the process fail.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
import subprocess
from contextlib import suppress

import psutil

SO_ATTACH_FILTER, TCP_MD5SIG_EXT = 26, 32
"""Socket options that the module ``socket`` does not name."""

WITH_PREFIX = 1
"""Flag of TCP_MD5SIG_EXT: the peer address is a prefix; here its length is 0, which matches every peer."""

PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd, on every architecture since Linux 5.6."""

DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Packet filter (BPF) of one instruction, which keeps 0 bytes of each packet."""

EVERYBODY = {
    socket.AF_INET: (struct.pack("H126x", socket.AF_INET),),
    socket.AF_INET6: (
        struct.pack("H126x", socket.AF_INET6),
        struct.pack("H16xH108x", socket.AF_INET6, 0xFFFF),  # ::ffff:0.0.0.0, IPv4 peers
    ),
}
"""Wildcard peer addresses (struct sockaddr_storage) per address family of the listening socket."""

SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
"""Netlink protocol for queries about sockets, and the type of the message that asks about one socket.

The module ``socket`` names neither.
"""


def owner(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end of an accepted IPv4 connection, as ``ss -e`` does.

    The other end must be on this machine. Returns None if that end is closed or unknown to the kernel. Raises
    OSError if this process has no file descriptors left.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as netlink:
            (here, port), (there, other) = connection.getsockname(), connection.getpeername()
            addresses = (socket.inet_aton(address).ljust(16, b"\0") for address in (there, here))
            ends = struct.pack("!HH16s16s", other, port, *addresses)  # struct inet_diag_sockid
            anywhere = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends
            asked = anywhere + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
            netlink.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, 1, 0, 0) + asked)
            told = netlink.recv(4096)
            if struct.unpack_from("=H", told, 4)[0] == SOCK_DIAG_BY_FAMILY:
                return int(struct.unpack_from("=I", told, 80)[0])  # after struct nlmsghdr, in inet_diag_msg
    except (OSError, struct.error) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise
    return None


def drop_all(listener: socket.socket) -> None:
    """Stop a listening socket from accepting connections; existing ones stay.

    This attaches a packet filter to the socket. Where only root may do that (Linux 6.6.143, of June 2026, and
    later), the socket accepts signed packets only. Raises OSError if the system allows neither.
    """
    try:
        _attach_filter(listener)
    except PermissionError:
        _demand_signatures(listener)


def _attach_filter(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(DROP, len(DROP))
    program = struct.pack("HL", 1, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _demand_signatures(listener: socket.socket) -> None:
    """Have the kernel drop packets that are not signed (RFC 2385) with a random key that nobody knows."""
    key = os.urandom(80)
    for address in EVERYBODY[listener.family]:
        signed = address + struct.pack("BBHi", WITH_PREFIX, 0, len(key), 0) + key  # struct tcp_md5sig
        listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, signed)


def take(pid: int, descriptor: int) -> int:
    """Return a copy, in this process, of a child process's file descriptor; the caller closes it.

    Raises OSError if the system does not allow it.
    """
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if (copy := libc.syscall(PIDFD_GETFD, process, descriptor, 0)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copy
    finally:
        os.close(process)


def unprotected(*, mpiexec: bool) -> str:
    """Return a phrase that says which ports a run cannot close to other users on this system; "" if none.

    Tries to close a port of this process and, if ``mpiexec``, to copy a child's file descriptor.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            drop_all(listener)
    except OSError as error:
        return f"the ports of ranks stay open to others ({error.strerror})"
    return _out_of_reach() if mpiexec else ""


def _out_of_reach() -> str:
    """Return a phrase about mpiexec's ports if this process may not copy a child's descriptors; else ""."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        os.close(take(child.pid, 0))
    except OSError as error:
        return f"the ports of mpiexec stay open to others (pidfd_getfd: {error.strerror})"
    finally:
        child.communicate()
    return ""


def listeners(pid: int, *, loopback: bool = False) -> list[tuple[int, str, int]]:
    """List (descriptor, address, port) of a process's listening sockets; empty if the process is gone.

    loopback: whether to include sockets that only this machine can reach.
    """
    with suppress(psutil.Error):
        found = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        near = [loopback or not ipaddress.ip_address(c.laddr[0]).is_loopback for c in found]
        return [(c.fd, *c.laddr) for c, wanted in zip(found, near, strict=True) if wanted]
    return []


def own_listeners() -> set[int]:
    """Return the descriptors of this process's listening sockets."""
    return {descriptor for descriptor, _, _ in listeners(os.getpid(), loopback=True)}


def stop_listening(*, less: set[int] | None = None) -> None:
    """Stop this process's listening sockets, except descriptors in ``less``, from accepting connections."""
    for descriptor in own_listeners() - (less or set()):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            drop_all(listener)


def is_connected(pid: int, ports: set[int]) -> bool:
    """Return whether a process is connected to a peer at one of ``ports``."""
    with suppress(psutil.Error):
        return any(c.raddr and c.raddr[1] in ports for c in psutil.Process(pid).net_connections("inet"))
    return False


def deafen(pid: int, *, loopback: bool = False) -> None:
    """Stop a child's listening sockets from accepting connections. loopback: see ``listeners``.

    This is meant for mpiexec, which listens on every address for its peers on other nodes, although a run on
    one machine has none. No setting of PRRTE 3.0 prevents that. Where the system does not allow the change (a
    hardened kernel, a container), the sockets stay open without an error; see docs/security.md.
    """
    with suppress(OSError):
        for descriptor, _, _ in listeners(pid, loopback=loopback):
            with socket.socket(fileno=take(pid, descriptor)) as listener:
                drop_all(listener)
