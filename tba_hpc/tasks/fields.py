"""Fields of a row as text: in templates, and as the messages of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that the messages of a prompt may have."""

ANSWERED = ("user", "tool")
"""Roles that the last message of a prompt may have, since the model answers it."""

KINDS: Mapping[type, str] = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}
"""Names that errors give to values that are no text."""


class Unusable(ValueError):
    """Raised for a row that cannot be used; the message says why."""


def as_text(value: object) -> str:
    """Return a text or a number as it is, null as an empty text, and anything else as JSON."""
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def filled_in(template: str, fields: Mapping[str, object]) -> str:
    """Replace each {name} in ``template`` by its field, if there is one; braces within fields stay."""
    return re.sub(r"\{(\w+)\}", lambda m: as_text(fields[m[1]]) if m[1] in fields else m[0], template)


def require_text(row: Mapping[str, object], name: str) -> None:
    """Raise Unusable unless a field is a number, or a text that is not blank."""
    if name not in row:
        raise Unusable(f"it lacks {name!r}; found {', '.join(row) or 'no field'}")
    value = row[name]
    if value != value:  # NaN, as libraries write a missing value
        raise Unusable(f"{name!r} is NaN")
    if isinstance(value, str) and not value.strip():
        raise Unusable(f"{name!r} is empty")
    if type(value) in KINDS:
        raise Unusable(f"{name!r} is {KINDS[type(value)]}, but must be a text or a number")


def require_messages(messages: Sequence[object], name: str) -> None:
    """Raise Unusable unless the field of that name is a list of messages that a model can answer."""
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
        raise Unusable(f"the last message of {name!r} is of {role!r}, but the model answers a user or a tool")
