"""Sockets on which a library listens although nobody is to call: the kernel drops what comes.

Each connection that such a library accepts may cost it a descriptor for good, so that any user of the machine
could end the process.
"""

from __future__ import annotations

import ctypes
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


def own_listeners() -> set[int]:
    """Descriptors of the sockets on which this process listens now."""
    connections = psutil.Process().net_connections("inet")
    return {connection.fd for connection in connections if connection.status == psutil.CONN_LISTEN}


def stop_listening(*, less: set[int] | None = None) -> None:
    """Let the sockets on which this process listens now, less some, take no connection any more."""
    for descriptor in own_listeners() - (less or set()):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            drop_all(listener)
