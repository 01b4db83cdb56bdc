"""Episodes driven by the user's own program, which calls the policy through OpenAI's chat completions.

    {"prompt": "Find the bug.", "files": "…"}

The program is started once per episode, within the limits of tasks.program. It reads a row, like the one
above, as a line of JSON, and finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment. If a request
repeats an earlier request and its answer, and appends messages, the model continues from exactly the tokens
that were sampled. Any other request begins another sequence of the episode, in which the model does not see
the earlier ones. The episode ends when the program exits. The last line of its output is the reward, unless
task.reward is set.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from tba_hpc.config import RewardSection
from tba_hpc.core.ports import Generator, Message, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Request, Sampling
from tba_hpc.environments.chat import Chat
from tba_hpc.environments.conversations import Conversations, Episode, Reaction
from tba_hpc.environments.protocol import Body, ChatMessage, ChatRequest, RefusedError, completion, message_of
from tba_hpc.environments.task import Conversational, Count
from tba_hpc.run.background import in_background
from tba_hpc.tasks.fields import Fields
from tba_hpc.tasks.program import Confined, Ended, ProgramError, find_word, require_program

if TYPE_CHECKING:
    from tba_hpc.environments.endpoint import Endpoint

PROGRAM_CHECK_SECONDS = 0.02
"""Interval between checks of whether a program has ended, in seconds."""

SPARE_SECONDS = 5.0
"""Seconds beyond task.options.step_seconds after which a thread that waits for a program is abandoned."""

LIMIT = "the episode has reached the run's limit of tokens (generator.max_tokens) or turns (max_turns)"
"""Error for requests after a limit has been reached."""

COMMAND = "task.options.command"
"""Config key of the program, for errors."""

Tools = list[dict[str, Any]]
"""Schemas of a request's tools."""


@dataclass(slots=True)
class ProgramSession:
    """The program of one episode. The endpoint calls ``ask``; Conversations calls the other methods.

    asked: the request that the model answers next. sequence: index of the sequence that this request
    continues or begins. calls: number of tool calls so far. failed_calls: number of malformed tool calls.
    one_at_a_time: lock held while a request is read and answered.
    """

    task: Agent
    request: Request
    row: Fields
    asked: ChatRequest | None = None
    sequence: int = 0
    calls: int = 0
    failed_calls: int = 0
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _answer: Future[Body] = field(default_factory=Future)
    _arrived: threading.Event = field(default_factory=threading.Event)
    _known: dict[int, tuple[Tools, list[Message]]] = field(default_factory=dict)  # by sequence, so far
    _key: str = field(default_factory=secrets.token_urlsafe)
    _over: str = ""
    _program: Confined | None = None

    async def ask(self, asked: ChatRequest) -> Body:
        """Wait for the answer to a request, and return it.

        If the last request is sent again, as clients do after a lost connection, it gets the same answer.
        Raises RefusedError if a limit is reached, or if the episode is over.
        """
        if asked != self.asked:
            self.asked, self._answer = asked, Future()
            self._arrived.set()
            if self._over:
                self._refuse(self._over)
        return await asyncio.wrap_future(self._answer)

    def open(self) -> tuple[list[Message], Tools]:
        """Start the program; return the messages and tools of its first request.

        Raises ProgramError if the program ends without a request, or TimeoutError if none comes in time.
        """
        endpoint = self.task.endpoint
        endpoint.sessions[self._key] = self
        self._program = Confined(
            self.task.words,
            json.dumps(self.row).encode() + b"\n",
            seconds=self.task.seconds * (self.task.max_turns + 1),
            memory_mb=self.task.memory_mb,
            variables={"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": self._key},
        )
        added = self._next()
        if not added and (ended := self.end()):
            why = f"status {ended.status} before its first valid request: {ended.last_error}"
            raise ProgramError(f"{self.task.command} ended with {why.rstrip(': ')}")
        assert self.asked
        return added, self.asked.tools

    def act(self, text: str, **count: Any) -> Reaction:
        """Answer the last request with the model's turn, ``text``, and wait for the next request.

        Returns the messages that the next request adds to ``sequence``, and whether the episode is over: if
        the program ends instead, there are no messages. Raises TimeoutError if neither comes in time. count:
        keyword arguments of ``protocol.completion``.
        """
        assert self.asked
        message, malformed = message_of(text, self.asked, self.calls)
        self.calls += len(message.get("tool_calls", ())) + malformed
        self.failed_calls += malformed
        known = [*self.asked.plain, ChatMessage.model_validate(message).plain]
        self._known[self.sequence] = self.asked.tools, known
        with suppress(InvalidStateError):  # the request was refused meanwhile
            self._answer.set_result(completion(message, **count))
        added = self._next()
        return added, not added

    def reward(self) -> float | None:
        """Return the reward that the program prints, or None if task.reward is set.

        Raises ProgramError if the program fails, or if it prints no reward and task.reward is not set. After
        a limit has ended the conversation, neither is an error: the reward is 0, or None with task.reward.
        """
        assert self._program
        cut = not self._answer.done()
        self._refuse(LIMIT)
        with suppress(subprocess.TimeoutExpired):
            self._program.process.wait(self.task.seconds)
        ended = self.end()
        assert ended
        if not self.task.own_reward and (cut or ended.status == 0):
            return None
        try:
            return ended.reward(self.task.command)
        except ProgramError:
            if cut:
                return 0.0
            raise

    def end(self) -> Ended | None:
        """Kill the program, and refuse further requests; return its result, or None after the first call."""
        self.task.endpoint.sessions.pop(self._key, None)
        self._refuse("the episode is over")
        program, self._program = self._program, None
        return program.end() if program else None

    def _refuse(self, why: str) -> None:
        """Refuse the request that waits for an answer, and all that follow."""
        self._over = self._over or why
        with suppress(InvalidStateError):  # no request is waiting
            self._answer.set_exception(RefusedError(self._over))

    def _next(self) -> list[Message]:
        """Wait for the next request, and return the messages that it adds; [] if the program ends instead.

        A request continues the longest sequence that it repeats completely; if there is none, it begins a new
        sequence. Kills the program and raises TimeoutError if neither a request nor the end comes in time.
        """
        assert self._program
        deadline = time.monotonic() + self.task.seconds
        while time.monotonic() < deadline:
            running = self._program.process.poll() is None
            if self._arrived.wait(PROGRAM_CHECK_SECONDS if running else 0):
                self._arrived.clear()
                return self._added()
            if not running:
                return []
        self.end()
        limit = f"step_seconds={self.task.seconds:g}"
        raise TimeoutError(f"{self.task.command} took more than {limit} until its next request or its end")

    def _added(self) -> list[Message]:
        assert self.asked
        tools, messages = self.asked.tools, self.asked.plain
        repeats = {
            len(known): sequence
            for sequence, (described, known) in self._known.items()
            if described == tools and len(known) < len(messages) and known == messages[: len(known)]
        }
        most = max(repeats, default=0)
        self.sequence = repeats.get(most, len(self._known))
        return messages[most:]


class Programs(Conversations):
    """Generator of conversations that are driven by programs."""

    partner = "program"
    _task: Agent

    def close(self) -> None:
        """Close the engine, and kill all programs."""
        super().close()
        self._task.endpoint.close()

    def _sampling(self, episode: Episode) -> Sampling:
        sampling, asked = super()._sampling(episode), episode.session.asked
        most = min(sampling.max_tokens, asked.max_tokens, asked.max_completion_tokens)
        least = min(sampling.min_tokens, most)
        return replace(sampling, max_tokens=most, min_tokens=least, stop=tuple(asked.stop))

    def _act(self, episode: Episode, text: str, turn: Completion) -> partial[Reaction]:
        tokens = len(turn.tokens)
        count = {"prompt_tokens": sum(map(len, episode.context)) - tokens, "tokens": tokens}
        return partial(episode.session.act, text, cut=turn.finish_reason != "stop", **count)

    def _acted(self, episode: Episode, reaction: Reaction) -> None:
        episode.sequence = episode.session.sequence
        super()._acted(episode, reaction)

    def _given(self, episode: Episode, messages: Sequence[Message]) -> np.ndarray:
        """Return the tokens of ``messages``, which a program's request adds to the episode, int32 [T]."""
        if not episode.context:
            return self._chat.encode(self._chat.render(messages, tools=episode.session.asked.tools))
        for message in messages:
            self._chat.require(message["role"])
        return super()._given(episode, messages)

    def _leave(self, episode: Episode) -> None:
        in_background(episode.session.end)
        super()._leave(episode)

    def _fail(self, episode: Episode, error: BaseException) -> None:
        in_background(episode.session.end)
        own = isinstance(error, ProgramError | TimeoutError | ValueError)  # needs no traceback
        super()._fail(episode, error.with_traceback(None) if own else error)


class Agent(Conversational):
    """Task whose conversations are driven by a program, which gives the reward unless task.reward is set."""

    endpoint: Endpoint
    other_start = (
        "the program's first request differs from that of earlier episodes of the row: let its messages and "
        "tools follow from the row alone, and send it alone, as simultaneous requests arrive in any order"
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reward: Mapping[str, RewardSection],
        command: Annotated[list[str], Field(min_length=1)],
        max_turns: Count = 32,
        memory_mb: Annotated[int, Field(ge=16)] = 4096,
        **options: Any,
    ) -> None:
        """Make a task from the config's options. Raises ConfigError if it cannot be made.

        command: words of the program's command. memory_mb: see RewardSection. options: those of
        Conversational; ``step_seconds`` limits the time from the program's start, or from an answer, to its
        next request or its end.
        """
        self.own_reward = not reward
        self.command = " ".join(command)
        self.words = [find_word(COMMAND, word) for word in command]
        self.memory_mb = memory_mb
        super().__init__(tokenizer, reward=reward, max_turns=max_turns, **options)

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Start the endpoint; return a generator of whole conversations.

        generator: generator of the model's turns. tokenizer: the model's tokenizer, with a chat template.
        Raises ConfigError if this machine cannot start the program.
        """
        require_program(COMMAND, self.words)
        from tba_hpc.environments.endpoint import Endpoint  # a login node may lack aiohttp

        self.endpoint = Endpoint()
        chat, seconds = self._chat_of(tokenizer), self.seconds + SPARE_SECONDS
        return Programs(generator, self, chat, at_once=self.at_once, seconds=seconds)

    def session(self, request: Request) -> ProgramSession:
        """Make the session of a new episode, one of the completions of ``request``."""
        return ProgramSession(self, request, self.row(request.prompt))

    def opening(self, prompt: Prompt, said: Any, chat: Chat) -> tuple[Prompt, list[Message]]:
        """Return the program's first request as a prompt and as messages. Raises ValueError; see ``begun``.

        prompt: the row's prompt. said: messages and tools of the program's first request.
        """
        messages, tools = said
        return self.begun(prompt, said, lambda: chat.render(messages, tools=tools), chat), [*messages]
