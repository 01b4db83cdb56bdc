"""Losses of groups of completions, as pure functions of torch tensors; ``make_objective`` builds one.

Nothing here knows about models, ranks or optimizers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tba_hpc.config import TrainSection
from tba_hpc.config.variants import LaggedReference, ObjectiveSection, OwnObjective
from tba_hpc.objectives.advantage_regression import oapl
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput, RecordedGroups, normaliser
from tba_hpc.objectives.diagnostics import figures, moments
from tba_hpc.objectives.lagged import with_lagged_reference
from tba_hpc.objectives.own import own_objective
from tba_hpc.objectives.policy_gradient import decoupled_ppo, dr_grpo, grpo, gspo, rloo, topr
from tba_hpc.objectives.ratio_bounds import bounded
from tba_hpc.objectives.trajectory_balance import tba_prime, trajectory_balance

__all__ = ["Groups", "Objective", "ObjectiveOutput", "RecordedGroups", "figures", "make_objective"]

OBJECTIVES: dict[str, Callable[..., ObjectiveOutput]] = {
    "trajectory_balance": trajectory_balance,
    "tba_prime": tba_prime,
    "oapl": oapl,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "topr": topr,
}
"""Objectives by ``train.objective.name``. The other keys of train.objective are their keyword arguments."""


def make_objective(train: TrainSection, *, max_tokens: int) -> Objective:
    """Build the loss that ``train`` describes: objective, normaliser, ratio bound and score centering.

    The metrics that it returns include those of ``diagnostics.moments``. ``diagnostics.figures`` turns the
    metrics of a whole batch into those to log.

    max_tokens: token limit of a completion. Raises ConfigError if a user's own objective cannot be imported
    or called.
    """
    objective = _find(train.objective)

    def normalised(groups: Groups, beta: float) -> ObjectiveOutput:
        if isinstance(train.reference, LaggedReference):
            groups = with_lagged_reference(groups, train.reference.decay)
        output = objective(groups, beta)
        divisor = normaliser(groups, train.normaliser, max_tokens)
        metrics = {**output.metrics, **moments(groups)}
        return replace(output, loss_BK=output.loss_BK / divisor, metrics=metrics)

    return bounded(normalised, train.ratio_bound, center_scores=train.score_centering > 0)


def _find(section: ObjectiveSection) -> Objective:
    if isinstance(section, OwnObjective):
        return own_objective(section)
    keys = section.model_dump(exclude={"value_beta"})  # the buffer uses it, to compute V̂
    return partial(OBJECTIVES[keys.pop("name")], **keys)
