"""pass@1 of named weights, measured on the searchers' engines between the training completions.

Every searcher takes its share of the split (prompt i where i mod searchers is its place among them),
decodes greedily, and returns its part of the result. It must not load newer weights while ``busy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tba_hpc.ports import Task
from tba_hpc.state import Evaluation
from tba_hpc.types import Group, Request, Sampling, Split


class Evaluator:
    """Deals evaluation requests and counts their answers.

    limits: prompts used per split (None: all). max_tokens: longest completion. last_step: of the run.
    """

    share: tuple[int, int]
    """Place among those that evaluate, and their number, in the evaluation started last."""
    ending = False
    """Whether the weights of the last step have come: their evaluation is all that is left to generate."""

    def __init__(
        self,
        task: Task,
        *,
        searcher: int,
        searchers: int,
        max_tokens: int,
        limits: Mapping[Split, int | None],
        last_step: int,
    ) -> None:
        self._task = task
        self._all = self.share = (searcher, searchers)
        temperature = float(getattr(task, "evaluation_temperature", 0.0))
        self._greedy = Sampling(temperature, top_p=1.0, max_tokens=max_tokens)
        self._limits = limits
        self._last_step = last_step
        self._queue: list[Request] = []
        self._waiting = 0
        self._part: Evaluation | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._part is not None

    def start(self, split: Split, step: int, share: tuple[int, int] | None = None) -> Evaluation | None:
        """Queue this searcher's share of ``split``; the finished part at once where that is empty.

        share: where it is not as configured, since some searchers have died.
        """
        assert not self.busy, "one evaluation at a time"
        self.share, self.ending = share or self._all, step == self._last_step
        place, places = self.share
        prompts = self._task.prompts(split)[: self._limits[split]][place::places]
        self._queue = [Request(prompt, prompt.id, 1, self._greedy, split) for prompt in reversed(prompts)]
        self._waiting = len(self._queue)
        part = Evaluation(split=split, step=step, correct=0, total=0, tokens=0, truncated=0)
        self._part = part if self._queue else None
        return None if self._queue else part

    def next_request(self) -> Request | None:
        """The next greedy request, if any is left."""
        return self._queue.pop() if self._queue else None

    def abandon(self) -> None:
        """Give up what is under way; answers that still come are not counted."""
        self._queue, self._part = [], None

    def finish(self, group: Group) -> Evaluation | None:
        """Count one answer; the whole part once the last has come."""
        if self._part is None:
            return None
        (completion,) = group.completions
        self._part = replace(
            self._part,
            correct=self._part.correct + bool(self._task.correct(group.request.prompt, completion)),
            total=self._part.total + 1,
            tokens=self._part.tokens + len(completion.tokens),
            truncated=self._part.truncated + (completion.finish_reason == "length"),
        )
        self._waiting -= 1
        if self._waiting:
            return None
        part, self._part = self._part, None
        return part
