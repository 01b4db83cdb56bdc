"""Preference losses over the best and the worst completion of a group: online DPO."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tba_hpc.objectives.common import Groups, ObjectiveOutput


def online_dpo(groups: Groups, beta: float) -> ObjectiveOutput:
    """DPO (arXiv 2305.18290, eq. 7) on completions that the policy itself samples (arXiv 2402.04792).

    The loss is the mean over groups of −log σ(β·[log π_θ/π_ref(best) − log π_θ/π_ref(worst)]). Best and worst
    are a group's completions by reward, the first if several tie. A group whose rewards are all equal prefers
    nothing and adds 0.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion), margin (mean of the bracket times β,
    over groups), ties (share of groups that prefer nothing).
    """
    log_ratio_BK = groups.log_ratio_BK
    best_B, worst_B = groups.reward_BK.max(1), groups.reward_BK.min(1)
    prefers_B = (best_B.values > worst_B.values).to(log_ratio_BK.dtype)
    margin_B = beta * (_pick(log_ratio_BK, best_B.indices) - _pick(log_ratio_BK, worst_B.indices))
    metrics = {
        "log_ratio": log_ratio_BK.detach().mean(),
        "margin": (prefers_B * margin_B).detach().mean(),
        "ties": 1 - prefers_B.mean(),
    }
    loss_B = -prefers_B * functional.logsigmoid(margin_B)
    return ObjectiveOutput(loss_B[:, None].expand_as(log_ratio_BK), metrics)


def _pick(value_BK: Tensor, column_B: Tensor) -> Tensor:
    return value_BK.gather(1, column_B[:, None])[:, 0]
