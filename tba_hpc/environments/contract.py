"""The contract of an environment class, as in TRL: ``reset``, ``get_reward``, and tools (public methods).

    class Shop:
        def reset(self, budget, seed=None):         # gets the row's fields by name
            self.left = budget
            return f"You have {budget} coins."      # added to the prompt, or None

        def buy(self, item: str, count: int = 1) -> str:
            '''Buy something.

            Args:
                item: What to buy.
            '''
            ...

        def get_reward(self) -> float:
            return float(self.left == 0)

A class may also have ``step(messages) -> (messages, done, reward)``, which answers turns without tool calls.
The rewards of ``step`` add up to the episode's reward, unless there is ``get_reward``. With task.reward an
environment needs no reward of its own. Slow preparations belong in a classmethod ``prepare()``, which a
searcher calls once before the first episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import find_function, in_words, parameters_of, refusal
from tba_hpc.environments.chat import Call, Message, parse_calls
from tba_hpc.tasks.fields import BY_NAME, FieldArguments, Fields

NO_TOOLS = ("reset", "get_reward", "step")
"""Public methods of an environment that are not tools."""

STEP_RESULT = ("messages", "done", "reward")
"""Names, for an error, of the three values that ``step`` returns."""

ERROR = "error:"
"""Beginning of the result of a failed call."""

ERROR_CHARS = 300
"""Largest number of characters that the model sees of an error."""

ARGUMENT = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
"""Pattern of a docstring's line about an argument, with its name and its description as groups."""


class Contract:
    """An environment class and its tools. Raises ConfigError if the class breaks the contract.

    key: config key that names the class. name: ``module:Class``. max_chars: length limit of a tool's
    result. seconds: time limit of the environment's work in a turn. Tool calls begin only in the first half
    of that time, which leaves the other half to the last call.
    """

    def __init__(self, key: str, name: str, *, max_chars: int, seconds: float = math.inf) -> None:
        self._key = f"{key}={name}"
        self.make: Callable[[], Any] = find_function(self._key, name)
        self.max_chars, self.seconds = max_chars, seconds
        found = dict(inspect.getmembers(self.make, inspect.isfunction))
        if not inspect.isclass(self.make) or "reset" not in found:
            raise ConfigError(f"{self._key} is not an environment: give a class with a method reset()")
        if why := refusal(self.make):
            raise ConfigError(
                f"{self._key}: its constructor gets no arguments ({why}): give them defaults, and take "
                "fields of the row in reset()"
            )
        names = [name for name in found if not name.startswith("_") and name not in NO_TOOLS]
        self.tools: dict[str, TypeAdapter[Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        self.arguments: dict[str, dict[str, Any]] = {}  # by tool: schemas of its arguments by name
        for name in names:
            self._require_arguments_by_name(name)
            self._add_tool(name, found[name])
        self.has_step, self.has_reward = "step" in found, "get_reward" in found
        if not self.tools and not self.has_step:
            raise ConfigError(f"{self._key} offers the model nothing to do: give it a tool, or step()")
        self.reset_arguments = FieldArguments(f"{self._key}: reset()", found["reset"], given=("seed",))
        self._prepare: Callable[[], None] = getattr(self.make, "prepare", lambda: None)

    def prepare(self) -> None:
        """Call the class's ``prepare()``, if it has one. Any error becomes a ConfigError."""
        try:
            self._prepare()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self._key}: prepare() raised {in_words(error)}: correct it") from error

    def _require_arguments_by_name(self, name: str) -> None:
        method = inspect.getattr_static(self.make, name)
        parameters = [] if isinstance(method, staticmethod) else parameters_of(method)
        if not parameters or any(p.kind not in (*BY_NAME, p.VAR_KEYWORD) for p in parameters):
            raise ConfigError(
                f"{self._key}: its tool {name} must be a method whose arguments can be given by name: give "
                "it self, and neither *args nor /, or begin its name with _"
            )

    def _add_tool(self, name: str, method: Callable[..., Any]) -> None:
        """Add a tool that converts its arguments by the type hints of ``method``, and calls ``method``."""
        try:
            self.tools[name] = TypeAdapter(cast(Any, method))
            parameters = _parameters(self.tools[name], method)
        except (PydanticUserError, NameError, TypeError) as error:
            raise ConfigError(
                f"{self._key}: the type hints of its tool {name} cannot be understood "
                f"({str(error).splitlines()[0]}): use types that JSON can hold"
            ) from None
        text = inspect.cleandoc(method.__doc__ or "").partition("Args:\n")[0].strip()
        function = {"name": name, "description": text, "parameters": parameters}
        self.schemas.append({"type": "function", "function": function})
        self.arguments[name] = parameters["properties"]

    def fields(self, row: Fields, seed: int) -> dict[str, object]:
        """Return the arguments of ``reset``: fields of the row, and ``seed`` unless the row has one."""
        return ({"seed": seed} if "seed" in self.reset_arguments.names else {}) | self.reset_arguments.of(row)


def _parameters(tool: TypeAdapter[Any], method: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's parameters as JSON schema, from its type hints and docstring."""
    described = _arguments(inspect.cleandoc(method.__doc__ or "").partition("Args:\n")[2])
    found = tool.json_schema()
    properties = {
        name: {key: value for key, value in schema.items() if key != "title"}
        | ({"description": described[name]} if name in described else {})
        for name, schema in found["properties"].items()
        if name != "self"
    }
    required = [name for name in found.get("required", []) if name != "self"]
    definitions = {"$defs": found["$defs"]} if "$defs" in found else {}
    return {"type": "object", "properties": properties, "required": required, **definitions}


def _arguments(text: str) -> dict[str, str]:
    """Return the descriptions of arguments by name, given the section ``Args:`` of a docstring."""
    found: dict[str, str] = {}
    indent = len(text) - len(text.lstrip(" "))
    for line in text.splitlines():
        level = len(line) - len(line.lstrip(" "))
        if not line.strip() or level < indent:
            break
        if level == indent and (match := ARGUMENT.fullmatch(line)):
            found[match[1]] = match[2]
        elif found:
            found[[*found][-1]] += f" {line.strip()}"
    return found


@dataclass(slots=True)
class Session:
    """One environment during an episode.

    If a tool fails, the model sees the error as the tool's result. Any other error of the user's class is
    raised by the method in which it occurs.

    row, seed: values that ``reset`` may take. calls, failed_calls: numbers of all tool calls and of failed
    tool calls so far.
    """

    contract: Contract
    row: Mapping[str, object]
    seed: int
    calls: int = field(default=0, init=False)
    failed_calls: int = field(default=0, init=False)
    _environment: Any = field(default=None, init=False)
    _sum: float | None = field(default=None, init=False)

    def open(self) -> str | None:
        """Make and reset the environment; return the text that it adds to the prompt, or None."""
        self._environment = self.contract.make()
        text = _result_of(self._environment.reset(**self.contract.fields(self.row, self.seed)))
        if isinstance(text, tuple | list | dict):
            raise TypeError(f"reset() must return a text or None, but gave a {type(text).__name__}")
        return None if text is None else str(text)

    def act(self, text: str, messages: Sequence[Message]) -> tuple[list[Message], bool]:
        """Answer the model's turn, ``text``: run the tools that it calls, or else the environment's ``step``.

        Returns the new messages, and whether the episode is over. messages: the conversation, including
        this turn, for ``step``.
        """
        if self.contract.tools and (calls := parse_calls(text)):
            end = time.monotonic() + self.contract.seconds / 2
            results = [self._result(call, end) for call in calls]
            self.calls += len(results)
            self.failed_calls += sum(result["content"].startswith(ERROR) for result in results)
            return results, False
        if not self.contract.has_step:
            return [], True
        given = _result_of(self._environment.step(list(messages)))
        if not isinstance(given, tuple | list) or len(given) != len(STEP_RESULT):
            found = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
            raise TypeError(f"step() must return ({', '.join(STEP_RESULT)}), but gave {found}")
        answers, done, reward = given
        self._sum = (self._sum or 0.0) + float(reward or 0.0)
        if isinstance(answers, str):
            answers = [{"role": "user", "content": answers}]
        return list(answers or []), bool(done) or not answers

    def reward(self) -> float | None:
        """Return the reward of the whole episode, or None if the environment gives none."""
        return float(_result_of(self._environment.get_reward())) if self.contract.has_reward else self._sum

    def _result(self, call: Call | str, end: float) -> Message:
        """Return the answer to a call: its result or an error.

        end: time, as of time.monotonic, after which no call begins.
        """
        if isinstance(call, str):
            return {"role": "tool", "name": "error", "content": call}
        if time.monotonic() > end:
            return {"role": "tool", "name": call.name, "content": f"{ERROR} no time left in this turn"}
        return {"role": "tool", "name": call.name, "content": self._call(call)[: self.contract.max_chars]}

    def _call(self, call: Call) -> str:
        tool = self.contract.tools.get(call.name)
        if tool is None:
            return f"{ERROR} there is no tool {call.name!r}, but {', '.join(self.contract.tools)}"
        schemas = self.contract.arguments[call.name]
        arguments = {name: _parsed(value, schemas.get(name, {})) for name, value in call.arguments.items()}
        try:
            return str(_result_of(tool.validate_python({**arguments, "self": self._environment})))
        except ConfigError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            return _error(": ".join([*map(str, first["loc"]), first["msg"]]))
        except BaseException as error:  # user code may raise anything, and this thread does nothing else
            return _error(in_words(error))


def _result_of(result: Any) -> Any:
    """Return the result of a user's method, awaiting it if it is asynchronous."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _parsed(value: object, schema: Mapping[str, Any]) -> object:
    """Return an argument of a call, parsed as JSON if it is a string but ``schema`` allows no strings."""
    kinds = [one.get("type") for one in schema.get("anyOf", [schema])]
    if not isinstance(value, str) or "string" in kinds or not schema.keys() & {"type", "anyOf", "$ref"}:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _error(text: str) -> str:
    """Return an error message on one line, truncated to ERROR_CHARS."""
    return f"{ERROR} {' '.join(text.split())[:ERROR_CHARS]}"
