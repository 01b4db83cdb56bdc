"""Pickle module for ``torch.save`` whose pickles are the same under every supported Python."""

from __future__ import annotations

import pickle
from enum import Enum
from typing import Any


class Pickler(pickle.Pickler):
    """Pickler that writes a member of an Enum as its class and value.

    Every Python does so except 3.11.0 to 3.11.4. These write ``getattr(class, name)`` (CPython issue 105332),
    which a reader of plain data refuses.
    """

    def reducer_override(self, value: object) -> Any:
        """Return how to write ``value``, or NotImplemented for pickle's own way."""
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented
