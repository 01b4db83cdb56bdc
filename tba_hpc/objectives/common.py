"""Common parts of all objectives: their input, signature and result, and formulas that several use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba_hpc.config.variants import LossNormaliser
from tba_hpc.core.types import TrajectoryBatch

MAX_LOG_RATIO = 20.0
"""Upper limit on log-ratios, in nats. A ratio of probabilities above e^20 becomes e^20, without gradient.

Even if a million tokens have this ratio and an advantage of 1000, the squared norm of their summed gradients
is about 2e35, which float32 can hold.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedGroups:
    """Values recorded in a batch, padded to [B, K, L] or [B, K]: numpy arrays, or tensors made from them.

    cell_T: int64, index of each completion token in the flattened rectangle [B, K, L]. The other fields are
    those of ``Groups``. top_behaviour_BKLC is None if no likeliest tokens were recorded.
    """

    cell_T: Any
    behaviour_BKL: Any
    reference_BKL: Any
    mask_BKL: Any
    reward_BK: Any
    value_BK: Any
    on_policy_BK: Any
    age_BKL: Any
    top_behaviour_BKLC: Any = None

    @staticmethod
    def of(batch: TrajectoryBatch) -> RecordedGroups:
        """Arrange the recorded values of all groups of ``batch`` as numpy arrays."""
        sampled_T, cell_T = batch.action_T, batch.cell_T
        shape = batch.groups, batch.group_size
        cell_A = cell_T[sampled_T]
        top_AC = batch.top_logprobs["logprob"][sampled_T]

        def spread(value_A: np.ndarray) -> np.ndarray:
            """Put the sampled tokens' values, [A, …], into a rectangle, [B, K, L, …], that is 0 elsewhere."""
            cells = (*shape, int(batch.completion_length_N.max()), *value_A.shape[1:])
            value_BKL = np.zeros(cells, value_A.dtype)
            value_BKL.reshape(-1, *value_A.shape[1:])[cell_A] = value_A
            return value_BKL

        return RecordedGroups(
            cell_T=cell_T,
            behaviour_BKL=spread(batch.logprobs[sampled_T]),
            reference_BKL=spread(batch.ref_logprobs[sampled_T]),
            mask_BKL=spread(np.ones(len(cell_A), bool)),
            reward_BK=batch.reward_N.reshape(shape),
            value_BK=batch.value_N.reshape(shape),
            on_policy_BK=batch.on_policy_N.reshape(shape),
            age_BKL=spread(batch.ages),
            top_behaviour_BKLC=spread(top_AC) if top_AC.shape[1] else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """B whole groups, each of K completions of one prompt, padded to L, the length of the longest completion.

    policy_BKL: float, log π_θ of each token, with gradient. behaviour_BKL: float, its log-probability under
    the weights that sampled it. reference_BKL: float, its log-probability under the reference. All three are
    at the temperature model.logprob_temperature. mask_BKL: bool, True for each token that the policy sampled,
    EOS included. It is False at padding, and at tokens that an environment wrote, whose probability does not
    depend on the policy. Where it is False, the three log-probabilities are 0.

    reward_BK: float. value_BK: float, V̂ of each completion's request (see ``oapl``). batch_tokens: mean
    number of sampled tokens per completion in the whole batch; None: these groups are the whole batch.
    on_policy_BK: bool, True if the current weights θ sampled the completion; None: unknown. age_BKL: int32,
    number of optimizer steps from the weights that sampled a token to θ; None: unknown. top_policy_BKLC,
    top_behaviour_BKLC: float, log-probabilities of the C tokens that were likeliest when a position was
    sampled, under θ and under the sampling weights; None: not recorded.
    """

    policy_BKL: Tensor
    behaviour_BKL: Tensor
    reference_BKL: Tensor
    mask_BKL: Tensor
    reward_BK: Tensor
    value_BK: Tensor
    batch_tokens: float | None = None
    on_policy_BK: Tensor | None = None
    age_BKL: Tensor | None = None
    top_policy_BKLC: Tensor | None = None
    top_behaviour_BKLC: Tensor | None = None

    @classmethod
    def of(cls, policy_T: Tensor, recorded: RecordedGroups, *, batch_tokens: float | None = None) -> Groups:
        """Combine recorded values, given as tensors, with the policy's log-probabilities.

        policy_T: float32 [T], log π_θ of all completion tokens, with gradient, and 0 at tokens that an
        environment wrote. If likeliest tokens were recorded, it is [T, 1 + C], and its last C columns are
        their log π_θ. batch_tokens: see Groups.
        """
        rest = {name: getattr(recorded, name) for name in RecordedGroups.__slots__ if name != "cell_T"}
        shape = recorded.mask_BKL.shape
        several_TJ = policy_T.view(len(policy_T), -1)
        cells = several_TJ.new_zeros(shape.numel(), several_TJ.shape[1])
        policy_BKLJ = cells.index_copy(0, recorded.cell_T, several_TJ).view(*shape, -1)
        if recorded.top_behaviour_BKLC is not None:
            rest["top_policy_BKLC"] = policy_BKLJ[..., 1:]
        return cls(policy_BKL=policy_BKLJ[..., 0], batch_tokens=batch_tokens, **rest)

    def one_by_one(self) -> Iterator[Groups]:
        """Yield each group alone, as Groups with B = 1."""
        tensors: dict[str, Any] = {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        for place in range(len(self.reward_BK)):
            yield replace(self, **{name: value[place : place + 1] for name, value in tensors.items()})

    @property
    def tokens_BK(self) -> Tensor:
        """Number of sampled tokens of each completion, int64."""
        return self.mask_BKL.sum(2)

    @property
    def mean_tokens(self) -> float:
        """Mean number of sampled tokens per completion in the whole batch."""
        return self.batch_tokens or self.tokens_BK.double().mean().item()

    @property
    def logprob_BK(self) -> Tensor:
        """Log-probability log π_θ of whole completions, with gradient."""
        return self.policy_BKL.sum(2)

    @property
    def behaviour_logprob_BK(self) -> Tensor:
        """Log-probability of whole completions under the weights that sampled them."""
        return self.behaviour_BKL.sum(2)

    @property
    def ref_logprob_BK(self) -> Tensor:
        """Log-probability of whole completions under the reference."""
        return self.reference_BKL.sum(2)

    @property
    def log_ratio_BK(self) -> Tensor:
        """Log-ratio log π_θ/π_ref of whole completions, with gradient, nats (k1 estimator of the KL)."""
        return (self.policy_BKL - self.reference_BKL).sum(2)  # a difference of sums would be rounded more

    @property
    def log_weight_BK(self) -> Tensor:
        """Log-ratio log π_θ/π_behaviour of whole completions, detached, nats."""
        return (self.policy_BKL.detach() - self.behaviour_BKL).sum(2)

    @property
    def token_ratio_BKL(self) -> Tensor:
        """Ratio π_θ/π_behaviour of each token, with gradient, at most e^20; 1 where the mask is False."""
        return bounded_exp(self.policy_BKL - self.behaviour_BKL)

    @property
    def ratio_BK(self) -> Tensor:
        """Ratio π_θ/π_behaviour of whole completions, with gradient, at most e^20."""
        return bounded_exp((self.policy_BKL - self.behaviour_BKL).sum(2))


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """Loss of each completion, and metrics.

    loss_BK: loss summed over a completion's tokens, with gradient; ``make_objective`` then divides it by the
    config's normaliser. metrics: detached scalars, each a mean over the completions. If the groups of a batch
    are computed in parts, its loss and metrics are means over the parts, weighted by their numbers of groups.
    """

    loss_BK: Tensor
    metrics: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """Mean of ``loss_BK`` over all completions, a scalar with gradient."""
        return self.loss_BK.mean()


Objective = Callable[[Groups, float], ObjectiveOutput]
"""Function from groups and the KL coefficient β to the losses of their completions. β is above 0; it may be 0
if the objective's class in ``config.variants`` says so (``kl_optional``)."""


def normaliser(groups: Groups, name: LossNormaliser, max_tokens: int) -> Tensor | float:
    """Return the divisor of each completion's loss, [B, K], or one number for all completions.

    name: the divisor's name in train.normaliser. max_tokens: token limit of a completion.
    """
    match name:
        case "sum":
            return 1.0
        case "completion_tokens":
            return groups.tokens_BK
        case "batch_tokens":
            return groups.mean_tokens
        case "max_tokens":
            return float(max_tokens)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) with gradient. Above MAX_LOG_RATIO it is exp(MAX_LOG_RATIO), without gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def group_mean(value_BK: Tensor) -> Tensor:
    """Return the mean of each group, [B, 1], detached."""
    return value_BK.detach().mean(dim=1, keepdim=True)


def centred(value_BK: Tensor) -> Tensor:
    """Return each value minus the mean of its group, [B, K], detached.

    The result is exactly 0 if all values of a group are equal. Simple subtraction would leave the rounding
    error of the mean. An advantage, which is this error divided by the values' spread, another rounding
    error, could then be of the order of 1.
    """
    excess_BK = value_BK.detach() - value_BK.detach()[:, :1]
    return excess_BK - group_mean(excess_BK)


def leave_one_out(value_BK: Tensor) -> Tensor:
    """Return each value minus the mean of the group's other values, [B, K], detached.

    This is K/(K − 1) times ``centred``; K must be at least 2.
    """
    completions = value_BK.shape[1]
    return centred(value_BK) * completions / (completions - 1)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate, to be maximised, and a mask of where the clip acts.

    The surrogate is min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), where ρ is ``ratio`` and A is ``advantage``
    (arXiv 1707.06347, eq. 7). The bool mask is True where the clipped term is the smaller one; there the
    gradient of the surrogate is 0.
    """
    plain = ratio * advantage
    surrogate = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantage)
    return surrogate, surrogate < plain


def second_moment_mask(log_ratio_BKL: Tensor, advantage_BK1: Tensor, limit: float) -> Tensor:
    """Return which tokens M2PO's mask keeps, bool [B, K, L] (arXiv 2510.01161, algorithm 1).

    log_ratio_BKL: log ρ of each token, where ρ = π_θ/π_behaviour. advantage_BK1: advantage A of each
    completion.

    Like PPO's clip, the mask drops tokens only if their ratio has already moved in the direction of the
    advantage: A > 0 and ρ > 1, or A < 0 and ρ < 1. Among these tokens of a group, those with the largest
    (log ρ)² are dropped until the mean (log ρ)² of those left is at most ``limit``, nats².
    """
    log_ratio_BKL = log_ratio_BKL.detach()
    beyond_BT = (log_ratio_BKL * advantage_BK1 > 0).flatten(1)
    square_BT = log_ratio_BKL.flatten(1).square().where(beyond_BT, math.inf)  # ∞ is sorted last
    rising_BT, order_BT = square_BT.sort(dim=1)
    count_T = torch.arange(1, square_BT.shape[1] + 1, device=square_BT.device)
    within_BT = rising_BT.cumsum(1) / count_T <= limit  # running means rise: True, then False
    stays_BT = torch.empty_like(beyond_BT).scatter(1, order_BT, within_BT)
    return (stays_BT | ~beyond_BT).view(log_ratio_BKL.shape)


def token_share(acts_BKL: Tensor, groups: Groups) -> Tensor:
    """Return the share of sampled tokens at which ``acts_BKL`` (bool) is True, as a scalar.

    The number of such tokens per completion is divided by ``groups.mean_tokens``, a mean over the whole
    batch. The mean of the results for all parts of a batch is therefore the share in the batch.
    """
    return (acts_BKL & groups.mask_BKL).sum(2).double().mean() / groups.mean_tokens
