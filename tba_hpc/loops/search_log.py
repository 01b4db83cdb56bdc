"""Sums over the completions that a searcher has scored since its last line of metrics, for the next line.

``run.metric_table`` explains each figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tba_hpc.core.types import Group
from tba_hpc.run.metrics import Value


@dataclass(slots=True)
class Sums:
    """Sums over scored groups. ``+`` adds two of them, and ``figures`` computes what is logged."""

    # Over all groups
    scored: int = 0
    """Number of groups that the task scored."""
    reward_seconds: float = 0.0
    """Time that the task took to score the groups, in seconds."""
    rejected: int = 0
    """Number of completions set aside because they have no finite reward, or the task's code failed."""
    seal_seconds: float = 0.0
    """Time spent on sealing shards, in seconds."""

    # Over groups with a reward
    groups: int = 0
    flat: int = 0
    """Number of groups whose rewards are all the same."""
    completions: int = 0
    truncated: int = 0
    """Number of completions that the token limit ended."""
    tokens: int = 0
    """Number of completion tokens, with those of environments."""
    environment: int = 0
    """Number of completion tokens that the policy did not sample."""
    turns: int = 0
    """Number of the policy's turns."""
    calls: int = 0
    """Number of tool calls."""
    failed_calls: int = 0
    reward: float = 0.0
    """Sum of the rewards of all completions."""
    parts: dict[str, float] = field(default_factory=dict)
    """Sums of each named summand of the reward."""

    # Over the sampled tokens of these groups, except groups sampled at a random temperature
    sampled: int = 0
    """Number of sampled tokens."""
    logprob: float = 0.0
    """Sum of log π_behaviour over sampled tokens, nats."""
    compared: int = 0
    """Number of completions that were scored by a reference model."""
    kl: float = 0.0
    """Sum of log π_behaviour − log π_ref over the sampled tokens of the ``compared`` completions, nats."""

    # Over tokens whose log-probability both engine and learner code computed, under the same weights
    checked: int = 0
    """Number of tokens whose log-probabilities the engine and the learner's code both computed."""
    gap: float = 0.0
    """Sum of |log π_engine − log π_learner| over the ``checked`` tokens, nats."""

    # From the searcher's loop
    generated: int = 0
    """Number of tokens that the engine sampled, evaluations included."""
    load_seconds: float = 0.0
    """Duration of the last load of weights, in seconds."""
    propagation_seconds: float = 0.0
    """Time from the publication of the last loaded weights until they were in use, in seconds."""

    @classmethod
    def of(
        cls,
        group: Group,
        rewards: Sequence[float],
        ref_logprobs: Sequence[np.ndarray] | None = None,
        parts: Mapping[str, Sequence[float]] | None = None,
        *,
        tempered: bool = False,
    ) -> Sums:
        """Return the sums of one group of at least one completion.

        rewards: one per completion. ref_logprobs: log π_ref, float32 [T] per completion; None without a
        reference model. parts: result of ``Task.reward_parts``. tempered: whether the group was sampled at a
        random temperature. If so, its log-probabilities do not estimate the policy's entropy and KL.
        """
        completions = group.completions
        tokens = sum(len(completion.tokens) for completion in completions)
        behaviour = _sampled(group, [completion.logprobs for completion in completions])
        sums = cls(
            groups=1,
            flat=int(np.ptp(rewards) == 0),
            completions=len(rewards),
            truncated=sum(completion.finish_reason == "length" for completion in completions),
            tokens=tokens,
            environment=tokens - len(behaviour),
            turns=sum(completion.turns for completion in completions),
            calls=sum(completion.calls for completion in completions),
            failed_calls=sum(completion.failed_calls for completion in completions),
            reward=_total(np.asarray(rewards)),
            parts={name: float(sum(values)) for name, values in (parts or {}).items()},
        )
        if not tempered:
            sums.sampled, sums.logprob = len(behaviour), _total(behaviour)
            if ref_logprobs is not None:
                sums.compared, sums.kl = len(rewards), sums.logprob - _total(_sampled(group, ref_logprobs))
        return sums

    @classmethod
    def between(cls, groups: Sequence[Group], logprobs: Sequence[Sequence[np.ndarray]]) -> Sums:
        """Return sums that compare the engine's log-probabilities in ``groups`` with ``logprobs``.

        logprobs: float32 [T] by group and completion. Only sampled tokens are compared.
        """
        pairs = list(zip(groups, logprobs, strict=True))
        here = np.concatenate([_sampled(group, [c.logprobs for c in group.completions]) for group in groups])
        there = np.concatenate([_sampled(group, rows) for group, rows in pairs])
        return cls(checked=len(here), gap=_total(np.abs(here - there)))

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the groups of both operands."""
        names = [one.name for one in fields(self) if one.name != "parts"]
        parts = {
            name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in self.parts | other.parts
        }
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in names}, parts=parts)

    def figures(self) -> dict[str, Value]:
        """Return the figures of a line of metrics; None where there is nothing to average."""
        return {
            "search/groups": self.groups,
            "search/trajectories": self.completions,
            "search/reward": _mean(self.reward, self.completions),
            "search/truncated_share": _mean(self.truncated, self.completions),
            "search/kl": _mean(self.kl, self.compared),
            "search/entropy": _mean(-self.logprob, self.sampled),
            "search/flat_groups": _mean(self.flat, self.groups),
            "search/length": _mean(self.tokens - self.environment, self.completions),
            "search/environment_share": _mean(self.environment, self.tokens),
            "search/turns": _mean(self.turns, self.completions),
            "search/failed_calls": _mean(self.failed_calls, self.calls),
            "search/engine_gap": _mean(self.gap, self.checked),
            **{f"search/reward/{name}": _mean(total, self.completions) for name, total in self.parts.items()},
        }


def _sampled(group: Group, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values at all sampled tokens of a group, float32 [A]. rows: values [T], by completion."""
    return np.concatenate([row[c.action_T] for c, row in zip(group.completions, rows, strict=True)])


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
