"""Summary, status and audit count the same, however often a run was killed and whatever it left behind."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
from tabular_run import EVERY, STEPS, make_config, start
from typed import tba

from tba_hpc.report.audit import Audit, audit
from tba_hpc.report.run_state import RunMonitor
from tba_hpc.report.status import figures
from tba_hpc.report.summary import summarise
from tba_hpc.run.directory import RunDir

NAMES = (
    *("attempts", "steps", "redone", "shards", "trajectories", "tokens"),
    *("duplicates", "evicted", "dropped"),
)


def of_audit(verdict: Audit) -> dict[str, int]:
    """What the audit counts, whose evidence are all lines and all files."""
    return {name: getattr(verdict, name) for name in NAMES}


def of_summary(run: RunDir) -> dict[str, int]:
    """What ``summary.json`` would say."""
    summary = asdict(summarise(run))
    return {name: summary[name] for name in NAMES}


def of_status(run: RunDir) -> dict[str, int]:
    """What ``tba status --json`` says."""
    monitor = RunMonitor(run)
    monitor.update()
    summary = figures(monitor)["summary"]
    return {name: summary[name] for name in NAMES}


def drop_digests(run: RunDir) -> None:
    """As a run of an earlier version is."""
    for kept in run.metrics.glob("*.digest.json"):
        kept.unlink()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[list[dict[str, int]]]]:
    """A run of five starts, three of them killed, and what the three counted after each."""
    run = RunDir.create(make_config(tmp_path_factory.mktemp("runs")))
    told = []
    starts = (
        (2, SIGKILL, 3),
        (3, SIGKILL, EVERY + 4),
        (1, SIGTERM, 3),
        (2, SIGKILL, EVERY + 1),
        (2, None, 0),
    )
    for searchers, sent, nth in starts:
        process = start(run, searchers=searchers, sent=sent, nth=nth)
        process.join(300)
        assert process.exitcode is not None
        counts = [of_audit(audit(run)), of_summary(run), of_status(run)]
        told.append(counts)
    return run, told


def test_summary_status_and_audit_agree_after_every_kill(
    killed_run: tuple[RunDir, list[list[dict[str, int]]]],
) -> None:
    run, told = killed_run
    for counts in told:
        assert counts[0] == counts[1] == counts[2]
    assert [counts[0]["attempts"] for counts in told] == [1, 2, 3, 4, 5]
    acknowledged = [counts[0]["trajectories"] for counts in told]
    assert acknowledged == sorted(acknowledged) and acknowledged[0] > 0  # no kill takes one back
    last = told[-1][0]
    assert last["steps"] == STEPS and last["redone"] > 0 and last["tokens"] > last["trajectories"]
    assert run.finished and audit(run).clean


def test_counts_agree_without_digests_and_without_the_record_of_a_seal(
    killed_run: tuple[RunDir, list[list[dict[str, int]]]],
) -> None:
    run, told = killed_run
    drop_digests(run)
    assert of_summary(run) == of_status(run) == told[-1][0]
    # A seal that a searcher was killed before it could log: the file, or the merge of it, alone tells of it.
    forgotten = 0
    for path in run.searcher_files().values():
        lines = path.read_text().splitlines(keepends=True)
        seals = [i for i, line in enumerate(lines) if '"event": "sealed"' in line]
        if seals:  # one of few starts may have been too slow to seal anything
            path.write_text("".join(lines[: seals[-1]] + lines[seals[-1] + 1 :]))
            forgotten += 1
    assert forgotten > 0
    assert of_summary(run) == of_status(run) == of_audit(audit(run)) == told[-1][0]


def test_a_stale_summary_and_a_missing_report_are_made_again(
    killed_run: tuple[RunDir, list[list[dict[str, int]]]],
) -> None:
    """As a kill leaves them between the end of a run and its report, or a resume that ended early."""
    run, told = killed_run
    for command in ("report", "run"):
        run.report.unlink()
        run.summary.write_text(json.dumps({"finished": False, "trajectories": 0}))
        done = tba(command, run.path, "--json")
        assert done.returncode == 0, done
        summary = json.loads(run.summary.read_text())
        assert summary["finished"] and {name: summary[name] for name in NAMES} == told[-1][0]
        assert run.report.exists()


def test_a_run_without_records_counts_zero(tmp_path: Path) -> None:
    run = RunDir.create(make_config(tmp_path))
    assert of_summary(run) == of_status(run) == of_audit(audit(run)) == dict.fromkeys(NAMES, 0)
