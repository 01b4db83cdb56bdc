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
from contextlib import suppress

import psutil

SO_ATTACH_FILTER = 26
"""Socket option; the module ``socket`` does not name it."""

PIDFD_GETFD = 438
"""Number of the system call, on every machine; Linux 5.6."""

DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: keep 0 bytes of whatever comes."""


def drop_all(listener: socket.socket) -> None:
    """Let a socket take no connection any more. Raises OSError if the system does not allow it."""
    code = ctypes.create_string_buffer(DROP, len(DROP))
    program = struct.pack("HL", 1, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


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
        process = os.pidfd_open(pid)
        try:
            for descriptor, _, _ in listeners(pid, loopback=loopback):
                copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
                if copy < 0:
                    return
                with socket.socket(fileno=copy) as listener:
                    drop_all(listener)
        finally:
            os.close(process)
