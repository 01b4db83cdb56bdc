"""Functions and classes of the user's that a config names as ``module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from tba_hpc.config import ConfigError, is_local


def is_own(name: str) -> bool:
    """Whether ``name`` is of that kind, and no path."""
    return ":" in name and not is_local(name)


def find_function(key: str, name: str) -> Callable[..., Any]:
    """The function behind ``name``; ``key``: what it is called in errors. Raises ConfigError."""
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key} cannot be imported ({error}): put the module beside the config") from None
    found = getattr(module, function, None)
    if not callable(found):
        close = get_close_matches(function, [one for one in vars(module) if callable(vars(module)[one])], n=1)
        meant = f"did you mean {close[0]!r}?" if close else "check the name"
        raise ConfigError(f"{key}: no function {function!r} there: {meant}")
    return found
