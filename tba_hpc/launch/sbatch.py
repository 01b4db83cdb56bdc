"""Makes the text of the batch script of a plan.

The script says which ranks run where. It sources ``job_supervisor.sh``, which handles signals, failures and
requeues. ``docs/slurm.md`` explains the options. The module is pure: it neither calls Slurm nor writes files.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.config import ConfigError
from tba_hpc.core.types import Role
from tba_hpc.launch import mpi_library
from tba_hpc.launch.containers import TMP, filled_in, inside, step_options
from tba_hpc.launch.plan import REQUEUE_SECONDS, Component, ComponentSite, Plan, Site
from tba_hpc.run.directory import SEARCHERS_FIRST

RANK: Sequence[str] = ("python", "-P", "-m", "mpi4py", "-m", "tba_hpc")
"""Command of a rank. ``-m mpi4py`` makes an uncaught error on one rank end all ranks; otherwise they hang."""

TBA: Sequence[str] = ("python", "-P", "-m", "tba_hpc")
"""The command ``tba``, without MPI."""

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""Variables that name the network interface, for NCCL, gloo and Open MPI."""

SUPERVISOR = Path(__file__).with_name("job_supervisor.sh")
"""The shell library that batch scripts source; every node must see it."""

GONE = "this node does not see the run's copy of tba-hpc, or it was deleted: submit the run again"
"""Sentence about SUPERVISOR if a node does not see it."""

VERBS: dict[Role, tuple[str, str]] = {"trainer": ("train", "$TRAINERS"), "searcher": ("search", "$SEARCHERS")}
"""Subcommand of ``tba`` for each role, and the shell variable with its number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as a Slurm job.

    run: absolute path of the run directory. after: id of the job that must end before this one starts, or
    None. chained: whether ``after`` is a job of the same run. supervisor: path of the shell library (see
    SUPERVISOR). code: folder with the ``tba_hpc`` package that the job uses (``snapshot.py``), or None for
    the package of its Python. rank, tba: commands of a rank and of ``tba`` (see RANK and TBA).
    """

    name: str
    run: Path
    after: str | None = None
    chained: bool = False
    supervisor: Path = SUPERVISOR
    code: Path | None = None
    rank: Sequence[str] = RANK
    tba: Sequence[str] = TBA


def job_of(
    name: str,
    run: Path,
    site: Site,
    code: Path | None,
    *,
    after: str | None = None,
    chained: bool = False,
    mpi: bool = True,
) -> Job:
    """Make the job of a run.

    code: folder with a copy of the package, which the job uses unless it runs in a container; None uses the
    installed package. mpi: whether ranks start under mpi4py. name, run, after, chained: see Job.
    """
    return Job(
        name=name,
        run=run,
        after=after,
        chained=chained,
        supervisor=code / "tba_hpc/launch" / SUPERVISOR.name if code else SUPERVISOR,
        code=None if site.container else code,
        rank=[*site.python, *(RANK if mpi else TBA)[1:]],
        tba=[*site.python, *TBA[1:]],
    )


def batch_script(job: Job, plan: Plan, site: Site) -> str:
    """Return the text of the batch script that runs ``job`` on the cluster ``site`` as ``plan`` says.

    Raises ConfigError if the run's path or a site key contains a character that a batch script cannot hold.
    """
    het = plan.form == "het"
    parts = [
        _title(job, plan),
        _het_header(job, plan, site) if het else _homogeneous_header(job, plan, site),
        *_setup(site),
        _settings(job, plan, site),
        _surroundings(job, plan, site),
        _het_step(plan, site) if het else _homogeneous_step(plan, site),
        "run_to_the_end\n",
    ]
    return "\n".join(parts)


def _setup(site: Site) -> list[str]:
    return ["\n".join(site.setup) + "\n"] if site.setup else []


def _title(job: Job, plan: Plan) -> str:
    subject = f"{job.name} on {plan.nodes} node{'s' * (plan.nodes > 1)}: {plan.why}."
    lines = textwrap.wrap(subject, 110, initial_indent="# ", subsequent_indent="# ")
    return (
        "\n".join(["#!/bin/bash", *lines, ""])
        + "# Submit it again to resume the run. job_supervisor.sh, below, handles failures and requeues.\n"
    )


def _het_header(job: Job, plan: Plan, site: Site) -> str:
    one, other = plan.components
    first, second = (_options(part, site, getattr(site, part.role)) for part in plan.components)
    return (
        _common(job, site)
        + f"\n# Component 0, the {one.role}s. Its first node runs this script.\n"
        + _directives(first)
        + f"\n# Component 1, the {other.role}s. It inherits name, time and requeue, but no other option.\n"
        + "#SBATCH hetjob\n"
        + _directives([*second, _signal(site)])
    )


def _homogeneous_header(job: Job, plan: Plan, site: Site) -> str:
    most = max(plan.trainer.ranks_per_node, plan.searcher.ranks_per_node)
    cpus = min(plan.trainer.cpus_per_rank, plan.searcher.cpus_per_rank)
    options = _options(
        Component(role="trainer", nodes=plan.nodes, ranks=0, ranks_per_node=most, cpus_per_rank=cpus),
        site,
        site.trainer,
    )
    roles = "both roles" if plan.searcher.ranks else "trainers alone, which need all of its nodes"
    text = _common(job, site) + f"\n# One allocation for {roles}.\n" + _directives(options)
    if plan.nodes > 1 and plan.searcher.ranks:
        text += (
            "# A lost node does not end the job, unless it is the first: the ranks restart on the others.\n"
        )
        text += "#SBATCH --no-kill\n"
    return text


def _common(job: Job, site: Site, log: str = "job-%j.log") -> str:
    return _directives(
        [
            f"--job-name={job.name}",
            f"--comment={job.run}",
            f"--output={_as_pattern(job.run)}/slurm/{log}",
            "--open-mode=append",
            f"--time={site.time}",
            "--requeue" if site.requeue else "--no-requeue",
            _signal(site),
            *([f"--dependency=afterany:{job.after}"] if job.after else []),
        ]
    )


def _as_pattern(path: Path) -> str:
    """Escape a path for Slurm's patterns of file names, such as ``%j``.

    Raises ConfigError for a backslash, since Slurm replaces no pattern in a name that contains one.
    """
    if "\\" in str(path):
        raise ConfigError(
            f"{path} contains a backslash, and then Slurm does not put the job's id into the names of logs: "
            "choose another run.root"
        )
    return str(path).replace("%", "%%")


def _signal(site: Site) -> str:
    return f"--signal=B:USR1@{site.signal_seconds}"


def _options(component: Component, site: Site, own: ComponentSite) -> list[str]:
    """List the sbatch options of one component. own: the component's part of the site file."""
    values = {
        "--partition": own.partition or site.partition,
        "--account": site.account,
        "--qos": own.qos or site.qos,
        "--constraint": own.constraint or site.constraint,
        "--nodes": component.nodes,
        "--ntasks-per-node": component.ranks_per_node,
        "--cpus-per-task": component.cpus_per_rank,
    }
    options = [f"{key}={value}" for key, value in values.items() if value is not None]
    options += [*site.memory_option(own), *site.gpu_option(own), *(["--exclusive"] if site.exclusive else [])]
    # sbatch obeys only the last --exclude, which is this one. It includes the nodes that the site excludes.
    leave = [f"--exclude={component.exclude}"] if component.exclude else []
    return [*options, *site.sbatch_options, *leave]


def _directives(options: Sequence[str]) -> str:
    for option in options:
        if not option.isprintable():  # after a line break, the rest would be a command of the script
            raise ConfigError(
                f"{option!r} cannot be written to a batch script: remove the control character from the site "
                "key or the path"
            )
    return "".join(f"#SBATCH {_quoted(option)}\n" for option in options)


def _quoted(option: str) -> str:
    """Quote the value of an option if necessary, since sbatch splits its lines like a shell."""
    key, equals, value = option.partition("=")
    return key + equals + (shlex.quote(value) if equals and (set(value) & set(" \t'\"\\#$")) else value)


def _settings(job: Job, plan: Plan, site: Site) -> str:
    mains = {
        "NODES": plan.nodes,
        "TRAINER_NODES": plan.trainer.nodes,
        "TRAINERS": plan.trainer.ranks,
        "SEARCHERS": plan.searcher.ranks,
        "SEARCHERS_PER_NODE": plan.searcher.ranks // max(1, plan.searcher.nodes),
        "REQUEUE": "yes" if site.requeue else "no",
        "RELAUNCHES": site.relaunches,
        "SAVE_SECONDS": site.signal_seconds - REQUEUE_SECONDS,
    }
    mains |= {} if _step_memory(site) else {"STEP_MEMORY": ""}
    mains |= {"CACHES_IN": TMP} if site.container else {}
    mains |= {"CHAINED": 1} if job.chained else {}
    return f"export RUN={shlex.quote(str(job.run))}\n" + "".join(
        f"{key}={value}\n" for key, value in mains.items()
    )


def _surroundings(job: Job, plan: Plan, site: Site) -> str:
    """Return the shell lines that set up the environment.

    ``set -u`` comes last, since modules and virtual environments use unset variables.
    """
    interface = site.network_interface
    names = {name: interface for name in INTERFACE_VARIABLES if interface}
    names |= mpi_library.variables(site.mpi_library)
    names |= mpi_library.one_machine(names | site.environment) if plan.nodes == 1 else {}
    names |= {"PYTHONNOUSERSITE": "1"} if site.container else {}  # the home is often visible in a container
    lines = [f'source {shlex.quote(str(job.supervisor))} || {{ echo "{GONE}" >&2; exit 2; }}']
    lines += [f"load_modules {shlex.join(site.modules)}"] if site.modules else []
    lines += [*_needs("venv", site), f"enter_venv {filled_in(site.venv)}"] if site.venv else []
    lines += _needs("mpi_library", site)
    for key, value in (names | site.environment).items():
        lines += [*_needs(f"environment.{key}", site), f"export {key}={filled_in(value)}"]
    if job.code:
        lines += [f'export PYTHONPATH={shlex.quote(str(job.code))}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += [*_needs("container", site), f"TBA=({_tba(job, site)})", f"RANK=({inside(job.rank, site)})"]
    return "\n".join([*lines, "set -u"]) + "\n"


def _needs(key: str, site: Site) -> list[str]:
    """Return a line that ends the job if a variable in the site key ``key`` is unset; [] if it has none."""
    names = site.variables.get(key)
    return [f"needs {key} {' '.join(names)}"] if names else []


def _tba(job: Job, site: Site) -> str:
    """Return the shell words that run ``tba`` in the batch script.

    If srun must start the container, ``tba`` runs as a job step.
    """
    options = step_options(site)
    if not options:
        return inside(job.tba, site)
    step = f"srun --mpi=none --overlap{_step_memory(site)} --nodes=1 --ntasks=1 --ntasks-per-node=1"
    return f'{step} --nodelist="$SLURMD_NODENAME"{options} {inside(job.tba, site)}'


def _step_memory(site: Site) -> str:
    # A step on a lost node keeps its memory allocated. With --mem=0 the next step does not wait for memory.
    return " --mem=0" if any(map(site.memory_option, (site.trainer, site.searcher))) else ""


def _srun(site: Site) -> str:
    mpi = f" {shlex.join(site.mpi_option)}" if site.mpi else ""
    return f"srun{mpi} --kill-on-bad-exit=1 --overlap{_step_memory(site)}{_extra(site)}"


def _extra(site: Site) -> str:
    return f" {shlex.join(site.srun_arguments)}" if site.srun_arguments else ""


def _het_step(plan: Plan, site: Site) -> str:
    def group(number: int, component: Component) -> str:
        verb, ranks = VERBS[component.role]
        return (
            f"--het-group={number} --nodes={component.nodes} --ntasks={ranks} "
            f'--cpus-per-task={component.cpus_per_rank}{step_options(site)} "${{RANK[@]}}" {verb} "$RUN"'
        )

    one, other = plan.components
    first = "" if one.role == "trainer" else f"    export {SEARCHERS_FIRST}=1\n"
    return (
        f"ranks() {{   # one MPI world over both components: the {one.role}s are ranks 0 and up\n"
        f"{first}"
        f"    exec {_srun(site)} \\\n"
        f"        {group(0, one)} : \\\n"
        f"        {group(1, other)}\n"
        "}\n"
    )


def _homogeneous_step(plan: Plan, site: Site) -> str:
    cpus = min(plan.trainer.cpus_per_rank, plan.searcher.cpus_per_rank)
    container = f"       {step_options(site)} \\\n" if step_options(site) else ""
    choose = 'role=search; [ "$SLURM_PROCID" -lt "$0" ] && role=train; exec "$@" "$role" "$RUN"'
    return (
        "ranks() {   # one MPI world: the first ranks train; the host file names the node of each rank\n"
        "    unset SLURM_NTASKS_PER_NODE\n"
        f"    SLURM_HOSTFILE=$RUN/slurm/hosts exec {_srun(site)} --distribution=arbitrary \\\n"
        f'        --nodes="$NODES_LEFT" --ntasks=$((TRAINERS + SEARCHERS)) --cpus-per-task={cpus} \\\n'
        f"{container}        bash -c '{choose}' \\\n"
        '        "$TRAINERS" "${RANK[@]}"\n'
        "}\n"
    )


def elastic_script(job: Job, nodes: int, searcher: Component, site: Site) -> str:
    """Return the text of the batch script of an array of ``nodes`` jobs of elastic searchers, one node each.

    searcher: the searchers of one node. Raises ConfigError as ``batch_script`` does.
    """
    nobody = Component(role="trainer", nodes=1, ranks=0, ranks_per_node=0, cpus_per_rank=0)
    plan = Plan(form="homogeneous", nodes=1, trainer=nobody, searcher=searcher, why="")
    parts = [
        "#!/bin/bash\n# Elastic searchers of a run. Each job requeues itself until the run is finished.\n",
        _common(job, site, "searchers-%A_%a.log")
        + _directives([f"--array=0-{nodes - 1}", *_options(searcher, site, site.searcher)]),
        *_setup(site),
        _settings(job, plan, site),
        _surroundings(job, plan, site),
        _elastic_step(searcher, site),
        "search_for_a_while\n",
    ]
    return "\n".join(parts)


def _elastic_step(searcher: Component, site: Site) -> str:
    # Elastic searchers do not use MPI. "${RANK[@]}" is the command `tba` in the container, if there is one.
    cpus = f"--cpus-per-task={searcher.cpus_per_rank}"
    srun = (
        f'srun --mpi=none --ntasks="$SEARCHERS" {cpus} --kill-on-bad-exit=0{_extra(site)}{step_options(site)}'
    )
    return (
        "ranks() {   # searchers, without MPI; one that crashes is restarted while the others go on\n"
        f'    exec {srun} \\\n        bash -c "$KEEP" "$RELAUNCHES" "${{RANK[@]}}" search "$RUN"\n'
        "}\n"
    )
