"""Formats numbers for people to read, and makes untrusted text safe to print on a terminal."""

from __future__ import annotations

import difflib
import functools
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that would control a terminal or reverse the order of a text, but not tab and line end."""


def print_in_any_encoding() -> None:
    """Let standard output and error replace characters that their encoding lacks, so no command fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # neither closed nor replaced
            stream.reconfigure(errors="replace")


def output_is_lost() -> bool:
    """Return whether standard output takes no more, as on a full disk; it is then redirected to nowhere."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


@contextmanager
def without_fail() -> Iterator[None]:
    """Keep an error in output from ending the program; print a line about it on standard error, once."""
    try:
        with though_output_is_lost():
            yield
    except Exception as error:
        _complain(f"cannot be shown: {error}")


@contextmanager
def though_output_is_lost() -> Iterator[None]:
    """Continue after the block if standard output takes no more; it is then redirected to nowhere."""
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
    r"""Escape a text's control characters, so that they are shown (``\x1b``) and not obeyed."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def count(number: int, thing: str) -> str:
    """Format a count with its noun: ``1 shard``, ``2 shards``, ``3,000 trajectories``."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def first_few(things: Sequence[object], most: int = 5, between: str = ", ") -> str:
    """List things, such as ``3, 5, 8``; if more than ``most``, list the first ones ``and 7 more``."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return between.join(map(str, things[:most])) + more


def first_words(text: str) -> str:
    """Return a long text's first line up to its first comma, with single blanks."""
    return " ".join(text.partition("\n")[0].partition(",")[0].split())


def did_you_mean(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return ``did you mean 'x'?``; if no valid name is near, ``otherwise``, by default all valid names."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1)
    known = otherwise or f"valid are {', '.join(names) or 'none'}"
    return f"did you mean {close[0]!r}?" if close else known


def percent(share: float) -> str:
    """Format a share as a percentage with one decimal: 51.2 %."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any: 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
