"""Users' own losses: functions that a config names as ``module:function``.

    def reinforce(groups, beta, *, scale=1.0):
        advantage = groups.reward_BK - groups.reward_BK.mean(1, keepdim=True)
        return -scale * advantage * groups.logprob_BK

The function is called for each group alone. Its arguments are that group as ``Groups`` (B = 1), β, and
train.objective.options by name. It returns the loss of each completion, float [1, K], with gradient.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tba_hpc.config import ConfigError
from tba_hpc.config.variants import OwnObjective
from tba_hpc.core.own_code import find_function, refusal
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput


def own_objective(section: OwnObjective) -> Objective:
    """Make an objective from a user's function.

    Raises ConfigError if there is no such function, or if it does not accept the arguments. A call of the
    objective raises ConfigError if the function does not return a loss with gradient for each completion.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion).
    """
    key = f"train.objective={section.name}"
    function = find_function(key, section.name)
    if why := refusal(function, None, 1.0, **section.options):
        raise ConfigError(
            f"{key} cannot be called ({why}): let it take (groups, beta) and train.objective.options"
        )
    loss = partial(function, **section.options)

    def objective(groups: Groups, beta: float) -> ObjectiveOutput:
        losses = []
        for group in groups.one_by_one():  # so that no mean depends on other groups
            loss_1K = loss(group, beta)
            _require_loss(key, loss_1K, group)
            losses.append(loss_1K)
        return ObjectiveOutput(torch.cat(losses), {"log_ratio": groups.log_ratio_BK.detach().mean()})

    return objective


def _require_loss(key: str, loss_BK: object, groups: Groups) -> None:
    wanted = list(groups.reward_BK.shape)
    shape = list(loss_BK.shape) if isinstance(loss_BK, Tensor) else type(loss_BK).__name__
    if shape != wanted:
        raise ConfigError(
            f"{key} returned {shape}: let it return a tensor of shape {wanted}, with a loss per completion"
        )
    assert isinstance(loss_BK, Tensor)
    if not loss_BK.requires_grad:
        raise ConfigError(f"{key} returned a loss without gradient: let it depend on groups.policy_BKL")
