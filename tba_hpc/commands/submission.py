"""A job that a user submits to Slurm, with its run, nodes and site; and its batch script."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tba_hpc.checks.facts import Facts, job_environment, judge
from tba_hpc.checks.lists import CONFIG, FILES
from tba_hpc.checks.resources import is_here, resources
from tba_hpc.config import Config, ConfigError, load_config, shipped
from tba_hpc.launch import snapshot
from tba_hpc.launch.component_nodes import separate_nodes
from tba_hpc.launch.plan import Plan, Site, load_site, plan, refuse_rank_overrides
from tba_hpc.launch.sbatch import batch_script, job_of
from tba_hpc.run import modules, slurm_queue
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.owners import refuse_owned

MOST_SEEDS = 500
"""Largest number of seeds; each run is checked before the first one is submitted."""

HEADER_SIGNAL = 300
"""Seconds of ``--signal`` in slurm/tba_*.sbatch, scripts to edit by hand, whatever the site file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that a user asks for.

    config: a YAML file, the name of a shipped config, or a run directory. site: a file, or the name of a
    shipped one. after: a run whose job must end first. options: further options of sbatch, such as
    ``--time-min=60``. chain: number of jobs, one after another. here: id of the job that runs this
    command, if the nodes are its own. The other fields are options of ``tba submit``.
    """

    config: Path
    site: Path
    nodes: int
    trainer_nodes: int | None = None
    time: str | None = None
    homogeneous: bool = False
    overrides: Sequence[str] = ()
    run_root: Path | None = None
    after: Path | None = None
    options: Sequence[str] = ()
    chain: int = 1
    here: str = ""

    @property
    def fetched_by(self) -> str:
        """Command that downloads what the ranks need."""
        settings = [word for setting in self.overrides for word in ("--set", setting)]
        return shlex.join(["tba", "fetch", str(self.config), "--site", str(self.site), *settings])

    @property
    def beside(self) -> Path:
        """Folder with the user's code that the config names."""
        return modules.folder_of(self.config)

    def load_site(self) -> Site:
        """Load the site file with the changes of this submission. Raises ConfigError."""
        time = {"time": self.time} if self.time else {}
        site = load_site(self.site, **time)
        if self.here:
            site = load_site(self.site, **time, **_given(site))
        options, again = (*site.sbatch_options, *self.options), site.requeue and self.chain == 1
        changes: dict[str, object] = {"sbatch_options": options, "requeue": again}
        if self.here:
            changes["signal_seconds"] = min(site.signal_seconds, HEADER_SIGNAL)
        if self.here and site.gpus_per_node:
            # In a job with whole nodes (--exclusive) a step gets only the GPUs that it asks for.
            changes["srun_arguments"] = (*site.srun_arguments, f"--gres=gpu:{site.gpus_per_node}")
        return site.model_copy(update=changes)

    def resolve(self, site: Site) -> tuple[Config, Plan]:
        """Return the run's config and its plan on ``site``. Raises ConfigError.

        The numbers of ranks follow from the nodes. Paths in the config are absolute, so that they are valid
        on every node.
        """
        refuse_rank_overrides(self.overrides)
        root = [f"run.root={json.dumps(str(self.run_root))}"] if self.run_root else []
        path, overrides = as_it_lies(self.config, [*self.overrides, *root])
        # One trainer fits every config; the real number is not known before the plan.
        first = load_config(path, [*overrides, "launch.trainers=1"])
        split = plan(first, site, self.nodes, self.trainer_nodes, homogeneous=self.homogeneous)
        return load_anchored(path, [*overrides, *split.overrides]), split


def _given(site: Site) -> dict[str, object]:
    """Return site keys that this job's own nodes determine. With ``gpus_per_node: 0`` no rank gets a GPU."""
    gpus, cpus = (os.environ.get(name, "0") for name in ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE"))
    return {
        "gpus_per_node": int(gpus) if site.gpus_per_node else 0,
        "cpus_per_node": int(cpus),
        "hetjob": False,
    }


def as_it_lies(path: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the config file at ``path``, which may be a run directory, and the overrides to load it with.

    For a run directory the file is its frozen config, and a further override sets run.root to the directory's
    parent. Raises ConfigError if the directory does not have the name of its run.
    """
    if not path.is_dir():
        return path, [*overrides]
    run = RunDir.open(path.resolve())  # a link to the run may have any name
    name = run.config().run_dir.name
    if run.path.name != name:
        raise ConfigError(f"{path} holds the run {name}: give the folder that name again to resume it")
    return run.config_file, [*overrides, f"run.root={json.dumps(str(run.path.parent))}"]


def load_anchored(path: Path, overrides: Sequence[str]) -> Config:
    """Load a config and make its relative paths absolute, for use in any folder. Raises ConfigError."""
    config = load_config(path, list(overrides))
    named = resources(config, of_custom_task=False)
    paths = {one.key: one.name for one in named if is_here(one) and Path(one.name).exists()}
    paths["run.root"] = config.run.root
    absolute = (f"{key}={json.dumps(str(Path(name).absolute()))}" for key, name in paths.items())
    return load_config(path, [*overrides, *absolute])


def default(kind: shipped.Kind, name: str) -> Path:
    """Return the shipped file ``name``, for use if the user names no file; print its path on stderr."""
    file = shipped.files(kind)[name]
    print(f"no --{kind.removesuffix('s')} given, so this one: {file}", file=sys.stderr)
    return file


def spread(submission: Submission, configs: Sequence[Path], seeds: str | None) -> list[Submission]:
    """Copy a submission for each config and seed, such as ``0-4`` or ``0,2,7-9``. Raises ConfigError."""
    if seeds is None:
        return [replace(submission, config=config) for config in configs]
    if run := next((config for config in configs if config.is_dir()), None):
        raise ConfigError(f"--seeds makes new runs, but {run} is one already, with its seed: leave one out")
    return [
        replace(submission, config=config, overrides=[*submission.overrides, f"run.seed={seed}"])
        for config in configs
        for seed in parse_seeds(seeds)
    ]


def parse_seeds(text: str) -> list[int]:
    """Parse ``0-4`` or ``0,2,7-9`` to numbers, each once. Raises ConfigError."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    spans = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if len(spans) < len(parts) or not all(spans):
        raise ConfigError(f"--seeds {text} are no seeds: give for example 0-4, or 0,2,7-9")
    if sum(map(len, spans)) > MOST_SEEDS:
        raise ConfigError(f"--seeds {text} are more than {MOST_SEEDS} runs: submit them in parts")
    return list(dict.fromkeys(seed for span in spans for seed in span))


def nodes_of_this_job(*, ready: bool) -> int:
    """Return the number of nodes of this Slurm job. Raises ConfigError outside one, or unless ``ready``."""
    if ready and (nodes := os.environ.get("SLURM_JOB_NUM_NODES")):
        return int(nodes)
    raise ConfigError("--nodes is missing: say how many nodes the job is to have")


def script(submission: Submission, *, make: bool = False) -> str:
    """Return the batch script of a submission. Raises ConfigError.

    make: make the run directory and a copy of the code, so that sbatch can take the script. Without it
    nothing is written.
    """
    site = submission.load_site()
    config, split = submission.resolve(site)
    facts = Facts(
        site=site, config=config, environment=job_environment(site), fetched_by=submission.fetched_by
    )
    for finding in judge((*FILES, *CONFIG), facts):
        print(f"warning: {finding.sentence}", file=sys.stderr)
    try:
        split = separate_nodes(split, site)
    except slurm_queue.SlurmError as error:
        if make:
            print(
                f"{error}; so the script does not say which nodes each component leaves out", file=sys.stderr
            )
    after, code = last_job(submission.after) if submission.after else None, None
    if make:
        refuse_owned(RunDir.check(config))
        run = create_run(config)
        modules.keep(run, config, submission.beside)
        (run.path / "slurm").mkdir(exist_ok=True)
        code = snapshot.take(run.path, submission.here)
        if not submission.here:
            log_event(run, "submitted", job="", restarts=0, command=again(submission, run))
    return script_of(config, split, site, after=after, code=code)


def sbatch_options(words: Sequence[str]) -> list[str]:
    """Turn words ``key=value`` or ``key`` into options of sbatch. Raises ConfigError."""
    options = [f"--{word.removeprefix('--')}" for word in words]
    if bad := next((word for word in options if not re.match(r"--[a-z][a-z-]+(=|$)", word)), None):
        raise ConfigError(
            f"--sbatch {bad[2:]} is no option of sbatch: write for example --sbatch exclude=node7"
        )
    return options


def script_of(
    config: Config,
    split: Plan,
    site: Site,
    *,
    after: str | None,
    chained: bool = False,
    code: Path | None = None,
) -> str:
    """Return the batch script of a run. Raises ConfigError.

    after: id of the job that must end first. chained: whether that job belongs to the same run. code: folder
    with a snapshot of the package; None before there is a run directory. A container brings its own code.
    """
    if not config.one_world:  # Slurm alone numbers the ranks, and nothing loads an MPI library
        site = site.model_copy(update={"mpi": "none"})
    run = config.run_dir.absolute()
    name = f"tba-{config.run.name}"
    job = job_of(name, run, site, code, after=after, chained=chained, mpi=config.one_world)
    return batch_script(job, split, site)


def again(submission: Submission, run: RunDir) -> str:
    """Return a command that resubmits the run from any folder. Overrides are in the frozen config."""
    site = shipped.find(submission.site, "sites").absolute()
    words: list[object] = [*_typed(), "--config", run.path, "--site", site, "--nodes", submission.nodes]
    words += ["--trainer-nodes", submission.trainer_nodes] if submission.trainer_nodes else []
    words += ["--time", submission.time] if submission.time else []
    words += ["--homogeneous"] if submission.homogeneous else []
    words += ["--chain", submission.chain] if submission.chain > 1 else []
    words += [word for option in submission.options for word in ("--sbatch", option.removeprefix("--"))]
    return shlex.join(map(str, words))


def _typed() -> list[object]:
    """Return the beginning of the user's command, ``tba submit`` or tools/submit.py, with absolute paths."""
    program = Path(sys.argv[0]).absolute()
    if program.name == "__main__.py":
        return [sys.executable, "-P", "-m", "tba_hpc", "submit"]
    return [sys.executable, program] if program.suffix else [program, "submit"]


def last_job(path: Path) -> str:
    """Return the id of a run's last job. Raises ConfigError if it has had none."""
    if jobs := slurm_queue.jobs_of(RunDir.open(path)):
        return jobs[-1]
    raise ConfigError(f"--after {path}: that run was never submitted, so there is no job to wait for")
