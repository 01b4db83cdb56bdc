"""The simplest tokenizer that can encode any text, for tests of tasks."""

from __future__ import annotations

import numpy as np

from tba_hpc.core.types import Completion, FinishReason


class ByteTokenizer:
    """One token per byte of UTF-8; 256 ends a sequence."""

    eos_token_id = 256
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        """uint8 values as int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chat(self, text: str) -> np.ndarray:
        """Between ``<`` and ``>``."""
        return self.encode(f"<{text}>")

    def decode(self, tokens: np.ndarray) -> str:
        """Inverse of encode; EOS left out."""
        return bytes(tokens[tokens != self.eos_token_id].tolist()).decode()


def completion(text: str, finish: FinishReason = "stop") -> Completion:
    """A completion that reads ``text``, ended by EOS unless it was cut off."""
    ending = [ByteTokenizer.eos_token_id] if finish == "stop" else []
    tokens = np.array([*text.encode(), *ending], np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), finish)
