"""Pickles that every supported Python writes alike: what ``torch.save`` takes as its pickle module."""

from __future__ import annotations

import pickle
from enum import Enum
from typing import Any


class Pickler(pickle.Pickler):
    """Writes a member of an Enum as its class and value.

    So does every Python but 3.11.0 to 3.11.4, which write ``getattr(class, name)`` (CPython issue 105332): a
    reader of data alone refuses that.
    """

    def reducer_override(self, value: object) -> Any:
        """How to write ``value``, or NotImplemented for pickle's own way."""
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented
