"""What a searcher's records say of the completions scored since the record before, as sums that add up.

``metric_table`` says what each name means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tba_hpc.core.types import Group
from tba_hpc.run.metrics import Value


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Over fresh groups whose completions have a reward; ``+`` adds up, ``figures`` are what is logged.

    flat: groups whose rewards are all the same. truncated: completions that the token limit ended. tokens:
    of completions, ``environment`` of which the policy did not sample. turns, calls, failed_calls: in all
    completions. own, logprob: sampled tokens of requests that are not tempered, and log π_behaviour, nats.
    compared, kl: completions among these with a reference of their own, and log π_behaviour − log π_ref of
    them, nats.
    checked, gap: tokens whose log-probability was computed by two programs under the same weights, and the
    sum of the absolute differences, nats. parts: of the rewards by name, where they are sums of several.
    """

    groups: int = 0
    flat: int = 0
    completions: int = 0
    truncated: int = 0
    tokens: int = 0
    environment: int = 0
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    reward: float = 0.0
    own: int = 0
    logprob: float = 0.0
    compared: int = 0
    kl: float = 0.0
    checked: int = 0
    gap: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

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
        """Of one group, at least one completion; ref_logprobs: float32 [T] of each, None without a model.

        parts: what each reward is a sum of, by name. tempered: sampled at a temperature of its own, so that
        its log-probabilities say nothing of the policy's entropy, nor of KL.
        """
        reward_K = np.asarray(rewards, np.float64)
        tokens = sum(len(completion.tokens) for completion in group.completions)
        behaviour = _sampled(group, [completion.logprobs for completion in group.completions])
        logprob = 0.0 if tempered else _total(behaviour)
        compared = 0 if tempered or ref_logprobs is None else len(rewards)
        return cls(
            groups=1,
            flat=int(np.ptp(reward_K) == 0),
            completions=len(rewards),
            truncated=sum(completion.finish_reason == "length" for completion in group.completions),
            tokens=tokens,
            environment=tokens - len(behaviour),
            turns=sum(completion.turns for completion in group.completions),
            calls=sum(completion.calls for completion in group.completions),
            failed_calls=sum(completion.failed_calls for completion in group.completions),
            reward=float(reward_K.sum()),
            own=0 if tempered else len(behaviour),
            logprob=logprob,
            compared=compared,
            kl=logprob - _total(_sampled(group, ref_logprobs))
            if compared and ref_logprobs is not None
            else 0.0,
            parts={name: float(sum(values)) for name, values in (parts or {}).items()},
        )

    @classmethod
    def between(cls, groups: Sequence[Group], logprobs: Sequence[Sequence[np.ndarray]]) -> Sums:
        """Of the two log-probabilities of each sampled token: what came with it, and ``logprobs``."""
        pairs = list(zip(groups, logprobs, strict=True))
        here = np.concatenate([_sampled(group, [c.logprobs for c in group.completions]) for group in groups])
        there = np.concatenate([_sampled(group, rows) for group, rows in pairs])
        return cls(checked=len(here), gap=float(np.abs(here - there).sum(dtype=np.float64)))

    def __add__(self, other: Sums) -> Sums:
        """Over the groups of both."""
        names = [one.name for one in fields(self) if one.name != "parts"]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        parts = {**self.parts, **other.parts}
        added["parts"] = {name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in parts}
        return Sums(**added)

    def figures(self) -> dict[str, Value]:
        """What a record says; None if there is nothing to take a mean of."""
        return {
            "search/groups": self.groups,
            "search/trajectories": self.completions,
            "search/reward": _mean(self.reward, self.completions),
            "search/truncated_share": _mean(self.truncated, self.completions),
            "search/kl": _mean(self.kl, self.compared),
            "search/entropy": _mean(-self.logprob, self.own),
            "search/flat_groups": _mean(self.flat, self.groups),
            "search/length": _mean(self.tokens - self.environment, self.completions),
            "search/environment_share": _mean(self.environment, self.tokens),
            "search/turns": _mean(self.turns, self.completions),
            "search/failed_calls": _mean(self.failed_calls, self.calls),
            "search/engine_gap": _mean(self.gap, self.checked),
            **{f"search/reward/{name}": _mean(value, self.completions) for name, value in self.parts.items()},
        }


def _sampled(group: Group, rows: Sequence[np.ndarray]) -> np.ndarray:
    """float32: of values for each token of the completions those of sampled ones."""
    return np.concatenate([row[c.action_T] for c, row in zip(group.completions, rows, strict=True)])


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
