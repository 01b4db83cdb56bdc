"""Rewards that a config names: a function of the user's, a judge behind a URL, or a program.

A reward takes answers, each a row and the text of a completion of its prompt, and gives a number for each,
NaN for one that is to be set aside. What it raises costs the group.

A function is called by the names of its arguments. The first is ``completion``, a text, and it gives a
number; or ``completions``, the texts of several completions of one prompt, and it gives a list of as many.
All others get the row's fields of their names; one with a default may be missing there; ``**fields`` gets all
fields that no other argument takes.

    def short(completion, limit=20):
        return -max(0, len(completion.split()) - limit)
"""

from __future__ import annotations

import inspect
import logging
import math
import reprlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import FrameType
from typing import Any

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.core.own_code import OF_A_FILE, find_function, in_words, where_is
from tba_hpc.core.wording import did_you_mean
from tba_hpc.tasks.judge import Judge
from tba_hpc.tasks.program import Program

log = logging.getLogger(__name__)

TRIAL_SECONDS = 10.0
"""How long the start of a run waits for a trial."""

IN_TIME = "give what it waits for a timeout, or raise launch.timeout_seconds, half of which a call may take"
"""The remedy for a function that does not end."""

Fields = Mapping[str, object]
"""A row of JSONL."""

Answer = tuple[Fields, str]
"""A row, and the text of a completion of its prompt."""

Reward = Callable[[Sequence[Answer]], list[float]]
"""A number for each of some answers."""


def make_rewards(sections: Mapping[str, RewardSection]) -> dict[str, Reward]:
    """By name. Raises ConfigError where one cannot be had."""
    alone = list(sections) == ["reward"]  # as a config may say for short
    return {
        name: _make("task.reward" if alone else f"task.reward.{name}", section)
        for name, section in sections.items()
    }


def _make(key: str, section: RewardSection) -> Reward:
    if section.function is not None:
        return Function(f"{key}={section.function}", section.function)
    return Judge(key, section) if section.url is not None else Program(key, section)


class NoNumberError(TypeError):
    """A reward function gave something else, or too few."""


class Function:
    """A reward by a function of the user's. Raises ConfigError where there is none, or not of this kind."""

    def __init__(self, key: str, name: str) -> None:
        """key: what it is called in errors."""
        self._key = key
        self._call = find_function(key, name)
        try:
            parameters = list(inspect.signature(self._call).parameters.values())
        except ValueError:
            parameters = []
        first = parameters[0].name if parameters else ""
        if first not in ("completion", "completions"):
            raise ConfigError(
                f"{key} takes {first or 'nothing'} first: call its first argument completion, for one text, "
                "or completions, for a list of them"
            )
        self._together = first == "completions"
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = {p.name: p.default is p.empty for p in parameters[1:] if p.kind in _BY_NAME}
        self._first = first

    def require(self, fields: Fields, line: str) -> None:
        """Raise ConfigError where a row lacks what the function needs; line: which row it is."""
        for name, needed in self._named.items():
            if needed and name not in fields:
                meant = did_you_mean(name, fields)
                raise ConfigError(f"{self._key} takes {name!r}, which {line} lacks: {meant}")

    def try_on(self, fields: Fields, seconds: float = math.inf) -> None:
        """Call it once on an empty completion, in a thread, as the scorer's calls are.

        seconds: deadline of a call; after TRIAL_SECONDS it goes on with a warning. Raises ConfigError where
        it takes longer, gives anything but a number, or handles signals, which no thread may.
        """
        error, signals, where = _tried(lambda: self([(fields, "")]), min(seconds, TRIAL_SECONDS))
        if where and seconds <= TRIAL_SECONDS:
            raise ConfigError(
                f"{self._key} ran for {seconds:g} s on an empty completion, last at {where}: {IN_TIME}"
            )
        if where:
            log.warning(
                "%s still runs after %g s on an empty completion, at %s: after %g s it is set aside; %s",
                *(self._key, TRIAL_SECONDS, where, seconds, IN_TIME),
            )
        if signals:
            raise ConfigError(
                f"{self._key} handles signals, which only a main thread may, but rewards are computed in "
                "another: time out in another way; with math_verify, call parse(…, parsing_timeout=None) and "
                "verify(…, timeout_seconds=None)"
            )
        if isinstance(error, FileNotFoundError):
            log.warning("%s raised %s on an empty completion: %s", self._key, in_words(error), OF_A_FILE)
        if isinstance(error, NoNumberError):  # what else it raises may be the empty text's fault
            raise ConfigError(f"{error}: give a number for each completion")

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Raises what the function raises, and NoNumberError where it gives anything but numbers."""
        if self._together:
            return [
                reward
                for _, group in groupby(answers, lambda answer: id(answer[0]))
                for reward in self._rewards(list(group))
            ]
        return [self._number(self._call(text, **self._fields(row))) for row, text in answers]

    def _rewards(self, answers: Sequence[Answer]) -> list[float]:
        """Of answers to one prompt."""
        given = list(self._call([text for _, text in answers], **self._fields(answers[0][0])))
        if len(given) != len(answers):
            raise NoNumberError(f"{self._key} gave {len(given)} numbers for {len(answers)} completions")
        return [self._number(reward) for reward in given]

    def _number(self, reward: object) -> float:
        try:
            if not isinstance(reward, str):
                return float(reward)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        raise NoNumberError(f"{self._key} gave {reprlib.repr(reward)}, which is no number")

    def _fields(self, row: Fields) -> Fields:
        return {
            name: value
            for name, value in row.items()
            if name != self._first and (self._takes_all or name in self._named)
        }


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _tried(call: Callable[[], object], seconds: float) -> tuple[BaseException | None, bool, str]:
    """Make a call in a thread: what it raised; if it tried to handle signals, even if it hides that.

    And the line where it is, if it has not ended in time.
    """
    raised, signals = list[BaseException](), list[object]()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_exception" and (called.__module__, called.__name__) == ("_signal", "signal"):
            signals.append(called)

    def work() -> None:
        sys.setprofile(watch)  # of this thread
        try:
            call()
        except BaseException as error:  # a user's code may raise anything
            raised.append(error)

    thread = threading.Thread(target=work, name="trial", daemon=True)
    thread.start()
    thread.join(seconds)
    where = where_is(thread.ident or 0)[0] if thread.is_alive() else ""
    return (raised[0] if raised else None), bool(signals), where
