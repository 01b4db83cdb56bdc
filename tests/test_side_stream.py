"""Copies of weights beside the next step, on simulated streams that copy late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import Any

import numpy as np
import pytest
from learner_worker import BETA, LEARNING_RATE, learner_of, make_batch, make_config, play, shared_window
from safetensors.torch import load_file
from tiny_models import make_random_model
from torch import Tensor

from tba_hpc.config import Config
from tba_hpc.core.types import WeightSlot
from tba_hpc.learner import deepspeed_learner
from tba_hpc.learner.adapter import tensor_in
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.side_stream import SideStream

PATIENCE = 60.0


class Stream:
    """Stream whose work waits for its turn. It notes what happens, in order."""

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.late: list[Callable[[], object]] = []
        self.done = Flag()

    def wait_stream(self, other: Stream) -> None:
        """Do nothing, since work of the other stream is done at once."""

    def record_event(self, event: Event) -> Event:
        event.stream = self
        return event

    def wait_event(self, event: Event) -> None:
        """Do the other stream's work now, not earlier."""
        self.order.append("wait")
        for work in event.stream.late:
            work()
        event.stream.late.clear()
        event.stream.done.set()


class Event:
    """The end of a stream's work so far."""

    stream: Stream

    def synchronize(self) -> None:
        assert self.stream.done.wait(PATIENCE), "nobody has waited for the copies"


class Cuda:
    """Stand-in for torch.cuda. The current stream works at once, other streams when they are waited for."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.current = self.first = Stream(self.order)
        self.first.done.set()

    def Stream(self) -> Stream:
        return Stream(self.order)

    def Event(self, *, blocking: bool) -> Event:
        assert blocking
        return Event()

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.first

    def tensor_in(self, out: np.ndarray, slot: WeightSlot) -> Copied:
        return Copied(self, tensor_in(out, slot))


class Copied:
    """Tensor whose copies are queued in the current stream."""

    def __init__(self, cuda: Cuda, tensor: Tensor) -> None:
        self.cuda = cuda
        self.tensor = tensor

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        if self.cuda.current is self.cuda.first:
            self._copy(source)
        else:
            self.cuda.current.late.append(partial(self._copy, source))

    def _copy(self, source: Tensor) -> None:
        self.cuda.order.append("copy")
        self.tensor.copy_(source)


@pytest.mark.engine
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (1, 2), (2, 2), (2, 3)])
def test_a_step_changes_no_weights_that_are_still_copied(tmp_path: Path, ranks: int, zero_stage: int) -> None:
    """Late copies take the weights from before the step; nothing is sent before all ranks have copied."""
    model = make_random_model(tmp_path / "model", tied=False)
    config = make_config(model, ranks=ranks, zero_stage=zero_stage)
    play(_publish_and_step, tmp_path, config, ranks=ranks)
    for rank in range(ranks):
        order = (tmp_path / f"order-{rank}").read_text().split()
        copies = order.count("copy")
        late = ["wait", *["copy"] * copies, "step"]
        at_once = [*["copy"] * copies, "wait", "step"]  # of what ZeRO-3 has gathered, and then frees
        assert copies > 3 and order == (at_once if zero_stage == 3 else late)


def _publish_and_step(folder: Path, rank: int, config: Config) -> None:
    cuda, learner = Cuda(), learner_of(folder, rank, config)
    learner._side = SideStream(own=config.train.zero_stage < 3, cuda=cuda)
    deepspeed_learner.tensor_in = cuda.tensor_in
    take = learner._engine.step

    def step(*arguments: Any) -> None:
        cuda.order.append("step")
        take(*arguments)

    learner._engine.step = step
    if rank == 0:
        _lead(folder, config, learner)
    else:
        learner.follow(partial(shared_window, folder / "window", learner.layout))
    (folder / f"order-{rank}").write_text(" ".join(cuda.order))


def _lead(folder: Path, config: Config, learner: DeepSpeedLearner) -> None:
    (folder / "window").write_bytes(b"\xff" * learner.layout.nbytes)
    out = shared_window(folder / "window", learner.layout)
    written = learner.write_weights(out)
    if config.train.zero_stage < 3:
        assert (out == 0xFF).all() and not learner._copied.done()
    learner.step(make_batch(1), learning_rate=LEARNING_RATE, beta=BETA)
    written()
    before = load_file(folder / "model" / "model.safetensors")
    for slot in learner.layout.slots:
        assert tensor_in(out, slot).equal(before[slot.name]), slot.name
    if config.train.zero_stage < 3:
        now = learner._parameters[learner.layout.slots[0].name]
        assert not now.equal(before[learner.layout.slots[0].name])
    learner.close()
