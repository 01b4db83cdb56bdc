"""A stream of a GPU for copies to the host that run beside its other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """Copies from this process's GPU that the host does not wait for; without a GPU they are made at once.

    own: whether copies get a stream of their own. If not, they take their turn in the current stream, so that
    what is copied may be freed after it. cuda: torch.cuda; None: torch's, if it has a GPU.
    """

    def __init__(self, *, own: bool, cuda: Any = None) -> None:
        self._cuda: Any = cuda or (torch.cuda if torch.cuda.is_available() else None)
        self._own = self._cuda.Stream() if self._cuda and own else None
        self._copied: Any = None  # event after the last copies

    @property
    def works(self) -> bool:
        """True if there is a GPU, so that copies may go on after ``copying``."""
        return self._cuda is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Make the copies in the block, of what the GPU has computed when they begin."""
        if not self.works:
            yield
            return
        current = self._cuda.current_stream()
        stream = self._own or current
        stream.wait_stream(current)
        with self._cuda.stream(stream):
            yield
            self._copied = stream.record_event(self._cuda.Event(blocking=True))  # its waiter takes no core

    def hold_changes(self) -> None:
        """Have the GPU do nothing further, such as change what is copied, before the copies are made."""
        if self._copied:
            self._cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait, in any thread, until the copies are made."""
        if self._copied:
            self._copied.synchronize()
