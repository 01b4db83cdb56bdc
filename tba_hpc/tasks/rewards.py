"""Rewards that a config names: the user's own function, a judge at a URL, or a program.

A reward takes pairs of a row and the text of a completion of its prompt. It returns a number for each, or NaN
for a completion that is to be set aside. If it raises an exception, the whole group is set aside.

A function's arguments are recognised by name. If the first is ``completion``, it is a text, and the function
returns a number. If the first is ``completions``, it is a list of texts of the same prompt, and the function
returns a list with as many numbers. Every other argument gets the row's field of that name. A row may lack
the field if the argument has a default. ``**fields`` gets all other fields.

    def short(completion, limit=20):
        return -max(0, len(completion.split()) - limit)
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from types import FrameType
from typing import Any

from tba_hpc.config import ConfigError, RewardSection, reward_key
from tba_hpc.core.own_code import IN_TIME, OF_A_FILE, find_function, in_words, raised_at, where_is
from tba_hpc.run.background import Worker
from tba_hpc.tasks.fields import FieldArguments, Fields
from tba_hpc.tasks.judge import Judge
from tba_hpc.tasks.program import Program

log = logging.getLogger(__name__)

TRIAL_SECONDS = 10.0
"""Longest wait for the trial call of a function at the start of a run, in seconds."""

TRIAL_COMPLETIONS = 8
"""Largest number of empty completions in a trial call. Each may cost a request to a judge."""

ANSWERS = ("\\boxed{{{}}}", "{}", "#### {}")
"""Forms in which completions often give a row's answer."""

LIKELY_VALUES, LIKELY_LENGTH = 2, 100
"""Largest number, and largest length, of a row's values that completions of a trial call are made of."""

SEQUENCES = (str, list)
"""Types of fields that a function can mistake for a list with an item per completion."""

NO_LISTS = (str, bytes, Mapping, Set)
"""Types that can be iterated, but are not lists with a number per completion."""

ONE_ROW = (
    "the argument completions is a list of texts, and any other argument is the row's one value, not a list "
    "with a value for each text"
)
"""Explanation for functions written for TRL, where the other arguments are lists."""

OF_ANOTHER_SHAPE = (TypeError, LookupError, AttributeError)
"""Exceptions that suggest a function for TRL, which expects messages, or each field as a list."""

GIVE = "give a number for each completion"
"""Remedy for functions that return anything but a number for each completion."""

ONE_GROUP = "if it raises during the run, that group is set aside, and ten such groups in a row end the run"
"""Explanation for functions that raise in a trial call, perhaps only because of the text."""

Answer = tuple[Fields, str]
"""A row, and the text of a completion of its prompt."""

Reward = Callable[[Sequence[Answer]], list[float]]
"""Function from answers to a number for each."""


def make_rewards(sections: Mapping[str, RewardSection]) -> dict[str, Reward]:
    """Make the rewards by name. Raises ConfigError if one of them cannot be made."""
    return {name: _make(reward_key(sections, name), section) for name, section in sections.items()}


def _make(key: str, section: RewardSection) -> Reward:
    if section.function is not None:
        return Function(f"{key}={section.function}", section.function)
    return Judge(key, section) if section.url is not None else Program(key, section)


class NoNumberError(TypeError):
    """Raised if a reward function does not return a number for each completion."""


class CountError(NoNumberError):
    """Raised if a reward function returns more or fewer numbers than it got completions."""


class Function:
    """Reward by a user's function.

    The constructor raises ConfigError if there is no such function, or if its first argument has a name other
    than ``completion`` or ``completions``.
    """

    def __init__(self, key: str, name: str) -> None:
        """Import the function ``name``, ``module:function``. key: config key of the reward, for errors."""
        self.key = key
        self._call = find_function(key, name)
        self.arguments = FieldArguments(key, self._call)
        first = self.arguments.first
        if first not in ("completion", "completions"):
            of_trl = "completions" in self.arguments.names
            around = "; docs/coming-from.md has the lines to put around a function of TRL" if of_trl else ""
            raise ConfigError(
                f"{key} takes {first or 'nothing'} first: call its first argument completion, for one text, "
                f"or completions, for a list of them{around}"
            )
        self._together = first == "completions"

    def try_on(self, fields: Fields, seconds: float = math.inf) -> None:
        """Try the function on a row, as the scorer calls it: on empty completions, then on likely ones.

        A function of ``completions`` may mistake a field for a list with an item per completion. It therefore
        gets more completions than any field has characters or items, but at most TRIAL_COMPLETIONS. If a
        field has as many or more, a second call cuts it short, so that such a function returns too few
        numbers.

        seconds: time limit of a call during the run. If it is longer than TRIAL_SECONDS, a call that is not
        finished after TRIAL_SECONDS only causes a warning. Raises ConfigError if the call exceeds
        ``seconds``, does not return numbers, is refused because of its arguments, or handles signals, which
        only a main thread can do.
        """
        sizes = [len(value) for value in self.arguments.of(fields).values() if isinstance(value, SEQUENCES)]
        longest = max(sizes, default=0)
        several = min(1 + longest, TRIAL_COMPLETIONS) if self._together else 1
        empty = self._first_call([(fields, "")] * several, seconds)
        if empty and self._together and longest >= several:
            self._second_call(fields, several, seconds)
        if empty:
            shown = {"": empty[0], **self._answer_call(fields, seconds)}
            said = ", ".join(f'{reward:g} to "{text}"' for text, reward in shown.items())
            log.info("on the first row, %s gives %s", self.key, said)

    def _first_call(self, answers: Sequence[Answer], seconds: float) -> list[float]:
        """Call the function for the first time; return its numbers, none if it failed or has not ended.

        Raises ConfigError for a fault that no completion can avoid, and warns of other faults. seconds: time
        limit.
        """
        found = list[float]()
        error, signals, where = _tried(lambda: found.extend(self(answers)), min(seconds, TRIAL_SECONDS))
        if where and seconds <= TRIAL_SECONDS:
            raise ConfigError(
                f"{self.key} ran for {seconds:g} s on an empty completion, last at {where}: {IN_TIME}"
            )
        if where:
            log.warning(
                "%s still runs after %g s on an empty completion, at %s: after %g s a call is abandoned; %s",
                *(self.key, TRIAL_SECONDS, where, seconds, IN_TIME),
            )
        self._refuse_signals(signals)
        if isinstance(error, TypeError) and CALL_REFUSED.search(str(error)):
            raise ConfigError(
                f"{self.key} raised {in_words(error)}, whatever the completion: correct its arguments"
            )
        if isinstance(error, NoNumberError):  # other errors may be caused by the empty text
            raise ConfigError(str(error))
        if isinstance(error, FileNotFoundError):
            log.warning("%s %s on an empty completion: %s", self.key, raised_at(error), OF_A_FILE)
        elif error:
            what = ONE_ROW if self._together and isinstance(error, OF_ANOTHER_SHAPE) else ONE_GROUP
            log.warning("%s %s on empty completions: %s", self.key, raised_at(error), what)
        return [] if where else found

    def _second_call(self, fields: Fields, several: int, seconds: float) -> None:
        """Call the function again, with all fields of the row cut to fewer items than there are completions.

        Raises ConfigError if the function now returns too few numbers, because it returns one per item of a
        field instead of one per completion. An item of a text is a character. several: number of completions.
        seconds: time limit.
        """
        cut = {
            name: value[: several - 1] if isinstance(value, SEQUENCES) else value
            for name, value in fields.items()
        }
        error = _tried(lambda: self([(cut, "")] * several), min(seconds, TRIAL_SECONDS))[0]
        if isinstance(error, CountError):
            raise ConfigError(str(error))

    def _answer_call(self, fields: Fields, seconds: float) -> dict[str, float]:
        """Call the function on completions that hold values of the row in usual forms; return their rewards.

        An empty completion often ends a function at its first line. Raises ConfigError if the function
        handles signals, and warns of other faults. seconds: time limit.
        """
        given = [v for v in self.arguments.of(fields).values() if isinstance(v, str | int | float)]
        values = [value for value in given if len(str(value)) <= LIKELY_LENGTH][-LIKELY_VALUES:]
        if not values:
            return {}
        texts = [form.format(value) for value in values for form in ANSWERS]
        answers, found = [(fields, text) for text in texts], list[float]()
        error, signals, where = _tried(lambda: found.extend(self(answers)), min(seconds, TRIAL_SECONDS))
        self._refuse_signals(signals)
        on = f"on completions made of the row, such as {texts[-1]!r}"
        if where:
            log.warning("%s still runs after %g s %s, at %s: %s", self.key, TRIAL_SECONDS, on, where, IN_TIME)
        elif error:
            log.warning("%s %s %s: %s", self.key, raised_at(error), on, ONE_GROUP)
        return {} if where else dict(zip(texts, found, strict=False))  # none if the call failed

    def _refuse_signals(self, signals: bool) -> None:
        """Raise ConfigError if a trial call has tried to handle signals."""
        if signals:
            raise ConfigError(
                f"{self.key} handles signals, which only a main thread may, but rewards are computed in "
                "another: time out in another way; with math_verify, call parse(…, parsing_timeout=None) and "
                "verify(…, timeout_seconds=None)"
            )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Return a number for each (row, completion). Raises the function's own errors, or NoNumberError."""
        if self._together:
            return [
                reward
                for _, group in groupby(answers, lambda answer: id(answer[0]))
                for reward in self._rewards(list(group))
            ]
        return [self._number(self._call(text, **self.arguments.of(row))) for row, text in answers]

    def _rewards(self, answers: Sequence[Answer]) -> list[float]:
        """Return the rewards of answers to one prompt."""
        found = self._call([text for _, text in answers], **self.arguments.of(answers[0][0]))
        if isinstance(found, NO_LISTS) or not hasattr(found, "__iter__"):
            raise NoNumberError(
                f"{self.key} gave {reprlib.repr(found)}, which is not a list of numbers: {GIVE}"
            )
        given = list(found)
        if len(given) != len(answers):
            raise CountError(
                f"{self.key} gave {len(given)} numbers for {len(answers)} completions; {ONE_ROW}: {GIVE}"
            )
        return [self._number(reward) for reward in given]

    def _number(self, reward: object) -> float:
        try:
            if not isinstance(reward, str):
                return float(reward)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        raise NoNumberError(
            f"{self.key} gave {reprlib.repr(reward)}, which is not a number: {GIVE} (float('nan') sets one "
            "completion aside)"
        )


CALL_REFUSED = re.compile(r"required (?:positional|keyword-only) argument|unexpected keyword argument")
"""Pattern of the message of the TypeError by which Python refuses a call with wrong arguments."""


def _tried(call: Callable[[], object], seconds: float) -> tuple[BaseException | None, bool, str]:
    """Make a call in a thread, and wait for it up to ``seconds``.

    Returns three things: the exception that the call raised, or None; whether it tried to set a signal
    handler; and the line that it is still executing, or "" if it has ended. Python refuses signal handlers
    outside the main thread by an error, which the call may have caught.
    """
    signals = list[object]()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_exception" and (called.__module__, called.__name__) == ("_signal", "signal"):
            signals.append(called)

    def work() -> None:
        sys.setprofile(watch)  # for this thread alone
        call()

    worker = Worker("trial")
    trial = worker.submit(work)
    worker.close(seconds)
    if not trial.done():
        return None, bool(signals), where_is(worker.ident)[0]
    return trial.exception(), bool(signals), ""
