"""The sections of a config: every key with its type, default and meaning. Imports no heavy library."""

from __future__ import annotations

import math
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

MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that a resume may change, because it does not change what the run learns."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
"""Name of an environment variable."""


class NotifySection(Section):
    """One-line messages about a run's starts, alerts, silence and end; see ``tba watch``."""

    command: MayChange[tuple[Text, ...] | None] = Field(None, min_length=1)
    """Command that runs for each message, without a shell. The message is its last argument; the variable
    TBA_EVENT is start, alert, silence or end."""
    webhook_variable: MayChange[Variable | None] = None
    """Environment variable that holds the address of a webhook, such as Slack's, which gets a POST of
    {"text": message}. The address is never stored."""
    heartbeat_variable: MayChange[Variable | None] = None
    """Environment variable that holds an address of a service such as healthchecks.io. The run requests it
    (GET) while it works; when requests stop, the service raises an alarm."""
    heartbeat_seconds: MayChange[float] = Field(60.0, ge=15)
    """Pause between two heartbeat requests, s."""

    @property
    def wanted(self) -> bool:
        """True if messages or heartbeats are sent anywhere."""
        return bool(self.command or self.webhook_variable or self.heartbeat_variable)


class RunSection(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its directory is NAME-seedN."""
    root: MayChange[UserPath] = "runs"
    """Folder of run directories. In paths, ``~`` and ``$NAME`` are expanded."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of prompt order, sampling and replay."""
    notify: MayChange[NotifySection] = NotifySection()
    """Messages about the run to a command or webhook, and heartbeats."""


class LoraSection(Section):
    """LoRA: train, publish and checkpoint adapters (alpha/rank)·B·A, with frozen weights. There is no
    dropout, because the learner's log-probabilities must equal the sampler's."""

    rank: Count = 16
    """r, the number of rows of A and of columns of B."""
    alpha: Positive = 32.0
    """α; the adapter is scaled by alpha/rank."""
    targets: tuple[Text, ...] | None = Field(None, min_length=1)
    """Linear layers that get an adapter, by name or by the end of their path, such as q_proj or
    self_attn.q_proj. null: all but the output layer."""


class ModelSection(Section):
    path: Annotated[UserPath, Field(min_length=1)]
    """Folder or hub name of the initial policy, which is also the reference; or your own ``module:Class``
    (see tba_hpc.core.ports.Backend)."""
    dtype: Dtype = "bfloat16"
    """Dtype of the weights in training, exchange and engines. The optimizer's master weights are float32."""
    context_length: int = Field(1024, ge=2)
    """Maximum length of prompt and completion together, in tokens."""
    logprob_temperature: Positive | None = None
    """T in softmax(logits/T), for all log-probabilities. If unset, it is generator.temperature with
    score_centering and for objectives that need samples of the policy they train (oapl and the policy
    gradients), else 1."""
    fp32_head: bool = True
    """Compute logits of bfloat16 models in float32, so that log-probabilities of learner, reference and
    engine agree more closely."""
    compile: MayChange[bool | None] = None
    """Compile the layers of policy and reference with torch, which takes some seconds at the first step.
    null: on GPUs, except with ZeRO-3, which does not allow it."""
    lora: LoraSection | None = None
    """Train a LoRA adapter; {} uses the defaults. null: train all weights."""

    @property
    def policy_temperature(self) -> float:
        """Temperature T of the policy: ``logprob_temperature``, or 1 if it is unset."""
        return self.logprob_temperature or 1.0


class RewardSection(Section):
    """One of a task's rewards: your function, a judge behind a URL, or a program."""

    function: str | None = None
    """Your own ``module:function``. The module lies beside the config or in the working directory, or is
    installed; tba_hpc.tasks.rewards describes the arguments."""
    url: MayChange[str | None] = None
    """Address of a judge, which receives a JSON POST per completion. With ``model``: an OpenAI-style chat
    endpoint, such as http://host:8000/v1/chat/completions."""
    program: tuple[str, ...] | None = Field(None, min_length=1)
    """Command that runs once per completion, without a shell. ``python`` is the run's interpreter, and files
    are looked up like modules. It is confined in its resources only (docs/own-task.md)."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    model: str | None = None
    """Model name of a chat judge. The last number in its reply is the reward; 8/10 counts as 8."""
    prompt: str | None = None
    """Prompt of a chat judge. It contains {completion}; {name} is replaced by the prompt row's field of that
    name."""
    key_variable: Variable | None = None
    """Environment variable that holds the judge's API key, which is never stored."""
    seconds: MayChange[Positive] = 30.0
    """Time limit of a judge's request or a program, s."""
    concurrency: MayChange[Count] = 8
    """Concurrent requests or programs per searcher."""
    memory_mb: int = Field(1024, ge=16)
    """Address-space limit of each process of a program, MiB."""
    when_killed: float | None = None
    """Reward if the program timed out or was killed. null: the completion is set aside."""

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        rules.check_reward(self)
        return self


class TaskSection(Section):
    name: str = "gsm8k"
    """A built-in task, or your own ``module:Class``, looked up like reward functions."""
    reward: dict[str, RewardSection] = Field(default_factory=dict)
    """Rewards of the tasks jsonl, environment and agent: a ``module:function``, one reward's keys, or several
    rewards by name, whose weighted sum is the reward."""
    train_file: UserPath | None = None
    """JSONL with training problems. null: the task's own source."""
    test_file: UserPath | None = None
    """JSONL with held-out problems. null: the task's own source, or a part of train_file."""
    special_tokens: bool = False
    """Include special tokens, such as answer tags, in the text that rewards, environments and samples see. An
    end-of-sequence token at the end is always left out."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task."""

    @field_validator("reward", mode="before")
    @classmethod
    def _by_name(cls, reward: object) -> object:
        """Turn the short forms, a single reward or ``module:function``, into rewards by name."""
        if isinstance(reward, str) or _is_one_reward(reward):
            reward = {"reward": reward}
        if isinstance(reward, dict):
            return {name: {"function": it} if isinstance(it, str) else it for name, it in reward.items()}
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
    """S: completions sampled per prompt; at least train.completions_per_prompt."""
    temperature: Positive = 0.7
    """Sampling temperature in training. Evaluation is greedy, unless the task has its own temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling. Below 1 objectives lose their guarantee, since some completions
    are never sampled."""
    tempered_range: tuple[float, float] | None = None
    """Range [low, high] from which half of the training requests draw their temperature uniformly. null: all
    use ``temperature``."""
    max_tokens: Count = 512
    """Maximum completion length, in tokens."""
    min_tokens: int = Field(0, ge=0)
    """Minimum completion length in training, in tokens."""
    stop: tuple[Text, ...] = ()
    """Strings, including special tokens, that end a completion in training and evaluation. The completion
    contains the whole token that completes the string; no end-of-sequence token follows."""
    prompts_in_flight: MayChange[Count] = 16
    """Concurrent prompts in a searcher's engine. Multiplied by completions_per_prompt, this is the number of
    concurrent completions; 250 to 500 keep a GPU busy."""
    kv_cache_mb: MayChange[Count | None] = None
    """KV cache on each GPU of the engine, MiB: set it if other ranks start on the same GPU. null: what
    gpu_memory_utilization leaves when the engine starts."""
    gpu_memory_utilization: MayChange[float] = Field(0.85, gt=0, le=1)
    """Share of GPU memory for the engine. It must be free when the engine starts, even with kv_cache_mb.
    Leave room for the reference."""
    tensor_parallel: MayChange[Count] = 1
    """GPUs per engine; must divide the number of attention heads."""
    keep_kv: MayChange[bool] = False
    """Keep the KV cache of unfinished completions when weights change. This is faster, but later tokens
    attend to keys and values of older weights. Recorded log-probabilities reflect that."""
    engine: MayChange[Annotated[dict[str, Any], AfterValidator(rules.check_engine_arguments)]] = Field(
        default_factory=dict
    )
    """Additional vLLM EngineArgs, such as ``quantization: fp8``. Arguments that other keys set are refused.
    ``tba plan`` ignores this key."""


class BufferSection(Section):
    most_on_policy: Share = 0.5
    """m, the probability that a group's completions are from the most recent sync."""
    capacity_per_prompt: MayChange[Count] = 100
    """Maximum number of trajectories per prompt; the oldest are evicted first. In a queue (see replay_limit)
    the default is capacity."""
    capacity: MayChange[Count] = 100_000
    """Maximum number of trajectories; the oldest are evicted first. A queue needs room for
    (exchange.max_staleness + 1) · train.prompts_per_step groups."""
    reward_temperature: Positive | None = 1.0
    """Temperature of the softmax over rewards by which a prompt's completions are drawn. null: draw them
    uniformly, the default in on-policy runs (exchange.max_staleness=0 with a policy gradient)."""
    initial_completions: Count = 500
    """Completions in the buffer before the first step, unless exchange.max_staleness is set. At most
    capacity_per_prompt times the number of training prompts."""
    duplicates: Duplicates = EqualDuplicates()
    """Rule by which completions of a prompt are duplicates. If unset: none in on-policy runs, else equal."""
    replay_limit: Count | None = None
    """Number of steps that may learn from a trajectory before it is evicted; null: no limit. The rest of its
    prompt's trajectories leave, too, if they are too few for a group; the trainer waits while too few prompts
    remain for a step. With exchange.max_staleness this makes the buffer a queue: completions of the oldest
    weights are used first, most_on_policy is ignored, and a step waits for unfinished completions that would
    otherwise become too stale."""

    @property
    def deduplicate(self) -> bool:
        """True if equal completions of a prompt are stored once."""
        return not isinstance(self.duplicates, NoDuplicates)

    @property
    def embedding_model(self) -> str | None:
        """Sentence encoder, if duplicates are found by embeddings, else None."""
        return self.duplicates.model if isinstance(self.duplicates, EmbeddingDuplicates) else None

    @property
    def chooses_by_reward(self) -> bool:
        """True if completions with higher rewards may be drawn more often."""
        return self.reward_temperature is not None and self.most_on_policy < 1


class LearningRate(Section):
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or a decay to zero."""
    peak: Positive = 1e-5
    """Highest learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    decay: MayChange[tuple[int, int] | None] = None
    """First and last step of the decay, such as [400, 1000]; the run may end during it. null: from the end of
    the warm-up to train.steps."""

    @model_validator(mode="before")
    @classmethod
    def _peak_alone(cls, value: object) -> object:
        """Accept a plain number as a constant rate."""
        return {"peak": value} if isinstance(value, int | float | str) else value


def _schedule(value: Any, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    """Turn a number, or numbers by step, into pairs (step, value) in order of steps."""
    try:
        pairs = sorted(value.items()) if isinstance(value, dict) else value
        pairs = [(0, value)] if isinstance(pairs, str | int | float) else pairs
        points = tuple((int(step), float(number)) for step, number in pairs)
    except (TypeError, ValueError):
        points = ()
    steps = [step for step, _ in points]
    if steps[:1] != [0] or steps != sorted(set(steps)) or not all(0 < it < math.inf for _, it in points):
        raise ValueError(
            f"train.{info.field_name}={value} is not a schedule: leave it out, or set it to a number above "
            "0, or to numbers by step from 0 on, such as {0: 1.0, 128: 0.05}"
        )
    return points


def _shortest(points: tuple[tuple[int, float], ...]) -> float | list[list[float]]:
    return points[0][1] if len(points) == 1 else [list(point) for point in points]


Schedule = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_schedule),
    PlainSerializer(_shortest, Any, when_used="always"),
]
"""A positive number as a function of the step: pairs (step, value), linear between them, then constant."""


class TrainSection(Section):
    objective: ObjectiveChoice = TrajectoryBalance()
    """The loss: trajectory balance, TBA′, OAPL, a policy gradient, or your own function."""
    ratio_bound: RatioBound = Unbounded()
    """Weights on each token's gradient, which limit the influence of stale data and leave TB's optimum the
    same. If unset: taper with trajectory_balance and tba_prime, else none. Not for objectives that bound
    stale data themselves."""
    score_centering: int = Field(0, ge=0)
    """Number k of recorded tokens for score centering (arXiv 2609.20807), such as 32; 0: off. It subtracts
    from each token's score ∇log π_θ the mean score under the sampling policy, so that old data of constant
    advantage have no effect on average. Recording that policy's k likeliest tokens takes 6·k bytes per
    completion token; all others count as one. Not for objectives that bound stale data themselves."""
    reference: ReferenceChoice = FrozenReference()
    """Reference policy π_ref. If unset: behaviour with oapl, else frozen."""
    loss_normaliser: LossNormaliser | None = None
    """Divisor of a completion's summed token losses: none (sum), its length (completion_tokens), the batch's
    mean length (batch_tokens) or generator.max_tokens (max_tokens). null: completion_tokens for GRPO, else
    sum, as published."""
    steps: MayChange[Count] = 1000
    """Number of optimizer steps. It may be raised, even after the run has finished, or lowered to a step not
    yet passed; a decaying learning rate follows."""
    prompts_per_step: Count = 8
    """B: groups per optimizer step."""
    completions_per_prompt: int = Field(20, ge=2)
    """K: trajectories per group."""
    tokens_per_micro_batch: MayChange[Count | None] = None
    """Maximum number of tokens per forward and backward pass, at least model.context_length. A group's prompt
    counts once. If a layer lacks full attention, sequences are padded, and padding counts. A group that
    exceeds the limit is split, and computed twice. null: the tokens whose activations fill 8 GiB on a GPU
    (1 GiB on a CPU), at most 32k, but at least the step's largest group."""
    learning_rate: LearningRate = LearningRate()
    """Learning-rate schedule; a number is a constant rate."""
    beta: Schedule = Field(0.1, validate_default=True)
    """β of the target policy π* ∝ π_ref·exp(r/β): a number, or a schedule of values by step such as
    {0: 1.0, 128: 0.05}, linear between them and constant after the last."""
    target_temperature: Schedule = Field(1.0, validate_default=True)
    """T in the target π* ∝ [π_ref^(1/γ)·exp(r/β)]^(1/T): the higher, the flatter. A number or a schedule."""
    reference_temperature: Schedule = Field(1.0, validate_default=True)
    """γ in the target of target_temperature: the higher, the less π_ref weighs. A number or a schedule."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's β₁ and β₂."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    gradient_clip: Positive | None = 1.0
    """Maximum global gradient norm of the normalised loss. null: no clipping."""
    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO stage of DeepSpeed, which shards over trainer ranks the optimizer state (1), also gradients (2),
    also weights (3)."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass: less memory, more time."""
    deepspeed: MayChange[Annotated[dict[str, Any], AfterValidator(rules.check_deepspeed_settings)]] = Field(
        default_factory=dict
    )
    """Additional DeepSpeed settings; those that other keys set are refused. {zero_optimization:
    {offload_optimizer: {device: cpu}}} keeps AdamW's state and master weights in host memory."""

    @property
    def searcher_has_reference(self) -> bool:
        """True if searchers hold a model of the reference and score completions with it."""
        return isinstance(self.reference, ModelReference) and self.reference.scored_by == "searcher"

    @property
    def trainer_has_reference(self) -> bool:
        """True if the trainer holds a model of the reference and scores completions with it."""
        return isinstance(self.reference, ModelReference) and self.reference.scored_by == "trainer"

    @property
    def value_beta(self) -> float | None:
        """Coefficient β₁ of OAPL's values; None for every other objective."""
        return (self.objective.value_beta or self.beta[0][1]) if isinstance(self.objective, Oapl) else None

    @property
    def offloads_optimizer(self) -> bool:
        """True if DeepSpeed keeps AdamW's state and the master weights off the GPU."""
        offload = (self.deepspeed.get("zero_optimization") or {}).get("offload_optimizer") or {}
        return offload.get("device", "none") != "none"

    @property
    def normaliser(self) -> LossNormaliser:
        """Normaliser in use: ``loss_normaliser``, or the objective's own if that is unset."""
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
"""Default max_staleness of a queue, in steps. At about this bound engines are as busy as without one, and the
data are nearly as useful as fresh data."""


class ExchangeSection(Section):
    transport: Literal["mpi", "files"] = "mpi"
    """Transport of weights and shards. mpi: one MPI world of the run's ranks. files: a shared file system."""
    sync_every: Count = 2
    """k, the number of optimizer steps between syncs."""
    max_staleness: int | None = Field(None, ge=0)
    """Maximum number of steps between the weights that sample a trajectory and those that learn from it.
    Trainer and searchers wait for each other to respect it. 0: on-policy. null: no bound, as in TBA. If
    unset: null, but with buffer.replay_limit=1 the larger of 8 and 2k − 1."""
    seal_seconds: MayChange[Positive] = 2.0
    """Maximum time until a finished completion is sealed on disk, s. With more than 64 searchers it is
    multiplied by searchers/64."""
    keep_shards: MayChange[Share] = 0.0
    """Share of merged shards kept in RUN/kept for ``tba samples``, evenly over the run. ``tba replay`` needs
    all of them (1)."""


class CheckpointSection(Section):
    every: MayChange[Count] = 100
    """Optimizer steps between checkpoints."""
    keep: MayChange[Count] = 2
    """Number of complete checkpoints to keep."""


class EvaluateSection(Section):
    every: MayChange[Count] = 50
    """Optimizer steps between evaluations on the validation split."""
    validation_prompts: MayChange[int] = Field(128, ge=0)
    """Number of validation prompts used; 0: none."""
    test_prompts: MayChange[Count | None] = None
    """Number of held-out prompts evaluated before the first and after the last step. null: all."""


class TrackSection(Section):
    """Trackers, fed by a separate process on the leading trainer's node; see also ``tba track``."""

    wandb: MayChange[Text | None] = None
    """Weights & Biases project; null: none. All resumes log to the same W&B run, and W&B's environment
    variables work as usual."""
    tensorboard: MayChange[bool] = False
    """Write event files to RUN/track/tensorboard."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the trackers that are switched on."""
        asked = {"wandb": self.wandb is not None, "tensorboard": self.tensorboard}
        return tuple(name for name, wanted in asked.items() if wanted)


FIRST_ELASTIC = 5000
"""Number of the first elastic searcher; searchers that start with the run have lower numbers. The gap leaves
room for launch.searchers to change while an elastic searcher keeps its number."""

Ranks = Annotated[int, Field(ge=0, lt=FIRST_ELASTIC)]


class LaunchSection(Section):
    trainers: MayChange[Count] = 1
    """Trainer ranks, one per GPU."""
    searchers: MayChange[Ranks] = 1
    """Searcher ranks, one engine each, that start and end with the trainer. 0: only elastic searchers."""
    elastic: MayChange[Ranks] = 0
    """Slots for elastic searchers, which ``tba search RUN`` starts at any time on any machine that sees the
    run directory. The prompts of an empty slot wait."""
    timeout_seconds: MayChange[Positive] = 600.0
    """Maximum wait for another rank, s; then the run ends and names it. Starts may take three times as long,
    and elastic searchers wait six times as long for a queued trainer. After half this time a silent engine is
    replaced, a full disk ends the run, and a reward's call is abandoned."""

    @property
    def start_seconds(self) -> float:
        """Longest start of a rank (imports, joining the others, loading models) or of an engine, s."""
        return 3 * self.timeout_seconds

    @property
    def elastic_seconds(self) -> float:
        """Longest time that an elastic searcher waits for a queued trainer, s."""
        return 6 * self.timeout_seconds

    @property
    def silence_seconds(self) -> float:
        """Longest silence of a busy engine before it is replaced, and longest call of a reward, s."""
        return self.timeout_seconds / 2

    @property
    def stack_seconds(self) -> float:
        """Longest time between a loop's checks for a stop before its rank writes its stack traces, s.

        It is shorter than the time after which other ranks give up on that rank.
        """
        return 0.8 * self.silence_seconds

    @property
    def disk_seconds(self) -> float:
        """Longest wait on a full disk, s: half the timeout, so that no other rank gives up first."""
        return self.timeout_seconds / 2

    @property
    def places(self) -> int:
        """Number of searchers, present or not, among which requests are divided."""
        return self.searchers + self.elastic

    def place_of(self, searcher: int) -> int:
        """Return a searcher's place p: it takes the requests with id ≡ p (mod ``places``)."""
        return searcher if searcher < FIRST_ELASTIC else self.searchers + searcher - FIRST_ELASTIC

    @property
    def elastic_searchers(self) -> range:
        """Numbers of the elastic searchers."""
        return range(FIRST_ELASTIC, FIRST_ELASTIC + self.elastic)


def is_elastic(searcher: int) -> bool:
    """Return whether the searcher with this number is elastic."""
    return searcher >= FIRST_ELASTIC


class Config(Section):
    """Configuration of a run. See each section for its keys."""

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
        """True if trajectories may be evicted for their age, reference or uses, not only for lack of room."""
        limited = self.buffer.replay_limit is not None
        reset = isinstance(self.train.reference, ResetReference)
        return limited or self.exchange.max_staleness is not None or reset

    @property
    def queue(self) -> bool:
        """True if the buffer is a queue: steps use the completions of the oldest weights first."""
        return self.buffer.replay_limit is not None and self.exchange.max_staleness is not None

    @property
    def groups_ahead(self) -> int:
        """Number of groups that searchers may generate ahead of the trainer; needs exchange.max_staleness."""
        assert self.exchange.max_staleness is not None, "without a bound there is no limit"
        return (self.exchange.max_staleness + 1) * self.train.prompts_per_step

    @property
    def one_world(self) -> bool:
        """True if trainer and searcher ranks form one MPI world."""
        return self.exchange.transport == "mpi" and self.launch.searchers > 0

    @property
    def on_policy(self) -> bool:
        """True if every step is a policy gradient on samples of the current policy."""
        return self.exchange.max_staleness == 0 and self.train.objective.policy_gradient

    @model_validator(mode="after")
    def _check_and_settle(self) -> Config:
        """Refuse a contradictory config, then fill in unset keys whose defaults depend on other keys."""
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
