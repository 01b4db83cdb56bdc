"""Lets elastic nodes of a run come and go, on a Slurm cluster started on this machine.

    python tools/churn.py [--counts 0 4 1 6] [--pause 20 40] [--minutes 10] [--seed 0]
                          [--hosts] [--model FOLDER | --tabular]

The quickstart trains as a job of two nodes, with slots for elastic searchers. An array of one-node jobs runs
these searchers in a partition from which jobs of a higher partition take nodes. After each pause the number
of nodes left to the array changes, so that searchers are preempted, go back to the queue and start again. At
each change a searcher that stays is killed, or frozen for longer than its lease. In the end the run must
finish by itself, and ``tba audit`` must find every trajectory exactly once; otherwise the exit status is 1.

It prints the figures of the run. It needs a source checkout, root and Slurm's daemons; the package
``slurm_testbed`` starts the cluster.
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
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random

import psutil
from slurm_testbed.cluster import Cluster
from slurm_testbed.trial import DEADLINE, Trial, cluster_of, parser_of, submit, submit_elastic, time_of

from tba_hpc.config import is_elastic
from tba_hpc.report.audit import Audit, audit
from tba_hpc.report.data import RunData
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.history import History
from tba_hpc.run.metrics import Record, number
from tba_hpc.run.owners import SILENT_OWNER_SECONDS

FROZEN_SECONDS = SILENT_OWNER_SECONDS + 20
"""Time for which a searcher is frozen, s: its lease ends meanwhile, and another may take its slot."""

BEGAN = re.compile(
    r"^\[(\S+ \S+) job (\w+) restart \d+\] (?:starting elastic searchers|searcher \d+ of .* again$)", re.M
)
"""Pattern of the log line with which an elastic job starts its searcher, on a new node or after a crash."""

HOLD = "#!/bin/bash\nexec sleep 86400\n"


@dataclass
class Churn(Trial):
    """A run, and the array of ``nodes`` jobs of elastic searchers. array: its job id."""

    nodes: int = 0
    array: int = 0
    _held: list[int] = field(default_factory=list)
    _changes: int = 0

    def lend(self, nodes: int) -> None:
        """Leave ``nodes`` nodes to the array; jobs of a higher partition take the others."""
        while len(self._held) > self.nodes - nodes:
            self.cluster.run("scancel", str(self._held.pop()))
        while len(self._held) < self.nodes - nodes:
            self._held.append(self.cluster.submit(HOLD, "-phigh", "-N1", "--exclusive"))
        self._changes += 1

    def rage(self, counts: Sequence[int], seconds: float, pause: tuple[float, float], random: Random) -> None:
        """Change the number of nodes again and again for ``seconds``; then let the run end.

        counts: numbers of nodes, in turn. pause: shortest and longest pause between changes, s.
        """
        self.lend(0)
        self.wait_for(lambda: self.history.step >= 1, "the first step")
        end = time.monotonic() + seconds
        for nodes in itertools.cycle(counts):
            self.lend(nodes)
            print(f"step {self.history.step}: {nodes} nodes", file=sys.stderr)
            time.sleep(min(random.uniform(*pause), max(0.0, end - time.monotonic())))
            self._strike_one(random)
            self.history.update()
            if time.monotonic() >= end:
                break
        self.lend(self.nodes)
        self.wait_for(lambda: self._elastic("sealed"), "a shard of an elastic searcher")
        self.end(self.array)
        self.history.update()

    def _strike_one(self, random: Random) -> None:
        """Kill an elastic searcher, or freeze it for longer than its lease lasts, if there is one."""
        if there := self._searchers():
            victim, kills = random.choice(there), random.random() < 0.5
            fate = "killed" if kills else f"frozen for {FROZEN_SECONDS:g} s"
            print(f"step {self.history.step}: process {victim}, a searcher, is {fate}", file=sys.stderr)
            _signal(victim, signal.SIGKILL if kills else signal.SIGSTOP)
            if not kills:
                threading.Timer(FROZEN_SECONDS, _signal, (victim, signal.SIGCONT)).start()

    def _searchers(self) -> list[int]:
        """Return the process ids of elastic searchers."""
        found = []
        for node in self.cluster.up:
            for pid in self.cluster.pids(node):
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    array = process.environ().get("SLURM_ARRAY_JOB_ID") == str(self.array)
                    command = process.cmdline()
                    its_own = command[0] not in ("srun", "bash")  # these start the searcher
                    if array and its_own and command[-2:] == ["search", str(self.run.path)]:
                        found.append(pid)
        return found

    # --- What became of it ---

    def row(self, found: Audit) -> dict[str, Cell]:
        """Return the figures of the whole run."""
        steps = History.of(self.history.trainer).steps
        waits = [number(r, "train/wait_share", 0.0) for r in steps if "train/wait_share" in r]
        starts, ettr = self._starts(), RunData.read(self.run).ettr
        joins = [time_of(r) - self._start_of(r) for r in self._elastic("joined")]
        return {
            "changes": self._changes,
            "starts": len(starts),
            "joined": len(joins),
            "start to joined, median s": statistics.median(joins) if joins else None,
            "shards": len(self._elastic("sealed")),
            "optimizer steps": self.history.step,
            "trainer wait, last, %": 100 * waits[-1] if waits else None,
            "ETTR, %": None if ettr is None else 100 * ettr,
            "problems": len(found.problems),
            "lost": found.lost,
            "doubled": found.doubled,
        }

    def _start_of(self, joined: Record) -> float:
        """Return when the job of a searcher that joined had last started it, as Unix time."""
        job, end = str(joined.get("job")), time_of(joined)
        return max((when for when, of_job in self._starts() if of_job == job and when <= end), default=end)

    def _elastic(self, event: str) -> list[Record]:
        """Return the events of a name that elastic searchers have recorded."""
        of_searchers = (records for s, records in self.history.searchers.items() if is_elastic(s))
        return [r for records in of_searchers for r in records if r.get("event") == event]

    def _starts(self) -> list[tuple[float, str]]:
        """Return (Unix time, job) of each start of a searcher by an elastic job."""
        texts = (file.read_text(errors="replace") for file in self.run.path.glob("slurm/searchers-*.log"))
        began = (start for text in texts for start in BEGAN.findall(text))
        return sorted((datetime.fromisoformat(when).timestamp(), job) for when, job in began)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def begin(cluster: Cluster, root: Path, options: argparse.Namespace) -> Churn:
    """Submit the run, and the array of elastic searchers, as a user would."""
    nodes = max(options.counts)
    settings = (
        "run.name=churn",
        f"train.prompts_per_step={4 if options.tabular else 8}",
        f"launch.elastic={nodes}",
    )
    run, job = submit(cluster, root, options, "--nodes", "2", partition="main", settings=settings)
    cluster.wait(job, "RUNNING", seconds=DEADLINE)  # before other jobs take the nodes
    array = submit_elastic(cluster, root, run, nodes, partition="low")
    return Churn(cluster, run, job, nodes=nodes, array=array)


def main() -> None:
    """Let nodes come and go, and report what became of the run."""
    options = _options()
    with cluster_of(options, nodes=max(options.counts) + 2) as cluster:
        churn = begin(cluster, cluster.share, options)
        churn.rage(options.counts, 60 * options.minutes, options.pause, Random(options.seed))
        found = audit(churn.run)
        row = churn.row(found)
    if options.json:
        print(json.dumps(row, indent=2))
    else:
        print_rows([{"of the run": name, "": value} for name, value in row.items()])
    if found.problems:
        sys.exit("\n".join(found.problems))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[0, 4, 1, 6], help="numbers of elastic nodes, in turn"
    )
    pause = parser.add_argument(
        "--pause", type=float, nargs=2, default=[20.0, 40.0], help="pause between changes, s"
    )
    pause.metavar = ("LEAST", "MOST")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for which nodes come and go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
