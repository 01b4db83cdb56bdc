"""Runs ``tba track`` in a child process of the trainer, whose failure does not stop training.

It ends when its input does, so it never outlives the trainer.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tba_hpc.config import Config
from tba_hpc.run.directory import RunDir

log = logging.getLogger(__name__)

END_SECONDS = 60.0
"""Longest wait for what is left to send once training has ended."""

LOG = "tracker.log"

FOLLOW = ["-P", "-m", "tba_hpc", "track", "--until-eof"]


@contextmanager
def tracked(run: RunDir, config: Config) -> Iterator[None]:
    """Follow the run while the block runs, if its config names a tracker. One warning if that fails."""
    if not config.track.wanted:
        yield
        return
    path = run.attempt / LOG
    process = None
    with suppress(OSError), path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *FOLLOW, str(run.path)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives the signal that ends the others, to send the rest
        )
    try:
        yield
    finally:
        if process is None or not _ends(process):
            log.warning("the trackers of %s do not have all of it: see %s, then tba track", run.path, path)


def _ends(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(END_SECONDS) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def until_eof(seconds: float) -> bool:
    """Wait so long for the end of this process's input; whether it has not come."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return not (ready and not os.read(sys.stdin.fileno(), 1))
