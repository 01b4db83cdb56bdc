"""End of a run: last weights, last evaluation, export, summary and report."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tba_hpc.config import Config, LaunchSection
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.wording import first_few
from tba_hpc.loops.trainer import Trainer
from tba_hpc.report.summary import summarise, write_summary
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import find_evaluation, missing_parts
from tba_hpc.run.files import write_atomic
from tba_hpc.run.metrics import MetricsTail, Record, number

EVALUATION_CHECK_SECONDS = 0.1
"""Pause between two checks of the exchange and of the last evaluation, in seconds."""

NEWS_SECONDS = 5.0
"""Pause between two checks of the searchers' metrics for progress, in seconds."""


def end_run(run: RunDir, config: Config, trainer: Trainer, *, finished: bool) -> None:
    """Release all ranks and write a summary; if the run is ``finished``, also evaluate, export and report.

    finished: whether the last step was taken. Raises ExchangeError if the last evaluation does not arrive.

    The run is marked as finished once it is trained, exported and evaluated. If a stop is requested between
    the last step and this mark, a resume only repeats the ending, and the launcher writes the report. If the
    process is killed between mark and report, the next ``tba run`` or ``tba report`` writes the report.
    Shards that arrive during the ending stay on disk, unmerged.
    """
    learner, exchange = trainer.learner, trainer.exchange
    published = finished and publish_last(trainer)
    trainer.log_event("finished" if published else "stopped")
    if published:
        learner.export(run.export)
        write_atomic(run.export_step, f"{trainer.step}\n")
    learner.close()
    complete = published and _evaluation_arrives(run, config, trainer)
    if complete:
        run.mark_finished()
    elif published:
        trainer.log_event("stopped")
    exchange.close()
    if complete:
        from tba_hpc.report.page import write_report  # imports matplotlib, which takes a second

        write_report(run)
    else:  # a report may take longer than the job has left, so the launcher draws it
        write_summary(run, summarise(run))


def publish_last(trainer: Trainer) -> bool:
    """Publish the last weights, for the last evaluation. Returns False if a stop is requested first."""
    while not trainer.stopping:
        if trainer.publish_if_due():  # bounded by the exchange's deadline
            return True
        time.sleep(EVALUATION_CHECK_SECONDS)
    return False


def _evaluation_arrives(run: RunDir, config: Config, trainer: Trainer) -> bool:
    """Wait until all parts of the last evaluation are on disk. Returns False if a stop is requested first.

    Raises ExchangeError after too long a time without progress, as ``_news`` defines it. It is longer if all
    searchers are elastic: when they are preempted, it may take a while until others come.
    """
    step, launch = config.train.steps, config.launch
    timeout = launch.timeout_seconds if launch.searchers else launch.elastic_seconds
    news = _news(run, launch, step)
    heard = looked = time.monotonic()
    while find_evaluation(run, "test", step) is None:
        if trainer.stopping:
            return False
        trainer.exchange.gather()
        now = time.monotonic()
        if now - looked >= NEWS_SECONDS:
            looked = now
            heard = now if next(news) else heard
        if now - heard > timeout:
            who, remedy = _missing(run, launch, step)
            raise ExchangeError(
                f"the last evaluation is incomplete, and {who} generated nothing for {timeout:g} s: "
                f"{remedy}; the model is in {run.export}, and the same run, started again, evaluates only "
                "what is missing"
            )
        time.sleep(EVALUATION_CHECK_SECONDS)
    return True


def _news(run: RunDir, launch: LaunchSection, step: int) -> Iterator[bool]:
    """Yield, at each ``next``, whether there was progress since the previous ``next``.

    step: step of the last evaluation's weights. Progress is a new part of the evaluation, or tokens from a
    searcher whose part is missing. If all searchers are elastic, any of them may be the one that evaluates.
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
    """Return the names of the searchers whose parts of the last evaluation are missing, and a remedy.

    Both are phrases for an error message.
    """
    if not launch.searchers:
        return "elastic searchers", f"if no searcher is at work, add one: tba search {run.path}"
    places = missing_parts(run, "test", step, launch.searchers)
    searchers = "searcher" if len(places) == 1 else "searchers"
    return f"{searchers} {first_few(places)}", f"see the log in {run.attempt}"
