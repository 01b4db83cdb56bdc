"""Sockets on which a library listens although nobody is to call: the kernel drops what comes.

Each connection that such a library accepts may cost it a descriptor for good, so that any user of the machine
could end the process.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import subprocess
from contextlib import suppress

import psutil

SO_ATTACH_FILTER, TCP_MD5SIG_EXT = 26, 32
"""Socket options; the module ``socket`` does not name them."""

WITH_PREFIX = 1
"""Flag of the second: only so many bits of the address count."""

PIDFD_GETFD = 438
"""Number of the system call, on every machine; Linux 5.6."""

DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: keep 0 bytes of whatever comes."""

EVERYBODY = {
    socket.AF_INET: (struct.pack("H126x", socket.AF_INET),),
    socket.AF_INET6: (
        struct.pack("H126x", socket.AF_INET6),
        struct.pack("H16xH108x", socket.AF_INET6, 0xFFFF),  # ::ffff:0.0.0.0, callers by IPv4
    ),
}
"""Addresses of which no bit counts (struct sockaddr_storage), by the family of the socket that is called."""


def drop_all(listener: socket.socket) -> None:
    """Let a socket take no connection any more. Raises OSError if the system does not allow it.

    What is connected stays so. Since June 2026 (6.6.143) Linux lets root alone attach a filter to TCP.
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
    """Have the kernel drop whatever is not signed with a key that nobody knows (RFC 2385)."""
    key = os.urandom(80)
    for address in EVERYBODY[listener.family]:
        signed = address + struct.pack("BBHi", WITH_PREFIX, 0, len(key), 0) + key  # struct tcp_md5sig
        listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, signed)


def take(pid: int, descriptor: int) -> int:
    """A copy of a child's descriptor, to be closed. Raises OSError if the system does not allow it."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if (copy := libc.syscall(PIDFD_GETFD, process, descriptor, 0)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copy
    finally:
        os.close(process)


def unprotected(*, mpiexec: bool) -> str:
    """Name what stays open to strangers since the system does not let it be closed; empty if nothing does.

    It tries what a run does, on a socket and, for a run that has an ``mpiexec``, with a child of its own.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            drop_all(listener)
    except OSError as error:
        return f"the ports of ranks stay open to others ({error.strerror})"
    return _out_of_reach() if mpiexec else ""


def _out_of_reach() -> str:
    """Name mpiexec's ports if the system does not give a process the sockets of its child."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        os.close(take(child.pid, 0))
    except OSError as error:
        return f"the ports of mpiexec stay open to others (pidfd_getfd: {error.strerror})"
    finally:
        child.communicate()
    return ""


def listeners(pid: int, *, loopback: bool = False) -> list[tuple[int, str, int]]:
    """(descriptor, address, port) of the sockets on which a process listens; none if it is gone.

    loopback: those that only this machine can reach, too.
    """
    with suppress(psutil.Error):
        found = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        near = [loopback or not ipaddress.ip_address(c.laddr[0]).is_loopback for c in found]
        return [(c.fd, *c.laddr) for c, wanted in zip(found, near, strict=True) if wanted]
    return []


def own_listeners() -> set[int]:
    """Descriptors of the sockets on which this process listens now."""
    return {descriptor for descriptor, _, _ in listeners(os.getpid(), loopback=True)}


def stop_listening(*, less: set[int] | None = None) -> None:
    """Let the sockets on which this process listens now, less some, take no connection any more."""
    for descriptor in own_listeners() - (less or set()):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            drop_all(listener)


def calls(pid: int, ports: set[int]) -> bool:
    """Whether a process is connected to one of these ports."""
    with suppress(psutil.Error):
        return any(c.raddr and c.raddr[1] in ports for c in psutil.Process(pid).net_connections("inet"))
    return False


def deafen(pid: int, *, loopback: bool = False) -> None:
    """Let a child's sockets that ``listeners`` names take no connection any more.

    mpiexec listens on every address for its peers on other nodes, of which a run on one machine has none, and
    no setting prevents that (PRRTE 3.0). What the system does not allow (a hardened kernel, a container) is
    left: see docs/security.md.
    """
    with suppress(OSError):
        for descriptor, _, _ in listeners(pid, loopback=loopback):
            with socket.socket(fileno=take(pid, descriptor)) as listener:
                drop_all(listener)
