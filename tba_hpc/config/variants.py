"""What a config chooses by name, each choice with keys of its own: objective, bound, reference, duplicates.

``{name: oapl, value_beta: 1}``; the name alone is short for its defaults. Imports no heavy library.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

LossNormaliser = Literal["sum", "completion_tokens", "batch_tokens", "max_tokens"]

OWN = "module:function"
"""Tag of an objective of the user's own."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# --- Objectives ---


class ObjectiveSection(Section):
    """A loss over whole groups.

    policy_gradient: unbiased only on completions as the policy sampled them. own_samples: log-probabilities
    and samples are of one policy. bounded: its own formula bounds old data, train.ratio_bound is not for it.
    tapered: train.ratio_bound is taper if left out. normaliser: what the published loss is divided by.
    """

    policy_gradient: ClassVar[bool] = False
    own_samples: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    tapered: ClassVar[bool] = False
    normaliser: ClassVar[LossNormaliser] = "sum"


LogZ = Literal["behaviour", "policy", "none"]


class TrajectoryBalance(ObjectiveSection):
    tapered = True

    name: Literal["trajectory_balance"] = "trajectory_balance"
    """TB, the squared residual of VarGrad."""
    log_z: LogZ = "behaviour"
    """Log-probabilities in the estimate of log Z. behaviour: of the weights that sampled, so that a group's
    completions cannot sink together as data age. policy: current ones, equation 7 to the letter, for (nearly)
    fresh data or a large replay buffer. none: no KL in it; differences of engine and learner then count as
    reward."""
    gap_clip: float | None = Field(None, gt=0)
    """Nats beyond which a residual pulls no harder. null: no limit."""


class TbaPrime(ObjectiveSection):
    tapered = True

    name: Literal["tba_prime"] = "tba_prime"
    """TBA′, for large models: the KL inside the advantage, token by token."""
    log_z: LogZ = "behaviour"
    """Whose KL the group's mean is of; see trajectory_balance."""


class Oapl(ObjectiveSection):
    own_samples = True

    name: Literal["oapl"] = "oapl"
    """OAPL: regression on optimal advantages against the lagged policy."""
    value_beta: float | None = Field(None, gt=0)
    """β₁ of V̂ = β₁·log mean exp(r/β₁) over all completions of a request, in units of the reward. null:
    train.beta of step 0, with which the target is π_lag·exp(r/β)/Z."""


class PolicyGradient(ObjectiveSection):
    policy_gradient = own_samples = True


class Shifted(PolicyGradient):
    baseline_shift: float = 0.0
    """δ added to the advantages' baseline, in units of the reward. Below 0 successes pull more than failures
    push, as stale data asks for (AsymRE)."""


class Rloo(Shifted):
    name: Literal["rloo"] = "rloo"
    """REINFORCE with a leave-one-out baseline."""


class ProximalRloo(Shifted):
    bounded = True

    name: Literal["proximal_rloo"] = "proximal_rloo"
    """RLOO under PPO's clip."""
    ratio_clip: float = Field(0.2, gt=0, lt=1)
    """How far π_θ/π_behaviour may leave 1 before its gradient stops."""


class ClippedTokens(PolicyGradient):
    bounded = True

    ratio_clip: float = Field(0.2, gt=0, lt=1)
    """How far π_θ/π_behaviour of a token may leave 1 before its gradient stops."""
    second_moment_limit: float | None = Field(None, gt=0)
    """Instead of clipping, mask the tokens furthest beyond 1 until the mean of (log π_θ/π_behaviour)² over
    the others beyond it, per micro-batch (per group, if those are filled by tokens), is at most this, nats²
    (M2PO: .04). null: clip."""


class Grpo(ClippedTokens):
    normaliser = "completion_tokens"

    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation."""


class DrGrpo(ClippedTokens, Shifted):
    name: Literal["dr_grpo"] = "dr_grpo"
    """GRPO done right."""


class Gspo(PolicyGradient):
    bounded = True

    name: Literal["gspo"] = "gspo"
    """GRPO with one ratio for a completion: the geometric mean of its tokens'."""
    ratio_clip: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]] = (3e-4, 4e-4)
    """How far that ratio may fall below and rise above 1 before its gradient stops."""


class Topr(PolicyGradient):
    bounded = True

    name: Literal["topr"] = "topr"
    """REINFORCE whose negatives are weighed by min(1, π_θ/π_behaviour) of the completion."""


class OnlineDpo(ObjectiveSection):
    bounded = True

    name: Literal["online_dpo"] = "online_dpo"
    """DPO on the best and the worst completion of a group."""


class OwnObjective(ObjectiveSection):
    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """A function of your own, beside the config, in the folder of the command, or installed: it gets
    tba_hpc.objectives.Groups and β, and returns a loss for each completion."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its own."""


# --- How much stale data may pull ---


class Unbounded(Section):
    name: Literal["none"] = "none"
    """Data of any age pull alike."""


class RatioCap(Section):
    name: Literal["cap"] = "cap"
    """Weigh by min(cap, π_θ/π_behaviour) (TBA′, CISPO, GFlowRL)."""
    cap: float = Field(8.0, gt=0)
    """Largest weight."""
    of: Literal["token", "sequence"] = "token"
    """Whether each token is weighed by its own ratio, or all by the completion's."""


class RatioTaper(Section):
    name: Literal["taper"] = "taper"
    """Weigh what is pushed down by min(1, π_θ/π_behaviour), and nothing else (TOPR)."""
    of: Literal["token", "sequence"] = "sequence"
    """Whether each token is weighed by its own ratio, or all by the completion's."""


class SequenceMask(Section):
    name: Literal["mask"] = "mask"
    """Leave out completions that are pushed down and have become unlikely (OPSM)."""
    limit: float = Field(0.5, gt=0)
    """Mean of log π_behaviour/π_θ over a completion's tokens from which on it is left out, nats per token."""


# --- References ---


class ReferenceSection(Section):
    """What π_ref is. scored: whether a model of it scores every trajectory once."""

    scored: ClassVar[bool] = True


class ModelReference(ReferenceSection):
    scored_by: Literal["searcher", "trainer"] = "searcher"
    """Who computes log π_ref. searcher: of everything, as it is generated. trainer: of what it samples, once;
    searchers then hold no second model, and log no KL of fresh samples. Each trainer rank's copy stays in
    host memory, and visits the GPU when needed; with model.lora, frozen is the policy without adapter."""


class FrozenReference(ModelReference):
    name: Literal["frozen"] = "frozen"
    """The initial model."""


class BehaviourIsReference(ReferenceSection):
    scored = False

    name: Literal["behaviour"] = "behaviour"
    """The weights that sampled; no model is loaded (always with OAPL)."""


class ResetReference(ModelReference):
    name: Literal["reset"] = "reset"
    """The policy itself, anew every so many steps."""
    every: int = Field(50, ge=1)
    """ρ: optimizer steps between two resets."""


class EmaReference(ReferenceSection):
    scored = False

    name: Literal["ema"] = "ema"
    """A moving average of the policy's weights: decay·average + (1 − decay)·policy after every step. The
    trainer ranks shard it over their host memory, in float32, and compute log π_ref whenever a trajectory is
    learned from. Not with model.lora."""
    decay: float = Field(0.9, gt=0, lt=1)
    """Share that stays in a step; the average lags decay/(1 − decay) steps behind."""


class LaggedReference(ReferenceSection):
    scored = False

    name: Literal["lagged"] = "lagged"
    """Such an average to first order, without a model: per token log π_ref = log π_θ − c·(log π_θ −
    log π_behaviour), c = decay/((1 − decay)·Δ), Δ the steps since the weights that sampled it (π_θ if 0). Not
    with a target_temperature or reference_temperature."""
    decay: float = Field(0.9, gt=0, lt=1)
    """Of that average."""


# --- Duplicates ---


class NoDuplicates(Section):
    name: Literal["none"] = "none"
    """Every completion is stored: groups are as the policy sampled them."""


class EqualDuplicates(Section):
    name: Literal["equal"] = "equal"
    """Equal completions: the newest is kept."""


class EditDuplicates(Section):
    name: Literal["edits"] = "edits"
    """Completions that few edits of tokens turn into each other: the better one is kept."""
    limit: float = Field(0.25, gt=0, le=0.5)
    """Share of the tokens of both below which edits are few."""


class EmbeddingDuplicates(Section):
    name: Literal["embeddings"] = "embeddings"
    """Completions whose embeddings are alike: the better one is kept."""
    limit: float = Field(0.4, ge=0, lt=1)
    """Cosine of the embeddings above which they are alike."""
    model: str = "sentence-transformers/all-MiniLM-L6-v2"
    """Folder or hub name of the sentence encoder; the leading trainer runs it."""


# --- Unions ---


def _by_name(first: str) -> BeforeValidator:
    """A name alone is a choice with its defaults; keys without a name are of the ``first`` choice."""

    def whole(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": first, **value} if isinstance(value, dict) else value

    return BeforeValidator(whole)


def _kind(value: Any) -> str | None:
    """Tag of a value; None if it has no name."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name


ObjectiveChoice = Annotated[
    Annotated[TrajectoryBalance, Tag("trajectory_balance")]
    | Annotated[TbaPrime, Tag("tba_prime")]
    | Annotated[Oapl, Tag("oapl")]
    | Annotated[Rloo, Tag("rloo")]
    | Annotated[ProximalRloo, Tag("proximal_rloo")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[DrGrpo, Tag("dr_grpo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Topr, Tag("topr")]
    | Annotated[OnlineDpo, Tag("online_dpo")]
    | Annotated[OwnObjective, Tag(OWN)],
    Discriminator(_kind),
    _by_name("trajectory_balance"),
]

RatioBound = Annotated[
    Unbounded | RatioCap | RatioTaper | SequenceMask, Discriminator("name"), _by_name("none")
]

ReferenceChoice = Annotated[
    FrozenReference | BehaviourIsReference | ResetReference | EmaReference | LaggedReference,
    Discriminator("name"),
    _by_name("frozen"),
]

Duplicates = Annotated[
    NoDuplicates | EqualDuplicates | EditDuplicates | EmbeddingDuplicates,
    Discriminator("name"),
    _by_name("equal"),
]


def choices(annotation: Any) -> dict[str, type[Section]]:
    """By tag, the sections that a union by name chooses from; {} if ``annotation`` is no such union."""
    parts = [get_args(part)[0] if hasattr(part, "__metadata__") else part for part in get_args(annotation)]
    found = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
    return {_tag(part): part for part in found} if len(found) > 1 else {}


def _tag(section: type[Section]) -> str:
    name = section.model_fields["name"]
    return OWN if name.is_required() else str(name.default)
