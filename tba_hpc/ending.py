"""The end of a run: last weights, last evaluation, export, summary and report; or what a resume needs of it.

It must not know how the run was trained.
"""

from __future__ import annotations

import time

from tba_hpc.config import Config
from tba_hpc.ports import ExchangeError, Learner, TrainerExchange
from tba_hpc.report import summary
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import find_evaluation
from tba_hpc.trainer import Trainer

POLL_SECONDS = 0.1
"""Pause between two looks at the exchange and the evaluations."""


def end_run(
    run: RunDir,
    config: Config,
    *,
    finished: bool,
    trainer: Trainer,
    learner: Learner,
    exchange: TrainerExchange,
) -> None:
    """Let everybody go, and leave a summary and a report; a model, too, where the run is ``finished``.

    finished: whether the last step was taken; a resume has only this end left to do where a stop was asked
    for meanwhile. Shards that arrive from here on stay on disk beyond the checkpoint's cursors. Raises
    ExchangeError where the last evaluation does not come.
    """
    published = finished and publish_last(trainer)
    trainer.log_event("finished" if published else "stopped")
    if published:
        learner.export(run.export)
    learner.close()
    if published and not _evaluation_arrives(run, config, trainer):
        trainer.log_event("stopped")
    exchange.close()
    summary.write_summary(run, summary.summarise(run, config))
    from tba_hpc.report.page import write_report  # matplotlib costs every start a second

    write_report(run)


def publish_last(trainer: Trainer) -> bool:
    """Publish the last weights for the last evaluation; False when asked to stop before."""
    while not trainer.stopping:
        if trainer.publish(evaluate="test"):  # bounded by the exchange's deadline
            return True
        time.sleep(POLL_SECONDS)
    return False


def _evaluation_arrives(run: RunDir, config: Config, trainer: Trainer) -> bool:
    """Wait until every searcher's part of the last evaluation is on disk; False when asked to stop before."""
    patience, began = config.exchange.deadline_seconds, time.monotonic()
    while find_evaluation(run, "test", config.train.steps) is None:
        if trainer.stopping:
            return False
        if trainer.poll():
            began = time.monotonic()  # the others begin anew, with larger shares
        if time.monotonic() - began > patience:
            raise ExchangeError(
                f"the last evaluation is incomplete after {patience:g} s: see which "
                f"searcher's part is missing in {run.evaluations}, and its log; the model is in {run.export}"
            )
        time.sleep(POLL_SECONDS)
    return True
