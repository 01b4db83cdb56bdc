"""A fixed model, other than the policy, that answers texts: a second vLLM engine in a separate process.

Tasks use it, for example as the target of red-teaming; nothing here depends on a task.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from tba_hpc.config import GeneratorSection, ModelSection
from tba_hpc.core.types import Group, Prompt, Request, Sampling
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.learner.hf_model import load_tokenizer


class VllmVictim:
    """A ports.Victim on vLLM. A text that is too long is truncated at its beginning.

    The constructor starts the engine, and ``answers`` waits until it is built; ports.Serve explains the
    arguments. The engine ignores signals to the searcher's processes. It ends with the searcher, or with the
    thread that called the constructor.
    """

    def __init__(
        self, model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str], seed: int
    ) -> None:
        tokenizer = load_tokenizer(model.path, keys[0])
        self._encode = tokenizer.encode_chat if chat else tokenizer.encode
        self._decode = tokenizer.decode
        self._nothing = np.array([tokenizer.eos_token_id], np.int32)
        self._room = model.context_length - generator.max_tokens
        self._sampling = Sampling(generator.temperature, generator.top_p, generator.max_tokens)
        self._answers = generator.completions_per_prompt
        self._turn = threading.Lock()
        self._generator = VllmGenerator(model, generator, seed=seed, keys=keys)

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        """Return ``completions_per_prompt`` sampled answers to each text, once all are finished.

        Several threads may call this method; their calls run one after another. Errors: see ports.Victim.
        """
        with self._turn:
            return self._ask(texts)

    def _ask(self, texts: Sequence[str]) -> list[list[str]]:
        for place, text in enumerate(texts):
            self._generator.submit(Request(self._prompt(place, text), place, self._answers, self._sampling))
        groups: list[Group] = []
        while len(groups) < len(texts):
            groups += self._generator.step()
        groups.sort(key=lambda group: group.request.id)
        return [[self._decode(answer.tokens) for answer in group.completions] for group in groups]

    def close(self) -> None:
        """End the engine."""
        self._generator.close()

    def _prompt(self, place: int, text: str) -> Prompt:
        tokens = self._encode(text)[-self._room :]
        return Prompt(place, tokens if len(tokens) else self._nothing, target="")
