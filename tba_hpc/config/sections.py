"""The sections of a config: every key with its type, default and meaning. Imports no heavy library.

The text under a key is its description in docs/config.md.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tba_hpc.config import rules
from tba_hpc.config.plain_yaml import UserPath
from tba_hpc.config.variants import (
    BehaviourIsReference,
    Duplicates,
    EmbeddingDuplicates,
    EqualDuplicates,
    FrozenReference,
    LossNormaliser,
    ModelReference,
    NoDuplicates,
    Oapl,
    ObjectiveChoice,
    Positive,
    RatioBound,
    RatioTaper,
    ReferenceChoice,
    ResetReference,
    Section,
    TrajectoryBalance,
    Unbounded,
)

Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
T = TypeVar("T")

MAY_CHANGE = "may change"
"""Mark in the metadata of a key that a resume may change."""

MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that a resume may change. Other keys decide what the run learns, and stay as they are."""


def _words(command: object) -> object:
    """Split a command given as one line into words, as a shell would; return any other value as it is.

    Raises ValueError if a quotation mark is not closed.
    """
    if not isinstance(command, str):
        return command
    try:
        return shlex.split(command)
    except ValueError:
        raise ValueError(f"the command {command!r} has a quotation mark that nothing closes") from None


Command = Annotated[tuple[str, ...] | None, BeforeValidator(_words)]
"""Words of a command, or one line, which is split as a shell would."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
"""Name of an environment variable."""


class NotifySection(Section):
    """One-line messages about a run's starts, alerts, silence and end; see ``tba watch``."""

    command: MayChange[Command] = Field(None, min_length=1)
    """Command that is run for each message, without a shell: a list of words, or one line. The message is
    the last argument. The environment variable TBA_EVENT says what the message is about: start, alert,
    silence or end."""
    webhook_variable: MayChange[Variable | None] = None
    """Name of the environment variable that holds the address of a webhook, such as Slack's. Each message is
    sent there as a POST of {"text": message}. The address is never stored."""
    heartbeat_variable: MayChange[Variable | None] = None
    """Name of the environment variable that holds an address of a monitoring service, such as
    healthchecks.io. The run sends GET requests there while it works. When they stop, the service raises an
    alarm."""
    heartbeat_seconds: MayChange[float] = Field(60.0, ge=15)
    """Pause between two heartbeat requests, s."""

    @property
    def wanted(self) -> bool:
        """True if messages or heartbeats are sent anywhere."""
        return bool(self.command or self.webhook_variable or self.heartbeat_variable)


class RunSection(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["my-run", "run_2.b"])
    """Name of the run. Its directory is ROOT/NAME-seedN, where N is the seed."""
    root: MayChange[UserPath] = "runs"
    """Folder that holds the directories of runs. In paths, ``~`` and ``$NAME`` are expanded."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of the order of prompts, of sampling, and of the draws from the replay buffer."""
    notify: MayChange[NotifySection] = NotifySection()
    """Messages about the run to a command or webhook, and heartbeats."""


class LoraSection(Section):
    """LoRA: low-rank adapters (alpha/rank)·B·A are trained, published and checkpointed; the weights of the
    model are frozen. There is no dropout, because learner and engine must compute the same
    log-probabilities."""

    rank: Count = 16
    """r, the rank of the adapters: A has r rows, and B has r columns."""
    alpha: Positive = 32.0
    """α. An adapter is scaled by alpha/rank."""
    targets: tuple[Text, ...] | None = Field(None, min_length=1)
    """Linear layers that get an adapter, by their name or the end of their path, such as q_proj or
    self_attn.q_proj. null: all linear layers but the output layer."""


class ModelSection(Section):
    path: Annotated[UserPath, Field(min_length=1)]
    """Folder or hub name of the initial policy, which is also the initial reference; or your own
    ``module:Class`` (see tba_hpc.core.ports.Backend)."""
    dtype: Dtype = "bfloat16"
    """Dtype of the weights in training, exchange and engines. The optimizer's master weights are float32."""
    context_length: int = Field(1024, ge=2)
    """Maximum length of prompt and completion together, in tokens."""
    logprob_temperature: Positive | None = None
    """T: all log-probabilities are those of softmax(logits/T). If unset: generator.temperature with
    train.score_centering, oapl or a policy gradient, which need samples of the policy that they train; else
    1."""
    fp32_head: bool = True
    """Compute the logits of bfloat16 models in float32, so that the log-probabilities of learner, reference
    and engine agree more closely."""
    compile: MayChange[bool | None] = None
    """Compile the layers of policy and reference with torch.compile, which takes some seconds at the first
    step; not possible with train.zero_stage=3. null: compile on GPUs, where possible."""
    lora: LoraSection | None = None
    """Train LoRA adapters; {} uses the defaults. null: train all weights."""

    @property
    def policy_temperature(self) -> float:
        """Temperature T of the policy: ``logprob_temperature``, or 1 if it is unset."""
        return self.logprob_temperature or 1.0


class RewardSection(Section):
    """One of a task's rewards: your function, a judge behind a URL, or a program."""

    function: str | None = None
    """Your own ``module:function``; its arguments are described in tba_hpc.tasks.rewards. The module is
    installed, or lies beside the config or in the working directory."""
    url: MayChange[str | None] = None
    """Address of a judge, to which each completion is sent as a JSON POST. If ``model`` is set, this is an
    OpenAI-style chat endpoint, such as http://host:8000/v1/chat/completions."""
    program: Command = Field(None, min_length=1)
    """Command that is run once per completion, without a shell: a list of words, or one line. The word
    ``python`` stands for the run's interpreter. Relative paths are looked up like modules. The program's time
    and memory are limited, but its access to files and the network is not (docs/own-task.md)."""
    weight: float = 1.0
    """Weight of this reward in the sum of rewards."""
    model: str | None = None
    """Name of the model that judges at a chat endpoint. The last number in its reply is the reward; 8/10
    counts as 8."""
    prompt: str | None = None
    """Prompt for a chat judge, with {completion} where the completion goes. Any other {name} is replaced by
    the field of that name in the prompt's row."""
    key_variable: Variable | None = None
    """Name of the environment variable that holds the judge's API key, which is never stored."""
    seconds: MayChange[Positive] = 30.0
    """Time limit of a request to a judge, or of a program, s."""
    concurrency: MayChange[Count] = 8
    """Number of requests or programs that a searcher runs at the same time."""
    memory_mb: int = Field(1024, ge=16)
    """Limit of the address space of each process of a program, MiB."""
    when_killed: float | None = None
    """Reward of a completion whose program exceeded a limit or was killed. null: the completion is left out,
    and counted as set aside."""


class TaskSection(Section):
    name: str = "gsm8k"
    """Name of a built-in task, or your own ``module:Class``. The module is looked up like that of a reward's
    function."""
    reward: dict[str, RewardSection] = Field(default_factory=dict)
    """Reward for the tasks jsonl, environment and agent: a ``module:function``, the keys of one reward, or
    several rewards by name, whose weighted sum is the reward."""
    train_file: UserPath | None = None
    """JSONL file with training problems. null: the task's own data."""
    test_file: UserPath | None = None
    """JSONL file with held-out problems. null: the task's own data, or a part of train_file."""
    special_tokens: bool = False
    """Include special tokens, such as answer tags, in the text that rewards and environments get and that
    ``tba samples`` shows. An end-of-sequence token at the end is left out in any case."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the task."""

    @property
    def has_conversations(self) -> bool:
        """True if completions are conversations, which always need a chat template."""
        return self.name in ("environment", "agent")

    @field_validator("reward", mode="before")
    @classmethod
    def _by_name(cls, reward: object) -> object:
        """Turn the short forms, a single reward or ``module:function``, into rewards by name."""
        if isinstance(reward, str) or _is_one_reward(reward):
            reward = {"reward": reward}
        if isinstance(reward, dict):
            return {name: {"function": it} if isinstance(it, str) else it for name, it in reward.items()}
        return reward

    @field_validator("reward")
    @classmethod
    def _check(cls, reward: dict[str, RewardSection]) -> dict[str, RewardSection]:
        rules.check_rewards(reward)
        return reward


def _is_one_reward(reward: object) -> bool:
    """Return whether a dict holds the keys of a single reward, not rewards by name."""
    return (
        isinstance(reward, dict)
        and reward.keys() <= RewardSection.model_fields.keys()
        and not all(isinstance(value, dict) for value in reward.values())
    )


class GeneratorSection(Section):
    completions_per_prompt: Count = 24
    """S, the number of completions sampled per prompt; at least train.completions_per_prompt."""
    temperature: Positive = 0.7
    """Sampling temperature in training. Evaluation is greedy, unless the task has its own temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling. Below 1 some completions are never sampled, and no objective is
    sure to reach its optimum."""
    tempered_range: tuple[float, float] | None = None
    """Range [low, high] from which half of the training requests draw their temperature uniformly. The other
    half use ``temperature``, as all do if this is null."""
    max_tokens: Count = 512
    """Maximum completion length, in tokens."""
    min_tokens: int = Field(0, ge=0)
    """Minimum completion length in training, in tokens."""
    stop: tuple[Text, ...] = ()
    """Strings, including special tokens, that end a completion in training and evaluation. The completion
    keeps the whole token that completes the string; no end-of-sequence token follows."""
    prompts_in_flight: MayChange[Count] = 16
    """Number of prompts that a searcher's engine works on at the same time. Multiplied by
    completions_per_prompt, this is the number of concurrent completions; 250 to 500 keep a GPU busy."""
    kv_cache_mb: MayChange[Count | None] = None
    """Size of the KV cache on each GPU of the engine, MiB. Set it if other ranks start on the same GPU. null:
    what gpu_memory_utilization leaves when the engine starts."""
    gpu_memory_utilization: MayChange[float] = Field(0.85, gt=0, le=1)
    """Share of each GPU's memory for the engine. This memory must be free when the engine starts, even if
    kv_cache_mb is set. Leave room for the reference."""
    tensor_parallel: MayChange[Count] = 1
    """Number of GPUs per engine; must divide the number of attention heads."""
    keep_kv: MayChange[bool] = False
    """Keep the KV cache of unfinished completions when the weights change, which is faster. Later tokens then
    attend to keys and values of older weights; the recorded log-probabilities include this effect."""
    engine: MayChange[Annotated[dict[str, Any], AfterValidator(rules.check_engine_arguments)]] = Field(
        default_factory=dict
    )
    """Additional vLLM EngineArgs, such as ``quantization: fp8``. Arguments that other keys set are refused.
    ``tba plan`` ignores this key."""


class BufferSection(Section):
    most_on_policy: Share = 0.5
    """m, the probability that a group is drawn from the completions of the most recent sync alone."""
    capacity_per_prompt: MayChange[Count] = 100
    """Maximum number of trajectories per prompt; the oldest are evicted first. In a queue (see replay_limit)
    the default is the value of ``capacity``."""
    capacity: MayChange[Count] = 100_000
    """Maximum number of trajectories; the oldest are evicted first. A queue needs room for
    (exchange.max_staleness + 1) · train.prompts_per_step groups."""
    reward_temperature: Positive | None = 1.0
    """Temperature of the softmax over rewards by which a prompt's completions are drawn. null: draw them
    uniformly. If unset: null in on-policy runs (exchange.max_staleness=0 with a policy gradient), else 1."""
    initial_completions: Count = 500
    """Number of completions that the buffer must hold before the first step, unless exchange.max_staleness is
    set. It can be at most capacity_per_prompt times the number of training prompts."""
    duplicates: Duplicates = EqualDuplicates()
    """Rule by which completions of a prompt count as duplicates; the buffer keeps only one of them. If unset:
    none in on-policy runs, else equal."""
    replay_limit: Count | None = None
    """Number of steps that may learn from a trajectory before it is evicted; null: no limit. If too few
    trajectories of its prompt remain for a group, these are evicted, too. The trainer waits while too few
    prompts remain for a step. With exchange.max_staleness this key makes the buffer a queue: a step uses the
    completions of the oldest weights, and waits for unfinished ones that would otherwise become too stale. A
    queue ignores most_on_policy."""

    @property
    def deduplicate(self) -> bool:
        """True if the buffer keeps only one of several duplicates."""
        return not isinstance(self.duplicates, NoDuplicates)

    @property
    def embedding_model(self) -> str | None:
        """Folder or hub name of the sentence encoder that finds duplicates; None if none does."""
        return self.duplicates.model if isinstance(self.duplicates, EmbeddingDuplicates) else None

    @property
    def chooses_by_reward(self) -> bool:
        """True if completions with higher rewards may be drawn more often than others."""
        return self.reward_temperature is not None and self.most_on_policy < 1


class LearningRate(Section):
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or a linear or cosine decay to zero."""
    peak: MayChange[Positive] = 1e-5
    """Highest learning rate. If a resume changes it, ``tba replay`` uses the new rate from the first step."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps over which the rate rises linearly from zero."""
    decay: MayChange[tuple[int, int] | None] = None
    """First and last step of the decay, such as [400, 1000]; the last may be later than train.steps. null:
    from the end of the warm-up to train.steps."""

    @model_validator(mode="before")
    @classmethod
    def _peak_alone(cls, value: object) -> object:
        """Accept a plain number as a constant rate."""
        return {"peak": value} if isinstance(value, int | float | str) else value


def _schedule(value: Any, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    """Turn a number, or numbers by step, into pairs (step, value) in order of steps. Raises ValueError."""
    try:
        pairs = sorted(value.items()) if isinstance(value, dict) else value
        pairs = [(0, value)] if isinstance(pairs, str | int | float) else pairs
        points = tuple((int(step), float(number)) for step, number in pairs)
    except (TypeError, ValueError):
        points = ()
    objective = info.data.get("objective", TrajectoryBalance())
    least = 0.0 if info.field_name == "beta" and objective.kl_optional else math.ulp(0.0)
    if isinstance(value, int | float) and value < least:
        remedy = _without_kl(objective) if info.field_name == "beta" else "leave it out"
        raise ValueError(f"train.{info.field_name}={value} must be above 0: {remedy}")
    steps = [step for step, _ in points]
    if steps[:1] != [0] or steps != sorted(set(steps)) or not all(least <= it < math.inf for _, it in points):
        raise ValueError(
            f"train.{info.field_name}={value} is not a schedule: leave it out, or set it to a number above "
            "0, or to numbers by step from 0 on, such as {0: 1.0, 128: 0.05}"
        )
    return points


def _without_kl(objective: ObjectiveChoice) -> str:
    """Return the end of an error message about a train.beta that is too low: what to set instead.

    A user may have set 0 because this leaves out the KL term in other systems.
    """
    if objective.kl_optional:
        return "0 leaves out the KL term"
    if not objective.weighs_kl:
        return f"leave it out, since train.objective={objective.name} has no KL term"
    return "raise it, or use train.objective=grpo, which has no KL term then (as TRL with beta: 0.0)"


def _shortest(points: tuple[tuple[int, float], ...]) -> float | list[list[float]]:
    return points[0][1] if len(points) == 1 else [list(point) for point in points]


Schedule = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_schedule),
    PlainSerializer(_shortest, Any, when_used="always"),
]
"""A number as a function of the step: pairs (step, value), linear between them, then constant. It is above 0;
only train.beta may be 0, with an objective that is ``kl_optional``."""


class TrainSection(Section):
    objective: ObjectiveChoice = TrajectoryBalance()
    """The loss: trajectory balance, TBA′, OAPL, a policy gradient, or your own function."""
    ratio_bound: RatioBound = Unbounded()
    """Weights on the gradient of each token, which limit the influence of stale data and do not move the
    optimum of trajectory balance. If unset: taper with trajectory_balance and tba_prime, else none. Not for
    objectives that bound stale data themselves."""
    score_centering: int = Field(0, ge=0)
    """Number k of the likeliest tokens that are recorded at each position for score centering (arXiv
    2609.20807), such as 32; 0: off. Score centering subtracts from the score ∇log π_θ of each token its mean
    under the sampling policy, so that old data with a constant advantage have no effect on average. Tokens
    that are not recorded count as a single one. The records take 6·k bytes per completion token. Not for
    objectives that bound stale data themselves."""
    reference: ReferenceChoice = FrozenReference()
    """Reference policy π_ref. If unset: ``behaviour`` with the objective oapl, otherwise ``frozen``."""
    loss_normaliser: LossNormaliser | None = None
    """Divisor of the summed token losses of a completion: 1 (sum), its length (completion_tokens), the mean
    length in the batch (batch_tokens) or generator.max_tokens (max_tokens). null: as published, which is
    completion_tokens for GRPO and sum for all others."""
    steps: MayChange[Count] = 1000
    """Number of optimizer steps. It may be raised, even after the run has finished, or lowered to a step that
    the run has not passed. The decay of the learning rate then ends at the new number, unless
    train.learning_rate.decay is set."""
    prompts_per_step: Count = 8
    """B, the number of groups per optimizer step."""
    completions_per_prompt: int = Field(20, ge=2)
    """K, the number of trajectories per group."""
    tokens_per_micro_batch: MayChange[Count | None] = None
    """Maximum number of tokens per forward and backward pass, at least model.context_length. The prompt
    of a group counts once. If the model has other layers than full attention, each completion counts with
    its prompt and padding. A larger group is split, which costs a second pass for its log-probabilities.
    null: what fits into 8 GiB of activations on a GPU (1 GiB on a CPU), at most 32k, but at least the
    largest group of the step."""
    learning_rate: LearningRate = LearningRate()
    """Learning-rate schedule; a number is a constant rate."""
    beta: Schedule = Field(0.1, validate_default=True)
    """β of the target policy π* ∝ π_ref·exp(r/β): a number, or a schedule of values by step such as
    {0: 1.0, 128: 0.05}, linear between them and constant after the last. With grpo and rloo it weighs a KL
    term, and 0 leaves this term out; in that case set reference to behaviour, so that no second model is
    loaded."""
    target_temperature: Schedule = Field(1.0, validate_default=True)
    """T in the target policy π* ∝ [π_ref^(1/γ)·exp(r/β)]^(1/T), where γ is reference_temperature and β is
    beta. A higher T makes π* flatter. A number or a schedule, as for beta."""
    reference_temperature: Schedule = Field(1.0, validate_default=True)
    """γ in the formula under target_temperature; a higher γ gives π_ref less weight. A number or a schedule,
    as for beta."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's β₁ and β₂."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, of all trained weights: those of norms and biases, too."""
    gradient_clip: Positive | None = 1.0
    """Maximum global gradient norm of the normalised loss. null: no clipping."""
    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO stage of DeepSpeed. Trainer ranks divide among them the optimizer state (1), also the gradients
    (2), and also the weights (3)."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass, which takes less memory and more time."""
    deepspeed: MayChange[Annotated[dict[str, Any], AfterValidator(rules.check_deepspeed_settings)]] = Field(
        default_factory=dict
    )
    """Additional DeepSpeed settings; those that other keys set are refused. For example, {zero_optimization:
    {offload_optimizer: {device: cpu}}} keeps AdamW's state and the master weights in host memory."""

    @property
    def searcher_has_reference(self) -> bool:
        """True if searchers hold a reference model and score completions with it."""
        return isinstance(self.reference, ModelReference) and self.reference.scored_by == "searcher"

    @property
    def trainer_has_reference(self) -> bool:
        """True if the trainer holds a model of the reference and scores completions with it."""
        return isinstance(self.reference, ModelReference) and self.reference.scored_by == "trainer"

    @property
    def value_beta(self) -> float | None:
        """Coefficient β₁ of OAPL's value V̂; None for every other objective."""
        return (self.objective.value_beta or self.beta[0][1]) if isinstance(self.objective, Oapl) else None

    @property
    def offloads_optimizer(self) -> bool:
        """True if DeepSpeed keeps AdamW's state and the master weights off the GPU."""
        offload = (self.deepspeed.get("zero_optimization") or {}).get("offload_optimizer") or {}
        return offload.get("device", "none") != "none"

    @property
    def normaliser(self) -> LossNormaliser:
        """Normaliser in use: ``loss_normaliser``, or the objective's own if this is unset."""
        return self.loss_normaliser or self.objective.normaliser

    @model_validator(mode="after")
    def _settle(self) -> TrainSection:
        """Fill in unset keys whose defaults depend on the objective."""
        if "ratio_bound" not in self.model_fields_set and self.objective.tapered:
            object.__setattr__(self, "ratio_bound", RatioTaper())
        if "reference" not in self.model_fields_set and isinstance(self.objective, Oapl):
            object.__setattr__(self, "reference", BehaviourIsReference())
        return self


QUEUE_STALENESS = 8
"""Least default of exchange.max_staleness with buffer.replay_limit=1, in steps. This bound keeps engines
about as busy as without a bound, and the data nearly as useful as fresh data."""


class ExchangeSection(Section):
    transport: Literal["mpi", "files"] = "mpi"
    """Way in which weights and shards travel. mpi: messages in one MPI world of all ranks. files: a shared
    file system."""
    sync_every: Count = 2
    """k, the number of optimizer steps between two syncs, in which weights are published and shards
    fetched."""
    max_staleness: int | None = Field(None, ge=0)
    """Maximum number of steps between the weights that sample a trajectory and those that learn from it. To
    keep it, trainer and searchers wait for each other. 0: on-policy. null: no bound, as in TBA. If unset:
    null, but with buffer.replay_limit=1 the larger of 8 and 2k − 1, where k is sync_every."""
    seal_seconds: MayChange[Positive] = 2.0
    """Maximum time until a finished completion is sealed on disk, s. With more than 64 searchers, this time
    is multiplied by searchers/64."""
    keep_shards: MayChange[Share] = 0.0
    """Share of the merged shards that are kept in RUN/kept for ``tba samples``, spread evenly over the run.
    ``tba replay`` needs all of them (1)."""


class CheckpointSection(Section):
    every: MayChange[Count] = 100
    """Number of optimizer steps between checkpoints."""
    keep: MayChange[Count] = 2
    """Number of complete checkpoints to keep."""


class EvaluateSection(Section):
    every: MayChange[Count] = 50
    """Minimum number of optimizer steps between evaluations on the validation split. An evaluation scores
    the next weights that are published. If one falls due while another runs, it waits for the other's end. If
    several fall due, some of them are left out."""
    validation_prompts: MayChange[int] = Field(128, ge=0)
    """Number of prompts of the validation split that are evaluated; 0: none."""
    test_prompts: MayChange[Count | None] = None
    """Number of prompts of the test split that are evaluated, before the first and after the last step. null:
    all."""


class TrackSection(Section):
    """Trackers to which a process on the leading trainer's node sends the metrics; see also ``tba track``."""

    wandb: MayChange[Text | None] = None
    """Weights & Biases project; null: none. All attempts of a run log to the same W&B run. W&B's environment
    variables work as usual."""
    tensorboard: MayChange[bool] = False
    """Write event files to RUN/track/tensorboard."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the trackers that are switched on."""
        asked = {"wandb": self.wandb is not None, "tensorboard": self.tensorboard}
        return tuple(name for name, wanted in asked.items() if wanted)


FIRST_ELASTIC = 5000
"""Number of the first elastic searcher. Searchers that start with the run have lower numbers, from 0. The gap
keeps the numbers of elastic searchers the same if launch.searchers changes."""

Ranks = Annotated[int, Field(ge=0, lt=FIRST_ELASTIC)]


class LaunchSection(Section):
    trainers: MayChange[Count] = 1
    """Number of trainer ranks, each with a GPU."""
    searchers: MayChange[Ranks] = 1
    """Number of searcher ranks, each with an engine, that start and end with the trainer. 0: there are only
    elastic searchers."""
    elastic: MayChange[Ranks] = 0
    """Maximum number of elastic searchers. ``tba search RUN`` starts one at any time, on any machine that
    sees the run directory, and gives it a free slot. The requests of an empty slot wait for its next
    searcher."""
    timeout_seconds: MayChange[Positive] = 600.0
    """Maximum wait for another rank, s; then the run ends and names the rank. A start may take three times as
    long. An elastic searcher waits six times as long for a trainer whose job is in the queue, and a trainer
    without other searchers for an elastic one. After half this time a silent engine is replaced, a full disk
    ends the run, and a call of a reward is given up."""

    @property
    def start_seconds(self) -> float:
        """Longest start of an engine or a rank (imports, joining the others, loading models), in seconds."""
        return 3 * self.timeout_seconds

    @property
    def elastic_seconds(self) -> float:
        """Longest time that an elastic searcher waits for a queued trainer, in seconds."""
        return 6 * self.timeout_seconds

    @property
    def silence_seconds(self) -> float:
        """Time in seconds after which a silent engine is replaced, and a call of a reward is given up."""
        return self.timeout_seconds / 2

    @property
    def stack_seconds(self) -> float:
        """Longest time between a loop's checks for a stop, in seconds.

        A rank that takes longer logs its stack traces. This time is shorter than the one after which other
        ranks give up on that rank.
        """
        return 0.8 * self.silence_seconds

    @property
    def disk_seconds(self) -> float:
        """Longest wait for a full disk, in seconds. It is so short that no other rank gives up first."""
        return self.timeout_seconds / 2

    @property
    def places(self) -> int:
        """Number of searchers among which requests are divided; elastic ones count even while absent."""
        return self.searchers + self.elastic

    def place_of(self, searcher: int) -> int:
        """Return a searcher's place p, from 0: it takes the requests with id ≡ p (mod ``places``)."""
        return searcher if searcher < FIRST_ELASTIC else self.searchers + searcher - FIRST_ELASTIC

    @property
    def elastic_searchers(self) -> range:
        """Numbers of the elastic searchers."""
        return range(FIRST_ELASTIC, FIRST_ELASTIC + self.elastic)


def is_elastic(searcher: int) -> bool:
    """Return whether the searcher with this number is elastic."""
    return searcher >= FIRST_ELASTIC


class Config(Section):
    """Configuration of a run. The sections describe their keys."""

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
        """True if age, uses or a reset of the reference may evict trajectories, not only lack of room."""
        limited = self.buffer.replay_limit is not None
        reset = isinstance(self.train.reference, ResetReference)
        return limited or self.exchange.max_staleness is not None or reset

    @property
    def queue(self) -> bool:
        """True if the buffer is a queue: steps use the completions of the oldest weights first."""
        return self.buffer.replay_limit is not None and self.exchange.max_staleness is not None

    @property
    def groups_ahead(self) -> int:
        """Number of groups that searchers may generate ahead of the trainer. Needs exchange.max_staleness."""
        assert self.exchange.max_staleness is not None, "without a bound there is no limit"
        return (self.exchange.max_staleness + 1) * self.train.prompts_per_step

    @property
    def one_world(self) -> bool:
        """True if trainer and searcher ranks form one MPI world."""
        return self.exchange.transport == "mpi" and self.launch.searchers > 0

    @property
    def on_policy(self) -> bool:
        """True if every step takes a policy gradient, from samples of the current policy alone."""
        return self.exchange.max_staleness == 0 and self.train.objective.policy_gradient

    @model_validator(mode="after")
    def _check_and_settle(self) -> Config:
        """Fill in unset keys whose defaults depend on other keys, and refuse a contradictory config."""
        queue = self.buffer.replay_limit == 1
        if queue and "max_staleness" not in self.exchange.model_fields_set:
            self._fill("exchange", max_staleness=max(QUEUE_STALENESS, 2 * self.exchange.sync_every - 1))
        rules.check(self)
        if self.queue and "capacity_per_prompt" not in self.buffer.model_fields_set:
            self._fill("buffer", capacity_per_prompt=self.buffer.capacity)
        if self.model.logprob_temperature is None:
            sampled = self.train.objective.own_samples or self.train.score_centering
            self._fill("model", logprob_temperature=self.generator.temperature if sampled else 1.0)
        if self.train.zero_stage == 3:
            self._fill("model", compile=False)
        given = self.buffer.model_fields_set
        if self.on_policy and "duplicates" not in given:
            self._fill("buffer", duplicates=NoDuplicates())
        if self.on_policy and "reward_temperature" not in given:
            self._fill("buffer", reward_temperature=None)
        return self

    def _fill(self, section: str, **values: object) -> None:
        object.__setattr__(self, section, getattr(self, section).model_copy(update=values))
