"""Checks that what a task returns obeys ports.Task; otherwise a ConfigError names class, value and rule.

``Failures`` counts the exceptions that a task's code raises.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import new_class
from typing import Any, cast

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import in_words, kind_of
from tba_hpc.core.ports import Task
from tba_hpc.core.types import Completion, Prompt, Split

log = logging.getLogger(__name__)

TOLD_EVERY = 100
"""After the first failure for a reason, one in this many is logged."""

MOST_REASONS = 100
"""Number of reasons that are told apart; any others are counted as one."""

OTHER_REASONS = f"reasons beyond the first {MOST_REASONS}"
NUMBER = re.compile(r"\d[\w.]*")


def class_name(task: Task) -> str:
    """Return the name of a task's class as ``module:Class``, the form that a config uses."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def with_defaults(own: type, name: str) -> type[Any]:
    """Return a class with all methods of ports.Task: the user's own, or one derived from it and ports.Task.

    name: name of the task in error messages. Raises ConfigError if a required method is missing.
    """
    made: type[Any] = own if issubclass(own, Task) else new_class(own.__name__, (own, Task))
    made.__module__, made.__qualname__ = own.__module__, own.__qualname__
    for method in ("prompts", "rewards", "correct", *sorted(made.__abstractmethods__)):
        if method in made.__abstractmethods__ or not callable(getattr(made, method)):
            raise ConfigError(
                f"the task {name} has no method {method}(), which it needs: write it as ports.Task says, or "
                "derive from tasks.rows.RightOrWrong"
            )
    return made


def checked_prompts(task: Task, split: Split) -> Sequence[Prompt]:
    """Return ``task.prompts(split)``. Raises ConfigError if it is not a sequence of well-formed prompts."""
    prompts: object = task.prompts(split)
    call = f"the task {class_name(task)}: prompts({split!r})"
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"{call} gave a {type(prompts).__name__}: give a list or a tuple of prompts")
    for place, prompt in enumerate(prompts):
        if fault := _fault(prompt, place):
            raise ConfigError(f"{call}[{place}] {fault}")
    return prompts


def checked_rewards(task: Task, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
    """Return ``task.rewards(…)``, finite or not. Raises ConfigError unless each completion has a number."""
    rewards = task.rewards(prompt, completions)
    numbers = _numbers(rewards, len(completions))
    if numbers is None:
        raise ConfigError(
            f"the task {class_name(task)}: rewards() gave {_short(rewards)} for prompt {prompt.id}, but "
            f"{len(completions)} completions need a number each: NaN for one that is to be set aside"
        )
    return numbers


def checked_correct(task: Task, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
    """Return ``task.correct(…)``. Raises ConfigError unless each completion has a truth value."""
    correct = task.correct(prompts, completions)
    numbers = _numbers(correct, len(completions))
    if numbers is None or not {0.0, 1.0}.issuperset(numbers):
        raise ConfigError(
            f"the task {class_name(task)}: correct() gave {_short(correct)}, but {len(completions)} "
            "completions need True or False each: write it as ports.Task says"
        )
    return [number == 1 for number in numbers]


def checked_parts(task: Task, total: int) -> dict[str, list[float]]:
    """Return ``task.reward_parts()``. Raises ConfigError unless each part has ``total`` numbers.

    total: number of completions in the last call of ``rewards``.
    """
    parts: object = task.reward_parts()
    named = parts if isinstance(parts, Mapping) else {"": parts}
    found = {str(name): row for name in named if (row := _numbers(named[name], total)) is not None}
    if named is not parts or len(found) < len(named):
        raise ConfigError(
            f"the task {class_name(task)}: reward_parts() gave {_short(parts)}, but {total} completions need "
            "a number each, for every named part: write it as ports.Task says"
        )
    return found


def checked_grades(task: Task, total: int) -> Sequence[float | None]:
    """Return ``task.grades()``, or ``total`` times None if the task gives no grades.

    total: number of completions in the last call of ``correct``. Raises ConfigError if there are grades, but
    not ``total`` numbers.
    """
    grades: object = task.grades()
    if isinstance(grades, tuple) and not grades:
        return [None] * total
    numbers = _numbers(grades, total)
    if numbers is None:
        raise ConfigError(
            f"the task {class_name(task)}: grades() gave {_short(grades)}, but {total} completions need a "
            "number each: write it as ports.Task says"
        )
    return numbers


def checked_verdicts(
    task: Task, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[tuple[bool, float | None]]:
    """Return for each completion whether it is correct, and its reward, which is None without grades.

    A completion with a reward that is not finite could not be judged, and counts as wrong. Raises the
    ConfigErrors of ``checked_correct`` and ``checked_grades``.
    """
    correct = checked_correct(task, prompts, completions)
    verdicts = zip(correct, checked_grades(task, len(correct)), strict=True)
    return [(right and (grade is None or math.isfinite(grade)), grade) for right, grade in verdicts]


def _fault(prompt: object, place: int) -> str | None:
    """Return the fault of the prompt at index ``place`` of its split, and a remedy; None without a fault."""
    if not isinstance(prompt, Prompt):
        return f"is a {type(prompt).__name__}: give a tba_hpc.Prompt"
    if not isinstance(prompt.id, int | np.integer) or prompt.id != place:
        return (
            f"has the id {prompt.id!r}, but ids count the prompts of a split from 0: give it the id {place}"
        )
    tokens: object = prompt.tokens
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        kind = (
            f"{tokens.dtype} {list(tokens.shape)}"
            if isinstance(tokens, np.ndarray)
            else type(tokens).__name__
        )
        return f"has tokens of type {kind}, but they must be int32 [T]: give np.array(tokens, np.int32)"
    if not len(tokens):
        return "has no tokens, but a model needs one to continue: leave the prompt out"
    if not isinstance(prompt.target, str):
        return (
            f"has the target {prompt.target!r}, but a target is text: give a str, empty if there is no target"
        )
    return None


def _short(value: object) -> str:
    """Return the repr of a value on one line, truncated if it is long."""
    return " ".join(reprlib.repr(value).split())


def _numbers(values: object, total: int) -> list[float] | None:
    """Return the values as floats; None if their number is not ``total`` or if one of them is no number."""
    try:
        items = list(cast(Iterable[float], values))
        texts = any(isinstance(item, str) for item in items)
        return None if texts or len(items) != total else [float(item) for item in items]
    except (TypeError, ValueError):
        return None


@dataclass
class Failures:
    """Counter of failures in a task's code, which logs some and raises ConfigError at ``limit`` in a row.

    things: plural noun for what fails, for the error. then: clause that says what happens after a failure,
    for the log. in_a_row: number of failures in a row; the caller sets it to 0 after a success.
    """

    things: str
    then: str
    limit: float = math.inf
    in_a_row: int = 0
    _seen: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, error: BaseException | None, *, counts: bool = True) -> None:
        """Count a failure. Log it if it is the first for its reason, and then every TOLD_EVERY-th.

        what: clause that describes the failure. error: the exception, if any. The reason is the exception's
        class and line of user code. If the line is unknown, it is the exception's text; if there is no
        exception, ``what``. Texts that differ only in numbers are one reason. counts: whether the failure
        counts towards the limit. Raises ConfigError at the limit.
        """
        text = in_words(error) if error else what
        reason = (error and kind_of(error)) or NUMBER.sub("#", text)
        if reason not in self._seen and len(self._seen) >= MOST_REASONS:
            reason = OTHER_REASONS
        before = self._seen[reason]
        self._seen[reason] += 1
        if before % TOLD_EVERY == 0:
            whose = reason if reason is OTHER_REASONS else "this reason"
            note = f"{what}; {self.then} ({before} before for {whose}; one in {TOLD_EVERY} is logged)"
            log.warning("%s", note, exc_info=error)
        self.in_a_row += counts
        if self.in_a_row >= self.limit:
            raise ConfigError(
                f"there were {self.in_a_row} {self.things} in a row, the last because {what}: correct the "
                "cause, then start from the config file: the run directory has the old code"
            )
