"""A conversation as tokens: the model's sampled tokens, and between them the tokens of a chat template.

Sampled tokens are kept as they are, and never encoded again from text. A turn is followed by a *bridge*: the
end of the model's message (unless the model sampled it), the messages that follow, and the beginning of the
model's next message.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import ChatTokenizer, Message, decoder

MOST_CALLS = 8
"""Largest number of tool calls that are executed in a turn."""

CALL = re.compile(
    r"<(?:tool_call|｜tool▁call▁begin｜)>(.*?)(?:</tool_call>|<｜tool▁call▁end｜>|$)", re.DOTALL
)
NAMED_ARGUMENTS = (
    # Qwen 3.5, Nemotron 3
    (
        re.compile(r"<function=([^>]*)>"),
        re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL),
    ),
    # GLM
    (
        re.compile(r"^\s*([A-Za-z_][\w.-]*)\s*(?=<arg_key>|$)"),
        re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    ),
)
"""Formats of tool calls with a tag per argument: patterns of the function's name and of an argument."""

DEEPSEEK = "<｜tool▁sep｜>"
"""Separator between a function's name and its JSON arguments in DeepSeek's format."""

QUESTION: Message = {"role": "user", "content": "A question."}
ANSWERS = ("The first answer.", "The second answer.")
RESULT = "A result."
A_TOOL = {
    "type": "function",
    "function": {"name": "a_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""Messages and a tool for testing chat templates; no model sees them."""


class Call(NamedTuple):
    """A tool call that the model has written."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str) -> list[Call | str]:
    """Parse the tool calls in a turn's text, at most MOST_CALLS. A malformed call becomes an error message.

    Reasoning is ignored. A call is enclosed in ``<tool_call>`` and ``</tool_call>``, or is in DeepSeek's
    format. Between the tags is a JSON object ``{"name": …, "arguments": {…}}`` (Hermes, Qwen), or the format
    of Qwen 3.5, Nemotron 3 or GLM. If there is no such call, the whole turn must be
    ``{"name": …, "parameters": {…}}`` (Llama), or begin with ``[name(argument=…), …]`` (LFM2).
    """
    said = text.rpartition("</think>")[2]
    if bodies := CALL.findall(said):
        return [_call(body) for body in bodies[:MOST_CALLS]]
    if said.lstrip().startswith("["):
        return [*_in_python(said.lstrip())[:MOST_CALLS]]
    call = _call(said) if said.lstrip().startswith("{") else ""
    return [call] if isinstance(call, Call) else []


def _call(body: str) -> Call | str:
    for function, argument in NAMED_ARGUMENTS:
        if found := function.search(body):
            return Call(found[1], dict(argument.findall(body)))
    try:
        call = _of_deepseek(body) if DEEPSEEK in body else json.loads(body)
    except (ValueError, RecursionError) as error:  # no JSON, too many digits, or too deep
        return f"error: the call is not JSON ({error})"
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", call.get("parameters", {})) if name else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return 'error: write a call as {"name": …, "arguments": {…}}'
    return Call(name, arguments)


def _of_deepseek(body: str) -> dict[str, Any]:
    """Parse ``name<sep>{…}``, or the format before version 3.1: ``function<sep>name`` and a JSON block."""
    name, _, arguments = body.partition(DEEPSEEK)
    if "```json" in arguments:
        name, _, arguments = arguments.partition("```json")
    return {"name": name.strip(), "arguments": json.loads(arguments.strip().removesuffix("```"))}


def _in_python(text: str) -> list[Call]:
    """Parse a Python list of calls at the beginning of a text; [] if there is none."""
    for end in islice(re.finditer(r"\)\s*\]", text), MOST_CALLS):
        with suppress(SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            match ast.parse(text[: end.end()], mode="eval").body:
                case ast.List(elts=calls):
                    return [_python_call(call) for call in calls]
    return []


def _python_call(call: ast.expr) -> Call:
    match call:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=arguments):
            return Call(
                name, {argument.arg or "": ast.literal_eval(argument.value) for argument in arguments}
            )
    raise ValueError("no call by name")


class Chat:
    """A model's chat template. Raises ConfigError if it is not suitable for conversations.

    tools: schemas of tools. roles: roles of the messages that may follow a turn, ``tool`` or ``user``.
    options: variables of the template, such as ``enable_thinking``. special: decode turns with their special
    tokens.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[dict[str, Any]] = (),
        roles: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        *,
        special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._options = options or {}
        self._fit: set[str] = set()  # roles that ``require`` has accepted
        self.eos_token_id = tokenizer.eos_token_id
        self.decode = decoder(tokenizer, special=special)
        """Function that returns the text of a turn's tokens."""
        for role in roles:
            self.require(role)

    def render(
        self, messages: Sequence[Message], *, ask: bool = True, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Render a conversation. ask: begin the model's next message. tools: schemas of further tools."""
        return self._tokenizer.render(messages, tools=[*self._tools, *tools], ask=ask, **self._options)

    def encode(self, text: str) -> np.ndarray:
        """Encode rendered text, int32 [T]."""
        return self._tokenizer.encode_rendered(text)

    def bridge(self, turn: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Return the bridge that follows a turn, with ``messages`` in it, int32 [T].

        turn: int32 [T > 0]. If it ends with a special token, the bridge leaves out the token with which the
        template ends a message.
        """
        answer: Message = {"role": "assistant", "content": ANSWERS[0]}
        rendered = self.render([QUESTION, answer, *messages])
        tokens = self.encode(rendered.partition(ANSWERS[0])[2])
        return tokens[1:] if self._is_special(turn[-1:]) and self._is_special(tokens[:1]) else tokens

    def drops_thoughts(self, role: str) -> bool:
        """Return whether the template omits a turn's thoughts once a message with ``role`` follows.

        The tokens of a conversation keep the thoughts in any case.
        """
        thought = "A thought."
        said = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{ANSWERS[0]}"}
        return thought not in self.render(
            [QUESTION, said, {"role": role, "name": "a_tool", "content": RESULT}]
        )

    def _is_special(self, token: np.ndarray) -> bool:
        # The token is doubled: a single SentencePiece space at a text's start also decodes to nothing.
        return len(token) > 0 and not self._tokenizer.decode(np.repeat(token, 2))

    def require(self, role: str) -> None:
        """Raise ConfigError if the template rewrites earlier text when a message with this role follows.

        One change is allowed. Directly before the model's answer, the template may add or omit text that is
        in no message, such as an opening thinking tag or an empty thinking block.
        """
        if role in self._fit:
            return
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
                    "follows, but training keeps all text as it was sampled: give the model's "
                    "tokenizer_config.json a chat_template that only appends, or use another model"
                )
        self._fit.add(role)
