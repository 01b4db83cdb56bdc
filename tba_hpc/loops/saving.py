"""When the trainer's checkpoints are written, and what becomes of one that does not succeed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from tba_hpc.config import Config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import Learner
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.loops.merger import state_event
from tba_hpc.run.checkpoints import BUFFER_FILE, PROMPTS_FILE, Arrays, Checkpoints, TrainerState
from tba_hpc.run.files import AGAIN_SECONDS, DiskFullError
from tba_hpc.run.metrics import MetricsWriter, Value

log = logging.getLogger(__name__)


class Saving:
    """The checkpoints of one attempt. saved: what the newest one on disk holds."""

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        *,
        saved: TrainerState,
        step: int,
        learner: Learner,
        buffer: ReplayBuffer,
        completed: CompletedRequests,
        metrics: MetricsWriter,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._learner = learner
        self._buffer = buffer
        self._completed = completed
        self._metrics = metrics
        self._saved = saved
        self._last_step = step  # at which one was begun, or the attempt
        self._under_way: Future[TrainerState] | None = None
        self._event: dict[str, Value] = {}  # of the one under way
        self._no_room: DiskFullError | None = None  # for the last one

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._under_way is not None

    @property
    def seconds(self) -> float:
        """Of the longest save so far."""
        return self._saved.save_seconds

    def due(self, step: int) -> bool:
        """Every so many steps, but the last, which ``save_last`` saves; never two at once."""
        every = self._config.checkpoint.every
        passed = step // every > self._last_step // every
        return passed and not self.under_way and step < self._config.train.steps

    def save(self, state: TrainerState) -> None:
        """Copy what a checkpoint holds; ``Checkpoints`` writes it while the next steps run, or now."""
        state = replace(state, save_seconds=self.seconds)
        self._last_step = state.step
        self._event = state_event("checkpoint", state, self._buffer)
        if self._checkpoints.beside:
            self._metrics.log(state_event("snapshot", state, self._buffer))
        files: dict[str, Callable[[], Arrays]] = {
            BUFFER_FILE: self._buffer.snapshot(),
            PROMPTS_FILE: partial(dict, done=self._completed.to_array()),
        }
        self._under_way = self._checkpoints.save(
            state,
            self._learner,
            files,
            records=self._metrics.sync,  # what the checkpoint counts is on record before it is
        )
        self.note()

    def note(self) -> None:
        """Log the checkpoint under way once it is complete. Raises what kept it from that.

        A full disk postpones it instead: to end would lose what it would have held.
        """
        if not self._under_way or not self._under_way.done():
            return
        under_way, self._under_way = self._under_way, None
        try:
            self._saved = under_way.result()
        except DiskFullError as error:
            self._postpone(error)
        else:
            self._metrics.log(self._event)

    def _postpone(self, error: DiskFullError) -> None:
        self._no_room = error
        fault = str(error).partition(";")[0]
        log.warning("%s: training goes on, and the next checkpoint is tried in its turn", fault)
        self._metrics.log({**self._event, "event": "postponed", "fault": fault})

    def save_last(self, state: TrainerState, *, give_up: float) -> None:
        """Save ``state`` unless a checkpoint holds it; a full disk is retried until ``give_up``, monotonic s.

        Raises DiskFullError if it stays full.
        """
        self._wait()
        while replace(state, save_seconds=self.seconds) != self._saved:
            self._no_room = None
            self.save(state)
            self._wait()
            if self._no_room and time.monotonic() >= give_up:
                raise self._no_room
            if self._no_room:
                time.sleep(AGAIN_SECONDS)

    def _wait(self) -> None:
        """For the checkpoint under way. Raises TimeoutError past the deadline."""
        deadline = self._config.launch.timeout_seconds
        if self._under_way and not wait([self._under_way], deadline).done:
            raise TimeoutError(
                f"the checkpoint of step {self._event['step']} was not written within {deadline:g} s: see "
                "whether the file system of the run answers, or raise launch.timeout_seconds"
            )
        self.note()
