"""Config values chosen by name, each with keys of its own: objective, ratio bound, reference, duplicates.

They are written as ``{name: oapl, value_beta: 1}``, or as the name alone for the defaults. Imports no heavy
library.
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
"""Tag under which pydantic finds a user's own objective."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, finite numbers, attribute docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        """Treat a null section or list as unset: YAML has null if all of its lines are commented out."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or not cls._holds_more(key)}

    @classmethod
    def _holds_more(cls, key: str) -> bool:
        """Return whether a key holds a section, dict or list that cannot be null."""
        kind = cls.model_fields[key].annotation if key in cls.model_fields else None
        return get_origin(kind) in (dict, tuple) or (isinstance(kind, type) and issubclass(kind, Section))


# --- Objectives ---


class ObjectiveSection(Section):
    """A loss over whole groups.

    policy_gradient: it is unbiased only if groups keep the distribution of the policy's samples. own_samples:
    completions must be samples of the policy whose log-probabilities are recorded. takes_bound: it may be
    combined with train.ratio_bound, because it does not limit stale data itself. tapered: train.ratio_bound
    defaults to taper. weighs_kl: it has a KL term to the reference. normaliser: divisor of the published
    loss.
    """

    policy_gradient: ClassVar[bool] = False
    own_samples: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = True
    tapered: ClassVar[bool] = False
    weighs_kl: ClassVar[bool] = True
    normaliser: ClassVar[LossNormaliser] = "sum"


class TrajectoryBalance(ObjectiveSection):
    tapered = True
    name: Literal["trajectory_balance"] = "trajectory_balance"
    """TB: the squared VarGrad residual."""
    log_z: LogZ = "behaviour"
    """Policy whose log-probabilities enter the estimate of log Z. behaviour: the sampling weights, so that a
    group's completions cannot become less likely together on old data. policy: the current weights (the
    paper's equation 7), for fresh or mostly replayed data. none: no KL term; a mismatch between engine and
    learner then acts like a reward."""


class TbaPrime(ObjectiveSection):
    tapered = True
    name: Literal["tba_prime"] = "tba_prime"
    """TBA′, for large models: a per-token KL inside the advantage."""
    log_z: LogZ = "behaviour"
    """Policy whose log-probabilities enter the group's mean KL; values as in trajectory_balance."""


class Oapl(ObjectiveSection):
    own_samples = True
    name: Literal["oapl"] = "oapl"
    """OAPL: regression on optimal advantages against the sampling policy."""
    value_beta: Positive | None = None
    """β₁ in V̂ = β₁·log mean exp(r/β₁), over all completions of a request. null: train.beta at step 0."""


class PolicyGradient(ObjectiveSection):
    policy_gradient = own_samples = True


class Shifted(PolicyGradient):
    baseline_shift: float = 0.0
    """Amount added to the baseline, in units of the reward. Below 0 successes weigh more than failures, which
    helps on stale data (AsymRE)."""


class Rloo(Shifted):
    name: Literal["rloo"] = "rloo"
    """REINFORCE with a leave-one-out baseline."""


class ClippedTokens(PolicyGradient):
    takes_bound = False
    ratio_clip: Fraction = 0.2
    """ε: the gradient stops where a token's π_θ/π_behaviour leaves 1 ± ε."""
    second_moment_limit: Positive | None = None
    """Limit of M2PO's mask, nats² (M2PO: 0.04), instead of the clip. Of the tokens that have moved in the
    direction of their advantage, it masks those with the largest log-ratios until the mean square of the rest
    is at most this limit. null: clip."""


class Grpo(ClippedTokens):
    normaliser = "completion_tokens"
    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation: a clipped surrogate and a KL penalty per token."""


class DrGrpo(ClippedTokens, Shifted):
    weighs_kl = False
    name: Literal["dr_grpo"] = "dr_grpo"
    """GRPO done right: advantages are not divided by the standard deviation, and there is no KL term."""


class DecoupledPpo(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Dr. GRPO, clipped around the previous step's policy, which is interpolated as in A-3PO, and weighted by
    that policy's ratio to the sampling policy."""
    ratio_clip: Fraction = 0.2
    """ε: the gradient stops where a token's π_θ/π_proximal leaves 1 ± ε."""


class Gspo(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["gspo"] = "gspo"
    """GRPO with one ratio per completion, the geometric mean of its tokens' ratios."""
    ratio_clip: tuple[Fraction, Positive] = (3e-4, 4e-4)
    """[low, high]: the gradient stops where the ratio leaves 1 − low … 1 + high."""


class Topr(PolicyGradient):
    takes_bound = weighs_kl = False
    name: Literal["topr"] = "topr"
    """REINFORCE in which completions below the baseline are weighted by min(1, π_θ/π_behaviour)."""


class OwnObjective(ObjectiveSection):
    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Your own function from tba_hpc.objectives.Groups and β to a loss per completion."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


# --- Bounds on stale data ---


class Unbounded(Section):
    name: Literal["none"] = "none"
    """No bound: stale data count like fresh data."""


class RatioWeighted(Section):
    """Bound that weights tokens by π_θ/π_behaviour even where it does not act."""


class RatioCap(RatioWeighted):
    name: Literal["cap"] = "cap"
    """Weight each token by min(cap, π_θ/π_behaviour) (TBA′, CISPO)."""
    cap: Positive = 8.0
    """Largest weight."""


class IcePop(RatioWeighted):
    name: Literal["icepop"] = "icepop"
    """Weight each token by π_θ/π_behaviour, or by 0 if that ratio is outside a band (IcePop)."""
    band: tuple[Fraction, Annotated[float, Field(gt=1)]] = (0.5, 5.0)
    """Lowest and highest ratio that is kept."""


class Dppo(RatioWeighted):
    name: Literal["dppo"] = "dppo"
    """Weight each token by π_θ/π_behaviour, or by 0 if its probability has moved far and a step would move it
    further (DPPO)."""
    limit: Fraction = 0.15
    """Change of a token's probability (binary total variation) beyond which a step may not increase it."""


class BinaryKl(RatioWeighted):
    name: Literal["binary_kl"] = "binary_kl"
    """Weight each token by π_θ/π_behaviour, or by 0 if the completion's probabilities have moved far
    (FlashREINFORCE)."""
    limit: Positive = 0.003
    """Mean binary KL(π_behaviour‖π_θ) over a completion's tokens above which its weights are 0, nats."""


class RatioTaper(Section):
    name: Literal["taper"] = "taper"
    """Weight completions that a step makes less likely by min(1, π_θ/π_behaviour) (TOPR)."""


# --- References ---


class ModelReference(Section):
    """A model of π_ref, which scores every trajectory once."""

    scored: ClassVar[bool] = True
    scored_by: Literal["searcher", "trainer"] = "searcher"
    """Role that computes log π_ref. searcher: when a completion is generated. trainer: when it first enters a
    batch, with a copy of the model in host memory; searchers then hold no second model and log no KL."""


class FrozenReference(ModelReference):
    name: Literal["frozen"] = "frozen"
    """The initial model."""


class BehaviourIsReference(Section):
    scored: ClassVar[bool] = False
    name: Literal["behaviour"] = "behaviour"
    """The policy that sampled each completion; no model is loaded. OAPL requires this."""


class ResetReference(ModelReference):
    name: Literal["reset"] = "reset"
    """The policy as it was at the last reset."""
    every: int = Field(50, ge=1)
    """ρ, the number of optimizer steps between resets."""


class LaggedReference(Section):
    scored: ClassVar[bool] = False
    name: Literal["lagged"] = "lagged"
    """Moving average of the policy's weights, approximated to first order without a model: for each token,
    log π_ref = log π_θ − c·(log π_θ − log π_behaviour), where c = decay/((1 − decay)·Δ) and Δ is the token's
    age in steps, at least 4. If the policy itself sampled the token, π_ref is π_θ."""
    decay: Fraction = 0.9
    """Factor of the old average at each step; the average lags decay/(1 − decay) steps behind."""


# --- Duplicates ---


class NoDuplicates(Section):
    name: Literal["none"] = "none"
    """Keep every completion, so that groups keep the distribution of the samples."""


class EqualDuplicates(Section):
    name: Literal["equal"] = "equal"
    """Keep the newest of equal completions."""


class EditDuplicates(Section):
    name: Literal["edits"] = "edits"
    """Keep the completion with the highest reward of those within a small edit distance."""
    limit: float = Field(0.25, gt=0, le=0.5)
    """Edit distance below which completions are duplicates, as a share of the sum of their lengths."""


class EmbeddingDuplicates(Section):
    name: Literal["embeddings"] = "embeddings"
    """Keep the completion with the highest reward of those with similar embeddings."""
    limit: float = Field(0.4, ge=0, lt=1)
    """Cosine similarity above which completions are duplicates."""
    model: UserPath = "sentence-transformers/all-MiniLM-L6-v2"
    """Folder or hub name of the sentence encoder, which the leading trainer runs."""


# --- Unions ---


def _by_name(first: str) -> BeforeValidator:
    """Accept a bare name, which means the defaults, and keys without a name, which belong to ``first``."""

    def whole(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": first, **value} if isinstance(value, dict) else value

    return BeforeValidator(whole)


def _kind(value: Any) -> str | None:
    """Return the union tag of a value, or None if it has no name."""
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
    """Return the sections of a union of variants by tag; {} if ``annotation`` is not such a union."""
    parts = [get_args(part)[0] if hasattr(part, "__metadata__") else part for part in get_args(annotation)]
    found = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
    return {_tag(part): part for part in found} if len(found) > 1 else {}


def _tag(section: type[Section]) -> str:
    name = section.model_fields["name"]
    return OWN if name.is_required() else str(name.default)
