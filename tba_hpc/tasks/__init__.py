"""Tasks: prompts and rewards. ``load_task`` makes a built-in task, or the user's own ``module:Class``.

A task is a class with the methods of ports.Task and this constructor:

    def __init__(self, tokenizer, *, train_file=None, test_file=None, **options)

``**options`` stands for a task's own keyword arguments, which receive the config's ``task.options``. An
option's type is checked against the annotation. An argument named ``serve`` receives a ports.Serve, a
function that starts another model for the task. An argument named ``reward`` receives ``task.reward``, a
mapping from the name of each reward to its config.RewardSection.

A classmethod ``resources(section)`` returns the models, hub data and files that a TaskSection names, as
types.Resource. ``tba fetch`` downloads them, and ``tba submit`` checks that they exist. A task's module is
imported only if the task is used, so that no task needs the libraries of another.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.own_code import find_function, refusal
from tba_hpc.core.ports import Serve, Task, Tokenizer
from tba_hpc.core.task_contract import checked_prompts, with_defaults
from tba_hpc.core.types import Resource
from tba_hpc.core.wording import did_you_mean
from tba_hpc.tasks.data import HELD_OUT
from tba_hpc.tasks.rows import Rows

TASKS = {
    "agent": "tba_hpc.environments.agent:Agent",
    "arithmetic": "tba_hpc.tasks.arithmetic:Arithmetic",
    "environment": "tba_hpc.environments.task:Environment",
    "gsm8k": "tba_hpc.tasks.word_problems:GSM8K",
    "jsonl": "tba_hpc.tasks.jsonl:Jsonl",
    "math": "tba_hpc.tasks.word_problems:Math",
    "reasoning_gym": "tba_hpc.tasks.reasoning_gym:ReasoningGym",
    "redteam": "tba_hpc.tasks.redteam:RedTeam",
    "tldr": "tba_hpc.tasks.tldr:TLDR",
}

CONTRACT = frozenset(("tokenizer", "train_file", "test_file", "serve", "reward"))
"""Constructor arguments with a fixed meaning. All other arguments are options of the task."""


def load_task(
    config: TaskSection, tokenizer: Tokenizer, serve: Serve | None = None, *, room: int | None = None
) -> Task:
    """Make a task as ``make_task`` does, then read and check all its prompts.

    Besides the errors of ``make_task``, raises ConfigError if there is no training problem, or if prompts
    violate the rules of ports.Task.
    """
    task = make_task(config, tokenizer, serve, room=room)
    if not checked_prompts(task, "train"):
        raise ConfigError(
            f"the task {config.name} has no training problem: check task.train_file and task.options"
        )
    for split in HELD_OUT:
        checked_prompts(task, split)
    return task


def make_task(
    config: TaskSection, tokenizer: Tokenizer, serve: Serve | None = None, *, room: int | None = None
) -> Task:
    """Make the task that ``config`` names, with its options and ``tokenizer``.

    serve: function that starts another model, for tasks that query one. room: largest number of tokens of a
    prompt; None: no limit. Only tasks that derive from ``Rows`` set longer prompts aside.

    Raises ConfigError if the task does not exist or cannot be made, if an option is unknown, missing or of
    the wrong type, if a file or reward is given that the task does not use, or if the task needs ``serve``.
    Data files are read only when prompts are needed, so that bad ones are not noticed here.
    """
    task_class = with_defaults(_find(config.name), config.name)
    _check_options(config.options, task_class, config.name)
    given: dict[str, Any] = {"train_file": config.train_file, "test_file": config.test_file}
    parameters = _parameters(task_class)
    if "serve" in parameters:
        if serve is None:
            raise ConfigError(f"the task {config.name} queries a second model, which cannot be served here")
        given["serve"] = serve
    if "reward" in parameters:
        given["reward"] = config.reward
    elif config.reward:
        raise ConfigError(
            f"task.reward would be ignored by the task {config.name}, which has its own: leave it out, or "
            "set task.name=jsonl"
        )
    if why := refusal(task_class, tokenizer, **given, **config.options):
        raise ConfigError(
            f"the task {config.name} cannot be made ({why}): let its constructor take (self, tokenizer, *, "
            "train_file=None, test_file=None) and its options"
        )
    task: Task = task_class(tokenizer, **given, **config.options)
    if isinstance(task, Rows):
        task.room = room
    if config.special_tokens:
        task.show_special_tokens()
    return task


def task_resources(config: TaskSection) -> list[Resource]:
    """Return the models, hub data and files that a task declares.

    Raises ConfigError for an unknown task, or a wrong option.
    """
    task_class = _find(config.name)
    _check_options(config.options, task_class, config.name)
    declare = getattr(task_class, "resources", None)
    return list(declare(config)) if declare else []


def _find(name: str) -> type:
    """Return the class of a built-in task, or the user's ``module:Class``. Raises ConfigError for none."""
    if name not in TASKS and ":" not in name:
        raise ConfigError(f"unknown task {name!r}: {did_you_mean(name, TASKS)}, or module:Class of your own")
    found = find_function(f"task.name={name}", TASKS.get(name, name))
    if not inspect.isclass(found):
        raise ConfigError(f"task.name={name} is not a class: give one with the methods of ports.Task")
    return found


def _check_options(options: Mapping[str, object], task_class: type, task: str) -> None:
    """Raise ConfigError if an option is unknown, missing or of the wrong type. task: name for the error."""
    valid = {key: value for key, value in _parameters(task_class).items() if key not in CONTRACT}
    for key, value in options.items():
        if key not in valid:
            raise ConfigError(f"the task {task} has no option {key!r}: {did_you_mean(key, valid)}")
        _check_value(f"task.options.{key}", value, valid[key].annotation)
    for key, parameter in valid.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"the task {task} needs the option {key!r}: set task.options.{key}")


def _parameters(task_class: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class's constructor by name, without ``self``.

    A constructor's ``**options`` stand for the parameters of its base class's constructor.
    """
    found: dict[str, inspect.Parameter] = {}
    for make in (vars(kind)["__init__"] for kind in task_class.__mro__[:-1] if "__init__" in vars(kind)):
        own = list(inspect.signature(make, eval_str=True).parameters.values())[1:]
        found = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD} | found
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def _check_value(key: str, value: object, annotation: Any) -> None:
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        rule = error.errors()[0]["msg"]
        # YAML reads a text that begins with { as a mapping.
        hint = ": put a text that begins with { in quotes" if isinstance(value, dict) else ""
        raise ConfigError(f"{key} has the value {value!r}, but {rule[0].lower()}{rule[1:]}{hint}") from None
