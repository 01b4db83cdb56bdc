"""Checks each guarantee of a run against what is in its directory, and describes violations in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tba_hpc.config import is_elastic
from tba_hpc.core.wording import count, first_few
from tba_hpc.report.audit.evidence import Checkpoint, Evidence, Seals
from tba_hpc.run.directory import ShardKey
from tba_hpc.run.history import Merge

SHOWN = 5
"""Largest number of requests or shards that one sentence names."""

COUNTED = ("trajectories", "added", "duplicates", "evicted", "tokens")
"""Fields of the trainer's state that are sums over merges."""

RequestIds = Mapping[ShardKey, tuple[int, ...]]
"""Requests that each shard answers, by shard."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of a guarantee in one sentence, with the numbers of trajectories lost or doubled by it."""

    sentence: str
    lost: int = 0
    doubled: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    name: the guarantee. evidence: what was examined, as a phrase. proven: false if records are missing, so
    that the absence of violations proves nothing.
    """

    name: str
    evidence: str
    violations: tuple[Violation, ...]
    proven: bool = True


def every_check(evidence: Evidence) -> tuple[Check, ...]:
    """Make all checks, in the order in which they are shown."""
    return (
        check_files(evidence),
        check_records(evidence),
        check_seals(evidence),
        check_merges(evidence),
        check_prompts(evidence),
        check_buffer(evidence),
        check_checkpoints(evidence),
    )


def _by_records(evidence: Evidence, name: str, looked_at: str, violations: Sequence[Violation]) -> Check:
    """Build the result of a check that relies on the trainer's records: not proven if they have a gap.

    name: the guarantee. looked_at: phrase that says what was examined.
    """
    return Check(name, looked_at, () if evidence.gap else tuple(violations), proven=not evidence.gap)


def check_records(evidence: Evidence) -> Check:
    """Check that the trainer's records have no gap; with a gap, checks that rely on them prove nothing."""
    history = evidence.history
    gap = f"metrics/trainer.jsonl is damaged ({evidence.gap}): it can no longer be proven that every "
    gap += "shard was merged once, no prompt skipped or doubled, and every step taken once"
    redone = f"{sum(history.redone)} redone after {count(len(history.redone), 'resume')}"
    looked_at = f"{count(len(history.steps), 'step')}, {redone}, {count(history.last_revision, 'revision')}"
    return Check("every step taken once", looked_at, (Violation(gap),) if evidence.gap else ())


# --- Shards ---


def check_files(evidence: Evidence) -> Check:
    """Check that every file with the name of a shard is undamaged and holds this shard."""
    files = sorted(evidence.files.items())
    violations = [Violation(f"the file of {_shard(key)} {file.fault}") for key, file in files if file.fault]
    looked_at = f"{count(len(evidence.files), 'file')} not pruned yet, every checksum verified"
    return Check("shard files are whole", looked_at, tuple(violations))


def check_seals(evidence: Evidence) -> Check:
    """Check that every sealed shard is in the newest checkpoint, or on disk for the next start to merge."""
    merged = {merge.key for merge in evidence.saved_merges}
    safe = merged | set(evidence.waiting)
    missing = {key: size.trajectories for key, size in evidence.sizes.items() if key not in safe}
    violations = [*_sealed_again(evidence.seals)]
    if evidence.gap:  # merges may be missing in the records, but the newest checkpoint still counts them
        missing = {key: number for key, number in missing.items() if number and not evidence.passed(key)}
        if lost := evidence.uncounted:
            many = count(lost, "acknowledged trajectory")
            violations.append(Violation(f"lost: {many} that the newest checkpoint should hold", lost=lost))
    violations += [_lost(evidence, key, number) for key, number in missing.items()]
    looked_at = (
        f"{count(len(evidence.sizes), 'shard')}: {len(merged):,} in a checkpoint, "
        f"{len(evidence.waiting):,} on disk beyond it"
    )
    return Check("no sealed shard is lost", looked_at, tuple(violations))


def _lost(evidence: Evidence, key: ShardKey, number: int) -> Violation:
    file = evidence.files.get(key) or evidence.refused.get(key)
    passed = evidence.passed(key)
    why = "the newest checkpoint should hold it, but no merge of it is on record" if passed else ""
    why = why or "no checkpoint holds it"
    fault = file.fault if file else "is gone"
    why += f": its file {fault}" if fault else ""
    many = count(number, "acknowledged trajectory") if number else "an unknown number of trajectories"
    return Violation(f"{_shard(key)} is lost ({many}): {why}", lost=number or 1)


def _sealed_again(seals: Seals) -> Iterator[Violation]:
    """Yield a violation for each index under which several shards were sealed; all but the last are lost."""
    for key, sizes in seals.items():
        if gone := sum(size.trajectories for size in sizes[:-1]):
            yield Violation(
                f"{_shard(key)} was sealed {len(sizes)} times: its earlier contents, "
                f"{count(gone, 'acknowledged trajectory')}, are lost",
                lost=gone,
            )


def check_merges(evidence: Evidence) -> Check:
    """Check that every shard was merged once and as it was sealed; merges that a resume undid are ignored."""
    merges = evidence.history.merges
    first = {merge.key: merge for merge in reversed(merges)}
    violations = (
        *(_merged_again(first[merge.key], merge) for merge in merges if merge is not first[merge.key]),
        *chain.from_iterable(_contradictions(evidence, merge) for merge in merges),
    )
    looked_at = f"{count(len(merges), 'merge')} in {count(evidence.history.last_revision, 'revision')}"
    return _by_records(evidence, "every shard merged once", looked_at, violations)


def _merged_again(first: Merge, again: Merge) -> Violation:
    return Violation(
        f"{_shard(again.key)} was merged in revision {first.revision} and again in revision {again.revision}",
        doubled=again.trajectories,
    )


def _contradictions(evidence: Evidence, merge: Merge) -> Iterator[Violation]:
    """Yield a violation if a merge's record contradicts the shard's seal or file, or the buffer's counts."""
    sealed = evidence.seals.get(merge.key)
    file, brought = evidence.files.get(merge.key), (merge.trajectories, merge.tokens)
    if sealed and sealed[-1].trajectories != merge.trajectories:
        yield Violation(
            f"{_shard(merge.key)} was sealed with {sealed[-1].trajectories} trajectories, "
            f"but {merge.trajectories} were merged"
        )
    if file and not file.fault and (file.size, file.request_ids) != (brought, merge.request_ids):
        yield Violation(f"{_shard(merge.key)} differs on disk from what was merged")
    if merge.trajectories != merge.added + merge.duplicates + merge.again:
        left_out = f", and left out {merge.again} answered before" if merge.again else ""
        yield Violation(
            f"{_shard(merge.key)} brought {merge.trajectories} trajectories, but the buffer took "
            f"{merge.added} as new and {merge.duplicates} as duplicates{left_out}"
        )


# --- Prompts ---


def check_prompts(evidence: Evidence) -> Check:
    """Check that no request is in two shards, and that checkpoints list exactly the merged ones as done."""
    merged = {merge.key: merge.request_ids for merge in evidence.saved_merges}
    sealed = {key: file.request_ids for key, file in evidence.waiting.items()} | merged
    times = _times_taken(evidence, sealed)
    violations = (
        *_sealed_twice(evidence, sealed, times),
        *chain.from_iterable(_completed_violations(evidence, checkpoint) for checkpoint in evidence.usable),
    )
    end = max(times, default=-1) + 1
    still_open = end - len(times)
    looked_at = f"{len(times):,} of the first {end:,} requests sealed, {still_open:,} still open"
    if still_open and evidence.config.launch.elastic:
        looked_at += ", among them those of elastic slots without a searcher"
    return _by_records(evidence, "no prompt skipped or doubled", looked_at, violations)


def _times_taken(evidence: Evidence, sealed: RequestIds) -> Counter[int]:
    """Count how often each request was sealed. sealed: the requests of each shard.

    Second answers that a merge has left out are not counted. If an elastic searcher has sealed a request,
    second answers in ``waiting`` shards do not count either, because the next start will leave them out.
    """
    times = Counter(chain.from_iterable(sealed.values()))
    times.subtract(chain.from_iterable(merge.answered for merge in evidence.saved_merges))
    contested = set(chain.from_iterable(ids for key, ids in sealed.items() if is_elastic(key[0])))
    for key in evidence.waiting:
        times.subtract(id_ for id_ in sealed[key] if id_ in contested and times[id_] > 1)
    return times


def _sealed_twice(evidence: Evidence, sealed: RequestIds, times: Counter[int]) -> Iterator[Violation]:
    """Yield violations about requests that are in several shards, and about shards with too many completions.

    sealed: the requests of each shard. times: how often each request was sealed.
    """
    samples = evidence.config.generator.completions_per_prompt
    if doubled := sorted(request_id for request_id, found in times.items() if found > 1):
        shards = [
            _shard(key) for key, request_ids in sealed.items() if not set(doubled).isdisjoint(request_ids)
        ]
        yield Violation(
            f"{_some('request', doubled)} sealed more than once: in {', '.join(shards[:SHOWN])}",
            doubled=samples * sum(times[request_id] - 1 for request_id in doubled),
        )
    for key, request_ids in sealed.items():
        sealed_there = evidence.sizes[key].trajectories if key in evidence.sizes else 0
        if (extra := sealed_there - samples * len(request_ids)) > 0:
            yield Violation(
                f"{_shard(key)} holds {extra} trajectories more than {samples} for each of its prompts",
                doubled=extra,
            )


def _completed_violations(evidence: Evidence, checkpoint: Checkpoint) -> Iterator[Violation]:
    """Yield violations about requests that a checkpoint lists as done but were not merged, or the reverse."""
    merges = evidence.history.until(checkpoint.state.revision)
    merged = set(chain.from_iterable(merge.request_ids for merge in merges))
    name = checkpoint.name
    if skipped := sorted(checkpoint.done - merged):
        yield Violation(f"{name}: {_some('request', skipped)} marked done, but never merged: skipped")
    if again := sorted(merged - checkpoint.done):
        yield Violation(f"{name}: {_some('request', again)} merged, but not marked done: issued again")


# --- Checkpoints ---


def check_buffer(evidence: Evidence) -> Check:
    """Check that the newest checkpoint's buffer holds as many trajectories as its counts say, none twice."""
    state = evidence.newest
    violations = [violation for one in evidence.usable[-1:] for violation in _buffer_violations(one)]
    looked_at = (
        f"{state.trajectories:,} = {state.added - state.evicted:,} stored + {state.duplicates:,} duplicates "
        f"+ {state.evicted:,} evicted"
    )
    again = sum(merge.again for merge in evidence.saved_merges)
    looked_at += f" + {again:,} of requests answered before" if again else ""
    return Check("trajectories used or evicted", looked_at, tuple(violations))


def _buffer_violations(checkpoint: Checkpoint) -> Iterator[Violation]:
    record, should = checkpoint.buffer["record"], checkpoint.state.added - checkpoint.state.evicted
    if should != len(record):
        yield Violation(
            f"{checkpoint.name}: the buffer holds {len(record)} trajectories, not {should}",
            lost=max(0, should - len(record)),
        )
    if again := len(record) - len(np.unique(record["uid"])):
        yield Violation(f"{checkpoint.name}: {again} trajectories are in the buffer twice", doubled=again)


def check_checkpoints(evidence: Evidence) -> Check:
    """Check that checkpoints are whole, agree with earlier merges, and lack no shard that a resume needs."""
    usable, broken = evidence.usable, [one for one in evidence.checkpoints if one.fault]
    violations = (
        *(Violation(f"{one.name} {one.fault}") for one in broken),
        *chain.from_iterable(_miscounted(evidence, checkpoint) for checkpoint in usable if not evidence.gap),
        *chain.from_iterable(_missing_shards(evidence, checkpoint) for checkpoint in usable[:1]),
        *_cut_short(evidence),
    )
    looked_at = ", ".join(checkpoint.name for checkpoint in evidence.checkpoints) or "none yet"
    return Check("checkpoints agree with merges", looked_at, violations, proven=not evidence.gap)


def _cut_short(evidence: Evidence) -> Iterator[Violation]:
    saved, end = evidence.newest.step, evidence.config.train.steps
    if evidence.finished and saved != end:
        yield Violation(f"the run is finished, but its newest checkpoint is of step {saved}, not {end}")


def _miscounted(evidence: Evidence, checkpoint: Checkpoint) -> Iterator[Violation]:
    """Yield violations about counts of a checkpoint that differ from the sums over the merges before it."""
    state, history = checkpoint.state, evidence.history
    merges, dropped = history.until(state.revision), history.dropped(state.revision)
    expected: dict[str, object] = {name: sum(getattr(merge, name) for merge in merges) for name in COUNTED}
    expected["evicted"] = sum(merge.evicted for merge in merges) + dropped
    expected["revision"] = max(history.revisions(state.revision), default=0)
    expected["cursors"] = {searcher: index + 1 for searcher, index in (merge.key for merge in merges)}
    for name, value in expected.items():
        if (there := getattr(state, name)) != value:
            yield Violation(
                f"{checkpoint.name}: {name} is {there}, but the merges on record add up to {value}"
            )


def _missing_shards(evidence: Evidence, oldest: Checkpoint) -> Iterator[Violation]:
    """Yield violations about missing shards that a resume from the oldest kept checkpoint would merge."""
    cursors = oldest.state.cursors
    merged = {merge.key for merge in evidence.saved_merges if merge.key in evidence.sizes}
    for key in sorted(merged - set(evidence.files)):
        if key[1] >= cursors.get(key[0], 0):
            yield Violation(f"the file of {_shard(key)} is gone, and {oldest.name} needs it")


def _shard(key: ShardKey) -> str:
    return f"shard {key[1]} of searcher {key[0]}"


def _some(thing: str, numbers: Sequence[int]) -> str:
    """Return a text such as ``requests 3, 7 and 12 more``."""
    return f"{thing}{'' if len(numbers) == 1 else 's'} {first_few(numbers, SHOWN)}"
