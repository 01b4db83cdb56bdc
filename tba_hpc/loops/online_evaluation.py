"""The task's score under named weights, measured on the searchers' engines between the training completions.

Every searcher takes its share of the split (prompt i where i mod searchers is its place among them),
decodes greedily, and returns its part of the result once all its answers are judged. It must not know who
judges them. Newer weights must not be loaded while it is ``busy``; judging may take longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tba_hpc.core.ports import Task, evaluation_temperature, score_name
from tba_hpc.core.types import Completion, Group, Request, Sampling, Split
from tba_hpc.run.evaluations import Answer, Evaluation

LONGEST_TEXT = 2000
"""Characters of a question or an answer that are kept."""


class Part(NamedTuple):
    """What one searcher's answers came to: its place among those that evaluate, their number, the result."""

    place: int
    places: int
    evaluation: Evaluation


@dataclass(slots=True)
class Share:
    """An evaluation under way: the part so far, and the prompts whose answers are not judged yet, by id."""

    part: Part
    missing: set[int]


class OnlineEvaluator:
    """Issues evaluation requests and counts their answers.

    limits: prompts used per split (None: all). max_tokens: longest completion. done: gives the part that an
    earlier attempt has finished, of a searcher's place among so many, a split and the weights of a step.
    decode: tokens to text, None where no answers are kept. kept: of the prompts with smaller ids they are.
    """

    def __init__(
        self,
        task: Task,
        *,
        searcher: int,
        searchers: int,
        max_tokens: int,
        limits: Mapping[Split, int | None],
        done: Callable[[int, int, Split, int], Evaluation | None] = lambda *_: None,
        decode: Callable[[np.ndarray], str] | None = None,
        kept: int = 0,
    ) -> None:
        self._task = task
        self._all = (searcher, searchers)
        self._sampling = Sampling(evaluation_temperature(task), top_p=1.0, max_tokens=max_tokens)
        self._limits = limits
        self._done = done
        self._decode = decode
        self._kept = kept
        self._queue: list[Request] = []
        self._unanswered = 0
        self._shares: dict[tuple[Split, int], Share] = {}

    @property
    def unanswered(self) -> int:
        """Answers that are still to be generated."""
        return self._unanswered

    @property
    def busy(self) -> bool:
        """Whether answers are still to be generated."""
        return self._unanswered > 0

    def start(self, split: Split, step: int) -> Part | None:
        """Queue this searcher's share of ``split``; the finished part at once if that is empty, or done."""
        assert not self.busy, "one evaluation at a time"
        place, places = self._all
        if done := self._done(place, places, split, step):
            return Part(place, places, done)
        prompts = self._task.prompts(split)[: self._limits[split]][place::places]
        self._queue = [Request(prompt, prompt.id, 1, self._sampling, split) for prompt in reversed(prompts)]
        self._unanswered = len(self._queue)
        nothing = Part(place, places, self._evaluation(split, step, 0, 0.0))
        self._shares[split, step] = Share(nothing, {prompt.id for prompt in prompts})
        return None if prompts else self._shares.pop((split, step)).part

    def next_request(self) -> Request | None:
        """The next greedy request, if any is left."""
        return self._queue.pop() if self._queue else None

    def abandon(self) -> None:
        """Give up what is under way; answers that still come are not counted."""
        self._queue, self._unanswered, self._shares = [], 0, {}

    def note_answer(self) -> None:
        """One more answer is generated."""
        self._unanswered = max(0, self._unanswered - 1)

    def count(self, answer: Group, correct: bool, ref_logprob: float | None) -> Part | None:
        """Count one answer, judged, with log π_ref of it, nats; the whole part once all are.

        The weights that generated it tell which evaluation it belongs to.
        """
        split, step, prompt = answer.request.split, int(answer.versions[0, 0]), answer.request.prompt.id
        share = self._shares.get((split, step))
        if share is None or prompt not in share.missing:
            return None
        one = self._evaluation(split, step, int(correct), ref_logprob, *answer.completions)
        one = replace(one, answers=self._in_words(answer, correct))
        share.part = share.part._replace(evaluation=share.part.evaluation + one)
        share.missing.remove(prompt)
        return None if share.missing else self._shares.pop((split, step)).part

    def _in_words(self, answer: Group, correct: bool) -> tuple[Answer, ...]:
        """What is kept of it."""
        prompt, (completion,) = answer.request.prompt, answer.completions
        if self._decode is None or prompt.id >= self._kept:
            return ()
        question, text = (
            self._decode(tokens)[:LONGEST_TEXT] for tokens in (prompt.tokens, completion.tokens)
        )
        return (Answer(prompt.id, question, text, correct),)

    def _evaluation(
        self, split: Split, step: int, correct: int, ref_logprob: float | None, *completions: Completion
    ) -> Evaluation:
        return Evaluation(
            split=split,
            step=step,
            correct=correct,
            total=len(completions),
            tokens=sum(len(completion.tokens) for completion in completions),
            truncated=sum(completion.finish_reason == "length" for completion in completions),
            ref_logprob=ref_logprob,
            score_name=score_name(self._task),
        )
