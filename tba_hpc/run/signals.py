"""Signals: a flag for requests to stop, killing a session, and ending a process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1
"""Option of prctl that names the signal a process gets when its parent ends."""

KILL_ROUNDS = 3
"""Maximum number of times that the machine's processes are searched for members of a killed session."""

_libc = ctypes.CDLL(None)


class StopFlag:
    """Flag ``is_set`` that SIGTERM, SIGUSR1 and SIGINT set within ``with StopFlag() as stop``.

    Loops read it where they can stop safely. The signal handler only sets it, since saving inside a handler
    could interrupt a save. Before the block the signals end the process at once, because it has nothing to
    save yet. After the block they are ignored, because the process is about to exit. Use it in the main
    thread only.
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
    """Kill all processes of the session that process ``leader`` began, in all of its process groups.

    The leader's own group is killed by one call, so that no process escapes by forking. Processes of other
    groups are then searched for and killed, at most KILL_ROUNDS times.
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


def die_with(parent: int, number: int, blocked: Collection[signal.Signals] = ()) -> None:
    """Have the kernel send signal ``number`` to this new process when its parent ends, for whatever reason.

    If the parent has ended already, this process exits at once. parent: process number. blocked: signals that
    this process never gets.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
