"""Values that the packages share: prompts, completions, groups, trajectories, shards, weights. No torch.

Shape letters, used as suffixes of names throughout the project (``reward_N``, ``logprob_BK``):
    N trajectories (sequences), P distinct prompts, B groups of a batch, K completions of a group
    T tokens of all completions, A tokens sampled by the policy (actions), L length of the longest sequence
    D width of a hidden state or embedding, V vocabulary, C likeliest tokens at a position
    a digit is the size of an axis: ``mean_B1`` has the shape [B, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np

from tba_hpc.core.weight_files import WeightFile

FinishReason = Literal["stop", "length", "turns"]
Split = Literal["train", "validation", "test"]
Role = Literal["trainer", "searcher"]

ResourceKind = Literal["model", "data set", "file"]

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
"""Ways in which a completion ends: by itself, at the limit of tokens, or at the limit of turns.

The field ``truncated`` of RECORD is an index into this tuple."""

BEHAVIOUR = -1
"""Value in place of a reference's step: the reference is the policy that sampled the trajectory.

``ref_logprobs`` then equal ``logprobs``."""

BEGIN = np.float32(np.inf)
"""Marker in ``logprobs``: a further sequence begins at this token, which the policy did not sample.

A trajectory has several sequences if its agent asked the policy for a turn that did not continue the turns
before, such as a call with a new context. The sequences share the trajectory's reward. Attention in a further
sequence starts at this token, and sees neither the prompt nor other sequences."""

RECORD = np.dtype(
    [
        ("uid", "<u8"),  # unique in a run: make_uid(searcher, shard, row)
        ("prompt_id", "<i8"),  # index of the prompt in its split
        ("request_id", "<i8"),  # number of the request in the run
        ("prompt_row", "<u4"),  # row of the prompt in Trajectories.prompts
        ("reward", "<f4"),
        ("version_oldest", "<i4"),  # version of the weights (optimizer steps) that sampled the first token
        ("version_newest", "<i4"),  # version of the weights that sampled the last token
        ("truncated", "u1"),  # 0: ended by itself; 1: at the limit of tokens; 2: at the limit of turns
        ("reference", "<i4"),  # step of the policy that gave ref_logprobs (0: the initial one), or BEHAVIOUR
    ]
)
"""Fields that a searcher records for each trajectory; ``Trajectories.of_groups`` fills them in.

All of them reach the trainer's batches; ``objectives.RecordedGroups.of`` passes some on to the objective."""

LIVE_RECORD = np.dtype(
    [
        *RECORD.descr,
        ("revision", "<i8"),  # revision (count of the buffer's changes) of the merge that added it
        ("sync", "<i8"),  # version of the last weights that were published before it arrived
        ("uses", "<i4"),  # number of steps that have learned from it
        ("value", "<f4"),  # V̂ of its request (buffer.soft_values); 0 if values are not computed
    ]
)
"""Fields of a trajectory in the buffer, in checkpoints and in batches: RECORD, and what a merge adds."""

TOP_LOGPROBS = np.dtype([("token", "<i4"), ("logprob", "<f2")])
"""One of the likeliest tokens at a position. Rounding to float16 changes its probability by at most 2e-4."""

PER_TOKEN = ("logprobs", "ref_logprobs", "top_logprobs")
"""Fields of Trajectories with one value, or one row, per completion token."""

COLUMNS = (
    "record",
    *("prompt_tokens", "prompt_offsets", "completion_tokens", "completion_offsets"),
    *PER_TOKEN,
)
"""Names of all arrays of Trajectories in shards, checkpoints and messages."""

Columns = tuple[np.ndarray, ...]
"""All arrays of Trajectories, in the order of COLUMNS."""


def make_uid(searcher: int, shard: int, row: int) -> int:
    """Return a trajectory's uid: searcher (20 bits), index of the shard (24 bits) and row (20 bits)."""
    return searcher << 44 | shard << 20 | row


@dataclass(frozen=True, slots=True)
class Resource:
    """A model, data set or file that a config names.

    key: config key that names it. name: its name on the hub, or its path. subset: configuration of a data
    set that has several configurations.
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

    values: any dtype [T]. offsets: int64 [N + 1], starting at 0, never decreasing.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: np.dtype | type) -> Ragged:
        """Join rows into one array of ``dtype``."""
        values = np.concatenate([np.asarray(row, dtype) for row in rows] or [np.empty(0, dtype)])
        return cls(values, offsets_of([len(row) for row in rows]))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join the rows of all parts in order; there must be at least one part."""
        offsets = offsets_of(joined([part.lengths for part in parts]))
        return cls(joined([part.values for part in parts]), offsets)

    @property
    def lengths(self) -> np.ndarray:  # int64 [N]
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> np.ndarray:
        """Return a view of row ``i``."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: np.ndarray) -> Ragged:
        """Copy the given rows in the given order; repeats are allowed."""
        index_T, packed = spans(self.offsets, rows)
        return Ragged(self.values[index_T], packed)


def offsets_of(lengths: Iterable[int] | np.ndarray) -> np.ndarray:
    """Return the offsets, int64 [N + 1], of rows of the given lengths."""
    lengths = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate one or more contiguous arrays of one dtype, with the same result as np.concatenate.

    np.concatenate gets at most 1024 arrays at a time, because a call with 100,000 would block other threads.
    Structured arrays are joined as bytes, because numpy would copy them field by field, ten times slower.
    """
    dtype = arrays[0].dtype
    if dtype.names:
        return joined([array.view(np.uint8) for array in arrays]).view(dtype)
    made = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    end = 0
    for first in range(0, len(arrays), 1024):
        some = arrays[first : first + 1024]
        start, end = end, end + sum(map(len, some))
        np.concatenate(some, out=made[start:end])
    return made


def spans(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of all tokens of the given rows, int64 [T], and the offsets of the packed rows.

    offsets: offsets of all rows, int64. rows: indices of N rows. The offsets returned are int64 [N + 1].
    """
    start_N = offsets[rows]
    length_N = offsets[rows + 1] - start_N
    packed = offsets_of(length_N)
    return np.arange(packed[-1]) + (start_N - packed[:-1]).repeat(length_N), packed


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt. id: its index in its split. tokens: int32 [T]. target: the correct answer; may be empty."""

    id: int
    tokens: np.ndarray
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer to a prompt, or a whole conversation that follows it, perhaps in several sequences.

    tokens: int32 [T], including the EOS or the whole stop string that ended it. logprobs: float32 [T], under
    the sampling weights and at model.logprob_temperature, whatever the sampling temperature was. They are NaN
    at the environment's tokens, or BEGIN where a further sequence begins; the first token is always sampled.
    finish_reason: what ended the completion; "turns" stands for task.options.max_turns. top_logprobs:
    TOP_LOGPROBS [T, C], the C likeliest tokens at each position, meaningless at the environment's tokens;
    None if C is 0.

    In a conversation: reward is the environment's, NaN if the environment failed, None if the task rewards
    the completion. fault says why the environment failed or gave no finite reward. calls and failed_calls are
    numbers of tool calls. last_turn holds the tokens of the last sampled turn, int32; None: that turn is the
    whole completion.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0
    top_logprobs: np.ndarray | None = None
    last_turn: np.ndarray | None = None
    fault: str = ""

    @property
    def action_T(self) -> np.ndarray:
        """Mask, bool [T]: True where the policy sampled the token, False where the environment gave it."""
        return self.logprobs < BEGIN  # False for NaN, too

    @property
    def begin_T(self) -> np.ndarray:
        """Mask, bool [T]: True where a further sequence begins."""
        return self.logprobs == BEGIN

    @property
    def turns(self) -> int:
        """Number of the policy's turns. A turn is a run of consecutive sampled tokens."""
        action_T = self.action_T
        return 1 + int(np.count_nonzero(action_T[1:] & ~action_T[:-1]))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    temperature: 0 is greedy. max_tokens, min_tokens: limits on the length of a completion. top_logprobs:
    number C of likeliest tokens that are recorded, with log-probabilities, at each position. stop: texts that
    end a completion, in addition to generator.stop.
    """

    temperature: float
    top_p: float
    max_tokens: int
    min_tokens: int = 0
    top_logprobs: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """Request for ``n`` completions of ``prompt``.

    id: number of the request in the run; in an evaluation, the prompt's id. split: the prompt's split;
    "train" for training.
    """

    prompt: Prompt
    id: int
    n: int
    sampling: Sampling
    split: Split = "train"


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one request.

    versions: int32 [n, 2], for each completion the versions of the weights that sampled its first and its
    last token.
    """

    request: Request
    completions: tuple[Completion, ...]
    versions: np.ndarray


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and reference log-probabilities, ready for a shard.

    rewards: one finite number per completion. ref_logprobs: float32 [T] per completion. reference: step of
    the policy that gave ``ref_logprobs``, as in RECORD.
    """

    group: Group
    rewards: Sequence[float]
    ref_logprobs: Sequence[np.ndarray]
    reference: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """N scored completions: those of a shard, of a group in the buffer or of a batch.

    record: RECORD [N], or a dtype that begins with the fields of RECORD, such as LIVE_RECORD. prompts: int32,
    P rows, each distinct prompt once. completions: int32, N rows. logprobs: float32 [T], aligned with
    ``completions.values``, under the sampling policy, as in Completion. ref_logprobs: the same under the
    reference that ``record`` names. Both are at model.logprob_temperature. top_logprobs: TOP_LOGPROBS [T, C],
    as in Completion; if omitted, C is 0.

    At the environment's tokens ref_logprobs are meaningless. If the trainer computes the reference's
    log-probabilities instead of the searchers, ref_logprobs are NaN until it has done so.
    """

    record: np.ndarray
    prompts: Ragged
    completions: Ragged
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    top_logprobs: np.ndarray = field(default_factory=partial(np.empty, (0, 0), TOP_LOGPROBS))

    def __post_init__(self) -> None:
        """Make an empty row for each token if ``top_logprobs`` was omitted."""
        if self.top_logprobs.shape == (0, 0):
            object.__setattr__(self, "top_logprobs", np.empty((len(self.logprobs), 0), TOP_LOGPROBS))

    def __len__(self) -> int:
        return len(self.record)

    @property
    def action_T(self) -> np.ndarray:
        """Mask of completion tokens, bool [T]: True where the policy sampled the token."""
        return self.logprobs < BEGIN  # False for NaN, too

    @property
    def begin_T(self) -> np.ndarray:
        """Mask of completion tokens, bool [T]: True where a further sequence begins."""
        return self.logprobs == BEGIN

    @property
    def actions(self) -> Ragged:
        """Sampled tokens of each completion, without the environment's: int32, N rows."""
        action_T = self.action_T
        before = offsets_of(action_T)
        return Ragged(self.completions.values[action_T], before[self.completions.offsets])

    @property
    def request_ids(self) -> np.ndarray:
        """Ids of the requests, int64, in order. Completions of one request must be neighbours."""
        request_id_N = self.record["request_id"]
        first_N = np.ones(len(request_id_N), np.bool_)
        np.not_equal(request_id_N[1:], request_id_N[:-1], out=first_N[1:])
        return request_id_N[first_N]

    @staticmethod
    def of_groups(scored: Sequence[ScoredGroup]) -> Trajectories:
        """Pack the completions of one or more groups, in order. Groups may be empty.

        Each distinct prompt is stored once. ``uid`` is 0 until the shard is sealed.
        """
        groups = [one.group for one in scored for _ in one.group.completions]
        completions = [completion for one in scored for completion in one.group.completions]
        ref_logprobs = [row for one in scored for row in one.ref_logprobs]
        prompts = {group.request.prompt.id: group.request.prompt for group in groups}
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        record = np.zeros(len(completions), RECORD)
        record["prompt_id"] = [group.request.prompt.id for group in groups]
        record["request_id"] = [group.request.id for group in groups]
        record["prompt_row"] = [row_of[group.request.prompt.id] for group in groups]
        record["reward"] = [reward for one in scored for reward in one.rewards]
        versions = np.concatenate([one.group.versions for one in scored])
        top = [one.top_logprobs for one in completions if one.top_logprobs is not None]
        record["version_oldest"], record["version_newest"] = versions.T
        record["truncated"] = [FINISH_REASONS.index(one.finish_reason) for one in completions]
        record["reference"] = [one.reference for one in scored for _ in one.group.completions]
        return Trajectories(
            record=record,
            prompts=Ragged.from_rows([prompt.tokens for prompt in prompts.values()], np.int32),
            completions=Ragged.from_rows([one.tokens for one in completions], np.int32),
            logprobs=Ragged.from_rows([one.logprobs for one in completions], np.float32).values,
            ref_logprobs=Ragged.from_rows(ref_logprobs, np.float32).values,
            **({"top_logprobs": np.concatenate(top)} if top else {}),
        )

    def take(self, rows: np.ndarray) -> Self:
        """Copy the given rows in the given order, with the same prompts; repeats are allowed."""
        index_T, offsets = spans(self.completions.offsets, rows)
        return replace(
            self,
            record=self.record[rows],
            completions=Ragged(self.completions.values[index_T], offsets),
            **{name: getattr(self, name)[index_T] for name in PER_TOKEN},
        )

    def between(self, start: int, end: int, prompts: Ragged | None = None) -> Trajectories:
        """Copy the rows ``start`` to ``end`` − 1, with the given prompts; None: with the same prompts."""
        offsets = self.completions.offsets[start : end + 1]
        first, last = offsets[0], offsets[-1]
        return Trajectories(
            joined([self.record[start:end]]),
            self.prompts if prompts is None else prompts,
            Ragged(self.completions.values[first:last].copy(), offsets - first),
            *(getattr(self, name)[first:last].copy() for name in PER_TOKEN),
        )

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Trajectories:
        """Join one or more Trajectories, given as columns, in order.

        If several parts share one array of prompts, the result holds it once.
        """
        records, prompts, prompt_offsets, completions, offsets, *per_token = zip(*parts, strict=True)
        distinct = {id(one): Ragged(one, o) for one, o in zip(prompts, prompt_offsets, strict=True)}
        first = dict(zip(distinct, offsets_of(map(len, distinct.values()))[:-1].tolist(), strict=True))
        record = joined(records)
        shift = np.array([first[id(one)] for one in prompts], np.uint32)
        record["prompt_row"] += shift.repeat([len(one) for one in records])
        return Trajectories(
            record,
            Ragged.concat(list(distinct.values())),
            Ragged(joined(completions), offsets_of(joined([one[1:] - one[:-1] for one in offsets]))),
            *map(joined, per_token),
        )

    @property
    def columns(self) -> Columns:
        """All arrays, in the order of COLUMNS, without copying."""
        prompts, completions = self.prompts, self.completions
        ragged = (prompts.values, prompts.offsets, completions.values, completions.offsets)
        return self.record, *ragged, *(getattr(self, name) for name in PER_TOKEN)

    @classmethod
    def of(cls, columns: Columns, **fields: Any) -> Self:
        """Make Trajectories from ``columns``. fields: further fields, if this is a subclass."""
        record, prompts, prompt_offsets, completions, completion_offsets, *per_token = columns
        ragged = Ragged(prompts, prompt_offsets), Ragged(completions, completion_offsets)
        return cls(record, *ragged, *per_token, **fields)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by their names in COLUMNS, without ``top_logprobs`` if C is 0."""
        named = zip(COLUMNS, self.columns, strict=True)
        return {name: array for name, array in named if array.shape[1:] != (0,)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], **fields: Any) -> Self:
        """Make Trajectories from what ``to_arrays`` returned; arrays with other names are ignored."""
        given = {"top_logprobs": np.empty((0, 0), TOP_LOGPROBS), **arrays}
        return cls.of(tuple(given[name] for name in COLUMNS), **fields)

    def check(self) -> None:
        """Raise ValueError if the arrays contradict each other; the message names the broken rules."""
        tokens = len(self.completions.values)
        rules = {
            "record dtype": self.record.dtype.descr[: len(RECORD.descr)] == RECORD.descr,
            "one completion per record": len(self.completions) == len(self.record),
            "completion offsets": _well_formed(self.completions),
            "prompt offsets": _well_formed(self.prompts),
            "one logprob per token": len(self.logprobs) == tokens,
            "one reference logprob per token": len(self.ref_logprobs) == tokens,
            "one row of top logprobs per token": len(self.top_logprobs) == tokens,
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


def as_record(record: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copy a record array into one of another structured dtype; fields that the record lacks become 0."""
    made = np.zeros(len(record), dtype)
    for name in (record.dtype.fields or {}).keys() & (dtype.fields or {}).keys():
        made[name] = record[name]
    return made


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryBatch(Trajectories):
    """B whole groups of K = ``group_size`` trajectories, from which optimizer step ``step`` learns; N = B·K.

    Group ``i`` has the rows ``i*K`` to ``i*K + K - 1``. record: LIVE_RECORD [N].
    """

    group_size: int = field(kw_only=True)
    step: int = field(kw_only=True)

    @property
    def groups(self) -> int:  # B
        return len(self.record) // self.group_size

    @property
    def prompt_id_B(self) -> np.ndarray:  # int64
        return self.record["prompt_id"][:: self.group_size].copy()

    @property
    def reward_N(self) -> np.ndarray:  # float32
        return self.record["reward"].copy()

    @property
    def value_N(self) -> np.ndarray:  # float32: V̂ of the request, see buffer.soft_values
        return self.record["value"].copy()

    @property
    def version_N(self) -> np.ndarray:  # int32: version of the weights that sampled the first token
        return self.record["version_oldest"].copy()

    @property
    def on_policy_N(self) -> np.ndarray:
        """Mask of on-policy trajectories, bool [N]: sampled as a whole by the weights that ``step`` changes.

        Their versions are ``step``, and they arrived after version ``step`` was published. A trajectory with
        the same version that arrived earlier is not on-policy: its weights were another version ``step``,
        made by optimizer steps that a resume has undone.
        """
        names = ("sync", "version_oldest", "version_newest")
        return np.logical_and.reduce([self.record[name] == self.step for name in names])

    @property
    def ages(self) -> np.ndarray:
        """Age of each sampled token, int32 [A]; see ``token_ages``."""
        return token_ages(self.record, self.action_length_N, self.step)

    @property
    def prompt_length_N(self) -> np.ndarray:  # int64
        return self.prompts.lengths[self.record["prompt_row"]]

    @property
    def completion_length_N(self) -> np.ndarray:  # int64
        return self.completions.lengths

    @property
    def action_length_N(self) -> np.ndarray:  # int64: tokens of each completion that the policy sampled
        return self.actions.lengths

    @property
    def length_N(self) -> np.ndarray:  # int64: tokens of prompt and completion together
        return self.prompt_length_N + self.completion_length_N

    @property
    def sequences(self) -> Ragged:
        """Each prompt followed by its completion: int32, N rows."""
        prompts = self.prompts.take(self.record["prompt_row"].astype(np.int64))
        alternating = np.arange(2 * len(self)).reshape(2, -1).T.ravel()  # prompt, completion, prompt, …
        pairs = Ragged.concat([prompts, self.completions]).take(alternating)
        return Ragged(pairs.values, pairs.offsets[::2])

    @property
    def cell_T(self) -> np.ndarray:
        """Index of each completion token, int64 [T], in the flattened rectangle [N, L] of all completions."""
        offsets, length_N = self.completions.offsets, self.completion_length_N
        start_N = np.arange(len(self)) * int(length_N.max()) - offsets[:-1]
        return np.arange(offsets[-1]) + start_N.repeat(length_N)


def token_ages(record_N: np.ndarray, length_N: np.ndarray, step: int) -> np.ndarray:
    """Return the age of each token, int32 [T]: optimizer steps from the weights that sampled it to ``step``.

    record_N: RECORD [N]. length_N: int64, number of sampled tokens of each completion.

    A record holds the versions of a completion's first and last token. Between these two tokens versions are
    interpolated linearly, which is exact if the weights did not change, or changed at even intervals. In a
    trajectory with further sequences, tokens may not be stored in the order in which they were sampled, so
    an age may be wrong by up to the difference of the two versions. An age is negative if a resume has
    undone the steps that made the weights.
    """
    oldest_N, newest_N = step - record_N["version_oldest"], step - record_N["version_newest"]
    place_T = np.arange(length_N.sum()) - np.repeat(offsets_of(length_N)[:-1], length_N)
    younger_N = (newest_N - oldest_N) / np.maximum(1, length_N - 1)  # change of age from token to token
    age_T = np.repeat(oldest_N, length_N) + np.repeat(younger_N, length_N) * place_T
    return np.rint(age_T).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Shard:
    """Trajectories that a searcher wrote to one file, which is then sealed: it never changes.

    index: number of the shard; each searcher counts its own from 0. run: ``RunDir.identity`` of the run; 0 if
    unknown. set_aside: ids of requests that got no usable reward. image: bytes of the file, if they are in
    memory.
    """

    searcher: int
    index: int
    trajectories: Trajectories
    run: int = 0
    set_aside: tuple[int, ...] = ()
    image: memoryview | None = field(default=None, repr=False, compare=False)

    @property
    def request_ids(self) -> np.ndarray:
        """Ids of all requests that the shard completes, int64: first those of its trajectories."""
        return np.append(self.trajectories.request_ids, np.array(self.set_aside, np.int64))


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor and its bytes in the flat buffer of all weights: ``start`` to ``end`` − 1."""

    name: str
    dtype: str  # as in safetensors files: F32, BF16 or F16
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Description of a LoRA adapter, whose tensors A and B are published instead of all weights.

    base: ``learner.adapter.identity`` of the model that is adapted. scale: factor s of the matrix s·B·A,
    which is added to the weight of each adapted layer.
    """

    base: str
    scale: float


@dataclass(frozen=True)
class WeightLayout:
    """Layout of a policy's tensors in one buffer: names, as in Hugging Face's model, dtypes and byte ranges.

    lora: the adapter, if the buffer holds only its tensors; None if it holds all of the policy's tensors.
    """

    slots: tuple[WeightSlot, ...]
    lora: LoraWeights | None = None

    @property
    def nbytes(self) -> int:
        """Total size of all tensors, in bytes."""
        return self.slots[-1].end if self.slots else 0

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: str, lora: LoraWeights | None = None
    ) -> WeightLayout:
        """Lay out tensors, given as (name, shape), end to end in one dtype (F32, BF16 or F16)."""
        width = {"F32": 4, "BF16": 2, "F16": 2}[dtype]
        slots, start = [], 0
        for name, shape in tensors:
            end = start + width * int(np.prod(shape, dtype=np.int64))
            slots.append(WeightSlot(name, dtype, tuple(shape), start, end))
            start = end
        return cls(tuple(slots), lora)

    def parts(self, ranks: int) -> list[tuple[WeightSlot, ...]]:
        """Divide the tensors, in order, into one part per trainer rank, of about equally many bytes."""
        parts: list[list[WeightSlot]] = [[] for _ in range(ranks)]
        for slot in self.slots:
            parts[min(ranks - 1, slot.start * ranks // max(1, self.nbytes))].append(slot)
        return [tuple(part) for part in parts]

    def to_json(self) -> str:
        """Return the layout as JSON for ``from_json``."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> WeightLayout:
        """Read what ``to_json`` returned."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Message from the trainer to all searchers that accompanies published weights.

    version: number of optimizer steps that made the weights. published: time of publication, unix seconds.
    evaluate: split to evaluate with exactly these weights; None: no evaluation. reference: step of the policy
    that is the reference from now on, or BEHAVIOUR. budget_end: id of the first request that searchers may
    not issue yet; None: no limit. lease_ends: budget_end of each elastic searcher, by the numbers of the
    searcher and of its lease. final: True for the last weights of the run.
    """

    version: int
    published: float = 0.0
    evaluate: Split | None = None
    reference: int = 0
    budget_end: int | None = None
    lease_ends: Mapping[int, Mapping[int, int]] = field(default_factory=dict, hash=False)
    final: bool = False

    def for_lease(self, searcher: int, lease: int) -> Publication:
        """Return this publication with the budget_end of one elastic searcher, from ``lease_ends``.

        searcher, lease: numbers of the searcher and of its lease. If requests are limited and ``lease_ends``
        lacks this lease, the result's budget_end is 0: the searcher may issue nothing.
        """
        end = None if self.budget_end is None else self.lease_ends.get(searcher, {}).get(lease, 0)
        return replace(self, budget_end=end)


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """Weights that a searcher received. They stay unchanged until it takes newer ones or drops this object.

    data: uint8 [layout.nbytes], perhaps shared with other processes and read-only. file: the file that holds
    ``data``, if other processes can read it; otherwise None.
    """

    publication: Publication
    layout: WeightLayout
    data: np.ndarray
    file: WeightFile | None = None

    def private(self) -> WeightUpdate:
        """Return a copy whose ``data`` this process may change; data in a file are mapped copy-on-write."""
        data = self.file.map("c") if self.file else self.data.copy()
        return replace(self, data=data)
