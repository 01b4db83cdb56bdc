"""The supported part of OpenAI's chat completions: parses requests, and makes answers.

The run decides how its policy samples. Parameters that ask for different sampling are refused, not ignored.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, ValidationError, model_validator

from tba_hpc.core.ports import Message
from tba_hpc.core.types import Request
from tba_hpc.environments.chat import CALL, Call, parse_calls

Body = Mapping[str, Any]
"""Body of a request or an answer, as in OpenAI's reference of chat completions."""

MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "tba-hpc"}
"""The only entry in the endpoint's list of models."""


def _joined(content: Any) -> str:
    """Return a message's text, which may be in parts. Raises ValueError if a part is not text."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    try:
        return "".join(part["text"] for part in parts)
    except (KeyError, TypeError):
        raise ValueError("the model reads only text") from None


Text = Annotated[str, BeforeValidator(_joined)]
Limit = Annotated[int, Field(ge=1)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Arguments = Annotated[Json[dict[str, Any]] | dict[str, Any] | str, Field(union_mode="left_to_right")]


class RefusedError(ValueError):
    """Raised for a request that is refused; the message says why, and what to change."""


class Function(BaseModel):
    name: str
    arguments: Arguments = ""  # parsed, as chat templates need them


class ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """A message, with the keys that chat templates use; all others are ignored."""

    role: str
    content: Text = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def plain(self) -> Message:
        """The message as chat templates take it, a dict without the keys that are None.

        Whitespace at both ends of the model's text is removed. Some programs remove it when they send the
        message back in a later request, and it must still equal the message that the model gave.
        """
        own = {"content": self.content.strip()} if self.role == "assistant" else {}
        return self.model_dump(exclude_none=True) | own


class ChatRequest(BaseModel):
    """A program's request for a turn. Parameters and values that are not listed here are refused."""

    model_config = ConfigDict(extra="forbid")

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    max_tokens: Limit = sys.maxsize
    max_completion_tokens: Limit = sys.maxsize
    stop: Stops = []
    temperature: float | None = None
    top_p: float | None = None
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    logprobs: Literal[False] = False
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    stream: bool = False
    stream_options: dict[str, Any] = {}
    model: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None

    @classmethod
    def of(cls, body: bytes, request: Request) -> ChatRequest:
        """Parse a program's request, given as JSON. Raises RefusedError.

        request: the searcher's request for completions. In training the program's temperature and top_p must
        be absent, or the same as in ``request``. In evaluations they are ignored, since a program may send
        those of training.
        """
        try:
            asked = cls.model_validate_json(body)
        except ValidationError as error:
            raise RefusedError(_refusal(error)) from None
        for key in ("temperature", "top_p") if request.split == "train" else ():
            given, own = getattr(asked, key), getattr(request.sampling, key)
            if given not in (None, own):
                raise RefusedError(f"{key}={given:g}, but the run samples with {own:g}: leave it out")
        return asked

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        given = body.items() if isinstance(body, dict) else ()
        return {key: value for key, value in given if value is not None}

    @cached_property
    def plain(self) -> list[Message]:
        """All messages; see ``ChatMessage.plain``."""
        return [message.plain for message in self.messages]


def _refusal(error: ValidationError) -> str:
    """Return in plain words what is wrong with a request, and the remedy."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "extra_forbidden":
        return f"{where} is not supported: leave it out"
    return f"{where}: {first['msg']}: change it, or leave it out".replace(": Input should be", " must be")


def message_of(text: str, asked: ChatRequest, number: int) -> tuple[Message, int]:
    """Parse the text of a turn; return the message, and the number of malformed tool calls.

    asked: the request that the turn answers. number: number of earlier tool calls in the episode.
    """
    for stop in asked.stop:
        text = text.partition(stop)[0]
    thought, _, said = text.rpartition("</think>")
    found = parse_calls(said) if asked.tools and asked.tool_choice == "auto" else []
    functions = [function for call in found if (function := _function(call))]
    message: Message = {"role": "assistant", "content": said}
    if functions:
        first = CALL.search(said)
        message["content"] = said[: first.start()] if first else None
        message["tool_calls"] = [
            # The index is for streams. Some templates require an id of nine characters.
            {"index": index, "id": f"call{number + index:05d}", "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
    if thought:
        message["reasoning_content"] = thought.removeprefix("<think>").strip()
    return message, len(found) - len(functions)


def _function(call: Call | str) -> dict[str, str] | None:
    """Return a call in OpenAI's format; None if it is malformed, or if JSON cannot hold it (NaN, a set)."""
    if isinstance(call, str):
        return None
    with suppress(ValueError, TypeError, RecursionError):
        call.name.encode()
        return {"name": call.name, "arguments": json.dumps(call.arguments, allow_nan=False)}
    return None


def completion(message: Message, *, cut: bool, prompt_tokens: int, tokens: int) -> Body:
    """Make the answer to a request.

    cut: whether the token limit truncated the message. prompt_tokens, tokens: lengths of prompt and message.
    """
    reason = "tool_calls" if "tool_calls" in message else "length" if cut else "stop"
    total = prompt_tokens + tokens
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL["id"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": total},
    }


def streamed(answer: Body, *, usage: bool) -> str:
    """Return an answer as a stream of one chunk with the whole message, then the usage if requested."""
    (choice,) = answer["choices"]
    delta = {"index": 0, "delta": choice["message"], "finish_reason": choice["finish_reason"]}
    chunk = {**answer, "object": "chat.completion.chunk", "usage": None}
    chunks = [{**chunk, "choices": [delta]}]
    if usage:
        chunks.append({**chunk, "choices": [], "usage": answer["usage"]})
    return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]"))
