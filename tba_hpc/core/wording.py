"""Formats numbers, lists and untrusted text for people; lets commands go on if their output is lost."""

from __future__ import annotations

import difflib
import functools
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal or reverse the direction of text, except tab and newline."""


def print_in_any_encoding() -> None:
    """Make stdout and stderr replace characters that they cannot encode, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # neither closed nor replaced
            stream.reconfigure(errors="replace")


def output_is_lost() -> bool:
    """Return whether writing to stdout fails, as on a full disk; if so, redirect stdout to /dev/null."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def drop_lost_output() -> None:
    """Redirect stdout and stderr to /dev/null if they cannot be written, as on a full disk.

    Otherwise the interpreter would try again at its end, fail, and change the exit status.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed before Python started
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def without_fail() -> Iterator[None]:
    """Run a block that shows something to the user. An exception in it is only printed to stderr.

    Each error is printed once per process.
    """
    try:
        with though_output_is_lost():
            yield
    except Exception as error:
        _complain(f"cannot be shown: {error}")


@contextmanager
def though_output_is_lost() -> Iterator[None]:
    """Run a block. If it cannot write to stdout, redirect stdout to /dev/null and leave the block."""
    try:
        yield
        print(end="", flush=True)
    except OSError:
        if not output_is_lost():
            raise


@functools.cache
def _complain(text: str) -> None:
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""Escape control characters, so that a terminal shows them (``\x1b``) instead of obeying them."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def count(number: int, thing: str) -> str:
    """Format a count with its noun: ``1 shard``, ``2 shards``, ``3,000 trajectories``."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def size(nbytes: float) -> str:
    """Format a number of bytes: ``14 MB``, or from 1 GB on ``1.5 GB``."""
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"


def first_few(things: Sequence[object], most: int = 5, between: str = ", ") -> str:
    """Join things: ``3, 5, 8``. If there are more than ``most``, count the others: ``3, 5 and 7 more``."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return between.join(map(str, things[:most])) + more


def first_words(text: str) -> str:
    """Return the first line of a text up to its first comma, with single spaces."""
    return " ".join(text.partition("\n")[0].partition(",")[0].split())


def did_you_mean(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return ``did you mean 'x'?`` if a valid name is similar; else ``otherwise`` or, if empty, all names."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1)
    known = otherwise or f"valid are {', '.join(names) or 'none'}"
    return f"did you mean {close[0]!r}?" if close else known


def percent(share: float) -> str:
    """Format a share as a percentage with one decimal: 51.2 %."""
    return f"{100 * share:.1f} %"


def mean_reward(value: float, sign: Literal["", "+"] = "") -> str:
    """Format a mean reward with three decimals; sign: ``+`` puts a sign before positive ones, too.

    It is first rounded to nine decimals, so that 0.5725 looks the same whatever the order of its sum.
    """
    return f"{round(value, 9) + 0.0:{sign}.3f}"  # -0.0 + 0.0 is 0.0


def duration(seconds: float) -> str:
    """Format seconds as 2:05 (minutes and seconds) or 1:02:05 (with hours)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
