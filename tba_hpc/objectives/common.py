"""Common parts of all objectives: input, signature and result."""

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
"""Limit on log-ratios, in nats. Beyond it a ratio of probabilities is constant at e^20, without gradient.

The squared gradient norm of a million tokens with an advantage of 1000 is then at most 2e35, which float32
can hold.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedGroups:
    """Recorded values of a batch in rectangles: numpy arrays, or the tensors that were made of them.

    cell_T: int64, index of each completion token in a flattened rectangle [B, K, L]. For the other fields see
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
    top_behaviour_BKLC: Any = None

    @staticmethod
    def of(batch: TrajectoryBatch) -> RecordedGroups:
        """Make numpy arrays for all groups of ``batch``."""
        sampled_T, cell_T = batch.action_T, batch.cell_T
        shape = batch.groups, batch.group_size
        cell_A = cell_T[sampled_T]
        top_AC = batch.top_logprobs["logprob"][sampled_T]

        def spread(value_A: np.ndarray) -> np.ndarray:
            """Put the values of the sampled tokens into a rectangle that is 0 elsewhere."""
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
    """B groups of K completions of the same prompt, in rectangles of L positions.

    Groups must be whole, because baselines are computed from what is given here.

    policy_BKL: float, log π_θ of each token, with gradient. behaviour_BKL, reference_BKL: float, the same
    under the weights that sampled the token and under the reference, without gradient. All three use
    model.logprob_temperature. mask_BKL: bool, tokens that the policy sampled, EOS included; elsewhere the
    three are 0. Tokens from an environment are masked, because all three policies give them the same
    probability.

    reward_BK: float. value_BK: float, V̂ of each completion's request. batch_tokens: mean number of sampled
    tokens per completion in the whole batch; None: these groups are the whole batch. on_policy_BK: bool,
    whether the weights θ sampled the completion; None: unknown. age_BKL: int32, optimizer steps from the
    weights that sampled a token to θ; None: unknown. top_policy_BKLC, top_behaviour_BKLC: float,
    log-probabilities under θ and under the sampling weights of the C tokens that were likeliest at each
    position when sampling; None: not recorded.
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
        """Combine recorded values, as tensors, with the policy's log-probabilities.

        policy_T: float32 [T], log π_θ of all completion tokens, with gradient, 0 at an environment's tokens;
        or [T, 1 + C], with log π_θ of the C tokens of ``top_policy_BKLC`` in the last C columns.
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
        """Yield each group alone, with B = 1."""
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
        """Log-ratio log π_θ/π_ref of whole completions, with gradient: k1 estimate of KL(π_θ‖π_ref), nats."""
        return self.logprob_BK - self.ref_logprob_BK

    @property
    def log_weight_BK(self) -> Tensor:
        """Log-ratio log π_θ/π_behaviour of whole completions, detached, nats."""
        return self.logprob_BK.detach() - self.behaviour_logprob_BK

    @property
    def token_ratio_BKL(self) -> Tensor:
        """Ratio π_θ/π_behaviour of each token, with gradient, bounded; 1 where no token was sampled."""
        return bounded_exp(self.policy_BKL - self.behaviour_BKL)

    @property
    def ratio_BK(self) -> Tensor:
        """Ratio π_θ/π_behaviour of whole completions, with gradient, bounded."""
        return bounded_exp(self.logprob_BK - self.behaviour_logprob_BK)


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """Losses of completions ("rows"), and metrics.

    loss_BK: loss of each row, with gradient, summed over its tokens; ``make_objective`` then divides it by
    the config's normaliser. metrics: detached scalars, means over the same rows. The loss and metrics of a
    batch are therefore means over its micro-batches, weighted by their numbers of groups.
    """

    loss_BK: Tensor
    metrics: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """Mean over the rows, a scalar with gradient."""
        return self.loss_BK.mean()


Objective = Callable[[Groups, float], ObjectiveOutput]
"""A loss over whole groups. The second argument is the KL coefficient β, above 0."""


def normaliser(groups: Groups, name: LossNormaliser, max_tokens: int) -> Tensor | float:
    """Return the divisor of each completion's loss, [B, K], or one number for all of them."""
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
    """Return exp(log_ratio), with gradient; beyond MAX_LOG_RATIO the result is constant."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def group_mean(value_BK: Tensor) -> Tensor:
    """Return the mean of every group, [B, 1], detached."""
    return value_BK.detach().mean(dim=1, keepdim=True)


def centred(value_BK: Tensor) -> Tensor:
    """Return each value minus the mean of its group, [B, K], detached."""
    return value_BK.detach() - group_mean(value_BK)


def leave_one_out(value_BK: Tensor) -> Tensor:
    """Return each value minus the mean of its group's *others*, [B, K], detached: K/(K−1) × ``centred``."""
    completions = value_BK.shape[1]
    return centred(value_BK) * completions / (completions - 1)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's surrogate min(ρ·A, clip(ρ, 1 − low, 1 + high)·A) (arXiv 1707.06347, eq. 7), to maximise.

    Also returns a mask, bool, of where the clipped term is the lower one, so that there is no gradient.
    """
    plain = ratio * advantage
    surrogate = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantage)
    return surrogate, surrogate < plain


def second_moment_mask(log_ratio_BKL: Tensor, advantage_BK1: Tensor, limit: float) -> Tensor:
    """Return which tokens of each group M2PO's mask keeps, bool [B, K, L] (arXiv 2510.01161, algorithm 1).

    Like PPO's clip, the mask acts on tokens whose ratio has moved in the direction of the advantage: A > 0
    and ρ > 1, or A < 0 and ρ < 1. Of these, the tokens with the largest (log ρ)² are masked until the mean
    square of the rest is at most ``limit``, nats². All other tokens are kept.
    """
    log_ratio_BKL = log_ratio_BKL.detach()
    beyond_BC = (log_ratio_BKL * advantage_BK1 > 0).flatten(1)
    square_BC = log_ratio_BKL.flatten(1).square().where(beyond_BC, math.inf)  # the others come last
    rising_BC, order_BC = square_BC.sort(dim=1)
    count_C = torch.arange(1, square_BC.shape[1] + 1, device=square_BC.device)
    within_BC = rising_BC.cumsum(1) / count_C <= limit  # means rise with the squares, so this is a prefix
    stays_BC = torch.empty_like(beyond_BC).scatter(1, order_BC, within_BC)
    return (stays_BC | ~beyond_BC).view(log_ratio_BKL.shape)


def token_share(acts_BKL: Tensor, groups: Groups) -> Tensor:
    """Return the share of sampled tokens at which ``acts_BKL``, bool, is True, as a scalar.

    The divisor is the mean length in the whole batch, so that the mean over micro-batches is the batch's
    share.
    """
    return (acts_BKL & groups.mask_BKL).sum(2).double().mean() / groups.mean_tokens
