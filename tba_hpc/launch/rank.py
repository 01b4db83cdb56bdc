"""Sets up a process as a rank: placement, log, GPUs, stop flag, and notes about errors.

A note is a file with one sentence, from which the launcher learns why a rank has ended (``run/notes.py``).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from tba_hpc.config import Config, ConfigError
from tba_hpc.core.ports import EngineError, ExchangeError
from tba_hpc.core.types import Role
from tba_hpc.core.wording import drop_lost_output, first_few, printable
from tba_hpc.exchange.hdf5_shards import ShardError
from tba_hpc.launch.placement import Placement, refuse_index
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.notes import Exit, Kind, rank_name, redirect_output, write_note
from tba_hpc.run.owners import owned
from tba_hpc.run.signals import StopFlag
from tba_hpc.run.stacks import watched_inside, write_stacks_to_log

log = logging.getLogger(__name__)

REFUSALS = (ConfigError, StateError, ShardError, DiskFullError)
"""Errors that only the user can fix. Their message is a sentence that says how."""

THREADS_END_SECONDS = 30.0
"""Seconds that threads of the user's code may still run after a rank has finished its work."""

FAILURES = (EngineError, ExchangeError, OSError)
"""Errors that may not occur again after a restart. Their message is a sentence."""


@contextmanager
def as_rank(run: RunDir, role: Role, index: int | None) -> Iterator[tuple[Config, Placement]]:
    """Run the block as a rank of the run, with its own log and GPUs.

    index: number of the rank within its role, or None if MPI or srun numbers the ranks. An error of REFUSALS
    or FAILURES leaves a note for the launcher and raises SystemExit with the exit status. A process that is
    no rank of the run, because its index is wrong or another process owns the rank, leaves no note.
    """
    with noting(run, role, index):
        config = run.config()
    refuse_index(config, role, index)
    with noting(run, role, index):
        placement = Placement.join(config, role, index)
    with owned(run, rank_name(role, placement.index)):
        redirect_output(run, role, placement.index)
        write_stacks_to_log()
        with explained(partial(write_note, run, role, placement.index)):
            placement.choose_gpus()
            yield config, placement
            if placement.mpi:
                placement.mpi.leave()


def noting(run: RunDir, role: Role, index: int | None) -> AbstractContextManager[None]:
    """Return a context manager that leaves a note about an error of its block, if there is a launcher.

    It is used before a rank knows its index. If ``index`` is None, the note names rank 0.
    """
    started = ATTEMPT in os.environ
    return explained(partial(write_note, run, role, index or 0)) if started else nullcontext()


@contextmanager
def stoppable() -> Iterator[StopFlag]:
    """Provide a StopFlag, which signals set. Every rank but the leading trainer runs its loop in this block.

    After a signal to stop, an ExchangeError ends the block quietly: ranks that do not answer have stopped.
    """
    end_imports()
    with StopFlag() as stop, watched_inside():
        try:
            yield stop
        except ExchangeError as error:
            if not stop.is_set:
                raise
            log.info("stopped on request, as other ranks were: %s", error)


@contextmanager
def leaving() -> Iterator[None]:
    """Run the block; end the process THREADS_END_SECONDS later if threads of the user's code still run.

    If the block succeeds, MPI is finalized first, which only the main thread may do.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        if status == 0 and (world := sys.modules.get("tba_hpc.exchange.mpi_world")):
            world.finalize()
        timer = threading.Timer(THREADS_END_SECONDS, _leave, [status])
        timer.daemon = True
        timer.start()


def _leave(status: int) -> None:
    main = threading.main_thread()
    stay = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    log.warning("this rank ends although threads of the user's code still run: %s", first_few(stay))
    drop_lost_output()
    os._exit(status)


def end_imports() -> None:
    """Turn on the garbage collector, which ``cli`` has turned off, for objects created from now on."""
    gc.freeze()
    gc.enable()


@contextmanager
def explained(note: Callable[[str, Kind], None] | None = None) -> Iterator[None]:
    """Run the block; turn an error of REFUSALS or FAILURES into a sentence, and raise SystemExit.

    The exit status is Exit.REFUSED or Exit.FAILED. note: function that passes the sentence and its kind to
    the launcher, which decides whether to restart the ranks; None, for a process that is no rank of the run,
    prints the sentence.
    """
    try:
        yield
    except (*REFUSALS, *FAILURES) as error:
        refused = isinstance(error, REFUSALS)
        if note or not refused:
            log.exception("this rank ends")
        if note:
            note(str(error), "refused" if refused else "failed")
        else:
            print(f"tba: {printable(str(error))}", file=sys.stderr)
        drop_lost_output()
        raise SystemExit(Exit.REFUSED if refused else Exit.FAILED) from None
