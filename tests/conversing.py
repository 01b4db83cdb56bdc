"""What tests of environments share: chat templates, a tokenizer for them, a policy that plays a script."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tiny_models import SPECIAL
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tba_hpc.core.types import (
    TOP_LOGPROBS,
    Completion,
    Group,
    Publication,
    Request,
    Sampling,
    WeightUpdate,
)
from tba_hpc.environments.task import Conversational
from tba_hpc.learner.hf_model import HfTokenizer

ENDS = {"hermes": "<|im_end|>", "llama": "<|eot|>", "plain": "<eos>"}
"""By template, the token that ends the model's message."""

TEMPLATES = {
    # ChatML with tools as Hermes and Qwen have them; results of one turn share a user's message.
    "hermes": (
        "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
        "<|im_end|>\n{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # A head of two special tokens, contents trimmed, and a generation prompt that begins a thought.
    "llama": (
        "{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
        "{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n<think>{% endif %}"
    ),
    # No special token at all.
    "plain": (
        "{% for m in messages %}{{ {'user': 'Q: ', 'tool': 'R: ', 'assistant': 'A: '}[m.role] }}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    ),
}

FAMILIES = {
    # Thoughts before the last user's message are dropped; an empty one begins the answer if unwanted.
    "Qwen 3": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% elif m.role == 'assistant' and loop.index0 < ns.last %}"
        "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}{% endif %}"
    ),
    # Tools stand in the first user's message.
    "Llama 3": (
        "{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
        "{% if loop.first and tools %}{{ tools | tojson }}\n\n{% endif %}{{ m.content | trim }}<|eot|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
    ),
    # Tools stand before the last user's message, and results need the id of a call.
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}{{ raise_exception('no id') if m.tool_call_id is undefined }}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # User and model take turns, and nobody else.
    "Gemma": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|head|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|head|>model\n{% endif %}"
    ),
    # A message has no end: the model says the head of the next one. Earlier thoughts become empty ones.
    "GLM": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|head|>assistant\n<think></think>\n"
        "{{ m.content.split('</think>')[-1] | trim }}"
        "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% else %}<|user|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant{% endif %}"
    ),
    "LFM2": (
        "{% if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # After results the model goes on without a head of its own; thoughts are dropped at once.
    "DeepSeek": (
        "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '' if ns.tool else '<tool outputs>' }}<output>{{ m.content }}</output>{% set ns.tool = true %}"
        "{% elif m.role == 'assistant' %}{{ '</tool outputs>' if ns.tool else '<|head|>' }}"
        "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% set ns.tool = false %}"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '</tool outputs>' if ns.tool else '<|head|>' }}{% endif %}"
    ),
}
"""Templates in the manner of families of models."""

REWRITING = {
    "drops answers": (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.content }}|{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ),
    "moves its head to the last message": (
        "{% for m in messages %}{% if loop.last %}[TOOLS]{% endif %}{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    ),
    "drops results": (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}|{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ),
    "refuses tools": "{% for m in messages %}{{ raise_exception('no such role') if m.role == 'tool' }}"
    "{{ m.content }}|{% endfor %}",
}
"""Templates with which no conversation can be held, by what they do."""


def make_tokenizer(template: str, text: str | None = None) -> HfTokenizer:
    """A token per character, but one for ``th`` and special ones for the templates' heads and ends."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = [*SPECIAL, *characters, "th"]
    backend = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("t", "h")], unk_token="<unk>")
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[
            "<|im_start|>",
            "<|im_end|>",
            "<|head|>",
            "<|/head|>",
            "<|eot|>",
            "<|user|>",
            "<|observation|>",
        ],
    )
    tokenizer.chat_template = text or TEMPLATES[template]
    end = tokenizer.convert_tokens_to_ids(ENDS.get(template, "<eos>"))
    return HfTokenizer(tokenizer, end)


class Script:
    """A Generator of single turns: ``play`` writes the answer to a prompt, both as tokens.

    An answer longer than allowed is cut. It decodes ``sequences`` turns at a time, each within one step.
    """

    def __init__(self, play: Callable[[np.ndarray], np.ndarray], *, sequences: int = 64) -> None:
        self._play, self._sequences = play, sequences
        self._waiting: deque[Request] = deque()
        self.requests: list[Request] = []
        self.idle_steps = 0
        self.version, self.loading = 0, False
        self.load_seconds = self.busy_seconds = self.recompute_share = 0.0
        self.rebuilds = self.nan_groups = 0
        self.stage = ""

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        assert request.n == 1
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Group]:
        self.idle_steps += not self._waiting
        some = [self._waiting.popleft() for _ in range(min(self._sequences, len(self._waiting)))]
        return [self._answer(request) for request in some]

    def load(self, update: WeightUpdate) -> None:
        self.version = update.publication.version

    def close(self) -> None:
        """Nothing to release."""

    def _answer(self, request: Request) -> Group:
        whole = self._play(request.prompt.tokens)
        tokens = whole[: request.sampling.max_tokens].astype(np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        finish = "stop" if len(tokens) == len(whole) else "length"
        versions = np.full((1, 2), self.version, np.int32)
        top = np.zeros((len(tokens), request.sampling.top_logprobs), TOP_LOGPROBS)
        top["token"] = tokens[:, None] + np.arange(top.shape[1])  # the token itself is the likeliest
        return Group(request, (Completion(tokens, logprobs, finish, top_logprobs=top),), versions)


class Stage:
    """A task of conversations, and a policy that says the next of ``lines`` at each turn."""

    def __init__(self, task: Conversational, tokenizer: HfTokenizer, lines: list[str]) -> None:
        self.task, self.tokenizer, self.lines = task, tokenizer, lines
        self.script = Script(self._play)
        self.generator: Any = task.converse(self.script, tokenizer)

    def _play(self, prompt: np.ndarray) -> np.ndarray:
        said = self.tokenizer._tokenizer.decode(prompt.tolist()).count("assistant\n") - 1
        line = self.lines[min(said, len(self.lines) - 1)]
        tokens = [self.tokenizer.encode(letter) for letter in line]  # th is two tokens to this model
        return np.concatenate([*tokens, [self.tokenizer.eos_token_id]])

    def submit(self, prompt: int = 0, n: int = 1, max_tokens: int = 400, **more: Any) -> None:
        sampling = Sampling(1.0, 1.0, max_tokens)
        self.generator.submit(Request(self.task.prompts("train")[prompt], 0, n, sampling, **more))

    def play(self, **request: Any) -> Group:
        """Submit a request, and return its group."""
        self.submit(**request)
        return self.finish(1)[0]

    def load(self, **publication: Any) -> None:
        """Have new weights loaded, of which only the publication matters."""
        self.generator.load(cast(WeightUpdate, SimpleNamespace(publication=Publication(**publication))))

    def renew_weights_each_turn(self) -> None:
        """Have the version of the weights grow by one before each turn."""

        def play(prompt: np.ndarray) -> np.ndarray:
            self.script.version += 1
            return self._play(prompt)

        self.script._play = play

    def finish(self, groups: int, seconds: float = 60) -> list[Group]:
        found: list[Group] = []
        deadline = time.monotonic() + seconds
        while len(found) < groups:
            assert time.monotonic() < deadline, "the conversations do not end"
            found += self.generator.step()
        return found

    def drain(self, seconds: float = 60) -> list[Group]:
        """Step until nothing is in flight, and return the groups that end meanwhile."""
        found: list[Group] = []
        deadline = time.monotonic() + seconds
        while self.generator.in_flight:
            assert time.monotonic() < deadline, "the conversations do not end"
            found += self.generator.step()
        return found

    def pieces(self, completion: Completion) -> list[tuple[bool, str]]:
        """Parts of the completion in order: whether the policy said a part, and its text."""
        breaks = np.flatnonzero(np.diff(completion.action_T)) + 1
        parts = (np.split(whole, breaks) for whole in (completion.tokens, completion.action_T))
        decode = self.tokenizer._tokenizer.decode
        return [(bool(mask[0]), decode(part.tolist())) for part, mask in zip(*parts, strict=True)]
