"""What a config may not combine, each with the sentence that says so: value, rule, remedy.

Types and ranges of single keys are the sections' own. Imports no heavy library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from tba_hpc.config.variants import (
    BehaviourIsReference,
    EmaReference,
    LaggedReference,
    Oapl,
    OnlineDpo,
    Unbounded,
)

if TYPE_CHECKING:
    from tba_hpc.config.sections import Config, RewardSection

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
"""vLLM's arguments that generator.engine may not hold, and what to do instead, or why."""

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
"""Settings of DeepSpeed, or sections of them, that train.deepspeed may not hold, and what decides them."""

UNTEMPERED = ((0, 1.0),)


def check(config: Config) -> None:
    """Raises ValueError with the sentence of the first rule that the config breaks."""
    for rules in (_of_sampling, _of_the_loss, _of_steps, _of_the_buffer, _of_the_exchange):
        for sentence in rules(config):
            raise ValueError(sentence)


def _of_sampling(config: Config) -> Iterator[str]:
    model, generator, objective = config.model, config.generator, config.train.objective
    low, high = generator.tempered_range
    if not 0 < low <= high:
        yield (
            f"generator.tempered_range=[{low:g}, {high:g}] is no range of temperatures: give the lower one "
            "first, above 0"
        )
    if (low, high) != (0.5, 2.0) and not generator.tempered_share:
        yield "generator.tempered_range has no effect without generator.tempered_share: set both or neither"
    if generator.min_tokens > generator.max_tokens:
        yield (
            f"generator.min_tokens={generator.min_tokens} is above generator.max_tokens="
            f"{generator.max_tokens}: lower the first or raise the second"
        )
    if generator.max_tokens >= model.context_length:
        yield (
            f"generator.max_tokens={generator.max_tokens} leaves no room for a prompt in "
            f"model.context_length={model.context_length}: lower the first or raise the second"
        )
    needs = f"train.objective={objective.name}, which needs samples of the policy that it trains"
    if objective.own_samples and model.logprob_temperature not in (None, generator.temperature):
        yield (
            f"model.logprob_temperature={model.logprob_temperature:g} with generator.temperature="
            f"{generator.temperature:g} would bias {needs}: leave out the first, or make the two equal"
        )
    if objective.own_samples and generator.tempered_share:
        yield (
            f"generator.tempered_share={generator.tempered_share:g} would bias {needs}: leave it out, or "
            "train by trajectory_balance"
        )


def _of_the_loss(config: Config) -> Iterator[str]:
    train, objective, reference = config.train, config.train.objective, config.train.reference
    if objective.bounded and train.ratio_bound != Unbounded():
        yield (
            f"train.ratio_bound={train.ratio_bound.name} is not for train.objective={objective.name}, which "
            "bounds stale data itself: leave it out, or use trajectory_balance, tba_prime, oapl or rloo"
        )
    if isinstance(objective, OnlineDpo) and train.normaliser != "sum":
        yield (
            f"train.loss_normaliser={train.loss_normaliser} has no meaning for train.objective=online_dpo, "
            "whose loss is of a pair of whole completions: leave it out"
        )
    if isinstance(objective, Oapl) and not isinstance(reference, BehaviourIsReference):
        yield (
            f"train.reference={reference.name} is not for train.objective=oapl, which learns against the "
            "weights that sampled: leave it out, or set it to behaviour"
        )
    for name in ("target_temperature", "reference_temperature"):
        if getattr(train, name) != UNTEMPERED and isinstance(objective, Oapl):
            yield (
                f"train.{name} tempers a target that train.objective=oapl does not have: leave it out, or "
                "use trajectory_balance"
            )
        if getattr(train, name) != UNTEMPERED and isinstance(reference, LaggedReference):
            yield (
                f"train.{name} would be ignored with train.reference=lagged, which is as warm as the policy: "
                "leave it out, or use another reference"
            )
    if config.model.lora and isinstance(reference, EmaReference):
        yield (
            "train.reference=ema averages all weights, of which model.lora trains none: leave out one, "
            "or set train.reference=lagged, which needs no model"
        )


def _of_steps(config: Config) -> Iterator[str]:
    train, rate, ranks = config.train, config.train.learning_rate, config.launch.trainers
    if train.horizon is not None and train.horizon < train.steps:
        yield (
            f"train.horizon={train.horizon} ends before train.steps={train.steps}, where the learning rate "
            "has decayed: raise the first, or leave it out for a decay over all steps"
        )
    if rate.decay_steps is not None and rate.schedule == "constant":
        yield (
            f"train.learning_rate.decay_steps={rate.decay_steps} has no effect on a constant rate: leave it "
            "out, or set train.learning_rate.schedule to linear or cosine"
        )
    if train.prompts_per_step % ranks:
        yield (
            f"train.prompts_per_step={train.prompts_per_step} cannot be split over {ranks} trainer ranks: "
            f"use a multiple of {ranks}"
        )
    if (train.tokens_per_micro_batch or math.inf) < config.model.context_length:
        yield (
            f"train.tokens_per_micro_batch={train.tokens_per_micro_batch} is below model.context_length="
            f"{config.model.context_length}, the longest sequence: raise the first to at least that, or "
            "lower the second"
        )
    if train.zero_stage == 1 and (train.deepspeed.get("zero_optimization") or {}).get("overlap_comm"):
        yield (
            "train.deepspeed.zero_optimization.overlap_comm=true needs sharded gradients: set "
            "train.zero_stage to 2 or 3, or leave it out"
        )


def _of_the_buffer(config: Config) -> Iterator[str]:
    buffer, train, sampled = config.buffer, config.train, config.generator.completions_per_prompt
    if sampled < train.completions_per_prompt:
        yield (
            f"generator.completions_per_prompt={sampled} is below train.completions_per_prompt="
            f"{train.completions_per_prompt}: a group could never be filled; raise the first to at least "
            f"{train.completions_per_prompt}"
        )
    if buffer.initial_completions > buffer.capacity:
        yield (
            f"buffer.initial_completions={buffer.initial_completions} can never be reached with "
            f"buffer.capacity={buffer.capacity}: lower the first or raise the second"
        )
    for name in ("capacity_per_prompt", "capacity"):
        if (room := getattr(buffer, name)) < train.completions_per_prompt:
            yield (
                f"buffer.{name}={room} cannot hold a group of train.completions_per_prompt="
                f"{train.completions_per_prompt}: raise it to at least that"
            )
    if config.selective and buffer.capacity < train.prompts_per_step * sampled:
        yield (
            f"buffer.capacity={buffer.capacity} cannot hold the train.prompts_per_step="
            f"{train.prompts_per_step} groups of {sampled} that a step needs with max_staleness, "
            f"replay_limit or reference=reset: raise it to at least {train.prompts_per_step * sampled}"
        )
    if buffer.oldest_first and buffer.replay_limit is None:
        yield (
            "buffer.oldest_first=true would learn from the same trajectories at every step: set "
            "buffer.replay_limit=1, or leave it out"
        )
    given = buffer.model_fields_set if config.on_policy else ()
    would_bias = (
        f"would bias the gradient of train.objective={train.objective.name} with exchange.max_staleness=0, "
        "an on-policy run: leave it out, or set it to"
    )
    if "duplicates" in given and buffer.deduplicate:
        yield f"buffer.duplicates={buffer.duplicates.name} {would_bias} none"
    if "reward_temperature" in given and buffer.chooses_by_reward:
        yield f"buffer.reward_temperature={buffer.reward_temperature:g} {would_bias} null"


def _of_the_exchange(config: Config) -> Iterator[str]:
    exchange, launch = config.exchange, config.launch
    bound, every, alone = exchange.max_staleness, exchange.sync_every, exchange.max_steps_without_data
    if (place := config.checkpoint.snapshot) not in (None, "memory") and not str(place).startswith("/"):
        yield (
            f"checkpoint.snapshot={place} is neither memory, null nor a path from the root: name a folder on "
            "a disk of the node"
        )
    if not launch.places:
        yield "launch.searchers=0 with launch.elastic=0 leaves nobody to search: raise one of them"
    if bound is not None and every > bound + 1:
        yield (
            f"exchange.sync_every={every} lets weights grow older than exchange.max_staleness={bound} "
            f"allows: use at most {bound + 1}, or raise the second"
        )
    if alone is not None and alone < every:
        yield (
            f"exchange.max_steps_without_data={alone} is below exchange.sync_every={every}, and shards come "
            "at syncs: raise the first to at least the second, or leave it out"
        )
    if launch.elastic and bound is not None:
        yield (
            f"launch.elastic={launch.elastic} lets searchers leave that exchange.max_staleness={bound} waits "
            "for: leave out one of the two, or set buffer.max_age_steps"
        )
    if exchange.delta == "always" and not config.one_world and launch.trainers > 1:
        yield (
            "exchange.delta=always over files needs one trainer rank, which knows all that was published, "
            f"not launch.trainers={launch.trainers}: leave it out, or have searchers in an MPI world"
        )


def check_engine_arguments(engine: dict[str, Any]) -> None:
    """Raises ValueError if generator.engine holds an argument that another key sets."""
    for name in engine:
        if name in OWN_ENGINE_ARGUMENTS:
            raise ValueError(
                f"generator.engine.{name}={value_text(engine[name])} cannot be passed on to vLLM: "
                f"{OWN_ENGINE_ARGUMENTS[name]}"
            )


def check_deepspeed_settings(settings: dict[str, Any]) -> None:
    """Raises ValueError if train.deepspeed holds a setting that another key decides."""
    for key in flat(settings):
        for name, owner in OWN_DEEPSPEED_SETTINGS.items():
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                raise ValueError(f"train.deepspeed.{key} is decided by {owner}: leave it out")


OF_REWARD = {
    "function": (),
    "url": ("model", "prompt", "key_variable", "seconds", "concurrency"),
    "program": ("seconds", "concurrency", "memory_mb", "when_killed"),
}
"""Kinds of a reward, each with the keys that only it (or it as well) has."""


def check_reward(reward: RewardSection) -> None:
    """Raises ValueError if a reward is of no kind or two, has keys of another, or an incomplete value."""
    kinds = [kind for kind in OF_REWARD if getattr(reward, kind) is not None]
    if len(kinds) != 1:
        found = f"names {' and '.join(kinds)}" if kinds else "names nothing that gives it"
        raise ValueError(f"a reward of task.reward {found}: set one of function, url and program")
    known = {*kinds, "weight", *OF_REWARD[kinds[0]]}
    for key, field in type(reward).model_fields.items():
        if key not in known and (value := getattr(reward, key)) != field.default:
            raise ValueError(f"{key}={value} of a reward by {kinds[0]} would be ignored: leave it out")
    if reward.function is not None and not all(reward.function.partition(":")):
        raise ValueError(
            f"{reward.function!r} of task.reward is no function: write it as module:function, such as "
            "my_rewards:short"
        )
    scheme, _, rest = (reward.url or "http://_").partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ValueError(f"{reward.url!r} of task.reward is no address: begin it with http:// or https://")
    if "@" in rest.partition("/")[0]:
        raise ValueError(
            "a user and password in the url of task.reward would be written into the run's files: set "
            "key_variable to the name of an environment variable that holds the key"
        )
    if (reward.model is None) != (reward.prompt is None) or (
        reward.prompt is not None and "{completion}" not in reward.prompt
    ):
        raise ValueError(
            "a judge that is asked by chat needs model and prompt of task.reward, and the prompt a place "
            "for the answer: write {completion} there"
        )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested dicts by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def value_text(value: object) -> str:
    """A value as ``--set`` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
