"""A Generator of whole conversations that uses a Generator of single turns.

A request for n completions becomes n episodes. The engine samples a turn, the environment answers in a
thread, and the next turn is submitted at once, with all earlier tokens as its prompt. While some episodes
wait for their environments, the engine samples for others. A completion is everything after the prompt;
tokens that the policy did not sample have the log-probability NaN. If an agent's request does not continue
the earlier tokens, it begins another sequence. A completion holds all sequences, one after another; BEGIN
marks the beginning of each but the first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import raised_at
from tba_hpc.core.ports import Generator, Message
from tba_hpc.core.task_contract import Failures
from tba_hpc.core.types import (
    BEGIN,
    TOP_LOGPROBS,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Request,
    Sampling,
    WeightUpdate,
)
from tba_hpc.environments.chat import Chat
from tba_hpc.run.background import Worker

if TYPE_CHECKING:  # environments.task imports this module
    from tba_hpc.environments.task import Conversational

Reaction = tuple[Sequence[Message], bool]
"""Messages that follow a turn, and whether the episode is over."""

PAUSE_SECONDS = 0.005
"""Longest wait for an environment while the engine is idle, in seconds."""

MOST_HANGING = 64
"""Number of hanging calls at which the run ends, because their threads cannot be ended."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """The group of a request while some of its episodes are open.

    completions: completions of the ended episodes, by index in the group. versions: int32 [n, 2], the
    versions of the weights that sampled the first and the last token of each episode.
    """

    request: Request
    completions: dict[int, Completion] = field(default_factory=dict)
    versions: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.versions = np.zeros((self.request.n, 2), np.int32)

    @property
    def finished(self) -> Group:
        """The finished group. Every episode must have added its completion."""
        completions = tuple(self.completions[place] for place in range(self.request.n))
        return Group(self.request, completions, self.versions)


class Part(NamedTuple):
    """Tokens that were added to an episode at once: a sampled turn, or an environment's answer.

    sequence: index of the sequence to which the tokens belong. tokens: int32 [T]. logprobs: float32 [T]. top:
    TOP_LOGPROBS [T, C], the likeliest tokens at each position.
    """

    sequence: int
    tokens: np.ndarray
    logprobs: np.ndarray
    top: np.ndarray


@dataclass(slots=True, eq=False)
class Episode:
    """A conversation in progress, which becomes one completion of a group.

    place: index of that completion in the group. session: a contract.Session or an agent.ProgramSession.
    prompt: the prompt, including what the session added. sequence: index of the sequence to which the next
    tokens belong; only sequence 0 follows the prompt. parts: the conversation after the prompt, in order of
    arrival.
    """

    group: OpenGroup
    place: int
    session: Any
    prompt: Prompt
    sequence: int = 0
    messages: list[Message] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    turns: int = 0

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def context(self) -> list[np.ndarray]:
        """Tokens of the current sequence so far, in parts. Sequence 0 begins with the prompt."""
        own = [part.tokens for part in self.parts if part.sequence == self.sequence]
        return own if self.sequence else [self.prompt.tokens, *own]

    def add(
        self, tokens: np.ndarray, logprobs: np.ndarray | None = None, top: np.ndarray | None = None
    ) -> None:
        """Append tokens, int32 [T], to the current sequence.

        logprobs: float32 [T]. top: TOP_LOGPROBS [T, C], the likeliest tokens at each position. Both are None
        for tokens that the policy did not sample. Sequence 0, which follows the prompt, must begin with
        sampled tokens. Any later sequence must begin with other tokens, which take the place of a prompt.
        """
        if logprobs is None:
            logprobs = np.full(len(tokens), np.nan, np.float32)
            logprobs[:1] = np.nan if self.context else BEGIN
        if top is None:
            likeliest = self.parts[0].top.shape[1] if self.parts else 0
            top = np.zeros((len(tokens), likeliest), TOP_LOGPROBS)
        self.parts.append(Part(self.sequence, tokens, logprobs, top))


class Conversations:
    """The Generator of a task with an environment; see the module's docstring.

    at_once: maximum number of environments that work concurrently. seconds: time limit of an environment's
    work in a turn. partner: word for what the policy talks with, for errors.
    """

    partner = "environment"

    # Attributes of the engine:
    version = property(attrgetter("_generator.version"))
    loading = property(attrgetter("_generator.loading"))
    load_seconds = property(attrgetter("_generator.load_seconds"))
    busy_seconds = property(attrgetter("_generator.busy_seconds"))
    rebuilds = property(attrgetter("_generator.rebuilds"))
    nan_groups = property(lambda self: getattr(self._generator, "nan_groups", 0))
    recompute_share = property(lambda self: getattr(self._generator, "recompute_share", 0.0))
    stage = property(lambda self: getattr(self._generator, "stage", ""))

    def __init__(
        self, generator: Generator, task: Conversational, chat: Chat, *, at_once: int, seconds: float
    ) -> None:
        self._generator = generator
        self._task = task
        self._chat = chat
        self._workers = Workers(at_once, seconds)
        self._turns: dict[int, Episode] = {}  # episodes of the engine's turns, by the turn's request id
        self._asked = 0
        self._open = 0
        self._loaded = generator.version
        self._final = False  # whether the run's last weights have come
        self._finished: list[Group] = []
        self._failures = Failures("failures", "the completion is set aside")

    @property
    def in_flight(self) -> int:
        """Number of turns in the engine, or half the number of open episodes if that is larger.

        A caller submits requests while this number is below that of the completions that the engine decodes
        at a time. While environments work, up to twice as many episodes can thus be open.
        """
        return max(self._generator.in_flight, -(-self._open // 2))

    def submit(self, request: Request) -> None:
        """Begin ``request.n`` episodes."""
        group = OpenGroup(request)
        self._open += request.n
        for place in range(request.n):
            episode = Episode(group, place, self._task.session(request), request.prompt)
            self._work(episode, episode.session.open, self._opened)

    def step(self) -> list[Group]:
        """Advance all episodes; return the groups whose episodes have all ended."""
        for turn in self._generator.step():
            self._said(self._turns.pop(turn.request.id), turn)
        self._workers.deliver(0 if self._generator.in_flight else PAUSE_SECONDS)
        groups, self._finished = self._finished, []
        return groups

    def load(self, update: WeightUpdate) -> None:
        """Load new weights; open episodes continue under them.

        If they are the run's last weights, training episodes are left unfinished instead. The trainer would
        not learn from these episodes, and evaluations would have to wait for their environments.
        """
        self._generator.load(update)
        self._loaded = update.publication.version
        self._final = update.publication.final

    def close(self) -> None:
        """Close the engine; open episodes are lost."""
        self._generator.close()

    def _work(self, episode: Episode, call: Callable[[], Any], then: Callable[[Episode, Any], None]) -> None:
        """Run ``call`` in a thread. A later ``step`` runs ``then`` with the episode and the result.

        If either function raises, the episode fails. Once the run's last weights have been loaded, a training
        episode is left unfinished instead.
        """

        def work() -> Any:
            return None if self._comes_too_late(episode) else call()

        def take(result: Any) -> None:
            if self._comes_too_late(episode):
                self._leave(episode)
                return
            try:
                then(episode, result)
            except ConfigError as error:  # the template refuses this environment's messages
                self._fail(episode, ValueError(str(error)))
            except Exception as error:  # templates may raise anything, too
                self._fail(episode, error)

        self._workers.add(Job(work, take, partial(self._fail, episode)))

    def _comes_too_late(self, episode: Episode) -> bool:
        return self._final and episode.group.request.split == "train"

    def _leave(self, episode: Episode) -> None:
        """Leave an episode, and with it its group, unfinished."""
        self._open -= 1

    def _opened(self, episode: Episode, said: Any) -> None:
        episode.prompt, episode.messages = self._task.opening(episode.prompt, said, self._chat)
        episode.group.request = replace(episode.group.request, prompt=episode.prompt)
        self._ask(episode)

    def _ask(self, episode: Episode) -> None:
        """Ask the engine for the episode's next turn."""
        request = episode.group.request
        self._asked += 1
        prompt = Prompt(request.prompt.id, np.concatenate(episode.context), request.prompt.target)
        self._generator.submit(Request(prompt, self._asked, 1, self._sampling(episode), request.split))
        self._turns[self._asked] = episode  # only once the engine has accepted it

    def _sampling(self, episode: Episode) -> Sampling:
        """Return the sampling parameters of the next turn, limited to the tokens left for the episode."""
        sampling = episode.group.request.sampling
        return replace(
            sampling,
            max_tokens=sampling.max_tokens - episode.length,
            min_tokens=max(0, sampling.min_tokens - episode.length),
        )

    def _said(self, episode: Episode, turn: Group) -> None:
        """Add a sampled turn to its episode, and let the session react unless the token limit is reached."""
        (completion,) = turn.completions
        episode.add(completion.tokens, completion.logprobs, completion.top_logprobs)
        versions = episode.group.versions[episode.place]
        versions[:] = turn.versions[0] if not episode.turns else (versions[0], turn.versions[0, 1])
        episode.turns += 1
        if completion.finish_reason != "stop" and episode.length >= episode.group.request.sampling.max_tokens:
            self._end(episode, "length")
            return
        text = self._chat.decode(completion.tokens)
        episode.messages.append({"role": "assistant", "content": text})
        self._work(episode, self._act(episode, text, completion), self._acted)

    def _act(self, episode: Episode, text: str, turn: Completion) -> Callable[[], Reaction]:
        """Return a function by which the episode's session reacts to a turn; ``_work`` calls it in a thread.

        text, turn: the turn, decoded and as sampled.
        """
        return partial(episode.session.act, text, tuple(episode.messages))

    def _acted(self, episode: Episode, reaction: Reaction) -> None:
        messages, done = reaction
        if done:
            self._end(episode, "stop")
        elif episode.turns == self._task.max_turns:
            self._end(episode, "turns")
        else:
            given = self._given(episode, messages)
            if episode.length + len(given) >= episode.group.request.sampling.max_tokens:
                self._end(episode, "length")
                return
            episode.messages += messages
            episode.add(given)
            self._ask(episode)

    def _given(self, episode: Episode, messages: Sequence[Message]) -> np.ndarray:
        """Return the tokens between the last turn and the next one, int32 [T]."""
        return self._chat.bridge(episode.context[-1], messages)

    def _end(self, episode: Episode, finish: FinishReason) -> None:
        self._work(episode, episode.session.reward, partial(self._close, finish=finish))

    def _close(
        self, episode: Episode, reward: float | None, finish: FinishReason = "stop", fault: str = ""
    ) -> None:
        """Complete an episode, and its group if this was the last open episode of the group.

        reward: the environment's own reward, or None. fault: reason why there is no reward, or "".
        """
        group = episode.group
        if not fault and reward is not None and not math.isfinite(reward):
            fault = f"the {self.partner}'s reward is {reward}"
        _, *values = zip(*sorted(episode.parts, key=attrgetter("sequence")), strict=True)
        tokens, logprobs, top = map(np.concatenate, values)
        group.completions[episode.place] = Completion(
            tokens,
            logprobs,
            finish,
            reward,
            calls=episode.session.calls,
            failed_calls=episode.session.failed_calls,
            top_logprobs=top,
            last_turn=episode.parts[-1].tokens,
            fault=fault,
        )
        self._open -= 1
        if len(group.completions) == group.request.n:
            self._finished.append(group.finished)

    def _fail(self, episode: Episode, error: BaseException) -> None:
        """End an episode with the reward NaN because of ``error``, or raise it if it is a ConfigError."""
        if isinstance(error, ConfigError):
            raise error
        if self._comes_too_late(episode):
            self._open -= 1
            return
        prompt = f"{episode.group.request.split} prompt {episode.prompt.id}"
        self._failures.note(f"the {self.partner} of {prompt} failed in turn {episode.turns}", error)
        if not episode.parts:  # a completion needs at least one token
            end = np.array([self._chat.eos_token_id], np.int32)
            episode.add(end, np.zeros(1, np.float32))
            episode.group.versions[episode.place] = self._loaded  # evaluations are told apart by version
        self._close(episode, math.nan, fault=raised_at(error).removeprefix("raised "))


# --- Threads ---


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A call, with the functions that receive its result or its exception."""

    call: Callable[[], Any]
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None]


class Workers:
    """Runs up to ``at_once`` jobs concurrently, each in a thread.

    A job that takes longer than ``seconds`` fails. Its thread cannot be ended, and goes on as a daemon, while
    the next job begins. Results are delivered in the thread that calls ``deliver``.
    """

    def __init__(self, at_once: int, seconds: float) -> None:
        self._at_once, self._seconds = at_once, seconds
        self._waiting: deque[Job] = deque()
        self._running: dict[Future[Any], tuple[Job, float]] = {}  # each with its deadline
        self._hanging: set[Future[Any]] = set()

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)
        self._fill()

    def deliver(self, pause: float) -> None:
        """Call each finished job's ``then`` with its result, or its ``failed`` with its exception.

        If no job has finished, wait up to ``pause`` seconds for one. A job over the time limit fails as well.
        Raises ConfigError if too many jobs hang.
        """
        wait(self._running, pause, FIRST_COMPLETED)
        for call, (job, deadline) in list(self._running.items()):
            if call.done():
                del self._running[call]
                if (error := call.exception()) is not None:
                    job.failed(error)
                else:
                    job.then(call.result())
            elif deadline < time.monotonic():
                del self._running[call]
                self._hanging.add(call)
                job.failed(TimeoutError(f"it took more than {self._seconds:g} s"))
        self._hanging = {call for call in self._hanging if not call.done()}
        if len(self._hanging) >= MOST_HANGING:
            raise ConfigError(
                f"{len(self._hanging)} calls of the environment take more than task.options.step_seconds="
                f"{self._seconds:g} and do not end: set a timeout on what they wait for, or raise the limit"
            )
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            job, worker = self._waiting.popleft(), Worker("environment")
            self._running[worker.submit(job.call)] = job, time.monotonic() + self._seconds
            worker.close(0)
