"""What all objectives share: their signature and their result. It must not know any particular loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """loss: scalar with gradient, a mean over the rows given. metrics: detached scalars, means over the

    same rows. Both of a batch are therefore the means of those of its micro-batches, weighted by groups.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """A loss over whole groups."""

    def __call__(
        self, logprob_BK: Tensor, ref_logprob_BK: Tensor, reward_BK: Tensor, beta: float
    ) -> ObjectiveOutput:
        """Rows are the K completions of one prompt each.

        logprob_BK: log π_θ of a completion, summed over its tokens (EOS included), with gradient ·
        ref_logprob_BK: the same under the reference · reward_BK · beta: KL coefficient, above 0.
        A group must be whole: its baseline is taken here.
        """


def group_mean(value_BK: Tensor) -> Tensor:
    """[B, 1], detached: the mean of every group."""
    return value_BK.detach().mean(dim=1, keepdim=True)
