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
