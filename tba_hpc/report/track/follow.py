"""Sends a run's figures to its trackers: once, continuously, or in a child process of the leading trainer.

RUN/track records which figures have been sent. A failure of the child does not stop training. The child ends
when its standard input is closed, and thus with the trainer.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

from tba_hpc.config import Config, ConfigError
from tba_hpc.core.ports import RIGHT_AND_ENDED
from tba_hpc.report.track.sinks import Point, Sink, TensorBoardSink, WandbSink, lacks_login, wandb_mode
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import evaluations_on_disk, find_evaluation
from tba_hpc.run.files import make_folder, write_atomic
from tba_hpc.run.metrics import MetricsTail, Record, number
from tba_hpc.run.owners import owned

log = logging.getLogger(__name__)

PAUSE_SECONDS = 10.0
"""Pause between two readings of the run's files."""

OWNER = "tracker"
"""Name owned (``run.owners``) by the process that follows the run, so that no second process does."""

END_SECONDS = 60.0
"""Longest wait for the remaining figures to be sent after training has ended."""

LOG = "tracker.log"

FOLLOW = ["-P", "-m", "tba_hpc", "track", "--until-eof"]


def require_trackers(config: Config) -> None:
    """Raise ConfigError if the library of a wanted tracker is not installed."""
    if config.track.wandb and find_spec("wandb") is None:
        raise ConfigError("track.wandb needs the package wandb: pip install 'wandb==0.31.0'")


def require_login(
    config: Config, environment: Mapping[str, str] = os.environ, python: str = sys.executable
) -> None:
    """Raise ConfigError if W&B is wanted but has no login, see ``lacks_login``."""
    if config.track.wandb and lacks_login(environment, python):
        raise ConfigError(
            f"track.wandb={config.track.wandb} needs a login to W&B, and there is none here: type wandb "
            "login, export WANDB_API_KEY, or export WANDB_MODE=offline and upload later with wandb sync"
        )


def follow(run: RunDir, config: Config, *, goes_on: Callable[[float], bool] = lambda _: False) -> None:
    """Send all figures of a run, and then new ones until the run is finished or ``goes_on`` returns False.

    goes_on: waits for the given seconds and returns whether to read again. Raises ConfigError if the config
    names no tracker, OwnedError if another process follows the run.
    """
    if not config.track.wanted:
        raise ConfigError(
            f"{run.path} names no tracker: add --set track.tensorboard=true, or --set track.wandb=PROJECT"
        )
    require_trackers(config)
    make_folder(run.track)
    with owned(run, OWNER):
        followers = [_Follower(run, name, config) for name in config.track.wanted]
        more = True
        while more:
            more = goes_on(PAUSE_SECONDS)  # waits first, so that what came meanwhile is sent below
            ended = [follower.look() for follower in followers]
            run.tracker_failed.unlink(missing_ok=True)
            more = more and not (all(ended) and run.finished)
        for follower in followers:
            follower.sink.close()


class _Follower:
    """A tracker with its own record of what was sent to it, since a tracker may be added at any time."""

    def __init__(self, run: RunDir, name: str, config: Config) -> None:
        project = config.track.wandb if name == "wandb" else None
        self._file = run.track / f"{name}{f'-{wandb_mode()}' if project else ''}.json"
        state: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._news = News(run, state)
        self.sink: Sink = WandbSink(run, config, project, state) if project else TensorBoardSink(run)

    def look(self) -> bool:
        """Send what is new; return whether the trainer has stopped or finished."""
        self.sink.log(self._news.look())
        write_atomic(self._file, json.dumps({**self._news.state(), **self.sink.state()}))
        return self._news.ended


def until_interrupted(seconds: float) -> bool:
    """Wait and return True; return False after Ctrl-C."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True


# --- What is new ---


class News:
    """Reader of what is new in a run, in units that a tracker takes (``Point``).

    state: what ``state()`` of an earlier reader returned, a dict for JSON; empty: read from the start.
    """

    def __init__(self, run: RunDir, state: Mapping[str, Any]) -> None:
        self._run = run
        self._places: dict[str, int] = dict(state.get("places", {}))
        self._evaluated: set[str] = set(state.get("evaluated", ()))
        self.ended = False
        """True if the trainer's last record says that it has stopped or finished."""

    def state(self) -> dict[str, Any]:
        """Return what has been read: bytes of each metrics file, and names of evaluations."""
        return {"places": self._places, "evaluated": sorted(self._evaluated)}

    def look(self) -> list[Point]:
        """Return what is new: the trainer's steps, means over all searchers, and complete evaluations."""
        points = list(self._of_trainer())
        fresh: dict[int, list[Record]] = defaultdict(list)
        for path in self._run.searcher_files().values():
            for record in self._records(path):
                if "search/version" in record:
                    fresh[int(number(record, "search/version", 0))].append(record)
        points += [Point(version, _means(records)) for version, records in sorted(fresh.items())]
        return points + self._of_evaluations()

    def _records(self, path: Path) -> Iterator[Record]:
        tail = MetricsTail(path, place=self._places.get(path.stem, 0))
        yield from tail.records()
        self._places[path.stem] = tail.place

    def _of_trainer(self) -> Iterator[Point]:
        for record in self._records(self._run.metrics_file("trainer")):
            step, event = int(number(record, "step", 0)), record.get("event")
            if event is None:
                yield Point(step, _scalars(record), time=number(record, "time"))
            elif event == "resumed":
                yield Point(step, again=True)
            self.ended = event in ("stopped", "finished")

    def _of_evaluations(self) -> list[Point]:
        points = []
        for name, (split, step) in sorted(evaluations_on_disk(self._run).items(), key=lambda one: one[1][1]):
            if name in self._evaluated or not (found := find_evaluation(self._run, split, step)):
                continue
            self._evaluated.add(name)
            figures = {f"{split}/perplexity": found.perplexity}
            if found.tells_correct:
                figures[f"{split}/{found.score_name}"] = found.score
                figures[f"{split}/{RIGHT_AND_ENDED}"] = found.ended_score
            figures[f"{split}/reward"] = found.rewards / found.graded if found.graded else None
            known = {key: value for key, value in figures.items() if value is not None}
            points.append(Point(step, known, {split: found.answers} if found.answers else {}))
        return points


def _scalars(record: Record) -> dict[str, float]:
    values = {name: number(record, name) for name in record if "/" in name}
    return {name: value for name, value in values.items() if value is not None}


def _means(records: Iterable[Record]) -> dict[str, float]:
    """Return the mean of each figure over the records that have it."""
    values = defaultdict[str, list[float]](list)
    for record in records:
        for name, value in _scalars(record).items():
            values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}


# --- Beside the trainer ---


@contextmanager
def tracked(run: RunDir, config: Config) -> Iterator[None]:
    """Run ``follow`` in a child process during the block, if a tracker is configured; warn if that fails."""
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
            start_new_session=True,  # the signals that end ranks must not end it
        )
    watch = Thread(target=_note_failure, args=(run, process), daemon=True)
    watch.start()
    try:
        yield
    finally:
        if process:
            _end(process)
        watch.join()


def _note_failure(run: RunDir, process: subprocess.Popen[bytes] | None) -> None:
    """Wait for the child to end; if it fails, log a warning, and leave a file for the run's alerts."""
    if process and process.wait() == 0:
        return
    log.warning("some figures of %s are not sent: see %s, then run tba track", run.path, run.attempt / LOG)
    with suppress(OSError):
        run.tracker_failed.touch()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the child's input, and wait for the child to send the remaining figures and end."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def until_eof(seconds: float) -> bool:
    """Wait up to ``seconds`` for the end of standard input; return False if it has come."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return not (ready and not os.read(sys.stdin.fileno(), 1))
