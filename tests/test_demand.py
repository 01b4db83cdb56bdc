"""Elastic searchers by demand: when there are to be more, when fewer, and what is asked of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import happen, new_run, step, write

from tba_hpc.commands import demand
from tba_hpc.run.directory import RunDir


@pytest.mark.parametrize(
    ("share", "age", "jobs"),
    [
        (1.0, 0.0, 4),  # it waits
        (0.21, 99.0, 4),  # and old data are no reason against that
        (0.1, 99.0, 3),
        (0.04, 9.0, 2),  # it never waits, and learns from data of more than four publications ago
        (0.04, 8.0, 3),
    ],
)
def test_number_of_jobs_follows_waiting_and_age(share: float, age: float, jobs: int) -> None:
    assert demand.wanted(3, share, age, sync_every=2) == jobs


def test_figures_are_of_the_steps_since_the_last_look() -> None:
    records = [step(n, 0.0, seconds=2.0) | {"time/learn_seconds": 1.5} for n in (1, 2)]
    assert demand.figures([{"event": "merged"}, *records]) == (0.25, 2.0)  # type: ignore[list-item]
    assert demand.figures([]) == (1.0, 0.0), "no step at all is nothing but waiting"


def test_demand_is_met_job_by_job_within_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    happen(run, 1.0, "start", attempt="attempt-001", trainers=1, searchers=2)
    queue: list[tuple[str, str]] = []
    looks = iter([None, None, "filling", "filling", "filling", "busy", "busy", "busy", "end"])

    def send(run: RunDir, script: str) -> str:
        queue.append((str(len(queue) + 10), "RUNNING"))
        return queue[-1][0]

    def ask(*command: str) -> str:
        assert command[0] in ("squeue", "scancel")
        if command[0] == "scancel":
            queue[:] = [job for job in queue if job[0] != command[1]]
        rows = [f"{job}|{state}|{run.path}\n" for job, state in queue] + ["99|RUNNING|/another\n"]
        return "".join(rows)

    def look(_: float) -> None:
        match next(looks):
            case "filling":
                write(run.metrics_file("trainer"), [{"event": "filling", "step": 0, "time": 1.0}])
            case "busy":
                busy = step(1, 2.0, seconds=1.0) | {"time/learn_seconds": 1.0, "staleness/mean": 99.0}
                write(run.metrics_file("trainer"), [busy])
            case "end":
                run.mark_finished()

    monkeypatch.setattr(demand.time, "sleep", look)
    monkeypatch.setattr(demand, "ask", ask)
    monkeypatch.setattr(demand.slurm, "send", send)
    monkeypatch.setattr(demand, "job_states", lambda _: [])
    demand.follow_demand(run, run.config(), "script", "x", least=1, most=3)
    counts = [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()]
    assert counts == [
        *("job 10 added to 0", "jobs: 1"),  # the least, while the run is starting
        *("job 11 added to 1", "job 12 added to 2", "jobs: 3"),  # the most
        *("job 12 leaves, of 3", "job 11 leaves, of 2", "jobs: 1"),
        *("jobs: 1", f"the run is finished: {run.summary}"),
    ]
