"""A request to ``tba submit``, and the batch script that follows from it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tba_hpc.checks.facts import Facts, job_environment, refuse, run_checks
from tba_hpc.checks.folders import check_file_system
from tba_hpc.checks.lists import CONFIG, FILES
from tba_hpc.checks.resources import is_path, resources
from tba_hpc.config import Config, ConfigError, load_config, shipped
from tba_hpc.launch import snapshot
from tba_hpc.launch.component_nodes import separate_nodes
from tba_hpc.launch.plan import (
    WALL_TIME,
    WALL_TIMES,
    Plan,
    Site,
    load_site,
    plan,
    refuse_rank_overrides,
    requested,
)
from tba_hpc.launch.sbatch import batch_script, job_of
from tba_hpc.run import modules, slurm_queue
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.changes import refuse_replay, refuse_steps_behind
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.owners import refuse_owned

MOST_SEEDS = 500
"""Largest number of seeds of one command, which checks all runs before it submits the first."""

HEADER_SIGNAL = 300
"""Seconds in the option ``--signal`` of slurm/tba_*.sbatch, which no site file changes: users edit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Request to submit a run as a Slurm job, with the options of ``tba submit``.

    config: a YAML file, the name of a shipped config, or a run directory. site: a site file, or the name of a
    shipped one. nodes: number of nodes of the job. trainer_nodes: number of nodes that train. time: wall
    time, as for sbatch. homogeneous: whether both roles share one allocation instead of a het job. overrides:
    settings ``key=value`` of the config. run_root: parent of the run directory. after: a run whose job must
    end first. options: further options of sbatch, such as ``--time-min=60``. chain: number of jobs, one after
    another. here: id of the Slurm job that runs this command, if the script is for the nodes of that job;
    else "".
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
        """The ``tba fetch`` command that downloads what the ranks need, for messages."""
        settings = [word for setting in self.overrides for word in ("--set", setting)]
        return shlex.join(["tba", "fetch", str(self.config), "--site", str(self.site), *settings])

    @property
    def given(self) -> dict[str, str]:
        """Options of this command that set site keys, by key, without their values, such as ``--time ``."""
        time = {"time": "--time "} if self.time else {}
        return time | {key: f"--sbatch {key}=" for key in requested(self.options)}

    @property
    def beside(self) -> Path:
        """Folder with the user's code that the config names."""
        return modules.folder_of(self.config)

    def load_site(self) -> Site:
        """Load the site file, changed as this submission asks. Raises ConfigError."""
        if self.time and not re.search(WALL_TIME, self.time):
            examples = " or ".join(WALL_TIMES)
            raise ConfigError(f"--time {self.time} is no wall time: give for example {examples}")
        time = {"time": self.time} if self.time else {}
        site = load_site(self.site, self.options, **time)
        if self.here:
            site = load_site(self.site, self.options, **time, **_of_this_job(site))
        changes: dict[str, object] = {"requeue": site.requeue and self.chain == 1}
        if self.here:
            changes["signal_seconds"] = min(site.signal_seconds, HEADER_SIGNAL)
        if self.here and site.gpus_per_node:
            # Even in a job with whole nodes (--exclusive) a step gets only the GPUs that it asks for.
            changes["srun_arguments"] = (*site.srun_arguments, f"--gres=gpu:{site.gpus_per_node}")
        return site.model_copy(update=changes)

    def resolve(self, site: Site) -> tuple[Config, Plan]:
        """Return the run's config, and the plan that places its ranks on nodes of ``site``.

        The numbers of ranks follow from the nodes (``launch.plan.plan``). Local paths in the config are made
        absolute, so that they are valid on every node. Raises ConfigError.
        """
        root = [f"run.root={json.dumps(str(self.run_root))}"] if self.run_root else []
        path, overrides = file_and_overrides(self.config, [*self.overrides, *root])
        # On several nodes the plan gives the number of trainers. Every config allows one.
        first = load_config(path, overrides if self.nodes == 1 else [*overrides, "launch.trainers=1"])
        split = plan(first, site, self.nodes, self.trainer_nodes, homogeneous=self.homogeneous)
        refuse_rank_overrides(self.overrides, first, site, split)
        return load_anchored(path, [*overrides, *split.overrides]), split


def _of_this_job(site: Site) -> dict[str, object]:
    """Return values of site keys that follow from the Slurm job in which this process runs.

    They are this node's numbers of GPUs and CPUs, and a false ``hetjob``. A site's ``gpus_per_node: 0``
    stays, so that no rank gets a GPU. Raises ConfigError in a shell of ``salloc``, which is on no node.
    """
    if (cpus := os.environ.get("SLURM_CPUS_ON_NODE")) is None:
        raise ConfigError(
            "this shell is not on a node of its job: submit the script with sbatch, or type srun --pty bash "
            "first"
        )
    return {
        "gpus_per_node": int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if site.gpus_per_node else 0,
        "cpus_per_node": int(cpus),
        "hetjob": False,
    }


def file_and_overrides(path: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the config file at ``path``, which may be a run directory, and the overrides to load it with.

    For a run directory, the file is the run's frozen config, and one more override sets run.root to the
    directory's parent, in case the directory has been moved. Raises ConfigError if the directory does not
    have the name of its run.
    """
    if not path.is_dir():
        return path, [*overrides]
    run = RunDir.open(path.resolve())  # resolved, since a link to the run may have any name
    name = run.config().run_dir.name
    if run.path.name != name:
        raise ConfigError(f"{path} holds the run {name}: rename the folder to that to resume it")
    return run.config_file, [*overrides, f"run.root={json.dumps(str(run.path.parent))}"]


def load_anchored(path: Path, overrides: Sequence[str]) -> Config:
    """Load the config of a run to start, and make its relative paths absolute, for use in any folder.

    Raises ConfigError, also if the run is a replay.
    """
    config = load_config(path, list(overrides))
    refuse_replay(RunDir(config.run_dir.absolute()))
    named = resources(config, of_custom_task=False)
    paths = {one.key: one.name for one in named if is_path(one) and Path(one.name).exists()}
    paths["run.root"] = config.run.root
    absolute = (f"{key}={json.dumps(str(Path(name).absolute()))}" for key, name in paths.items())
    return load_config(path, [*overrides, *absolute])


def default(kind: shipped.Kind, name: str) -> Path:
    """Return the shipped file ``name``, which is used if the user names none; print its path to stderr."""
    file = shipped.files(kind)[name]
    print(f"no --{kind.removesuffix('s')} given, using {file}", file=sys.stderr)
    return file


def spread(submission: Submission, configs: Sequence[Path], seeds: str | None) -> list[Submission]:
    """Return a copy of a submission for each config and, if there are ``seeds``, for each seed.

    seeds: as for ``parse_seeds``. Raises ConfigError for bad seeds, or for seeds with a run directory.
    """
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
    """Parse a text such as ``0-4`` or ``0,2,7-9`` to a list of numbers without repetitions.

    Raises ConfigError for any other text, or for more than MOST_SEEDS numbers.
    """
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    spans = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if len(spans) < len(parts) or not all(spans):
        raise ConfigError(f"--seeds {text} is no list of seeds: give for example 0-4, or 0,2,7-9")
    if sum(map(len, spans)) > MOST_SEEDS:
        raise ConfigError(f"--seeds {text} would be more than {MOST_SEEDS} runs: submit them in parts")
    return list(dict.fromkeys(seed for span in spans for seed in span))


def nodes_of_this_job(*, print_only: bool) -> int:
    """Return the default of ``--nodes``: the number of nodes of the Slurm job that runs this command.

    Raises ConfigError outside a job, or unless the script is only printed: a submitted job has nodes of its
    own.
    """
    if print_only and (nodes := os.environ.get("SLURM_JOB_NUM_NODES")):
        return int(nodes)
    raise ConfigError("--nodes is missing: say how many nodes the job is to have")


def script(submission: Submission, *, make: bool = False) -> str:
    """Return the batch script of a submission, and print warnings to stderr. Raises ConfigError.

    make: whether to make the run directory and a copy of the code, so that sbatch can take the script.
    Otherwise nothing is written. The script may be for another machine, so that most problems are only
    warnings, and Slurm need not answer.
    """
    site = submission.load_site()
    config, split = submission.resolve(site)
    if RunDir(config.run_dir).config_file.exists():
        refuse_steps_behind(RunDir.check(config), config)
    facts = Facts(
        site=site,
        config=config,
        split=split,
        root=Path(config.run.root),
        shared=True,
        environment=job_environment(site),
        fetched_by=submission.fetched_by,
    )
    refuse([check_file_system], facts)  # its warnings are left out, since the script may be for elsewhere
    for finding in run_checks((*FILES, *CONFIG), facts):
        print(f"warning: {finding.sentence}", file=sys.stderr)
    try:
        split = separate_nodes(split, site)
    except slurm_queue.SlurmError as error:
        if make:
            print(
                f"{error}; so the script does not keep the nodes of the two roles apart",
                file=sys.stderr,
            )
    after, code = last_job(submission.after) if submission.after else None, None
    if make:
        refuse_owned(RunDir.check(config))
        code = prepare(submission, config)
    return script_of(config, split, site, after=after, code=code)


def prepare(submission: Submission, config: Config) -> Path:
    """Make or resume the run directory, and copy what its job needs; return the copy of this package.

    The run directory stays if Slurm then refuses the job, and ``tba status`` says what to type next.
    """
    run = create_run(config)
    modules.keep(run, config, submission.beside)
    (run.path / "slurm").mkdir(exist_ok=True)
    log_event(run, "prepared", job="", restarts=0, command=again(submission, run))
    return snapshot.take(run.path, submission.here)


def sbatch_options(words: Sequence[str]) -> list[str]:
    """Turn words of the form ``key=value`` or ``key`` into options of sbatch. Raises ConfigError."""
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

    split: which ranks run on which nodes. after: id of the job that must end first. chained: whether that job
    belongs to the same run. code: the run's copy of this package; None while there is no run directory. Jobs
    in a container use the container's package.
    """
    if not config.one_world:  # without an MPI world srun alone numbers the ranks, and no MPI is loaded
        site = site.model_copy(update={"mpi": "none"})
    run = config.run_dir.absolute()
    name = f"tba-{config.run.name}"
    job = job_of(name, run, site, code, after=after, chained=chained, mpi=config.one_world)
    return batch_script(job, split, site)


def again(submission: Submission, run: RunDir) -> str:
    """Return a command that submits the run again from any folder.

    It repeats no overrides, because the run's frozen config already contains them.
    """
    site = shipped.find(submission.site, "sites").absolute()
    if submission.here:
        return _by_hand(run, site, submission.nodes)
    words: list[object] = [*_typed(), "--config", run.path, "--site", site, "--nodes", submission.nodes]
    words += ["--trainer-nodes", submission.trainer_nodes] if submission.trainer_nodes else []
    words += ["--time", submission.time] if submission.time else []
    words += ["--homogeneous"] if submission.homogeneous else []
    words += ["--chain", submission.chain] if submission.chain > 1 else []
    options = [option.removeprefix("--") for option in submission.options]
    lasting = [option for option in options if not option.startswith("begin=")]
    words += [word for option in lasting for word in ("--sbatch", option)]
    return shlex.join(map(str, words))


def _by_hand(run: RunDir, site: Path, nodes: int) -> str:
    """Return the sbatch command by which a script in slurm/ resumes the run on nodes like this job's."""
    folder, where, of_site = (shlex.quote(str(path)) for path in (Path.cwd(), run.path, site))
    given = {
        f"--{name.lower()}": os.environ.get(f"SLURM_JOB_{name}") for name in ("PARTITION", "ACCOUNT", "QOS")
    }
    words = [f"--nodes={nodes}", *(f"{key}={value}" for key, value in given.items() if value)]
    words.append(os.environ.get("TBA_SCRIPT", "slurm/tba_math.sbatch"))
    return f"cd {folder} && RUN={where} SITE={of_site} sbatch {shlex.join(words)}"


def _typed() -> list[object]:
    """Return the user's command, ``tba submit`` or tools/submit.py, as words without options.

    A command to be typed later begins with them. Paths are made absolute, so that it works in any folder.
    """
    program = Path(sys.argv[0]).absolute()
    if program.name == "__main__.py":
        return [sys.executable, "-P", "-m", "tba_hpc", "submit"]
    return [sys.executable, program] if program.suffix else [program, "submit"]


def last_job(path: Path) -> str:
    """Return the id of the last job of the run at ``path``. Raises ConfigError if it was never submitted."""
    if jobs := slurm_queue.jobs_of(RunDir.open(path)):
        return jobs[-1]
    raise ConfigError(f"--after {path}: that run was never submitted, so there is no job to wait for")
