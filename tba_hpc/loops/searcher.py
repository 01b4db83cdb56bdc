"""The searcher's loop: generates completions without pause, has them scored and sealed, and offers shards.

It must not know how completions are generated, how shards travel, or how many ranks there are.
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
"""Number of unmerged shards at which a searcher pauses (back-pressure)."""

IDLE_SECONDS = 0.005
"""Pause of a loop that has nothing to generate."""


@dataclass(kw_only=True)
class Searcher:
    """One engine's loop.

    sequences: completions that the engine decodes at once. pending_shards: number of unmerged shards at which
    generation pauses. log_seconds: interval of metric records, s. report: function that receives a part of an
    evaluation. weights_in_use: function called each time the engine has loaded weights.
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
    _upcoming: Request | None = None
    _budget_end: float = math.inf  # id of the first request that may not be issued yet
    _loaded: bool = False
    _ending: bool = False
    _awaited: Publication | None = None  # publication of the last weights, until they are in use
    _busy_seconds: float = 0.0
    _rejected: int = 0
    _stage: str | None = None  # of the engine, as logged
    _tally: Sums = field(default_factory=Sums)  # since the last metric record
    _clock: Clock = field(default_factory=Clock)
    _logged: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Generate until the trainer ends the run.

        Consumes weights and prompts. Produces sealed shards and evaluation parts. Waits for the first
        weights. Waits for the next weights at ``pending_shards`` unmerged shards, or at the end of the
        rollout budget that came with the last ones. The trainer's publish ends each of these waits.
        """
        while not self.exchange.closed:
            self._take_weights()
            self._refill()
            for group in self._generate():
                self._deliver(group)
            self._hand_over(self.scorer.finished(seal_now=self._out_of_work))
            self._report_evaluations()
            self._pass_on_stop()
            if self.exchange.ended:  # the trainer has stopped, perhaps alone, for lack of time
                self.evaluator.abandon()
            self._note_stage()
            if time.monotonic() - self._logged >= self.log_seconds:
                self._log()
        # A resume merges what was generated after the last sync.
        self._hand_over(self.scorer.close())
        self._log()

    def _take_weights(self) -> None:
        """Load the newest weights, unless an evaluation needs the current ones or a load is in progress."""
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
        # After a stop request, too: the trainer learns of it in a round, and old weights may delay that.
        self.generator.load(update)
        self._loaded = True
        self._awaited = publication = update.publication
        end = publication.budget_end
        self._budget_end = math.inf if end is None else end
        self._ending = publication.final
        self.scorer.refer_to(publication.reference)
        if publication.evaluate is None or self.stop_asked():
            return
        if part := self.evaluator.start(publication.evaluate, publication.version):
            self.report(part)
        else:
            self.scorer.check_engine(update, self.evaluator.unanswered)

    def _refill(self) -> None:
        """Keep the engine full: evaluation requests first, then the next training prompts."""
        while self._loaded and self.generator.in_flight < self.sequences:
            request = self.evaluator.next_request() or self._next_prompt()
            if request is None:
                return
            self.generator.submit(request)

    def _next_prompt(self) -> Request | None:
        """Return the next training prompt; None while the trainer is too far behind or the run is ending."""
        ending = self.stop_asked() or self.exchange.closed or self._ending
        if ending or self.exchange.pending >= self.pending_shards or self.scorer.full:
            return None
        self._upcoming = self._upcoming or next(self.requests, None)
        if self._upcoming is None or self._upcoming.id >= self._budget_end:
            return None
        request, self._upcoming = self._upcoming, None
        return request

    @property
    def _out_of_work(self) -> bool:
        """True if the engine is idle because the rollout budget is used up until the trainer publishes."""
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
        """Offer sealed shards to the trainer."""
        for scored in results:
            self._tally += scored.sums
            self._rejected += scored.sums.rejected
            if shard := scored.shard:
                # If the file is lost this proves that it was acknowledged; ``tba audit`` reads it.
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
        """Ask the trainer to end the run, and abandon evaluations, which would only delay that."""
        if self.stop_asked():
            self.scorer.note_stop()
            self.exchange.request_stop()
            self.evaluator.abandon()

    def _note_stage(self) -> None:
        if self._stage != (stage := getattr(self.generator, "stage", "")):
            self.metrics.log({"event": "engine", "stage": stage or "ready"})
            self._stage = stage

    def _log(self) -> None:
        sums, self._tally = self._tally, Sums()
        now = time.monotonic()
        seconds, self._logged = now - self._logged, now
        spent = self._clock.reset()
        before = self._busy_seconds  # a step longer than a record's interval counts in the next ones, too
        self._busy_seconds = min(self.generator.busy_seconds, before + seconds)
        self.metrics.log(
            {
                "search/version": self.generator.version,
                "search/tokens": sums.generated,
                "search/tokens_per_second": sums.generated / seconds,
                **sums.figures(),
                "search/reward_seconds": sums.reward_seconds / sums.asked if sums.asked else None,
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
