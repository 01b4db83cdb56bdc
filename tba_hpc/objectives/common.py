"""What all objectives share: input, signature and result."""

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
"""Nats up to which a ratio of probabilities is what it is; beyond, it stays at e^20 = 4.9e8 without gradient.

So the squared norm of what a million tokens pull, times an advantage of 1000, is 2e35: float32 ends at 3e38.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedGroups:
    """Rectangles of what is recorded of a batch's completions: arrays, then tensors.

    cell_T: int64, where the completions' tokens lie in a flattened rectangle [B, K, L]. The others as in
    ``Groups``.
    """

    cell_T: Any
    behaviour_BKL: Any
    reference_BKL: Any
    mask_BKL: Any
    reward_BK: Any
    value_BK: Any
    on_policy_BK: Any
    age_BKL: Any

    @staticmethod
    def of(batch: TrajectoryBatch) -> RecordedGroups:
        """Arrays of all groups of ``batch``."""
        sampled_T, cell_T = batch.action_T, batch.cell_T
        shape = batch.groups, batch.group_size
        cell_A = cell_T[sampled_T]

        def spread(value_A: np.ndarray) -> np.ndarray:
            """Values of the sampled tokens, in order; 0 elsewhere."""
            value_BKL = np.zeros((*shape, int(batch.completion_length_N.max())), value_A.dtype)
            value_BKL.reshape(-1)[cell_A] = value_A
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
        )


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """B whole groups of K completions of one prompt each, in rectangles of L positions.

    policy_BKL: float, with gradient, log π_θ of each token. behaviour_BKL, reference_BKL: the same under the
    weights that sampled it and under the reference, without gradient. All three are at one temperature,
    model.logprob_temperature, and 0 where ``mask_BKL`` (bool) has no token that the policy sampled; EOS is
    one, what an environment says is none: its probability is the same under all three.
    reward_BK: float. value_BK: float, V̂ of the request that each answers, from all completions that were
    sampled for it. batch_tokens: mean of sampled tokens over the completions of the whole batch, of which
    these groups may be a part; None: they are all. on_policy_BK: bool, whether it was sampled by the weights
    of θ; None: that is not known of any. age_BKL: int32, optimizer steps from the weights that sampled a
    token to θ; None: not known. A group must be whole: its baseline is taken over what is here.
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

    @classmethod
    def of(cls, policy_T: Tensor, recorded: RecordedGroups, *, batch_tokens: float | None = None) -> Groups:
        """Groups of a record whose arrays are tensors.

        policy_T: float32, with gradient, of the completions' tokens, 0 at those of an environment.
        """
        rest = {name: getattr(recorded, name) for name in RecordedGroups.__slots__ if name != "cell_T"}
        shape = recorded.mask_BKL.shape
        policy = policy_T.new_zeros(shape.numel()).index_copy(0, recorded.cell_T, policy_T)
        return cls(policy_BKL=policy.view(shape), batch_tokens=batch_tokens, **rest)

    def one_by_one(self) -> Iterator[Groups]:
        """Each group by itself."""
        tensors: dict[str, Any] = {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        for place in range(len(self.reward_BK)):
            yield replace(self, **{name: value[place : place + 1] for name, value in tensors.items()})

    @property
    def tokens_BK(self) -> Tensor:
        """int64: sampled tokens of each completion."""
        return self.mask_BKL.sum(2)

    @property
    def mean_tokens(self) -> float:
        """Mean of sampled tokens over the completions of the whole batch."""
        return self.batch_tokens or self.tokens_BK.double().mean().item()

    @property
    def logprob_BK(self) -> Tensor:
        """log π_θ of whole completions, with gradient."""
        return self.policy_BKL.sum(2)

    @property
    def behaviour_logprob_BK(self) -> Tensor:
        """log-probability of whole completions under the weights that sampled them."""
        return self.behaviour_BKL.sum(2)

    @property
    def ref_logprob_BK(self) -> Tensor:
        """log-probability of whole completions under the reference."""
        return self.reference_BKL.sum(2)

    @property
    def log_ratio_BK(self) -> Tensor:
        """log π_θ/π_ref of whole completions, with gradient: the k1 estimate of KL(π_θ‖π_ref), nats."""
        return self.logprob_BK - self.ref_logprob_BK

    @property
    def log_weight_BK(self) -> Tensor:
        """log π_θ/π_behaviour of whole completions, detached, nats."""
        return self.logprob_BK.detach() - self.behaviour_logprob_BK

    @property
    def token_ratio_BKL(self) -> Tensor:
        """π_θ/π_behaviour of each token, with gradient, bounded; 1 where there is none."""
        return bounded_exp(self.policy_BKL - self.behaviour_BKL)

    @property
    def ratio_BK(self) -> Tensor:
        """π_θ/π_behaviour of whole completions, with gradient, bounded."""
        return bounded_exp(self.logprob_BK - self.behaviour_logprob_BK)


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """The loss of some rows, and figures about it.

    loss_BK: with gradient, of each row; its tokens are added up, until ``make_objective`` divides by what the
    config asks for. metrics: detached scalars, means over the same rows. Both of a batch are therefore the
    means of those of its micro-batches, weighted by groups.
    """

    loss_BK: Tensor
    metrics: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """Scalar with gradient: the mean over the rows."""
        return self.loss_BK.mean()


Objective = Callable[[Groups, float], ObjectiveOutput]
"""A loss over whole groups; its second argument is the KL coefficient β, above 0."""


def normaliser(groups: Groups, name: LossNormaliser, max_tokens: int) -> Tensor | float:
    """What the losses of completions are divided by: a number for each, [B, K], or one for all."""
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
    """exp, with its gradient, up to MAX_LOG_RATIO; constant beyond."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def group_mean(value_BK: Tensor) -> Tensor:
    """[B, 1], detached: the mean of every group."""
    return value_BK.detach().mean(dim=1, keepdim=True)


def centred(value_BK: Tensor) -> Tensor:
    """[B, K], detached: each value less the mean of its group."""
    return value_BK.detach() - group_mean(value_BK)


def leave_one_out(value_BK: Tensor) -> Tensor:
    """[B, K], detached: each value less the mean of the *others* of its group, K/(K−1) times ``centred``."""
    completions = value_BK.shape[1]
    return centred(value_BK) * completions / (completions - 1)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's surrogate min(ρ·A, clip(ρ, 1 − low, 1 + high)·A) (arXiv 1707.06347, eq. 7), to be maximised.

    And bool: where the clipped term is the lower one, which has no gradient.
    """
    plain = ratio * advantage
    surrogate = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantage)
    return surrogate, surrogate < plain


def second_moment_mask(log_ratio_BKL: Tensor, advantage_BK1: Tensor, limit: float) -> Tensor:
    """bool [B, K, L]: the tokens that M2PO's mask leaves of each group (arXiv 2510.01161, algorithm 1).

    Its trust region is about tokens whose ratio has gone where their advantage pushes it, as PPO's clip is:
    A > 0 and ρ > 1, or A < 0 and ρ < 1. Of these the ones with the largest (log ρ)² go, one by one, until
    its mean over the rest is at most ``limit``, nats². All other tokens stay.
    """
    log_ratio_BKL = log_ratio_BKL.detach()
    beyond_BC = (log_ratio_BKL * advantage_BK1 > 0).flatten(1)
    square_BC = log_ratio_BKL.flatten(1).square().where(beyond_BC, math.inf)  # the others come last
    rising_BC, order_BC = square_BC.sort(dim=1)
    count_C = torch.arange(1, square_BC.shape[1] + 1, device=square_BC.device)
    within_BC = rising_BC.cumsum(1) / count_C <= limit  # means rise with the squares: a first part
    stays_BC = torch.empty_like(beyond_BC).scatter(1, order_BC, within_BC)
    return (stays_BC | ~beyond_BC).view(log_ratio_BKL.shape)


def token_share(acts_BKL: Tensor, groups: Groups) -> Tensor:
    """Share of the completions' tokens at which ``acts_BKL`` (bool) holds, a scalar.

    Of a part of a batch it is by the length of the whole batch's completions, so that parts add up.
    """
    return (acts_BKL & groups.mask_BKL).sum(2).double().mean() / groups.mean_tokens
