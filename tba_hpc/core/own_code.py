"""Imports users' own functions and classes, which a config names as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tba_hpc.config import ConfigError, is_local
from tba_hpc.core.wording import did_you_mean

LONGEST_MESSAGE = 300
"""Largest number of characters shown of an error message from a user's code."""

OF_A_FILE = "name the file by its absolute path, or by Path(__file__).with_name('NAME'), which the run copies"
"""Remedy for a file that the user's code does not find; see ``run.modules``, which copies files."""

IN_TIME = "set a timeout on what it waits for, or raise launch.timeout_seconds: a call may take half of that"
"""Remedy for a call of user code that does not return."""

LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}/",
)
"""Folders of code that is not the user's. User code that is installed there counts as a library, too."""


def is_own(name: str) -> bool:
    """Return whether ``name`` has the form ``module:function`` and is not a local path."""
    return ":" in name and not is_local(name)


def find_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function or class that ``name`` refers to, as ``module:function``.

    key: config key to name in errors. Raises ConfigError if there is no such module or function.
    """
    module_name, _, function = name.partition(":")
    module = _import(key, module_name)
    found = getattr(module, function, None)
    if not callable(found):
        known = [one for one in vars(module) if callable(vars(module)[one])]
        meant = did_you_mean(function, known, "check the name")
        raise ConfigError(f"{key}: no function or class {function!r} in that module: {meant}")
    return found


def _import(key: str, name: str) -> ModuleType:
    """Import a user's module. Its exceptions become a ConfigError with the line that raised them."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{key} cannot be imported ({error}): put the module beside the config, or install it"
            ) from None
        raise _refusal(key, name, error) from None
    except (Exception, SystemExit) as error:
        raise _refusal(key, name, error) from None


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a user's function; [] if it is compiled and has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def refusal(function: Callable[..., Any], /, *arguments: object, **keywords: object) -> str:
    """Return why a user's function or class does not take these arguments; empty if it takes them.

    Empty, too, for a compiled function without a signature, because that might take any arguments.
    """
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def in_words(error: BaseException) -> str:
    """Return an exception of user code as one short line, even if its ``__str__`` fails."""
    said = traceback.format_exception_only(error)[-1].removeprefix(f"{type(error).__module__}.")
    return " ".join(said.split())[:LONGEST_MESSAGE]


def raised_at(error: BaseException) -> str:
    """Return a phrase with an exception of user code and, if known, the line that raised the exception.

    For example: raised KeyError: 'gold' (r.py:7 in reward).
    """
    where = _origin(error)
    return f"raised {in_words(error)}{where and f' ({where})'}"


def kind_of(error: BaseException) -> str:
    """Return an exception's class and the line of user code that raised it; empty if the line is not known.

    Exceptions of one kind may differ in their texts, which often quote data.
    """
    where = _origin(error)
    return f"{type(error).__qualname__} ({where})" if where else ""


def where_is(thread: int) -> tuple[str, str]:
    """Return the line of user code that a thread executes (``r.py:7 in reward``), and the thread's stack.

    thread: its identifier, as in threading.get_ident.
    """
    stack = traceback.extract_stack(sys._current_frames()[thread])
    return _last_line(stack) or _line(stack[-1]), "".join(stack.format())


def _origin(error: BaseException) -> str:
    """Return the last line of user code in an exception's traceback; empty if there is none."""
    return _last_line(traceback.extract_tb(error.__traceback__))


def _last_line(stack: traceback.StackSummary) -> str:
    """Return the last line of user code in a stack (``r.py:7 in reward``); empty if there is none.

    Frames without an absolute path are skipped: a library's compiled code, and code that exec runs.
    """
    own = (f for f in reversed(stack) if f.filename.startswith("/") and not f.filename.startswith(LIBRARIES))
    return next(map(_line, own), "")


def _line(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _refusal(key: str, name: str, error: BaseException) -> ConfigError:
    """Make a ConfigError for a module that cannot be imported, with the line of it that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno) for f in frames if f.filename.endswith(f"{name.replace('.', '/')}.py")]
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" in {place[0]}, line {place[1]}" if place else ""
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    remedy = OF_A_FILE if isinstance(error, FileNotFoundError) else "correct it, or install what it imports"
    return ConfigError(f"{key} cannot be imported ({type(error).__name__}: {what}{where}): {remedy}")
