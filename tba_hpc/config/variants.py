"""Variants: config values that are chosen by name and have keys of their own.

Objective, ratio bound, reference and duplicates are such values. They are written as ``{name: oapl,
value_beta: 1}``, or as the name alone for the defaults. Imports no heavy library.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from tba_hpc.config.plain_yaml import UserPath

LossNormaliser = Literal["sum", "completion_tokens", "batch_tokens", "max_tokens"]
LogZ = Literal["behaviour", "policy", "none"]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]

OWN = "module:function"
"""Tag of a user's own objective among the variants, since it has no fixed name."""


class Section(BaseModel):
    """Base of all sections. It is frozen, and refuses unknown keys and numbers that are not finite.

    The docstring of an attribute becomes the description of its key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        """Treat a null section or list as unset. YAML has null if all lines under a key are comments."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or not cls._holds_more(key)}

    @classmethod
    def _holds_more(cls, key: str) -> bool:
        """Return whether a key holds a section, dict or list that must not be null."""
        kind = cls.model_fields[key].annotation if key in cls.model_fields else None
        return get_origin(kind) in (dict, tuple) or (isinstance(kind, type) and issubclass(kind, Section))


# --- Objectives ---


class ObjectiveSection(Section):
    """A loss over whole groups, with properties that other keys depend on.

    policy_gradient: whether the loss is biased if it does not get completions as often as they are sampled,
    but those with high rewards more often, for example. own_samples: whether it is biased if completions are
    not sampled from the policy's own distribution, but with top_p or at another temperature, for example.
    takes_bound: whether train.ratio_bound may be set, because the loss itself does not limit stale data.
    tapered: whether train.ratio_bound is taper by default. weighs_kl: whether the loss has a KL term to the
    reference. kl_optional: whether β only weighs this term, so that β = 0 leaves the term out. normaliser:
    train.loss_normaliser of the loss as published.
    """

    policy_gradient: ClassVar[bool] = False
    own_samples: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = True
    tapered: ClassVar[bool] = False
    weighs_kl: ClassVar[bool] = True
    kl_optional: ClassVar[bool] = False
    normaliser: ClassVar[LossNormaliser] = "sum"


class TrajectoryBalance(ObjectiveSection):
    tapered = True
    name: Literal["trajectory_balance"] = "trajectory_balance"
    """Trajectory balance: the square of the VarGrad residual."""
    log_z: LogZ = "behaviour"
    """Policy whose log-probabilities enter the estimate of log Z. behaviour: the weights that sampled; on old
    data this keeps all completions of a group from becoming less likely together. policy: the current weights
    (the paper's equation 7), for fresh data or mostly replayed data. none: the estimate is the mean of r/β,
    without a KL term."""


class TbaPrime(ObjectiveSection):
    tapered = True
    name: Literal["tba_prime"] = "tba_prime"
    """TBA′, the paper's choice for large models: Dr. GRPO with the KL to the reference in the advantage."""
    log_z: LogZ = "behaviour"
    """Policy whose log-probabilities enter the mean KL of a group; values as for trajectory_balance."""


class Oapl(ObjectiveSection):
    own_samples = True
    name: Literal["oapl"] = "oapl"
    """OAPL: regression of β·log(π_θ/π_behaviour) on the optimal advantage r − V̂, where π_behaviour is the
    policy that sampled."""
    value_beta: Positive | None = None
    """β₁ in V̂ = β₁·log mean exp(r/β₁), where the mean is over all completions of a request. null: train.beta
    at step 0."""


class PolicyGradient(ObjectiveSection):
    policy_gradient = own_samples = True


class Shifted(PolicyGradient):
    baseline_shift: float = 0.0
    """Amount added to the baseline, in units of the reward. If it is below 0, successes weigh more than
    failures, which helps on stale data (AsymRE)."""


class Rloo(Shifted):
    kl_optional = True
    name: Literal["rloo"] = "rloo"
    """REINFORCE with a leave-one-out baseline."""


class ClippedTokens(PolicyGradient):
    takes_bound = False
    ratio_clip: Fraction = 0.2
    """ε: a token has no gradient once its ratio π_θ/π_behaviour has left 1 ± ε in the direction of its
    advantage."""
    second_moment_limit: Positive | None = None
    """Limit of M2PO's mask, in nats² (0.04 in M2PO); the mask replaces the clip. Among the tokens that have
    moved in the direction of their advantage, those with the largest log-ratios are masked, until the mean
    square of the others' log-ratios is at most this limit. null: clip."""


class Grpo(ClippedTokens):
    kl_optional = True
    normaliser = "completion_tokens"
    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation: a clipped surrogate and a KL penalty per token."""


class DrGrpo(ClippedTokens, Shifted):
    weighs_kl = False
    name: Literal["dr_grpo"] = "dr_grpo"
    """Dr. GRPO: like grpo, but advantages are not divided by the standard deviation, and there is no KL
    term."""


class DecoupledPpo(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Dr. GRPO, clipped around π_proximal, the policy before the current step, instead of the policy that
    sampled (π_behaviour), and weighted by π_proximal/π_behaviour. π_proximal is interpolated as in A-3PO."""
    ratio_clip: Fraction = 0.2
    """ε: a token has no gradient once its ratio π_θ/π_proximal has left 1 ± ε in the direction of its
    advantage."""


class Gspo(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["gspo"] = "gspo"
    """GSPO: a clipped surrogate with one ratio per completion, the geometric mean of its tokens' ratios."""
    ratio_clip: tuple[Fraction, Positive] = (3e-4, 4e-4)
    """[low, high]: a completion has no gradient once its ratio π_θ/π_behaviour, as a geometric mean over its
    tokens, has left the range from 1 − low to 1 + high in the direction of its advantage."""


class Topr(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["topr"] = "topr"
    """TOPR: REINFORCE in which completions below the baseline are weighted by min(1, π_θ/π_behaviour)."""


class OwnObjective(ObjectiveSection):
    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", examples=["my_module:my_loss"])
    """Your own function, which takes a tba_hpc.objectives.Groups and β, and returns the loss of each
    completion (docs/own-task.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


# --- Bounds on stale data ---


class Unbounded(Section):
    name: Literal["none"] = "none"
    """No bound: stale data count as much as fresh data."""


class RatioWeighted(Section):
    """Base of the bounds that give each token the weight π_θ/π_behaviour, unless they limit this weight."""


class RatioCap(RatioWeighted):
    name: Literal["cap"] = "cap"
    """Weight each token by min(cap, π_θ/π_behaviour), as in TBA′ and CISPO."""
    cap: Positive = 8.0
    """Largest weight of a token."""


class IcePop(RatioWeighted):
    name: Literal["icepop"] = "icepop"
    """Weight each token by π_θ/π_behaviour, or by 0 if that ratio is outside a band (IcePop)."""
    band: tuple[Fraction, Annotated[float, Field(gt=1)]] = (0.5, 5.0)
    """Lowest and highest ratio at which a token keeps its weight."""


class Dppo(RatioWeighted):
    name: Literal["dppo"] = "dppo"
    """Weight each token by π_θ/π_behaviour, or by 0 if its probability has changed by more than a limit and
    the step would change it further (DPPO)."""
    limit: Fraction = 0.15
    """Largest change of a token's probability (binary total variation) that a step may still increase."""


class BinaryKl(RatioWeighted):
    name: Literal["binary_kl"] = "binary_kl"
    """Weight each token by π_θ/π_behaviour, or by 0 if the probabilities of its completion have changed by
    more than a limit (FlashREINFORCE)."""
    limit: Positive = 0.003
    """Largest mean of the binary KL(π_behaviour‖π_θ) over the tokens of a completion, nats. Above it, all
    tokens of the completion have weight 0."""


class RatioTaper(Section):
    name: Literal["taper"] = "taper"
    """Weight a completion by min(1, π_θ/π_behaviour) if the step makes it less likely, as in TOPR, and by 1
    otherwise."""


# --- References ---


class ModelReference(Section):
    """Base of the references that are models of their own. Each trajectory is scored once, and its log π_ref
    is kept."""

    scored: ClassVar[bool] = True
    scored_by: Literal["searcher", "trainer"] = "searcher"
    """Role that computes log π_ref. searcher: when a completion has been generated. trainer: when a
    completion first enters a batch, with a copy of the model that the trainer keeps in host memory. Searchers
    then hold no second model and log no KL."""


class FrozenReference(ModelReference):
    name: Literal["frozen"] = "frozen"
    """The initial policy, which stays the reference throughout the run."""


class BehaviourIsReference(Section):
    scored: ClassVar[bool] = False
    name: Literal["behaviour"] = "behaviour"
    """The policy that sampled the completion; no second model is loaded. OAPL requires this reference."""


class ResetReference(ModelReference):
    name: Literal["reset"] = "reset"
    """A copy of the policy, which is replaced at each reset by the policy of that step."""
    every: int = Field(50, ge=1)
    """ρ, the number of optimizer steps between resets."""


class LaggedReference(Section):
    scored: ClassVar[bool] = False
    name: Literal["lagged"] = "lagged"
    """Moving average of the policy's weights, approximated to first order; no second model is loaded. For
    each token, log π_ref = log π_θ − c·(log π_θ − log π_behaviour), where c = decay/((1 − decay)·Δ), and Δ is
    the larger of 4 and the age of the token in steps. If the current weights sampled the token, π_ref is
    π_θ."""
    decay: Fraction = 0.9
    """Factor by which the old average is weighted at each step; the average is decay/(1 − decay) steps behind
    the policy."""


# --- Duplicates ---


class NoDuplicates(Section):
    name: Literal["none"] = "none"
    """Keep every completion, so that groups are distributed like the samples of the policy."""


class EqualDuplicates(Section):
    name: Literal["equal"] = "equal"
    """Keep only the newest of equal completions."""


class EditDuplicates(Section):
    name: Literal["edits"] = "edits"
    """Keep only the completion with the highest reward of those that are a small edit distance apart."""
    limit: float = Field(0.25, gt=0, le=0.5)
    """Edit distance, as a share of the sum of both lengths, below which two completions are duplicates."""


class EmbeddingDuplicates(Section):
    name: Literal["embeddings"] = "embeddings"
    """Keep only the completion with the highest reward among those with similar embeddings."""
    limit: float = Field(0.4, ge=0, lt=1)
    """Cosine similarity of the embeddings above which two completions are duplicates."""
    model: UserPath = "sentence-transformers/all-MiniLM-L6-v2"
    """Folder or hub name of the sentence encoder, which the leading trainer runs."""


# --- Unions ---


def _by_name(first: str) -> BeforeValidator:
    """Make a validator that accepts short forms of a variant.

    A name alone means that variant with its defaults. Keys without a name belong to the variant ``first``.
    """

    def whole(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": first, **value} if isinstance(value, dict) else value

    return BeforeValidator(whole)


def _kind(value: Any) -> str | None:
    """Return the tag by which pydantic chooses the variant of a value; None if the value has no name."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name


ObjectiveChoice = Annotated[
    Annotated[TrajectoryBalance, Tag("trajectory_balance")]
    | Annotated[TbaPrime, Tag("tba_prime")]
    | Annotated[Oapl, Tag("oapl")]
    | Annotated[Rloo, Tag("rloo")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[DrGrpo, Tag("dr_grpo")]
    | Annotated[DecoupledPpo, Tag("decoupled_ppo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Topr, Tag("topr")]
    | Annotated[OwnObjective, Tag(OWN)],
    Discriminator(_kind),
    _by_name("trajectory_balance"),
]
RatioBound = Annotated[
    Unbounded | RatioCap | IcePop | Dppo | BinaryKl | RatioTaper,
    Discriminator("name"),
    _by_name("none"),
]
ReferenceChoice = Annotated[
    FrozenReference | BehaviourIsReference | ResetReference | LaggedReference,
    Discriminator("name"),
    _by_name("frozen"),
]
Duplicates = Annotated[
    NoDuplicates | EqualDuplicates | EditDuplicates | EmbeddingDuplicates,
    Discriminator("name"),
    _by_name("equal"),
]


def choices(annotation: Any) -> dict[str, type[Section]]:
    """Return the variants in the annotation of a field, by tag; {} if the field does not hold variants."""
    parts = [get_args(part)[0] if hasattr(part, "__metadata__") else part for part in get_args(annotation)]
    found = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
    return {_tag(part): part for part in found} if len(found) > 1 else {}


def _tag(section: type[Section]) -> str:
    name = section.model_fields["name"]
    return OWN if name.is_required() else str(name.default)
