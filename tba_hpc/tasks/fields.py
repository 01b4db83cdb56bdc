"""Gives fields of a row to a user's functions, and to templates and messages as text.

It also finds the answer in a model's text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from tba_hpc.core.own_code import parameters_of
from tba_hpc.core.wording import did_you_mean

Fields = Mapping[str, object]
"""A row of a data set."""

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters whose arguments can be given by name."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that the messages of a prompt may have."""

ANSWERED = ("user", "tool")
"""Roles that the last message of a prompt may have, because the model answers it."""

KINDS: Mapping[type, str] = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}
"""Names, in errors, of the types that a field must not have where text is needed."""

OF_TRL = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL gives to reward functions besides the columns of the data."""

TRL_PASSES = "TRL passes this, tba does not: give it a default or leave it out"
"""Remedy for a function that takes one of OF_TRL."""


class Unusable(ValueError):
    """Raised for an unusable row; the message says why."""


class LackingError(Unusable):
    """Raised for a row without a field that a user's function takes.

    key: config key and name of the function, as ``key=module:function``. field: name of the field. remedy:
    what to do about its lack.
    """

    def __init__(self, key: str, field: str, remedy: str) -> None:
        super().__init__(f"{key} takes {field!r}, which the row lacks: {remedy}")
        self.key, self.field, self.remedy = key, field, remedy


class FieldArguments:
    """Arguments of a user's function that are fields of a row.

    key: config key and name of the function, as ``key=module:function``, for errors. given: names of
    arguments that need not be in the row, because the caller has values for them. first: name of the
    function's first argument, which is no field; empty if there is none. names: names of the other arguments.
    needs: fields that every row must have.
    """

    def __init__(self, key: str, function: Callable[..., Any], *, given: Sequence[str] = ()) -> None:
        self._key = key
        parameters = parameters_of(function)
        others = parameters[1:]
        named = [parameter for parameter in others if parameter.kind in BY_NAME]
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in others)
        self.first = parameters[0].name if parameters else ""
        self.names = {parameter.name for parameter in named}
        self.needs = [each.name for each in named if each.default is each.empty and each.name not in given]

    def require(self, row: Fields) -> None:
        """Raise LackingError if the row lacks a field that the function needs."""
        for name in self.needs:
            if name not in row:
                known = did_you_mean(name, row, f"found {', '.join(row)}")
                raise LackingError(self._key, name, TRL_PASSES if name in OF_TRL else known)

    def of(self, row: Fields) -> dict[str, object]:
        """Return the fields that the function takes, as copies, so that it cannot change the row.

        A field with the name of the function's first argument is left out.
        """
        taken = (name for name in row if self._takes_all or name in self.names)
        return {name: deepcopy(row[name]) for name in taken if name != self.first}


def as_text(value: object) -> str:
    """Convert a value to text: null becomes empty, strings and numbers stay, anything else becomes JSON."""
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def row_in(text: str) -> Fields | None:
    """Return the row that a user typed as a JSON object; None if ``text`` is something else."""
    row: object = None
    with suppress(ValueError, RecursionError):
        row = json.loads(text.removeprefix("\ufeff"))
    return row if isinstance(row, dict) else None


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
