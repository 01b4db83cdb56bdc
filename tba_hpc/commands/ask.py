"""``tba ask``: asks a run's model, or any other model, a question and prints the answers.

The model runs in transformers, which is ready sooner than an engine. No rewards are computed, except those
that a task's environment or program gives.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from tba_hpc.config import Config, ConfigError, GeneratorSection, ModelSection, reward_key
from tba_hpc.core import task_contract
from tba_hpc.core.ports import Task, Tokenizer, Victim
from tba_hpc.core.types import Completion, Group, Request, Sampling
from tba_hpc.core.wording import count
from tba_hpc.evaluate.target import find_subject, refuse_missing
from tba_hpc.report.samples.show import SEQUENCE
from tba_hpc.report.tables import Indented, Terminal
from tba_hpc.tasks import make_task

if TYPE_CHECKING:  # hf_answers imports torch
    from tba_hpc.learner.hf_answers import HfAnswers

MAX_TOKENS = 256
"""Longest answer, in tokens, of a model that is asked without a config."""

SLOW_SECONDS = 10.0
"""Time after which ``tba ask`` says that the model is still answering, in seconds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the model.

    truncated: whether a limit of tokens or turns ended the answer. tokens: number of tokens, including the
    end-of-sequence token. failed: whether the task's environment failed. fault: error of the environment, or
    "". reward: reward that the environment or program gave, or None.
    """

    text: str
    truncated: bool
    tokens: int
    failed: bool = False
    fault: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, as the model saw it, and the model's answers.

    model: path or hub name. device: cuda or cpu. prompt: the question as formatted by the task or the chat
    template. max_tokens: longest answer allowed. seconds: wall time of answering, without loading the model.
    not_computed: config keys of the task's rewards, which are not computed. bare: whether neither a task nor
    a chat template formatted the question.
    """

    model: str
    dtype: str
    device: str
    prompt: str
    temperature: float
    max_tokens: int
    replies: list[Reply]
    seconds: float
    not_computed: list[str] = field(default_factory=list)
    bare: bool = False


def ask(
    name: str,
    question: str,
    *,
    config: Path | None = None,
    overrides: list[str] | None = None,
    samples: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    chat: bool | None = None,
) -> Asked:
    """Load a model and let it answer a question. The config's seed, or 0, determines the answers.

    name: a run directory, or a model's folder or hub name. question: a text; for a task with conversations it
    may be a row as JSON. config: config with the task, if ``name`` is not a run. overrides: settings
    ``key=value`` for this config or the run's. samples: number of answers. temperature: 0 for greedy answers;
    None: 0 for a single answer, and as in training for several. max_tokens: longest answer; None: as in
    training. chat: whether to use the chat template; None: as the task does or, without a task, if the model
    has a template.

    Raises ConfigError if there is no such run or model, if the model has no chat template, or if the question
    is too long.
    """
    if samples > 1 and temperature == 0:
        raise ConfigError(
            f"--samples {samples} with --temperature 0 would give the same answer each time: leave one out"
        )
    settings, model = _load(name, config, overrides or [])
    section = settings.generator if settings else GeneratorSection(temperature=1.0, max_tokens=MAX_TOKENS)
    task = make_task(settings.task, model.tokenizer, _serve) if settings and chat is None else None
    uses_chat = _uses_chat(settings, chat, model)
    tokens = _encode(task, model.tokenizer, question, chat=uses_chat)
    length = max_tokens or section.max_tokens
    if temperature is None:
        temperature = 0.0 if samples == 1 else section.temperature
    sampling = Sampling(
        temperature, section.top_p, _room(settings, len(tokens), length) if settings else length
    )
    began = time.monotonic()
    seed = settings.run.seed if settings else 0
    answers: Sequence[Completion]
    with _told_if_slow():
        if task is not None and type(task).converse is not Task.converse:
            request = Request(task.question(question), 0, samples, sampling, "test")
            group = _converse(task, request, model, section.stop, seed)
            tokens, answers = group.request.prompt.tokens, group.completions
        else:
            answers = model.answer(tokens, sampling, samples=samples, stop=section.stop, seed=seed)
    decode = model.tokenizer.decode
    return Asked(
        model=settings.model.path if settings else name,
        dtype=model.dtype,
        device=model.device,
        prompt=decode(tokens),
        temperature=temperature,
        max_tokens=sampling.max_tokens,
        replies=[_reply(_text(answer, decode), answer) for answer in answers],
        seconds=time.monotonic() - began,
        not_computed=_rewards_of(settings) if settings and task is not None else [],
        bare=not (settings or uses_chat),
    )


def _rewards_of(settings: Config) -> list[str]:
    """Return the config keys of the rewards that ``task.reward`` names."""
    return [reward_key(settings.task.reward, name) for name in settings.task.reward]


def _reply(text: str, answer: Completion) -> Reply:
    """Return a completion, with its text, as a Reply. If its reward is not finite, the environment failed."""
    failed = answer.reward is not None and not math.isfinite(answer.reward)
    reward = None if failed else answer.reward
    return Reply(text, answer.finish_reason != "stop", len(answer.tokens), failed, answer.fault, reward)


def _text(answer: Completion, decode: Callable[[np.ndarray], str]) -> str:
    """Return a completion's text.

    If an agent's episode has several sequences, the line SEQUENCE precedes each of them except the first.
    """
    parts = np.split(answer.tokens, np.flatnonzero(answer.begin_T))
    return f"\n{SEQUENCE}\n".join(map(decode, parts))


def _load(name: str, config: Path | None, overrides: list[str]) -> tuple[Config | None, HfAnswers]:
    """Return the config of the run or file, None for a model without a file, and the model to ask.

    name: run, or folder or hub name of a model. config: file with a config for that model. Raises ConfigError
    if one of them cannot be loaded, or if there are ``overrides`` but no config.
    """
    refuse_missing(name)
    from tba_hpc.learner.hf_answers import HfAnswers

    if config or (Path(name) / "config.yaml").is_file():
        found, _ = find_subject(name, config=config, overrides=overrides)
        return found, HfAnswers(found.model.path, found.model.dtype)
    if overrides:
        raise ConfigError(f"--set {overrides[0]} has no config to change: name one with --config")
    return None, HfAnswers(name)


def _uses_chat(settings: Config | None, chat: bool | None, model: HfAnswers) -> bool:
    """Return whether to use the chat template. settings: config, if any. chat: as for ``ask``."""
    if chat is not None:
        return chat
    return settings.task.options.get("chat") is True if settings else model.tokenizer.has_chat


def _encode(task: Task | None, tokenizer: Tokenizer, question: str, *, chat: bool) -> np.ndarray:
    """Return the tokens of a question, int32 [T], formatted like the task's prompts if the task can do so.

    Otherwise ``chat`` says whether the chat template is applied.
    """
    if task is not None and (tokens := task.encode_question(question)) is not None:
        return tokens
    return tokenizer.encode_chat(question) if chat else tokenizer.encode(question)


def _converse(task: Task, request: Request, model: HfAnswers, stop: Sequence[str], seed: int) -> Group:
    """Return the group of answers, each of which is a whole conversation with the task's environment."""
    from tba_hpc.learner.hf_answers import HfTurns

    generator = task.converse(HfTurns(model, stop, seed), model.tokenizer)
    generator.submit(request)
    groups: list[Group] = []
    with _unlogged():
        while not groups:
            groups = generator.step()
    return groups[0]


@contextmanager
def _told_if_slow() -> Iterator[None]:
    """Print a line to stderr if the model is still answering after SLOW_SECONDS."""
    said = f"still generating after {SLOW_SECONDS:g} s; --max-tokens N limits the length of an answer"
    timer = Timer(SLOW_SECONDS, print, [said], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _unlogged() -> Iterator[None]:
    """Log no failures of environments, because the answers show them."""
    task_contract.log.disabled = True
    try:
        yield
    finally:
        task_contract.log.disabled = False


def _serve(model: ModelSection, generator: GeneratorSection, **_: object) -> Victim:
    """Raise ConfigError, because ``tba ask`` does not serve the second model that some tasks need."""
    raise ConfigError(
        f"the task needs {model.path}, which tba ask does not serve: add --plain or --chat to ask without "
        "the task"
    )


def _room(settings: Config, prompt_tokens: int, max_tokens: int) -> int:
    """Return ``max_tokens``, or the room in the context if that is less. Raises ConfigError for no room."""
    left = settings.model.context_length - prompt_tokens
    if left < 1:
        raise ConfigError(
            f"the question has {prompt_tokens} tokens, and model.context_length="
            f"{settings.model.context_length} leaves no room for an answer: ask a shorter one"
        )
    return min(max_tokens, left)


def print_answers(asked: Asked, *, as_json: bool = False) -> None:
    """Print the prompt, the answers, and a line that says how they were made; or all of this as JSON."""
    if as_json:
        print(json.dumps(asdict(asked), indent=2))
        return
    console = Terminal()
    console.print(Text(asked.prompt.strip("\n"), style="dim"))
    for reply in asked.replies:
        fault = f"[…its environment failed{reply.fault and f': {reply.fault}'}]"
        end = fault if reply.failed else "[…cut off]" if reply.truncated else ""
        said = reply.text.strip() or ("" if end else "(no text: the model ended at once)")
        reward = "" if reply.reward is None else f"[reward {reply.reward:g}]"
        console.print(Indented(Text(" ".join(filter(None, (said, end, reward))))))
    if asked.not_computed:
        console.print(Text(f"tba ask does not compute {', '.join(asked.not_computed)}", style="dim"))
    if asked.bare:
        console.print(
            Text("the question was asked as it is; --config FILE gives it a task's format", style="dim")
        )
    console.print(Text(_how(asked), style="dim"))


def _how(asked: Asked) -> str:
    """Return the line that says how the answers were made."""
    how = f"at temperature {asked.temperature:g}" if asked.temperature else "greedy"
    place = "a GPU" if asked.device == "cuda" else "the CPU"
    answers = f"{count(len(asked.replies), 'answer')} of at most {count(asked.max_tokens, 'token')}"
    by = f"by transformers on {place}, in {asked.dtype}, {asked.seconds:.1f} s"
    return f"{asked.model}: {how}, {answers}, {by}"
