"""A run on the cluster: submitted as a user would, followed by its records, and brought to its end."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slurm_testbed import faults, hosts
from slurm_testbed.cluster import ENDED, Cluster, missing, over
from slurm_testbed.hosts import Hosts
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.metrics import MetricsTail, Record, number

HOME = Path(__file__).resolve().parents[2]
MODEL = HOME / ".cache/tiny-model-seed0"

SITE = {
    "gpus_per_node": 1,
    "cpus_per_node": 2,
    "memory": "3000",
    "time": "24:00:00",
    "signal_seconds": 60,
    "relaunches": 10,  # restarts in a row without a sealed shard in between
}

COMMON = (
    "train.steps=1000000",  # the trial lowers it in the end
    "train.learning_rate={schedule: constant, peak: 1.0e-5}",
    "checkpoint.every=5",
    "evaluate.validation_prompts=0",
)
QUICKSTART = (
    *(
        "exchange.max_staleness=null",
        "buffer.initial_completions=64",
    ),  # as when docs/reliability.md was measured
    *("evaluate.test_prompts=64", "launch.timeout_seconds=80"),
)
TABULAR = ("model.path=lab.tabular:Slow", "launch.timeout_seconds=60")
"""Overrides of runs of either model."""

STEPS_AFTER = 3
"""Number of optimizer steps that the run still takes after it is told to end."""

DEADLINE = 300
"""Longest wait for anything that should happen, s."""

RUN_CHECK_SECONDS = 0.5

TAKEOVERS = ("started", "resumed")
"""Events with which a trainer begins: a new run, or a resume."""


class NotSurvived(Exception):
    """Raised if the run failed. The message says what was waited for, and ends with the logs."""


@dataclass
class History:
    """Events and metrics of a run, read as they are written."""

    run: RunDir
    events: list[dict[str, Any]] = field(default_factory=list)
    trainer: list[Record] = field(default_factory=list)
    searchers: dict[int, list[Record]] = field(default_factory=dict)
    _tails: dict[Path, MetricsTail] = field(default_factory=dict)

    def update(self) -> None:
        """Read what has been written since the last call."""
        self.events = read_events(self.run)
        self.trainer += self._new(self.run.metrics_file("trainer"))
        for index, path in self.run.searcher_files().items():
            self.searchers.setdefault(index, []).extend(self._new(path))

    def _new(self, path: Path) -> list[Record]:
        return self._tails.setdefault(path, MetricsTail(path)).new()

    @property
    def step(self) -> int:
        """Number of the newest optimizer step."""
        return int(number(self.trainer[-1], "step", 0)) if self.trainer else 0

    def times(self, event: str, *, after: float = 0.0) -> list[float]:
        """Return the Unix times of the events of a name later than ``after``."""
        return [e["time"] for e in self.events if e["event"] == event and e["time"] > after]

    def of_trainer(self, *events: str, after: float = 0.0) -> list[float]:
        """Return when the trainer recorded one of these events, or when it took steps if none is given."""
        wanted = events or (None,)
        return [time_of(r) for r in self.trainer if r.get("event") in wanted and time_of(r) > after]

    def first_step(self, *, after: float) -> float | None:
        """Return when the first trainer that began later than ``after`` took a step; None if it has not."""
        resumes = self.of_trainer(*TAKEOVERS, after=after)
        return next(iter(self.of_trainer(after=resumes[0])), None) if resumes else None

    def resumes_behind(self) -> int:
        """Return how often a trainer resumed from an older checkpoint than the newest undamaged one."""
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


def time_of(record: Record) -> float:
    """Return the Unix time of a record."""
    return number(record, "time", 0.0)


@dataclass
class Trial:
    """A submitted run. job: its job id."""

    cluster: Cluster
    run: RunDir
    job: int

    def __post_init__(self) -> None:
        self.history = History(self.run)

    def wait_for(self, probe: Callable[[], object], what: str) -> None:
        """Wait until ``probe`` is true. Raises NotSurvived after DEADLINE, or if run or job ends first."""
        began = time.monotonic()
        while True:
            self.history.update()
            if probe():
                return
            if self.run.finished:
                raise NotSurvived(f"the run was over before {what}")
            state, waited = self.cluster.state(self.job), time.monotonic() - began
            if waited > DEADLINE or over(state):
                raise NotSurvived(f"the job is {state}, waiting for {what} ({waited:.0f} s)\n{self._logs()}")
            time.sleep(RUN_CHECK_SECONDS)

    def _logs(self) -> str:
        files = [*self.run.path.glob("slurm/job-*.log"), *self.run.attempt.glob("*")]
        texts = ((file, file.read_text(errors="replace")[-3000:]) for file in sorted(files) if file.is_file())
        return "\n".join(f"--- {file}\n{text}" for file, text in texts)

    def end(self, *jobs: int) -> None:
        """Stop the run, let it resume and end a few steps later; wait for the end of it and of ``jobs``."""
        began = time.time()

        def stopped() -> bool:
            return bool(self.history.of_trainer("stopped", after=began))

        while not stopped():  # ranks that are starting end at once, and the job starts them again
            asked = time.time()
            faults.ask_to_stop(self.cluster, self.job)
            self.wait_for(lambda: stopped() or self.history.first_step(after=asked), "the run to stop")  # noqa: B023
        self.run.adapt([f"train.steps={self.history.step + STEPS_AFTER}"])
        self.cluster.own(self.run.path)
        self.wait_for(lambda: self.run.finished, "the end of the run")
        for job in (self.job, *jobs):
            # The run ends with the first component; others may have failed with a node.
            self.cluster.until(
                lambda: self.cluster.state(job).split("+")[0] in ENDED,  # noqa: B023
                f"job {job} to end",
                DEADLINE,
            )


def submit(
    cluster: Cluster,
    root: Path,
    options: argparse.Namespace,
    *words: str,
    partition: str,
    settings: Sequence[str],
) -> tuple[RunDir, int]:
    """Submit a run of the model that the options name; return the run and its job id."""
    if options.tabular:
        config, of_model = HOME / "tools/tabular.yaml", [*TABULAR]
    else:
        config, model = HOME / "configs/quickstart.yaml", root / "model"
        for file in shutil.copytree(options.model or MODEL, model).iterdir():
            file.chmod(0o644)  # jobs may belong to another user
        model.chmod(0o755)
        of_model = [*QUICKSTART, f"model.path={model}"]
    pairs = [*COMMON, *of_model, *settings, f"run.root={root}", *options.set]
    sets = [word for pair in pairs for word in ("--set", pair)]
    job = _submitted(cluster, root, partition, "--config", str(config), *words, *sets)
    return RunDir.open(Path(job["run"])), int(job["job"])


def submit_elastic(cluster: Cluster, root: Path, run: RunDir, nodes: int, partition: str) -> int:
    """Submit an array of ``nodes`` elastic searchers of a run; return its job id."""
    words = ("--elastic", str(run.path), "--nodes", str(nodes))
    return int(_submitted(cluster, root, partition, *words)["job"])


def _submitted(cluster: Cluster, root: Path, partition: str, *words: str) -> dict[str, Any]:
    site = root / f"{partition}.yaml"
    site.write_text(yaml.safe_dump({**SITE, "partition": partition}))
    site.chmod(0o644)  # its umask hides files from other users
    program = (sys.executable, str(HOME / "tools/submit.py"))
    return json.loads(cluster.run(*program, *words, "--site", str(site), "--json", user=True))


def cluster_of(options: argparse.Namespace, **settings: Any) -> Cluster:
    """Return the cluster that the options name, not yet started. Exits if it cannot be started here."""
    kind, reason = (Hosts, hosts.missing()) if options.hosts else (Cluster, missing())
    if reason:
        sys.exit(f"no Slurm cluster can be brought up here: {reason}")
    return kind(**settings)


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every trial."""
    parser = argparse.ArgumentParser(description=description)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=_model_folder, help=f"a tiny model; default: {MODEL.name}")
    model.add_argument("--tabular", action="store_true", help="train the enumerable model instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and victims")
    parser.add_argument("--hosts", action="store_true", help="nodes share only a network and a folder")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _model_folder(text: str) -> Path:
    folder = Path(text).absolute()
    if not (folder / "config.json").exists():
        raise argparse.ArgumentTypeError(
            f"{folder} holds no model: make one with 'python tools/make_tiny_model.py --out {folder}'"
        )
    return folder
