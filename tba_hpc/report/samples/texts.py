"""Tokens as text, whole and one by one, with the quickest tokenizer that a run's model has.

It imports torch only if the model's files leave no other way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import is_own
from tba_hpc.core.ports import Tokenizer
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.run.directory import RunDir

CONTEXT = 4
"""Tokens before one that decide how it reads: whether a blank comes first."""

BROKEN = "\ufffd"
"""What a part of a character reads as."""

Decode = Callable[[np.ndarray], str]


def run_tokenizer(run: RunDir) -> Tokenizer:
    """Of the exported model, or of the one that the run's config names. Raises ConfigError."""
    path = run.config().model.path
    for model in (str(run.export), path):
        if Path(model).is_dir() and (found := FileTokenizer.find(model)):
            return found
    if is_own(path):
        raise ConfigError(f"{run.path} cannot be put into words: model.path={path} brings no tokenizer")
    if found := FileTokenizer.find(path):
        return found
    from tba_hpc.learner.hf_model import load_tokenizer

    try:
        return load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"{run.path} cannot be put into words: {error}") from None


def pieces(decode: Decode, tokens: np.ndarray) -> list[str]:
    """What each token adds to the text: empty for a special one, and for all but the last of a character.

    tokens: int32 [T]. The pieces together are the text.
    """
    found: list[str] = []
    start = 0  # of the tokens whose text is still incomplete
    for end in range(1, len(tokens) + 1):
        before = max(0, start - CONTEXT)
        known, text = decode(tokens[before:start]), decode(tokens[before:end])
        whole = not text.endswith(BROKEN) or end == len(tokens)
        found.append(text[len(known) :] if whole else "")
        start = end if whole else start
    return found
