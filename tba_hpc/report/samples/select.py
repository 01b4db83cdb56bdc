"""Finds trajectories in the shards of a run by reward, age, prompt, version, or a word in the text.

Sealed shards never change, so running and crashed runs are read like finished ones. Shards are read one after
the other and only the best matches are kept, so a run may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import is_own
from tba_hpc.core.ports import Tokenizer, decoder
from tba_hpc.core.types import BEGIN, BEHAVIOUR, Shard, Trajectories
from tba_hpc.exchange.hdf5_shards import ShardError, read_arrays, read_sealed
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.run.checkpoints import BUFFER_FILE, StateError, checkpoint_folders, read_state
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.history import History, Merge

SortBy = Literal["newest", "oldest", "best", "worst", "changed"]

State = Literal["waiting", "merged", "buffer", "gone"]
"""State of a trajectory. waiting: sealed, not merged. merged: merged since the newest checkpoint. buffer: in
the replay buffer of the newest checkpoint. gone: merged, but evicted from the buffer (perhaps as used up),
or rejected as a duplicate."""

RECORDED = ("uid", "prompt_id", "request_id", "reward", "version_oldest", "version_newest", "reference")
"""Fields of a trajectory's record that a ``Sample`` copies."""

SortKey = tuple[float, int, int]
"""Sort key of a trajectory: reward or log-ratio if the order is by one of them, else 0; version; uid.

The largest key comes first. So a number is negated if its smallest value is to come first.
"""

Decode = Callable[[np.ndarray], str]
"""Function that turns tokens, int32 [T], into text."""


@dataclass(frozen=True)
class States:
    """States of a run's trajectories, from its metrics and its newest readable checkpoint.

    merges: merges by shard. step: step of that checkpoint; None without one. revision: how often merges
    and evictions had changed the checkpoint's buffer; −1 without one. uses: number of steps that had learned
    from each trajectory of that buffer, by uid.
    """

    merges: Mapping[ShardKey, Merge]
    step: int | None = None
    revision: int = -1
    uses: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunDir) -> States:
        """Read the metrics, and the newest checkpoint that is neither damaged nor being deleted."""
        merges = {merge.key: merge for merge in History.read(run).merges}
        for folder in reversed(checkpoint_folders(run, complete=True)):
            try:
                state, record = read_state(folder), read_arrays(folder / BUFFER_FILE)["record"]
            except (OSError, StateError, ShardError):
                continue
            uses = dict(zip(record["uid"].tolist(), record["uses"].tolist(), strict=True))
            return cls(merges, state.step, state.revision, uses)
        return cls(merges)

    def state(self, key: ShardKey, uid: int) -> State:
        """Return the state of the trajectory ``uid``, which is in the shard ``key``."""
        merge = self.merges.get(key)
        if merge is None or merge.revision > self.revision:
            return "merged" if merge else "waiting"
        return "buffer" if uid in self.uses else "gone"


def identity(record: np.void, tokens: np.ndarray) -> tuple[int, bytes]:
    """Return a key by which equal completions of the same prompt are recognised."""
    return int(record["prompt_id"]), tokens.astype(np.int32).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query for trajectories.

    order: what comes first: newest or oldest weights, best or worst reward, or (changed) the completion whose
    mean log π_behaviour/π_ref is largest. limit: largest number of results, where equal answers to a prompt
    count once; None for all results, equal answers included. prompt: id of a prompt; only its answers match.
    versions: first and last optimizer step; only samples of weights of these steps match. text: only
    trajectories with this text in question or answer match; case is ignored.
    """

    order: SortBy = "newest"
    limit: int | None = 10
    prompt: int | None = None
    versions: tuple[int, int] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory, its state and its arrays.

    searcher, shard, row: place of the trajectory on disk. log_ratio: mean over sampled tokens of log
    π_behaviour − log π_ref, nats; None if the sampling weights are the reference, or if only the trainer
    computes log π_ref. merged_step: optimizer steps done when the trajectory was merged; None if not merged.
    uses: steps that had learned from it by the newest checkpoint; None if unknown. segments: parts of the
    completion as pairs of source and text. The source is "policy", "environment", or "sequence" for text of
    the environment with which a further sequence begins. tokens: int32 [T], the completion. logprobs,
    ref_logprobs: float32 [T], see ``Trajectories``.
    """

    uid: int
    searcher: int
    shard: int
    row: int
    prompt_id: int
    request_id: int
    reward: float
    version_oldest: int
    version_newest: int
    reference: int
    truncated: bool
    log_ratio: float | None
    state: State
    merged_step: int | None
    uses: int | None
    prompt: str
    completion: str
    segments: tuple[tuple[str, str], ...]
    tokens: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    ref_logprobs: np.ndarray = field(repr=False)

    @property
    def staleness(self) -> int | None:
        """Steps between the oldest weights that sampled the completion and the merge; None if not merged."""
        return None if self.merged_step is None else abs(self.merged_step - self.version_oldest)

    def values(self) -> dict[str, Any]:
        """Return all fields as values for JSON, with the number of tokens in place of the arrays."""
        arrays = ("tokens", "logprobs", "ref_logprobs")
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in arrays}
        return {**plain, "tokens": len(self.tokens), "staleness": self.staleness}


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of a query.

    samples: the first matches, in the query's order. read: number of trajectories still on disk. found:
    number of matches among them. checkpoint_step: step of the checkpoint from which ``Sample.uses`` comes;
    None without one.
    """

    samples: list[Sample]
    read: int
    found: int
    checkpoint_step: int | None


def select(run: RunDir, query: Query, decode: Decode) -> Selection:
    """Search all shards of a run that are on disk."""
    states, read, found = States.read(run), 0, 0
    best: dict[object, tuple[SortKey, Sample]] = {}
    for shard in sealed_shards(run):
        trajectories = shard.trajectories
        read += len(trajectories)
        rows = [row for row in _rows(trajectories, query) if _has_text(trajectories, row, query, decode)]
        found += len(rows)
        log_ratio_N = _log_ratios(trajectories)
        keys = _sort_keys(trajectories, query.order, log_ratio_N)
        rows.sort(key=lambda row: keys[row], reverse=True)
        for row in rows:
            if len(best) == query.limit and keys[row] <= min(key for key, _ in best.values()):
                break
            same: object = identity(trajectories.record[row], trajectories.completions.row(row))
            same = int(trajectories.record["uid"][row]) if query.limit is None else same
            if same not in best or keys[row] > best[same][0]:
                best[same] = (keys[row], _sample(shard, row, log_ratio_N[row], states, decode))
            if query.limit is not None and len(best) > query.limit:
                del best[min(best, key=lambda known: best[known][0])]
    chosen = sorted(best.values(), key=lambda pair: pair[0], reverse=True)
    return Selection([sample for _, sample in chosen], read, found, states.step)


def sealed_shards(run: RunDir) -> Iterator[Shard]:
    """Yield the undamaged shards of a run by searcher and index, including those in RUN/kept."""
    for key in run.sealed_files():
        with suppress(ShardError):  # the shard is damaged, as the audit reports, or was deleted meanwhile
            yield read_sealed(run, key)


def _rows(trajectories: Trajectories, query: Query) -> list[int]:
    """Return the rows that match the query's prompt and versions."""
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
    """Return ``Sample.log_ratio`` of each row."""
    action_T = trajectories.action_T
    difference_A = trajectories.logprobs[action_T].astype(np.float64) - trajectories.ref_logprobs[action_T]
    offsets, own_N = trajectories.actions.offsets, trajectories.record["reference"] == BEHAVIOUR
    rows = np.split(difference_A, offsets[1:-1])
    means = [row_A.mean() if len(row_A) else 0.0 for row_A in rows]
    return [None if own or np.isnan(mean) else float(mean) for mean, own in zip(means, own_N, strict=False)]


def _sort_keys(trajectories: Trajectories, order: SortBy, log_ratio_N: list[float | None]) -> list[SortKey]:
    """Return a sort key per row. Among equals the newest comes first, but the oldest in order ``oldest``."""
    record = trajectories.record
    first_N = [0.0] * len(record)
    if order == "changed":
        first_N = [-np.inf if ratio is None else ratio for ratio in log_ratio_N]
    elif order in ("best", "worst"):
        first_N = (record["reward"] * (1 if order == "best" else -1)).tolist()
    sign = -1 if order == "oldest" else 1
    return [
        (first, sign * newest, sign * uid)
        for first, newest, uid in zip(
            first_N, record["version_newest"].tolist(), record["uid"].tolist(), strict=True
        )
    ]


def _sample(shard: Shard, row: int, log_ratio: float | None, states: States, decode: Decode) -> Sample:
    trajectories, record = shard.trajectories, shard.trajectories.record[row]
    tokens, uid, key = trajectories.completions.row(row), int(record["uid"]), (shard.searcher, shard.index)
    span = slice(*trajectories.completions.offsets[row : row + 2])
    return Sample(
        searcher=shard.searcher,
        shard=shard.index,
        row=row,
        **{name: record[name].item() for name in RECORDED},
        truncated=bool(record["truncated"]),
        log_ratio=log_ratio,
        state=states.state(key, uid),
        merged_step=merge.step if (merge := states.merges.get(key)) else None,
        uses=states.uses.get(uid),
        prompt=_question(trajectories, row, decode),
        completion=decode(tokens),
        segments=tuple(_segments(tokens, trajectories.logprobs[span], decode)),
        tokens=tokens.copy(),
        logprobs=trajectories.logprobs[span].copy(),
        ref_logprobs=trajectories.ref_logprobs[span].copy(),
    )


def _segments(tokens: np.ndarray, logprobs: np.ndarray, decode: Decode) -> Iterator[tuple[str, str]]:
    """Yield ``Sample.segments`` of a completion; tokens, logprobs: [T]."""
    action_T, begin_T = logprobs < BEGIN, logprobs == BEGIN
    starts = np.flatnonzero((action_T[1:] != action_T[:-1]) | begin_T[1:]) + 1
    for start, part in zip([0, *starts.tolist()], np.split(tokens, starts), strict=True):
        source = "policy" if action_T[start] else "sequence" if begin_T[start] else "environment"
        yield source, decode(part)


def run_decoder(run: RunDir) -> Decode:
    """Return a function that decodes tokens as rewards see them. Raises ConfigError without a tokenizer."""
    return decoder(run_tokenizer(run), special=run.config().task.special_tokens)


def run_tokenizer(run: RunDir) -> Tokenizer:
    """Load the tokenizer of the exported model or, without one, of the config's model.

    torch is imported only if the model's files cannot be read without it. Raises ConfigError if there is no
    tokenizer.
    """
    path = run.config().model.path
    for model in (str(run.export), path):
        if Path(model).is_dir() and (found := FileTokenizer.find(model)):
            return found
    if is_own(path):
        raise ConfigError(f"completions of {run.path} cannot be decoded: model.path={path} has no tokenizer")
    if found := FileTokenizer.find(path):
        return found
    from tba_hpc.learner.hf_model import load_tokenizer

    try:
        return load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"completions of {run.path} cannot be decoded: {error}") from None
