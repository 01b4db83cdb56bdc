"""Losses over whole groups, as pure functions of torch tensors; ``make_objective`` finds the one of a config.

Nothing here knows about models, ranks or optimizers.
"""

from dataclasses import replace
from functools import partial

from tba_hpc.config import TrainSection
from tba_hpc.objectives.advantage_regression import oapl
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput, normaliser
from tba_hpc.objectives.diagnostics import figures, moments
from tba_hpc.objectives.policy_gradient import dr_grpo, grpo, proximal_rloo, rloo
from tba_hpc.objectives.preference import online_dpo
from tba_hpc.objectives.trajectory_balance import tba_prime, trajectory_balance

__all__ = ["Groups", "Objective", "ObjectiveOutput", "figures", "make_objective"]


def make_objective(train: TrainSection, *, max_tokens: int) -> Objective:
    """The loss that ``train.objective`` names, with its limits, over the normaliser that ``train`` asks for.

    Its metrics hold the moments of ``diagnostics``, too, of which ``figures`` makes what is logged.
    max_tokens: the longest completion that can be sampled, in tokens.
    """
    objective = _find(train)

    def normalised(groups: Groups, beta: float) -> ObjectiveOutput:
        output = objective(groups, beta)
        divisor = normaliser(groups, train.normaliser, max_tokens)
        metrics = {**output.metrics, **moments(groups)}
        return replace(output, loss_BK=output.loss_BK / divisor, metrics=metrics)

    return normalised


def _find(train: TrainSection) -> Objective:
    clip, limit, shift = train.ratio_clip, train.second_moment_limit, train.baseline_shift
    objectives: dict[str, Objective] = {
        "trajectory_balance": partial(trajectory_balance, ratio_cap=train.ratio_cap, gap_clip=train.gap_clip),
        "tba_prime": partial(tba_prime, ratio_cap=train.ratio_cap),
        "oapl": oapl,
        "rloo": partial(rloo, baseline_shift=shift),
        "proximal_rloo": partial(proximal_rloo, ratio_clip=clip, baseline_shift=shift),
        "grpo": partial(grpo, ratio_clip=clip, second_moment_limit=limit),
        "dr_grpo": partial(dr_grpo, ratio_clip=clip, second_moment_limit=limit, baseline_shift=shift),
        "online_dpo": online_dpo,
    }
    return objectives[train.objective]
