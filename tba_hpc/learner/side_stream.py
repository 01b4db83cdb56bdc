"""GPU stream in which copies to the host run beside the GPU's other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """Copies from this process's GPU for which the host does not wait; without a GPU they are made at once.

    own: whether copies get a stream of their own. If not, they wait their turn in the current stream, and
    what they copy may be freed once they are queued. cuda: torch.cuda; None: torch's, if it has a GPU.
    """

    def __init__(self, *, own: bool, cuda: Any = None) -> None:
        self._cuda: Any = cuda or (torch.cuda if torch.cuda.is_available() else None)
        self._own = self._cuda.Stream() if self._cuda and own else None
        self._copied: Any = None  # event after the last copies

    @property
    def works(self) -> bool:
        """True if there is a GPU, so that copies may continue after the block of ``copying``."""
        return self._cuda is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue the copies that the block makes; they begin once the GPU has done all earlier work."""
        if not self.works:
            yield
            return
        current = self._cuda.current_stream()
        stream = self._own or current
        stream.wait_stream(current)
        with self._cuda.stream(stream):
            yield
            self._copied = stream.record_event(self._cuda.Event(blocking=True))  # waiting takes no core

    def hold_changes(self) -> None:
        """Make later work of the current stream, such as a change of the weights, wait for the copies."""
        if self._copied:
            self._cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait, in any thread, until the copies are made."""
        if self._copied:
            self._copied.synchronize()
