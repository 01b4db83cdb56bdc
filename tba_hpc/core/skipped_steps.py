"""Counts optimizer steps that are skipped because the loss or the gradient is not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tba_hpc.config import ConfigError

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 10
"""Number of skipped steps in a row that ends a run. A bad group spoils one step, a broken policy all."""


class SkippedSteps:
    """Counter of skipped steps on a trainer rank. total: number of skipped steps so far."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def taken(self) -> None:
        """Note that the optimizer took a step."""
        self._in_a_row = 0

    def skipped(self, prompt_ids: Iterable[int]) -> None:
        """Count and log a skipped step. Raises ConfigError if MOST_IN_A_ROW steps in a row were skipped.

        prompt_ids: ids of the prompts of groups whose loss is not finite; none if every loss is finite, but
        the gradient's norm is not.
        """
        self.total += 1
        self._in_a_row += 1
        prompts = ", ".join(str(prompt) for prompt in sorted(set(prompt_ids)))
        cause = f"the loss of the groups of prompts {prompts}" if prompts else "the gradient's norm alone"
        log.warning("an optimizer step was skipped, %d so far: %s is not finite", self.total, cause)
        if self._in_a_row == MOST_IN_A_ROW:
            raise ConfigError(
                f"{MOST_IN_A_ROW} optimizer steps in a row were skipped, the last because {cause} was not "
                "finite: check the rewards, or start another run (run.name) with a lower "
                "train.learning_rate.peak or a bound on exchange.max_staleness"
            )
