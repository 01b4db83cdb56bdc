"""Proves from what lies on disk that a run lost no acknowledged trajectory, doubled none, skipped no prompt.

Shards, metrics, checkpoints, completed requests and buffer are held against each other. A trajectory is
acknowledged when its shard is sealed. It is safe in a checkpoint, which holds the buffer, or in its shard,
which a resume merges first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tba_hpc.core.wording import count, printable
from tba_hpc.report.audit.checks import Check, Violation, every_check
from tba_hpc.report.audit.evidence import Evidence
from tba_hpc.report.tables import print_rows
from tba_hpc.run.directory import RunDir

__all__ = ["Audit", "Check", "Violation", "audit", "print_audit"]


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict over a run.

    attempts: starts of the trainer. steps: optimizer steps of the surviving history. redone: per resume, the
    steps that it took back. shards, trajectories, tokens: acknowledged; of the trajectories merged are in the
    newest checkpoint, pending on disk beyond it, and lost nowhere. duplicates, evicted: what the buffer did
    with all that the surviving history merged; dropped: what of it stayed out by rule. doubled: in it more
    than once.
    """

    finished: bool
    attempts: int
    steps: int
    redone: tuple[int, ...]
    shards: int
    trajectories: int
    tokens: int
    duplicates: int
    evicted: int
    dropped: int
    merged: int
    pending: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def violations(self) -> list[Violation]:
        """All that is wrong."""
        return [violation for check in self.checks for violation in check.violations]

    @property
    def lost(self) -> int:
        """Acknowledged trajectories that are nowhere; at least one for a shard that nobody counted."""
        return sum(violation.lost for violation in self.violations)

    @property
    def doubled(self) -> int:
        """Trajectories that are in the surviving history more than once."""
        return sum(violation.doubled for violation in self.violations)

    @property
    def problems(self) -> tuple[str, ...]:
        """All that is wrong, a sentence each."""
        return tuple(violation.sentence for violation in self.violations)

    @property
    def clean(self) -> bool:
        """Whether every promise holds."""
        return not self.problems

    @property
    def steps_redone(self) -> int:
        """Optimizer steps that were taken again after a resume, in all."""
        return sum(self.redone)

    def to_json(self) -> str:
        """All of it."""
        totals = {"clean": self.clean, "lost": self.lost, "doubled": self.doubled}
        return json.dumps({**totals, "steps_redone": self.steps_redone, **asdict(self)}, indent=2)


def audit(run: RunDir) -> Audit:
    """Audit a run at any moment; changes nothing. Raises ConfigError for a broken config."""
    evidence = Evidence.read(run)
    return Audit(
        finished=evidence.finished,
        attempts=evidence.history.starts,
        steps=evidence.history.last_step,
        redone=tuple(evidence.history.redone),
        shards=sum(1 for size in evidence.sizes.values() if size.trajectories),
        trajectories=sum(size.trajectories for size in evidence.sizes.values()),
        tokens=sum(size.tokens for size in evidence.sizes.values()),
        duplicates=sum(merge.duplicates for merge in evidence.history.merges),
        evicted=sum(merge.evicted for merge in evidence.history.merges) + evidence.history.dropped(),
        dropped=sum(merge.again for merge in evidence.history.merges),
        merged=sum(merge.trajectories for merge in evidence.saved_merges),
        pending=sum(file.size.trajectories for file in evidence.waiting.values()),
        checks=every_check(evidence),
        notes=tuple(_notes(evidence)),
    )


def _notes(evidence: Evidence) -> list[str]:
    """What is worth knowing and not wrong."""
    pending = sum(file.size.trajectories for file in evidence.waiting.values())
    over = f"{count(pending, 'trajectory')} came after the last merge: the run is over, none is trained on"
    return [
        *(
            f"shards/searcher-{searcher:04d}/{index:06d}.h5 was set aside: it {file.fault or 'is whole now'}"
            for (searcher, index), file in evidence.refused.items()
        ),
        *([over] if evidence.finished and pending else []),
        *(f"{name} is damaged and not counted" for name in evidence.damaged),
    ]


def _word(check: Check) -> str:
    if check.violations:
        return count(len(check.violations), "problem")
    return "holds" if check.proven else "not proven"


def print_audit(verdict: Audit, *, as_json: bool = False) -> None:
    """A table of checks, then every problem in full; or JSON."""
    if as_json:
        print(verdict.to_json())
        return
    print_rows(
        [
            {
                "promise": check.name,
                "": _word(check),
                "looked at": check.evidence,
            }
            for check in verdict.checks
        ]
    )
    done = f"{count(verdict.steps, 'step')} in {count(verdict.attempts, 'attempt')}"
    summary = (
        f"{verdict.trajectories:,} acknowledged trajectories: {verdict.merged:,} merged, "
        f"{verdict.pending:,} pending, {verdict.lost:,} lost, {verdict.doubled:,} doubled; "
        f"{done}, {verdict.steps_redone:,} redone"
    )
    for line in (*verdict.problems, *(f"note: {note}" for note in verdict.notes), summary):
        print(printable(line))
