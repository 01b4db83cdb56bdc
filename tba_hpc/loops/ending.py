"""The end of a run: last weights, last evaluation, export, summary and report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tba_hpc.config import Config, LaunchSection
from tba_hpc.core.ports import ExchangeError, Learner, TrainerExchange
from tba_hpc.loops.trainer import Trainer
from tba_hpc.report.summary import summarise, write_summary
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import find_evaluation, missing_parts
from tba_hpc.run.metrics import MetricsTail, number

POLL_SECONDS = 0.1
"""Pause between two looks at the exchange and the evaluations."""

NEWS_SECONDS = 5.0
"""Pause between two looks at what the searchers write, which are a file each."""

NAMED = 5
"""Most searchers that an error names."""


def end_run(
    run: RunDir,
    config: Config,
    *,
    finished: bool,
    trainer: Trainer,
    learner: Learner,
    exchange: TrainerExchange,
) -> None:
    """Let all ranks go, and leave a summary; a model and a report, too, if the run is ``finished``.

    finished: whether the last step was taken; if a stop is asked for now, a resume has only this end left to
    do. Once nothing is left to train or to measure the run is marked as finished; after a kill between that
    and the report the next ``tba run`` or ``tba report`` makes it. Shards that arrive from here on stay on
    disk beyond the checkpoint's cursors. Raises ExchangeError if the last evaluation does not come.
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
    else:  # drawing takes longer than a job may have to stop: the launcher draws
        write_summary(run, summarise(run))


def publish_last(trainer: Trainer) -> bool:
    """Publish the last weights for the last evaluation; False when asked to stop before."""
    while not trainer.stopping:
        if trainer.publish(evaluate="test"):  # bounded by the exchange's deadline
            return True
        time.sleep(POLL_SECONDS)
    return False


def _evaluation_arrives(run: RunDir, config: Config, trainer: Trainer) -> bool:
    """Wait until every searcher's part of the last evaluation is on disk; False when asked to stop before.

    Raises ExchangeError if for a whole timeout none of those whose part is missing has done anything.
    """
    step, timeout = config.train.steps, config.launch.timeout_seconds
    watch = Watch(run, config.launch, step)
    while find_evaluation(run, "test", step) is None:
        if trainer.stopping:
            return False
        trainer.poll()
        if watch.silence > timeout:
            raise ExchangeError(
                f"the last evaluation is incomplete, and {watch.missing_words} generated nothing for "
                f"{timeout:g} s: {watch.remedy}; the model is in {run.export}, and the same "
                "run, started again, evaluates only what is missing"
            )
        time.sleep(POLL_SECONDS)
    return True


@dataclass
class Watch:
    """When a searcher whose part of the last evaluation is missing was last heard of.

    News is a part that has come, or a record of tokens generated. If all searchers are elastic one of them
    evaluates, whichever it is.
    """

    run: RunDir
    launch: LaunchSection
    step: int
    missing: list[int] = field(default_factory=list)
    _tails: dict[int, MetricsTail] = field(default_factory=dict)
    _heard: float = field(default_factory=time.monotonic)
    _looked: float = -NEWS_SECONDS

    @property
    def silence(self) -> float:
        """Seconds without news."""
        now = time.monotonic()
        if now - self._looked >= NEWS_SECONDS:
            self._looked = now
            before, self.missing = (
                self.missing,
                missing_parts(self.run, "test", self.step, self.launch.searchers or 1),
            )
            waited_for = self.missing if self.launch.searchers else self.launch.elastic_searchers
            at_work = [self._is_at_work(searcher) for searcher in waited_for]  # of all, lest old news wait
            if self.missing != before or any(at_work):
                self._heard = now
        return now - self._heard

    def _is_at_work(self, searcher: int) -> bool:
        """Whether a searcher has generated anything since the last look."""
        if searcher not in self._tails:
            path = self.run.metrics_file("searcher", searcher)
            self._tails[searcher] = MetricsTail.from_now(path)
        records = self._tails[searcher].new()
        return any(number(record, "search/tokens", 0.0) > 0 for record in records)

    @property
    def remedy(self) -> str:
        """What to look at, or to start."""
        if self.launch.searchers:
            return f"see the log in {self.run.attempt}"
        return f"if no searcher is at work, add one: tba search {self.run.path}"

    @property
    def missing_words(self) -> str:
        """Who they are."""
        if not self.launch.searchers:
            return "elastic searchers"
        named = ", ".join(map(str, self.missing[:NAMED]))
        more = f" and {len(self.missing) - NAMED} more" if len(self.missing) > NAMED else ""
        return f"searcher{'' if len(self.missing) == 1 else 's'} {named}{more}"
