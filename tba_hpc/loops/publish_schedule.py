"""Decides when the trainer publishes its weights."""

from __future__ import annotations

import time

from tba_hpc.config import Config
from tba_hpc.core.types import Publication, Split
from tba_hpc.loops.freshness import Freshness


class PublishSchedule:
    """Schedule of publications: before an attempt's first step, every ``sync_every`` steps, after the last.

    Weights are published earlier if the reference has changed, or if the next step needs more answers than
    the requests granted so far (the rollout budget) can bring. A publication that cannot begin, because a
    round of the exchange is in progress, is put off and stays due.

    step: the attempt's first step. version: version of the last published weights, initially ``step``.
    publishes: number of publications in this attempt. put_off: whether a publication is being put off now.
    """

    def __init__(self, config: Config, freshness: Freshness, step: int) -> None:
        self._config = config
        self._freshness = freshness
        self._reference: int | None = None  # reference in the last publication
        self.version = step
        self.publishes = 0
        self.put_off = False

    def due(self, step: int) -> bool:
        """Return whether the weights of ``step`` must be published now."""
        return (
            not self.publishes
            or self.put_off  # its budget is granted already, so ``exhausted`` may be False
            or step >= min(self.version + self._config.exchange.sync_every, self._config.train.steps)
            or self._freshness.reference != self._reference
            or self._freshness.exhausted(step)
        )

    def publication(self, step: int) -> Publication:
        """Make the publication for the weights of ``step``, and grant the requests that they allow."""
        return self._freshness.publication(step, evaluate=self._split(step), published=time.time())

    def note(self, publication: Publication, *, started: bool) -> None:
        """Record that a publication has ``started``, or that it was put off."""
        self.put_off = not started
        if started:
            self.version, self._reference = publication.version, publication.reference
            self.publishes += 1

    def _split(self, step: int) -> Split | None:
        """Return the split to evaluate with the weights of ``step``, or None.

        It is "test" before and after training, and "validation" every ``evaluate.every`` steps.
        """
        every = self._config.evaluate.every
        if step >= self._config.train.steps or (step == 0 and not self.publishes):
            return "test"
        return "validation" if step // every > self.version // every else None
