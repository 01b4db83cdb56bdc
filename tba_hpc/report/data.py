"""Computes what ``tba`` status, summary, report and compare show of a run, from its growing files.

A run can be read at any time and on any machine that sees its directory. Memory is bounded: each metrics file
has a digest beside it (``report.digest``), and only the lines after the digest are read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba_hpc.config import is_elastic, value_text
from tba_hpc.core.ports import MEAN_REWARD
from tba_hpc.core.types import Split
from tba_hpc.core.wording import mean_reward, percent
from tba_hpc.report.alerts import Alert, alerts, failed_tracker
from tba_hpc.report.attempts import FAULTS, KILLED, Attempt, Event, attempts, held_seconds
from tba_hpc.report.curves import Curve, Trends
from tba_hpc.report.digest import SearcherDigest, Stretch, TrainerDigest, kept_digest
from tba_hpc.report.estimates import Estimate, mean, wilson
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, evaluations_on_disk, find_evaluation
from tba_hpc.run.history import EMPTY, ShardSize
from tba_hpc.run.metrics import MetricsTail, Record, number

SHORT_RUN_SECONDS = 600.0
"""Seconds for which a run outside a job must have held its machine before its ETTR is shown."""

MANY_SEARCHERS = 4
"""Largest number of searchers whose rates are shown one by one. For more searchers, the mean is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of what a run has done, for ``tba status``, ``tba audit`` and the summary.

    attempts: starts of the trainer's loop. steps: optimizer steps, each counted once. redone: steps that
    resumes had to do again. shards, trajectories, tokens: acknowledged ones, whether merged or not;
    ``tokens`` leaves out prompts, but includes what environments gave. duplicates: merged trajectories that
    the replay buffer rejected as duplicates. evicted: trajectories that the buffer evicted. dropped:
    trajectories left out of merges, because an earlier shard had answered their request.
    """

    attempts: int
    steps: int
    redone: int
    shards: int
    trajectories: int
    tokens: int
    duplicates: int
    evicted: int
    dropped: int


class RunData:
    """A run as of the last ``update``. Raises ConfigError if its config cannot be read.

    finished: whether nothing is left to do. trainer: digest of the trainer's metrics. searchers: digests of
    the searchers' metrics, by index. all_events: all events of the run, see ``run.events.log_event``.
    events: all events but those of ``tba submit``, after which a run may wait in the queue for days.
    evaluations: complete evaluations, by name.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.config = run.config()
        self.finished = False
        self.trainer = TrainerDigest()
        self.searchers: dict[int, SearcherDigest] = {}
        self.events: list[Event] = []
        self.all_events: list[Event] = []
        self.attempts: list[Attempt] = []
        self.evaluations: dict[str, Evaluation] = {}
        self._tails: dict[Path, MetricsTail] = {}

    @staticmethod
    def read(run: RunDir) -> RunData:
        """Read a run, in any state, as of now."""
        data = RunData(run)
        data.update()
        return data

    def update(self) -> None:
        """Read what was added to the run's files since the last update."""
        self.finished = self.run.finished
        self._read_events()
        self._read_trainer(self.run.metrics_file("trainer"))
        for index, path in self.run.searcher_files().items():
            self._read_searcher(index, path)
        self.evaluations = read_evaluations(self.run, self.evaluations)

    def _read_events(self) -> None:
        path = self.run.events_file
        lines = self._tails.setdefault(path, MetricsTail(path)).new()
        if new := [line for line in lines if _is_event(line)]:
            self.all_events += new
            self.events += [event for event in new if event["event"] not in ("prepared", "submitted")]
            self.attempts = attempts(self.events)
            if any(event["event"] == "changed" for event in new):
                self.config = self.run.config()

    def _read_trainer(self, path: Path) -> None:
        if path not in self._tails:
            self.trainer, self._tails[path] = kept_digest(path, self.trainer)
        for record in self._tails[path].records():
            self.trainer.take(record)

    def _read_searcher(self, index: int, path: Path) -> None:
        if path not in self._tails:
            digest, self._tails[path] = kept_digest(path, SearcherDigest(index))
            self.trends.add(digest.trends)
            digest.trends = self.trends  # later records are added to the run's trends
            self.searchers[index] = digest
        for record in self._tails[path].records():
            self.searchers[index].take(record)

    @property
    def trends(self) -> Trends:
        """Curves and counts of trainer and searchers; a step that was done twice counts once."""
        return self.trainer.trends

    @property
    def past_values(self) -> dict[str, list[Any]]:
        """Earlier values, oldest first, of each config key that a resume changed, by dotted key."""
        past: dict[str, list[Any]] = {}
        for event in self.events:
            if event["event"] == "changed":
                for key, (old, _) in event["keys"].items():
                    past.setdefault(key, []).append(old)
        return past

    @property
    def changed_files(self) -> list[str]:
        """Names of the files of the user's code that a resume changed, each once."""
        names = [name for event in self.events for name in event.get("files", ())]
        return list(dict.fromkeys(names))

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.trainer.step

    @property
    def step_seconds(self) -> Curve:
        """Curve of the wall time of steps, in seconds."""
        return self.trends.curves["time/step_seconds"]

    @property
    def newest(self) -> float:
        """Time of the newest record, unix seconds; 0 if there is none.

        Elastic searchers are left out, since they may go on for a while after the run has stopped.
        """
        own = [digest.last for index, digest in self.searchers.items() if not is_elastic(index)]
        return max(series([self.trainer.latest, *own], "time"), default=0.0)

    @property
    def faults(self) -> dict[str, int]:
        """Number of faults of each kind in FAULTS, 0 included."""
        met = Counter(str(event["event"]) for event in self.events)
        met["rebuilds"] = sum(digest.rebuilds.total for digest in self.searchers.values())
        met["damaged"] = len(self.trainer.damaged)
        met[KILLED] = sum(attempt.outcome == KILLED for attempt in self.attempts)
        return {kind: met[kind] for kind in FAULTS}

    @property
    def alerts(self) -> list[Alert]:
        """Current alerts, the worst first."""
        replay = self.run.replay_note.exists()
        found = alerts(self.trainer, self.config, list(self.evaluations.values()), replay=replay)
        unsent = failed_tracker(self.run, self.config)
        return [*found, unsent] if unsent else found

    def evaluated(self, split: Split) -> list[Evaluation]:
        """Return the complete evaluations of a split, ordered by step."""
        return [found for found in self.evaluations.values() if found.split == split]

    @property
    def graded(self) -> bool:
        """True if rewards are not just 0 and 1, so that their mean is the run's score.

        Rewards of training count as well, since all answers to held-out prompts may still get 0.
        """
        found = [evaluation for evaluation in self.evaluations.values() if evaluation.graded]
        return any(evaluation.is_graded for evaluation in found) or bool(found and self.trends.graded)

    @property
    def score_name(self) -> str:
        """Name of the run's score: mean reward, or the task's name for the share of correct answers."""
        known = next((evaluation.score_name for evaluation in self.evaluations.values()), "score")
        return MEAN_REWARD if self.graded else known

    def score(self, evaluation: Evaluation) -> Estimate:
        """Return the score of one evaluation (see ``score_name``) with its 95 % interval."""
        if self.graded and evaluation.graded:
            found = evaluation.results.values()  # empty for a validation
            ends = {"least": min(found), "most": max(found)} if found else {}
            return mean(evaluation.rewards, evaluation.squares, evaluation.graded, **ends)
        return wilson(evaluation.correct, evaluation.total)

    def show(self, score: float) -> str:
        """Format a score: mean rewards as they are, others in percent."""
        return mean_reward(score) if self.graded else percent(score)

    def counts(self) -> Counts:
        """Count what the run has done by now; this reads the shards that wait for their merge."""
        merged, trainer = self.trainer.merged, self.trainer
        waiting = [
            _size(path)
            for (searcher, index), path in self.run.shard_files().items()
            if index >= merged.cursors.get(searcher, 0)
        ]
        return Counts(
            attempts=trainer.starts,
            steps=trainer.step,
            redone=trainer.redone,
            shards=merged.shards + len(waiting),
            trajectories=merged.trajectories + sum(size.trajectories for size in waiting),
            tokens=merged.tokens + sum(size.tokens for size in waiting),
            duplicates=merged.duplicates,
            evicted=merged.evicted,
            dropped=merged.dropped,
        )

    @property
    def stretches(self) -> list[list[Stretch]]:
        """Spans of time that the trainer's records cover (see ``Stretch``), a list for each attempt."""
        until = [*(attempt.start for attempt in self.attempts[1:]), math.inf]
        return [
            [stretch for stretch in self.trainer.stretches if attempt.start <= stretch.start < end]
            for attempt, end in zip(self.attempts, until, strict=False)
        ]

    @property
    def ends(self) -> list[float]:
        """End of each attempt, in unix seconds; if none was noted, the time of the trainer's last record."""
        return [
            attempt.end or max([attempt.start, *(stretch.end for stretch in stretches)])
            for attempt, stretches in zip(self.attempts, self.stretches, strict=True)
        ]

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: time of steps, each counted once, ÷ time that machines were held.

        None before the first attempt, and if the ratio exceeds 1, because a clock was set back. Also None for
        a run of less than SHORT_RUN_SECONDS without a job, where the start of the engines would dominate.
        """
        held, useful = held_seconds(self.attempts, self.ends), self.step * (self.step_seconds.mean or 0.0)
        if held < SHORT_RUN_SECONDS and not any(attempt.job for attempt in self.attempts):
            return None
        return useful / held if held >= useful and held > 0 else None


def _size(path: Path) -> ShardSize:
    """Return the size of a shard file's contents; EMPTY if it cannot be read."""
    from tba_hpc.exchange.hdf5_shards import ShardError, read_shard  # importing h5py takes a moment

    try:
        trajectories = read_shard(path).trajectories
    except (OSError, ShardError):
        return EMPTY
    return ShardSize(len(trajectories), len(trajectories.completions.values))


def history_text(values: Iterable[object]) -> str:
    """Return the values that a config key had one after another: ``0.0005 → 0.0001``."""
    return " → ".join(map(value_text, values))


def _is_event(line: Event) -> bool:
    """Return whether a line of events.jsonl has the fields that all events have; other lines are ignored."""
    known = (("event", str), ("time", float | int), ("job", str), ("restarts", int))
    is_job = re.fullmatch(r"(\d+(_\d+)?)?", str(line.get("job"))) is not None  # 49_1 in an array
    return all(isinstance(line.get(name), kind) for name, kind in known) and is_job


def read_evaluations(run: RunDir, known: dict[str, Evaluation] | None = None) -> dict[str, Evaluation]:
    """Read the complete evaluations of a run, by name. Evaluations in ``known`` are not read again."""
    found = {
        name: (known or {}).get(name) or find_evaluation(run, split, step)
        for name, (split, step) in evaluations_on_disk(run).items()
    }
    return {name: evaluation for name, evaluation in sorted(found.items()) if evaluation and evaluation.total}


def series(records: Iterable[Record], name: str) -> list[float]:
    """Return the values of the scalar ``name`` in the records that have it."""
    return [value for record in records if (value := number(record, name)) is not None]
