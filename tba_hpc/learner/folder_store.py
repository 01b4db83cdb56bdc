"""The store through which torch.distributed's ranks find each other, as files of a shared folder.

torch's own FileStore appends to one file under a lock. File systems without locks refuse that. Where hosts
cache a file's size (GlusterFS, NFS), they overwrite each other's entries and wait forever. Here each entry is
a file, which is complete once it is visible, and never changes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from tba_hpc.run.files import listing

FIRST_PAUSE, LAST_PAUSE = 0.02, 0.32
"""Shortest and longest pause between two looks for an entry of another rank, which may be starting, s."""


class FolderStore(dist.Store):
    """Store of keys and values in ``folder``, at first empty. deadline: longest wait for a key, s."""

    def __init__(self, folder: Path, *, deadline: float) -> None:
        super().__init__()
        self.folder = folder
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """Make an entry visible."""
        self._publish(_name(key), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return it."""
        self.wait([key])
        return (self.folder / _name(key)).read_bytes()

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return the sum of what all ranks have added so far, this amount included."""
        if amount:
            self._publish(f"{_name(key)}+{secrets.token_hex(8)}", str(amount).encode())
        added = [name for name in listing(self.folder) if name.startswith(f"{_name(key)}+")]
        return sum(int((self.folder / name).read_bytes()) for name in added)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all entries are there."""
        return {_name(key) for key in keys} <= set(listing(self.folder))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all entries. Raises torch's DistStoreError after ``timeout``, by default the deadline."""
        seconds = timeout.total_seconds() if timeout else self._deadline
        give_up, pause = time.monotonic() + seconds, FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > give_up:
                raise dist.DistStoreError(f"waited {seconds:g} s for {', '.join(keys)} in {self.folder}")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _publish(self, name: str, data: bytes) -> None:
        # Not flushed: after a crash of the machine nobody reads it.
        temporary = self.folder / f".{name}.{secrets.token_hex(4)}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)


def _name(key: str) -> str:
    return quote(key, safe="")  # never a "+"
