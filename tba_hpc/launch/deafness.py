"""Closes the listening sockets of a child to the network.

mpiexec listens on every address for its peers on other nodes, of which a run on one machine has none, and no
setting prevents that (PRRTE 3.0). So a packet filter drops what comes.
"""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress

import psutil

from tba_hpc.run.listeners import drop_all, listeners

PIDFD_GETFD = 438
"""Number of the system call, on every machine; Linux 5.6."""


def calls(pid: int, ports: set[int]) -> bool:
    """Whether a process is connected to one of these ports."""
    with suppress(psutil.Error):
        return any(c.raddr and c.raddr[1] in ports for c in psutil.Process(pid).net_connections("inet"))
    return False


def deafen(pid: int, *, loopback: bool = False) -> None:
    """Have a child's sockets that ``listeners`` names take no connection any more.

    What the system does not allow (a hardened kernel, a container) is left: see docs/security.md.
    """
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for descriptor, _, _ in listeners(pid, loopback=loopback):
                _drop_everything(process, descriptor)
        finally:
            os.close(process)


def _drop_everything(process: int, descriptor: int) -> None:
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=copy) as listener:
        drop_all(listener)
