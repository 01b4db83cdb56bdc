"""Rules on combinations of keys, each with an error sentence: value, rule, remedy. Imports no heavy library.

The module ``sections`` has the types and ranges of single keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from tba_hpc.config.plain_yaml import write_yaml
from tba_hpc.config.variants import (
    BehaviourIsReference,
    LaggedReference,
    Oapl,
    Unbounded,
)

if TYPE_CHECKING:
    from tba_hpc.config.sections import Config, RewardSection

OWN_ENGINE_ARGUMENTS = {
    "model": "set model.path",
    "tokenizer": "it is that of model.path, so leave it out",
    "revision": "download the revision that you want into a folder, and set model.path to that folder",
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
    "logprobs_mode": "the learner needs the policy's own log-probabilities, so leave it out",
    "worker_extension_cls": "weights reach the engine's workers through it, so leave it out",
}
"""Arguments of vLLM that generator.engine must not contain, each with a remedy."""

SECRET = re.compile(r"hf_token|auth_token|api_key|access_key|secret|password")
"""Pattern in names of arguments that hold secrets, which a run must neither store nor show."""

OWN_DEEPSPEED_SETTINGS = {
    "train_batch_size": "train.prompts_per_step and train.completions_per_prompt",
    "train_micro_batch_size_per_gpu": "train.tokens_per_micro_batch",
    "gradient_accumulation_steps": "train.tokens_per_micro_batch",
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
    "data_types": "the learner, which sums gradients in float32",
    "checkpoint": "the learner, which writes its own checkpoints",
    "zero_optimization.stage": "train.zero_stage",
}
"""DeepSpeed settings that train.deepspeed must not contain. The value of each names the config keys, or the
part of the program, that decide the setting."""

DEEPSPEED_SETTINGS = (
    *("zero_optimization", "aio", "activation_checkpointing", "communication_data_type", "compile"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather"),
    *("flops_profiler", "comms_logger", "wall_clock_breakdown", "memory_breakdown", "timers", "dump_state"),
    *("steps_per_print", "log_level", "disable_python_gc", "tensorboard", "csv_monitor", "wandb", "comet"),
)
"""Top-level settings that train.deepspeed may contain. DeepSpeed would silently ignore any other."""

UNTEMPERED = ((0, 1.0),)
"""Schedule of a temperature that is 1 at every step."""


def check(config: Config) -> None:
    """Raise ValueError with the sentence of the first rule that the config breaks.

    A placeholder {train.steps} in a sentence becomes the key with its value, train.steps=5.
    """

    def setting(match: re.Match[str]) -> str:
        value = reduce(getattr, match[1].split("."), config)
        return f"{match[1]}={value_text(getattr(value, 'name', value))}"

    for rules in (
        _of_sampling,
        _of_score_centering,
        _of_the_loss,
        _of_steps,
        _of_the_buffer,
        _of_the_exchange,
    ):
        for sentence in rules(config):
            raise ValueError(re.sub(r"\{([a-z_.]+)\}", setting, sentence))


def _of_sampling(config: Config) -> Iterator[str]:
    """Yield the sentence of each rule on sampling that the config breaks.

    The functions below do the same for other rules.
    """
    generator, objective = config.generator, config.train.objective
    if generator.tempered_range and not 0 < generator.tempered_range[0] <= generator.tempered_range[1]:
        yield "{generator.tempered_range} is not a range: give the lower temperature first, above 0"
    if generator.min_tokens > generator.max_tokens:
        yield "{generator.min_tokens} is above {generator.max_tokens}: lower min_tokens or raise max_tokens"
    if generator.max_tokens >= config.model.context_length:
        yield (
            "{generator.max_tokens} leaves no room for a prompt in {model.context_length}: lower max_tokens "
            "or raise context_length"
        )
    if objective.own_samples and config.model.logprob_temperature not in (None, generator.temperature):
        yield (
            "{model.logprob_temperature} with {generator.temperature} would bias {train.objective}, which "
            "needs samples of the policy it trains: leave out the first, or make the two equal"
        )
    if objective.own_samples and generator.tempered_range:
        yield (
            "{generator.tempered_range} would bias {train.objective}, which needs samples of the policy it "
            "trains: leave it out, or train by trajectory_balance"
        )


def _of_score_centering(config: Config) -> Iterator[str]:
    """Yield a sentence for each key by which completions are not samples of the recorded distribution."""
    generator, own = config.generator, config.model.logprob_temperature
    if not config.train.score_centering:
        return
    needs = "{train.score_centering} needs samples of the distribution whose log-probabilities are recorded"
    if own not in (None, generator.temperature):
        yield (
            f"{needs}, not {{model.logprob_temperature}} with {{generator.temperature}}: leave out the "
            "first, or make the two equal"
        )
    changed = {
        "top_p": generator.top_p < 1,
        "min_tokens": generator.min_tokens > 0,
        "tempered_range": generator.tempered_range is not None,
    }
    for key in (key for key, changes in changed.items() if changes):
        yield f"{needs}, which {{generator.{key}}} changes: leave out one of the two"


def _of_the_loss(config: Config) -> Iterator[str]:
    train, objective, reference = config.train, config.train.objective, config.train.reference
    given = {"ratio_bound": train.ratio_bound != Unbounded(), "score_centering": train.score_centering > 0}
    for key in (key for key, asked in given.items() if asked and not objective.takes_bound):
        yield (
            f"{{train.{key}}} is not for {{train.objective}}, which bounds stale data itself: leave it out, "
            "or use another objective, such as trajectory_balance or rloo"
        )
    if isinstance(objective, Oapl) and not isinstance(reference, BehaviourIsReference):
        yield (
            "{train.reference} is not for {train.objective}, which learns against the sampling weights: "
            "leave it out, or set it to behaviour"
        )
    for name in ("target_temperature", "reference_temperature"):
        if getattr(train, name) != UNTEMPERED and isinstance(objective, Oapl):
            yield (
                f"train.{name} tempers a target that train.objective=oapl does not have: leave it out, or "
                "use trajectory_balance"
            )
        if getattr(train, name) != UNTEMPERED and isinstance(reference, LaggedReference):
            yield (
                f"train.{name} would be ignored with train.reference=lagged, which has the temperature of "
                "the policy: leave it out, or use another reference"
            )


def _of_steps(config: Config) -> Iterator[str]:
    if config.model.compile and config.train.zero_stage == 3:
        yield (
            "{model.compile} cannot be combined with {train.zero_stage}, which gathers weights layer by "
            "layer: leave out the first, or set the second to 1 or 2"
        )
    train, rate = config.train, config.train.learning_rate
    if rate.decay is not None and not rate.warmup_steps <= rate.decay[0] < rate.decay[1] >= train.steps:
        yield (
            "{train.learning_rate.decay} must begin after {train.learning_rate.warmup_steps} and last at "
            "least to {train.steps}: give its first and last step, or leave it out"
        )
    if rate.decay is not None and rate.schedule == "constant":
        yield (
            "{train.learning_rate.decay} has no effect on a constant rate: leave it out, or set "
            "train.learning_rate.schedule to linear or cosine"
        )
    if train.prompts_per_step % config.launch.trainers:
        yield "{train.prompts_per_step} cannot be split over {launch.trainers}: use a multiple of the second"
    if (train.tokens_per_micro_batch or math.inf) < config.model.context_length:
        yield (
            "{train.tokens_per_micro_batch} is below {model.context_length}, the longest sequence: raise the "
            "first to at least that, or lower the second"
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
            "{generator.completions_per_prompt} is below {train.completions_per_prompt}: a group could never "
            "be filled; raise generator.completions_per_prompt"
        )
    if buffer.initial_completions > buffer.capacity:
        yield (
            "{buffer.initial_completions} can never be reached with {buffer.capacity}: lower "
            "initial_completions or raise capacity"
        )
    for name in ("capacity_per_prompt", "capacity"):
        if getattr(buffer, name) < train.completions_per_prompt:
            group = "{train.completions_per_prompt}: raise it to at least that"
            yield f"{{buffer.{name}}} cannot hold a group of {group}"
    if config.selective and buffer.capacity < (needed := train.prompts_per_step * sampled):
        yield (
            "{buffer.capacity} cannot hold the {train.prompts_per_step} groups that a step needs with "
            f"max_staleness, replay_limit or reference=reset: raise it to at least {needed}"
        )
    given = buffer.model_fields_set if config.on_policy else ()
    bias = "would bias the gradient of {train.objective} in an on-policy run: leave it out, or set it to"
    if "duplicates" in given and buffer.deduplicate:
        yield f"{{buffer.duplicates}} {bias} none"
    if "reward_temperature" in given and buffer.chooses_by_reward:
        yield f"{{buffer.reward_temperature}} {bias} null"


def _of_the_exchange(config: Config) -> Iterator[str]:
    exchange, launch = config.exchange, config.launch
    bound, every = exchange.max_staleness, exchange.sync_every
    if not launch.places:
        yield "launch.searchers=0 with launch.elastic=0 leaves no searcher: raise one of them"
    if bound is not None and every > bound + 1:
        yield (
            "{exchange.sync_every} lets weights grow older than {exchange.max_staleness} allows: set "
            f"exchange.sync_every to {bound + 1} at most, or raise exchange.max_staleness"
        )


def check_engine_arguments(engine: dict[str, Any]) -> dict[str, Any]:
    """Return ``engine``, the value of generator.engine, unchanged.

    Raises ValueError if it contains a secret, or an argument in OWN_ENGINE_ARGUMENTS.
    """
    for name in OWN_ENGINE_ARGUMENTS.keys() & engine:
        given, instead = value_text(engine[name]), OWN_ENGINE_ARGUMENTS[name]
        raise ValueError(f"generator.engine.{name}={given} cannot be passed on to vLLM: {instead}")
    for name, value in flat(engine).items():
        if isinstance(value, str) and SECRET.search(name):
            raise ValueError(
                f"generator.engine.{name} would be stored in the run's config.yaml: leave it out, and export "
                "the secret where ranks start, such as HF_TOKEN"
            )
    return engine


def check_deepspeed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings``, the value of train.deepspeed, unchanged.

    Raises ValueError if a setting is in OWN_DEEPSPEED_SETTINGS, or is not in DEEPSPEED_SETTINGS.
    """
    for key in flat(settings):
        for name, owner in OWN_DEEPSPEED_SETTINGS.items():
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                raise ValueError(f"train.deepspeed.{key} is decided by {owner}: leave it out")
    for key in settings:
        if key not in DEEPSPEED_SETTINGS:
            known = ", ".join(DEEPSPEED_SETTINGS)
            raise ValueError(
                f"train.deepspeed.{key} is none of the settings that may be added: leave it out, or use one "
                f"of {known}"
            )
    return settings


OF_REWARD = {
    "function": (),
    "url": ("model", "prompt", "key_variable", "seconds", "concurrency"),
    "program": ("seconds", "concurrency", "memory_mb", "when_killed"),
}
"""Kinds of rewards, named after their main keys. Each is followed by the other keys that it accepts besides
weight."""


def reward_key(sections: Mapping[str, RewardSection], name: str) -> str:
    """Return the config key of the reward ``name``."""
    alone = list(sections) == ["reward"]  # from the short form, in which a reward has no name
    return "task.reward" if alone else f"task.reward.{name}"


def check_rewards(rewards: Mapping[str, RewardSection]) -> None:
    """Raise ValueError unless each reward is of exactly one kind, with valid keys and values of this kind."""
    for name, reward in rewards.items():
        for sentence in _of_a_reward(reward_key(rewards, name), reward):
            raise ValueError(sentence)


def _of_a_reward(key: str, reward: RewardSection) -> Iterator[str]:
    kinds = [kind for kind in OF_REWARD if getattr(reward, kind) is not None]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "has no source"
        yield f"{key} {found}: set one of function, url and program"
    known = {*kinds, "weight", *OF_REWARD[kinds[0]]}
    for name, field in type(reward).model_fields.items():
        if name not in known and (value := getattr(reward, name)) != field.default:
            yield f"{key}.{name}={value} would be ignored in a reward with {kinds[0]}: leave it out"
    if reward.function is not None and not all(reward.function.partition(":")):
        yield (
            f"{reward.function!r} of {key} is not a function: write it as module:function, such as "
            "my_rewards:short"
        )
    scheme, _, rest = (reward.url or "http://_").partition("://")
    if scheme not in ("http", "https") or not rest:
        yield f"{reward.url!r} of {key} is not an address: begin it with http:// or https://"
    port = re.search(r":(\d+)$", rest.partition("/")[0])
    if port and not 0 < int(port[1]) < 1 << 16:
        yield f"{reward.url!r} of {key} has the port {port[1]}: ports go from 1 to 65535"
    if "@" in rest.partition("/")[0]:
        yield (
            f"a user and password in the url of {key} would be written into the run's files: set "
            "key_variable to the name of an environment variable that holds the key"
        )
    asks = reward.prompt is not None and "{completion}" in reward.prompt
    if (reward.model is not None) != asks or (reward.prompt is not None) != asks:
        yield (
            f"a chat judge needs model and prompt of {key}: give both, with {{completion}} in the prompt "
            "where the answer goes"
        )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def value_text(value: object) -> str:
    """Return a value as one line that ``--set`` accepts."""
    plain = list(value) if isinstance(value, tuple) else value
    text = write_yaml(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    return json.dumps(plain, ensure_ascii=False) if "\n" in text else text  # JSON writes a line's end as \n
