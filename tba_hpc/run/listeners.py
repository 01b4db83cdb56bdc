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


def stop_listening() -> None:
    """Let the sockets on which this process listens now take no connection any more."""
    for connection in psutil.Process().net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as listener:
                drop_all(listener)
