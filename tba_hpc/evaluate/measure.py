"""Evaluates a model here: an engine answers, the task judges, and the reference gives the perplexity.

Everything happens in this process and the engine's, without MPI, and no file is written.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from rich.progress import Progress
from rich.text import Text

from tba_hpc.config import Config, ConfigError, GeneratorSection
from tba_hpc.core.ports import MEAN_REWARD, Generator, Reference, Task, decoder
from tba_hpc.core.prompts import prompt_room
from tba_hpc.core.task_contract import checked_parts, checked_prompts, checked_verdicts
from tba_hpc.core.types import Group, Prompt, Request, Sampling, Split
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.evaluate.target import Target
from tba_hpc.report.estimates import Estimate, mean, passes, wilson
from tba_hpc.report.tables import Terminal
from tba_hpc.run.evaluations import Answer
from tba_hpc.tasks import make_task
from tba_hpc.tasks.jsonl import Jsonl

ENVIRONMENT = {  # variables that are set unless the user has set them
    "OMP_NUM_THREADS": "1",  # as in a rank
    # The engine writes to the terminal here.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch",  # errors only
}

log = logging.getLogger(__name__)

AHEAD = 2
"""Ratio of completions submitted to the engine to completions that it decodes at the same time."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Results of the model for one decoding setting.

    temperature: 0 is greedy. samples: completions per prompt. scores: estimates by name, such as pass@1;
    empty if the task does not tell right answers from wrong ones. ended: share of completions that are
    correct and also ended by themselves; None without scores. truncated_share: share of completions that the
    token limit cut off. tokens: mean number of sampled tokens per completion. perplexity: perplexity of the
    sampled tokens under the reference, at model.logprob_temperature; None without a reference. reward: mean
    over prompts of the mean reward; None if rewards are just 1 for right and 0 for wrong. rewards: unweighted
    mean of each named reward over the completions; empty unless the config names several. summary: the task's
    own statistics, see ``core.ports.Task``.
    """

    temperature: float
    samples: int
    scores: Mapping[str, Estimate]
    ended: Estimate | None
    truncated_share: float
    tokens: float
    perplexity: float | None
    reward: Estimate | None
    rewards: Mapping[str, float]
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an evaluation.

    model, reference: paths of the models; None without a reference. dtype: dtype in which both models were
    run. prompts: number of prompts. score_name: the task's name for the share of correct answers. single:
    results with one completion per prompt, as in the evaluations of a run. sampled: results with several
    completions per prompt; None if not requested. answers: answers of ``single`` to the first prompts.
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
    """Evaluate with one completion per prompt, as a run does, and then with several per prompt.

    The first evaluation is greedy unless the task's evaluation_temperature is above 0. samples: completions
    per prompt in the second evaluation; 0: leave it out. temperature: sampling temperature of the second
    evaluation; None: the config's. limit: number of prompts used; None: all. show: number of prompts, from
    the first, whose answers the result contains. Progress is printed to stderr.

    Raises ConfigError for a missing model, an empty split or a prompt that is too long, and EngineError if
    the engine keeps dying.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Imported only now, since these modules import torch, which reads the environment.
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
        score_name=task.score_name,
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
    """Print to stderr what is about to be done."""
    Terminal(stderr=True).print(Text(f"{what} …", style="dim"))


def samplings(
    task: Task, section: GeneratorSection, temperature: float | None = None
) -> tuple[Sampling, Sampling]:
    """Return the sampling parameters for one completion per prompt, and those for several.

    With one completion, a run's evaluations use the same parameters. temperature: sampling temperature for
    several completions; None: the temperature of training.
    """
    sampled_at = section.temperature if temperature is None else temperature
    return (
        Sampling(task.evaluation_temperature, 1.0, section.max_tokens),
        Sampling(sampled_at, section.top_p, section.max_tokens),
    )


def _prompts(task: Task, name: str, split: Split, limit: int | None) -> Sequence[Prompt]:
    prompts = checked_prompts(task, split)[:limit]
    if not prompts:
        raise ConfigError(f"the task {name} has no prompt in its {split} split: choose another --split")
    return prompts


def _generate(config: Config, task: Task, requests: Sequence[Request]) -> list[Group]:
    """Sample all requests, then end the engine to free its memory. Returns the groups in order."""
    from tba_hpc.learner.hf_model import load_tokenizer

    section = config.generator
    at_once = AHEAD * section.prompts_in_flight * section.completions_per_prompt
    engine = VllmGenerator(config.model, section, seed=config.run.seed)
    generator = task.converse(engine, load_tokenizer(config.model.path))
    with (
        closing(generator),
        Progress(console=Terminal(stderr=True), transient=True) as progress,
    ):
        answers = _answers(generator, requests, at_once)
        seen = progress.track(answers, len(requests), description="answers")
        return sorted(seen, key=lambda group: group.request.id)


def _answers(generator: Generator, requests: Sequence[Request], at_once: int) -> Iterator[Group]:
    """Yield groups as they are finished, with about ``at_once`` completions in flight."""
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
    """Compute the results for one decoding setting.

    reference: computes the perplexity; None leaves it out. groups: one per prompt, with equal numbers of
    completions. judged: the task's verdicts; None: ask the task.
    """
    first, completions = groups[0].request, [c for group in groups for c in group.completions]
    judged = judged or judge(task, groups)
    ended_PN = np.reshape([c.finish_reason == "stop" for c in completions], judged.correct_PN.shape)
    scores = _scores(task.score_name, judged.correct_PN)
    return Decoding(
        temperature=first.sampling.temperature,
        samples=first.n,
        scores=scores,
        ended=next(iter(_scores(task.score_name, judged.correct_PN & ended_PN).values()), None),
        truncated_share=sum(c.finish_reason == "length" for c in completions) / len(completions),
        tokens=sum(int(c.action_T.sum()) for c in completions) / len(completions),
        perplexity=_perplexity(reference, groups) if reference else None,
        reward=judged.reward if judged.is_graded or not scores else None,
        rewards=dict(judged.part_means),
        summary=dict(task.summary(groups)),
    )


class Judged(NamedTuple):
    """A task's verdicts on N completions of each of P prompts.

    correct_PN: bool. grade_PN: float64, the rewards; not finite for answers that could not be judged. If the
    task gives no reward, the grade is 1 for a correct answer and 0 for a wrong one. part_means: mean of each
    named reward over the completions for which it is finite.
    """

    correct_PN: np.ndarray
    grade_PN: np.ndarray
    part_means: Mapping[str, float] = MappingProxyType({})

    @property
    def is_graded(self) -> bool:
        """True unless every grade is 1 for a correct answer and 0 for a wrong one.

        If it is False, the mean reward adds nothing to the share of correct answers.
        """
        graded_PN = np.isfinite(self.grade_PN)
        return not np.array_equal(self.correct_PN[graded_PN], self.grade_PN[graded_PN])

    @property
    def reward(self) -> Estimate | None:
        """Mean over prompts of the mean grade of the answers that were judged; None if none was judged."""
        graded_PN = np.isfinite(self.grade_PN)
        some_P = graded_PN.any(1)
        if not some_P.any():
            return None
        mean_P = np.nanmean(np.where(graded_PN, self.grade_PN, np.nan)[some_P], 1)
        ends = {"least": mean_P.min(), "most": mean_P.max()}
        return mean(mean_P.sum(), (mean_P**2).sum(), len(mean_P), **ends)


def judge(task: Task, groups: Sequence[Group]) -> Judged:
    """Ask the task which completions are correct, and for their grades."""
    completions = [completion for group in groups for completion in group.completions]
    prompts = [group.request.prompt for group in groups for _ in group.completions]
    verdicts, shape = checked_verdicts(task, prompts, completions), (len(groups), groups[0].request.n)
    correct = [right for right, _ in verdicts]
    grades = [float(right) if grade is None else grade for right, grade in verdicts]
    # Other tasks may know the parts of rewards only after a call of ``rewards``, not of ``correct``.
    parts = checked_parts(task, len(correct)) if isinstance(task, Jsonl) else {}
    means = {name: float(np.mean(finite)) for name, row in parts.items() if (finite := _finite(row))}
    if unjudged := int(np.count_nonzero(~np.isfinite(np.array(grades, float)))):
        log.warning(
            "%d of %d answers could not be judged: they count as wrong, and a mean reward leaves them out",
            unjudged,
            len(correct),
        )
    return Judged(
        np.reshape(np.array(correct, bool), shape), np.reshape(np.array(grades, float), shape), means
    )


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _scores(name: str, correct_PN: np.ndarray) -> dict[str, Estimate]:
    """Estimate scores, by name, from whether each of N completions of P prompts is correct.

    If N is 1, the only score is the share of correct completions, called ``name``. Otherwise the scores are
    pass@k for k = 1, 2, 4, … up to N. There are no scores if ``name`` is MEAN_REWARD.
    """
    if name == MEAN_REWARD:
        return {}
    if correct_PN.shape[1] == 1:
        return {name: wilson(int(correct_PN.sum()), correct_PN.size)}
    found = passes(correct_PN.sum(1).tolist(), correct_PN.shape[1])
    return {f"pass@{k}": estimate for k, estimate in found.items()}


def _perplexity(reference: Reference, groups: Sequence[Group]) -> float:
    """Return exp of the mean of −log π_ref over all tokens that the policy sampled."""
    with Progress(console=Terminal(stderr=True), transient=True) as progress:
        seen = progress.track(groups, description="perplexity")
        logprobs = [
            row[completion.action_T]
            for group in seen
            for completion, row in zip(group.completions, reference.logprobs_of([group])[0], strict=True)
        ]
    return math.exp(-np.concatenate(logprobs).mean(dtype=np.float64))


def _require_same_vocabulary(target: Target) -> None:
    """Raise ConfigError if the model's and the reference's vocabularies differ in size."""
    from tba_hpc.learner.hf_model import load_tokenizer

    paths = [path for path in (target.config.model.path, target.reference) if path]
    sizes = {path: load_tokenizer(path).vocab_size for path in paths}
    if len(set(sizes.values())) > 1:
        found = " and ".join(f"{path} has {size} tokens" for path, size in sizes.items())
        raise ConfigError(f"{found}: name a model with the same vocabulary, with --reference")


def _load_reference(config: Config, path: str) -> Reference:
    from tba_hpc.learner.hf_model import load_policy
    from tba_hpc.learner.hf_reference import HfReference

    return HfReference(load_policy(path, config.model.dtype), config.model)
