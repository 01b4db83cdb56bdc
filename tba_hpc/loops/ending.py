"""End of a run: last weights, last evaluation, export, summary and report."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tba_hpc.config import Config, LaunchSection
from tba_hpc.core.ports import ExchangeError, Learner, TrainerExchange
from tba_hpc.core.wording import first_few
from tba_hpc.loops.trainer import Trainer
from tba_hpc.report.summary import summarise, write_summary
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import find_evaluation, missing_parts
from tba_hpc.run.metrics import MetricsTail, Record, number

EVALUATION_CHECK_SECONDS = 0.1
"""Pause between two checks of the exchange and the evaluations."""

NEWS_SECONDS = 5.0
"""Pause between two checks of the searchers' metrics files, s."""


def end_run(
    run: RunDir,
    config: Config,
    *,
    finished: bool,
    trainer: Trainer,
    learner: Learner,
    exchange: TrainerExchange,
) -> None:
    """Release all ranks and write a summary; write a model and a report, too, if the run is ``finished``.

    finished: whether the last step was taken. If a stop is requested now, a resume only repeats this ending.
    The run is marked as finished once nothing is left to train or to evaluate. If it is killed between that
    and the report, the next ``tba run`` or ``tba report`` writes the report. After a stop the launcher does.
    Shards that arrive from now on stay on disk, unmerged.

    Raises ExchangeError if the last evaluation does not arrive.
    """
    published = finished and publish_last(trainer)
    trainer.log_event("finished" if published else "stopped")
    if published:
        learner.export(run.export)
    learner.close()
    complete = published and _evaluation_arrives(run, config, trainer)
    if complete:
        run.mark_finished()
    elif published:
        trainer.log_event("stopped")
    exchange.close()
    if complete:
        from tba_hpc.report.page import write_report  # matplotlib costs every start a second

        write_report(run)
    else:  # drawing may take longer than a job has left to stop, so the launcher draws
        write_summary(run, summarise(run))


def publish_last(trainer: Trainer) -> bool:
    """Publish the last weights for the last evaluation; False if a stop is requested first."""
    while not trainer.stopping:
        if trainer.publish_if_due():  # bounded by the exchange's deadline
            return True
        time.sleep(EVALUATION_CHECK_SECONDS)
    return False


def _evaluation_arrives(run: RunDir, config: Config, trainer: Trainer) -> bool:
    """Wait until every searcher's part of the last evaluation is on disk; False if a stop is requested first.

    Raises ExchangeError if no searcher whose part is missing has generated anything for a whole timeout.
    """
    step, timeout = config.train.steps, config.launch.timeout_seconds
    news = _news(run, config.launch, step)
    heard = looked = time.monotonic()
    while find_evaluation(run, "test", step) is None:
        if trainer.stopping:
            return False
        trainer.poll()
        now = time.monotonic()
        if now - looked >= NEWS_SECONDS:
            looked = now
            heard = now if next(news) else heard
        if now - heard > timeout:
            who, remedy = _missing(run, config.launch, step)
            raise ExchangeError(
                f"the last evaluation is incomplete, and {who} generated nothing for {timeout:g} s: "
                f"{remedy}; the model is in {run.export}, and the same run, started again, evaluates only "
                "what is missing"
            )
        time.sleep(EVALUATION_CHECK_SECONDS)
    return True


def _news(run: RunDir, launch: LaunchSection, step: int) -> Iterator[bool]:
    """Yield whether there was progress since the last check.

    Progress is a part of the evaluation, or a completion of a searcher whose part is missing. If all
    searchers are elastic, any of them may be the one that evaluates.
    """
    tails: dict[int, MetricsTail] = {}
    missing: list[int] = []
    while True:
        before, missing = missing, missing_parts(run, "test", step, launch.searchers or 1)
        records: list[Record] = []
        for searcher in missing if launch.searchers else launch.elastic_searchers:
            if searcher not in tails:
                tails[searcher] = MetricsTail.from_now(run.metrics_file("searcher", searcher))
            records += tails[searcher].new()
        yield missing != before or any(number(record, "search/tokens", 0.0) > 0 for record in records)


def _missing(run: RunDir, launch: LaunchSection, step: int) -> tuple[str, str]:
    """Return whose part is missing, and a remedy."""
    if not launch.searchers:
        return "elastic searchers", f"if no searcher is at work, add one: tba search {run.path}"
    places = missing_parts(run, "test", step, launch.searchers)
    searchers = "searcher" if len(places) == 1 else "searchers"
    return f"{searchers} {first_few(places)}", f"see the log in {run.attempt}"
