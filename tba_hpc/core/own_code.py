"""Users' own functions and classes, which a config names as ``module:function``."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tba_hpc.config import ConfigError, is_local
from tba_hpc.core.wording import did_you_mean


def is_own(name: str) -> bool:
    """Tell whether ``name`` has the form ``module:function`` and is not a path."""
    return ":" in name and not is_local(name)


def find_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function that ``name`` refers to; ``key``: what errors call it. Raises ConfigError."""
    module_name, _, function = name.partition(":")
    module = import_own(key, module_name)
    found = getattr(module, function, None)
    if not callable(found):
        known = [one for one in vars(module) if callable(vars(module)[one])]
        meant = did_you_mean(function, known, "check the name")
        raise ConfigError(f"{key}: no function {function!r} there: {meant}")
    return found


def import_own(key: str, name: str) -> ModuleType:
    """Import a user's module. Raises ConfigError for any exception in it, with the line that raised it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{key} cannot be imported ({error}): put the module beside the config, or install it"
            ) from None
        raise _refusal(key, name, error) from None
    except Exception as error:
        raise _refusal(key, name, error) from None


def _refusal(key: str, name: str, error: Exception) -> ConfigError:
    """Make an error that names the module's last executed line, or the line that is not valid Python."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno) for f in frames if f.filename.endswith(f"{name.replace('.', '/')}.py")]
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" in {place[0]}, line {place[1]}" if place else ""
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return ConfigError(
        f"{key} cannot be imported ({type(error).__name__}: {what}{where}): correct it, or install what it "
        "imports"
    )
