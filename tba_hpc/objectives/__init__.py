"""Losses over whole groups, as pure functions of torch tensors; ``OBJECTIVES`` finds one by config name.

Nothing here knows about models, ranks or optimizers.
"""

from tba_hpc.objectives.common import Objective, ObjectiveOutput
from tba_hpc.objectives.policy_gradient import policy_gradient
from tba_hpc.objectives.trajectory_balance import trajectory_balance

OBJECTIVES: dict[str, Objective] = {
    "trajectory_balance": trajectory_balance,
    "policy_gradient": policy_gradient,
}
"""Keyed as ``train.objective``."""

__all__ = ["OBJECTIVES", "Objective", "ObjectiveOutput", "policy_gradient", "trajectory_balance"]
