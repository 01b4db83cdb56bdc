"""Strikes a run with a seeded sequence of faults, on a Slurm cluster started on this machine.

    python tools/chaos.py [--faults 100] [--kinds KIND ...] [--seed 0] [--nodes 3] [--trainer-nodes 1]
                          [--hosts] [--every SECONDS] [--model FOLDER | --tabular] [--json]

The quickstart trains as a heterogeneous job on ``--nodes`` of six nodes. Faults strike it one after the
other:

- engines and ranks are killed, and engines hang;
- nodes crash, and boot again later;
- the job is preempted, or asked to stop;
- checkpoints, shards and metrics are damaged, a shard is hidden, and the disk is full for a while;
- a second launcher or searcher tries to join.

Most faults wait until the run has recovered from the last one and has taken a few optimizer steps; some
strike while ranks start. Then the run must end by itself. ``tba audit`` must find every trajectory exactly
once, except those in damaged shards, which it must name. Otherwise the exit status is 1, and the ends of the
logs are shown.

``--tabular`` trains the enumerable model of ``lab.tabular``, which needs no engine and whose ranks start at
once. With ``--hosts`` nodes share only a network and a folder. Then links are cut and slowed, the folder is
taken from a host, and hosts freeze and wake up.

It prints how often each fault was survived, and how long recoveries took. It needs a source checkout, root
and Slurm's daemons; the package ``slurm_testbed`` starts the cluster and makes the faults.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from rich.console import Console
from slurm_testbed import faults
from slurm_testbed.faults import RankProcess
from slurm_testbed.hosts import Hosts
from slurm_testbed.trial import (
    DEADLINE,
    TAKEOVERS,
    NotSurvived,
    Trial,
    cluster_of,
    parser_of,
    submit,
    time_of,
)

from tba_hpc.core.types import Role
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.audit import Audit, audit
from tba_hpc.report.data import RunData
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.checkpoints import checkpoint_folders, latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import Record, number

SLOW_STEPS = ("train.prompts_per_step=32",)
"""Overrides of a run with engines, which make its steps slower: few steps are needed."""

STEPS_BETWEEN = 4
"""Upper bound of the number of optimizer steps from a recovery to the next fault."""

START_UP_SHARE = 0.2
"""Share of faults that strike while ranks start, among those that may: the fault before ended the ranks."""

START_UP_SECONDS = 15.0
"""Approximate time from the start of ranks to the first step, s."""

FULL_SECONDS, HIDDEN_SECONDS = 10.0, 25.0
"""Time for which the disk is full, and for which a shard is hidden, s: the next attempt does not see it."""

DISK = "512m"
"""Size of the run's file system, which lies in memory, so that it can be filled."""

Row = dict[str, Cell]

Blow = Callable[["Storm", Sequence[RankProcess], float], RankProcess | None]
"""Function that strikes. Its arguments are the storm, the living ranks, and a number in [0, 1) that chooses
among them. It returns the rank that it hit."""

Cost = Literal["ranks", "engine", "nothing"]
"""Least cost of a fault: all ranks start again, an engine is built again, or nothing."""


# --- Faults ---


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    weight: how often it comes, relative to other kinds. waits: whether the run must be taking steps. hosts:
    whether nodes must be hosts (``--hosts``).
    """

    blow: Blow
    weight: int
    cost: Cost = "ranks"
    waits: bool = False
    hosts: bool = False


def _hit(role: Role, fault: Callable[[Storm, RankProcess], None]) -> Blow:
    """Make a blow that applies ``fault`` to a rank of a role."""

    def blow(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
        among = [rank for rank in ranks if rank.role == role]
        rank = among[int(choice * len(among))]
        fault(storm, rank)
        return rank

    return blow


def _hang(storm: Storm, rank: RankProcess) -> None:
    faults.strike(rank, engine=True, sent=signal.SIGSTOP)


def _on_host(role: Role, fault: Callable[[Hosts, str], None], seconds: float = 0.0) -> Blow:
    """Make a blow that applies ``fault`` to the host of a rank of a role.

    seconds: time until the host is mended, s; 0: when the run has recovered.
    """

    def strike(storm: Storm, rank: RankProcess) -> None:
        hosts = storm.cluster
        assert isinstance(hosts, Hosts)
        fault(hosts, rank.node)
        if not seconds:
            storm.mend_later(lambda: hosts.mend(rank.node))
            return
        time.sleep(seconds)
        hosts.mend(rank.node)

    return _hit(role, strike)


def _damage_checkpoint(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """Flip a bit of the newest checkpoint, and kill the leader: the run must resume from an older one."""
    storm.wait_for(lambda: len(checkpoint_folders(storm.run, complete=True)) > 1, "two checkpoints")
    with faults.held_leader(storm.cluster, storm.run):
        newest = checkpoint_folders(storm.run, complete=True)[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        faults.flip_bit(files[int(choice * len(files))], choice)
        return storm.kill_leader()


def _damage_shard(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """Flip a bit of a shard that no checkpoint holds, and kill the leader: its trajectories are lost."""
    with storm.pending(1) as shards:
        (searcher, index), path = shards[int(choice * len(shards))]
        storm.spoiled[searcher, index] = len(read_shard(path).trajectories)
        faults.flip_bit(path, choice)
        return storm.kill_leader()


def _hide_shard(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """Hide a shard that others follow, and kill the leader: it appears after the next attempt has begun."""
    with storm.pending(2) as shards:
        _, path = shards[0]
        hidden = path.rename(storm.run.path / path.name)
        threading.Timer(HIDDEN_SECONDS, lambda: hidden.rename(path)).start()
        return storm.kill_leader()


def _tear_metrics(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """Kill the leader, and leave half a line at the end of its metrics."""
    leader = storm.kill_leader()
    with storm.run.metrics_file("trainer").open("ab") as file:
        file.write(b'{"time": 17')
    return leader


def _launch_again(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    said = faults.refused(storm.cluster, "run", str(storm.run.path))
    assert f"job {storm.job}" in said, f"the refusal does not name the job at work: {said}"


def _search_again(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    faults.refused(storm.cluster, "search", str(storm.run.path), "--index", "0")


KINDS = {
    "engine killed": Kind(_hit("searcher", lambda _, rank: faults.strike(rank, engine=True)), 20, "engine"),
    "engine hung": Kind(_hit("searcher", _hang), 15, "engine"),
    "searcher killed": Kind(_hit("searcher", lambda _, rank: faults.strike(rank)), 20),
    "trainer killed": Kind(_hit("trainer", lambda _, rank: faults.strike(rank)), 15),
    "node crashed": Kind(_hit("searcher", lambda storm, rank: storm.crash(rank.node)), 7),
    "leader crashed": Kind(_hit("trainer", lambda storm, rank: storm.crash(rank.node)), 7),
    "preempted": Kind(lambda storm, *_: faults.preempt(storm.cluster, seconds=DEADLINE), 8),
    "stopped": Kind(lambda storm, *_: faults.ask_to_stop(storm.cluster, storm.job), 8),
    "checkpoint damaged": Kind(_damage_checkpoint, 10, waits=True),
    "shard damaged": Kind(_damage_shard, 5, waits=True),
    "shard hidden": Kind(_hide_shard, 5, waits=True),
    "metrics torn": Kind(_tear_metrics, 5),
    "disk full": Kind(
        lambda storm, *_: faults.fill_disk(storm.run.path.parent, FULL_SECONDS), 5, "nothing", waits=True
    ),
    "second launcher": Kind(_launch_again, 5, "nothing", waits=True),
    "second searcher": Kind(_search_again, 5, "nothing", waits=True),
    "link cut": Kind(_on_host("searcher", Hosts.cut), 7, hosts=True),
    "leader's link cut": Kind(_on_host("trainer", Hosts.cut), 7, hosts=True),
    "host frozen": Kind(_on_host("searcher", Hosts.freeze), 5, hosts=True),
    "leader's host frozen": Kind(_on_host("trainer", Hosts.freeze), 5, hosts=True),
    "link slow": Kind(_on_host("searcher", Hosts.slow, 15.0), 4, "nothing", waits=True, hosts=True),
    "folder cut off": Kind(
        _on_host("searcher", Hosts.cut_folder, 25.0), 4, "nothing", waits=True, hosts=True
    ),
    "leader's folder cut off": Kind(
        _on_host("trainer", Hosts.cut_folder, 25.0), 4, "nothing", waits=True, hosts=True
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault.

    start_up: whether it strikes while ranks start. pause, choice: numbers in [0, 1) that decide when and
    where it strikes.
    """

    kind: str
    start_up: bool
    pause: float
    choice: float


def plan(count: int, seed: int, among: Sequence[str]) -> list[Fault]:
    """Return ``count`` faults of the kinds ``among``; equal seeds give equal faults."""
    random = Random(seed)
    weights = [KINDS[name].weight for name in among]
    kinds = [*among, *random.choices(among, weights, k=max(0, count - len(among)))][:count]
    random.shuffle(kinds)
    planned: list[Fault] = []
    for name in kinds:
        last, kind = planned[-1] if planned else None, KINDS[name]
        ranks_start = last is not None and not last.start_up and KINDS[last.kind].cost == "ranks"
        possible = ranks_start and kind.cost == "ranks" and not kind.waits
        start_up = possible and random.random() < START_UP_SHARE
        planned.append(Fault(name, start_up, random.random(), random.random()))
    return planned


def possible(options: argparse.Namespace) -> list[str]:
    """Return the kinds of faults that can strike with the cluster and model of the options."""
    return [
        name
        for name, kind in KINDS.items()
        if (options.hosts or not kind.hosts) and not (options.tabular and kind.cost == "engine")
    ]


# --- The storm ---


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that has struck. victim: the rank that was hit; None: the whole job. time: Unix time."""

    kind: str
    time: float
    victim: RankProcess | None

    def __str__(self) -> str:
        rank = self.victim
        return self.kind + (f", {rank.role} {rank.index} on {rank.node}" if rank else "")


NOTHING_YET = Strike("stopped", 0.0, victim=None)
"""Strike in place of one before the first fault: the run "recovers" from it by starting."""


@dataclass
class Storm(Trial):
    """A run, and the faults that have struck it.

    engines: whether searchers have engine processes. spoiled: number of trajectories in each damaged shard,
    by (searcher, index). every: shortest time between two faults, s.
    """

    engines: bool = True
    strikes: list[Strike] = field(default_factory=list)
    spoiled: dict[tuple[int, int], int] = field(default_factory=dict)
    every: float = 0.0
    _ailing: list[Callable[[], None]] = field(default_factory=list)

    def rage(self, planned: Sequence[Fault]) -> None:
        """Strike with one fault after the other, then let the run end. Raises NotSurvived."""
        for fault in planned:
            self._await(fault)
            kind, began = KINDS[fault.kind], time.time()
            victim = kind.blow(self, self._ranks, fault.choice)
            struck = time.time() if kind.waits else began
            self.strikes.append(Strike(fault.kind, struck, victim))
            print(f"step {self.history.step}, fault {len(self.strikes)}: {self.strikes[-1]}", file=sys.stderr)
        self._await_recovery()
        self.end()

    def recovered(self, strike: Strike) -> float | None:
        """Return the Unix time at which the run had recovered from a strike; None if it has not.

        That is when restarted ranks took a step, when a new engine generated, or, after a fault that costs
        nothing, when the next step was taken.
        """
        history, after = self.history, strike.time
        times = [history.first_step(after=start) for start in history.times("start", after=after)[:1]]
        if KINDS[strike.kind].cost == "engine" and strike.victim:
            times.append(_generated_again(history.searchers[strike.victim.index], after))
        elif KINDS[strike.kind].cost == "nothing":
            times += history.of_trainer(after=after)[:1]
        return min((time for time in times if time), default=None)

    def crash(self, node: str) -> None:
        """Crash a node, which boots again once the run has recovered."""
        self.cluster.crash(node)
        self.mend_later(lambda: self.cluster.start(node))

    def mend_later(self, mend: Callable[[], None]) -> None:
        """Have ``mend`` called once the run has recovered."""
        self._ailing.append(mend)

    def kill_leader(self) -> RankProcess:
        """Kill the leading trainer, even while it is stopped; return it."""
        leader = self._ranks[0]
        faults.strike(leader)
        return leader

    @contextmanager
    def pending(self, least: int) -> Iterator[list[tuple[tuple[int, int], Path]]]:
        """Yield at least ``least`` shards of one searcher that no checkpoint holds, while the leader is
        stopped.

        Each is ((searcher, index), path); they are in order.
        """
        while True:
            self.wait_for(lambda: _pending(self.run, least), f"{least} shards that no checkpoint holds")
            with faults.held_leader(self.cluster, self.run):
                if found := _pending(self.run, least):  # otherwise a checkpoint has been made meanwhile
                    yield found
                    return

    def _await(self, fault: Fault) -> None:
        """Wait for the moment of a fault: while ranks start, or after the run has recovered and gone on."""
        if fault.start_up:
            since = self.strikes[-1].time
            self.wait_for(lambda: self.history.times("start", after=since) and self._all_there, "all ranks")
            time.sleep(fault.pause * START_UP_SECONDS)
            self.wait_for(lambda: self._all_there, "all ranks")
            return
        self._await_recovery()
        if self.strikes:
            time.sleep(max(0.0, self.strikes[-1].time + self.every - time.time()))
            self.history.update()
        wanted = self.history.step + int(fault.pause * STEPS_BETWEEN)
        self.wait_for(lambda: self.history.step >= wanted and self._complete, f"step {wanted}, all engines")

    def _await_recovery(self) -> None:
        """Wait until the run has recovered from the last fault; then mend what the fault has left."""
        last = self.strikes[-1] if self.strikes else NOTHING_YET
        self.wait_for(lambda: self.recovered(last), f"recovery from {last}")
        while self._ailing:
            self._ailing.pop()()

    @property
    def _ranks(self) -> list[RankProcess]:
        return faults.ranks(self.cluster, self.run)

    @property
    def _all_there(self) -> bool:
        launch = self.run.config().launch
        return len(self._ranks) == launch.trainers + launch.searchers

    @property
    def _complete(self) -> bool:
        built = all(rank.engine for rank in self._ranks if rank.role == "searcher")
        return self._all_there and (built or not self.engines)


def _generated_again(records: Sequence[Record], after: float) -> float | None:
    """Return when a searcher first sampled with an engine built later than ``after``; None if it has not."""
    counted = [(time_of(record), number(record, "search/rebuilds", -1.0), record) for record in records]
    before = next((count for time, count, _ in reversed(counted) if time <= after and count >= 0), 0.0)
    new = [record for time, count, record in counted if time > after and count > before]
    whole = new[1:]  # the record in which the engine was lost may count tokens of the old one
    return next((time_of(record) for record in whole if number(record, "search/tokens", 0.0)), None)


def _pending(run: RunDir, least: int) -> list[tuple[tuple[int, int], Path]]:
    """Return the shards that the newest checkpoint lacks, of the searcher with most of them.

    The list is empty if there are fewer than ``least``.
    """
    folder = latest_checkpoint(run)
    cursors = read_state(folder).cursors if folder else {}
    by_searcher: dict[int, list[tuple[tuple[int, int], Path]]] = {}
    for (searcher, index), path in run.shard_files().items():
        if index >= cursors.get(searcher, 0):
            by_searcher.setdefault(searcher, []).append(((searcher, index), path))
    most = max(by_searcher.values(), key=len, default=[])
    return most if len(most) >= least else []


# --- The tables ---


@dataclass(frozen=True, slots=True)
class Fate:
    """Outcome of a strike.

    seconds: time to the recovery, s; None if the next strike came first. redone: number of optimizer steps
    that were taken again.
    """

    survived: bool
    seconds: float | None
    redone: int


def fault_rows(storm: Storm, found: Audit) -> list[Row]:
    """Return a row per kind of fault, and one for all faults."""
    resumes = list(zip(storm.history.of_trainer(*TAKEOVERS)[1:], found.resumes, strict=True))
    ends = [strike.time for strike in storm.strikes[1:]] + [float("inf")]
    fates: dict[str, list[Fate]] = {}
    for strike, end in zip(storm.strikes, ends, strict=True):
        back = storm.recovered(strike)
        seconds = back - strike.time if back and back <= end else None
        redone = sum(steps for time, steps in resumes if strike.time < time < end)
        for name in (strike.kind, "all"):
            fates.setdefault(name, []).append(Fate(back is not None, seconds, redone))
    return [_row(name, fates[name]) for name in (*KINDS, "all") if name in fates]


def _row(name: str, fates: Sequence[Fate]) -> Row:
    seconds = [fate.seconds for fate in fates if fate.seconds is not None]
    return {
        "fault": name,
        "struck": len(fates),
        "survived": sum(fate.survived for fate in fates),
        "median s": statistics.median(seconds) if seconds else None,
        "most s": max(seconds, default=None),
        "redone": sum(fate.redone for fate in fates),
        "most": max(fate.redone for fate in fates),
    }


def run_row(storm: Storm, found: Audit) -> Row:
    """Return the figures of the whole storm. "lost" leaves out what was in damaged shards."""
    spoiled, events = sum(storm.spoiled.values()), storm.history.events
    ettr = RunData.read(storm.run).ettr
    return {
        "faults": len(storm.strikes),
        "trajectories": found.trajectories,
        "in damaged shards": spoiled,
        "lost": found.lost - spoiled,
        "doubled": found.doubled,
        "problems": len(unexplained(storm, found)),
        "optimizer steps": found.steps,
        "steps redone": found.redone,
        "most at once": max(found.resumes, default=0),
        "resumes from an older checkpoint than the newest whole one": storm.history.resumes_behind(),
        "storm, s": events[-1]["time"] - events[0]["time"],
        "ETTR, %": None if ettr is None else 100 * ettr,
    }


def unexplained(storm: Storm, found: Audit) -> list[str]:
    """Return the audit's problems, without the loss of shards that the storm damaged."""
    known = tuple(f"shard {index} of searcher {searcher} is lost" for searcher, index in storm.spoiled)
    return [problem for problem in found.problems if not problem.startswith(known)]


def main() -> None:
    """Strike a run with the planned faults, and report what became of it."""
    options = _options()
    planned = plan(options.faults, options.seed, options.kinds or possible(options))
    settings = ("run.name=chaos", *(() if options.tabular else SLOW_STEPS))
    with cluster_of(options, disk=DISK) as cluster:
        nodes = ("--nodes", str(options.nodes), "--trainer-nodes", str(options.trainer_nodes))
        run, job = submit(cluster, cluster.share, options, *nodes, partition="low", settings=settings)
        storm = Storm(cluster, run, job, engines=not options.tabular, every=options.every)
        try:
            storm.rage(planned)
        except NotSurvived as error:
            sys.exit(f"chaos: after {len(storm.strikes)} of {len(planned)} faults {error}")
        report(storm, audit(storm.run), as_json=options.json)


def report(storm: Storm, found: Audit, *, as_json: bool) -> None:
    """Print the tables; exit with status 1 if the audit found an unexplained problem."""
    rows, whole = fault_rows(storm, found), run_row(storm, found)
    if as_json:
        print(json.dumps({"faults": rows, "run": whole}, indent=2))
    else:
        print_rows(rows, console=Console(width=max(110, Console().width)))
        print_rows([{"of the run": name, "": value} for name, value in whole.items()])
    if problems := unexplained(storm, found):
        sys.exit("\n".join(problems))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--every", type=float, default=0.0, help="shortest time between two faults, s")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="kinds of faults (default: all possible)")
    parser.add_argument("--nodes", type=int, default=3, choices=(2, 3, 4), help="nodes of the run")
    parser.add_argument("--trainer-nodes", type=int, default=1, help="how many of them train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
