"""Reads a model's tokenizer from its files, without transformers and torch, for checks before a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from tba_hpc.config import ConfigError
from tba_hpc.core.hub_files import find_file
from tba_hpc.core.ports import Message

FILES = ("tokenizer.json", "tokenizer_config.json")
"""Names of the files that FileTokenizer needs."""

NO_END = (
    "the tokenizer of {key}={path} has no end-of-sequence token, so no completion could ever end: set "
    "eos_token in its tokenizer_config.json"
)
"""Error message for a model whose tokenizer has no end-of-sequence token."""

NO_CHAT = (
    "the tokenizer of {path} has no chat template: give a model that was tuned for chat, or write a "
    "chat_template into its tokenizer_config.json; prompts that are texts, not lists of messages, need none "
    "with task.options.chat=false"
)
"""Error message for a chat with a model whose tokenizer has no chat template."""

REFUSES = (
    "the chat template of {path} refuses messages of {roles} ({error}): give another chat_template in its "
    "tokenizer_config.json"
)
"""Error message for a conversation that a chat template refuses."""

WITHOUT_DEFAULTS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of tokenizer classes without default special tokens: they have only those in their files."""


class FileTokenizer:
    """A Tokenizer that makes at most as many tokens of a text as the model's own tokenizer in transformers.

    A check of lengths with this class therefore never refuses what would fit. No special tokens are added,
    unless the text has no other tokens, and a chat message is encoded without the chat template.

    tokenizer: the tokenizer in tokenizer.json. model: folder or hub name, for errors. settings: the contents
    of tokenizer_config.json, with the model's chat template, if it has one, as ``chat_template``.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_id: int, model: str, settings: Mapping[str, Any]
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._model = model
        self._settings = settings
        self.eos_token_id = eos_token_id
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def find(cls, model: str) -> FileTokenizer | None:
        """Load a model's tokenizer; None if its files are not here, or only transformers can read them.

        model: folder or hub name. Raises ConfigError if there is no end-of-sequence token.
        """
        words, config = (find_file(model, name, os.environ) for name in FILES)
        if words is None or config is None:
            return None
        tokenizer = Tokenizer.from_file(str(words))
        settings = json.loads(config.read_text(encoding="utf-8"))
        eos, kind = settings.get("eos_token"), settings.get("tokenizer_class")
        others = find_file(model, "special_tokens_map.json", os.environ)
        if eos is None and kind in WITHOUT_DEFAULTS and others is None:
            raise ConfigError(NO_END.format(key="model.path", path=model))
        token = _text(eos)
        token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if template := find_file(model, "chat_template.jinja", os.environ):
            settings["chat_template"] = template.read_text(encoding="utf-8")
        return None if token_id is None else cls(tokenizer, token_id, model, settings)

    @cached_property
    def control_tokens(self) -> list[int]:
        """Ids of the special tokens that appear if a text contains their names, such as <|im_end|>."""
        unknown = _text(self._settings.get("unk_token"))
        added = self._tokenizer.get_added_tokens_decoder().items()
        return [token for token, known in added if known.special and known.content != unknown]

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of ``text``. Special tokens are added only if it has no tokens."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(tokens or self._tokenizer.encode(text).ids, np.int32)

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of the message ``text`` alone, without the chat template.

        Raises ConfigError if the model has no chat template.
        """
        self._require_template()
        return self.encode(text)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], ask: bool, **options: Any
    ) -> str:
        """Return the text of a conversation; see ``ports.ChatTokenizer``.

        If transformers is not installed, the messages' texts are only joined. Raises ConfigError if the model
        has no chat template, or if the template refuses the messages.
        """
        self._require_template()
        if not self.has_chat:
            return "".join(message["content"] for message in messages)
        from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

        special = {name: _text(value) for name, value in self._settings.items() if name.endswith("_token")}
        try:
            rendered = render_jinja_template(
                [list(messages)],
                tools=[*map(dict, tools)] or None,
                chat_template=self._template,
                add_generation_prompt=ask,
                **special | options,
            )[0][0]
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(REFUSES.format(path=self._model, roles=roles, error=error)) from None
        return str(rendered)

    def _require_template(self) -> None:
        if self._template is None:
            raise ConfigError(NO_CHAT.format(path=self._model))

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template, and transformers is installed to render it."""
        return self._template is not None and find_spec("transformers") is not None

    @property
    def _template(self) -> str | None:
        """The chat template; if there are several, the one named "default"."""
        given = self._settings.get("chat_template")
        named = {one["name"]: one["template"] for one in given} if isinstance(given, list) else {}
        return named.get("default") if named else given

    def encode_rendered(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))

    def decode_whole(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def end_ids(model: str) -> set[int]:
    """Return the ids of the end-of-sequence tokens in a model's configuration; may be empty.

    An engine ends completions at these tokens as well as at the tokenizer's. model: folder or hub name.
    """
    for name in ("generation_config.json", "config.json"):
        if file := find_file(model, name, os.environ):
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            return set(found) if isinstance(found, list) else set() if found is None else {found}
    return set()


def _text(token: Any) -> Any:
    """Return the text of a special token, which some files store in a dictionary."""
    return token.get("content") if isinstance(token, dict) else token
