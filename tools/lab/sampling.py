"""From what ``generate`` of transformers returns to what our tasks take."""

from __future__ import annotations

import numpy as np

from tba_hpc.core.types import Completion


def completion_of(tokens: list[int], eos: int) -> Completion:
    """Up to the end of the sequence, or cut off; log-probabilities, which no reward looks at, are 0."""
    ended = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    array = np.array(ended, np.int32)
    return Completion(array, np.zeros(len(array), np.float32), "stop" if eos in tokens else "length")
