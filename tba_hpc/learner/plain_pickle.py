"""Pickle module for ``torch.save`` that writes the same pickles under every supported Python."""

from __future__ import annotations

import pickle
from enum import Enum
from typing import Any


class Pickler(pickle.Pickler):
    """Pickler that writes a member of an Enum as its class and value.

    Python 3.11.0 to 3.11.4 would write ``getattr(class, name)`` instead (CPython issue 105332), which a
    reader of plain data refuses.
    """

    def reducer_override(self, value: object) -> Any:
        """Return how to write ``value``, or NotImplemented for pickle's default."""
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented
