"""Sends messages about a run by a command or a webhook, and a heartbeat, as set under ``run.notify``.

A separate process reads the run's files and sends, so that a slow network does not delay training. A message
that cannot be sent is only noted in the log of this process. ``tba run`` and the job's batch script start the
process. They stop it with SIGTERM, and it then reports how the run has ended. A node that dies cannot report,
but its heartbeat ceases.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event

import psutil

from tba_hpc.config import Config, ConfigError
from tba_hpc.core import web
from tba_hpc.core.wording import count, printable
from tba_hpc.report.alerts import Alert
from tba_hpc.report.run_state import (
    RANKS_WAIT,
    Queue,
    QueueEntry,
    RunMonitor,
    RunState,
    run_state,
)
from tba_hpc.report.status import cells
from tba_hpc.report.tables import NOTHING
from tba_hpc.run.directory import RunDir
from tba_hpc.run.signals import die_with
from tba_hpc.run.slurm_queue import FORGOTTEN, NO_ANSWER, QUEUED, next_job

log = logging.getLogger(__name__)

RUN_CHECK_SECONDS = 15.0
"""Pause between two checks of the run, in seconds."""

QUIET_SECONDS = 3600.0
"""Time that an alert must have been absent before it is reported again, in seconds."""

SEND_SECONDS = 10.0
"""Timeout of one message, in seconds."""

END_SECONDS = 30
"""Longest time that the last messages may take after the signal to end, in seconds."""

START_SECONDS = 30
"""Longest time that a new process needs until it handles signals, in seconds."""

BOOT_SECONDS = 2.0
"""Largest error of a process's start time as the kernel reports it, in seconds."""

LOG = "notify.log"


def require_addresses(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if an environment variable that ``run.notify`` names holds no web address."""
    for key in ("webhook_variable", "heartbeat_variable"):
        name = getattr(config.run.notify, key)
        address = environment.get(name, "").strip() if name else "https://"
        if not address:
            raise ConfigError(
                f"run.notify.{key}={name} is not set in the environment: export it where the run is started"
            )
        if not (address.startswith(("https://", "http://")) and address.isascii() and address.isprintable()):
            raise ConfigError(f"run.notify.{key}={name} holds no address: begin it with https://")


def require_command(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the first word of ``run.notify.command`` is not a command that can run here."""
    word, *_ = config.run.notify.command or (sys.executable,)
    if not shutil.which(word, path=environment.get("PATH")):
        rule = "no executable file" if "/" in word else "not on the PATH"
        raise ConfigError(
            f"run.notify.command={word} is {rule}: name one that is, or set run.notify.command=null"
        )


# --- Messages ---


class Notifier:
    """Sender of messages about what has changed in a run since the last check.

    queue: see ``RunMonitor``. since: unix seconds; events before this time are not reported. beside: whether
    a launcher or batch script started this process. If so, alerts that exist when it starts are not reported,
    since the process of an earlier attempt has reported them.
    """

    def __init__(self, run: RunDir, queue: Queue, since: float, *, beside: bool = False) -> None:
        self._run, self._queue, self._since = run, queue, since
        self._monitor = RunMonitor(run, queue)
        self._notify = self._monitor.config.run.notify
        self._alerts: dict[str, float] = {}  # by key, when an alert was last seen (monotonic)
        self._attempt, self._beat = "", -math.inf
        self._monitor.update()
        now, events = run_state(self._monitor), self._monitor.events
        if beside:
            self._new_alerts()
        self._state = now.state if now.over and not (events and events[-1]["time"] >= since) else ""

    def look(self) -> RunState:
        """Report what has changed, send the heartbeat if it is due, and return the run's state."""
        self._monitor.update()
        now = run_state(self._monitor)
        self._tell_of_start()
        self._tell_of_alerts()
        self._tell_of(now)
        due = time.monotonic() - self._beat >= self._notify.heartbeat_seconds
        if due and not (now.over or self._monitor.is_silent):
            self._beat = time.monotonic()
            self._ask(self._notify.heartbeat_variable)
        return now

    def leave(self) -> None:
        """Report how the run or its job has ended; called when the launcher or the batch script ends."""
        job = self._queue(self._run)
        self._monitor = RunMonitor(self._run, lambda _: [_after_script(entry) for entry in job])
        self._monitor.update()
        self._tell_of_start()
        self._tell_of_alerts()
        last = self._last_words(job)
        if last.over:
            self._tell_of(last)
        else:
            self._send("end", last.words, last.command or self._command("status"))

    def _last_words(self, job: list[QueueEntry]) -> RunState:
        """Return the run's state once its launcher or batch script has ended. job: the job's components."""
        now, step = run_state(self._monitor), self._monitor.step
        if self._monitor.last_event == "requeue" and (attempt := self._monitor.attempt):
            return RunState(
                "requeued", f"{attempt.why_requeued}: leaves its nodes at step {step}, to queue again"
            )
        if now.over and (follower := next_job(self._run)):
            return RunState(now.state, f"{now.words.removeprefix('gave up: ')}; job {follower} continues")
        if now.state == "gone" and NO_ANSWER in {entry["state"] for entry in job}:
            return RunState(
                "gone", f"its job ends at step {step}; without squeue here, it may be requeued or gone"
            )
        if now.over or now.state in ("queued", "requeued"):
            return now
        return replace(now, words=f"its launcher has ended: {now.words}")  # the launcher noted no event

    def _tell_of_start(self) -> None:
        attempt, steps = self._monitor.attempt, self._monitor.config.train.steps
        if attempt and attempt.name != self._attempt and attempt.start >= self._since:
            self._attempt, self._state = attempt.name, ""
            how = "started" if len(self._monitor.attempts) == 1 else f"started again ({attempt.name})"
            repeated = count(self._monitor.repeated, "step")
            again = f", repeating {repeated}" if self._monitor.repeated else ""
            words = f"{how} at step {self._monitor.first_step} of {steps}{again}"
            self._send("start", words, self._command("status"))

    def _tell_of_alerts(self) -> None:
        for alert in self._new_alerts():
            words = alert.short.replace(" RUN ", f" {shlex.quote(str(self._run.path))} ")
            self._send("alert", f"alert: {words}", self._command("report"))

    def _new_alerts(self) -> list[Alert]:
        """Return the present alerts that were not seen in the last QUIET_SECONDS, and note all as seen."""
        now, new = time.monotonic(), []
        for alert in self._monitor.alerts:
            # An alert is known by its key, because its figure changes while it lasts.
            new += [alert] if now - self._alerts.get(alert.key, -math.inf) > QUIET_SECONDS else []
            self._alerts[alert.key] = now
        return new

    def _tell_of(self, now: RunState) -> None:
        state = now.state if now.over else "silent" if self._monitor.is_silent else ""
        if state not in ("", "created", self._state):
            test = cells(self._monitor)["test"] if now.state == "finished" else NOTHING
            done = now.words.removesuffix(RANKS_WAIT)  # no news of the end
            words = done if test == NOTHING else f"{done}, test {test}"
            self._send("end" if now.over else "silence", words, now.command or self._command("status"))
        self._state = state

    def _command(self, verb: str) -> str:
        return shlex.join(["tba", verb, str(self._run.path)])

    def _send(self, kind: str, words: str, command: str) -> None:
        message = printable(" ".join(f"{self._run.path.name}: {words} | {command}".split()))
        log.info("%s", message)
        if self._notify.command:
            _run([*self._notify.command, message], {**os.environ, "TBA_EVENT": kind})
        self._ask(self._notify.webhook_variable, {"text": message})

    def _ask(self, variable: str | None, content: dict[str, str] | None = None) -> None:
        """Send a request to the URL held in an environment variable: POST with ``content``, otherwise GET.

        variable: name of the environment variable; None: send nothing. Failures are logged without the URL,
        which may contain a secret.
        """
        if variable is None:
            return
        try:
            status = asyncio.run(_status_of(os.environ[variable].strip(), content))
        except Exception as error:  # an address may lead to any failure; none may end this process
            log.warning("%s: no answer (%s)", variable, type(error).__name__)
            return
        if status // 100 != 2:
            log.warning("%s: the answer was status %d", variable, status)


async def _status_of(address: str, content: dict[str, str] | None) -> int:
    """Request an address and return the status of its answer. Raises TimeoutError after SEND_SECONDS."""
    async with asyncio.timeout(SEND_SECONDS), web.client() as client:
        method = "POST" if content else "GET"
        async with client.stream(method, address, json=content) as answer:
            return answer.status_code


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=SEND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: %s", command[0], getattr(error, "strerror", None) or type(error).__name__)


def _after_script(entry: QueueEntry) -> QueueEntry:
    """Return a job's component in the state that it will have once its batch script has ended.

    While a requeued job leaves its nodes, squeue calls it COMPLETING, as if it ended for good, but counts its
    wall time from 0 again.
    """
    requeued = entry["state"] == "COMPLETING" and entry["elapsed"] == "0:00"
    return {**entry, "state": "REQUEUED" if requeued or entry["state"] in QUEUED else FORGOTTEN}


# --- The process ---


def watch(run: RunDir, queue: Queue, *, beside: bool = False) -> None:
    """Send messages about a run until the run is finished or this process gets SIGTERM or SIGINT.

    queue: see ``RunMonitor``. beside: whether a launcher or batch script started this process and sends it
    such a signal when it ends itself. If so, the end of the run is also reported. Raises ConfigError if
    run.notify is not set, or if a variable that it names holds no address.
    """
    config = run.config()
    if not config.run.notify.wanted:
        raise ConfigError(f"{run.path} sends no messages: set run.notify, as docs/running.md shows")
    require_addresses(config)
    if run.finished and not beside:
        log.info("%s is finished: there is nothing left to report", run.path)
        return
    asked = Event()

    def leave(*_: object) -> None:
        asked.set()
        signal.alarm(END_SECONDS)  # ends this process if the last messages take longer

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _wait_with_signals
    notifier = Notifier(run, queue, since=psutil.Process().create_time() - BOOT_SECONDS, beside=beside)
    if not beside:
        log.info("%s: messages follow when something changes, until it is finished; Ctrl-C ends", run.path)
    while not asked.is_set():
        with suppress(OSError):  # the run's folder may be unreachable for a while
            if notifier.look().state == "finished":
                return
        asked.wait(RUN_CHECK_SECONDS)
    if beside:
        notifier.leave()


@contextmanager
def notified(run: RunDir, config: Config) -> Iterator[None]:
    """Run ``watch`` in a child process during the block, and let it report the end, if run.notify is set."""
    if not config.run.notify.wanted:
        yield
        return
    process = None
    with suppress(OSError), (run.logs / LOG).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tba_hpc", "watch", str(run.path), "--beside"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the launcher
            preexec_fn=functools.partial(_wait_with_signals, os.getpid()),
        )
    try:
        yield
    finally:
        if process:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(START_SECONDS + END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_with_signals(parent: int) -> None:
    """Make the kernel send SIGINT to this new process when ``parent`` ends.

    The signal is blocked until ``watch`` unblocks it. SIGTERM stays blocked: Slurm sends it to all processes
    of a job that it ends, before the run has saved its last checkpoint.
    """
    die_with(parent, signal.SIGINT, blocked={signal.SIGINT, signal.SIGTERM})
