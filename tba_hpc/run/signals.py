"""Signals: a flag for stop requests, and ways to end processes with their parent or session."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1

KILL_ROUNDS = 3
"""Maximum number of searches for remaining processes of a session that is killed."""

_libc = ctypes.CDLL(None)


class StopFlag:
    """``with StopFlag() as stop``: SIGTERM, SIGUSR1 and SIGINT set a flag that loops read at safe points.

    The handler does nothing else, since saving inside a handler could interrupt a save. Before the block
    these signals end the process at once. That is right while there is nothing to save, since no flag is read
    during a slow import or the start of MPI. After the block they are ignored: the process is about to exit.
    Use it in the main thread only.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> StopFlag:
        for number in self.SIGNALS:
            signal.signal(number, self._set)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


def kill_session(leader: int) -> None:
    """Kill all processes of the session that ``leader`` began, including its other process groups.

    Its own group is killed at once, so that none escapes by forking; then other groups, while some are found.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for _ in range(KILL_ROUNDS):
        if not sum(_kill_if_of(leader, pid) for pid in psutil.pids()):
            return


def _kill_if_of(session: int, pid: int) -> bool:
    """Kill a process if it belongs to the session and still runs; return whether it was killed."""
    with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this new process signal ``number`` once its ``parent`` is gone, however it ended.

    A process whose parent is already gone exits here.
    """
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
