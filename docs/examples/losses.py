"""Two losses of one's own: copy the file beside a config and set ``train.objective: losses:online_dpo``.

Both take ``tba_hpc.objectives.Groups``, β and options, and return the loss of each completion, [B, K].
"""

import torch
from torch.nn.functional import logsigmoid


def online_dpo(groups, beta):
    """DPO (arXiv 2305.18290, eq. 7) on a group's best and worst completion by reward (arXiv 2402.04792).

    The group's loss is −log σ(β·[log π_θ/π_ref(best) − log π_θ/π_ref(worst)]), 0 if all rewards are equal.
    """
    best, worst = groups.reward_BK.max(1, keepdim=True), groups.reward_BK.min(1, keepdim=True)
    margin_B1 = groups.log_ratio_BK.gather(1, best.indices) - groups.log_ratio_BK.gather(1, worst.indices)
    loss_B1 = -logsigmoid(beta * margin_B1) * (best.values > worst.values)
    return loss_B1.expand_as(groups.reward_BK)


def proximal_rloo(groups, beta, *, ratio_clip=0.2):
    """RLOO under PPO's clip (arXiv 2410.18252): −min(ρ·A, clip(ρ, 1 ± ratio_clip)·A) of each completion.

    ρ is π_θ/π_behaviour. A is R less the mean R of the others in the group, R = r − β·log(π_behaviour/π_ref).
    Set ``train.ratio_bound: none``, because the clip already limits stale data, and
    ``model.logprob_temperature`` to ``generator.temperature``.
    """
    shaped_BK = groups.reward_BK - beta * (groups.behaviour_logprob_BK - groups.ref_logprob_BK)
    others_BK = (shaped_BK.sum(1, keepdim=True) - shaped_BK) / (shaped_BK.shape[1] - 1)
    ratio_BK = (groups.logprob_BK - groups.behaviour_logprob_BK).clamp(max=20).exp()  # else it overflows
    advantage_BK, clipped_BK = shaped_BK - others_BK, ratio_BK.clamp(1 - ratio_clip, 1 + ratio_clip)
    return -torch.minimum(ratio_BK * advantage_BK, clipped_BK * advantage_BK)
