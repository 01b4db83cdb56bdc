"""Values that cross layer boundaries: prompts, completions, groups, trajectories, shards, weights.

Only numpy and frozen dataclasses live here, so that a login node without torch can import it.

Shape letters, used in names throughout the project:
    N trajectories, P distinct prompts, B groups of a batch, K completions of a group, T tokens in all
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length"]
Split = Literal["train", "validation", "test"]
Role = Literal["trainer", "searcher"]

ResourceKind = Literal["model", "data set", "file"]

TRUNCATED = np.uint8(1)
"""Value of the record field ``truncated`` for a completion cut off by the token limit."""

BEHAVIOUR = -1
"""In place of a reference's step: no model has scored, its log-probabilities are those of what sampled."""

RECORD = np.dtype(
    [
        ("uid", "<u8"),  # make_uid(searcher, shard, row): unique in a run
        ("prompt_id", "<i8"),  # index of the prompt in its split
        ("request_id", "<i8"),  # number of the request in the run: which prompt it asks follows from it
        ("prompt_row", "<u4"),  # row of the prompt in Trajectories.prompts
        ("reward", "<f4"),
        ("version_oldest", "<i4"),  # weights (optimizer step) that sampled the first token
        ("version_newest", "<i4"),  # weights that sampled the last token
        ("truncated", "u1"),  # 1 where the token limit ended it, not EOS or a stop string
        ("reference", "<i4"),  # policy (optimizer step) of ref_logprobs: 0 the initial one, or BEHAVIOUR
    ]
)
"""Fixed-width part of a trajectory; the ragged parts lie in flat arenas beside it."""


def make_uid(searcher: int, shard: int, row: int) -> int:
    """Identity of a trajectory: 20 bits of searcher, 24 of shard, 20 of row."""
    return searcher << 44 | shard << 20 | row


@dataclass(frozen=True, slots=True)
class Resource:
    """A model, data set or file that a config names under ``key``.

    name: on the hub, or a path. subset: the configuration of a data set, None where it has one alone.
    """

    kind: ResourceKind
    key: str
    name: str
    subset: str | None = None

    def __str__(self) -> str:
        return f"{self.key}={self.name}{f' ({self.subset})' if self.subset else ''}"


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths in one flat array: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    values: any dtype [T]; offsets: int64 [N + 1], starting at 0, never decreasing.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: np.dtype | type) -> Ragged:
        """Pack separate rows into one arena of ``dtype``."""
        values = np.concatenate([np.asarray(row, dtype) for row in rows] or [np.empty(0, dtype)])
        return cls(values, offsets_of([len(row) for row in rows]))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts, in order. ``parts`` must not be empty."""
        return cls(
            np.concatenate([part.values for part in parts]),
            offsets_of(np.concatenate([part.lengths for part in parts])),
        )

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> np.ndarray:
        """A view of row ``i``."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: np.ndarray) -> Ragged:
        """A copy of the given rows, in the given order (repeats allowed); looks at no other row."""
        index_T, packed = spans(self.offsets, rows)
        return Ragged(self.values[index_T], packed)


def offsets_of(lengths: Iterable[int] | np.ndarray) -> np.ndarray:
    """int64 [N + 1] offsets of rows of the given lengths."""
    lengths = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def spans(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the tokens of ``rows`` lie in an arena, int64 [T], and offsets of their copies, int64 [N + 1].

    The cost depends on the rows asked for, not on the size of the arena.
    """
    start_N = offsets[rows]
    packed = offsets_of(offsets[rows + 1] - start_N)
    index_T = np.arange(packed[-1]) + np.repeat(start_N - packed[:-1], np.diff(packed))
    return index_T, packed


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A question: ``id`` is its index in its split, ``tokens`` int32 [P], ``target`` the gold answer."""

    id: int
    tokens: np.ndarray
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled answer.

    tokens: int32 [T], with the EOS, or the whole stop string, by which it ended by itself. logprobs: float32
    [T], log-probabilities of those tokens under the sampling weights at model.logprob_temperature, whatever
    they were sampled at.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn.

    temperature: 0 is greedy. max_tokens: bound on a completion, which cannot end by itself before
    ``min_tokens``.
    """

    temperature: float
    top_p: float
    max_tokens: int
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """``n`` completions wanted of ``prompt``.

    id: the request's number in the run, or the prompt's id where it is for an evaluation of ``split``.
    """

    prompt: Prompt
    id: int
    n: int
    sampling: Sampling
    split: Split = "train"


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one request: of one prompt, with the versions of the weights that sampled them.

    versions: int32 [n, 2], oldest and newest version per completion.
    """

    request: Request
    completions: tuple[Completion, ...]
    versions: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """N scored completions as structure of arrays; what a shard holds.

    record: RECORD [N]. prompts: Ragged int32 [P rows], each distinct prompt once.
    completions: Ragged int32 [N rows]. logprobs, ref_logprobs: float32 [T], aligned with
    ``completions.values``, of the sampling policy and of the reference that the record names, both at
    model.logprob_temperature. ref_logprobs are NaN until the trainer has computed them, where it is to.
    """

    record: np.ndarray
    prompts: Ragged
    completions: Ragged
    logprobs: np.ndarray
    ref_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.record)

    @property
    def request_ids(self) -> np.ndarray:
        """int64 [groups]: the requests that these are completions of, in the order of the records."""
        request_id_N = self.record["request_id"]
        first_N = np.ones(len(request_id_N), np.bool_)
        np.not_equal(request_id_N[1:], request_id_N[:-1], out=first_N[1:])
        return request_id_N[first_N]

    def where(self, wanted_N: np.ndarray) -> Trajectories:
        """Those that bool [N] marks, in order: a copy, or these themselves where they are all wanted."""
        if wanted_N.all():
            return self
        rows = np.flatnonzero(wanted_N)
        index_T, _ = spans(self.completions.offsets, rows)
        return Trajectories(
            self.record[rows],
            self.prompts,
            self.completions.take(rows),
            self.logprobs[index_T],
            self.ref_logprobs[index_T],
        )

    def check(self) -> None:
        """Raise ValueError with one sentence where the arrays contradict each other."""
        tokens = len(self.completions.values)
        rules = {
            "record dtype": self.record.dtype == RECORD,
            "one completion per record": len(self.completions) == len(self.record),
            "completion offsets": _well_formed(self.completions),
            "prompt offsets": _well_formed(self.prompts),
            "one logprob per token": len(self.logprobs) == tokens,
            "one reference logprob per token": len(self.ref_logprobs) == tokens,
            "prompt_row within prompts": bool((self.record["prompt_row"] < len(self.prompts)).all()),
            "finite rewards": bool(np.isfinite(self.record["reward"]).all()),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"trajectories are inconsistent: {', '.join(broken)}")


def _well_formed(ragged: Ragged) -> bool:
    offsets = ragged.offsets
    return (
        len(offsets) > 0
        and offsets[0] == 0
        and offsets[-1] == len(ragged.values)
        and bool((np.diff(offsets) >= 0).all())
    )


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryBatch:
    """B whole groups of K trajectories, prompt-major: rows ``i*K … i*K + K - 1`` are group ``i``; N = B·K.

    sequences: Ragged int32 [N rows], prompt then completion. prompt_length_N: int64. reward_N: float32.
    value_N: float32, V̂ of the request that each answers (``buffer.soft_values``), 0 where none is wanted.
    version_N: int32, the oldest version of each. on_policy_N: bool, whether all of it was sampled by the
    weights that are to learn from it now. logprobs, ref_logprobs: float32, one per completion token, rows in
    order; ages: int32, as many, optimizer steps since the weights that sampled each. prompt_id_B: int64.
    """

    group_size: int
    sequences: Ragged
    prompt_length_N: np.ndarray
    reward_N: np.ndarray
    value_N: np.ndarray
    version_N: np.ndarray
    on_policy_N: np.ndarray
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    ages: np.ndarray
    prompt_id_B: np.ndarray

    @property
    def groups(self) -> int:
        """B."""
        return len(self.prompt_id_B)

    @property
    def completion_length_N(self) -> np.ndarray:
        """int64 [N]."""
        return self.sequences.lengths - self.prompt_length_N


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """B whole groups of K rows as rectangles; N = B·K rows, prompt-major, L the longest sequence.

    tokens_NL: int64, prompt then completion, 0 to the right of it.
    prompt_length_N, length_N: int64, tokens of the prompt, and of prompt and completion together.
    logprob_NL, ref_logprob_NL: float32, of the completions' tokens under the weights that sampled them and
    under the reference, 0 elsewhere; age_NL: int32, likewise.
    reward_N, value_N: float32. on_policy_N: bool, as in TrajectoryBatch. prompt_id_B: int64.
    """

    group_size: int
    tokens_NL: np.ndarray
    prompt_length_N: np.ndarray
    length_N: np.ndarray
    logprob_NL: np.ndarray
    ref_logprob_NL: np.ndarray
    age_NL: np.ndarray
    reward_N: np.ndarray
    value_N: np.ndarray
    on_policy_N: np.ndarray
    prompt_id_B: np.ndarray

    @property
    def completion_mask_NL(self) -> np.ndarray:
        """bool: where the tokens of the completions are."""
        position_L = np.arange(self.tokens_NL.shape[1])
        return (position_L >= self.prompt_length_N[:, None]) & (position_L < self.length_N[:, None])


@dataclass(frozen=True, slots=True)
class Shard:
    """An immutable, sealed slice of a searcher's trajectories: number ``index`` of ``searcher``.

    image: the bytes of its file, if they are at hand.
    """

    searcher: int
    index: int
    trajectories: Trajectories
    image: memoryview | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one tensor lies in the flat byte buffer of all weights: ``[start, end)``."""

    name: str
    dtype: str  # safetensors' spelling: F32, BF16, F16
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What makes weights a LoRA adapter: ``scale`` times B·A is added to the weights of its layers.

    base: the identity (``backends.adapter.identity``) of these, before.
    """

    base: str
    scale: float


@dataclass(frozen=True)
class WeightLayout:
    """Order, names, dtypes and byte ranges of a policy's tensors under their Hugging Face names.

    lora: None where they are all of the policy's weights, else they are an adapter's alone.
    """

    slots: tuple[WeightSlot, ...]
    lora: LoraWeights | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.slots[-1].end if self.slots else 0)

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: str, lora: LoraWeights | None = None
    ) -> WeightLayout:
        """Lay tensors of (name, shape) end to end in one dtype (F32, BF16, F16)."""
        width = {"F32": 4, "BF16": 2, "F16": 2}[dtype]
        slots, start = [], 0
        for name, shape in tensors:
            end = start + width * int(np.prod(shape, dtype=np.int64))
            slots.append(WeightSlot(name, dtype, tuple(shape), start, end))
            start = end
        return cls(tuple(slots), lora)

    def parts(self, ranks: int) -> list[tuple[WeightSlot, ...]]:
        """Contiguous runs of whole tensors, one per trainer rank, of about equal bytes."""
        owner = [min(ranks - 1, slot.start * ranks // max(1, self.nbytes)) for slot in self.slots]
        return [
            tuple(slot for slot, rank in zip(self.slots, owner, strict=True) if rank == part)
            for part in range(ranks)
        ]

    def to_json(self) -> str:
        """JSON text that from_json reads."""
        slots = [[s.name, s.dtype, s.shape, s.start, s.end] for s in self.slots]
        return json.dumps([slots, self.lora and [self.lora.base, self.lora.scale]])

    @classmethod
    def from_json(cls, text: str) -> WeightLayout:
        """Inverse of to_json."""
        slots, lora = json.loads(text)
        return cls(
            tuple(WeightSlot(n, d, tuple(s), a, b) for n, d, s, a, b in slots), lora and LoraWeights(*lora)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a trainer says of the weights that it publishes; both exchanges carry it as its JSON text.

    version: optimizer steps that made the weights. published: when, unix seconds. evaluate: the split to
    evaluate with exactly these weights, None for none. reference: step of the policy that is the reference
    from now on, or BEHAVIOUR. budget_end: the first request that may not be issued yet, None for no bound.
    final: whether these are the last weights of the run, after which nothing is learned any more.
    """

    version: int
    published: float = 0.0
    evaluate: Split | None = None
    reference: int = 0
    budget_end: int | None = None
    final: bool = False

    def to_json(self) -> str:
        """JSON text that from_json reads; None is null."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Publication:
        """Inverse of to_json."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """Weights as a searcher gets them.

    data: uint8 [layout.nbytes]; it may be shared memory, valid until the next call of the exchange.
    """

    publication: Publication
    layout: WeightLayout
    data: np.ndarray
