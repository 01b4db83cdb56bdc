"""Elastic searchers by demand: when there are to be more, when fewer, and what is asked of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import happen, new_run, step, write

from tba_hpc.commands import elastic
from tba_hpc.launch import LaunchError


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
    assert elastic.wanted(3, share, age, sync_every=2) == jobs


def test_figures_are_of_the_steps_since_the_last_look() -> None:
    records = [step(n, 0.0, seconds=2.0) | {"time/learn_seconds": 1.5} for n in (1, 2)]
    assert elastic.figures([{"event": "merged"}, *records], waits=True) == (0.25, 2.0)  # type: ignore[list-item]
    assert elastic.figures([], waits=True) == (1.0, 0.0)
    assert elastic.wanted(3, *elastic.figures([], waits=False), sync_every=1) == 3, "it is in a long step"


class Cluster:
    """A run that is filling its buffer, and a queue. stay: whether jobs do; comment: of theirs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.sent, self.queue = new_run(folder), 0, dict[str, str]()
        self.stay, self.comment, self.looks = True, str(self.run.path), 0
        happen(self.run, 1.0, "start", attempt="attempt-001", trainers=1, searchers=2)
        monkeypatch.setattr(elastic.time, "sleep", self.look)
        monkeypatch.setattr(elastic, "ask", self.ask)
        monkeypatch.setattr(elastic.slurm, "send", self.send)
        monkeypatch.setattr(elastic, "job_states", lambda _: [])

    def look(self, _: float) -> None:
        self.looks += 1
        assert self.looks < 20, "it never ends"
        if not self.stay:
            self.queue.clear()

    def send(self, *_: object) -> str:
        self.sent += 1
        self.queue[f"{self.sent}_0"] = "RUNNING"
        return str(self.sent)

    def ask(self, *command: str) -> str:
        assert command[0] in ("squeue", "scancel")
        for job in command[1:] if command[0] == "scancel" else ():
            del self.queue[job]
        rows = [f"{job}|{state}|{self.comment}\n" for job, state in self.queue.items()]
        return "".join([*rows, "99|RUNNING|/another\n"])

    def follow(self) -> None:
        elastic.follow_demand(self.run, self.run.config(), "script", "x", least=1, most=3)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_demand_is_met_job_by_job_within_its_bounds(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run
    looks = iter([None, None, "filling", "filling", "filling", "busy", "busy", "busy", "end"])

    def look(_: float) -> None:
        match next(looks):
            case "filling":
                write(run.metrics_file("trainer"), [{"event": "filling", "step": 0, "time": 1.0}])
            case "busy":
                busy = step(1, 2.0, seconds=1.0) | {"time/learn_seconds": 1.0, "staleness/mean": 99.0}
                write(run.metrics_file("trainer"), [busy])
            case "end":
                run.mark_finished()

    monkeypatch.setattr(elastic.time, "sleep", look)
    cluster.follow()
    counts = [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()]
    assert counts == [
        *("job 1 added to 0", "jobs: 1"),  # the least, while the run is starting
        *("job 2 added to 1", "job 3 added to 2", "jobs: 3"),  # the most
        *("job 3_0 leaves, of 3", "job 2_0 leaves, of 2", "jobs: 1"),
        *("jobs: 1", f"the run is finished: {run.summary}"),
    ]


def test_jobs_that_leave_at_once_are_not_replaced_for_ever(cluster: Cluster) -> None:
    cluster.stay = False
    with pytest.raises(LaunchError, match=r"^3 jobs of searchers in a row left .*slurm/searchers-3_0\.log$"):
        cluster.follow()
    assert cluster.sent == 3


def test_jobs_that_cannot_be_found_again_are_not_sent_again(cluster: Cluster) -> None:
    cluster.comment = "a project's own"
    with pytest.raises(LaunchError, match=r"^job 1 is not found among the searchers of .*sbatch_options"):
        cluster.follow()
    assert cluster.sent == 1


def test_the_run_may_be_named_by_another_path(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cluster.run.path)
    cluster.comment, cluster.queue = str(tmp_path / "link"), {"7_0": "RUNNING"}
    assert elastic.searcher_jobs(cluster.run, "x") == [("7_0", "RUNNING")]


@pytest.mark.parametrize("event", ["stopped", "refused", "failed", "gone"])
def test_searchers_leave_a_run_that_has_ended(
    cluster: Cluster, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.queue = {"7_0": "RUNNING"}
    if event == "gone":
        happen(cluster.run, 2.0, "allocated", job="5", nodes="node1")
        monkeypatch.setattr(elastic, "job_states", lambda _: [{"job": "5", "state": "FORGOTTEN"}])
    else:
        happen(cluster.run, 2.0, event)
    cluster.follow()
    looks = 2 if event == "gone" else 1
    assert (cluster.looks, cluster.sent, cluster.queue) == (looks, 0, {})
