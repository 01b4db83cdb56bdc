"""A child that listens to the whole network hears nobody any more; what it has heard goes on."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tba_hpc.run.listeners import (
    _attach_filter,
    _demand_signatures,
    deafen,
    drop_all,
    is_connected,
    listeners,
    unprotected,
)

LISTENER = """
import socket, sys
ends = [socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0))]
if sys.argv[1:] == ["ipv6"]:
    ends.append(socket.create_server(("::", 0), family=socket.AF_INET6))
print(*(end.getsockname()[1] for end in ends), flush=True)
known, _ = ends[0].accept()
while data := known.recv(1):
    known.send(data)
"""


@contextmanager
def listening() -> Iterator[tuple[int, list[int]]]:
    """A child and its ports: on every address, on the loopback interface, on every address of IPv6."""
    command = [sys.executable, "-c", LISTENER, *(["ipv6"] if has_ipv6() else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child.pid, [int(port) for port in child.stdout.readline().split()]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def has_ipv6() -> bool:
    """Whether this machine has an address of IPv6; some kernels know the protocol, and have none."""
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return socket.has_dualstack_ipv6()
    return False


def hears(host: str, port: int) -> bool:
    """Whether a caller gets through."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def test_only_the_loopback_interface_is_still_heard() -> None:
    with listening() as (pid, (everywhere, loopback, *ipv6)):
        known = socket.create_connection(("127.0.0.1", everywhere), timeout=5)
        assert {(address, port) for _, address, port in listeners(pid)} == {
            ("0.0.0.0", everywhere),
            *(("::", port) for port in ipv6),
        }
        assert hears("127.0.0.1", everywhere) and hears("127.0.0.1", loopback)
        if why := unprotected(mpiexec=True):
            pytest.skip(f"this system does not allow it: {why}")
        deafen(pid)
        assert not hears("127.0.0.1", everywhere)
        assert not any(hears("::1", port) for port in ipv6)
        assert hears("127.0.0.1", loopback)
        known.send(b"x")
        assert known.recv(1) == b"x"
        assert is_connected(os.getpid(), {everywhere}) and not is_connected(os.getpid(), {loopback})
        deafen(pid, loopback=True)
        assert not hears("127.0.0.1", loopback)
        known.close()


def test_a_process_that_is_gone_is_no_error() -> None:
    with listening() as (pid, _):
        pass
    assert listeners(pid) == []
    deafen(pid)


@pytest.mark.parametrize("protect", [_attach_filter, _demand_signatures, drop_all])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::"])
def test_a_socket_that_is_closed_to_all_wakes_nobody(
    protect: Callable[[socket.socket], None], address: str
) -> None:
    """By either way, and by the one that is taken; at :: to callers by IPv4, too.

    Connections go on, and one that waits is still taken.
    """
    if address != "127.0.0.1" and not has_ipv6():
        pytest.skip("this machine has no address of IPv6")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    both = {"dualstack_ipv6": True} if address == "::" else {}
    hosts = ["::1", "127.0.0.1"] if address == "::" else [address]
    with socket.create_server((address, 0), family=family, **both) as listener:
        port = listener.getsockname()[1]
        callers = [socket.create_connection((host, port), timeout=5) for host in hosts]
        known = [listener.accept()[0] for _ in hosts]
        waiting = socket.create_connection((hosts[0], port), timeout=5)
        try:
            protect(listener)
        except OSError as error:
            if error.errno == errno.EPERM and protect is _attach_filter:
                pytest.skip("on this system root alone may do this; the other way is for everybody")
            if error.errno == errno.ENOPROTOOPT:
                pytest.skip("this kernel was built without signatures (CONFIG_TCP_MD5SIG)")
            raise
        listener.accept()[0].close()
        waiting.close()
        assert not any(hears(host, port) for host in hosts)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        for caller, end in zip(callers, known, strict=True):
            caller.send(b"x")
            assert end.recv(1) == b"x"
            caller.close()
            end.close()
