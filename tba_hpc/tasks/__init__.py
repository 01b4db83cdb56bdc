"""Tasks: prompts and rewards. ``load_task`` finds one by its name, or as ``module:Class`` of the user's own.

A task is a class with the methods of ports.Task and this constructor:

    def __init__(self, tokenizer, *, train_file=None, test_file=None, **options)

where ``options`` stands for named, annotated keyword arguments; ``task.options`` of the config is
checked against them. Task modules are imported when asked for: none costs another's libraries.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.ports import Task, Tokenizer

TASKS = {
    "arithmetic": "tba_hpc.tasks.arithmetic:Arithmetic",
    "gsm8k": "tba_hpc.tasks.gsm8k:GSM8K",
}

CONTRACT = {"self", "tokenizer", "train_file", "test_file"}
"""Arguments of every task's constructor; the others are its options."""


def load_task(config: TaskSection, tokenizer: Tokenizer) -> Task:
    """The task that ``config`` names, with its options, encoding with ``tokenizer``.

    Raises ConfigError with one sentence: unknown task, unknown or ill-typed option, missing or
    ill-formed file, no training problem.
    """
    task_class = _find(config.name)
    options = _checked(config.options, task_class, config.name)
    task: Task = task_class(tokenizer, train_file=config.train_file, test_file=config.test_file, **options)
    if not task.prompts("train"):
        raise ConfigError(
            f"the task {config.name} has no training problem: check task.train_file and the sizes in task.options"
        )
    return task


def _find(name: str) -> type:
    """The class behind a registered name or ``module:Class``."""
    if name not in TASKS and ":" not in name:
        raise ConfigError(f"unknown task {name!r}{nearest(name, TASKS)}, or module:Class of your own")
    module_name, _, class_name = TASKS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"task.name={name} cannot be imported ({error}): install it or correct it"
        ) from None
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"task.name={name}: no class {class_name!r} there{nearest(class_name, classes)}")
    return found


def _checked(options: dict[str, Any], task_class: type, task: str) -> dict[str, Any]:
    """``options`` as the constructor's annotations demand them."""
    hints = get_type_hints(task_class.__init__, include_extras=True)
    valid = [key for key in inspect.signature(task_class).parameters if key not in CONTRACT]
    for key, value in options.items():
        if key not in valid:
            raise ConfigError(f"the task {task} has no option {key!r}{nearest(key, valid)}")
        _check(f"task.options.{key}", value, hints.get(key, Any))
    return options


def _check(key: str, value: object, hint: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        rule = error.errors()[0]["msg"]
        raise ConfigError(f"{key} has the value {value!r}, but {rule[0].lower()}{rule[1:]}") from None


def nearest(name: str, valid: Iterable[str]) -> str:
    """``: did you mean 'x'?``, or the list of valid names where none is near."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f": did you mean {close[0]!r}?" if close else f": valid are {', '.join(valid) or 'none'}"
