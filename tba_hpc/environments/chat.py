"""A conversation as tokens: what a chat template writes, and only that, between what the model sampled.

No sampled token is ever encoded again. After a turn the history goes on with the *bridge*: the close of the
model's message, if it did not sample that, the messages that follow, and the head of its next message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import ChatTokenizer, Message

MOST_CALLS = 8
"""Tool calls of a turn that are executed."""

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>]*)>")
PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)

QUESTION: Message = {"role": "user", "content": "A question."}
ANSWERS = ("The first answer.", "The second answer.")
RESULT = "A result."
"""Messages by which a template is looked at; none is shown to a model."""


class Call(NamedTuple):
    """A tool that the model wants called."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str) -> list[Call | str]:
    """The tool calls of a turn, an error in place of a malformed one; none in what the model only thinks.

    Either ``<tool_call>…</tool_call>``, as often as wanted, around ``{"name": …, "arguments": {…}}`` (Hermes,
    Qwen) or ``<function=…><parameter=…>…</parameter></function>`` (Qwen 3.5, Nemotron 3), or nothing but
    ``{"name": …, "parameters": {…}}`` (Llama).
    """
    said = text.rpartition("</think>")[2]
    if bodies := CALL.findall(said):
        return [_call(body) for body in bodies[:MOST_CALLS]]
    call = _call(said) if said.lstrip().startswith("{") else ""
    return [call] if isinstance(call, Call) else []


def _call(body: str) -> Call | str:
    if function := FUNCTION.search(body):
        return Call(function[1], dict(PARAMETER.findall(body)))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:  # more digits, or deeper, than Python reads
        return f"error: the call is no JSON ({error})"
    name = found.get("name") if isinstance(found, dict) else None
    arguments = found.get("arguments", found.get("parameters", {})) if name else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return 'error: write a call as {"name": …, "arguments": {…}}'
    return Call(name, arguments)


class Chat:
    """A model's chat template. Raises ConfigError where conversations cannot be held with it.

    tools: their schemas. roles: of the messages that follow a turn, ``tool`` or ``user``.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, tools: Sequence[dict[str, Any]] = (), roles: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self.eos_token_id = tokenizer.eos_token_id
        for role in roles:
            self._require_that_it_appends(role)

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """The text of a conversation; ask: up to the model's next message."""
        return self._tokenizer.render(messages, tools=self._tools, ask=ask)

    def encode(self, text: str) -> np.ndarray:
        """Tokens int32 [T] of rendered text."""
        return self._tokenizer.encode_rendered(text)

    def decode(self, tokens: np.ndarray) -> str:
        """What the model said, without special tokens."""
        return self._tokenizer.decode(tokens)

    def bridge(self, turn: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Tokens int32 [T] between a turn, int32 [T > 0], and the next one, with the messages between them.

        A special token that ends the turn takes the place of the template's own.
        """
        answer: Message = {"role": "assistant", "content": ANSWERS[0]}
        rendered = self.render([QUESTION, answer, *messages])
        tokens = self.encode(rendered.partition(ANSWERS[0])[2])
        return tokens[1:] if self._is_special(turn[-1:]) and self._is_special(tokens[:1]) else tokens

    def _is_special(self, token: np.ndarray) -> bool:
        # Twice: one blank of SentencePiece decodes to nothing, too, as the first of a text.
        return len(token) > 0 and not self._tokenizer.decode(np.repeat(token, 2))

    def _require_that_it_appends(self, role: str) -> None:
        """Raise ConfigError where the template changes what it has written when messages follow.

        What the model was given and what now precedes its answer may differ at their ends: one may have the
        beginning of a thought, or an empty one.
        """
        messages = [QUESTION]
        for answer in ANSWERS:
            given, said = self.render(messages), [message["content"] for message in messages]
            messages += [{"role": "assistant", "content": answer}]
            messages += [{"role": role, "name": "a_tool", "content": RESULT}]
            before, _, after = self.render(messages).partition(answer)
            common = len(commonprefix([given, before]))  # noqa: RUF071 (text, not paths)
            ends = given[common:] + before[common:]
            if RESULT not in after or any(text in ends for text in said):
                raise ConfigError(
                    f"the chat template of model.path rewrites or drops earlier text when a {role} message "
                    "follows, but the model must be shown what it was trained on: give its "
                    "tokenizer_config.json a chat_template that only appends, or use another model"
                )
