"""A seeded storm of faults over a run, on a Slurm cluster brought up on this machine; prints what it cost.

    python tools/chaos.py [--faults 100] [--seed 0] [--nodes 3] [--model FOLDER | --tabular] [--json]

The quickstart trains as a heterogeneous job on ``--nodes`` of six nodes. Engines and ranks are killed,
engines hang, nodes crash (and boot again later), the job is preempted and asked to stop, checkpoints, shards
and metrics are damaged, a shard is hidden for a while, the disk is full for a while, a second launcher and a
second searcher try to join: one fault after the other, each when the run has recovered from the last and gone
on for a few optimizer steps, some already while the ranks start. Then the run, shortened to a few more steps,
must come to its end by itself, and ``tba audit`` must find every trajectory once, but those of damaged
shards, which it must name. Where it does not, the exit status is 1 and the ends of the logs are shown.
``--tabular``: the model is the enumerable one of ``lab.tabular``: it has no engines to be killed, and its
ranks start in no time.

A tool of a source checkout: cluster and faults are ``slurm_testbed``'s. Needs root and Slurm's daemons.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml
from rich.console import Console
from slurm_testbed import faults
from slurm_testbed.cluster import ENDED, Cluster, missing
from slurm_testbed.faults import RankProcess

from tba_hpc.core.types import Role
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.audit import Audit, audit
from tba_hpc.report.summary import index_of, searcher_files
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.checkpoints import checkpoint_folders, latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.metrics import MetricsTail, Record, number

HOME = Path(__file__).resolve().parents[1]
MODEL = HOME / ".cache/tiny-model-seed0"

SITE = {
    "partition": "low",
    "gpus_per_node": 1,
    "cpus_per_node": 2,
    "memory": "3000",
    "time": "24:00:00",
    "signal_seconds": 60,
    "relaunches": 10,  # so many deaths may follow each other before anything is sealed
}

CHECKPOINT_EVERY = 5
"""Optimizer steps between checkpoints: what a fault may cost, and those taken while one is being written."""

SETTINGS = (
    "run.name=chaos",
    f"checkpoint.every={CHECKPOINT_EVERY}",
    "buffer.initial_completions=64",
    "train.prompts_per_step=32",  # slow steps: few of them are needed
    "evaluate.validation_prompts=0",
    "evaluate.test_prompts=64",
    "launch.timeout_seconds=80",  # an engine that is silent for 40 s is replaced
)

TABULAR = (
    *(setting for setting in SETTINGS if setting.startswith(("run.", "checkpoint."))),
    "model.path=lab.tabular:Slow",
    "evaluate.validation_prompts=0",
    "launch.timeout_seconds=60",
)
"""Of a run of the enumerable model, on top of ``tools/lab/tabular.yaml``."""

STEPS_BETWEEN = 4
"""Optimizer steps, at most, from a recovery to the next fault."""

STEPS_AFTER = 3
"""Optimizer steps from the last recovery to the end."""

STEPS_STRUCK = 4
"""Optimizer steps until a fault has struck and the recovery from it was seen, those redone left out."""

STEPS_WITHOUT = 3
"""Optimizer steps without an engine, which is built again; then the trainer is held until it is back."""

SPARE_STEPS = 64
"""Optimizer steps beyond those: on a fast machine some pass between two looks at the run. What is not needed
is taken off in the end."""

START_UP_SHARE = 0.2
"""Of the faults that could strike while the ranks start, because the one before has ended them."""

START_UP_SECONDS = 15.0
"""About how long ranks take from their start to the first step."""

FULL_SECONDS, HIDDEN_SECONDS = 10.0, 25.0
"""How long the disk is full; how long a shard is hidden, which is until the next attempt looks for it."""

DISK = "512m"
"""Size of the disk of the run, which is memory: one that can be filled."""

DEADLINE = 300
"""Seconds after which something that should happen counts as not happening."""

LOOK_SECONDS = 0.5
"""Pause between two looks at the run."""

Row = dict[str, Cell]

Blow = Callable[["Storm", Sequence[RankProcess], float], RankProcess | None]
"""Strikes, with the ranks alive and a number in [0, 1) to choose among them; returns the one it hit."""


class NotSurvived(Exception):
    """The run did not get over a fault; the message says which, and ends with the logs."""


# --- Faults ---


Cost = Literal["ranks", "engine", "nothing"]
"""What a fault costs at least: all ranks start again, an engine is built again, or the run just goes on."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. weight: how often it comes. needs: optimizer steps that it may have to wait for."""

    blow: Blow
    weight: int
    cost: Cost = "ranks"
    needs: int = 0

    @property
    def ends_ranks(self) -> bool:
        """Whether all ranks must start again."""
        return self.cost == "ranks"


def _hit(role: Role, fault: Callable[[Storm, RankProcess], None]) -> Blow:
    """A fault of one rank of a role, or of its engine, or its node."""

    def blow(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
        among = [rank for rank in ranks if rank.role == role]
        rank = among[int(choice * len(among))]
        fault(storm, rank)
        return rank

    return blow


def _preempt(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    faults.preempt(storm.cluster, seconds=DEADLINE)


def _ask_to_stop(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    faults.ask_to_stop(storm.cluster, storm.job)


def _damage_checkpoint(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """A bit of the newest one flips, and the leader dies: the one before must do."""
    storm.wait_for(lambda: len(checkpoint_folders(storm.run, complete=True)) > 1, "two checkpoints")
    with faults.held_leader(storm.cluster, storm.run):
        newest = checkpoint_folders(storm.run, complete=True)[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        faults.flip_bit(files[int(choice * len(files))], choice)
        return storm.kill_leader()


def _damage_shard(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """A bit flips of one that no checkpoint holds yet, and the leader dies: what was in it is lost."""
    with storm.pending(1) as shards:
        (searcher, index), path = shards[int(choice * len(shards))]
        storm.spoiled[searcher, index] = len(read_shard(path).trajectories)
        faults.flip_bit(path, choice)
        return storm.kill_leader()


def _hide_shard(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """One that others follow is not to be seen when the next attempt looks for it, but a little later."""
    with storm.pending(2) as shards:
        _, path = shards[0]
        hidden = path.rename(storm.run.path / path.name)
        threading.Timer(HIDDEN_SECONDS, lambda: hidden.rename(path)).start()
        return storm.kill_leader()


def _tear_metrics(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> RankProcess:
    """The leader dies in the middle of a line of its records."""
    leader = storm.kill_leader()
    faults.tear_line(storm.run.metrics_file("trainer"))
    return leader


def _fill_disk(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    faults.fill_disk(storm.run.path.parent, FULL_SECONDS)


def _launch_again(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    said = faults.refused(storm.cluster, "run", str(storm.run.path))
    assert f"job {storm.job}" in said, f"the refusal does not name the job at work: {said}"


def _search_again(storm: Storm, ranks: Sequence[RankProcess], choice: float) -> None:
    faults.refused(storm.cluster, "search", str(storm.run.path), "--index", "0")


KINDS = {
    "engine killed": Kind(_hit("searcher", lambda _, rank: faults.kill_engine(rank)), 20, "engine"),
    "engine hung": Kind(_hit("searcher", lambda _, rank: faults.stop_engine(rank)), 15, "engine"),
    "searcher killed": Kind(_hit("searcher", lambda _, rank: faults.kill_rank(rank)), 20),
    "trainer killed": Kind(_hit("trainer", lambda _, rank: faults.kill_rank(rank)), 15),
    "node crashed": Kind(_hit("searcher", lambda storm, rank: storm.crash(rank.node)), 7),
    "leader crashed": Kind(_hit("trainer", lambda storm, rank: storm.crash(rank.node)), 7),
    "preempted": Kind(_preempt, 8),
    "stopped": Kind(_ask_to_stop, 8),
    "checkpoint damaged": Kind(_damage_checkpoint, 10, needs=2 * CHECKPOINT_EVERY),
    "shard damaged": Kind(_damage_shard, 5, needs=CHECKPOINT_EVERY),
    "shard hidden": Kind(_hide_shard, 5, needs=CHECKPOINT_EVERY),
    "metrics torn": Kind(_tear_metrics, 5),
    "disk full": Kind(_fill_disk, 5, "nothing", needs=STEPS_BETWEEN),
    "second launcher": Kind(_launch_again, 5, "nothing", needs=STEPS_BETWEEN),
    "second searcher": Kind(_search_again, 5, "nothing", needs=STEPS_BETWEEN),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come. start_up: whether while ranks start; pause, choice: how late, and where, in [0, 1)."""

    kind: str
    start_up: bool
    pause: float
    choice: float

    @property
    def steps_before(self) -> int:
        """Optimizer steps from the recovery to it."""
        return int(self.pause * STEPS_BETWEEN)

    @property
    def steps(self) -> int:
        """Those from one recovery to the next; ranks that start take none."""
        kind = KINDS[self.kind]
        without = STEPS_WITHOUT if kind.cost == "engine" else 0
        return 0 if self.start_up else self.steps_before + STEPS_STRUCK + without + kind.needs


def plan(count: int, seed: int, *, engines: bool = True) -> list[Fault]:
    """``count`` faults, the same for the same seed; every kind is among them where there is room.

    engines: whether there are any that faults may strike.
    """
    random = Random(seed)
    among = [name for name, kind in KINDS.items() if engines or kind.cost != "engine"]
    weights = [KINDS[name].weight for name in among]
    kinds = [*among, *random.choices(among, weights, k=max(0, count - len(among)))][:count]
    random.shuffle(kinds)
    planned: list[Fault] = []
    for kind in kinds:
        before = planned[-1] if planned else None
        possible = before and not before.start_up and KINDS[before.kind].ends_ranks
        possible = possible and KINDS[kind].ends_ranks and not KINDS[kind].needs
        start_up = bool(possible) and random.random() < START_UP_SHARE
        planned.append(Fault(kind, start_up, random.random(), random.random()))
    return planned


def steps_for(planned: Sequence[Fault]) -> int:
    """Optimizer steps that hold them all."""
    return SPARE_STEPS + sum(fault.steps for fault in planned)


# --- What became of them ---


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that has struck.

    start_up: the run had not yet recovered from the one before. victim: a rank, None where the whole job was
    hit.
    """

    kind: str
    time: float
    start_up: bool
    victim: RankProcess | None

    def __str__(self) -> str:
        rank = self.victim
        place = f", {rank.role} {rank.index} on {rank.node}" if rank else ""
        return f"{self.kind}{place}{', in start-up' if self.start_up else ''}"


TAKEOVERS = ("started", "resumed")
"""Events of a trainer that takes over: from nothing, or from a checkpoint."""

NOTHING_YET = Strike("stopped", 0.0, start_up=True, victim=None)
"""Before the first fault the run recovers from this one: it has to start."""


@dataclass
class History:
    """Events and metrics of a run, read as they come."""

    run: RunDir
    events: list[dict[str, Any]] = field(default_factory=list)
    trainer: list[Record] = field(default_factory=list)
    searchers: dict[int, list[Record]] = field(default_factory=dict)
    _tails: dict[Path, MetricsTail] = field(default_factory=dict)

    def update(self) -> None:
        """Read what is new."""
        self.events = read_events(self.run)
        self.trainer += self._new(self.run.metrics_file("trainer"))
        for path in searcher_files(self.run):
            self.searchers.setdefault(index_of(path), []).extend(self._new(path))

    def _new(self, path: Path) -> list[Record]:
        return self._tails.setdefault(path, MetricsTail(path)).new()

    @property
    def step(self) -> int:
        """The newest optimizer step."""
        return int(number(self.trainer[-1], "step", 0)) if self.trainer else 0

    def times(self, event: str, *, after: float = 0.0) -> list[float]:
        """When events of that name happened, later than ``after``."""
        return [e["time"] for e in self.events if e["event"] == event and e["time"] > after]

    def stopped(self, *, after: float) -> bool:
        """Whether a trainer has stopped, as asked to, later than ``after``."""
        return any(r.get("event") == "stopped" and _time(r) > after for r in self.trainer)

    def resumes(self, *, after: float = 0.0) -> list[float]:
        """When a trainer took over."""
        return [_time(r) for r in self.trainer if r.get("event") in TAKEOVERS and _time(r) > after]

    def resumes_behind(self) -> int:
        """How often a trainer took over from an older checkpoint than the newest whole one."""
        whole, behind = {0}, 0
        for record in self.trainer:
            event, step = record.get("event"), int(number(record, "step", 0))
            if event == "checkpoint":
                whole.add(step)
            elif event == "damaged":
                whole.discard(step)
            elif event in TAKEOVERS:
                behind += step < max(whole)
        return behind

    def first_step(self, *, after: float) -> float | None:
        """When a trainer that took over later than ``after`` had taken its first step."""
        resumes = self.resumes(after=after)
        steps = (_time(record) for record in self.trainer if "event" not in record)
        return next((time for time in steps if resumes and time > resumes[0]), None)

    def back(self, strike: Strike) -> float | None:
        """When the run had recovered: the ranks, started again, took a step, or the new engine generates.

        Or, after a fault that costs nothing, the next step was taken.
        """
        times = [self.first_step(after=start) for start in self.times("start", after=strike.time)[:1]]
        if KINDS[strike.kind].cost == "engine" and strike.victim:
            times.append(_generated_anew(self.searchers[strike.victim.index], strike.time))
        elif KINDS[strike.kind].cost == "nothing":
            times.append(self._next_step(after=strike.time))
        return min((time for time in times if time), default=None)

    def _next_step(self, *, after: float) -> float | None:
        steps = (_time(record) for record in self.trainer if "event" not in record)
        return next((time for time in steps if time > after), None)

    def way(self, strike: Strike, back: float) -> str:
        """How the run recovered: unharmed, rebuilt, relaunched (in the same allocation), or requeued."""
        ways = {"requeued": "allocated", "relaunched": "start"}
        marks = {way: self.times(event, after=strike.time)[:1] for way, event in ways.items()}
        in_place = "rebuilt" if KINDS[strike.kind].cost == "engine" else "unharmed"
        return next((way for way, times in marks.items() if times and times[0] < back), in_place)


def _time(record: Record) -> float:
    return number(record, "time", 0.0)


def _generated_anew(records: Sequence[Record], after: float) -> float | None:
    """When a searcher first sampled tokens with an engine that it had to build later than ``after``."""
    counted = [(_time(record), number(record, "search/rebuilds", -1.0), record) for record in records]
    before = next((count for time, count, _ in reversed(counted) if time <= after and count >= 0), 0.0)
    new = [record for time, count, record in counted if time > after and count > before]
    whole = new[1:]  # the second in which the engine was lost may hold tokens of the old one
    return next((_time(record) for record in whole if number(record, "search/tokens", 0.0)), None)


# --- The storm ---


@dataclass
class Storm:
    """A submitted run, and what has struck it so far. spoiled: trajectories in each damaged shard."""

    cluster: Cluster
    run: RunDir
    job: int
    engines: bool
    strikes: list[Strike] = field(default_factory=list)
    spoiled: dict[tuple[int, int], int] = field(default_factory=dict)
    _down: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.run)
        launch = self.run.config().launch
        self._size = launch.trainers + launch.searchers

    def rage(self, planned: Sequence[Fault]) -> None:
        """Strike with one fault after the other, then wait for the end of the run. Raises NotSurvived."""
        for fault in planned:
            if fault.start_up:
                self._await_start_up(fault)
            else:
                self._await_steps(fault)
            self._strike(fault)
            print(f"step {self.history.step}, fault {len(self.strikes)}: {self.strikes[-1]}", file=sys.stderr)
        self._await_recovery()
        self._shorten()
        while not self.run.finished:
            self._await_step(self.history.step + 1)
        self.cluster.until(
            lambda: self._leader in ENDED, "the job to end", DEADLINE, seen=lambda: self._leader
        )

    def _shorten(self) -> None:
        """Have the run end soon: it stops as asked to, and when it comes back its config has fewer steps."""
        asked = time.time()
        faults.ask_to_stop(self.cluster, self.job)
        self.wait_for(lambda: self.history.stopped(after=asked), "the run to stop, to be shortened")
        self.run.adapt([f"train.steps={self.history.step + STEPS_AFTER}"])

    @property
    def _leader(self) -> str:
        """State of the first component, whose end is that of the run: others may have failed with a node."""
        return self.cluster.state(self.job).split("+")[0]

    def crash(self, node: str) -> None:
        """Crash a node; it boots again once the run has recovered."""
        faults.crash_node(self.cluster, node)
        self._down.append(node)

    def kill_leader(self) -> RankProcess:
        """Kill the leading trainer, also while it stands still."""
        leader = self._ranks[0]
        faults.kill_rank(leader)
        return leader

    @contextmanager
    def pending(self, least: int) -> Iterator[list[tuple[tuple[int, int], Path]]]:
        """Shards of one searcher that no checkpoint holds, ``least`` or more; the leader stands still then.

        By (searcher, index), in order.
        """
        while True:
            self.wait_for(lambda: _pending(self.run, least), f"{least} shards that no checkpoint holds")
            with faults.held_leader(self.cluster, self.run):
                if found := _pending(self.run, least):  # else a checkpoint came in between
                    yield found
                    return

    def _await_steps(self, fault: Fault) -> None:
        """Until the run has recovered and gone on for a while."""
        self._await_recovery()
        wanted = self.history.step + fault.steps_before
        self.wait_for(
            lambda: self.history.step >= wanted and self._complete, f"step {wanted} and all engines"
        )

    def _await_step(self, step: int) -> None:
        self.wait_for(lambda: self.run.finished or self.history.step >= step, f"step {step}")

    def _await_recovery(self) -> None:
        """Until the last fault is history; then nodes that crashed are booted."""
        last = self.strikes[-1] if self.strikes else NOTHING_YET
        if KINDS[last.kind].cost == "engine":
            self._await_engine(last)
        self.wait_for(lambda: self.history.back(last), f"recovery from {last}")
        while self._down:
            self.cluster.start(self._down.pop())

    def _await_engine(self, last: Strike) -> None:
        """Until a rank has built its engine again; the trainer goes on, but not through the whole run."""
        enough = self.history.step + STEPS_WITHOUT
        self.wait_for(
            lambda: self.history.step >= enough or self.history.back(last), f"step {enough} without an engine"
        )
        with faults.held_leader(self.cluster, self.run):
            self.wait_for(lambda: self.history.back(last), f"recovery from {last}")

    def _await_start_up(self, fault: Fault) -> None:
        """Until the ranks have started after the last fault, and for some part of their start-up."""
        since = self.strikes[-1].time
        self.wait_for(lambda: self.history.times("start", after=since) and self._all_there, "all ranks")
        time.sleep(fault.pause * START_UP_SECONDS)
        self.wait_for(lambda: self._all_there, "all ranks")

    def _strike(self, fault: Fault) -> None:
        last = self.strikes[-1:]
        start_up = any(self.history.back(strike) is None for strike in last)
        kind, began = KINDS[fault.kind], time.time()
        victim = kind.blow(self, self._ranks, fault.choice)
        struck = time.time() if kind.needs else began  # it may have waited
        self.strikes.append(Strike(fault.kind, struck, start_up, victim))

    @property
    def _ranks(self) -> list[RankProcess]:
        return faults.ranks(self.cluster, self.run)

    @property
    def _all_there(self) -> bool:
        return len(self._ranks) == self._size

    @property
    def _complete(self) -> bool:
        ranks = self._ranks
        built = all(rank.engine for rank in ranks if rank.role == "searcher") if self.engines else True
        return len(ranks) == self._size and built

    def wait_for(self, probe: Callable[[], object], what: str) -> None:
        """Wait for a true value. Raises NotSurvived after DEADLINE, or when the run is over first."""
        end = time.monotonic() + DEADLINE
        while True:
            self.history.update()
            if probe():
                return
            if self.run.finished:
                raise NotSurvived(f"the run was over before {what}: it had too few steps for all faults")
            state = self.cluster.state(self.job)
            if time.monotonic() > end or state in ENDED:
                raise NotSurvived(f"the job is {state}, waiting for {what} ({DEADLINE} s)\n{self._logs()}")
            time.sleep(LOOK_SECONDS)

    def _logs(self) -> str:
        files = [*self.run.path.glob("slurm/job-*.log"), *self.run.attempt.glob("*")]
        texts = ((file, file.read_text(errors="replace")[-3000:]) for file in sorted(files) if file.is_file())
        return "\n".join(f"--- {file}\n{text}" for file, text in texts)


def _pending(run: RunDir, least: int) -> list[tuple[tuple[int, int], Path]]:
    """The shards, by (searcher, index), that the newest checkpoint lacks, of the searcher with most of them.

    None where there are fewer than ``least``.
    """
    folder = latest_checkpoint(run)
    cursors = read_state(folder).cursors if folder else {}
    by_searcher: dict[int, list[tuple[tuple[int, int], Path]]] = {}
    for (searcher, index), path in run.shard_files().items():
        if index >= cursors.get(searcher, 0):
            by_searcher.setdefault(searcher, []).append(((searcher, index), path))
    most = max(by_searcher.values(), key=len, default=[])
    return most if len(most) >= least else []


@contextmanager
def disk(size: str) -> Iterator[Path]:
    """A folder on a file system of its own, in memory."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def config_of(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """The config of the run, and what is set besides; ``prepare`` has been called."""
    if options.tabular:
        return HOME / "tools/lab/tabular.yaml", [*TABULAR]
    return HOME / "configs/quickstart.yaml", [*SETTINGS, f"model.path={options.model or MODEL}"]


def prepare(options: argparse.Namespace) -> None:
    """Have the ranks find the enumerable model, before the cluster inherits this environment."""
    if options.tabular:
        os.environ["PYTHONPATH"] = f"{HOME / 'tools'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")


def submit(cluster: Cluster, root: Path, options: argparse.Namespace, steps: int) -> Storm:
    """Submit the run as a user would."""
    (root / "site.yaml").write_text(yaml.safe_dump(SITE))
    config, settings = config_of(options)
    said = cluster.run(
        *(sys.executable, HOME / "tools" / "submit.py", "--config", config),
        *("--nodes", str(options.nodes), "--site", root / "site.yaml", "--run-root", root, "--json"),
        *(word for setting in [*settings, f"train.steps={steps}"] for word in ("--set", setting)),
    )
    job = json.loads(said)
    return Storm(cluster, RunDir.open(Path(job["run"])), int(job["job"]), engines=not options.tabular)


# --- The tables ---


def fault_rows(history: History, strikes: Sequence[Strike], redone: Mapping[float, int]) -> list[Row]:
    """A row per kind, and one of all. redone: optimizer steps taken again, by the time of the resume."""
    ends = [strike.time for strike in strikes[1:]] + [float("inf")]
    fates = [_fate(history, strike, end, redone) for strike, end in zip(strikes, ends, strict=True)]
    groups = {kind: [fate for fate in fates if fate.strike.kind == kind] for kind in KINDS}
    return [_row(name, group) for name, group in {**groups, "all": fates}.items() if group]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a strike.

    way, seconds: how and how soon the run recovered, None where it did not before the next strike.
    redone: optimizer steps taken again.
    """

    strike: Strike
    survived: bool
    way: str | None
    seconds: float | None
    redone: int


def _fate(history: History, strike: Strike, end: float, redone: Mapping[float, int]) -> Fate:
    back = history.back(strike)
    steps = sum(count for time, count in redone.items() if strike.time < time < end)
    if back is None or back > end:
        return Fate(strike, back is not None, None, None, steps)
    return Fate(strike, True, history.way(strike, back), back - strike.time, steps)


def _row(name: str, fates: Sequence[Fate]) -> Row:
    seconds = [fate.seconds for fate in fates if fate.seconds is not None]
    ways = [fate.way for fate in fates]
    return {
        "fault": name,
        "struck": len(fates),
        "survived": sum(fate.survived for fate in fates),
        "in start-up": sum(fate.strike.start_up for fate in fates),
        **{way: ways.count(way) for way in ("unharmed", "rebuilt", "relaunched", "requeued")},
        "median s": _median(seconds),
        "most s": max(seconds, default=None),
        "redone": sum(fate.redone for fate in fates),
        "most": max(fate.redone for fate in fates),
    }


def run_row(storm: Storm, found: Audit) -> Row:
    """What the whole storm came to. lost: beside what was in damaged shards."""
    history, strikes = storm.history, storm.strikes
    relaunch, requeue = (_spans(history, strikes, event) for event in ("failed", "requeue"))
    return {
        "faults": len(strikes),
        "trajectories": found.trajectories,
        "in damaged shards": sum(storm.spoiled.values()),
        "lost": found.lost - sum(storm.spoiled.values()),
        "doubled": found.doubled,
        "problems": len(unexplained(storm, found)),
        "optimizer steps": found.steps,
        "steps redone": found.steps_redone,
        "most at once": max(found.redone, default=0),
        "resumes from an older checkpoint than the newest whole one": history.resumes_behind(),
        "steps between checkpoints": CHECKPOINT_EVERY,
        "relaunch to first step, s": _median(relaunch),
        "relaunch to first step, at most, s": max(relaunch, default=None),
        "requeue to first step, s": _median(requeue),
        "requeue to first step, at most, s": max(requeue, default=None),
        "storm, s": history.events[-1]["time"] - history.events[0]["time"],
    }


def _spans(history: History, strikes: Sequence[Strike], event: str) -> list[float]:
    """Seconds from an event to the next first step, where no fault struck and no job began in between."""
    breaks = [strike.time for strike in strikes]
    breaks += history.times("allocated") if event == "failed" else []
    spans = [(time, history.first_step(after=time)) for time in history.times(event)]
    return [end - start for start, end in spans if end and not any(start < time < end for time in breaks)]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> None:
    """Brew a storm, and say what became of the run."""
    options = _options()
    if reason := missing():
        sys.exit(f"chaos: no Slurm cluster can be brought up here: {reason}")
    prepare(options)
    planned = plan(options.faults, options.seed, engines=not options.tabular)
    with disk(DISK) as scratch, Cluster() as cluster:
        storm = submit(cluster, scratch, options, steps_for(planned))
        try:
            storm.rage(planned)
        except NotSurvived as error:
            sys.exit(f"chaos: after {len(storm.strikes)} of {len(planned)} faults {error}")
        report(storm, audit(storm.run), as_json=options.json)


def report(storm: Storm, found: Audit, *, as_json: bool) -> None:
    """Print what happened; exit with status 1 where the audit found a problem."""
    resumes = storm.history.resumes()[1:]
    rows = fault_rows(storm.history, storm.strikes, dict(zip(resumes, found.redone, strict=True)))
    whole = run_row(storm, found)
    if as_json:
        print(json.dumps({"faults": rows, "run": whole}, indent=2))
    else:
        wide = Console(width=max(110, Console().width))
        print_rows(rows, console=wide)
        print_rows([{"of the run": name, "": value} for name, value in whole.items()])
    if problems := unexplained(storm, found):
        sys.exit("\n".join(problems))


def unexplained(storm: Storm, found: Audit) -> list[str]:
    """What the audit complains of, but for the loss of the shards that were damaged."""
    known = tuple(f"shard {index} of searcher {searcher} is lost" for searcher, index in storm.spoiled)
    return [problem for problem in found.problems if not problem.startswith(known)]


def model_folder(text: str) -> Path:
    """The absolute path of a folder that holds a model; argparse tells where it does not."""
    folder = Path(text).absolute()
    if not (folder / "config.json").exists():
        raise argparse.ArgumentTypeError(
            f"{folder} holds no model: make one with 'python tools/make_tiny_model.py --out {folder}'"
        )
    return folder


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=model_folder, help=f"a tiny model; default: {MODEL.name}")
    model.add_argument("--tabular", action="store_true", help="train the enumerable model instead")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the moments and the victims")
    parser.add_argument("--nodes", type=int, default=3, choices=(2, 3, 4), help="nodes of the run, of six")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
