"""Conversations that a program of the user's own leads, by OpenAI's protocol, as with any model.

    {"prompt": "Find the bug.", "files": "…"}

The program is started once an episode, within the limits of tasks.program. It gets the row as a line of JSON,
and in its environment OPENAI_BASE_URL and OPENAI_API_KEY. Each of its requests continues the one before,
message by message, and so the very tokens that were sampled. Its exit ends the episode; the last line of its
output is the reward, unless task.reward names others.
"""

from __future__ import annotations

import json
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.core.ports import ChatTokenizer, Generator, Message, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Request, Sampling
from tba_hpc.environments.chat import A_TOOL, Chat
from tba_hpc.environments.conversations import Conversations, Episode, Reaction
from tba_hpc.environments.protocol import (
    Body,
    RefusedError,
    Turn,
    completion,
    continues,
    message_of,
    plain,
    unsupported,
)
from tba_hpc.environments.task import Conversational, Count
from tba_hpc.run.background import in_background
from tba_hpc.tasks.program import Confined, Ended, ProgramError, find_word
from tba_hpc.tasks.rewards import Fields

if TYPE_CHECKING:
    from tba_hpc.environments.endpoint import Endpoint

KEY = "task.options.command"

LOOK_SECONDS = 0.02
"""Time between two looks whether a program has ended, s."""

SPARE_SECONDS = 5.0
"""Time beyond step_seconds after which a thread that waits for a program is given up, s."""


@dataclass(slots=True)
class ProgramSession:
    """A program during an episode, and the requests that it makes: an endpoint.Door.

    calls, failed_calls: numbers of tool calls so far, and of malformed ones.
    """

    task: Agent
    endpoint: Endpoint
    request: Request
    row: Fields
    calls: int = field(default=0, init=False)
    failed_calls: int = field(default=0, init=False)
    turn: Turn | None = field(default=None, init=False)
    _known: list[Message] = field(default_factory=list, init=False)
    _asked: queue.SimpleQueue[Turn | RefusedError] = field(default_factory=queue.SimpleQueue, init=False)
    _key: str = field(default_factory=secrets.token_urlsafe, init=False)
    _over: str = field(default="", init=False)
    _cut: bool = field(default=False, init=False)
    _program: Confined | None = field(default=None, init=False)
    _ended: Ended | None = field(default=None, init=False)

    # --- For the endpoint ---

    def ask(self, body: Body) -> Future[Body]:
        """Take a request. One that is sent again while it waits for its answer shares it."""
        if self._over:
            raise RefusedError(self._over)
        if fault := unsupported(body, self.request.sampling, train=self.request.split == "train"):
            raise RefusedError(fault)
        turn, waiting = Turn.of(body), self.turn
        same = waiting and (waiting.messages, waiting.tools) == (turn.messages, turn.tools)
        if waiting and same and not waiting.answer.done():
            return waiting.answer
        if fault := self._other_conversation(turn) or self._misfit(turn):
            self._over = fault
            self._asked.put(RefusedError(fault))
            raise RefusedError(fault)
        self.turn = turn
        self._asked.put(turn)
        return turn.answer

    def end(self) -> None:
        """Kill the program; a request that waits is refused."""
        self.endpoint.doors.pop(self._key, None)
        self._refuse("the episode is over")
        if self._program and not self._ended:
            program, self._program = self._program, None
            self._ended = program.end()

    def _other_conversation(self, turn: Turn) -> str:
        """Say why a request does not continue the conversation; empty if it does."""
        if self.turn and not self.turn.answer.done():
            return "a second request came before the first was answered: an episode is one conversation"
        if self._known and not continues(self._known, turn.messages):
            return (
                "the messages do not continue those before, word by word: an episode is one conversation, "
                "without sub-agents, summaries or second tries"
            )
        if self.turn and turn.tools != self.turn.tools:
            return "the tools differ from those before: an episode is one conversation"
        return ""

    def _misfit(self, turn: Turn) -> str:
        """Say which message after a turn the chat template has no place for; empty if all are fit."""
        roles = [message["role"] for message in turn.messages[len(self._known) :]] if self._known else []
        return next((fault for role in roles if (fault := self.task.refused(role))), "")

    def _refuse(self, why: str) -> None:
        self._over = self._over or why
        if self.turn:
            with suppress(InvalidStateError):
                self.turn.answer.set_exception(RefusedError(why))

    # --- For the conversations ---

    def open(self) -> Turn:
        """Start the program; return its first request. Raises an error if there is none."""
        self.endpoint.doors[self._key] = self
        self._program = Confined(
            self.task.words,
            json.dumps(self.row).encode() + b"\n",
            seconds=self.task.seconds * (self.task.max_turns + 1),
            memory_mb=self.task.memory_mb,
            variables={"OPENAI_BASE_URL": self.endpoint.url, "OPENAI_API_KEY": self._key},
            start=self.endpoint.call,
        )
        if turn := self._next():
            return turn
        self.end()
        raise ProgramError(f"{self._how()} before it asked for anything")

    def answer(self, text: str, *, cut: bool, prompt_tokens: int, tokens: int) -> Reaction:
        """Answer the program's request by a turn; return what its next one adds, or nothing at its exit."""
        turn = self.turn
        assert turn
        for stop in turn.stop:
            text = text.partition(stop)[0]
        message, malformed = message_of(text, bool(turn.tools), self.calls)
        made = len(message.get("tool_calls", ()))
        self.calls, self.failed_calls = self.calls + made + malformed, self.failed_calls + malformed
        self._known = [*turn.messages, plain(message)]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        usage["total_tokens"] = prompt_tokens + tokens
        reason = "tool_calls" if made else "length" if cut else "stop"
        with suppress(InvalidStateError):  # it is over
            turn.answer.set_result(completion(message, reason, usage))
        following = self._next()
        return (following.messages[len(self._known) :], False) if following else ([], True)

    def reward(self) -> float | None:
        """Return the reward that the program wrote; 0 if it wrote none, and the run had cut it off.

        None if task.reward gives it. Raises ProgramError if the program failed.
        """
        assert self._program
        cut = self.turn is not None and not self.turn.answer.done()
        self._refuse("this model's maximum context length is reached, or the run's limit of turns")
        self._program.wait(self.task.seconds)
        self.end()
        assert self._ended
        if self._ended.status == 0 and not self.task.own_reward:
            return None
        with suppress(ValueError, TypeError, RecursionError):
            if self._ended.status == 0:
                return float(json.loads(self._last_line))
        if cut:
            return 0.0 if self.task.own_reward else None
        raise ProgramError(f"{self._how()} and no reward as the last line of its output")

    def _next(self) -> Turn | None:
        """Wait for the next request; return None if the program has ended. Kills it before any error."""
        assert self._program
        deadline = time.monotonic() + self.task.seconds
        try:
            while time.monotonic() < deadline:
                running = self._program.running
                with suppress(queue.Empty):
                    asked = self._asked.get(timeout=LOOK_SECONDS) if running else self._asked.get_nowait()
                    if isinstance(asked, RefusedError):
                        raise asked
                    return asked
                if not running:
                    return None
            raise TimeoutError(f"{self.task.words[0]} took more than step_seconds={self.task.seconds:g}")
        except Exception:
            self.end()
            raise

    @property
    def _last_line(self) -> str:
        assert self._ended
        return self._ended.said.strip().rpartition("\n")[2]

    def _how(self) -> str:
        """Say how the program ended."""
        assert self._ended
        why = f" ({self._ended.last_error})" if self._ended.last_error else ""
        return f"{self.task.words[0]} ended with status {self._ended.status}{why}"


class Programs(Conversations):
    """The Generator of a task whose episodes are programs."""

    def __init__(self, generator: Generator, task: Agent, chat: Chat, endpoint: Endpoint) -> None:
        seconds = task.seconds + SPARE_SECONDS
        super().__init__(generator, task, chat, at_once=task.at_once, seconds=seconds)
        self._endpoint = endpoint

    def close(self) -> None:
        """Close the engine, and kill all programs."""
        super().close()
        self._endpoint.close()

    def _sampling(self, episode: Episode) -> Sampling:
        sampling, turn = super()._sampling(episode), episode.session.turn
        most = int(min(sampling.max_tokens, turn.max_tokens))
        return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most), stop=turn.stop)

    def _reaction(self, episode: Episode, text: str, turn: Completion) -> partial[Reaction]:
        before = len(episode.prompt.tokens) + episode.length - len(turn.tokens)
        cut = turn.finish_reason != "stop"
        return partial(episode.session.answer, text, cut=cut, prompt_tokens=before, tokens=len(turn.tokens))

    def _fail(self, episode: Episode, error: BaseException) -> None:
        in_background(episode.session.end)
        super()._fail(episode, error)


class Agent(Conversational):
    """Task whose conversations are led by a program, whose reward counts unless task.reward names others."""

    other_start = (
        "the program's first request differs from that of earlier episodes of the row: let its messages and "
        "tools follow from the row alone"
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reward: Mapping[str, RewardSection],
        command: Sequence[str],
        train_file: str | None = None,
        test_file: str | None = None,
        max_turns: Count = 32,
        step_seconds: Annotated[float, Field(gt=0)] = 30.0,
        concurrency: Count = 16,
        memory_mb: Annotated[int, Field(ge=16)] = 4096,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        target: str = "answer",
        correct_from: float = 1.0,
        judge_truncated: bool = False,
        validation_prompts: Count = 64,
    ) -> None:
        """Take the options of the config; those that Environment has mean the same. Raises ConfigError.

        command: the program and its arguments, as for a RewardSection. step_seconds: longest time from its
        start, or from an answer, to its next request or its end. concurrency: most programs of a searcher
        that compute at a time. memory_mb: as for a RewardSection.
        """
        if not command:
            raise ConfigError(f"{KEY}=[] is no command: give a program and its arguments")
        self.own_reward = not reward
        self.words = [find_word(KEY, word) for word in command]
        self.memory_mb = memory_mb
        super().__init__(
            tokenizer,
            max_turns=max_turns,
            step_seconds=step_seconds,
            concurrency=concurrency,
            chat_template_kwargs=chat_template_kwargs,
            reward=reward,
            train_file=train_file,
            test_file=test_file,
            target=target,
            correct_from=correct_from,
            judge_truncated=judge_truncated,
            validation_prompts=validation_prompts,
        )

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Return a generator of conversations around a generator of turns, with an endpoint of its own."""
        from tba_hpc.environments.endpoint import Endpoint  # a login node need not have its library

        self._endpoint = Endpoint()
        return Programs(generator, self, self._chat_of(tokenizer), self._endpoint)

    def session(self, request: Request) -> ProgramSession:
        """Make a new session for an episode."""
        return ProgramSession(self, self._endpoint, request, self.row(request.prompt))

    def opening(self, prompt: Prompt, said: Turn, chat: Chat) -> tuple[Prompt, list[Message]]:
        """Return the prompt that the program's first request is, also as messages. Raises ValueError."""
        rendered = partial(chat.render, said.messages, tools=said.tools)
        return self.begun(prompt, (said.messages, said.tools), rendered, chat), [*said.messages]

    def chat(self, tokenizer: ChatTokenizer) -> Chat:
        """Return the chat template. Raises ConfigError if nothing may follow a turn in it."""
        self._refused: dict[str, str] = {}
        for role, tools in (("user", []), ("tool", [A_TOOL])):
            try:
                Chat(tokenizer, tools, [role], self._template_options)
            except ConfigError as error:
                self._refused[role] = str(error)
        if len(self._refused) == 2:
            raise ConfigError(self._refused["user"])
        return super().chat(tokenizer)

    def refused(self, role: str) -> str:
        """Say why no message of this role can follow a turn; empty if it can."""
        if role not in ("user", "tool"):
            return f"a message of role {role} cannot follow the model's: only those of user and tool can"
        return self._refused.get(role, "")
