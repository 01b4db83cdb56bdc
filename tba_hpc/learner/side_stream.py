"""A CUDA stream for copies to host memory that run at the same time as the GPU's other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """Asynchronous copies from this process's GPU; without a GPU, copies are synchronous.

    own: use a separate stream. Otherwise copies are queued in the current stream, and a tensor may be freed
    as soon as its copy is queued. cuda: torch.cuda, or an object like it; None: torch.cuda if there is a GPU.
    """

    def __init__(self, *, own: bool, cuda: Any = None) -> None:
        self._cuda: Any = cuda or (torch.cuda if torch.cuda.is_available() else None)
        self._own = self._cuda.Stream() if self._cuda and own else None
        self._copied: Any = None  # event that follows the last copies

    @property
    def is_asynchronous(self) -> bool:
        """True if there is a GPU, so that copies may still be in progress after the block of ``copying``."""
        return self._cuda is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue the copies made within the block. They begin once the GPU has finished all earlier work."""
        if not self.is_asynchronous:
            yield
            return
        current = self._cuda.current_stream()
        stream = self._own or current
        stream.wait_stream(current)
        with self._cuda.stream(stream):
            yield
            self._copied = stream.record_event(self._cuda.Event(blocking=True))  # a waiting thread sleeps

    def delay_changes(self) -> None:
        """Make later work of the current stream, such as an optimizer step, wait for the copies."""
        if self._copied:
            self._cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copies are finished. Any thread may call this."""
        if self._copied:
            self._copied.synchronize()
