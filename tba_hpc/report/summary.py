"""The headline numbers of a run, from its metrics and evaluations: what ``summary.json`` holds.

Reads what the ranks wrote and nothing else, so a summary can be taken at any time, on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from tba_hpc import schedules
from tba_hpc.config import Config, TrainSection
from tba_hpc.metrics import Record, number, read_metrics, step_records
from tba_hpc.report.curves import OF_FRESH, OF_STEPS, History
from tba_hpc.report.worries import worries
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, find_evaluation
from tba_hpc.run.events import read_events
from tba_hpc.run.files import write_atomic
from tba_hpc.types import Split

MANY_SEARCHERS = 4
"""Above this number the searchers are shown together: their rates by the mean, their curves as a band."""

PHASES = ("started", "resumed", "stopped", "finished")
"""Events of the trainer of which the last tells how the run stands; others may come after it."""


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything a report is made of.

    trainer: all records of the trainer; steps: those of optimizer steps, a repeated step once;
    searchers: all records per searcher; evaluations: the complete ones, by split and step;
    events: what befell the run, see ``run.events.log_event``.
    """

    trainer: list[Record]
    steps: list[Record]
    searchers: dict[int, list[Record]]
    evaluations: list[Evaluation]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, run: RunDir) -> RunData:
        """Read a run directory at any moment."""
        trainer = read_metrics(run.metrics_file("trainer"))
        return cls(
            trainer,
            step_records(trainer),
            {index_of(path): read_metrics(path) for path in searcher_files(run)},
            list(read_evaluations(run).values()),
            read_events(run),
        )

    @property
    def attempts(self) -> list[list[Record]]:
        """The trainer's records, split where the run was started or resumed."""
        parts: list[list[Record]] = []
        for record in self.trainer:
            if not parts or record.get("event") in ("started", "resumed"):
                parts.append([])
            parts[-1].append(record)
        return parts

    @property
    def history(self) -> History:
        """Its figures as curves; steps that were done twice count once."""
        history = History()
        events = [record for record in self.trainer if "event" in record]
        for record in sorted([*events, *self.steps], key=lambda record: number(record, "time", 0.0)):
            history.take(record)
        for searcher, records in self.searchers.items():
            for record in records:
                history.take_search(searcher, record)
        return history

    def test(self) -> list[Evaluation]:
        """Evaluations on the held-out split, by step."""
        return [evaluation for evaluation in self.evaluations if evaluation.split == "test"]


def searcher_files(run: RunDir) -> list[Path]:
    """Metrics files of the searchers, by index."""
    return sorted(run.metrics.glob("searcher-*.jsonl"))


def index_of(path: Path) -> int:
    """The 3 of ``searcher-0003.jsonl``."""
    return int(path.stem.rpartition("-")[2])


def read_evaluations(run: RunDir, known: Mapping[str, Evaluation] | None = None) -> dict[str, Evaluation]:
    """All evaluations of which every part is there, by folder; those in ``known`` are not read again."""
    folders = run.evaluations.glob("*-step-*")
    found = {folder.name: (known or {}).get(folder.name) or _evaluation_in(run, folder) for folder in folders}
    return {name: evaluation for name, evaluation in sorted(found.items()) if evaluation and evaluation.total}


def _evaluation_in(run: RunDir, folder: Path) -> Evaluation | None:
    """The evaluation of a folder, whatever number of searchers made it; None while a part is missing."""
    split, _, step = folder.name.partition("-step-")
    return find_evaluation(run, cast(Split, split), int(step))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. pass_at_1 is on the held-out test split; None where it was not measured.

    score_name: what the task calls that score, such as pass@1 or win rate. perplexity: of the same answers
    under the policy of step ``perplexity_reference``; None, too, without a reference model, and before where
    another policy was the reference then.
    train_seconds: wall time of the trainer's loop, over all attempts, waits and evaluations included.
    trajectories, tokens: generated for training or evaluation by all searchers.
    searcher_tokens_per_second: of all searchers together, while they ran.
    publish_stall_seconds, seal_share, staleness, propagation_seconds: means over the run.
    figures: what the metrics of these names were at last. skipped_steps, rejected: optimizer steps not taken,
    trajectories set aside. worries: sentences, the worst first.
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
    seed: int
    train_seconds: float
    trajectories: int
    tokens: int
    searcher_tokens_per_second: float | None
    trainer_wait_share: float | None
    publish_stall_seconds: float | None
    seal_share: float | None
    staleness: float | None
    propagation_seconds: float | None
    figures: dict[str, float | None]
    skipped_steps: int
    rejected: int
    worries: list[str]

    @property
    def gain(self) -> float | None:
        """Score after minus before."""
        if self.pass_at_1_before is None or self.pass_at_1_after is None:
            return None
        return self.pass_at_1_after - self.pass_at_1_before


def summarise(run: RunDir, config: Config) -> Summary:
    """Take the summary of a run from its files."""
    return summary_of(RunData.read(run), config)


def summary_of(data: RunData, config: Config) -> Summary:
    """The same from files already read."""
    test, steps, history = data.test(), data.steps, data.history
    alike = same_reference(config.train, test)
    reference = reference_of(config.train, test[-1]) if alike else None
    records = [record for searcher in data.searchers.values() for record in searcher]
    last = steps[-1] if steps else {}
    phases = [record["event"] for record in data.trainer if record.get("event") in PHASES]
    return Summary(
        pass_at_1_before=test[0].score if test else None,
        pass_at_1_after=test[-1].score if len(test) > 1 else None,
        test_prompts=test[-1].total if test else None,
        score_name=score_name_of(data.evaluations),
        perplexity_before=test[0].perplexity if test[:1] == alike[:1] and alike else None,
        perplexity_after=test[-1].perplexity if len(test) > 1 else None,
        perplexity_reference=reference,
        steps=int(number(last, "step", 0)),
        finished=phases[-1:] == ["finished"],
        attempts=len(data.attempts),
        seed=config.run.seed,
        train_seconds=sum(seconds_of(attempt) for attempt in data.attempts),
        trajectories=int(sum(series(records, "search/trajectories"))),
        tokens=int(sum(series(records, "search/tokens"))),
        searcher_tokens_per_second=_throughput(data),
        trainer_wait_share=number(last, "train/wait_share"),
        publish_stall_seconds=mean(series(steps, "sync/publish_stall_seconds")),
        seal_share=mean(series(records, "search/seal_share")),
        staleness=mean(series(steps, "staleness/mean")),
        propagation_seconds=mean(series(records, "search/propagation_seconds")),
        figures={name: history.latest(name) for name in (*OF_FRESH, *OF_STEPS)},
        skipped_steps=history.skipped,
        rejected=history.rejected,
        worries=[worry.sentence for worry in worries(history, config, data.evaluations)],
    )


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
    """The values of a scalar, where it is there."""
    return [value for record in records if (value := number(record, name)) is not None]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


def seconds_of(records: Sequence[Record]) -> float:
    """Time from the first to the last of an attempt's records, s."""
    times = series(records, "time")
    return times[-1] - times[0] if times else 0.0


def _throughput(data: RunData) -> float | None:
    """Sum over searchers of the mean of their tokens per second while they generated."""
    rates = [
        mean([rate for rate in series(records, "search/tokens_per_second") if rate])
        for records in data.searchers.values()
    ]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
