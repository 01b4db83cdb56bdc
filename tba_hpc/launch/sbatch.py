"""The batch script of a plan, as text: pure, so that golden files can hold it.

What a script does is in two places: the text made here says who works where; ``job_supervisor.sh``,
which it sources, brings the run to its end. Facts behind the options: ``slurm/README.md``.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.config import ConfigError
from tba_hpc.launch import ONE_MACHINE
from tba_hpc.launch.plan import Component, ComponentSite, Plan, Site

RANK: Sequence[str] = ("python", "-m", "mpi4py", "-m", "tba_hpc")
"""A rank: under mpi4py an uncaught error on one rank ends the world instead of hanging it."""

TBA: Sequence[str] = ("python", "-m", "tba_hpc")
"""The command ``tba`` where there is no MPI."""

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""Where libraries are told the network interface; Open MPI, unlike the others, would use all there are."""

SUPERVISOR = Path(__file__).with_name("job_supervisor.sh")
"""The shell library that batch scripts source; every node must see it."""

SPARE_SECONDS = 30
"""Kept back of the time between signal and end, for the requeue itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as a job. run: its directory, absolute. supervisor: as SUPERVISOR. rank, tba: as RANK, TBA.

    after: id of the job that is to end first, None for none.
    """

    name: str
    run: Path
    after: str | None = None
    supervisor: Path = SUPERVISOR
    rank: Sequence[str] = RANK
    tba: Sequence[str] = TBA


def batch_script(job: Job, plan: Plan, site: Site) -> str:
    """Text of the sbatch file that runs ``job`` as ``plan`` says on ``site``.

    Raises ConfigError where a value would not stay on its line.
    """
    het = plan.form == "het"
    parts = [
        _title(job, plan),
        _het_header(job, plan, site) if het else _homogeneous_header(job, plan, site),
        _settings(job, plan, site),
        _environment(job, plan, site),
        _het_step(plan, site) if het else _homogeneous_step(plan, site),
        f"run_to_the_end {'place_components' if het else 'place_ranks'}\n",
    ]
    return "\n".join(parts)


def _title(job: Job, plan: Plan) -> str:
    subject = f"{job.name} on {plan.nodes} node{'s' * (plan.nodes > 1)}: {plan.why}."
    lines = textwrap.wrap(subject, 110, initial_indent="# ", subsequent_indent="# ")
    return (
        "\n".join(["#!/bin/bash", *lines, ""])
        + "# Submitted again, it goes on where the run stopped. How it survives: job_supervisor.sh, below.\n"
    )


def _het_header(job: Job, plan: Plan, site: Site) -> str:
    first = _options(plan.trainer, site, site.trainer)
    second = _options(plan.searcher, site, site.searcher)
    return (
        _common(job, site)
        + "\n# Component 0, the trainers. Its first node runs this script.\n"
        + _directives(first)
        + "\n# Component 1, the searchers. It inherits name, time and requeue; all else is said again.\n"
        + "#SBATCH hetjob\n"
        + _directives([*second, _signal(site)])
    )


def _homogeneous_header(job: Job, plan: Plan, site: Site) -> str:
    most = max(plan.trainer.ranks_per_node, plan.searcher.ranks_per_node)
    cpus = min(plan.trainer.cpus_per_rank, plan.searcher.cpus_per_rank)
    options = _options(
        Component(role="trainer", nodes=plan.nodes, ranks=0, ranks_per_node=most, cpus_per_rank=cpus),
        site,
        ComponentSite(),
    )
    text = _common(job, site) + "\n# One allocation for both roles.\n" + _directives(options)
    if plan.nodes > 1:
        text += "# A lost node, unless the first, does not end the job: the ranks start again on the rest.\n"
        text += "#SBATCH --no-kill\n"
    return text


def _common(job: Job, site: Site) -> str:
    return _directives(
        [
            f"--job-name={job.name}",
            f"--comment={job.run}",
            f"--output={job.run}/slurm/job-%j.log",
            "--open-mode=append",
            f"--time={site.time}",
            "--requeue" if site.requeue else "--no-requeue",
            _signal(site),
            *([f"--dependency=afterany:{job.after}"] if job.after else []),
        ]
    )


def _signal(site: Site) -> str:
    return f"--signal=B:USR1@{site.signal_seconds}"


def _options(component: Component, site: Site, own: ComponentSite) -> list[str]:
    """Everything that each component of a het job must say for itself."""
    gpus = own.gpu_request or site.gpu_request
    values = {
        "--partition": own.partition or site.partition,
        "--account": site.account,
        "--qos": own.qos or site.qos,
        "--constraint": own.constraint or site.constraint,
        "--nodes": component.nodes,
        "--ntasks-per-node": component.ranks_per_node,
        "--cpus-per-task": component.cpus_per_rank,
        "--mem": own.memory or site.memory,
    }
    options = [f"{key}={value}" for key, value in values.items() if value is not None]
    if site.gpus_per_node:
        options.append(gpus.format(gpus=site.gpus_per_node))
    return [*options, *(["--exclusive"] if site.exclusive else []), *site.sbatch_options]


def _directives(options: Sequence[str]) -> str:
    for option in options:
        if not option.isprintable():  # a line end would make the rest a command of the script
            raise ConfigError(
                f"{option!r} cannot stand in a batch script: take the control character out of the site key "
                "or the path"
            )
    return "".join(f"#SBATCH {_quoted(option)}\n" for option in options)


def _quoted(option: str) -> str:
    """sbatch splits its lines like a shell; only what needs quotes gets them."""
    key, equals, value = option.partition("=")
    return key + equals + (shlex.quote(value) if equals and (set(value) & set(" \t'\"\\#$")) else value)


def _settings(job: Job, plan: Plan, site: Site) -> str:
    rank, tba = (_contained(command, site) for command in (job.rank, job.tba))
    mains = {
        "NODES": plan.nodes,
        "TRAINER_NODES": plan.trainer.nodes,
        "TRAINERS": plan.trainer.ranks,
        "SEARCHERS": plan.searcher.ranks,
        "SEARCHERS_PER_NODE": plan.searcher.ranks // plan.searcher.nodes,
        "REQUEUE": "yes" if site.requeue else "no",
        "RELAUNCHES": site.relaunches,
        "SAVE_SECONDS": max(1, site.signal_seconds - SPARE_SECONDS),
    }
    return (
        "set -u\n"
        f"export RUN={shlex.quote(str(job.run))}\n"
        + "".join(f"{key}={value}\n" for key, value in mains.items())
        + f"TBA=({shlex.join(tba)})\nRANK=({shlex.join(rank)})\n"
    )


def _contained(command: Sequence[str], site: Site) -> list[str]:
    """The command inside the site's container, if it has one."""
    if site.container is None:
        return list(command)
    box = site.container
    binds = [part for bind in box.binds for part in ("--bind", bind)]
    return [box.runtime, "exec", *box.arguments, *binds, box.image, *command]


def _environment(job: Job, plan: Plan, site: Site) -> str:
    interface = site.network_interface
    names = {name: interface for name in INTERFACE_VARIABLES if interface}
    names |= ONE_MACHINE if plan.nodes == 1 else {}
    lines = [f"module load {shlex.join(site.modules)}"] if site.modules else []
    lines += [f"source {_expanded(site.venv + '/bin/activate')}"] if site.venv else []
    lines += [f"export {key}={_expanded(value)}" for key, value in (names | site.environment).items()]
    lines += [f"source {shlex.quote(str(job.supervisor))}"]
    return "\n".join(lines) + "\n"


def _expanded(value: str) -> str:
    """Shell word in which variables are filled in and nothing else happens."""
    return '"' + re.sub(r'(["`\\])|\$(?=\()', r"\\\g<0>", value) + '"'


def _srun(site: Site) -> str:
    # --overlap, --mem=0: the step of a lost node keeps its share booked; the next must not wait for it.
    extra = f" {shlex.join(site.srun_arguments)}" if site.srun_arguments else ""
    return f"srun --mpi={site.mpi} --kill-on-bad-exit=1 --overlap --mem=0{extra}"


def _het_step(plan: Plan, site: Site) -> str:
    def group(number: int, component: Component, verb: str, ranks: str) -> str:
        return (
            f"--het-group={number} --nodes={component.nodes} --ntasks={ranks} "
            f'--cpus-per-task={component.cpus_per_rank} "${{RANK[@]}}" {verb} "$RUN"'
        )

    return (
        "ranks() {   # one MPI world over both components: the trainers are ranks 0 and up\n"
        f"    exec {_srun(site)} \\\n"
        f"        {group(0, plan.trainer, 'train', '$TRAINERS')} : \\\n"
        f"        {group(1, plan.searcher, 'search', '$SEARCHERS')}\n"
        "}\n"
    )


def _homogeneous_step(plan: Plan, site: Site) -> str:
    cpus = min(plan.trainer.cpus_per_rank, plan.searcher.cpus_per_rank)
    choose = 'role=search; [ "$SLURM_PROCID" -lt "$0" ] && role=train; exec "$@" "$role" "$RUN"'
    return (
        "ranks() {   # one MPI world; a rank's number is its role, and its line of the host file its node\n"
        "    unset SLURM_NTASKS_PER_NODE\n"
        f"    SLURM_HOSTFILE=$RUN/slurm/hosts exec {_srun(site)} --distribution=arbitrary \\\n"
        f'        --nodes="$NODES_LEFT" --ntasks=$((TRAINERS + SEARCHERS)) --cpus-per-task={cpus} \\\n'
        f"        bash -c '{choose}' \\\n"
        '        "$TRAINERS" "${RANK[@]}"\n'
        "}\n"
    )
