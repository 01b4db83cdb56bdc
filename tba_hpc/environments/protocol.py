"""OpenAI's chat completions, as far as a run can answer them: what a program asks, and what it is told.

A run decides how its policy samples. A parameter that would have it sample otherwise is refused, not ignored.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tba_hpc.core.ports import Message
from tba_hpc.core.types import Sampling
from tba_hpc.environments.chat import CALL, Call, parse_calls

Body = Mapping[str, Any]
"""A request or an answer, as OpenAI's reference of chat completions describes them."""

MODEL = "policy"
"""Name of the only model."""

PLAIN = {"role", "content", "name", "tool_call_id", "tool_calls"}
"""Keys of a message that chat templates read."""

FREE = {
    *(
        "messages",
        "tools",
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "stop",
    ),
    *("user", "metadata", "store"),
}
"""Parameters of a request that may have any value; the last three say nothing about the answer."""

ONLY: Mapping[str, object] = {
    **{"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "tool_choice": "auto"},
    **{"parallel_tool_calls": True, "response_format": {"type": "text"}},
}
"""The only values of further parameters."""

SAME = ("role", "content", "tool_calls")
"""Keys of a model's message that a program gives back unchanged."""


class RefusedError(Exception):
    """Raised for a request that gets no turn; the message says why, and what to change."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request of a program for a turn. messages: all of the conversation. answer: to the request."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: float
    stop: tuple[str, ...]
    answer: Future[Body] = field(default_factory=Future)

    @classmethod
    def of(cls, body: Body) -> Turn:
        """Read a request. Raises RefusedError if it is malformed."""
        messages, tools, stop = body.get("messages"), body.get("tools") or [], body.get("stop") or []
        limits = [body.get(key) or math.inf for key in ("max_tokens", "max_completion_tokens")]
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(messages, list) or not messages:
            raise RefusedError("'messages' is no list of messages")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RefusedError("'tools' is no list of schemas, each an object")
        if not all(isinstance(limit, int | float) and limit >= 1 for limit in limits):
            raise RefusedError("'max_tokens' is no number from 1 on")
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise RefusedError("'stop' is neither a text nor a list of texts")
        return cls([plain(message) for message in messages], tools, min(limits), tuple(stop))


def plain(message: object) -> Message:
    """Return what a chat template reads of a message. Raises RefusedError if it is none, or not of text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError("a message is no object with a role")
    kept = {key: value for key, value in message.items() if key in PLAIN and value}
    content = kept.get("content", "")
    if isinstance(content, list):
        content = "".join(str(part["text"]) if "text" in part else _refuse_part() for part in content)
    if not isinstance(content, str):
        raise RefusedError("a message's content is no text")
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_plain_call(call) for call in calls]
    return {**kept, "content": content}


def _refuse_part() -> str:
    raise RefusedError("a message has a part that is no text, but the policy reads only text")


def _plain_call(call: Any) -> dict[str, Any]:
    """Return a call with its arguments as templates want them: parsed."""
    try:
        function, arguments = call["function"], call["function"]["arguments"]
        with suppress(ValueError, TypeError):
            arguments = json.loads(arguments)
        named = {"name": function["name"], "arguments": arguments}
        return {"id": call.get("id"), "type": "function", "function": named}
    except (KeyError, TypeError, AttributeError):
        raise RefusedError("a message has a tool call without a function's name and arguments") from None


def continues(known: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Tell whether messages begin with all known ones; blanks around the model's own may be lost."""

    def seen(message: Message) -> object:
        if message["role"] != "assistant":
            return message
        return [str(message.get(key, "")).strip() for key in SAME]

    return len(messages) > len(known) and [*map(seen, messages[: len(known)])] == [*map(seen, known)]


def unsupported(body: Body, sampling: Sampling, *, train: bool) -> str:
    """Say which parameter of a request the run does not honour; empty if there is none.

    In evaluations, which sample in their own way, a program may state the temperature and top_p of training.
    """
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    free = FREE if train else FREE | own.keys()
    for key, value in body.items():
        allowed = {**ONLY, **own}.get(key)
        if key not in free and value is not None and value != allowed:
            way = f"the run samples with {allowed!r}" if key in own else "it cannot be honoured"
            return f"{key}={json.dumps(value)[:100]}: {way}: leave it out"
    return ""


def message_of(text: str, tools: bool, number: int) -> tuple[Message, int]:
    """Return a turn as a message, and the number of malformed calls. number: of calls before it."""
    thought, _, said = text.rpartition("</think>")
    found = parse_calls(said) if tools else []
    calls = [
        {
            "id": f"call{number + place:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(found)
        if isinstance(call, Call)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        first = CALL.search(said)
        message |= {"content": (said[: first.start()].strip() if first else "") or None, "tool_calls": calls}
    if thought:
        message["reasoning_content"] = thought.removeprefix("<think>").strip()
    return message, len(found) - len(calls)


def completion(message: Message, reason: str, usage: Mapping[str, int]) -> Body:
    """Return the answer to a request. reason: why the message ended."""
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }
