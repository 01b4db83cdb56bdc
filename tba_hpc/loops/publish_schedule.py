"""Decides when weights go out."""

from __future__ import annotations

import time

from tba_hpc.config import Config
from tba_hpc.core.types import Publication, Split
from tba_hpc.loops.freshness import Freshness


class PublishSchedule:
    """When weights go out: before an attempt's first step, every ``sync_every`` steps, and after the last.

    They go out earlier if the reference changed, or if searchers need a larger rollout budget to go on. A
    publication that is put off, because a round is under way, stays due.

    step: the attempt's first. version: optimizer steps of the weights published last, at first ``step``.
    publishes: number of publications in this attempt. put_off: whether the last one was.
    """

    def __init__(self, config: Config, freshness: Freshness, step: int) -> None:
        self._config = config
        self._freshness = freshness
        self._reference: int | None = None  # published last
        self.version = step
        self.publishes = 0
        self.put_off = False

    def due(self, step: int) -> bool:
        """Tell whether the weights of ``step`` must go out now."""
        return (
            not self.publishes
            or self.put_off  # the budget already counts on what it grants
            or step >= min(self.version + self._config.exchange.sync_every, self._config.train.steps)
            or self._freshness.reference != self._reference
            or self._freshness.exhausted(step)
        )

    def publication(self, step: int) -> Publication:
        """Return what goes out with the weights of ``step``; grant searchers what it allows them."""
        return self._freshness.publication(step, evaluate=self._split(step), published=time.time())

    def note(self, publication: Publication, *, started: bool) -> None:
        """Note that a publication has begun, or that it was put off."""
        self.put_off = not started
        if started:
            self.version, self._reference = publication.version, publication.reference
            self.publishes += 1

    def _split(self, step: int) -> Split | None:
        """Split to evaluate: test before and after training, validation every ``evaluate.every`` steps."""
        every = self._config.evaluate.every
        if step >= self._config.train.steps or (step == 0 and not self.publishes):
            return "test"
        return "validation" if step // every > self.version // every else None
