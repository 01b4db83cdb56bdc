"""What a config asks of its ranks: which models, how many tokens, how many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tba_hpc.checks.planner.shapes import BYTES, Shape, adapter_weights, load_shape
from tba_hpc.config import Config

READERS = {"reward_model": 32, "gold_model": 32, "classifier": 64, "guard": 16, "embedder": 32}
"""Task options that name a model that reads whole texts on the searcher's GPU, and their default batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run. prompt, completion: mean tokens. adapter: LoRA weights, 0 if all weights are trained.

    readers: by task option. victim: of the red-teaming task. embedder: of the trainer's buffer.
    """

    config: Config
    policy: Shape
    adapter: int
    readers: dict[str, Shape]
    victim: Shape | None
    embedder: Shape | None
    prompt: float
    completion: float

    @property
    def longest(self) -> int:
        """Most tokens of a completion."""
        return self.config.generator.max_tokens

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight of the policy."""
        return BYTES[self.config.model.dtype]

    @property
    def policy_bytes(self) -> float:
        """Bytes of the policy as it computes and is served."""
        return self.weight_bytes * self.policy.parameters

    @property
    def trained(self) -> int:
        """Weights that have gradients and optimizer state, and are published."""
        return self.adapter or self.policy.parameters

    @property
    def published_bytes(self) -> float:
        """Bytes that a publication sends."""
        return self.weight_bytes * self.trained

    @property
    def sequences_per_rank(self) -> float:
        """Sequences of an optimizer step that one trainer rank learns from."""
        train = self.config.train
        return train.prompts_per_step * train.completions_per_prompt / self.config.launch.trainers

    @property
    def sequences(self) -> int:
        """Sequences that an engine works on at once."""
        generator = self.config.generator
        return generator.prompts_in_flight * generator.completions_per_prompt

    @property
    def cache_bytes(self) -> float:
        """KV cache of a token on one of an engine's GPUs; more GPUs than key-value heads hold copies."""
        ranks = min(self.config.generator.tensor_parallel, self.policy.key_value_heads)
        return self.policy.kv_bytes(self.weight_bytes) / ranks

    @property
    def trainer_reference(self) -> Literal["no", "model", "adapter off", "average"]:
        """How a trainer rank computes the reference, if it does."""
        train = self.config.train
        if not train.trainer_has_reference:
            return "average" if train.reference.name == "ema" else "no"
        return "adapter off" if self.adapter and train.reference.name == "frozen" else "model"

    def micro_batch(self, completion: float) -> float:
        """Tokens of a micro-batch if completions have so many; prompts count with each of their sequences."""
        train, length = self.config.train, self.prompt + completion
        tokens = train.tokens_per_micro_batch or train.completions_per_prompt * length
        return min(tokens, self.sequences_per_rank * length)


def workload_of(
    config: Config, *, prompt_tokens: float | None = None, completion_tokens: float | None = None
) -> Workload:
    """What ``config`` asks for. Raises ConfigError if a model is unknown.

    Mean lengths: None takes a quarter of the room for prompts and half of ``generator.max_tokens``.
    """
    longest, options = config.generator.max_tokens, config.task.options
    room = config.model.context_length - longest
    readers = {
        option: load_shape(str(options[option]), f"task.options.{option}").without_head()
        for option in READERS
        if options.get(option)
    }
    victim, embedder = options.get("victim"), config.buffer.embedding_model
    policy, lora = load_shape(config.model.path), config.model.lora
    return Workload(
        config=config,
        policy=policy,
        adapter=adapter_weights(policy, lora, config.model.path) if lora else 0,
        readers=readers,
        victim=load_shape(str(victim), "task.options.victim") if victim else None,
        embedder=load_shape(embedder, "buffer.duplicates.model").without_head() if embedder else None,
        prompt=min(prompt_tokens or room / 4, room),
        completion=min(completion_tokens or longest / 2, longest),
    )
