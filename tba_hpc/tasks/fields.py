"""Turns fields of a row into text, in templates and in messages, and finds the answer in a model's text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that the messages of a prompt may have."""

ANSWERED = ("user", "tool")
"""Roles that the last message of a prompt may have, because the model answers it."""

KINDS: Mapping[type, str] = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}
"""Names, in errors, of the types that a field must not have where text is needed."""


class Unusable(ValueError):
    """Raised for an unusable row; the message says why."""


class LackingError(Unusable):
    """Raised for a row without a field that a reward function takes.

    key: config key of the function, with its name. field: name of the field.
    """

    def __init__(self, key: str, field: str, remedy: str) -> None:
        super().__init__(f"{key} takes {field!r}, which it lacks: {remedy}")
        self.key, self.field, self.remedy = key, field, remedy


def as_text(value: object) -> str:
    """Convert a value to text: null becomes empty, strings and numbers stay, anything else becomes JSON."""
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def filled_in(template: str, fields: Mapping[str, object]) -> str:
    """Replace each {name} in ``template`` by the field of that name, if there is one.

    Braces within a field stay as they are.
    """
    return re.sub(r"\{(\w+)\}", lambda m: as_text(fields[m[1]]) if m[1] in fields else m[0], template)


def answer_in(text: str) -> str:
    """Return what follows the last ``</think>`` in a text: the answer of a model that thinks first."""
    return text.rpartition("</think>")[2]


def require_text(row: Mapping[str, object], name: str) -> None:
    """Raise Unusable unless the field ``name`` is a number, or a text that is not blank."""
    if name not in row:
        raise Unusable(f"it lacks {name!r}; found {', '.join(row) or 'no field'}")
    value = row[name]
    if isinstance(value, str) and not value.strip():
        raise Unusable(f"{name!r} is empty")
    if type(value) in KINDS:
        raise Unusable(f"{name!r} is {KINDS[type(value)]}, but must be a text or a number")


def require_messages(messages: Sequence[object], name: str) -> None:
    """Raise Unusable unless ``messages`` are a conversation that a model can answer.

    name: the field that holds them, for errors.
    """
    if not messages:
        raise Unusable(f"{name!r} is an empty list")
    role: object = None
    for place, message in enumerate(messages, start=1):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else ("", "")
        )
        if role not in ROLES:
            raise Unusable(
                f"message {place} of {name!r} has the role {role!r}, not one of {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise Unusable(f"message {place} of {name!r} has no text as its content")
    if role not in ANSWERED:
        raise Unusable(
            f"the last message of {name!r} has the role {role!r}, but the model answers a user or a tool"
        )
