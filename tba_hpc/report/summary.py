"""Computes the headline numbers of a run, writes them to ``summary.json``, and formats them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tba_hpc.config import TaskSection, TrainSection
from tba_hpc.core import schedules
from tba_hpc.core.ports import MEAN_REWARD, RIGHT_AND_ENDED
from tba_hpc.core.wording import count, duration, mean_reward, percent
from tba_hpc.report.curves import NAMED, SHOWN_REWARDS
from tba_hpc.report.data import Counts, RunData
from tba_hpc.report.estimates import Estimate
from tba_hpc.run.changes import export_notice
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.files import write_atomic
from tba_hpc.run.metric_table import CURVES
from tba_hpc.run.metrics import number

if TYPE_CHECKING:  # ranks do without rich
    from tba_hpc.report.tables import Cell


CORRECT = "correct answers"
"""Name shown for the share of correct answers if the score is the mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Counts):
    """Counts and results of a run. Results that were not measured are None.

    Scores and perplexities are of the held-out test split.

    pass_at_1_…: share of correct answers before and after training; None if no answer can be called correct,
    see ``Evaluation.tells_correct``. evaluated_step: step of the ``after`` figures; less than ``steps`` if
    the run then went on and was stopped. test_prompts: number of prompts.
    score_name: mean reward if rewards are not just 0 and 1, otherwise the task's name for the share of
    correct answers, such as pass@1 or win rate. score_before, score_after: this score, with 95 % intervals.
    unjudged_…: number of answers that could not be judged.
    ended_…: share of answers that are correct and were not cut off by a limit; None if pass_at_1_… is.
    perplexity_…: perplexity of the same answers under the policy of step ``perplexity_reference``; None
    without a reference model. perplexity_before is also None if another policy was the reference then.
    train_seconds: wall time of training over all attempts, including waits, but not the start of engines.
    ettr: effective training time ratio, see ``RunData.ettr``; None without a launcher's events.
    generated_tokens: tokens that all searchers sampled, including those of evaluations and lost work.
    searcher_seconds: seconds from first to last record, summed over all starts of all searchers.
    generated_per_searcher_second, goodput: generated tokens and acknowledged tokens, each divided by
    searcher_seconds.
    trainer_wait_share: see train/wait_share; of the last start only. publish_stall_seconds, seal_share,
    staleness, propagation_seconds: means over the run, see docs/metrics.md. figures: current values, by
    metric. rewards: current values of the first SHOWN_REWARDS named rewards, without weights; empty unless
    the task names several.
    skipped_steps: optimizer steps skipped, since loss or gradient norm was not finite. rejected: trajectories
    set aside, since they have no usable reward. changed_files: files of the user's code that a resume has
    changed, so that rewards and scores from before and after may not be comparable. alerts: sentences, the
    worst first.
    """

    pass_at_1_before: float | None
    pass_at_1_after: float | None
    evaluated_step: int | None
    test_prompts: int | None
    score_name: str
    score_before: Estimate | None
    score_after: Estimate | None
    unjudged_before: int
    unjudged_after: int
    ended_before: float | None
    ended_after: float | None
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_reference: int | None
    finished: bool
    seed: int
    train_seconds: float
    ettr: float | None
    generated_tokens: int
    searcher_seconds: float
    generated_per_searcher_second: float | None
    goodput: float | None
    trainer_wait_share: float | None
    publish_stall_seconds: float | None
    seal_share: float | None
    staleness: float | None
    propagation_seconds: float | None
    figures: dict[str, float | None]
    rewards: dict[str, float | None]
    skipped_steps: int
    rejected: int
    changed_files: list[str]
    alerts: list[str]

    @property
    def is_ahead(self) -> bool:
        """True if steps were done after the last evaluation of the test split."""
        return self.score_after is not None and (self.evaluated_step or 0) < self.steps


def summarise(run: RunDir) -> Summary:
    """Summarise a run from its files."""
    return summary_of(RunData.read(run))


def summary_of(data: RunData) -> Summary:
    """Summarise a run from data already read."""
    config, test, trends, counts = data.config, data.evaluated("test"), data.trends, data.counts()
    alike, searchers = same_reference(config.train, test), list(data.searchers.values())
    told = test if all(evaluation.tells_correct for evaluation in test) else []
    seconds = sum(searcher.seconds for searcher in searchers)
    generated = sum(searcher.tokens for searcher in searchers)
    return Summary(
        pass_at_1_before=told[0].score if told else None,
        pass_at_1_after=told[-1].score if len(told) > 1 else None,
        evaluated_step=test[-1].step if test else None,
        test_prompts=test[-1].total if test else None,
        score_name=data.score_name,
        score_before=data.score(test[0]) if test else None,
        score_after=data.score(test[-1]) if len(test) > 1 else None,
        unjudged_before=test[0].unjudged if test else 0,
        unjudged_after=test[-1].unjudged if len(test) > 1 else 0,
        ended_before=told[0].ended_score if told else None,
        ended_after=told[-1].ended_score if len(told) > 1 else None,
        perplexity_before=test[0].perplexity if alike and test[0] is alike[0] else None,
        perplexity_after=test[-1].perplexity if len(test) > 1 else None,
        perplexity_reference=reference_of(config.train, test[-1]) if alike else None,
        **asdict(counts),
        finished=data.finished,
        seed=config.run.seed,
        train_seconds=data.trainer.seconds,
        ettr=data.ettr,
        generated_tokens=generated,
        searcher_seconds=seconds,
        generated_per_searcher_second=generated / seconds if seconds else None,
        goodput=counts.tokens / seconds if seconds else None,
        trainer_wait_share=number(data.trainer.latest, "train/wait_share"),
        publish_stall_seconds=trends.curves["sync/publish_stall_seconds"].mean,
        seal_share=trends.curves["search/seal_share"].mean,
        staleness=trends.curves["staleness/mean"].mean,
        propagation_seconds=trends.curves["search/propagation_seconds"].mean,
        figures={name: trends.latest(name) for name in CURVES},
        rewards={
            name.removeprefix(NAMED): trends.latest(name) for name in trends.named_rewards[:SHOWN_REWARDS]
        },
        skipped_steps=trends.skipped,
        rejected=trends.rejected,
        changed_files=data.changed_files,
        alerts=[alert.sentence for alert in data.alerts],
    )


def reference_of(train: TrainSection, evaluation: Evaluation) -> int:
    """Return the step of the policy that is the reference in an evaluation's perplexity.

    An evaluation uses the reference with which the next step is trained. After a run's last step, the test
    split is evaluated with that step's reference.
    """
    last = evaluation.split == "test" and evaluation.step > 0
    return schedules.reference(train, evaluation.step - last)


def same_reference(train: TrainSection, found: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations whose perplexity has the same reference as that of the last one in ``found``."""
    return [
        evaluation
        for evaluation in found
        if evaluation.perplexity is not None
        and reference_of(train, evaluation) == reference_of(train, found[-1])
    ]


def policy_name(step: int) -> str:
    """Name the policy of ``step`` in words; step 0 is the initial model."""
    return f"policy of step {step}" if step else "initial model"


def write_summary(run: RunDir, summary: Summary) -> None:
    """Write ``summary.json``."""
    write_atomic(run.summary, json.dumps(asdict(summary), indent=2) + "\n")


# --- Shown ---


def summary_rows(summary: Summary) -> dict[str, Cell]:
    """Return the headline figures of a run, keyed by title, for ``print_summary`` and ``tba compare``."""
    figures, name = summary.figures, summary.score_name
    after = score_words(summary, summary.score_after, summary.unjudged_after)
    return {
        f"{name} before": score_words(summary, summary.score_before, summary.unjudged_before),
        f"{name} after": f"{after}, at step {summary.evaluated_step}" if summary.is_ahead else after,
        **({CORRECT: correct} if (correct := correct_answers(summary)) else {}),
        "held-out prompts": summary.test_prompts,
        "perplexity before": summary.perplexity_before,
        "perplexity after": summary.perplexity_after,
        "reward": figures["search/reward"],
        **{f"reward {name}": value for name, value in summary.rewards.items()},
        "KL": figures["search/kl"],
        "entropy": figures["search/entropy"],
        "tokens per completion": figures["search/length"],
        "mean staleness": summary.staleness,
        "optimizer steps": summary.steps,
        "training time": duration(summary.train_seconds),
        **({} if summary.ettr is None else {"ETTR": f"{percent(summary.ettr)} of the time, waits included"}),
        "trainer wait": _wait_words(summary),
        "trajectories": summary.trajectories,
        "tokens acknowledged": summary.tokens,
        "tokens per searcher-second": summary.goodput,
        "tokens generated": summary.generated_tokens,
        "generated per searcher-second": summary.generated_per_searcher_second,
        "alerts": len(summary.alerts),
    }


def _wait_words(summary: Summary) -> str | None:
    """Format the share of time that the trainer waited, which is that of the last start only."""
    if summary.trainer_wait_share is None:
        return None
    only = ", since the last start" if summary.attempts > 1 else ""
    return percent(summary.trainer_wait_share) + only


def print_summary(run: RunDir, summary: Summary, *, as_json: bool = False) -> None:
    """Print a run's results, alerts and the paths of its files. as_json: print summary.json instead."""
    if as_json:
        print(json.dumps(asdict(summary), indent=2))
        return
    from tba_hpc.report.tables import print_lines

    if summary.steps or summary.score_before:
        print_lines({**summary_rows(summary), **_optional_rows(summary)}.items())
    else:
        done = count(summary.trajectories, "trajectory")
        print(f"no optimizer step was done, so there are no results yet; acknowledged: {done}")
    places = {"model": run.export, "report": run.report, "summary": run.summary}
    lines: list[tuple[str, Cell]] = [("alert", sentence) for sentence in summary.alerts]
    lines += [(name, str(path)) for name, path in places.items() if path.exists()]
    if run.export.exists():
        where = shlex.quote(str(run.path))
        lines.append(("try it", f"tba ask {where} {_question(run.config().task)}"))
        if older := export_notice(run):
            lines.append(("its age", older))
        if summary.score_after is None:  # as in a replay
            lines.append(("its score", f"tba evaluate {where}"))
    print_lines(lines)


def _question(task: TaskSection) -> str:
    """Return a question for ``tba ask`` in shell syntax; for conversations, the data file's first row."""
    file = task.test_file or task.train_file
    return f'"$(grep -m 1 {{ {shlex.quote(file)})"' if task.has_conversations and file else '"…"'


def _optional_rows(summary: Summary) -> dict[str, Cell]:
    """Return the figures that only some runs have, keyed by title."""
    under = summary.perplexity_reference
    optional: dict[str, Cell] = {
        RIGHT_AND_ENDED: right_and_ended(summary),
        "reference of the perplexity": None if under is None else policy_name(under),
        "turns per completion": turns if (turns := summary.figures["search/turns"] or 1) > 1 else None,
        "failed tool calls": None
        if (failed := summary.figures["search/failed_calls"]) is None
        else percent(failed),
        "skipped steps": summary.skipped_steps or None,
        "rejected trajectories": summary.rejected or None,
        "dropped trajectories": summary.dropped or None,
        "code changed": changed_code(summary) or None,
    }
    return {name: value for name, value in optional.items() if value is not None}


def right_and_ended(summary: Summary) -> str | None:
    """Format the shares of answers that are correct and were not cut off, before and after training.

    Returns None if no correct answer was cut off, so that these shares are the scores.
    """
    ended = summary.ended_before, summary.ended_after
    if not summary.test_prompts or ended == (summary.pass_at_1_before, summary.pass_at_1_after):
        return None
    return " → ".join(percent(share) for share in ended if share is not None)


def changed_code(summary: Summary) -> str:
    """Return a phrase about files of the user's code that a resume changed; "" for none."""
    names = ", ".join(summary.changed_files)
    return f"{names} at a resume; figures from before are of the old code" if names else ""


def correct_answers(summary: Summary) -> str | None:
    """Format the shares of correct answers before and after training; None if they are the score or all 0."""
    shares = [share for share in (summary.pass_at_1_before, summary.pass_at_1_after) if share is not None]
    beside = summary.score_name == MEAN_REWARD and any(shares)
    return " → ".join(map(percent, shares)) if beside else None


def score_words(summary: Summary, score: Estimate | None, unjudged: int) -> str | None:
    """Format a score with its 95 % interval and the number of answers not judged; None stays None."""
    if score is None:
        return None
    aside = f", {count(unjudged, 'answer')} not judged" if unjudged else ""
    if summary.score_name == MEAN_REWARD:
        value, low, high = map(mean_reward, (score.value, score.low, score.high))
        between = "all equal" if score.low == score.high else f"{low} … {high}"
        return f"{value} ({between}){aside}"
    return f"{percent(score.value)} ({100 * score.low:.1f} … {100 * score.high:.1f}){aside}"
