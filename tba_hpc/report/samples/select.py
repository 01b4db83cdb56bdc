"""Finds trajectories in the shards of a run: the best, the worst, those of a prompt, those with a word.

Shards are read one after the other, and only what is asked for is kept, so a run may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from tba_hpc.core.types import BEHAVIOUR, Shard, Trajectories
from tba_hpc.exchange.hdf5_shards import ShardError, read_shard
from tba_hpc.report.samples.life import Life, Lives, identity
from tba_hpc.report.samples.texts import Decode
from tba_hpc.run.directory import RunDir
from tba_hpc.run.pruning import sealed_files

SortBy = Literal["newest", "oldest", "best", "worst", "changed"]

Rank = tuple[float, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which trajectories are wanted.

    order: newest or oldest weights first, best or worst reward, or furthest from the reference. limit: so
    many, equal answers to a prompt once; None: all. prompt: only answers to this one. versions: only what
    weights of these optimizer steps have sampled, both ends included. text: only if question or answer
    have it, in letters of either case.
    """

    order: SortBy = "newest"
    limit: int | None = 10
    prompt: int | None = None
    versions: tuple[int, int] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory, what is known of it, and its arrays, which JSON leaves out.

    shard: its searcher, its index, and the row in it. log_ratio: mean over its tokens of log π_behaviour −
    log π_ref, nats, None if the sampling weights are the reference, or the trainer scores it. staleness:
    optimizer steps between the weights that sampled its first token and its merge; None before that.
    """

    uid: int
    shard: tuple[int, int, int]
    prompt_id: int
    request_id: int
    reward: float
    versions: tuple[int, int]
    reference: int
    truncated: bool
    log_ratio: float | None
    life: Life
    prompt: str
    completion: str
    tokens: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    ref_logprobs: np.ndarray = field(repr=False)

    @property
    def staleness(self) -> int | None:
        """In optimizer steps."""
        step = self.life.merged_step
        return None if step is None else abs(step - self.versions[0])

    def values(self) -> dict[str, Any]:
        """Everything in plain values but the arrays, their length as ``tokens``."""
        searcher, index, row = self.shard
        return {
            "uid": self.uid,
            "searcher": searcher,
            "shard": index,
            "row": row,
            "prompt_id": self.prompt_id,
            "request_id": self.request_id,
            "reward": self.reward,
            "version_oldest": self.versions[0],
            "version_newest": self.versions[1],
            "reference": self.reference,
            "truncated": self.truncated,
            "tokens": len(self.tokens),
            "log_ratio": self.log_ratio,
            **asdict(self.life),
            "staleness": self.staleness,
            "prompt": self.prompt,
            "completion": self.completion,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """What was found. read, found: trajectories that are still there, and those that the query is about.

    checkpoint_step: as of which what they were used for is known. merged: how many the run has merged.
    """

    samples: list[Sample]
    read: int
    found: int
    checkpoint_step: int | None


@dataclass(slots=True)
class _Best:
    """The first ``limit`` by rank, each text once; all if there is no limit."""

    limit: int | None
    ranked: dict[object, tuple[Rank, Sample]] = field(default_factory=dict)
    bar: Rank = (-np.inf, 0, 0)

    def wants(self, rank: Rank) -> bool:
        return self.limit is None or len(self.ranked) < self.limit or rank > self.bar

    def take(self, rank: Rank, same: object, sample: Sample) -> None:
        if self.limit is None:
            same = sample.uid
        if same not in self.ranked or rank > self.ranked[same][0]:
            self.ranked[same] = (rank, sample)
        if self.limit is not None and len(self.ranked) > self.limit:
            del self.ranked[min(self.ranked, key=lambda known: self.ranked[known][0])]
        if len(self.ranked) == self.limit:
            self.bar = min(rank for rank, _ in self.ranked.values())

    def in_order(self) -> list[Sample]:
        ranked = sorted(self.ranked.values(), key=lambda pair: pair[0], reverse=True)
        return [sample for _, sample in ranked]


def select(run: RunDir, query: Query, decode: Decode) -> Selection:
    """Look through all shards of a run that are there."""
    lives, best, read, found = Lives.read(run), _Best(query.limit), 0, 0
    for shard in sealed_shards(run):
        trajectories = shard.trajectories
        read += len(trajectories)
        rows = [row for row in _rows(trajectories, query) if _has_text(trajectories, row, query, decode)]
        found += len(rows)
        log_ratio_N, ranks = _log_ratios(trajectories), _ranks(trajectories, query.order)
        for row in rows:
            if best.wants(ranks[row]):
                same = identity(trajectories.record[row], trajectories.completions.row(row))
                best.take(ranks[row], same, _sample(shard, row, log_ratio_N[row], lives, decode))
    return Selection(best.in_order(), read, found, lives.step)


def sealed_shards(run: RunDir) -> Iterator[Shard]:
    """The whole shards of a run, by searcher and index; those that move meanwhile are followed."""
    for key, path in sealed_files(run).items():
        for place in (path, run.kept_file(*key)):
            try:
                yield read_shard(place)
                break
            except FileNotFoundError:  # kept or deleted meanwhile
                continue
            except ShardError:  # the audit names it
                break


def _rows(trajectories: Trajectories, query: Query) -> list[int]:
    """Of the prompt and of the weights that are asked for."""
    record = trajectories.record
    wanted_N = np.ones(len(record), bool)
    if query.prompt is not None:
        wanted_N &= record["prompt_id"] == query.prompt
    if query.versions is not None:
        first, last = query.versions
        wanted_N &= (record["version_newest"] >= first) & (record["version_oldest"] <= last)
    return np.flatnonzero(wanted_N).tolist()


def _has_text(trajectories: Trajectories, row: int, query: Query, decode: Decode) -> bool:
    if not query.text:
        return True
    texts = (decode(trajectories.completions.row(row)), _question(trajectories, row, decode))
    return any(query.text.casefold() in text.casefold() for text in texts)


def _question(trajectories: Trajectories, row: int, decode: Decode) -> str:
    return decode(trajectories.prompts.row(int(trajectories.record["prompt_row"][row])))


def _log_ratios(trajectories: Trajectories) -> list[float | None]:
    """Mean over the tokens of each completion; None if the reference is what sampled, or unknown yet."""
    difference_T = trajectories.logprobs.astype(np.float64) - trajectories.ref_logprobs
    offsets, length_N = trajectories.completions.offsets, trajectories.completions.lengths
    unknown_N = _sums(np.isnan(difference_T), offsets) > 0
    mean_N = _sums(np.nan_to_num(difference_T), offsets) / np.maximum(length_N, 1)
    other_N = (trajectories.record["reference"] != BEHAVIOUR) & ~unknown_N
    return [float(mean) if other else None for mean, other in zip(mean_N, other_N, strict=True)]


def _sums(value_T: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """float64 [N]: of each row."""
    sums = np.concatenate([[0.0], np.cumsum(value_T)])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _ranks(trajectories: Trajectories, order: SortBy) -> list[Rank]:
    """What comes first has the highest; among equals the newest does."""
    record = trajectories.record
    newest_N, uid_N = record["version_newest"].tolist(), record["uid"].tolist()
    sign = -1 if order == "oldest" else 1
    match order:
        case "best":
            first_N = record["reward"].tolist()
        case "worst":
            first_N = (-record["reward"]).tolist()
        case "changed":
            first_N = [-np.inf if ratio is None else ratio for ratio in _log_ratios(trajectories)]
        case _:
            first_N = [0.0] * len(record)
    return [
        (first, sign * newest, sign * uid)
        for first, newest, uid in zip(first_N, newest_N, uid_N, strict=True)
    ]


def _sample(shard: Shard, row: int, log_ratio: float | None, lives: Lives, decode: Decode) -> Sample:
    trajectories, key = shard.trajectories, (shard.searcher, shard.index)
    record, tokens = trajectories.record[row], trajectories.completions.row(row)
    span = slice(*trajectories.completions.offsets[row : row + 2])
    return Sample(
        uid=int(record["uid"]),
        shard=(*key, row),
        prompt_id=int(record["prompt_id"]),
        request_id=int(record["request_id"]),
        reward=float(record["reward"]),
        versions=(int(record["version_oldest"]), int(record["version_newest"])),
        reference=int(record["reference"]),
        truncated=bool(record["truncated"]),
        log_ratio=log_ratio,
        life=lives.of(key, record, tokens),
        prompt=_question(trajectories, row, decode),
        completion=decode(tokens),
        tokens=tokens.copy(),
        logprobs=trajectories.logprobs[span].copy(),
        ref_logprobs=trajectories.ref_logprobs[span].copy(),
    )
