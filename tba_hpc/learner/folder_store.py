"""A key-value store in a shared folder, through which torch.distributed's ranks find each other.

torch's own FileStore appends all entries to one file under a lock. Some file systems have no locks. On
others, such as GlusterFS and NFS, each host caches the file's size: hosts then overwrite each other's
entries, and wait forever for what is lost. Here each entry is a file of its own, which appears complete and
never changes.
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
"""First and longest pause in seconds between checks for another rank's entry. Pauses double in between."""


class FolderStore(dist.Store):
    """A store in ``folder``, which must be empty at first.

    deadline: maximum wait for an entry, in seconds.
    """

    def __init__(self, folder: Path, *, deadline: float) -> None:
        super().__init__()
        self.folder = folder
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """Write the entry ``key``, which other ranks see only once it is complete."""
        self._publish(_name(key), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return its value. Raises torch's DistStoreError after the deadline."""
        self.wait([key])
        return (self.folder / _name(key)).read_bytes()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum of what all ranks have added so far, including ``amount``."""
        if amount:
            self._publish(f"{_name(key)}+{secrets.token_hex(8)}", str(amount).encode())
        added = [name for name in listing(self.folder) if name.startswith(f"{_name(key)}+")]
        return sum(int((self.folder / name).read_bytes()) for name in added)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether entries exist for all ``keys``."""
        return {_name(key) for key in keys} <= set(listing(self.folder))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until entries exist for all ``keys``.

        Raises torch's DistStoreError after ``timeout`` or, if that is None, after the store's deadline.
        """
        seconds = timeout.total_seconds() if timeout else self._deadline
        give_up, pause = time.monotonic() + seconds, FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > give_up:
                raise dist.DistStoreError(f"waited {seconds:g} s for {', '.join(keys)} in {self.folder}")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _publish(self, name: str, data: bytes) -> None:
        # Not flushed to disk, because no rank reads the entry after a crash of the machine.
        temporary = self.folder / f".{name}.{secrets.token_hex(4)}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)


def _name(key: str) -> str:
    return quote(key, safe="")  # contains no "+", which separates what is added to a counter
