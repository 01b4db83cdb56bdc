"""Calls of the user's code in threads, with a deadline each."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tba_hpc.config import ConfigError

MOST_HANGING = 64
"""Calls beyond their deadline, whose threads are still there, at which the run ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A call, and who gets its result."""

    call: Callable[[], Any]
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None]


class Workers:
    """Runs ``at_once`` jobs at a time, each in a thread; one that takes ``seconds`` has failed.

    Results are handed over in the thread that calls ``deliver``. A thread cannot be ended: that of a job that
    hangs stays, as a daemon, and another job takes its turn.
    """

    def __init__(self, at_once: int, seconds: float) -> None:
        self._at_once, self._seconds = at_once, seconds
        self._waiting: deque[Job] = deque()
        self._deadlines: dict[Job, float] = {}
        self._hanging = 0
        self._done: queue.SimpleQueue[tuple[Job, Any, BaseException | None]] = queue.SimpleQueue()

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)
        self._fill()

    def deliver(self, wait: float) -> None:
        """Hand over what is finished; waits up to ``wait`` seconds if nothing is.

        Raises ConfigError if too many jobs hang.
        """
        for job, result, error in self._finished(wait):
            if self._deadlines.pop(job, None) is None:
                self._hanging -= 1
            elif error is not None:
                job.failed(error)
            else:
                job.then(result)
        for job in [job for job, deadline in self._deadlines.items() if deadline < time.monotonic()]:
            del self._deadlines[job]
            self._hanging += 1
            job.failed(TimeoutError(f"it took more than {self._seconds:g} s"))
        if self._hanging >= MOST_HANGING:
            raise ConfigError(
                f"{self._hanging} calls of the environment take more than task.options.step_seconds="
                f"{self._seconds:g} and do not end: give what they wait for a timeout, or raise that"
            )
        self._fill()

    def _finished(self, wait: float) -> Iterator[tuple[Job, Any, BaseException | None]]:
        with suppress(queue.Empty):
            yield self._done.get(timeout=wait) if wait else self._done.get_nowait()
            while True:
                yield self._done.get_nowait()

    def _fill(self) -> None:
        while self._waiting and len(self._deadlines) < self._at_once:
            job = self._waiting.popleft()
            self._deadlines[job] = time.monotonic() + self._seconds
            threading.Thread(target=self._run, args=(job,), daemon=True, name="environment").start()

    def _run(self, job: Job) -> None:
        try:
            self._done.put((job, job.call(), None))
        except BaseException as error:  # a user's code may raise anything
            self._done.put((job, None, error))
