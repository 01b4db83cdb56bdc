"""Surroundings of a rank's loop: place, log, GPUs and stop flag. Errors become sentences for the launcher."""

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
from tba_hpc.core.wording import first_few, printable
from tba_hpc.exchange.hdf5_shards import ShardError
from tba_hpc.launch.placement import Placement, refuse_index
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.notes import Exit, Kind, rank_name, redirect_output, write_note
from tba_hpc.run.owners import owned
from tba_hpc.run.signals import StopFlag
from tba_hpc.run.stacks import write_stacks_to_log

log = logging.getLogger(__name__)

REFUSALS = (ConfigError, StateError, ShardError, DiskFullError)
"""Errors that only the user can fix; the message is a sentence that says how."""

THREADS_END_SECONDS = 30.0
"""Seconds that threads of a user's code have to end once a rank has nothing left to do."""

FAILURES = (EngineError, ExchangeError, OSError)
"""Errors that another start may not meet again; the message is a sentence."""


@contextmanager
def as_rank(run: RunDir, role: Role, index: int | None) -> Iterator[tuple[Config, Placement]]:
    """Run the block as a rank, with its own log and GPUs. An error ends it with a note for the launcher.

    A surplus rank, or one that no launcher has started, leaves no note, because the notes belong to the run's
    own ranks.
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
    """Leave notes about errors for the launcher, if there is one, even before the rank knows its index."""
    started = ATTEMPT in os.environ
    return explained(partial(write_note, run, role, index or 0)) if started else nullcontext()


@contextmanager
def stoppable() -> Iterator[StopFlag]:
    """Provide a StopFlag to the block, the work of a rank other than the leader.

    After a stop request, missing ranks are not an error: they were still starting and had nothing to save.
    """
    end_imports()
    with StopFlag() as stop:
        try:
            yield stop
        except ExchangeError as error:
            if not stop.is_set:
                raise
            log.info("asked to stop, and so were the others: %s", error)


@contextmanager
def leaving() -> Iterator[None]:
    """End this process THREADS_END_SECONDS after the block if threads of the user's code still run.

    MPI is finalized before that, since it has to be in the main thread.
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
    log.warning("this rank ends, though threads of the user's code go on: %s", first_few(stay))
    sys.stdout.flush()
    os._exit(status)


def end_imports() -> None:
    """Re-enable the garbage collector, which ``cli`` disables, for objects allocated from now on."""
    gc.freeze()
    gc.enable()


@contextmanager
def explained(note: Callable[[str, Kind], None] | None = None) -> Iterator[None]:
    """Turn an error of the block into a sentence and an exit status.

    note: passes the sentence to the launcher, which decides by its kind whether to start the ranks again.
    None: the sentence is printed, since a note would seem to come from the run's own ranks.
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
        raise SystemExit(Exit.REFUSED if refused else Exit.FAILED) from None
