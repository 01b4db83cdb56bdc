"""Copies many numpy arrays to a device in one transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tba_hpc.core.types import offsets_of

ALIGNED = 64
"""Alignment of each array in the transfer, in bytes; sufficient for any dtype."""

T = TypeVar("T")


def upload(value: T, device: torch.device) -> T:
    """Return a copy of ``value`` with a tensor on ``device`` in place of every array.

    value: nested dataclasses, tuples and lists. All arrays are copied together. A copy to a GPU is
    asynchronous, from page-locked memory.
    """
    arrays: list[np.ndarray] = []
    _replace_arrays(value, lambda array: arrays.append(np.ascontiguousarray(array)))
    ends = offsets_of([-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(ends.tolist(), arrays, strict=False):
        host[start : start + array.nbytes] = torch.from_numpy(array.reshape(-1).view(np.uint8))
    there = host.to(device, non_blocking=True)
    tensors = iter(_tensor(there, *of) for of in zip(ends.tolist(), arrays, strict=False))
    return _replace_arrays(value, lambda _: next(tensors))


def _tensor(data: Tensor, start: int, array: np.ndarray) -> Tensor:
    """Return the tensor at byte ``start`` of ``data``, uint8, with the dtype and shape of ``array``."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return data[start : start + array.nbytes].view(dtype).view(array.shape)


def _replace_arrays(value: Any, by: Callable[[np.ndarray], Any]) -> Any:
    """Return ``value`` with ``by(array)`` in place of every array, in a fixed order."""
    if isinstance(value, np.ndarray):
        return by(value)
    if isinstance(value, tuple | list):
        return type(value)(_replace_arrays(one, by) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        mine = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _replace_arrays(one, by) for name, one in mine.items()})
    return value
