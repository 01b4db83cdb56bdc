"""Conversations with an environment of the user's own: rows of JSONL, each of which begins one.

    {"prompt": "Buy three apples.", "budget": 5}

``prompt`` is a text or a list of messages. The environment's ``reset`` gets the fields that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast, get_args

import numpy as np
from pydantic import Field

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.core.ports import ChatTokenizer, Generator, Message, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Request, Split
from tba_hpc.environments.chat import Chat
from tba_hpc.environments.contract import Contract, Session
from tba_hpc.environments.conversations import Conversations
from tba_hpc.tasks.fields import Unusable, filled_in
from tba_hpc.tasks.jsonl import Jsonl
from tba_hpc.tasks.rewards import Fields

Count = Annotated[int, Field(ge=1)]


class Environment(Jsonl):
    """Task whose reward is the environment's, plus the weighted named rewards of the last turn's text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reward: Mapping[str, RewardSection],
        environment: str,
        train_file: str | None = None,
        test_file: str | None = None,
        max_turns: Count = 8,
        step_seconds: Annotated[float, Field(gt=0)] = 30.0,
        max_tool_chars: Count = 4000,
        concurrency: Count = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        template: str = "{prompt}",
        target: str = "answer",
        correct_from: float = 1.0,
        judge_truncated: bool = False,
        validation_prompts: Count = 64,
    ) -> None:
        """Take the options of the config; those that Jsonl has mean the same. Raises ConfigError.

        environment: ``module:Class``, see environments.contract. max_turns: most turns of the model; an
        episode that needs more is cut off. step_seconds: longest time for an environment's work in a turn;
        tools are called in its first half.
        max_tool_chars: most characters of a tool's result. concurrency: most environments of a searcher that
        work at a time. chat_template_kwargs: variables of the chat template, such as {enable_thinking:
        false}.
        """
        self._contract = Contract(
            "task.options.environment", environment, max_chars=max_tool_chars, seconds=step_seconds
        )
        self.own_reward = self._contract.has_reward or self._contract.has_step
        super().__init__(
            tokenizer,
            reward=reward,
            train_file=train_file,
            test_file=test_file,
            template=template,
            target=target,
            correct_from=correct_from,
            judge_truncated=judge_truncated,
            chat=True,
            validation_prompts=validation_prompts,
        )
        self.max_turns = max_turns
        self._seconds, self._at_once = step_seconds, concurrency
        self._template_options = chat_template_kwargs
        self._chat = self._chat_of(tokenizer)
        self._encode = self._chat.encode
        self._opened: dict[Prompt, tuple[str, Prompt]] = {}

    def require(self, row: Fields, line: str) -> None:
        """Raise ConfigError as Jsonl does, and if a row lacks a field that ``reset`` needs.

        A row's own tools are refused, too, if the chat template cannot show them.
        """
        super().require(row, line)
        self._contract.require(row, line)
        if row.get("tools"):
            self._chat.require("tool")

    def _checked(self, row: Fields) -> Fields:
        tools = row.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Unusable("'tools' is no list of schemas, each an object")
        return super()._checked(row)

    def identity(self, row: Fields) -> str:
        """Return a text of the whole row, since the environment may get any field."""
        return repr(sorted(row.items()))

    def shown(self, row: Fields) -> str:
        """Render a row by the chat template, for the model to read."""
        return _render(self._chat, row, self._messages(row))

    def encode_question(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of a question as a user's message."""
        return self.question(text).tokens

    def question(self, text: str) -> Prompt:
        """Return the start of a conversation whose row has only the question. Raises ConfigError.

        The question is put into the template if that has a single field.
        """
        row = {"prompt": text, **dict.fromkeys(self._needed if len(self._needed) == 1 else (), text)}
        self._contract.require(row, "a question")
        prompt = Prompt(0, self._encode(self.shown(row)), "")
        self._rows[prompt] = row
        return prompt

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Prepare the environment; return a generator of conversations around a generator of turns."""
        self._contract.prepare()
        chat = self._chat_of(tokenizer)
        return Conversations(generator, self, chat, at_once=self._at_once, seconds=self._seconds)

    def session(self, request: Request) -> Session:
        """Make a new session for an episode. All episodes of a prompt get the same seed, in every run."""
        stream = np.random.default_rng([get_args(Split).index(request.split), request.prompt.id])
        return Session(self._contract, self.row(request.prompt), int(stream.integers(1 << 31)))

    def opening(self, prompt: Prompt, text: str | None, chat: Chat) -> tuple[Prompt, list[Message]]:
        """Return the prompt with the text that ``reset`` returned, also as messages.

        Raises ValueError if that text differs from what ``reset`` returned before, since a group has one
        prompt, or if it is too long.
        """
        row = self.row(prompt)
        messages = self._messages(row)
        if text:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{text}"}
        if prompt not in self._opened:
            begun = prompt
            if text:
                begun = Prompt(prompt.id, chat.encode(_render(chat, row, messages)), prompt.target)
                self._rows[begun] = row
            self._opened[prompt] = text or "", begun
        said, begun = self._opened[prompt]
        if said != (text or ""):
            raise ValueError(
                "reset() returned another text than before: let it follow from the row and the seed alone"
            )
        if self.room is not None and len(begun.tokens) > self.room:
            raise ValueError(
                f"what reset() returned makes a prompt of {len(begun.tokens)} tokens, but "
                f"model.context_length less generator.max_tokens leaves {self.room}"
            )
        return begun, messages

    def text(self, completion: Completion) -> str:
        """Return the text that the model wrote in its last turn."""
        between = np.flatnonzero(~completion.action_T)
        return self._said(completion.tokens[between[-1] + 1 if len(between) else 0 :])

    def _messages(self, row: Fields) -> list[Message]:
        """Return the messages with which a conversation begins."""
        asked = not self._needed <= row.keys()  # a user's question, without the template's fields
        given: Any = row.get("prompt") if self._template == "{prompt}" or asked else None
        if isinstance(given, list):
            return list(given)
        return [{"role": "user", "content": given if asked else filled_in(self._template, row)}]

    def _chat_of(self, tokenizer: Tokenizer) -> Chat:
        if not isinstance(tokenizer, ChatTokenizer):
            raise ConfigError(
                "the task environment needs a chat template, which the tokenizer of model.path cannot "
                "render: let it have the methods of ports.ChatTokenizer"
            )
        roles = ["tool"] * bool(self._contract.tools) + ["user"] * self._contract.has_step
        schemas, options = self._contract.schemas, self._template_options
        return Chat(cast(ChatTokenizer, tokenizer), schemas, roles, options, special=self._special)


def _render(chat: Chat, row: Fields, messages: Sequence[Message]) -> str:
    """Return the text with which a conversation begins, with the tools of its row and its environment."""
    return chat.render(messages, tools=cast(Sequence[dict[str, Any]], row.get("tools") or ()))
