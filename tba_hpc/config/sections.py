"""The sections of a config: every key with its type, default and meaning. Imports no heavy library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tba_hpc.config import rules
from tba_hpc.config.variants import (
    BehaviourIsReference,
    Duplicates,
    EditDuplicates,
    EmbeddingDuplicates,
    EqualDuplicates,
    FrozenReference,
    LossNormaliser,
    NoDuplicates,
    Oapl,
    ObjectiveChoice,
    RatioBound,
    RatioTaper,
    ReferenceChoice,
    ResetReference,
    Section,
    TrajectoryBalance,
    Unbounded,
)

Dtype = Literal["float32", "bfloat16"]
T = TypeVar("T")

MAY_CHANGE = "may change"

MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that a resume may change: how long, where and with what a run goes on, not what it learns."""


class RunSection(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; part of the default run directory."""
    root: MayChange[str] = "runs"
    """Folder in which run directories are made."""
    seed: int = Field(0, ge=0)
    """Seed of everything random: prompt order, sampling, replay."""


class LoraSection(Section):
    """LoRA: the weights W of the policy are frozen; trained, published and checkpointed is an adapter s·B·A
    beside each, s = alpha/rank. There is no dropout: log-probabilities must be the sampler's."""

    rank: int = Field(16, ge=1)
    """r: rows of A, columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapter times its rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(None, min_length=1)
    """Linear layers that get an adapter: names, or ends of paths, such as q_proj or self_attn.q_proj. null:
    all but the output layer."""


class ModelSection(Section):
    path: str = Field(min_length=1)
    """Folder or hub name of the policy to start from, also the reference; or ``module:Class`` of your own, as
    tba_hpc.core.ports.Backend says."""
    dtype: Dtype = "bfloat16"
    """Type of the weights in training, in the exchange and in the engines (master weights are float32)."""
    context_length: int = Field(1024, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""
    logprob_temperature: float | None = Field(None, gt=0)
    """T of the policy, softmax(logits/T): log-probabilities of policy, reference and sampler are taken at it,
    whatever the sampling temperature. Left out: 1, but generator.temperature with an objective that needs
    samples of the very policy it trains (oapl, rloo, proximal_rloo, grpo, dr_grpo, gspo, topr)."""
    fp32_head: bool = True
    """Whether bfloat16 logits are computed in float32, in learner, reference and engine alike, so that their
    log-probabilities differ less. float32 weights always have float32 logits."""
    lora: LoraSection | None = None
    """Train a LoRA adapter; {} takes its defaults. null: train all weights."""

    @property
    def policy_temperature(self) -> float:
        """T: ``logprob_temperature``, 1 if none is given."""
        return self.logprob_temperature or 1.0


class RewardSection(Section):
    """One of a task's rewards: a function of yours, a judge behind a URL, or a program."""

    function: str | None = None
    """``module:function`` of your own; tba_hpc.tasks.rewards says what it is given. Beside the config, in the
    folder of the command, or installed."""
    url: MayChange[str | None] = None
    """Address of a judge, which gets a JSON POST for each completion. With ``model``, an OpenAI-style chat
    endpoint in full, such as http://host:8000/v1/chat/completions."""
    program: tuple[str, ...] | None = Field(None, min_length=1)
    """Words of a command, run once for each completion without a shell; ``python`` is the run's interpreter,
    and files are looked for where functions are. Only its time and memory are limited (docs/own-task.md)."""
    weight: float = 1.0
    """Factor of this reward in the sum of all rewards."""
    model: str | None = None
    """Name of the judge's model; the judge is then asked by chat, and the last number it writes counts."""
    prompt: str | None = None
    """What such a judge is asked: a text with {completion}, and {field} for fields of the row."""
    key_variable: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable of the searchers that holds the judge's key; the key itself is written nowhere."""
    seconds: MayChange[float] = Field(30.0, gt=0)
    """Timeout of one answer of a judge, or one run of a program, s."""
    concurrency: MayChange[int] = Field(8, ge=1)
    """Requests to the judge, or programs, that a searcher runs at once (count)."""
    memory_mb: int = Field(1024, ge=16)
    """Address space of each process of a program, MiB."""
    when_killed: float | None = None
    """Reward of a completion whose program ran past ``seconds`` or was killed. null: it is set aside."""

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        rules.check_reward(self)
        return self


class TaskSection(Section):
    name: str = "gsm8k"
    """A task of tba_hpc.tasks, or ``module:Class`` of your own, beside the config, in the folder of the
    command, or installed."""
    reward: dict[str, RewardSection] = Field(default_factory=dict)
    """Rewards of a task that takes them from you (jsonl): ``module:function``, or several rewards by name,
    which are added up by their weights."""
    train_file: str | None = None
    """Local JSONL with the training problems. null: the task's own source (hub or generator)."""
    test_file: str | None = None
    """Local JSONL with the held-out problems. null: the task's own source, or a slice of train_file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task's own."""

    @field_validator("reward", mode="before")
    @classmethod
    def _by_name(cls, reward: object) -> object:
        """``module:function`` is short for one reward, and for one of several."""
        if isinstance(reward, str):
            reward = {"reward": reward}
        if isinstance(reward, dict):
            return {name: {"function": it} if isinstance(it, str) else it for name, it in reward.items()}
        return reward


class GeneratorSection(Section):
    completions_per_prompt: int = Field(24, ge=1)
    """S: completions sampled per prompt; at least the K that are trained on."""
    temperature: float = Field(0.7, gt=0)
    """Sampling temperature in training; evaluation is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; below 1 the sampler lacks full support, and the objective its guarantee."""
    tempered_share: float = Field(0.0, ge=0, le=1)
    """Share of the training prompts whose completions are sampled at a temperature of tempered_range."""
    tempered_range: tuple[float, float] = (0.5, 2.0)
    """Lowest and highest of these temperatures, drawn uniformly for each prompt."""
    max_tokens: int = Field(512, ge=1)
    """Longest completion, in tokens."""
    min_tokens: int = Field(0, ge=0)
    """Shortest training completion, in tokens: it cannot end before."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts (special tokens too) that end a completion, in training and evaluation. They belong to it, up to
    the token that completes the text; no end-of-sequence token follows or is in its log-probability."""
    prompts_in_flight: MayChange[int] = Field(8, ge=1)
    """Prompts that a searcher's engine works on at once."""
    kv_cache_mb: MayChange[int | None] = Field(None, ge=1)
    """Memory of the engine's KV cache on each of its GPUs, MiB. null: what gpu_memory_utilization leaves when
    the engine is built, which is wrong if other ranks on the same GPU start meanwhile."""
    gpu_memory_utilization: MayChange[float] = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory for the engine; leave room for the reference policy beside it. That much must
    be free when the engine starts, even if kv_cache_mb is set."""
    tensor_parallel: MayChange[int] = Field(1, ge=1)
    """GPUs per engine; it must divide the model's attention heads."""
    keep_kv: MayChange[bool] = False
    """Whether completions in flight keep their KV cache when weights change, instead of recomputing it:
    faster, but what follows is sampled by the new weights over keys and values of older ones. Versions and
    log-probabilities are those of that sampling. Completions that begin later never meet an older cache."""
    engine: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Arguments of vLLM's engine (EngineArgs), passed on as they are, such as ``quantization: fp8`` or
    ``max_num_batched_tokens: 16384``; none that another key sets. ``tba plan`` does not know them."""

    @field_validator("engine")
    @classmethod
    def _leave_ours_alone(cls, engine: dict[str, Any]) -> dict[str, Any]:
        rules.check_engine_arguments(engine)
        return engine


class BufferSection(Section):
    most_on_policy: float = Field(0.5, ge=0, le=1)
    """m: probability that a group is taken from what arrived at the most recent sync."""
    oldest_first: bool | None = None
    """Whether a step takes the completions of the oldest weights, as a queue, instead of by most_on_policy.
    With exchange.max_staleness it waits for those that would be too stale for any later step, so none is
    dropped for its age and long answers are learned from, too. Needs replay_limit. Left out: true if that
    and max_staleness are set."""
    capacity_per_prompt: int = Field(100, ge=1)
    """Trajectories kept per prompt; the oldest leave first."""
    capacity: int = Field(100_000, ge=1)
    """Trajectories kept in all; the oldest leave first."""
    reward_temperature: float | None = Field(1.0, gt=0)
    """Temperature of the softmax over reward inside a prompt. null: uniform, the default of on-policy runs
    (exchange.max_staleness=0 with a policy gradient)."""
    initial_completions: int = Field(500, ge=1)
    """Completions in the buffer before the first step (without max_staleness); no more are waited for than
    capacity_per_prompt allows for all training prompts."""
    duplicates: Duplicates = EqualDuplicates()
    """Which completions of a prompt count as duplicates, of which one is kept. Left out: equal, but none in
    on-policy runs (see reward_temperature)."""
    replay_limit: int | None = Field(None, ge=1)
    """Steps that may learn from a trajectory; then it is evicted, and with it the rest of its prompt if less
    than a group is left. The trainer waits if fewer prompts than a step needs are left. null: no limit."""
    max_age_steps: int | None = Field(None, ge=1)
    """Largest age on arrival, in steps since the weights that sampled a trajectory; older ones are dropped
    and counted. null: no limit. (exchange.max_staleness limits the age in use.)"""

    @property
    def deduplicate(self) -> bool:
        """Whether equal completions of a prompt are stored once."""
        return not isinstance(self.duplicates, NoDuplicates)

    @property
    def near_duplicates(self) -> float | None:
        """Share of edited tokens below which completions are duplicates; None if edits do not count."""
        return self.duplicates.limit if isinstance(self.duplicates, EditDuplicates) else None

    @property
    def similarity_limit(self) -> float | None:
        """Cosine of embeddings above which completions are duplicates; None if embeddings do not count."""
        return self.duplicates.limit if isinstance(self.duplicates, EmbeddingDuplicates) else None

    @property
    def embedding_model(self) -> str | None:
        """The sentence encoder, if embeddings count."""
        return self.duplicates.model if isinstance(self.duplicates, EmbeddingDuplicates) else None

    @property
    def chooses_by_reward(self) -> bool:
        """Whether a group may prefer some completions of its prompt to others."""
        return self.reward_temperature is not None and self.most_on_policy < 1


class LearningRate(Section):
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or a decay to zero that ends at the horizon."""
    peak: float = Field(1e-5, gt=0)
    """Highest learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = Field(None, ge=1)
    """Steps of the decay; before it the rate is constant. null: all that follow the warm-up."""
    by_ess: bool = False
    """Whether the rate is multiplied by √ESS, the batch's effective sample size as a share (train/ess): the
    further a batch is from the policy, the shorter the step (VCPO, arXiv 2602.17616)."""


def _schedule(value: Any, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    """A number, or numbers by step, as pairs (step, value) in order of steps."""
    try:
        pairs = sorted(value.items()) if isinstance(value, dict) else value
        pairs = pairs if isinstance(pairs, Sequence) else [(0, value)]
        points = tuple((int(step), float(number)) for step, number in pairs)
    except (TypeError, ValueError):
        points = ()
    steps = [step for step, _ in points]
    if steps[:1] != [0] or steps != sorted(set(steps)) or not all(0 < it < math.inf for _, it in points):
        raise ValueError(
            f"train.{info.field_name}={value} is not a schedule: set it to a number above 0, or to numbers "
            "by step from 0 on, such as {0: 1.0, 128: 0.05}"
        )
    return points


def _shortest(points: tuple[tuple[int, float], ...]) -> float | list[list[float]]:
    return points[0][1] if len(points) == 1 else [list(point) for point in points]


Schedule = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_schedule),
    PlainSerializer(_shortest, Any, when_used="always"),
]
"""A positive number as a function of the step: pairs (step, value), linear in between, constant after."""


def _constant(value: float) -> Any:
    """Default of a Schedule."""
    return Field(value, validate_default=True)


class TrainSection(Section):
    objective: ObjectiveChoice = TrajectoryBalance()
    """The loss: trajectory balance (TB), TBA′, OAPL, a baseline, or a function of your own."""
    ratio_bound: RatioBound = Unbounded()
    """Limit on what stale data may pull: a weight of each token's gradient. It does not move TB's optimum,
    where all residuals are 0. Left out: taper with trajectory_balance and tba_prime, else none. Not for
    objectives with a bound of their own (proximal_rloo, grpo, dr_grpo, gspo, topr) or pairs (online_dpo)."""
    reference: ReferenceChoice = FrozenReference()
    """π_ref. Left out: frozen, but behaviour with oapl."""
    loss_normaliser: LossNormaliser | None = None
    """What a completion's loss, summed over its tokens, is divided by: nothing (sum), its own tokens, the
    mean number of tokens of the batch's completions, or generator.max_tokens. null: as the objective was
    published, completion_tokens for GRPO and sum for the others."""
    steps: MayChange[int] = Field(1000, ge=1)
    """Optimizer steps in all. A run may go on to more, even when finished, or end earlier, but not before the
    step it has reached. A decaying learning rate is then laid out anew; the last step resets no reference."""
    horizon: MayChange[int | None] = Field(None, ge=1)
    """Step at which the learning rate has decayed; a run may end before. null: steps."""
    prompts_per_step: int = Field(8, ge=1)
    """B: groups per optimizer step."""
    completions_per_prompt: int = Field(20, ge=2)
    """K: trajectories per group."""
    groups_per_micro_batch: int = Field(1, ge=1)
    """Groups per forward and backward pass on a rank; memory against speed."""
    tokens_per_micro_batch: MayChange[int | None] = Field(None, ge=1)
    """Most tokens of such a pass, in place of groups_per_micro_batch: prompts, completions and padding as
    computed, a prompt once for the completions that share its row. Larger groups are split, and computed once
    more without gradient for what their completions share, so memory does not depend on
    completions_per_prompt. At least model.context_length. null: by groups."""
    learning_rate: LearningRate = LearningRate()
    """Learning rate as a function of the step."""
    beta: Schedule = _constant(0.1)
    """β of the target π* ∝ π_ref·exp(r/β): a number, or numbers by step, linear in between and constant after
    the last, such as {0: 1.0, 128: 0.05}."""
    target_temperature: Schedule = _constant(1.0)
    """T: tempers the whole target, π* ∝ [π_ref^(1/γ)·exp(r/β)]^(1/T); above 1 it is flatter. As beta."""
    reference_temperature: Schedule = _constant(1.0)
    """γ: tempers the reference in it; above 1 fluency counts less. As beta."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm, of the loss as loss_normaliser scales it. null: no limit."""
    zero_stage: Literal[1, 2, 3] = 2
    """What DeepSpeed shards over the trainer ranks: 1 optimizer, 2 and gradients, 3 and weights."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass: memory against speed."""
    deepspeed: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Settings of DeepSpeed under its own names, merged into the learner's; none that another key decides.
    {zero_optimization: {offload_optimizer: {device: cpu}}} keeps AdamW's state and the float32 master weights
    in host memory."""

    @property
    def reference_scored_by(self) -> Literal["searcher", "trainer"] | None:
        """Which rank computes log π_ref with a model of the reference; None if there is no such model."""
        match self.reference:
            case FrozenReference(scored_by=rank) | ResetReference(scored_by=rank):
                return rank
            case _:
                return None

    @property
    def searcher_has_reference(self) -> bool:
        """Whether searchers hold a model of the reference."""
        return self.reference_scored_by == "searcher"

    @property
    def trainer_has_reference(self) -> bool:
        """Whether the trainer scores each trajectory once by a model of the reference."""
        return self.reference_scored_by == "trainer"

    @property
    def value_beta(self) -> float | None:
        """β₁ of OAPL's values; None for every other objective."""
        return (self.objective.value_beta or self.beta[0][1]) if isinstance(self.objective, Oapl) else None

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
    def _leave_ours_alone(cls, settings: dict[str, Any]) -> dict[str, Any]:
        rules.check_deepspeed_settings(settings)
        return settings

    @model_validator(mode="after")
    def _settle(self) -> TrainSection:
        """Fill in what follows from the objective."""
        if "ratio_bound" not in self.model_fields_set and self.objective.tapered:
            object.__setattr__(self, "ratio_bound", RatioTaper())
        if "reference" not in self.model_fields_set and isinstance(self.objective, Oapl):
            object.__setattr__(self, "reference", BehaviourIsReference())
        return self


QUEUE_STALENESS = 8
"""Steps: at about that age engines are as busy as without a bound, and data teach nearly as fast as fresh."""


class ExchangeSection(Section):
    transport: Literal["mpi", "files"] = "mpi"
    """mpi: broadcast and gather in one world, for the run's own searchers (launch.searchers). files: the
    shared file system."""
    sync_every: int = Field(2, ge=1)
    """k: optimizer steps between two syncs."""
    max_staleness: int | None = Field(None, ge=0)
    """Most steps between the weights that sampled a trajectory and those that learn from it: the trainer
    waits for fresh ones, searchers for newer weights. 0: synchronous, on-policy. null: no bound, as in TBA.
    Left out: null; but 8, or 2k − 1 if that is more, if buffer.replay_limit=1 and launch.elastic=0."""
    max_steps_without_data: MayChange[int | None] = Field(
        default_factory=lambda exchange: max(50, 5 * int(exchange["sync_every"])), ge=1
    )
    """Most steps on the replay buffer alone since the last shard, or since a resume; then the trainer waits
    for one. Left out: five syncs, but at least 50. null: no limit."""
    seal_seconds: MayChange[float] = Field(2.0, gt=0)
    """Longest time that a finished completion waits before it is sealed on disk, s. Beyond 64 searchers it is
    searchers/64 times that, so that a run of any size has as many files."""
    delta: MayChange[Literal["auto", "always", "never"]] = "auto"
    """Whether weights travel as their changes, exact to the bit, if that is less; never within a node, where
    they lie once in shared memory. auto: bfloat16, between nodes if it was quicker of late, and over files,
    which takes memory for two more copies at the trainer (one rank) and one per searcher. always: at any
    cost. never: whole each time."""
    keep_shards: MayChange[float] = Field(0.0, ge=0, le=1)
    """Share of the merged shards kept in RUN/kept, evenly over the run, for ``tba samples``. 1: all; 0: none,
    they are deleted once no resume needs them."""
    keep_shards_mb: MayChange[int | None] = Field(1024, ge=1)
    """Most room for these, MiB: beyond it every second of them goes, over the whole run. null: no bound."""


class CheckpointSection(Section):
    every: MayChange[int] = Field(100, ge=1)
    """Optimizer steps between checkpoints."""
    keep: MayChange[int] = Field(2, ge=1)
    """Complete checkpoints kept."""
    snapshot: MayChange[str | None] = "memory"
    """Where trainer ranks copy their state to, so that training goes on while it is written: "memory" (if
    twice the checkpoint's bytes are not free, training waits for the disk), or a folder on a disk of each
    node. null: nowhere; training waits until all is written."""


class EvaluateSection(Section):
    every: MayChange[int] = Field(50, ge=1)
    """Optimizer steps between evaluations on the validation split."""
    validation_prompts: MayChange[int] = Field(128, ge=0)
    """Prompts of the validation split used for these; 0: none."""
    test_prompts: MayChange[int | None] = Field(None, ge=1)
    """Held-out prompts evaluated before the first and after the last step. null: all."""


class WandbSection(Section):
    project: MayChange[str] = Field(min_length=1)
    """Project in Weights & Biases."""
    entity: MayChange[str | None] = None
    """User or team. null: the default of the key, which WANDB_API_KEY or ``wandb login`` gives."""
    group: MayChange[str | None] = None
    """Group of runs there, such as an experiment's."""
    mode: MayChange[Literal["online", "offline"]] = "online"
    """online: to the server, live. offline: to RUN/track/wandb, for ``wandb sync`` later."""


class TrackSection(Section):
    """Trackers that follow the run, by a process beside the leading trainer; see also ``tba track``."""

    wandb: MayChange[WandbSection | None] = None
    """A run in Weights & Biases, one however often it is resumed. null: none."""
    tensorboard: MayChange[bool] = False
    """Write steps, searchers' means and scores of evaluations to RUN/track/tensorboard."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The trackers that are asked for."""
        asked = {"wandb": self.wandb is not None, "tensorboard": self.tensorboard}
        return tuple(name for name, wanted in asked.items() if wanted)


FIRST_ELASTIC = 5000
"""Number of the first elastic searcher; below are the run's own. Kept apart, because launch.searchers may
change while an elastic one goes on under its number."""


class LaunchSection(Section):
    trainers: MayChange[int] = Field(1, ge=1)
    """Trainer ranks, one per GPU."""
    searchers: MayChange[int] = Field(1, ge=0, lt=FIRST_ELASTIC)
    """Searcher ranks, one engine each, that start and end with the trainer; 0: only elastic ones."""
    elastic: MayChange[int] = Field(0, ge=0, lt=FIRST_ELASTIC)
    """Places for elastic searchers, which come and go while the run trains, each started by ``tba search
    RUN`` on any machine that sees the run directory. Prompts of an empty place wait for who comes."""
    timeout_seconds: MayChange[float] = Field(600.0, gt=0)
    """Longest wait for another rank at work, s; then the run ends and says who is missing. Starting a rank or
    an engine may take three times as long, and an elastic searcher waits six times as long for a trainer in
    the queue. An engine silent for half of it is replaced; a full disk is waited for half of it."""

    @property
    def start_seconds(self) -> float:
        """Longest start of a rank (imports, joining the others, its model) or of an engine."""
        return 3 * self.timeout_seconds

    @property
    def elastic_seconds(self) -> float:
        """Longest wait of an elastic searcher for a trainer that is in the queue."""
        return 6 * self.timeout_seconds

    @property
    def silence_seconds(self) -> float:
        """Longest silence of an engine at work; then it is killed and built anew."""
        return self.timeout_seconds / 2

    @property
    def disk_seconds(self) -> float:
        """How long a full disk is waited for: half the timeout, so that nobody else gives up first."""
        return self.timeout_seconds / 2

    @property
    def places(self) -> int:
        """Among how many searchers, there or not, the requests of a run are shared out."""
        return self.searchers + self.elastic

    def place_of(self, searcher: int) -> int:
        """Place of a searcher among these: it asks the requests whose number leaves this rest."""
        return searcher if searcher < FIRST_ELASTIC else self.searchers + searcher - FIRST_ELASTIC

    @property
    def elastic_searchers(self) -> range:
        """Numbers of the elastic searchers."""
        return range(FIRST_ELASTIC, FIRST_ELASTIC + self.elastic)


def is_elastic(searcher: int) -> bool:
    """Whether the searcher of this number is elastic."""
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
        """Whether trajectories are evicted for more than lack of room: for age, reference, or uses."""
        limited = self.buffer.replay_limit is not None
        reset = isinstance(self.train.reference, ResetReference)
        return limited or self.exchange.max_staleness is not None or reset

    @property
    def one_world(self) -> bool:
        """Whether the ranks of a start make one MPI world."""
        return self.exchange.transport == "mpi" and self.launch.searchers > 0

    @property
    def on_policy(self) -> bool:
        """Whether every step is a policy gradient on samples of its own policy."""
        return self.exchange.max_staleness == 0 and self.train.objective.policy_gradient

    @model_validator(mode="after")
    def _check_and_settle(self) -> Config:
        """Refuse what contradicts itself, then fill in keys left out that follow from others."""
        rules.check(self)
        if self.model.logprob_temperature is None:
            sampled = self.train.objective.own_samples
            self._fill("model", logprob_temperature=self.generator.temperature if sampled else 1.0)
        queue = self.buffer.replay_limit == 1 and not self.launch.elastic
        if queue and "max_staleness" not in self.exchange.model_fields_set:
            bound = max(QUEUE_STALENESS, 2 * self.exchange.sync_every - 1)
            self._fill("exchange", max_staleness=bound)
        if self.buffer.oldest_first is None:
            bounded = self.exchange.max_staleness is not None
            self._fill("buffer", oldest_first=bounded and self.buffer.replay_limit is not None)
        given = self.buffer.model_fields_set
        if self.on_policy and "duplicates" not in given:
            self._fill("buffer", duplicates=NoDuplicates())
        if self.on_policy and "reward_temperature" not in given:
            self._fill("buffer", reward_temperature=None)
        return self

    def _fill(self, section: str, **values: object) -> None:
        object.__setattr__(self, section, getattr(self, section).model_copy(update=values))
