"""Proves from a run's files that no acknowledged trajectory was lost or used twice, and no prompt skipped.

Shards, metrics, checkpoints, completed requests and buffer are compared with each other. A trajectory is
acknowledged when its shard is sealed. From then on it is safe if a checkpoint contains its merge, or if its
shard is on disk, since a resume begins by merging shards.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tba_hpc.core.wording import count, printable
from tba_hpc.report.audit.checks import Check, Violation, every_check
from tba_hpc.report.audit.evidence import Evidence
from tba_hpc.report.data import Counts
from tba_hpc.report.tables import print_rows
from tba_hpc.run.directory import RunDir

__all__ = ["Audit", "Check", "Violation", "audit", "print_audit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Counts):
    """The verdict on a run, and counts of what it has done.

    begun: number of starts of the run's ranks, including those that ended before the trainer's loop. resumes:
    number of steps that each resume had to do again. merged: number of trajectories that the newest
    checkpoint counts as merged. pending: number of trajectories in shards that wait for their merge. notes:
    sentences about what is unusual but correct.
    """

    begun: int
    finished: bool
    resumes: tuple[int, ...]
    merged: int
    pending: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def violations(self) -> list[Violation]:
        """All violations of the checks."""
        return [violation for check in self.checks for violation in check.violations]

    @property
    def lost(self) -> int:
        """Number of acknowledged trajectories that are lost; a lost shard of unknown size counts as one."""
        return sum(violation.lost for violation in self.violations)

    @property
    def doubled(self) -> int:
        """Number of trajectories that were merged, sealed or stored more than once."""
        return sum(violation.doubled for violation in self.violations)

    @property
    def problems(self) -> tuple[str, ...]:
        """All violations as sentences."""
        return tuple(violation.sentence for violation in self.violations)

    @property
    def clean(self) -> bool:
        """True if every guarantee holds."""
        return not self.problems

    def to_json(self) -> str:
        """Return the whole audit as JSON."""
        verdict = {"clean": self.clean, "lost": self.lost, "doubled": self.doubled}
        return json.dumps({**verdict, **asdict(self)}, indent=2)


def audit(run: RunDir) -> Audit:
    """Audit a run in any state, without changing it. Raises ConfigError if its config cannot be read."""
    evidence = Evidence.read(run)
    history, sizes = evidence.history, evidence.sizes.values()
    return Audit(
        begun=max(run.newest_attempt, history.starts),
        finished=evidence.finished,
        attempts=history.starts,
        steps=history.last_step,
        redone=sum(history.redone),
        resumes=tuple(history.redone),
        shards=sum(1 for size in sizes if size.trajectories),
        trajectories=sum(size.trajectories for size in sizes),
        tokens=sum(size.tokens for size in sizes),
        duplicates=sum(merge.duplicates for merge in history.merges),
        evicted=sum(merge.evicted for merge in history.merges) + history.dropped(),
        dropped=sum(merge.again for merge in history.merges),
        merged=sum(merge.trajectories for merge in evidence.saved_merges),
        pending=evidence.pending,
        checks=every_check(evidence),
        notes=tuple(_notes(evidence)),
    )


def _notes(evidence: Evidence) -> list[str]:
    """Return sentences about what is unusual but correct."""
    over = f"{count(evidence.pending, 'trajectory')} came after the last merge: the run is over, so "
    over += "they were not used for training"
    return [
        *(
            f"shards/searcher-{searcher:04d}/{index:06d}.h5 was set aside: it {file.fault or 'is whole now'}"
            for (searcher, index), file in evidence.refused.items()
        ),
        *([over] if evidence.finished and evidence.pending else []),
    ]


def _word(check: Check) -> str:
    if check.violations:
        return count(len(check.violations), "problem")
    return "holds" if check.proven else "not proven"


def print_audit(verdict: Audit, *, as_json: bool = False) -> None:
    """Print a table of the checks, then each problem in a sentence. as_json: print the audit as JSON."""
    if as_json:
        print(verdict.to_json())
        return
    print_rows(
        [{"guarantee": check.name, "": _word(check), "evidence": check.evidence} for check in verdict.checks]
    )
    done = f"{count(verdict.steps, 'step')} in {count(verdict.attempts, 'attempt')}"
    done += f" whose trainer started (of {verdict.begun})" if verdict.begun > verdict.attempts else ""
    summary = (
        f"{verdict.trajectories:,} acknowledged trajectories: {verdict.merged:,} merged, "
        f"{verdict.pending:,} pending, {verdict.lost:,} lost, {verdict.doubled:,} doubled; "
        f"{done}, {verdict.redone:,} redone"
    )
    for line in (*verdict.problems, *(f"note: {note}" for note in verdict.notes), summary):
        print(printable(line))
