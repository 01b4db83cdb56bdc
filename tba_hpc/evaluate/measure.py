"""Evaluates a model on this machine: one engine generates, the task judges, the reference measures distance.

The composition root of ``tba evaluate``: it sees engine, task and reference. No MPI, and nothing is written.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.progress import Progress
from rich.text import Text

from tba_hpc.config import Config, ConfigError, GeneratorSection
from tba_hpc.core.ports import (
    Conversing,
    Generator,
    Grading,
    Reference,
    Summarising,
    Task,
    decoder,
    evaluation_temperature,
    score_name,
)
from tba_hpc.core.prompts import prompt_room
from tba_hpc.core.task_contract import checked_correct, checked_prompts
from tba_hpc.core.types import Group, Prompt, Request, Sampling, Split
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.evaluate.target import Target
from tba_hpc.report.estimates import Estimate, mean, passes, wilson
from tba_hpc.report.tables import Terminal
from tba_hpc.run.evaluations import Answer
from tba_hpc.tasks import make_task

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as a rank has it; more by setting the variable
    "VLLM_LOGGING_LEVEL": "ERROR",  # a rank's engine writes to a log, this one to the terminal
    "PYTHONWARNINGS": "ignore",
}

AHEAD = 2
"""Completions given to the engine, per one that it decodes."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the model did with one way of decoding.

    temperature: 0 is greedy. samples: completions per prompt. scores: by name. truncated_share: of the
    completions, cut off by the token limit. tokens: sampled, mean per completion. perplexity: of these under
    the reference at model.logprob_temperature, None without one. reward: mean per prompt, None if rewards are
    just 0 and 1. summary: the task's own figures, see ports.Summarising.
    """

    temperature: float
    samples: int
    scores: Mapping[str, Estimate]
    truncated_share: float
    tokens: float
    perplexity: float | None
    reward: Estimate | None
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation came to.

    dtype: in which model and reference computed. single: one completion per prompt, as in the evaluations of
    a run. sampled: several; None where none were asked for. answers: the first of the single ones.
    """

    model: str
    dtype: str
    reference: str | None
    task: str
    split: Split
    prompts: int
    score_name: str
    single: Decoding
    sampled: Decoding | None
    answers: tuple[Answer, ...] = ()


def measure(
    target: Target,
    *,
    split: Split,
    samples: int = 0,
    temperature: float | None = None,
    limit: int | None = None,
    show: int = 0,
) -> Result:
    """Evaluate as a run does, and by several completions per prompt where they are asked for.

    As a run does: one completion per prompt, greedily unless the task has an evaluation_temperature.
    samples: completions per prompt of the second kind, 0 for none. temperature: theirs, None takes the
    config's. limit: prompts used, None for all. show: answers to the first prompts that the result holds.
    Progress goes to stderr.
    Raises ConfigError with one sentence (no such model, an empty split, prompts too long), EngineError where
    the engine keeps dying.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # These import torch, which reads the environment.
    from tba_hpc.engine.vllm_victim import VllmVictim
    from tba_hpc.learner.hf_model import load_tokenizer

    config, section = target.config, target.config.generator
    serve = partial(VllmVictim, seed=config.run.seed)
    tokenizer = load_tokenizer(config.model.path)
    decode = decoder(tokenizer, special=config.task.special_tokens)
    task = make_task(config.task, tokenizer, serve, room=prompt_room(config))
    prompts = _prompts(task, config.task.name, split, limit)
    _require_same_vocabulary(target)
    single, sampled = samplings(task, section, temperature)
    wanted = [(prompt, 1, single) for prompt in prompts]
    wanted += [(prompt, samples, sampled) for prompt in prompts if samples]
    _tell(f"starting an engine for {sum(n for _, n, _ in wanted):,} answers to {len(prompts):,} prompts")
    groups = _generate(config, task, [Request(p, i, n, how, split) for i, (p, n, how) in enumerate(wanted)])
    _tell("judging the answers" + (", and their perplexity under the reference" if target.reference else ""))
    reference = _load_reference(config, target.reference) if target.reference else None
    judged = judge(task, groups[: len(prompts)])
    return Result(
        model=config.model.path,
        dtype=config.model.dtype,
        reference=target.reference,
        task=config.task.name,
        split=split,
        prompts=len(prompts),
        score_name=score_name(task),
        single=assess(task, reference, groups[: len(prompts)], judged),
        sampled=assess(task, reference, groups[len(prompts) :]) if samples else None,
        answers=tuple(
            Answer(
                group.request.prompt.id,
                tokenizer.decode(group.request.prompt.tokens),
                decode(group.completions[0].tokens),
                bool(right),
                float(grade),
            )
            for group, right, grade in zip(
                groups[:show], judged.correct_PN[:show, 0], judged.grade_PN[:show, 0], strict=False
            )
        ),
    )


def _tell(what: str) -> None:
    """What is done now; a bar shows how far, where stderr is a terminal."""
    Terminal(stderr=True).print(Text(f"{what} …", style="dim"))


def samplings(
    task: Task, section: GeneratorSection, temperature: float | None = None
) -> tuple[Sampling, Sampling]:
    """How a run's evaluations decode, and how several samples are drawn; temperature: None, as trained."""
    sampled_at = section.temperature if temperature is None else temperature
    return (
        Sampling(evaluation_temperature(task), 1.0, section.max_tokens),
        Sampling(sampled_at, section.top_p, section.max_tokens),
    )


def _prompts(task: Task, name: str, split: Split, limit: int | None) -> Sequence[Prompt]:
    prompts = checked_prompts(task, split)[:limit]
    if not prompts:
        raise ConfigError(f"the task {name} has no prompt in its {split} split: choose another --split")
    return prompts


def _generate(config: Config, task: Task, requests: Sequence[Request]) -> list[Group]:
    """The answers to all requests, in their order. The engine leaves its memory to the models that judge."""
    from tba_hpc.learner.hf_model import load_tokenizer

    section = config.generator
    at_once = AHEAD * section.prompts_in_flight * section.completions_per_prompt
    generator: Generator = VllmGenerator(config.model, section, seed=config.run.seed)
    if isinstance(task, Conversing):
        generator = task.converse(generator, load_tokenizer(config.model.path))
    with (
        closing(generator),
        Progress(console=Terminal(stderr=True), transient=True) as progress,
    ):
        answers = _answers(generator, requests, at_once)
        seen = progress.track(answers, len(requests), description="answers")
        return sorted(seen, key=lambda group: group.request.id)


def _answers(generator: Generator, requests: Sequence[Request], at_once: int) -> Iterator[Group]:
    """As they come; the engine is given completions up to ``at_once``."""
    waiting = deque(requests)
    while waiting or generator.in_flight:
        while waiting and generator.in_flight < at_once:
            try:
                generator.submit(waiting.popleft())
            except ValueError as error:
                raise ConfigError(str(error)) from None
        yield from generator.step()


def assess(
    task: Task,
    reference: Reference | None,
    groups: Sequence[Group],
    judged: Judged | None = None,
) -> Decoding:
    """All figures of one way of decoding. judged: the task's verdicts, if they are known."""
    first, completions = groups[0].request, [c for group in groups for c in group.completions]
    judged = judged or judge(task, groups)
    return Decoding(
        temperature=first.sampling.temperature,
        samples=first.n,
        scores=_scores(score_name(task), judged.correct_PN),
        truncated_share=sum(c.finish_reason == "length" for c in completions) / len(completions),
        tokens=sum(int(c.action_T.sum()) for c in completions) / len(completions),
        perplexity=_perplexity(reference, groups) if reference else None,
        reward=judged.reward,
        summary=dict(task.summary(groups)) if isinstance(task, Summarising) else {},
    )


class Judged(NamedTuple):
    """[P prompts, N completions of each]: bool, what is correct; float64, the rewards, or else the same."""

    correct_PN: np.ndarray
    grade_PN: np.ndarray

    @property
    def reward(self) -> Estimate | None:
        """Mean over prompts, of the answers that have a grade, if it says more than what is correct."""
        graded_PN = np.isfinite(self.grade_PN)
        some_P = graded_PN.any(1)
        if np.array_equal(self.correct_PN[graded_PN], self.grade_PN[graded_PN]) or not some_P.any():
            return None
        mean_P = np.nanmean(np.where(graded_PN, self.grade_PN, np.nan)[some_P], 1)
        return mean(mean_P.sum(), (mean_P**2).sum(), len(mean_P))


def judge(task: Task, groups: Sequence[Group]) -> Judged:
    """Have the task judge all completions."""
    completions = [completion for group in groups for completion in group.completions]
    prompts = [group.request.prompt for group in groups for _ in group.completions]
    correct, shape = checked_correct(task, prompts, completions), (len(groups), groups[0].request.n)
    grades = task.grades() if isinstance(task, Grading) else correct
    return Judged(np.reshape(np.array(correct, bool), shape), np.reshape(np.array(grades, float), shape))


def _scores(name: str, correct_PN: np.ndarray) -> dict[str, Estimate]:
    """The share of correct completions under ``name``; of several per prompt pass@1, 2, 4, … N."""
    if correct_PN.shape[1] == 1:
        return {name: wilson(int(correct_PN.sum()), correct_PN.size)}
    found = passes(correct_PN.sum(1).tolist(), correct_PN.shape[1])
    return {f"pass@{k}": estimate for k, estimate in found.items()}


def _perplexity(reference: Reference, groups: Sequence[Group]) -> float:
    """exp(−Σ log π_ref ÷ tokens) of all that the policy sampled."""
    with Progress(console=Terminal(stderr=True), transient=True) as progress:
        seen = progress.track(groups, description="perplexity")
        logprobs = [
            row[completion.action_T]
            for group in seen
            for completion, row in zip(group.completions, reference.logprobs(group), strict=True)
        ]
    return math.exp(-np.concatenate(logprobs).mean(dtype=np.float64))


def _require_same_vocabulary(target: Target) -> None:
    """Raise ConfigError where the reference reads other tokens than the model writes."""
    from tba_hpc.learner.hf_model import load_tokenizer

    paths = [path for path in (target.config.model.path, target.reference) if path]
    sizes = {path: load_tokenizer(path).vocab_size for path in paths}
    if len(set(sizes.values())) > 1:
        found = " and ".join(f"{path} has {size} tokens" for path, size in sizes.items())
        raise ConfigError(f"{found}: name a model of the same vocabulary with --reference")


def _load_reference(config: Config, path: str) -> Reference:
    from tba_hpc.learner.hf_model import load_policy
    from tba_hpc.learner.hf_reference import HfReference

    return HfReference(load_policy(path, config.model.dtype), config.model)
