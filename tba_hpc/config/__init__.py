"""The configuration of a run: frozen pydantic models, read from YAML and ``--set`` overrides.

Every field is documented under its name, with its unit. Unknown keys are refused with the nearest
valid name; impossible combinations say value, rule and remedy. Imports no heavy library.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from tba_hpc.config import shipped
from tba_hpc.config.variants import (
    BehaviourIsReference,
    EmaReference,
    FrozenReference,
    LaggedReference,
    LossNormaliser,
    Oapl,
    ObjectiveChoice,
    OnlineDpo,
    RatioBound,
    RatioTaper,
    ReferenceChoice,
    ResetReference,
    Section,
    TrajectoryBalance,
    Unbounded,
    choices,
)

Dtype = Literal["float32", "bfloat16"]


OWN_ENGINE_ARGUMENTS = {
    "model": "set model.path",
    "tokenizer": "it is that of model.path, so leave it out",
    "revision": "put the revision that you want into a folder, and name that in model.path",
    "hf_overrides": "change config.json in the folder of model.path, which the learner reads as well",
    "dtype": "set model.dtype",
    "max_model_len": "set model.context_length",
    "max_num_seqs": "set generator.prompts_in_flight",
    "gpu_memory_utilization": "set generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set generator.kv_cache_mb",
    "tensor_parallel_size": "set generator.tensor_parallel",
    "pipeline_parallel_size": "set generator.tensor_parallel, by which an engine gets its GPUs",
    "data_parallel_size": "set launch.searchers",
    "seed": "set run.seed",
    "trust_remote_code": "code in a model's folder is never run; use a model that transformers knows",
    "logprobs_mode": "what is learned from are the policy's own log-probabilities, so leave it out",
    "worker_extension_cls": "weights reach the engine's workers by it, so leave it out",
}
"""vLLM's arguments that are not to be passed on in generator.engine, and what to do instead, or why."""

OWN_DEEPSPEED_SETTINGS = {
    "train_batch_size": "train.prompts_per_step and train.completions_per_prompt",
    "train_micro_batch_size_per_gpu": "train.groups_per_micro_batch or train.tokens_per_micro_batch",
    "gradient_accumulation_steps": "train.groups_per_micro_batch or train.tokens_per_micro_batch",
    "managed_gradient_accumulation": "the learner, whose micro-batches differ in number",
    "gradient_clipping": "train.gradient_clip",
    "optimizer": "train.adam_betas, train.weight_decay and train.learning_rate",
    "scheduler": "train.learning_rate",
    "zero_allow_untested_optimizer": "the learner, whose AdamW is torch's",
    "zero_force_ds_cpu_optimizer": "the learner, whose AdamW is torch's",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "the learner, which adds gradients up in float32",
    "checkpoint": "the learner, which writes checkpoints by itself",
    "zero_optimization.stage": "train.zero_stage",
}
"""Settings of DeepSpeed, or sections of them, that are not the user's, and what decides them."""


T = TypeVar("T")

_MAY_CHANGE = "may change"

MayChange = Annotated[T, _MAY_CHANGE]
"""Type of a key that a resume may change: how long, where and with what a run goes on, not what it learns."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one sentence for the user."""


class RunSection(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; part of the default run directory."""
    root: MayChange[str] = "runs"
    """Folder in which run directories are made."""
    seed: int = Field(0, ge=0)
    """Seed of everything random: prompt order, sampling, replay."""


class LoraSection(Section):
    """LoRA: the policy's weights stay as they are; what is trained, published and checkpointed is an adapter,
    s·B·A beside the weight W of a linear layer, s = alpha/rank. It has no dropout: log-probabilities must be
    those of the policy that samples."""

    rank: int = Field(16, ge=1)
    """r: rows of A, columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Its scale times the rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(None, min_length=1)
    """Names of the linear layers that get one, or ends of their paths, such as q_proj or self_attn.q_proj.
    None: all but the output layer."""


class ModelSection(Section):
    path: str = Field(min_length=1)
    """Folder or hub name of the policy to start from; it is also the reference."""
    dtype: Dtype = "bfloat16"
    """Type of the weights in training, in the exchange and in the engines (master weights are float32)."""
    context_length: int = Field(1024, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""
    logprob_temperature: float | None = Field(None, gt=0)
    """T of the policy, softmax(logits/T): log-probabilities of policy, reference and sampler are taken at it,
    whatever temperature completions are sampled at. None: 1, but generator.temperature with a policy-gradient
    objective (rloo, proximal_rloo, grpo, dr_grpo, gspo, topr) and oapl, which need samples of the very policy
    that they train."""

    fp32_head: bool = True
    """Whether bfloat16 logits are taken in float32, in learner, reference and engine alike, instead of being
    rounded once more: what both say of a token then differs less. float32 weights have no other logits."""
    lora: LoraSection | None = None
    """LoRA, with its rank, alpha and targets; {} takes their defaults. None: all weights are trained."""

    @property
    def policy_temperature(self) -> float:
        """T: ``logprob_temperature``, 1 where none is given."""
        return self.logprob_temperature or 1.0


class RewardSection(Section):
    """One of the rewards of a task: a function of yours, a judge behind a URL, or a program."""

    function: str | None = None
    """``module:function`` of your own: tba_hpc.tasks.rewards says what it is given. Beside the config, in the
    folder of the command, or installed."""
    url: MayChange[str | None] = None
    """Of a judge: it gets a JSON POST for each completion. With ``model``, an OpenAI-style chat endpoint in
    full, such as http://host:8000/v1/chat/completions."""
    program: tuple[str, ...] | None = Field(None, min_length=1)
    """Words of a command, run once for each completion without a shell; ``python`` is the run's interpreter,
    and a file is looked for where functions are. Time and memory are confined, no more (docs/own-task.md)."""
    weight: float = 1.0
    """What its number is multiplied by in the sum of all rewards."""
    model: str | None = None
    """Name of the judge's model; with it the judge is asked by chat, and the last number it writes counts."""
    prompt: str | None = None
    """What such a judge is asked: a text with {completion}, and {field} for fields of the row."""
    key_variable: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable of the searchers that holds the judge's key; the key itself is written nowhere."""
    seconds: MayChange[float] = Field(30.0, gt=0)
    """Longest wait for one answer of a judge, or run of a program, s."""
    retries: MayChange[int] = Field(3, ge=0)
    """Times that a judge is asked again which is busy, away or silent (count)."""
    concurrency: MayChange[int] = Field(8, ge=1)
    """Judge's answers waited for, or programs run, at once by a searcher (count)."""
    memory_mb: int = Field(1024, ge=16)
    """Address space of each process of a program, MiB."""
    when_killed: float | None = None
    """Reward where a program ran past ``seconds`` or was killed; none: the completion is set aside."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> RewardSection:
        of_kind = {
            "function": (),
            "url": ("model", "prompt", "key_variable", "seconds", "retries", "concurrency"),
            "program": ("seconds", "concurrency", "memory_mb", "when_killed"),
        }
        kinds = [kind for kind in of_kind if getattr(self, kind) is not None]
        if len(kinds) != 1:
            found = f"names {' and '.join(kinds)}" if kinds else "names nothing that gives it"
            raise ValueError(f"a reward of task.reward {found}: set one of function, url and program")
        known = {"function", "url", "program", "weight", *of_kind[kinds[0]]}
        if ignored := sorted(
            key for key in self.model_fields_set - known if getattr(self, key) != _default(self, key)
        ):
            raise ValueError(
                f"{ignored[0]}={getattr(self, ignored[0])} of a reward by {kinds[0]} would be ignored: leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _names_are_whole(self) -> RewardSection:
        if self.function is not None and not all(self.function.partition(":")):
            raise ValueError(
                f"{self.function!r} of task.reward is no function: write it as module:function, such as "
                "my_rewards:short"
            )
        if self.url is not None:
            scheme, _, rest = self.url.partition("://")
            if scheme not in ("http", "https") or not rest:
                raise ValueError(
                    f"{self.url!r} of task.reward is no address: begin it with http:// or https://"
                )
            if "@" in rest.partition("/")[0]:
                raise ValueError(
                    "a user and password in the url of task.reward would be written into the run's files: "
                    "set key_variable to the name of an environment variable that holds the key"
                )
        if (self.model is None) != (self.prompt is None) or "{completion}" not in (
            self.prompt or "{completion}"
        ):
            raise ValueError(
                "a judge that is asked by chat needs model and prompt of task.reward, and the prompt a place "
                "for the answer: write {completion} there"
            )
        return self


def _default(section: Section, key: str) -> Any:
    return type(section).model_fields[key].default


class TaskSection(Section):
    name: str = "gsm8k"
    """A task of tba_hpc.tasks, or ``module:Class`` of your own, beside the config, in the folder of the
    command, or installed."""
    reward: dict[str, RewardSection] = Field(default_factory=dict)
    """What answers are worth, for a task that takes it from you (jsonl): ``module:function``, or several
    rewards by name, which are added up by their weights."""
    train_file: str | None = None
    """Local JSONL with the training problems; none: the task's own source (hub or generator)."""
    test_file: str | None = None
    """Local JSONL with the held-out problems; none: the task's own source, or a slice of train_file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task's own."""
    max_rejected_groups: MayChange[int] = Field(10, ge=1)
    """Groups in a row without a usable reward, as the task's code raised or gave no finite number, at which a
    searcher ends; and answers in a row that it could not judge."""

    @field_validator("reward", mode="before")
    @classmethod
    def _by_name(cls, reward: object) -> object:
        """``module:function`` is short for one reward; so it is for one of several."""
        if isinstance(reward, str):
            return {"reward": {"function": reward}}
        if isinstance(reward, dict):
            return {
                name: {"function": value} if isinstance(value, str) else value
                for name, value in reward.items()
            }
        return reward


class GeneratorSection(Section):
    completions_per_prompt: int = Field(24, ge=1)
    """S: completions sampled per prompt; at least the K that are trained on."""
    temperature: float = Field(0.7, gt=0)
    """Sampling temperature in training; evaluation is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; below 1 the sampler has no full support and the objective's guarantee is lost."""
    tempered_share: float = Field(0.0, ge=0, le=1)
    """Share of the training prompts whose completions are sampled at a temperature of tempered_range."""
    tempered_range: tuple[float, float] = (0.5, 2.0)
    """Lowest and highest of these temperatures, drawn uniformly for each prompt."""
    max_tokens: int = Field(512, ge=1)
    """Longest completion, in tokens."""
    min_tokens: int = Field(0, ge=0)
    """Tokens that a training completion has at least: until then it cannot end."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts, of special tokens too, after which a completion has ended by itself, in training and evaluation.
    All its tokens count, up to the one that completes the text; the task reads the text as well. No
    end-of-sequence token follows, so none is in its log-probability."""
    prompts_in_flight: MayChange[int] = Field(8, ge=1)
    """Prompts that a searcher's engine works on at once."""
    kv_cache_mb: MayChange[int | None] = Field(None, ge=1)
    """Memory for the engine's KV cache on each of its GPUs, MiB; none: what gpu_memory_utilization leaves, as
    measured while the engine is built, and so wrong where other ranks of the same GPU start meanwhile."""
    gpu_memory_utilization: MayChange[float] = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that the engine may take; the reference policy needs room beside it. That much
    must be free when the engine starts, also where kv_cache_mb says what it takes."""
    tensor_parallel: MayChange[int] = Field(1, ge=1)
    """GPUs per engine; it must divide the model's attention heads."""
    deadline_seconds: MayChange[float] = Field(300.0, gt=0)
    """Longest silence of an engine at work, s; then it is killed and built anew."""
    start_seconds: MayChange[float] = Field(1800.0, gt=0)
    """Longest time for building an engine, s: its imports, the weights from the disk, compilation; then it is
    killed and built anew. A large model on a slow file system takes minutes. The trainer waits as long for
    the first completions, or longer (launch.start_deadline_seconds, exchange.deadline_seconds)."""
    keep_kv: MayChange[bool] = False
    """Whether completions in flight keep their attention cache when weights change, instead of having it
    computed again: faster, but what follows in them is then sampled by the new weights over the keys and
    values of older ones. Versions and log-probabilities are those of that sampling. Completions that begin
    later never meet an older cache."""
    engine: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Arguments of vLLM's engine (EngineArgs), passed on as they are, such as ``quantization: fp8`` or
    ``max_num_batched_tokens: 16384``; none that another key sets. ``tba plan`` does not know them."""

    @field_validator("engine")
    @classmethod
    def _engine_arguments_are_free(cls, engine: dict[str, Any]) -> dict[str, Any]:
        if ours := [name for name in engine if name in OWN_ENGINE_ARGUMENTS]:
            raise ValueError(
                f"generator.engine.{ours[0]}={value_text(engine[ours[0]])} cannot be passed on to vLLM: "
                f"{OWN_ENGINE_ARGUMENTS[ours[0]]}"
            )
        return engine

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> GeneratorSection:
        low, high = self.tempered_range
        if not 0 < low <= high:
            raise ValueError(
                f"generator.tempered_range=[{low:g}, {high:g}] is no range of temperatures: give the lower "
                "one first, above 0"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"generator.min_tokens={self.min_tokens} is above generator.max_tokens={self.max_tokens}: "
                "lower the first or raise the second"
            )
        return self


class BufferSection(Section):
    most_on_policy: float = Field(0.5, ge=0, le=1)
    """m: probability that a group is taken from what arrived at the most recent sync."""
    recent_fill: Literal["repeat", "older"] = "repeat"
    """What completes such a group where fewer than K completions of its prompt arrived: repeats of these, or
    older completions of the prompt."""
    oldest_first: bool | None = None
    """Whether a step takes what the oldest weights sampled, as a queue does, and not by most_on_policy. With
    exchange.max_staleness it waits for what would be too stale for any later step: nothing is dropped for
    its age then, and long answers are learned from, too. Needs replay_limit. None: where that and
    max_staleness are set."""
    capacity_per_prompt: int = Field(100, ge=1)
    """Trajectories kept per prompt; the oldest leave first."""
    capacity: int = Field(100_000, ge=1)
    """Trajectories kept in all; the oldest leave first."""
    reward_temperature: float | None = Field(1.0, gt=0)
    """Temperature of the softmax over reward inside a prompt; none: uniform, which on-policy runs default to
    (see deduplicate)."""
    uniform_mix: float = Field(0.1, ge=0, le=1)
    """Share of uniform probability mixed into that softmax."""
    initial_completions: int = Field(500, ge=1)
    """Completions in the buffer before the first optimizer step (without max_staleness): no more than all
    training prompts have room for, by capacity_per_prompt."""
    deduplicate: bool | None = None
    """Whether equal completions of a prompt are stored once, the newest, or each, so that groups are as the
    policy sampled. None: once, but each where exchange.max_staleness=0 makes a policy-gradient objective
    on-policy (rloo, proximal_rloo, grpo, dr_grpo, gspo, topr)."""
    replay_limit: int | None = Field(None, ge=1)
    """Optimizer steps that may learn from a trajectory; then it is evicted, and with it what is left of its
    prompt where that is less than a group. The trainer waits where fewer prompts than a step needs are left.
    None: no limit."""
    max_age_steps: int | None = Field(None, ge=1)
    """Most optimizer steps between the weights that sampled a trajectory and the step before which it is
    merged; one that comes later is dropped, and counted. None: all are merged. (What exchange.max_staleness
    bounds is the age in use.)"""
    near_duplicates: float | None = Field(None, gt=0, le=0.5)
    """Share of the tokens of two completions of a prompt: where fewer edits lead from one to the other, only
    the better one is kept. None: only equal ones count as duplicates."""
    similarity_limit: float | None = Field(None, ge=0, lt=1)
    """Cosine of the embeddings of two completions of a prompt above which only the better one is kept; in
    place of near_duplicates, with embedding_model. None: only equal ones count as duplicates."""
    embedding_model: str | None = None
    """Folder or hub name of the sentence encoder for similarity_limit; the leading trainer asks it."""

    @model_validator(mode="after")
    def _one_kind_of_nearness(self) -> BufferSection:
        limit, model = self.similarity_limit, self.embedding_model
        if limit is not None and self.near_duplicates is not None:
            raise ValueError(
                f"buffer.near_duplicates={self.near_duplicates:g} and buffer.similarity_limit={limit:g} are "
                "two ways to tell near duplicates: leave one out"
            )
        if limit is not None and model is None:
            raise ValueError(
                f"buffer.similarity_limit={limit:g} needs embeddings: set buffer.embedding_model, for "
                "example to sentence-transformers/all-MiniLM-L6-v2"
            )
        if limit is None and model is not None:
            raise ValueError(
                f"buffer.embedding_model={model} has no use without a limit: set buffer.similarity_limit, "
                "for example to 0.4, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _a_queue_moves(self) -> BufferSection:
        if self.oldest_first and self.replay_limit is None:
            raise ValueError(
                "buffer.oldest_first=true would learn from the same trajectories at every step: set "
                "buffer.replay_limit=1, or leave it out"
            )
        return self

    @property
    def chooses_by_reward(self) -> bool:
        """Whether a group may prefer some completions of its prompt to others."""
        return self.reward_temperature is not None and self.most_on_policy < 1


class LearningRate(Section):
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """Shape after warm-up: constant; linear or cosine to zero after the horizon; stable, then ``decay``."""
    peak: float = Field(1e-5, gt=0)
    """Highest learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    decay_steps: int = Field(0, ge=0)
    """Steps of decay at the end (warmup_stable_decay only)."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of that decay."""
    by_ess: bool = False
    """Whether a step is taken at this rate times √ESS, the effective sample size of its batch as a share
    (train/ess): the further a batch is from the policy, the shorter the step (VCPO, arXiv 2602.17616)."""


class Ramp(Section):
    """A positive number as a function of the step."""

    schedule: Literal["constant", "linear"] = "constant"
    """Constant, or linear from start to end over anneal_steps."""
    start: float = Field(1.0, gt=0)
    """First value."""
    end: float | None = Field(None, gt=0)
    """Last value."""
    anneal_steps: int = Field(0, ge=0)
    """Steps from start to end (linear only)."""
    jump_after: int | None = Field(None, ge=1)
    """Steps after which it jumps to its end, from wherever it was by then; none: it does not."""

    @model_validator(mode="after")
    def _jump_has_an_end(self) -> Self:
        if self.jump_after is not None and self.end is None:
            raise ValueError(
                f"jump_after={self.jump_after} of a schedule that starts at {self.start:g} needs a value to "
                "jump to: set end"
            )
        return self

    @model_validator(mode="after")
    def _linear_is_complete(self) -> Self:
        if self.schedule == "linear" and (self.end is None or self.anneal_steps == 0):
            raise ValueError(
                f"a linear schedule that starts at {self.start:g} needs an end and a number of steps: set "
                "end and anneal_steps"
            )
        return self


class Beta(Ramp):
    """KL coefficient of the target policy π* ∝ π_ref·exp(r/β)."""

    start: float = Field(0.1, gt=0)
    """First value."""


class TrainSection(Section):
    objective: ObjectiveChoice = TrajectoryBalance()
    """Loss: trajectory balance (TB), TBA′, OAPL, one of the baselines they are compared with, or a function
    of your own."""
    ratio_bound: RatioBound = Unbounded()
    """How much stale data may pull: what the gradient of each token is weighed by. The optimum of TB stays
    where it is, since all residuals are 0 there. Left out: taper with trajectory_balance and tba_prime, none
    with others. Not for objectives whose own formula bounds it (proximal_rloo, grpo, dr_grpo, gspo, topr),
    nor for pairs (online_dpo)."""
    reference: ReferenceChoice = FrozenReference()
    """π_ref."""
    reference_scored_by: Literal["searcher", "trainer"] = "searcher"
    """Who computes log π_ref. searcher: of everything, as it is generated. trainer: of what it samples, once;
    searchers hold no second model then, and tell no KL of fresh samples. Each trainer rank's copy stays in
    host memory, and visits the GPU when it is asked; with model.lora it is the policy with its adapter off,
    unless it is reset. An average (ema) is always the trainer's, and asked whenever a trajectory is used."""
    loss_normaliser: LossNormaliser | None = None
    """What a completion's loss, added up over its tokens, is divided by: nothing (sum), its own tokens, the
    mean number of tokens of the batch's completions, or generator.max_tokens. None: as the objective was
    published, completion_tokens for GRPO and sum for the others."""
    steps: MayChange[int] = Field(1000, ge=1)
    """Optimizer steps in all. A run may go on to more of them, also once it is finished, or end earlier, but
    not before the step that it has reached. A learning rate that has a shape (linear, cosine,
    warmup_stable_decay) is laid out anew for them then; and after the last one no reference is reset."""
    horizon: MayChange[int | None] = Field(None, ge=1)
    """Optimizer steps that the learning rate is laid out for; a run may end before. None: steps."""
    prompts_per_step: int = Field(8, ge=1)
    """B: groups per optimizer step."""
    completions_per_prompt: int = Field(20, ge=2)
    """K: trajectories per group."""
    groups_per_micro_batch: int = Field(1, ge=1)
    """Groups per forward and backward pass on a rank; memory against speed."""
    tokens_per_micro_batch: MayChange[int | None] = Field(None, ge=1)
    """Most tokens of such a pass, in place of groups_per_micro_batch: prompts, completions, padding, as they
    are computed, a prompt once for the completions that share its row. Groups that have more are split, and
    computed once more, without gradient, for what their completions share; so memory does not depend on
    completions_per_prompt. At least model.context_length. None: by groups."""
    logprob_chunk_tokens: MayChange[int] = Field(256, ge=1)
    """Tokens whose logits are held at once: memory is this times the vocabulary."""
    learning_rate: LearningRate = LearningRate()
    """Learning rate as a function of the step."""
    beta: Beta = Beta()
    """β as a function of the step."""
    target_temperature: Ramp = Ramp()
    """T: tempers the whole target, π* ∝ [π_ref^(1/γ)·exp(r/β)]^(1/T); above 1 it is flatter."""
    reference_temperature: Ramp = Ramp()
    """γ: tempers the reference in it; above 1 fluency counts less."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; none: no limit. It acts on the loss as loss_normaliser scales it."""
    zero_stage: Literal[1, 2, 3] = 2
    """What DeepSpeed shards over the trainer ranks: 1 optimizer, 2 and gradients, 3 and weights."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass: memory against speed."""
    deepspeed: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Settings of DeepSpeed under its own names, merged into those that the learner gives it; what another
    key decides is refused. {zero_optimization: {offload_optimizer: {device: cpu}}} keeps AdamW and the
    float32 master weights in host memory."""

    @property
    def searcher_has_reference(self) -> bool:
        """Whether searchers hold a model of the reference."""
        return self.reference.scored and self.reference_scored_by == "searcher"

    @property
    def trainer_has_reference(self) -> bool:
        """Whether the trainer computes, once for a trajectory, what the reference says."""
        return self.reference.scored and self.reference_scored_by == "trainer"

    @property
    def value_beta(self) -> float | None:
        """β₁ of OAPL's values; None where no other objective asks for any."""
        return (self.objective.value_beta or self.beta.start) if isinstance(self.objective, Oapl) else None

    @property
    def offloads_optimizer(self) -> bool:
        """Whether DeepSpeed keeps AdamW's state and the master weights elsewhere than on the GPU."""
        offload = (self.deepspeed.get("zero_optimization") or {}).get("offload_optimizer") or {}
        return offload.get("device", "none") != "none"

    @property
    def normaliser(self) -> LossNormaliser:
        """``loss_normaliser``, or the objective's own."""
        return self.loss_normaliser or self.objective.normaliser

    @field_validator("deepspeed")
    @classmethod
    def _not_ours(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for key in _flat(settings):
            for name, owner in OWN_DEEPSPEED_SETTINGS.items():
                if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                    raise ValueError(f"train.deepspeed.{key} is decided by {owner}: leave it out")
        return settings

    @model_validator(mode="after")
    def _gradients_are_shared_out_to_overlap(self) -> TrainSection:
        if self.zero_stage == 1 and (self.deepspeed.get("zero_optimization") or {}).get("overlap_comm"):
            raise ValueError(
                "train.deepspeed.zero_optimization.overlap_comm=true needs gradients that are shared out: "
                "set train.zero_stage to 2 or 3, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_bound_at_most(self) -> TrainSection:
        if "ratio_bound" not in self.model_fields_set and self.objective.tapered:
            object.__setattr__(self, "ratio_bound", RatioTaper())
        if self.objective.bounded and self.ratio_bound != Unbounded():
            raise ValueError(
                f"train.ratio_bound={self.ratio_bound.name} is not for train.objective="
                f"{self.objective.name}, whose own formula says what stale data may do: leave it out, or use "
                "trajectory_balance, tba_prime, oapl or rloo"
            )
        return self

    @model_validator(mode="after")
    def _lagged_policy_is_the_reference(self) -> TrainSection:
        """OAPL has no other reference than what sampled, untempered."""
        if not isinstance(self.objective, Oapl):
            return self
        given = "reference" in self.model_fields_set
        if given and not isinstance(self.reference, BehaviourIsReference):
            raise ValueError(
                f"train.reference={self.reference.name} would be scored in vain with train.objective=oapl, "
                "which learns against the weights that sampled: leave it out, or set it to behaviour"
            )
        for name in ("target_temperature", "reference_temperature"):
            if getattr(self, name) != Ramp():
                raise ValueError(
                    f"train.{name} tempers a target that train.objective=oapl does not have: leave it "
                    "out, or use trajectory_balance"
                )
        object.__setattr__(self, "reference", BehaviourIsReference())
        return self

    @model_validator(mode="after")
    def _reference_has_a_model(self) -> TrainSection:
        if isinstance(self.reference, EmaReference):
            if "reference_scored_by" in self.model_fields_set and self.reference_scored_by == "searcher":
                raise ValueError(
                    "train.reference_scored_by=searcher is not for train.reference=ema, an average that the "
                    "trainer alone has: leave it out"
                )
            object.__setattr__(self, "reference_scored_by", "trainer")
        elif not self.reference.scored and self.reference_scored_by == "trainer":
            raise ValueError(
                "train.reference_scored_by=trainer would be ignored where the reference takes no model "
                f"(train.reference={self.reference.name}, train.objective={self.objective.name}): leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _what_lags_is_not_tempered(self) -> TrainSection:
        for name in ("target_temperature", "reference_temperature"):
            if isinstance(self.reference, LaggedReference) and getattr(self, name) != Ramp():
                raise ValueError(
                    f"train.{name} would be ignored with train.reference=lagged, which is as warm as the "
                    "policy that it is made of: leave it out, or use another reference"
                )
        return self

    @model_validator(mode="after")
    def _horizon_lies_ahead(self) -> TrainSection:
        if self.horizon is not None and self.horizon < self.steps:
            raise ValueError(
                f"train.horizon={self.horizon} ends before train.steps={self.steps}, where the learning rate "
                "has decayed: raise the first, or leave it out for a decay over all steps"
            )
        return self

    @model_validator(mode="after")
    def _loss_has_tokens(self) -> TrainSection:
        if isinstance(self.objective, OnlineDpo) and self.normaliser != "sum":
            raise ValueError(
                f"train.loss_normaliser={self.loss_normaliser} has no meaning for train.objective="
                "online_dpo, whose loss is of a pair of whole completions: leave it out"
            )
        return self


CHOICES = frozenset(key for key, field in TrainSection.model_fields.items() if choices(field.annotation))
"""Keys of train whose value is a choice by name, with keys of its own."""


def _a_few_syncs(exchange: dict[str, Any]) -> int:
    """Five times ``sync_every``, and at least 50: small models take many steps while a shard is sealed."""
    return max(50, 5 * int(exchange["sync_every"]))


QUEUE_STALENESS = 8
"""Steps: at about that age engines are as busy as without a bound, and data teach nearly as fast as fresh."""


class ExchangeSection(Section):
    transport: Literal["mpi", "files"] = "mpi"
    """mpi: broadcast and gather in one world, where the run has searchers of its own (launch.searchers).
    files: the shared file system; searchers come and go."""
    sync_every: int = Field(2, ge=1)
    """k: optimizer steps between two syncs."""
    max_staleness: int | None = Field(None, ge=0)
    """Most optimizer steps between the weights that sampled a trajectory and those that learn from it: the
    trainer waits for fresh ones, and searchers for newer weights. 0: synchronous, on-policy; none: TBA, whose
    replay buffer has data of any age. Left out: none; but 8, or 2k − 1 where that is more, in a run that
    learns from each trajectory once (buffer.replay_limit=1) and whose searchers do not come and go."""
    max_steps_without_data: MayChange[int | None] = Field(default_factory=_a_few_syncs, ge=1)
    """Most optimizer steps on the replay buffer alone while no shard comes, counted from the last one, or
    from a resume; then the trainer waits for one. Left out: five syncs, but at least 50; none: no limit."""
    seal_seconds: MayChange[float] = Field(2.0, gt=0)
    """Longest time that a finished completion waits before it is sealed on disk, s."""
    pending_shards: MayChange[int] = Field(64, ge=1)
    """Back-pressure: unmerged shards at which a searcher pauses."""
    bucket_mb: MayChange[int] = Field(64, ge=1, le=1024)
    """Size of one broadcast message, MiB (MPI counts end at 2 GiB)."""
    delta: MayChange[Literal["auto", "always", "never"]] = "auto"
    """Whether weights travel as what has changed since the last ones, exact to the bit, where that is less.
    Not within a node, where they lie once in shared memory. auto: bfloat16, between nodes where it was the
    quicker way of late, and over files, where it takes memory for two more copies at the trainer, which must
    be one rank, and one per searcher. always: whatever it costs. never: all of them each time."""
    deadline_seconds: MayChange[float] = Field(600.0, gt=0)
    """Longest wait for another rank at work, s; then the run ends naming who is missing. A searcher gives the
    trainer six of them between two syncs."""
    keep_shards: MayChange[float] = Field(0.0, ge=0, le=1)
    """Share of the merged shards that are kept in RUN/kept, evenly over the run, when no resume needs them
    any more: what was trained on can be read then, by ``tba samples``. 1: all; 0: they are deleted."""
    keep_shards_mb: MayChange[int | None] = Field(1024, ge=1)
    """Most room that these take, MiB: beyond it every second of them goes, so that what stays is spread over
    the whole run. None: no bound."""

    @model_validator(mode="after")
    def _data_come_at_syncs(self) -> ExchangeSection:
        limit = self.max_steps_without_data
        if limit is not None and limit < self.sync_every:
            raise ValueError(
                f"exchange.max_steps_without_data={limit} is below exchange.sync_every={self.sync_every}, "
                "and shards come at syncs: raise the first to at least the second, or leave it out"
            )
        return self

    @property
    def disk_patience_seconds(self) -> float:
        """How long a full disk is waited for: half the deadline, so that nobody else gives up first."""
        return self.deadline_seconds / 2


class CheckpointSection(Section):
    every: MayChange[int] = Field(100, ge=1)
    """Optimizer steps between checkpoints."""
    keep: MayChange[int] = Field(2, ge=1)
    """Complete checkpoints kept."""
    snapshot: MayChange[str | None] = "memory"
    """Where trainer ranks copy their state to, so that training goes on while the copy is written: "memory",
    which takes as many bytes as the checkpoint has (where twice as many are not free, training waits for
    the disk); or a folder on a disk of each node; null: nowhere, training waits until all is written."""

    @field_validator("snapshot")
    @classmethod
    def _a_place(cls, snapshot: str | None) -> str | None:
        if snapshot is not None and snapshot != "memory" and not snapshot.startswith("/"):
            raise ValueError(
                f"checkpoint.snapshot={snapshot} is neither memory, null nor a path from the root: give the "
                "path of a folder on a disk of the node"
            )
        return snapshot


class EvaluateSection(Section):
    every: MayChange[int] = Field(50, ge=1)
    """Optimizer steps between evaluations on the validation split."""
    validation_prompts: MayChange[int] = Field(128, ge=0)
    """Prompts of the validation split used for these; 0: none."""
    test_prompts: MayChange[int | None] = Field(None, ge=1)
    """Held-out prompts evaluated before the first and after the last step; none: all."""
    kept_answers: MayChange[int] = Field(4, ge=0)
    """Prompts of each of these splits whose answers are kept as text, at every evaluation, for the report."""


class WandbSection(Section):
    project: MayChange[str] = Field(min_length=1)
    """Project in Weights & Biases."""
    entity: MayChange[str | None] = None
    """User or team; none: the default of the key, which WANDB_API_KEY or ``wandb login`` gives."""
    group: MayChange[str | None] = None
    """Group of runs there, such as an experiment's."""
    mode: MayChange[Literal["online", "offline"]] = "online"
    """online: to the server, as it goes. offline: to RUN/track/wandb, for ``wandb sync`` where there is a
    network."""


class TrackSection(Section):
    """Who is told of the run as it goes, by a process beside the leading trainer; see also ``tba track``."""

    wandb: MayChange[WandbSection | None] = None
    """A run in Weights & Biases, one however often it is resumed; none: it is not told."""
    tensorboard: MayChange[bool] = False
    """Write steps, searchers' means and scores of evaluations to RUN/track/tensorboard."""
    every_seconds: MayChange[float] = Field(10.0, gt=0)
    """Pause between two looks at what the run has written, s."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The trackers that are asked for."""
        asked = {"wandb": self.wandb is not None, "tensorboard": self.tensorboard}
        return tuple(name for name, wanted in asked.items() if wanted)


FIRST_ELASTIC = 5000
"""Number of the first searcher that comes and goes; below are those that a start has. Kept apart, because
launch.searchers may change while one that came by itself goes on under its number."""


class LaunchSection(Section):
    trainers: MayChange[int] = Field(1, ge=1)
    """Trainer ranks, one per GPU."""
    searchers: MayChange[int] = Field(1, ge=0, lt=FIRST_ELASTIC)
    """Searcher ranks, one engine each, that start and end with the trainer; 0: only such as come and go."""
    elastic: MayChange[int] = Field(0, ge=0, lt=FIRST_ELASTIC)
    """Places for searchers that come and go while the run trains, each started by ``tba search RUN`` on any
    machine that sees the run directory; 0: none. Prompts of a place that nobody has wait for who comes."""
    elastic_patience_seconds: MayChange[float] = Field(3600.0, gt=0)
    """Longest time that such a searcher waits for a trainer that is still in the queue, or back in it, s."""
    start_deadline_seconds: MayChange[float] = Field(600.0, gt=0)
    """Longest wait for a rank that starts, s: for its imports, until it has joined the others, then for its
    model; generator.start_seconds is for engines, exchange.deadline_seconds for ranks at work."""

    @property
    def places(self) -> int:
        """Among how many searchers, there or not, the requests of a run are shared out."""
        return self.searchers + self.elastic

    def place_of(self, searcher: int) -> int:
        """Place of a searcher among these: it asks the requests whose number leaves this rest."""
        return searcher if searcher < FIRST_ELASTIC else self.searchers + searcher - FIRST_ELASTIC

    @property
    def elastic_searchers(self) -> range:
        """Numbers of the searchers that come and go."""
        return range(FIRST_ELASTIC, FIRST_ELASTIC + self.elastic)

    @model_validator(mode="after")
    def _somebody_searches(self) -> LaunchSection:
        if not self.places:
            raise ValueError(
                "launch.searchers=0 with launch.elastic=0 leaves nobody to search: raise one of them"
            )
        return self


def is_elastic(searcher: int) -> bool:
    """Whether a searcher of this number comes and goes."""
    return searcher >= FIRST_ELASTIC


class Config(Section):
    """All of a run. See each section for its fields."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection = TaskSection()
    generator: GeneratorSection = GeneratorSection()
    buffer: BufferSection = BufferSection()
    train: TrainSection = TrainSection()
    exchange: ExchangeSection = ExchangeSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    track: TrackSection = TrackSection()
    launch: LaunchSection = LaunchSection()

    @property
    def run_dir(self) -> Path:
        """Directory of this run: ``root/name-seedN``."""
        return Path(self.run.root) / f"{self.run.name}-seed{self.run.seed}"

    @property
    def selective(self) -> bool:
        """Whether trajectories leave for more than want of room: for their age, reference, or uses."""
        limited = self.buffer.replay_limit is not None
        reset = isinstance(self.train.reference, ResetReference)
        return limited or self.exchange.max_staleness is not None or reset

    @property
    def one_world(self) -> bool:
        """Whether the ranks of a start make one MPI world, not where all searchers come by themselves."""
        return self.exchange.transport == "mpi" and self.launch.searchers > 0

    @property
    def on_policy(self) -> bool:
        """Whether every step is to be a policy gradient on what its own policy sampled."""
        return self.exchange.max_staleness == 0 and self.train.objective.policy_gradient

    @model_validator(mode="after")
    def _on_policy_is_as_sampled(self) -> Config:
        buffer = self.buffer
        would_bias = (
            f"would bias the gradient of train.objective={self.train.objective.name} with "
            "exchange.max_staleness=0, an on-policy run: leave it out, or set it to"
        )
        if self.on_policy and buffer.deduplicate:
            raise ValueError(f"buffer.deduplicate=true {would_bias} false")
        if self.on_policy and "reward_temperature" in buffer.model_fields_set and buffer.chooses_by_reward:
            raise ValueError(f"buffer.reward_temperature={buffer.reward_temperature:g} {would_bias} null")
        return self

    @model_validator(mode="after")
    def _samples_are_of_the_policy(self) -> Config:
        objective, generator, given = self.train.objective, self.generator, self.model.logprob_temperature
        if not objective.own_samples:
            return self
        if given is not None and given != generator.temperature:
            raise ValueError(
                f"model.logprob_temperature={given:g} with generator.temperature={generator.temperature:g} "
                f"would bias train.objective={objective.name}, which needs samples of the very "
                "policy that it trains: leave out the first, or make the two equal"
            )
        if generator.tempered_share:
            raise ValueError(
                f"generator.tempered_share={generator.tempered_share:g} would bias "
                f"train.objective={objective.name}, which needs samples of the very policy that it trains: "
                "leave it out, or train by trajectory_balance"
            )
        return self

    @model_validator(mode="after")
    def _settle(self) -> Config:
        """Put what a rule decides in place of keys that are left out."""
        if self.model.logprob_temperature is None:
            sampled = self.train.objective.own_samples
            temperature = self.generator.temperature if sampled else 1.0
            model = self.model.model_copy(update={"logprob_temperature": temperature})
            object.__setattr__(self, "model", model)
        self._bound_a_queue()
        settled: dict[str, object] = {}
        if self.buffer.deduplicate is None:
            settled["deduplicate"] = not self.on_policy
        if self.on_policy and "reward_temperature" not in self.buffer.model_fields_set:
            settled["reward_temperature"] = None
        if self.buffer.oldest_first is None:
            bounded = self.exchange.max_staleness is not None
            settled["oldest_first"] = bounded and self.buffer.replay_limit is not None
        object.__setattr__(self, "buffer", self.buffer.model_copy(update=settled))
        return self

    def _bound_a_queue(self) -> None:
        given = "max_staleness" in self.exchange.model_fields_set
        if self.buffer.replay_limit == 1 and not given and not self.launch.elastic:
            bound = max(QUEUE_STALENESS, 2 * self.exchange.sync_every - 1)
            exchange = self.exchange.model_copy(update={"max_staleness": bound})
            object.__setattr__(self, "exchange", exchange)

    @model_validator(mode="after")
    def _those_who_leave_owe_nothing(self) -> Config:
        if self.launch.elastic and self.exchange.max_staleness is not None:
            raise ValueError(
                f"launch.elastic={self.launch.elastic} lets searchers leave that owe what "
                f"exchange.max_staleness={self.exchange.max_staleness} waits for: leave out one of the two, "
                "or bound the age of what comes by buffer.max_age_steps"
            )
        return self

    @model_validator(mode="after")
    def _all_weights_are_averaged(self) -> Config:
        if self.model.lora and isinstance(self.train.reference, EmaReference):
            raise ValueError(
                "train.reference=ema averages all weights, of which model.lora trains none: leave out the "
                "second, or set train.reference=lagged, which needs no model"
            )
        return self

    @model_validator(mode="after")
    def _one_rank_remembers_what_it_published(self) -> Config:
        exchange, ranks = self.exchange, self.launch.trainers
        if exchange.delta == "always" and not self.one_world and ranks > 1:
            files = "exchange.transport=files" if self.launch.searchers else "launch.searchers=0 (over files)"
            raise ValueError(
                f"exchange.delta=always with {files} needs one trainer rank, which knows all that was "
                f"published, not launch.trainers={ranks}: leave it out, or have searchers in an MPI world"
            )
        return self

    @model_validator(mode="after")
    def _near_duplicates_are_found(self) -> Config:
        for key in ("near_duplicates", "similarity_limit"):
            if (value := getattr(self.buffer, key)) is not None and not self.buffer.deduplicate:
                raise ValueError(
                    f"buffer.{key}={value:g} contradicts buffer.deduplicate=false, which keeps every "
                    "completion and is what an on-policy run needs: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _fresh_groups_can_come(self) -> Config:
        bound, every = self.exchange.max_staleness, self.exchange.sync_every
        needed = self.train.prompts_per_step * self.generator.completions_per_prompt
        if bound is not None and every > bound + 1:
            raise ValueError(
                f"exchange.sync_every={every} lets weights grow older than exchange.max_staleness={bound} "
                f"allows: use at most {bound + 1}, or raise the second"
            )
        if self.selective and self.buffer.capacity < needed:
            raise ValueError(
                f"buffer.capacity={self.buffer.capacity} cannot hold the train.prompts_per_step="
                f"{self.train.prompts_per_step} groups of {self.generator.completions_per_prompt} that a "
                "step needs with max_staleness, replay_limit or a reference that is reset: raise it to at "
                f"least {needed}"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_fits_into_a_micro_batch(self) -> Config:
        budget, longest = self.train.tokens_per_micro_batch, self.model.context_length
        if budget is not None and budget < longest:
            raise ValueError(
                f"train.tokens_per_micro_batch={budget} is below model.context_length={longest}, which one "
                "sequence may have: raise the first to at least that, or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Config:
        train, ranks = self.train, self.launch.trainers
        if train.prompts_per_step % ranks:
            raise ValueError(
                f"train.prompts_per_step={train.prompts_per_step} cannot be split over "
                f"{ranks} trainer ranks: use a multiple of {ranks}"
            )
        if self.generator.completions_per_prompt < train.completions_per_prompt:
            raise ValueError(
                f"generator.completions_per_prompt={self.generator.completions_per_prompt} is below "
                f"train.completions_per_prompt={train.completions_per_prompt}: a group could never be "
                f"filled; raise the first to at least {train.completions_per_prompt}"
            )
        if self.generator.max_tokens >= self.model.context_length:
            raise ValueError(
                f"generator.max_tokens={self.generator.max_tokens} leaves no room for a prompt in "
                f"model.context_length={self.model.context_length}: lower the first or raise the second"
            )
        if self.buffer.initial_completions > self.buffer.capacity:
            raise ValueError(
                f"buffer.initial_completions={self.buffer.initial_completions} can never be reached with "
                f"buffer.capacity={self.buffer.capacity}: lower the first or raise the second"
            )
        for name in ("capacity_per_prompt", "capacity"):
            if (room := getattr(self.buffer, name)) < train.completions_per_prompt:
                raise ValueError(
                    f"buffer.{name}={room} cannot hold a group of "
                    f"train.completions_per_prompt={train.completions_per_prompt}: raise it to at least that"
                )
        return self


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply ``a.b=value`` overrides, validate.

    path: a file, or the name of a shipped config. Raises ConfigError with one sentence: missing or
    unreadable file, unknown key (nearest valid name), wrong type, impossible combination.
    """
    try:
        tree = yaml.safe_load(shipped.find(path, "configs").read_text()) or {}
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}; check the path, or name one of those shipped: "
            f"{', '.join(shipped.files('configs'))}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections such as 'model:' and 'train:', not a {type(tree).__name__}"
        )
    return parse_config(tree, overrides)


def parse_config(tree: dict[str, Any], overrides: list[str] | None = None) -> Config:
    """Validate a tree of plain values, after ``overrides`` to it. Raises ConfigError."""
    for override in overrides or []:
        _override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None


def dump_config(config: Config) -> str:
    """YAML text that ``load_config`` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ → both values, in order of declaration; None where there is none."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: (was, now) for key, (was, now) in pairs.items() if was != now}


def differing_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ, in order of declaration."""
    return list(differences(old, new))


def may_change(key: str) -> bool:
    """Whether a resume may give a dotted key another value; see ``MayChange``. It holds for all below."""
    model: type[BaseModel] | None = Config
    for name in key.split("."):
        field = model.model_fields.get(name) if model else None
        if field is not None and _MAY_CHANGE in field.metadata:
            return True
        if field is not None:
            model = _section(field.annotation)
        elif model is not RewardSection:  # of which there are several by name
            model = None
    return False


def value_text(value: object) -> str:
    """A value as ``--set`` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def is_local(value: str) -> bool:
    """Whether a value is a path of this machine, not a name on a hub such as ``org/model``."""
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or Path(value).suffix == ".jsonl"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text} is not of the form a.b=value: write for example --set train.steps=5")
    *sections, leaf = key.split(".")
    for section in sections:
        if section in CHOICES and isinstance(tree.get(section), str):
            tree[section] = {"name": tree[section]}
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {text}: {section} is a value, not a section; remove what follows it")
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value is not valid YAML; put it in quotes") from None


def explain(error: ValidationError, model: type[BaseModel], noun: str = "config") -> str:
    """The first problem of a pydantic error as one sentence: value, rule, remedy. noun: whose keys."""
    problem = error.errors()[0]
    names, section = _place(problem["loc"], model)
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        return f"unknown {noun} key {key!r}{_nearest(names, section)}"
    if problem["type"] == "missing":
        by_option = f" or with --set {key}=…" if model is Config else ""
        return f"{noun} key {key!r} is missing: set it in the file{by_option}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"].startswith("union_tag"):
        assert section is not None, "the union is a field of it"
        names_of = ", ".join(choices(section.model_fields[names[-1]].annotation))
        given = problem["input"].get("name") if isinstance(problem["input"], dict) else problem["input"]
        return f"{noun} key {key!r} has the value {given!r}, but is one of {names_of}"
    rule = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{noun} key {key!r} has the value {problem['input']!r}, but {rule}"


def _place(
    location: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None]:
    """The names that lead to a place below ``model``, less the tags of choices; the section that holds it."""
    names: list[str] = []
    holder: type[BaseModel] | None = model
    below: type[BaseModel] | None = model
    parts = iter(map(str, location))
    for part in parts:
        names.append(part)
        holder = below
        if below is not None and part in below.model_fields:  # else it is a name among several
            annotation = below.model_fields[part].annotation
            among = choices(annotation)
            below = among.get(next(parts, "")) if among else _section(annotation)
    return names, holder


def _nearest(names: list[str], section: type[BaseModel] | None) -> str:
    """The valid name of ``section`` that is closest to the last of ``names``, which lead to it."""
    if section is None:
        return ""
    valid = list(section.model_fields)
    close = difflib.get_close_matches(names[-1], valid, n=1)
    return (
        f": did you mean {'.'.join([*names[:-1], close[0]])!r}?"
        if close
        else f": valid are {', '.join(valid)}"
    )


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model among the types of a field: of ``Container | None`` the container."""
    types = [annotation, *get_args(annotation)]
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
