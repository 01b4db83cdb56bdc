"""Plain REINFORCE with a group baseline and a KL penalty: the contrast to trajectory balance.

It corrects nothing for the age of the data: right on-policy, biased on replayed completions.
"""

from __future__ import annotations

from torch import Tensor

from tba_hpc.objectives.common import ObjectiveOutput, group_mean


def policy_gradient(
    logprob_BK: Tensor, ref_logprob_BK: Tensor, reward_BK: Tensor, beta: float
) -> ObjectiveOutput:
    """mean over all rows of −A·log π_θ + β/2·(log π_θ − log π_ref)², A = K/(K−1)·(r − r̄) without gradient.

    A is the reward less the mean of the *other* completions of its group (RLOO, arXiv 2402.14740). The
    square is the "k2" estimator, whose gradient is that of KL(π_θ‖π_ref) when the completions are π_θ's own.
    So the expected gradient on-policy is exactly that of −(E[r] − β·KL), the same as trajectory balance's.
    Off-policy the two part: E[∇log π_θ] is no longer zero, and the KL term here has no group baseline.

    Metrics: kl (mean of log π_θ/π_ref, nats per completion), advantage (mean absolute value).
    """
    completions = reward_BK.shape[1]
    advantage_BK = (reward_BK - group_mean(reward_BK)) * completions / (completions - 1)
    log_ratio_BK = logprob_BK - ref_logprob_BK
    loss_BK = beta / 2 * log_ratio_BK.square() - advantage_BK * logprob_BK
    metrics = {"kl": log_ratio_BK.detach().mean(), "advantage": advantage_BK.abs().mean()}
    return ObjectiveOutput(loss_BK.mean(), metrics)
