"""A child that listens to the whole network hears nobody any more; what it has heard goes on."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tba_hpc.run.listeners import PIDFD_GETFD, calls, deafen, listeners

LISTENER = """
import socket, sys
ends = [socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0))]
if socket.has_dualstack_ipv6():
    ends.append(socket.create_server(("::", 0), family=socket.AF_INET6))
print(*(end.getsockname()[1] for end in ends), flush=True)
known, _ = ends[0].accept()
while data := known.recv(1):
    known.send(data)
"""


@contextmanager
def listening() -> Iterator[tuple[int, list[int]]]:
    """A child and its ports: on every address, on the loopback interface, on every address of IPv6."""
    child = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child.pid, [int(port) for port in child.stdout.readline().split()]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def hears(host: str, port: int) -> bool:
    """Whether a caller gets through."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def may_take_sockets_of(pid: int) -> bool:
    """Whether the system lets us, by its own answer for the child's standard output."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, 1, 0)
    for descriptor in {process, copy} - {-1}:
        os.close(descriptor)
    return copy >= 0


def test_only_the_loopback_interface_is_still_heard() -> None:
    with listening() as (pid, (everywhere, loopback, *ipv6)):
        known = socket.create_connection(("127.0.0.1", everywhere), timeout=5)
        assert {(address, port) for _, address, port in listeners(pid)} == {
            ("0.0.0.0", everywhere),
            *(("::", port) for port in ipv6),
        }
        assert hears("127.0.0.1", everywhere) and hears("127.0.0.1", loopback)
        if not may_take_sockets_of(pid):
            pytest.skip("this system does not let a process have the sockets of its child (pidfd_getfd)")
        deafen(pid)
        assert not hears("127.0.0.1", everywhere)
        assert not any(hears("::1", port) for port in ipv6)
        assert hears("127.0.0.1", loopback)
        known.send(b"x")
        assert known.recv(1) == b"x"
        assert calls(os.getpid(), {everywhere}) and not calls(os.getpid(), {loopback})
        deafen(pid, loopback=True)
        assert not hears("127.0.0.1", loopback)
        known.close()


def test_a_process_that_is_gone_is_no_error() -> None:
    with listening() as (pid, _):
        pass
    assert listeners(pid) == []
    deafen(pid)
