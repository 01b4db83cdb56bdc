"""A model's tokenizer from its files alone, for checks without transformers and torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import is_own
from tba_hpc.core.ports import Message

FILES = ("tokenizer.json", "tokenizer_config.json")

NO_END = (
    "the tokenizer of {key}={path} has no end-of-sequence token, so no completion could ever end: set "
    "eos_token in its tokenizer_config.json"
)
"""Error for a model whose tokenizer has no end-of-sequence token."""

OF_THE_FILES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of tokenizers that know only the special tokens in their files."""


class FileTokenizer:
    """The Tokenizer port without what transformers adds, so texts are at most as long as for the model.

    It adds no special tokens, unless a text has no other tokens, nor what a chat template puts around a
    message.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def find(cls, model: str) -> FileTokenizer | None:
        """Find the tokenizer of a folder or a cached hub name; None if only transformers can load it.

        Raises ConfigError if there is no end-of-sequence token.
        """
        places = [_place(model, name) for name in FILES]
        if None in places:
            return None
        tokenizer = Tokenizer.from_file(str(places[0]))
        settings = json.loads(Path(str(places[1])).read_text(encoding="utf-8"))
        eos, kind = settings.get("eos_token"), settings.get("tokenizer_class")
        if eos is None and kind in OF_THE_FILES and _place(model, "special_tokens_map.json") is None:
            raise ConfigError(NO_END.format(key="model.path", path=model))
        token = eos.get("content") if isinstance(eos, dict) else eos
        token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
        return None if token_id is None else cls(tokenizer, token_id)

    def encode(self, text: str) -> np.ndarray:
        """Return tokens, int32 [T], at most as many as the model's tokenizer makes."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(tokens or self._tokenizer.encode(text).ids, np.int32)

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of the message alone."""
        return self.encode(text)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], ask: bool, **options: Any
    ) -> str:
        """Return the texts of the messages alone."""
        return "".join(message["content"] for message in messages)

    def encode_rendered(self, text: str) -> np.ndarray:
        return self.encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))


def _place(model: str, name: str) -> str | None:
    """Return the path of a model's file, or None if it is not on this machine."""
    if Path(model).is_dir():
        file = Path(model) / name
        return str(file) if file.is_file() else None
    if model.count("/") > 1 or model[0] in "./~" or is_own(model):
        return None
    from huggingface_hub import try_to_load_from_cache  # slow to import, and folders need none of it

    cached = try_to_load_from_cache(model, name)
    return cached if isinstance(cached, str) else None
