"""Measures the task's score under given weights, on the searchers' engines, during training.

Each searcher answers its share of a split: searcher s of S takes the prompts with index ≡ s (mod S). It
samples at the task's evaluation temperature, and returns its part of the result once all of its answers are
judged. Newer weights must not be loaded while the evaluator is ``busy``, but may be while answers are judged.
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
"""Largest number of characters of a question or an answer that are kept."""


@dataclass(slots=True)
class Share:
    """A searcher's share of an unfinished evaluation.

    part: sums over the answers judged so far. missing: ids of prompts whose answers are not judged yet.
    results: see ``Evaluation``.
    """

    part: Evaluation
    missing: set[int]
    results: dict[int, float] = field(default_factory=dict)


@dataclass
class OnlineEvaluator:
    """Issues one searcher's requests in evaluations, and counts their answers once they are judged.

    searcher: index of this searcher among the ``searchers`` that evaluate. max_tokens: token limit of an
    answer. limits: number of prompts used per split; None: all. done: function from a split and the step of
    the weights to this searcher's part of the result, if an earlier attempt has finished it, otherwise None.
    decode: function from tokens to text; None: no answers are kept. kept: answers to prompts with ids below
    this are kept as text. unanswered: number of answers still to be generated.
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
        """True while answers are still to be generated, which needs the present weights."""
        return self.unanswered > 0

    def start(self, split: Split, step: int) -> Evaluation | None:
        """Queue this searcher's share of ``split``.

        Returns this searcher's part of the result if the share is empty or already done, otherwise None.
        step: optimizer step of the weights that the engine uses.
        """
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
        """Take the next request from the queue; None if it is empty."""
        return self._queue.pop() if self._queue else None

    def abandon(self) -> None:
        """Abandon unfinished evaluations. Answers that still arrive are not counted."""
        self._queue, self.unanswered, self._shares = [], 0, {}

    def note_answer(self) -> None:
        """Record that one more answer has been generated."""
        self.unanswered = max(0, self.unanswered - 1)

    def count(
        self, answer: Group, correct: bool, ref_logprob: float | None, reward: float | None = None
    ) -> Evaluation | None:
        """Count one judged answer. Once all are judged, return this searcher's part of the evaluation.

        Returns None until then. An answer to an abandoned evaluation is ignored.

        answer: a group of one completion. The version of its weights identifies the evaluation. ref_logprob:
        log π_ref of the whole completion, nats; None without a reference. reward: None if the task gives
        none.
        """
        split, step, prompt = answer.request.split, int(answer.versions[0, 0]), answer.request.prompt.id
        share = self._shares.get((split, step))
        if share is None or prompt not in share.missing:
            return None
        one = self._evaluation(split, step, int(correct), ref_logprob, *answer.completions)
        one = replace(one, answers=self._as_text(answer, correct, reward))
        if reward is not None and math.isfinite(reward):
            one = replace(one, graded=1, rewards=float(reward), squares=float(reward) ** 2)
        score = float(correct if reward is None else reward)
        if split == "test" and math.isfinite(score):
            share.results[prompt] = score
        share.part += one
        share.missing.remove(prompt)
        if share.missing:
            return None
        return replace(self._shares.pop((split, step)).part, results=share.results)

    def _as_text(self, answer: Group, correct: bool, reward: float | None) -> tuple[Answer, ...]:
        """Return the question and the answer as text, or () if answers to this prompt are not kept."""
        prompt, (completion,) = answer.request.prompt, answer.completions
        if self.decode is None or prompt.id >= self.kept:
            return ()
        question, text = (self.decode(tokens)[:LONGEST_TEXT] for tokens in (prompt.tokens, completion.tokens))
        return (Answer(prompt.id, question, text, correct, reward),)

    def _evaluation(
        self, split: Split, step: int, correct: int, ref_logprob: float | None, *completions: Completion
    ) -> Evaluation:
        """Return the Evaluation of one completion, or of none; ``+`` adds two Evaluations.

        correct: 1 if the completion is correct, else 0. ref_logprob: its log π_ref, nats; None without a
        reference; 0 if there is no completion. completions: one or none. Reward and text are left out.
        """
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
