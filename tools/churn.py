"""Nodes lent to a run come and go, on a Slurm cluster brought up on this machine; prints what it cost.

    python tools/churn.py [--counts 0 4 1 6] [--pause 20 40] [--minutes 10] [--seed 0]
                          [--model FOLDER | --tabular]

The quickstart trains as a job of two nodes, with places for searchers besides its own; an array of one-node
jobs lends it nodes of a partition from which a higher one takes them back. After each pause another number of
nodes is left to it, so that its searchers are preempted, go back to the queue and start anew; at each change
one that stays is killed. In the end the run must finish by itself and ``tba audit`` find every trajectory
once. Where it does not, the exit status is 1.

A tool of a source checkout: the cluster is ``slurm_testbed``'s. Needs root and Slurm's daemons.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random

import psutil
import yaml
from chaos import DEADLINE, HOME, SITE, STEPS_AFTER, History, add_model, config_of, prepare
from slurm_testbed import faults
from slurm_testbed.cluster import ENDED, Cluster, missing

from tba_hpc.config import is_elastic
from tba_hpc.report.audit import audit
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import Record, number, step_records

FOREVER = 1_000_000
"""Optimizer steps: the run goes on until it is shortened."""

BEGAN = re.compile(r"^\[(\S+ \S+) job (\d+) restart \d+\] search(?:ing for|er \d+ of .* again$)", re.M)
"""A lent job's word that it starts its searcher: on a new node, or once more after a crash."""

Row = dict[str, Cell]


@dataclass
class Churn:
    """A run, and the nodes that it is lent. nodes: of the lent jobs together."""

    cluster: Cluster
    nodes: int
    run: RunDir
    job: int
    array: int
    _held: list[int] = field(default_factory=list)
    _lent: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.run)

    def lend(self, nodes: int) -> None:
        """Leave it so many; jobs of a higher partition hold the others."""
        while len(self._held) > self.nodes - nodes:
            self.cluster.run("scancel", str(self._held.pop()))
        while len(self._held) < self.nodes - nodes:
            script = "#!/bin/bash\nexec sleep 86400\n"
            self._held.append(self.cluster.submit(script, "-phigh", "-N1", "--exclusive"))
        self._lent.append((time.time(), nodes))

    def rage(self, counts: Sequence[int], seconds: float, pause: tuple[float, float], random: Random) -> None:
        """Change the number of nodes for so long, a pause of at least and at most so long between changes.

        AssertionError where the run's own job ends meanwhile.
        """
        self._await_step(1)
        end = time.monotonic() + seconds
        for nodes in itertools.cycle(counts):
            self.lend(nodes)
            print(f"step {self.history.step}: {nodes} nodes are lent", file=sys.stderr)
            time.sleep(min(random.uniform(*pause), max(0.0, end - time.monotonic())))
            self._kill_one(random)
            self._look()
            if time.monotonic() >= end:
                return

    def finish(self) -> None:
        """Have the run end soon, once all were there; wait for it and for those who search for it."""
        self.lend(self.nodes)
        self._wait(lambda: any(self._sealed()), "a shard of those who came")
        asked = time.time()
        faults.ask_to_stop(self.cluster, self.job)
        self._wait(lambda: self.history.stopped(after=asked), "the run to stop, to be shortened")
        self.run.adapt([f"train.steps={self.history.step + STEPS_AFTER}"])
        self._wait(lambda: self.run.finished, "the end of the run")
        for job in (self.job, self.array):
            self.cluster.until(lambda: self._ended(job), f"job {job} to end", DEADLINE)  # noqa: B023

    def _ended(self, job: int) -> bool:
        return set(self.cluster.state(job).split("+")) <= ENDED

    def _kill_one(self, random: Random) -> None:
        """SIGKILL of one of the lent searchers, if there are any."""
        if there := self._searchers():
            victim = random.choice(there)
            print(f"step {self.history.step}: process {victim}, a lent searcher, is killed", file=sys.stderr)
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def _searchers(self) -> list[int]:
        """Process ids of those who came by themselves."""
        found = []
        for node in self.cluster.up:
            for pid in self.cluster.pids(node):
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    array = process.environ().get("SLURM_ARRAY_JOB_ID") == str(self.array)
                    command = process.cmdline()
                    its_own = command[0] not in ("srun", "bash")  # which start it
                    if array and its_own and command[-2:] == ["search", str(self.run.path)]:
                        found.append(pid)
        return found

    def _look(self) -> None:
        self.history.update()
        state = self.cluster.state(self.job)
        assert state not in ENDED, f"the run's job is {state}: see {self.run.path}/slurm"

    def _await_step(self, step: int) -> None:
        self._wait(lambda: self.history.step >= step, f"step {step}")

    def _wait(self, probe: object, what: str) -> None:
        def seen() -> bool:
            self._look() if not self.run.finished else self.history.update()
            return bool(probe())  # type: ignore[operator]

        self.cluster.until(seen, what, DEADLINE)

    # --- What became of it ---

    def node_seconds(self) -> float:
        """Offered to the lent jobs, until the run was finished."""
        ends = [*(when for when, _ in self._lent[1:]), self.run.finished_file.stat().st_mtime]
        return sum(nodes * (end - when) for (when, nodes), end in zip(self._lent, ends, strict=True))

    def joins(self) -> list[tuple[float, float | None]]:
        """Of each time that a searcher joined: seconds since its job started it, and to its first shard."""
        found: list[tuple[float, float | None]] = []
        starts = self._starts()
        for records in self._lent_records():
            for record in records:
                joined, job = _time(record), str(record.get("job"))
                own = [when for when, of_job in starts if of_job == job and when <= joined]
                if record.get("event") == "joined" and own:
                    began = max(own)
                    sealed = (_time(r) for r in records if r.get("event") == "sealed")
                    first = next((when for when in sealed if when > joined), None)
                    found.append((joined - began, None if first is None else first - began))
        return found

    def seconds_at_work(self) -> float:
        """Of all who came, each time from its joining to its last word."""
        total = 0.0
        for records in self._lent_records():
            joined = [i for i, record in enumerate(records) if record.get("event") == "joined"]
            for first, after in itertools.pairwise([*joined, len(records)]):
                stay = itertools.takewhile(lambda r: r.get("event") != "started", records[first:after])
                *_, last = stay
                total += _time(last) - _time(records[first])
        return total

    def _starts(self) -> list[tuple[float, str]]:
        """(unix time, job) of each time that a lent job started its searcher."""
        texts = (file.read_text(errors="replace") for file in self.run.path.glob("slurm/searchers-*.log"))
        return sorted(
            (datetime.fromisoformat(when).timestamp(), job)
            for text in texts
            for when, job in BEGAN.findall(text)
        )

    def _lent_records(self) -> list[list[Record]]:
        return [records for searcher, records in self.history.searchers.items() if is_elastic(searcher)]

    def _sealed(self) -> list[Record]:
        """Shards of theirs."""
        records = itertools.chain.from_iterable(self._lent_records())
        return [record for record in records if record.get("event") == "sealed"]

    def row(self, problems: int, lost: int, doubled: int) -> Row:
        """The whole of it."""
        records = list(itertools.chain.from_iterable(self._lent_records()))
        firsts = [first for _, first in self.joins() if first is not None]
        steps = step_records(self.history.trainer)
        waits = [number(r, "train/wait_share", 0.0) for r in steps if "train/wait_share" in r]
        events = [str(record.get("event")) for record in records]
        tokens = sum(number(record, "tokens", 0.0) for record in self._sealed())
        lent, at_work = tokens / self.node_seconds(), tokens / max(1.0, self.seconds_at_work())
        return {
            "changes": len(self._lent),
            "starts of their searchers": len(self._starts()),
            "joined": events.count("joined"),
            "told to go": events.count("left"),
            "shards of theirs": len(self._sealed()),
            "optimizer steps": self.history.step,
            "trainer wait, last, %": 100 * waits[-1] if waits else None,
            "start to joined, median s": _median([joined for joined, _ in self.joins()]),
            "start to first shard, median s": _median(firsts),
            "start to first shard, at most, s": max(firsts, default=None),
            "tokens of theirs per node-second lent": lent,
            "of what they bring while they are at work, %": 100 * lent / at_work if tokens else None,
            "problems": problems,
            "lost": lost,
            "doubled": doubled,
        }


def _time(record: Record) -> float:
    return number(record, "time", 0.0)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def begin(cluster: Cluster, root: Path, options: argparse.Namespace) -> Churn:
    """Submit the run, and the array of jobs that search for it, as a user would."""
    nodes = max(options.counts)
    files = {"own.yaml": {**SITE, "partition": "main"}, "lent.yaml": {**SITE, "partition": "low"}}
    for name, site in files.items():
        (root / name).write_text(yaml.safe_dump(site))
    config, given = config_of(options)
    settings = [
        *given,
        "run.name=churn",
        f"train.steps={FOREVER}",
        f"train.prompts_per_step={4 if options.tabular else 8}",
        "train.learning_rate={schedule: constant, peak: 1.0e-5}",
        f"launch.elastic={nodes}",
    ]
    submit = (sys.executable, HOME / "tools" / "submit.py")
    own = cluster.run(
        *(*submit, "--config", config, "--nodes", "2", "--json"),
        *("--site", root / "own.yaml", "--run-root", root),
        *(word for setting in settings for word in ("--set", setting)),
    )
    run, job = RunDir.open(Path(json.loads(own)["run"])), int(json.loads(own)["job"])
    cluster.wait(job, "RUNNING", seconds=DEADLINE)  # before anybody holds the nodes that it chose
    lent = cluster.run(
        *(*submit, "--elastic", run.path, "--nodes", str(nodes), "--site", root / "lent.yaml", "--json")
    )
    return Churn(cluster, nodes, run, job, int(json.loads(lent)["job"]))


def main() -> None:
    """Let nodes come and go, and say what became of the run."""
    options = _options()
    if reason := missing():
        sys.exit(f"churn: no Slurm cluster can be brought up here: {reason}")
    prepare(options)
    nodes = max(options.counts)
    with tempfile.TemporaryDirectory() as folder, Cluster(nodes=nodes + 2) as cluster:
        churn = begin(cluster, Path(folder), options)
        churn.lend(0)
        churn.rage(options.counts, 60 * options.minutes, options.pause, Random(options.seed))
        churn.finish()
        churn.history.update()
        found = audit(churn.run)
        row = churn.row(len(found.problems), found.lost, found.doubled)
    if options.json:
        print(json.dumps(row, indent=2))
    else:
        print_rows([{"of the run": name, "": value} for name, value in row.items()])
    if found.problems:
        sys.exit("\n".join(found.problems))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 4, 1, 6], help="nodes lent, in turn")
    parser.add_argument(
        "--pause",
        type=float,
        nargs=2,
        default=[20.0, 40.0],
        metavar=("LEAST", "MOST"),
        help="s between changes",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long they come and go")
    parser.add_argument("--seed", type=int, default=0, help="of the pauses and of who is killed")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
