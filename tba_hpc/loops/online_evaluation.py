"""Measures the task's score under given weights on the searchers' engines, between training completions.

Every searcher takes its share of the split: prompt i if i mod searchers is its place among them. It decodes
greedily, and returns its part of the result once all its answers are judged. Newer weights must not be loaded
while the evaluator is ``busy``; judging may go on after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tba_hpc.core.ports import Task
from tba_hpc.core.types import Completion, Group, Request, Sampling, Split
from tba_hpc.run.evaluations import Answer, Evaluation

LONGEST_TEXT = 2000
"""Largest number of characters that are kept of a question or an answer."""


@dataclass(slots=True)
class Share:
    """An unfinished evaluation: this searcher's part so far, and prompts whose answers are not judged yet."""

    part: Evaluation
    missing: set[int]


@dataclass
class OnlineEvaluator:
    """Issues evaluation requests and counts their answers; ``unanswered``: answers still to be generated.

    searcher: this searcher's place among the ``searchers`` that evaluate. limits: prompts used per split
    (None: all). max_tokens: longest completion. done: returns the part that an earlier attempt finished,
    given a split and the step of the weights. decode: tokens to text, None if no answers are kept. kept:
    answers are kept of prompts with ids below this.
    """

    task: Task
    searcher: int = field(kw_only=True)
    searchers: int = field(kw_only=True)
    max_tokens: int = field(kw_only=True)
    limits: Mapping[Split, int | None] = field(kw_only=True)
    done: Callable[[Split, int], Evaluation | None] = lambda *_: None
    decode: Callable[[np.ndarray], str] | None = None
    kept: int = 0
    unanswered: int = field(default=0, init=False)
    _queue: list[Request] = field(default_factory=list, init=False)
    _shares: dict[tuple[Split, int], Share] = field(default_factory=dict, init=False)

    @property
    def busy(self) -> bool:
        """True while answers are still to be generated."""
        return self.unanswered > 0

    def start(self, split: Split, step: int) -> Evaluation | None:
        """Queue this searcher's share of ``split``; return its part if the share is empty or already done."""
        assert not self.busy, "one evaluation at a time"
        sampling = Sampling(self.task.evaluation_temperature, top_p=1.0, max_tokens=self.max_tokens)
        if done := self.done(split, step):
            return done
        prompts = self.task.prompts(split)[: self.limits[split]][self.searcher :: self.searchers]
        self._queue = [Request(prompt, prompt.id, 1, sampling, split) for prompt in reversed(prompts)]
        self.unanswered = len(self._queue)
        nothing = self._evaluation(split, step, 0, 0.0)
        self._shares[split, step] = Share(nothing, {prompt.id for prompt in prompts})
        return None if prompts else self._shares.pop((split, step)).part

    def next_request(self) -> Request | None:
        """Take the next greedy request from the queue; None if it is empty."""
        return self._queue.pop() if self._queue else None

    def abandon(self) -> None:
        """Abandon unfinished evaluations; answers that still arrive are not counted."""
        self._queue, self.unanswered, self._shares = [], 0, {}

    def note_answer(self) -> None:
        """Record that another answer has been generated."""
        self.unanswered = max(0, self.unanswered - 1)

    def count(
        self, answer: Group, correct: bool, ref_logprob: float | None, reward: float | None = None
    ) -> Evaluation | None:
        """Count one judged answer with its log π_ref, in nats; return the whole part once all are judged.

        The version of the weights that generated it tells which evaluation it belongs to.
        """
        split, step, prompt = answer.request.split, int(answer.versions[0, 0]), answer.request.prompt.id
        share = self._shares.get((split, step))
        if share is None or prompt not in share.missing:
            return None
        one = self._evaluation(split, step, int(correct), ref_logprob, *answer.completions)
        one = replace(one, answers=self._in_words(answer, correct, reward))
        if reward is not None and math.isfinite(reward):
            one = replace(one, graded=1, rewards=float(reward), squares=float(reward) ** 2)
        share.part += one
        share.missing.remove(prompt)
        return None if share.missing else self._shares.pop((split, step)).part

    def _in_words(self, answer: Group, correct: bool, reward: float | None) -> tuple[Answer, ...]:
        """Return the answer as text, or () if answers to this prompt are not kept."""
        prompt, (completion,) = answer.request.prompt, answer.completions
        if self.decode is None or prompt.id >= self.kept:
            return ()
        question, text = (self.decode(tokens)[:LONGEST_TEXT] for tokens in (prompt.tokens, completion.tokens))
        return (Answer(prompt.id, question, text, correct, reward),)

    def _evaluation(
        self, split: Split, step: int, correct: int, ref_logprob: float | None, *completions: Completion
    ) -> Evaluation:
        """Return a part of an evaluation with one completion, or with none."""
        return Evaluation(
            split=split,
            step=step,
            correct=correct,
            total=len(completions),
            tokens=sum(int(completion.action_T.sum()) for completion in completions),
            truncated=sum(completion.finish_reason == "length" for completion in completions),
            cut_correct=correct * sum(completion.finish_reason != "stop" for completion in completions),
            ref_logprob=ref_logprob,
            score_name=self.task.score_name,
        )
