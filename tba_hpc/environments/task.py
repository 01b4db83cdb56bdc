"""Tasks whose completions are conversations with an environment or a program.

Each conversation is based on one row of a JSONL file.

    {"prompt": "Buy three apples.", "budget": 5}

``prompt`` is a text or a list of messages. The environment's ``reset`` gets the fields of the row for
which it has arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
from pydantic import Field

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import Generator, Message, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Request, Split
from tba_hpc.environments.chat import Chat
from tba_hpc.environments.contract import Contract, Session
from tba_hpc.environments.conversations import Conversations
from tba_hpc.tasks.fields import Fields, LackingError, Unusable, filled_in, row_in
from tba_hpc.tasks.jsonl import Jsonl

Count = Annotated[int, Field(ge=1)]


class Conversational(Jsonl):
    """Task whose completions are conversations with a partner: an environment or a program.

    The reward is the partner's own, if it gives one, plus the weighted rewards of task.reward for the text of
    the last turn. schemas: tools that every prompt describes. roles: roles of messages that may follow a
    turn. other_start: error for an episode that begins differently from an earlier one of the same row.
    """

    schemas: Sequence[dict[str, Any]] = ()
    roles: Sequence[str] = ("user",)
    other_start = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_turns: Count = 8,
        step_seconds: Annotated[float, Field(gt=0)] = 30.0,
        concurrency: Count = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat: Literal[True] = True,
        **options: Any,
    ) -> None:
        """Make a task from the config's options. Raises ConfigError.

        max_turns: number of the model's turns after which an episode ends. step_seconds: time limit for each
        reply of the environment or program, in seconds. concurrency: number of environments or programs that
        may work at the same time, per searcher. chat_template_kwargs: variables of the chat template, such as
        {enable_thinking: false}. chat: always true, since conversations need a chat template. options: those
        of ``Jsonl``.
        """
        super().__init__(tokenizer, chat=chat, **options)
        self.max_turns = max_turns
        self.seconds, self.at_once = step_seconds, concurrency
        self._template_options = chat_template_kwargs
        self._chat = self._chat_of(tokenizer)
        self._encode = self._chat.encode
        self._opened: dict[Prompt, tuple[object, Prompt]] = {}

    def require_start(self, row: Fields) -> None:
        """Raise Unusable if a row lacks a field that an episode needs."""

    def _checked(self, row: Fields) -> Fields:
        """Return the row unchanged. Raises Unusable if an episode cannot begin with it.

        Raises ConfigError if the row has tools, but the chat template cannot show their results.
        """
        tools = row.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Unusable("'tools' is not a list of schemas, each an object")
        if tools:
            self._chat.require("tool")
        self.require_start(row)
        return super()._checked(row)

    def identity(self, row: Fields) -> str:
        """Return a string that is equal for equal rows. It has all fields, since the partner may use any."""
        return repr(sorted(row.items()))

    def shown(self, row: Fields) -> str:
        """Render a row's prompt with the chat template."""
        return _render(self._chat, row, self._messages(row))

    def encode_question(self, text: str) -> np.ndarray:
        """Encode a question as a conversation's prompt, int32 [T]."""
        return self.question(text).tokens

    def question(self, text: str) -> Prompt:
        """Return the prompt of a conversation about a user's question. Raises ConfigError.

        A question that is a JSON object is a whole row. Any other text becomes the row's ``prompt``, and the
        field of task.options.template if there is exactly one.
        """
        row = self._asked(text)
        prompt = Prompt(0, self._encode(self.shown(row)), "")
        self._rows[prompt] = row
        return prompt

    def _asked(self, text: str) -> Fields:
        """Return the row of a user's question. Raises ConfigError if an episode cannot begin with it."""
        try:
            if (row := row_in(text)) is not None:
                return self._checked(row)
            named = self._needed if len(self._needed) == 1 else ()
            plain = {"prompt": text, **dict.fromkeys(named, text)}
            self.require_start(plain)
            return plain
        except Unusable as error:
            field = error.field if isinstance(error, LackingError) else ""
            whole = f'; give a whole row, such as {{"prompt": "…", "{field}": …}}' if field else ""
            raise ConfigError(f"the question cannot be used as a row: {error}{whole}") from None

    @abstractmethod
    def session(self, request: Request) -> Any:
        """Make the session of a new episode; see conversations.Episode."""

    @abstractmethod
    def opening(self, prompt: Prompt, said: Any, chat: Chat) -> tuple[Prompt, list[Message]]:
        """Return the prompt with which an episode begins, and its messages. Raises ValueError; see ``begun``.

        prompt: the row's prompt. said: result of the session's ``open``.
        """

    def begun(self, prompt: Prompt, said: object, text: Callable[[], str], chat: Chat) -> Prompt:
        """Return the prompt with which all episodes of a row begin.

        prompt: the row's prompt, which is returned if ``said`` is empty. said: what the session adds to the
        prompt. text: function that renders the whole prompt. Raises ValueError if the prompt is too long, or
        if an earlier episode of the row began differently, because a group has a single prompt.
        """
        if prompt not in self._opened:
            begun = Prompt(prompt.id, chat.encode(text()), prompt.target) if said else prompt
            self._rows[begun] = self.row(prompt)
            self._opened[prompt] = said, begun
        before, begun = self._opened[prompt]
        if said != before:
            raise ValueError(self.other_start)
        if self.room is not None and len(begun.tokens) > self.room:
            raise ValueError(
                f"the episode begins with a prompt of {len(begun.tokens)} tokens, but model.context_length "
                f"less generator.max_tokens leaves {self.room}"
            )
        return begun

    def text(self, completion: Completion) -> str:
        """Return the text of the model's last turn."""
        last = completion.last_turn
        return self._decode_completion(completion.tokens if last is None else last)

    def _messages(self, row: Fields) -> list[Message]:
        """Return the messages with which a conversation begins."""
        asked = not self._needed <= row.keys()  # a user's question may lack the template's fields
        given: Any = row.get("prompt") if self._template == "{prompt}" or asked else None
        if isinstance(given, list):
            return list(given)
        return [{"role": "user", "content": given if asked else filled_in(self._template, row)}]

    def _chat_of(self, tokenizer: Tokenizer) -> Chat:
        roles, options = self.roles, self._template_options
        return Chat(self.chat_tokenizer(tokenizer), self.schemas, roles, options, special=self._special)


class Environment(Conversational):
    """Task whose completions are conversations with the user's environment class."""

    other_start = (
        "reset() returned a different text in an earlier episode of the row: let it depend on the row and "
        "the seed alone"
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        environment: str,
        max_tool_chars: Count = 4000,
        step_seconds: Annotated[float, Field(gt=0)] = 30.0,
        **options: Any,
    ) -> None:
        """Make a task from the config's options. Raises ConfigError if the class breaks the contract.

        environment: ``module:Class``, see environments.contract. max_tool_chars: length limit of a tool's
        result. step_seconds: time limit of an environment's work in a turn; tool calls begin only in the
        first half of this time. options: the other options of Conversational.
        """
        self._contract = Contract(
            "task.options.environment", environment, max_chars=max_tool_chars, seconds=step_seconds
        )
        self.own_reward = self._contract.has_reward or self._contract.has_step
        self.schemas = self._contract.schemas
        self.roles = ["tool"] * bool(self._contract.tools) + ["user"] * self._contract.has_step
        super().__init__(tokenizer, step_seconds=step_seconds, **options)

    def require_start(self, row: Fields) -> None:
        """Raise LackingError if a row lacks a field that ``reset`` needs."""
        self._contract.reset_arguments.require(row)

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Prepare the environment; return a generator of conversations that uses ``generator`` for turns."""
        self._contract.prepare()
        chat = self._chat_of(tokenizer)
        return Conversations(generator, self, chat, at_once=self.at_once, seconds=self.seconds)

    def session(self, request: Request) -> Session:
        """Make the session of a new episode. All episodes of a prompt get the same seed, in every run."""
        stream = np.random.default_rng([get_args(Split).index(request.split), request.prompt.id])
        return Session(self._contract, self.row(request.prompt), int(stream.integers(1 << 31)))

    def opening(self, prompt: Prompt, said: str | None, chat: Chat) -> tuple[Prompt, list[Message]]:
        """Return the prompt, to which the text from ``reset`` is appended, and its messages.

        Raises ValueError; see ``begun``.
        """
        row = self.row(prompt)
        messages = self._messages(row)
        if said:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{said}"}
        return self.begun(prompt, said or "", lambda: _render(chat, row, messages), chat), messages


def _render(chat: Chat, row: Fields, messages: Sequence[Message]) -> str:
    """Render the beginning of a conversation, with the tools of its row and its environment."""
    return chat.render(messages, tools=cast(Sequence[dict[str, Any]], row.get("tools") or ()))
