"""What a config asks of its ranks: models, lengths, and how many sequences are where at once.

It must not know on what hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tba_hpc.checks.planner.shapes import BYTES, Shape, adapter_weights, load_shape
from tba_hpc.config import Config
from tba_hpc.core.batch import CAUSAL, GATHERED, MASKED_PRICE, PADDED, Lengths, sequences_per_row

TOKENS = {
    "arithmetic": (20, 27),
    "gsm8k": (110, 200),
    "math": (150, 600),
    "tldr": (350, 50),
    "redteam": (60, 15),
}
"""Mean tokens of prompt and completion, by task: measured for arithmetic, assumed for the others."""

READERS = ("reward_model", "gold_model", "classifier", "guard", "embedder")
"""Options of tasks that name a model which reads whole texts on the searcher's GPU, once there are any."""

READER_BATCH = {"guard": 16, "classifier": 64}
"""Texts that such a model reads at once, where the task's ``batch`` does not say; 32 for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run. prompt, completion: mean tokens; longest: most tokens of a completion.

    adapter: weights of LoRA's, 0 where all are trained. readers: by their option. victim: of the red-teaming
    task, with the names of its options. embedder: of the trainer's buffer.
    """

    config: Config
    policy: Shape
    adapter: int
    readers: dict[str, Shape]
    victim: Shape | None
    embedder: Shape | None
    prompt: float
    completion: float
    longest: int

    @property
    def weight_bytes(self) -> int:
        """Of a weight of the policy."""
        return BYTES[self.config.model.dtype]

    @property
    def policy_bytes(self) -> float:
        """Of all of the policy's weights, as they compute and are served."""
        return self.weight_bytes * self.policy.parameters

    @property
    def trained(self) -> int:
        """Weights that have gradients and an optimizer, and are published."""
        return self.adapter or self.policy.parameters

    @property
    def published_bytes(self) -> float:
        """Of the weights that travel."""
        return self.weight_bytes * self.trained

    @property
    def group(self) -> int:
        """K: trajectories of a group that is trained on."""
        return self.config.train.completions_per_prompt

    @property
    def groups_per_rank(self) -> float:
        """Of an optimizer step."""
        return self.config.train.prompts_per_step / self.config.launch.trainers

    @property
    def per_row(self) -> int:
        """Sequences of a group that the learner puts into one row after their prompt."""
        budget = self.config.train.tokens_per_micro_batch
        most = None if budget is None else max(1, int((budget - self.prompt) // self.longest))
        return sequences_per_row(self.group, lengths=self._lengths, width=self.policy.hidden, most=most)

    @property
    def by_sequence(self) -> bool:
        """Whether the learner's attention gathers each sequence, instead of masking what is in a row."""
        costs = self._lengths, self.per_row, self.policy.hidden
        return self.per_row > 1 and Lengths.by_sequence(*costs) < Lengths.masked(*costs)

    @property
    def _lengths(self) -> Lengths:
        return Lengths(self.prompt, self.completion, self.prompt + self.longest, self._masked_price)

    @property
    def _masked_price(self) -> float:
        return MASKED_PRICE[self.config.model.dtype == "bfloat16"]

    @property
    def attended(self) -> float:
        """Tokens that a token of a row costs attention as much as looking at."""
        if self.per_row == 1:
            return CAUSAL * (self.prompt + self.completion)
        if not self.by_sequence:
            return self._masked_price * self.row(self.completion)
        padded = PADDED * (self.prompt + self.completion)
        return self.per_row * padded * (CAUSAL * padded + GATHERED) / self.row(self.completion)

    def rows_at_once(self, completion: float) -> float:
        """Rows of a micro-batch where completions have so many tokens."""
        train, of_group = self.config.train, self.group / self.per_row
        if train.tokens_per_micro_batch is None:
            return min(train.groups_per_micro_batch, self.groups_per_rank) * of_group
        fitting = train.tokens_per_micro_batch // self.row(completion)
        whole = fitting if fitting < of_group else fitting // of_group * of_group
        return max(1.0, min(whole, self.groups_per_rank * of_group))

    def splits(self, completion: float) -> bool:
        """Whether groups with completions of so many tokens are larger than a micro-batch."""
        return self.rows_at_once(completion) * self.per_row < self.group

    def row(self, completion: float) -> float:
        """Tokens of such a row where completions have so many."""
        return self.prompt + self.per_row * completion

    @property
    def sequences(self) -> int:
        """That an engine works on at once."""
        generator = self.config.generator
        return generator.prompts_in_flight * generator.completions_per_prompt

    @property
    def trainer_reference(self) -> Literal["no", "model", "adapter off", "average"]:
        """What a trainer rank computes the reference with, if it does."""
        train = self.config.train
        if not train.trainer_has_reference:
            return "average" if train.reference.name == "ema" else "no"
        return "adapter off" if self.adapter and train.reference.name == "frozen" else "model"

    @property
    def has_reference(self) -> bool:
        """Whether searchers hold a model of the reference."""
        return self.config.train.searcher_has_reference


def workload_of(
    config: Config, *, prompt_tokens: float | None = None, completion_tokens: float | None = None
) -> Workload:
    """What ``config`` asks for. Lengths: None, the task's. Raises ConfigError where a model is unknown."""
    generator, options = config.generator, config.task.options
    room = config.model.context_length - generator.max_tokens
    prompt, completion = TOKENS.get(config.task.name, (room / 4, generator.max_tokens / 2))
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
        prompt=min(prompt_tokens or prompt, room),
        completion=min(completion_tokens or completion, generator.max_tokens),
        longest=generator.max_tokens,
    )
