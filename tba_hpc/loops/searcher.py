"""The searcher's loop: generates completions without pause, has them scored and sealed, and offers shards.

This module must not know how completions are generated, how shards travel, or how many ranks there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tba_hpc.core.ports import Generator, SearcherExchange
from tba_hpc.core.types import Group, Publication, Request
from tba_hpc.loops.online_evaluation import OnlineEvaluator
from tba_hpc.loops.scorer import Scored, Scorer
from tba_hpc.loops.search_log import Sums
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.metrics import Clock, MetricsWriter

PENDING_SHARDS = 64
"""Default of ``Searcher.pending_shards``."""

IDLE_SECONDS = 0.005
"""Pause of the loop while the engine has nothing to generate, in seconds."""


@dataclass(kw_only=True)
class Searcher:
    """One searcher's loop, which keeps one engine busy.

    requests: the training requests that this searcher issues, in order. report: function that receives this
    searcher's part of an evaluation. stop_asked: function that returns whether a signal has asked this
    process to stop. sequences: requests are submitted while fewer completions than this are in flight.
    pending_shards: number of offered and unmerged shards at which generation pauses. log_seconds: interval
    of lines of metrics, in seconds. weights_in_use: function called each time the engine has loaded weights.
    """

    generator: Generator
    scorer: Scorer
    exchange: SearcherExchange
    requests: Iterator[Request]
    evaluator: OnlineEvaluator
    report: Callable[[Evaluation], None]
    metrics: MetricsWriter
    stop_asked: Callable[[], bool]
    sequences: int
    pending_shards: int = PENDING_SHARDS
    log_seconds: float = 1.0
    weights_in_use: Callable[[], None] = lambda: None
    _upcoming: Request | None = None  # taken from ``requests``, and not issued yet
    _publication: Publication | None = None  # the one that came with the last weights given to the engine
    _awaited: Publication | None = None  # the same, until these weights are in use
    _busy_seconds: float = 0.0  # the engine's, as far as metric records have counted them
    _rejected: int = 0  # completions set aside so far
    _stage: str | None = None  # last logged stage of the engine's start
    _tally: Sums = field(default_factory=Sums)  # since the last metric record
    _clock: Clock = field(default_factory=Clock)
    _logged: float = field(default_factory=time.monotonic)  # time of the last metric record

    def run(self) -> None:
        """Generate until the trainer ends the run.

        Generation pauses until the first weights arrive, while ``pending_shards`` shards are unmerged, and
        when all requests that the last weights allow (the rollout budget) have been issued. The trainer's
        next publication ends each of these pauses. Generation also pauses while the scorer is ``full``.
        """
        while not self.exchange.closed:
            self._take_weights()
            self._refill()
            for group in self._generate():
                self._deliver(group)
            self._hand_over(self.scorer.finished(seal_now=self._out_of_work))
            self._report_evaluations()
            self._pass_on_stop()
            if self.exchange.ended:  # the trainer has stopped, perhaps only for lack of time
                self.evaluator.abandon()
            self._note_stage()
            if time.monotonic() - self._logged >= self.log_seconds:
                self._log()
        # What was generated since the last sync is sealed, too; a resume merges it.
        self._hand_over(self.scorer.close())
        self._log()

    def _take_weights(self) -> None:
        """Load new weights, if any, unless an evaluation needs the current ones or a load is in progress."""
        if self.generator.loading:
            return
        if self._awaited and self.generator.version == self._awaited.version:
            self._tally.load_seconds = self.generator.load_seconds
            self._tally.propagation_seconds = max(0.0, time.time() - self._awaited.published)
            self._awaited = None
            self.weights_in_use()
        if self.evaluator.busy:
            return
        update = self.exchange.poll()
        if update is None:
            return
        # Weights are loaded even after a stop request. The trainer learns of the request in its next round of
        # the exchange, which a searcher with old weights may delay.
        self.generator.load(update)
        self._publication = self._awaited = publication = update.publication
        self.scorer.refer_to(publication.reference)
        if publication.evaluate is None or self.stop_asked():
            return
        if part := self.evaluator.start(publication.evaluate, publication.version):
            self.report(part)
        else:
            self.scorer.check_engine(update, self.evaluator.unanswered)

    def _refill(self) -> None:
        """Keep the engine full: with evaluation requests first, then with training requests."""
        while self.generator.in_flight < self.sequences:
            request = self.evaluator.next_request() or self._next_training_request()
            if request is None:
                return
            self.generator.submit(request)

    def _next_training_request(self) -> Request | None:
        """Return the next training request; None while generation pauses (see ``run``), and at the end."""
        if self._publication is None or self._publication.final:
            return None
        if self.stop_asked() or self.exchange.closed:
            return None
        if self.exchange.pending >= self.pending_shards or self.scorer.full:
            return None
        self._upcoming = self._upcoming or next(self.requests, None)
        if self._upcoming is None or self._upcoming.id >= self._budget_end:
            return None
        request, self._upcoming = self._upcoming, None
        return request

    @property
    def _budget_end(self) -> float:
        """Id of the first request that may not be issued under the present weights."""
        if self._publication is None or self._publication.budget_end is None:
            return math.inf
        return self._publication.budget_end

    @property
    def _out_of_work(self) -> bool:
        """True if the engine is idle until the trainer publishes, because requests are limited."""
        return self._budget_end < math.inf and not self.generator.in_flight

    def _generate(self) -> list[Group]:
        if self.generator.in_flight:
            return self.generator.step()
        with self._clock("paused"):
            time.sleep(IDLE_SECONDS)
            return self.generator.step()  # the engine may have a load or a failure to handle

    def _deliver(self, group: Group) -> None:
        """Queue a finished group for scoring, or for judging if it answers an evaluation."""
        self._tally.generated += sum(int(completion.action_T.sum()) for completion in group.completions)
        if group.request.split == "train":
            self.scorer.submit(group)
        else:
            self.evaluator.note_answer()
            self.scorer.judge(group)

    def _hand_over(self, results: list[Scored]) -> None:
        """Count results of the scorer, and offer sealed shards to the trainer."""
        for scored in results:
            self._tally += scored.sums
            self._rejected += scored.sums.rejected
            if shard := scored.shard:
                # If the shard's file is lost, this record proves that it was sealed; ``tba audit`` reads it.
                self.metrics.log(
                    {
                        "event": "sealed",
                        "shard": shard.index,
                        "trajectories": len(shard.trajectories),
                        "tokens": len(shard.trajectories.completions.values),
                    }
                )
                self.exchange.offer(shard)

    def _report_evaluations(self) -> None:
        """Count newly judged answers; report parts of evaluations that are now complete."""
        for judged in self.scorer.judged():
            part = self.evaluator.count(judged.answer, judged.correct, judged.ref_logprob, judged.reward)
            if part is not None:
                self.report(part)

    def _pass_on_stop(self) -> None:
        """If a stop was asked for, ask the trainer to end the run, and abandon evaluations."""
        if self.stop_asked():
            self.scorer.note_stop()
            self.exchange.request_stop()
            self.evaluator.abandon()

    def _note_stage(self) -> None:
        """Log the stage of the engine's start if it has changed since the last call."""
        if self._stage != (stage := getattr(self.generator, "stage", "")):
            self.metrics.log({"event": "engine", "stage": stage or "ready"})
            self._stage = stage

    def _log(self) -> None:
        """Write a line of metrics about the time since the last line; ``run.metric_table`` explains them."""
        sums, self._tally = self._tally, Sums()
        now = time.monotonic()
        seconds, self._logged = now - self._logged, now
        spent = self._clock.reset()
        before = self._busy_seconds  # seconds beyond the interval count in later records
        self._busy_seconds = min(self.generator.busy_seconds, before + seconds)
        self.metrics.log(
            {
                "search/version": self.generator.version,
                "search/tokens": sums.generated,
                "search/tokens_per_second": sums.generated / seconds,
                **sums.figures(),
                "search/reward_seconds": sums.reward_seconds / sums.scored if sums.scored else None,
                "search/busy_share": (self._busy_seconds - before) / seconds,
                "search/reward_share": sums.reward_seconds / seconds,
                "search/recompute_share": getattr(self.generator, "recompute_share", 0.0),
                "search/rebuilds": self.generator.rebuilds,
                "search/nan_groups": getattr(self.generator, "nan_groups", 0),
                "search/seal_share": sums.seal_seconds / seconds,
                "search/paused_share": spent.get("paused", 0.0) / seconds,
                "search/load_seconds": sums.load_seconds or None,
                "search/propagation_seconds": sums.propagation_seconds or None,
                "search/pending_shards": self.exchange.pending,
                "search/rejected": self._rejected,
            }
        )
