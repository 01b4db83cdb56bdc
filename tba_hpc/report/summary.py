"""The headline numbers of a run, from its metrics and evaluations: what ``summary.json`` holds.

Reads only what the ranks wrote, so a summary can be taken at any time, on any machine, and in constant
memory: of each metrics file its digest, and the lines after that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tba_hpc.config import Config, TrainSection
from tba_hpc.core import schedules
from tba_hpc.report.alerts import alerts
from tba_hpc.report.curves import Curve, Histograms, Trends
from tba_hpc.report.digest import (
    WAITS,
    Merged,
    Sealed,
    SearcherDigest,
    Spread,
    TrainerDigest,
    read_digest,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, evaluations_on_disk, find_evaluation
from tba_hpc.run.events import read_events
from tba_hpc.run.files import listing, write_atomic
from tba_hpc.run.metric_table import CURVES
from tba_hpc.run.metrics import Record, number

MANY_SEARCHERS = 4
"""Above this number the searchers are shown together: their rates by the mean, their curves as a band."""

SizeOf = Callable[[Path], Sealed]
"""Reads what a shard file holds: a seal just before a kill may be in no metrics."""


def unknown_size(_: Path) -> Sealed:
    """Of a shard that nobody can read here."""
    return Sealed(0, 0)


@dataclass(slots=True)
class Counts:
    """What a run has done, as ``tba status``, ``tba audit`` and the summary count it.

    attempts: starts of the trainer's loop. steps: of the surviving history; redone: those that resumes took
    back. shards, trajectories, tokens: acknowledged, which no accident takes back: merged by the surviving
    history, or sealed beyond it; tokens are of completions. duplicates, evicted: what the replay buffer did
    with those merged; dropped: those of them that it did not get, as they came too late or once more.
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

    @classmethod
    def of(cls, trainer: TrainerDigest) -> Counts:
        """Those of the trainer alone; ``add_waiting`` counts what it has not merged."""
        merged = trainer.merged
        return cls(
            attempts=trainer.starts,
            steps=trainer.step,
            redone=trainer.redone,
            shards=merged.shards,
            trajectories=merged.trajectories,
            tokens=merged.tokens,
            duplicates=merged.duplicates,
            evicted=merged.evicted,
            dropped=merged.dropped,
        )

    def add_waiting(
        self, run: RunDir, searcher: int, seals: Mapping[int, Sealed], merged: Merged, size_of: SizeOf
    ) -> None:
        """Count the shards of a searcher that the trainer has not merged.

        seals: those that its metrics tell of. size_of: of one that they do not.
        """
        cursor = merged.cursors.get(searcher, 0)
        waiting = {index: sealed for index, sealed in seals.items() if index >= cursor}
        for index in _unlogged(run, searcher, cursor, waiting):
            waiting[index] = size_of(run.shard_file(searcher, index))
        self.shards += len(waiting)
        self.trajectories += sum(sealed.trajectories for sealed in waiting.values())
        self.tokens += sum(sealed.tokens for sealed in waiting.values())


def _unlogged(run: RunDir, searcher: int, cursor: int, logged: Mapping[int, Sealed]) -> Iterator[int]:
    """Shards on disk from ``cursor`` on that their searcher did not live to log."""
    end = max(logged, default=cursor - 1) + 1
    between = (index for index in range(cursor, end) if index not in logged)
    for index in itertools.chain(between, itertools.count(end)):
        if run.shard_file(searcher, index).exists():
            yield index
        elif index >= end:
            return


@dataclass(frozen=True, slots=True)
class SearcherData:
    """What is shown of a searcher alone.

    seconds: for how long it was there. tokens: generated. rates: tokens per second by unix second; rate:
    their mean while it generated.
    """

    seconds: float
    tokens: int
    rates: Curve
    rate: float | None
    rebuilds: int
    rejected: int

    @classmethod
    def of(cls, digest: SearcherDigest) -> SearcherData:
        """From its metrics."""
        rebuilds, rejected = digest.rebuilds.total, digest.trends.rejected
        rate = digest.at_work.mean
        return cls(digest.seconds, digest.tokens, digest.rates, rate, rebuilds, rejected)


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything a report is made of.

    finished: whether nothing is left to do. counts: see ``Counts``. rewards, waits: over all searchers.
    evaluations: the complete ones, by split and step. events: see ``run.events.log_event``.
    """

    finished: bool
    trainer: TrainerDigest
    counts: Counts
    searchers: dict[int, SearcherData] = field(default_factory=dict)
    rewards: Histograms = field(default_factory=Histograms)
    waits: dict[str, Spread] = field(default_factory=lambda: {name: Spread() for name in WAITS})
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, run: RunDir, size_of: SizeOf = unknown_size) -> RunData:
        """Read a run directory at any moment, one file after the other."""
        finished = run.finished
        trainer, _ = read_digest(run.metrics_file("trainer"), TrainerDigest())
        data = cls(
            finished,
            trainer,
            Counts.of(trainer),
            evaluations=list(read_evaluations(run).values()),
            events=read_events(run),
        )
        for path in searcher_files(run):
            digest, _ = read_digest(path, SearcherDigest(index_of(path)))
            data._add(digest)
            data.counts.add_waiting(run, digest.index, digest.seals, trainer.merged, size_of)
        return data

    def _add(self, digest: SearcherDigest) -> None:
        self.searchers[digest.index] = SearcherData.of(digest)
        self.trends.add(digest.trends)
        self.rewards.add(digest.rewards)
        for name, spread in digest.waits.items():
            self.waits[name].add(spread)

    @property
    def trends(self) -> Trends:
        """Its figures as curves; steps that were done twice count once."""
        return self.trainer.trends

    def test(self) -> list[Evaluation]:
        """Evaluations on the held-out split, by step."""
        return [evaluation for evaluation in self.evaluations if evaluation.split == "test"]


def searcher_files(run: RunDir) -> list[Path]:
    """Metrics files of the searchers, by index."""
    names = sorted(listing(run.metrics)) if run.metrics.is_dir() else []
    return [run.metrics / name for name in names if name.startswith("searcher-") and name.endswith(".jsonl")]


def index_of(path: Path) -> int:
    """The 3 of ``searcher-0003.jsonl``."""
    return int(path.stem.rpartition("-")[2])


def read_evaluations(run: RunDir, known: Mapping[str, Evaluation] | None = None) -> dict[str, Evaluation]:
    """All evaluations of which every part is there, by name; those in ``known`` are not read again."""
    found = {
        name: (known or {}).get(name) or find_evaluation(run, split, step)
        for name, (split, step) in evaluations_on_disk(run).items()
    }
    return {name: evaluation for name, evaluation in sorted(found.items()) if evaluation and evaluation.total}


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. pass_at_1 is on the held-out test split; None if it was not measured.

    score_name: what the task calls that score, such as pass@1 or win rate. perplexity: of the same answers
    under the policy of step ``perplexity_reference``; None, too, without a reference model, and before where
    another policy was the reference then.
    train_seconds: wall time of the trainer's loop, over all attempts, waits and evaluations included.
    steps, attempts, redone, shards, trajectories, tokens, duplicates, evicted, dropped: see ``Counts``.
    generated_tokens: by all searchers, for evaluations and by those that were killed, too.
    searcher_tokens_per_second: of all searchers together, while they ran.
    searcher_seconds: for which searchers were there, added up; goodput: acknowledged tokens per such second.
    publish_stall_seconds, seal_share, staleness, propagation_seconds: means over the run.
    figures: the last values of these metrics. skipped_steps, rejected: optimizer steps not taken,
    trajectories set aside. alerts: sentences, the worst first.
    """

    pass_at_1_before: float | None
    pass_at_1_after: float | None
    test_prompts: int | None
    score_name: str
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_reference: int | None
    steps: int
    finished: bool
    attempts: int
    redone: int
    seed: int
    train_seconds: float
    shards: int
    trajectories: int
    tokens: int
    duplicates: int
    evicted: int
    dropped: int
    generated_tokens: int
    searcher_tokens_per_second: float | None
    searcher_seconds: float
    goodput: float | None
    trainer_wait_share: float | None
    publish_stall_seconds: float | None
    seal_share: float | None
    staleness: float | None
    propagation_seconds: float | None
    figures: dict[str, float | None]
    skipped_steps: int
    rejected: int
    alerts: list[str]

    @property
    def gain(self) -> float | None:
        """Score after minus before."""
        if self.pass_at_1_before is None or self.pass_at_1_after is None:
            return None
        return self.pass_at_1_after - self.pass_at_1_before


def summarise(run: RunDir, config: Config, size_of: SizeOf = unknown_size) -> Summary:
    """Take the summary of a run from its files."""
    return summary_of(RunData.read(run, size_of), config)


def summary_of(data: RunData, config: Config) -> Summary:
    """The same from files already read."""
    test, trainer, trends = data.test(), data.trainer, data.trends
    alike = same_reference(config.train, test)
    reference = reference_of(config.train, test[-1]) if alike else None
    return Summary(
        pass_at_1_before=test[0].score if test else None,
        pass_at_1_after=test[-1].score if len(test) > 1 else None,
        test_prompts=test[-1].total if test else None,
        score_name=score_name_of(data.evaluations),
        perplexity_before=test[0].perplexity if test[:1] == alike[:1] and alike else None,
        perplexity_after=test[-1].perplexity if len(test) > 1 else None,
        perplexity_reference=reference,
        **asdict(data.counts),
        finished=data.finished,
        seed=config.run.seed,
        train_seconds=trainer.seconds,
        generated_tokens=sum(searcher.tokens for searcher in data.searchers.values()),
        searcher_tokens_per_second=_throughput(data),
        searcher_seconds=(offered := sum(searcher.seconds for searcher in data.searchers.values())),
        goodput=data.counts.tokens / offered if offered else None,
        trainer_wait_share=number(trainer.latest, "train/wait_share"),
        publish_stall_seconds=trends.curves["sync/publish_stall_seconds"].mean,
        seal_share=data.waits["search/seal_share"].mean,
        staleness=trends.curves["staleness/mean"].mean,
        propagation_seconds=data.waits["search/propagation_seconds"].mean,
        figures={name: trends.latest(name) for name in CURVES},
        skipped_steps=trends.skipped,
        rejected=trends.rejected,
        alerts=[alert.sentence for alert in alerts(trends, config, data.evaluations)],
    )


def _throughput(data: RunData) -> float | None:
    """Sum over searchers of the mean of their tokens per second while they generated."""
    known = [searcher.rate for searcher in data.searchers.values() if searcher.rate is not None]
    return sum(known) if known else None


def score_name_of(evaluations: Iterable[Evaluation]) -> str:
    """What the task calls its score, as far as an evaluation has said so."""
    return next((evaluation.score_name for evaluation in evaluations), "score")


def reference_of(train: TrainSection, evaluation: Evaluation) -> int:
    """The policy, by optimizer steps, under which the perplexity of an evaluation is: π_ref of its step.

    The weights that a last step made are still evaluated under the reference which that step had; held-out
    prompts are those of the first and of last steps, of which a run that went on has several.
    """
    last = evaluation.split == "test" and evaluation.step > 0
    return schedules.reference(train, evaluation.step - last)


def same_reference(train: TrainSection, found: Sequence[Evaluation]) -> list[Evaluation]:
    """Those whose perplexity can stand beside that of the last: it is under the same reference."""
    return [
        evaluation
        for evaluation in found
        if evaluation.perplexity is not None
        and reference_of(train, evaluation) == reference_of(train, found[-1])
    ]


def policy_name(step: int) -> str:
    """What a reference is called."""
    return f"policy of step {step}" if step else "initial model"


def write_summary(run: RunDir, summary: Summary) -> None:
    """Write ``summary.json``."""
    write_atomic(run.summary, json.dumps(asdict(summary), indent=2) + "\n")


def series(records: Iterable[Record], name: str) -> list[float]:
    """The values of a scalar, if it is there."""
    return [value for record in records if (value := number(record, name)) is not None]
