"""Sums over the completions that a searcher scored since its last metric record, and the record's figures.

``metric_table`` says what each figure means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tba_hpc.core.types import Group
from tba_hpc.run.metrics import Value


class Sums(dict[str, float]):
    """Sums by name over scored groups. A missing name is 0; ``+`` adds two; ``figures`` are logged.

    Over groups with a reward: groups; flat: groups whose rewards are all the same; completions; truncated:
    completions that the token limit ended; tokens: of completions; environment: tokens that the policy did
    not sample; turns, calls, failed_calls: in all completions; reward; reward/NAME: its part NAME, if it is
    a sum. own, logprob: sampled tokens of requests that are not tempered, and their log π_behaviour, nats.
    compared, kl: completions among these with a reference, and their log π_behaviour − log π_ref, nats.
    checked, gap: tokens whose logprob was computed by two programs under the same weights, and the sum of
    the absolute differences, nats.
    Over all groups: asked, reward_seconds: groups given to the task, and the time that it took; rejected:
    completions set aside because their reward is not finite, or because the task's code raised;
    seal_seconds. About the searcher: generated: sampled tokens; load_seconds: of the last load of weights;
    propagation_seconds: from the publication of these weights until they are in use.
    """

    def __missing__(self, name: str) -> float:
        return 0

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
        """Sums of one group of at least one completion.

        ref_logprobs: float32 [T] per completion; None without a reference model. parts: summands of the
        rewards, by name. tempered: the group was sampled at a temperature of its own, so its logprobs say
        nothing about the policy's entropy or KL.
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
            **{f"reward/{name}": float(sum(values)) for name, values in (parts or {}).items()},
        )
        if not tempered:
            sums |= {"own": len(behaviour), "logprob": _total(behaviour)}
            if ref_logprobs is not None:
                kl = sums["logprob"] - _total(_sampled(group, ref_logprobs))
                sums |= {"compared": len(rewards), "kl": kl}
        return sums

    @classmethod
    def between(cls, groups: Sequence[Group], logprobs: Sequence[Sequence[np.ndarray]]) -> Sums:
        """Compare the logprobs of sampled tokens that came with the completions with ``logprobs``."""
        pairs = list(zip(groups, logprobs, strict=True))
        here = np.concatenate([_sampled(group, [c.logprobs for c in group.completions]) for group in groups])
        there = np.concatenate([_sampled(group, rows) for group, rows in pairs])
        return cls(checked=len(here), gap=_total(np.abs(here - there)))

    def __add__(self, other: Mapping[str, float]) -> Sums:
        """Return the sums over the groups of both."""
        return Sums({name: self[name] + other.get(name, 0) for name in {**self, **other}})

    def figures(self) -> dict[str, Value]:
        """Return a record's figures; None where there is nothing to take a mean of."""
        return {
            "search/groups": self["groups"],
            "search/trajectories": self["completions"],
            "search/reward": self._mean("reward", "completions"),
            "search/truncated_share": self._mean("truncated", "completions"),
            "search/kl": self._mean("kl", "compared"),
            "search/entropy": _mean(-self["logprob"], self["own"]),
            "search/flat_groups": self._mean("flat", "groups"),
            "search/length": _mean(self["tokens"] - self["environment"], self["completions"]),
            "search/environment_share": self._mean("environment", "tokens"),
            "search/turns": self._mean("turns", "completions"),
            "search/failed_calls": self._mean("failed_calls", "calls"),
            "search/engine_gap": self._mean("gap", "checked"),
            **{f"search/{name}": self._mean(name, "completions") for name in self if "/" in name},
        }

    def _mean(self, total: str, count: str) -> float | None:
        return _mean(self[total], self[count])


def _sampled(group: Group, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Select the values of sampled tokens from rows of one value per token of each completion; float32."""
    return np.concatenate([row[c.action_T] for c, row in zip(group.completions, rows, strict=True)])


def _total(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
