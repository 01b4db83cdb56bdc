"""Decides when the trainer's checkpoints are written, and what happens if one fails."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

from tba_hpc.config import Config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import Learner
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.loops.merger import state_event
from tba_hpc.run.checkpoints import BUFFER_FILE, PROMPTS_FILE, Arrays, Checkpoints, TrainerState
from tba_hpc.run.files import DISK_RETRY_SECONDS, DiskFullError
from tba_hpc.run.metrics import MetricsWriter, Value

log = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""Shortest time between two warnings in the log that the disk is full, in seconds."""


@dataclass
class Saving:
    """The checkpoints of one attempt.

    saved: state in the newest checkpoint on disk. last_step: step of the last save, or, before the first, the
    step at which the attempt began.
    """

    config: Config
    checkpoints: Checkpoints
    learner: Learner
    buffer: ReplayBuffer
    completed: CompletedRequests
    metrics: MetricsWriter
    saved: TrainerState = field(kw_only=True)
    last_step: int = field(kw_only=True)
    _under_way: Future[TrainerState] | None = None
    _event: dict[str, Value] = field(default_factory=dict)  # metric record of the checkpoint under way
    _no_room: DiskFullError | None = None  # why the last checkpoint failed, if the disk was full
    _give_up: float = math.inf  # when ``save_last`` stops trying, by the monotonic clock
    _told: float = -math.inf  # when the log last said that the disk is full, by the same clock

    @property
    def under_way(self) -> bool:
        """True while a checkpoint is being written."""
        return self._under_way is not None

    @property
    def seconds(self) -> float:
        """Duration of the longest save so far, earlier attempts included, in seconds."""
        return self.saved.save_seconds

    def due(self, step: int) -> bool:
        """Return whether to save at ``step``: every ``checkpoint.every`` steps, unless a save is under way.

        The last step is left to ``save_last``.
        """
        every = self.config.checkpoint.every
        passed = step // every > self.last_step // every
        return passed and not self.under_way and step < self.config.train.steps

    def save(self, state: TrainerState) -> None:
        """Copy what a checkpoint of ``state`` will hold. The copy is written while the next steps run."""
        state = replace(state, save_seconds=self.seconds)
        self.last_step = state.step
        self._event = state_event("checkpoint", state, self.buffer)
        self.metrics.log(state_event("snapshot", state, self.buffer))
        files: dict[str, Callable[[], Arrays]] = {
            BUFFER_FILE: self.buffer.snapshot(),
            PROMPTS_FILE: partial(dict, done=self.completed.to_array()),
        }
        # Metrics are flushed before the checkpoint is complete, so that they explain all of its counts.
        self._under_way = self.checkpoints.save(state, self.learner, files, records=self.metrics.sync)
        self.note()

    def note(self) -> None:
        """Log the checkpoint under way if it has ended by now. Raises the error that made it fail.

        A full disk is only logged, because ending the run would lose what the checkpoint was to hold. The
        next checkpoint is tried when it is due.
        """
        if not self._under_way or not self._under_way.done():
            return
        under_way, self._under_way = self._under_way, None
        try:
            self.saved = under_way.result()
        except DiskFullError as error:
            self._no_room = error
            self._postpone(str(error).partition(";")[0])
        else:
            self.metrics.log(self._event)

    def _postpone(self, fault: str) -> None:
        """Record that a checkpoint waits for space, in the metrics and in the log.

        The log gets this at most once in TELL_SECONDS; in ``save_last`` so do the metrics. fault: description
        of the error.
        """
        now, last = time.monotonic(), self._give_up < math.inf
        tell = now - self._told >= TELL_SECONDS
        until = time.time() + self._give_up - now if last else None
        if tell or not last:
            self.metrics.log({**self._event, "event": "postponed", "fault": fault, "until": until})
        if tell:
            self._told = now
            clock = time.strftime("%H:%M:%S", time.localtime(until))
            goes_on = "training continues, and the next checkpoint is tried when it is due"
            log.warning("%s: %s", fault, f"tried again until {clock}" if last else goes_on)

    def save_last(self, state: TrainerState, *, give_up: float) -> None:
        """Save ``state`` unless the newest checkpoint holds it, and wait until it is written.

        give_up: time on the monotonic clock until which saving is tried again if the disk is full. Raises
        DiskFullError afterwards.
        """
        self._wait()
        self._give_up, self._told = give_up, -math.inf
        while replace(state, save_seconds=self.seconds) != self.saved:
            self._no_room = None
            self.save(state)
            self._wait()
            if self._no_room and time.monotonic() >= give_up:
                raise self._no_room
            if self._no_room:
                time.sleep(DISK_RETRY_SECONDS)

    def _wait(self) -> None:
        """Wait for the checkpoint under way, if any. Raises TimeoutError after launch.timeout_seconds."""
        deadline = self.config.launch.timeout_seconds
        if self._under_way and not wait([self._under_way], deadline).done:
            raise TimeoutError(
                f"the checkpoint of step {self._event['step']} was not written within {deadline:g} s: see "
                "whether the file system of the run answers, or raise launch.timeout_seconds"
            )
        self.note()
