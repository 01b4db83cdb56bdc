"""Checks of a Slurm cluster and of what a job requests from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from tba_hpc.checks.facts import Facts, Finding, ok, problem, warning
from tba_hpc.launch.plan import Site, slurm_seconds
from tba_hpc.run.slurm_queue import mebibytes

OURS = re.compile(r"--(comment|output|open-mode|signal|no-requeue)\b|-o\b")
"""Pattern of options of sbatch that batch scripts themselves set."""

SHORT_SECONDS = 300
"""Shortest useful time from a job's start to the request to stop, in seconds. In less time, large engines may
seal no shard."""

CLUSTERS = re.compile(r"(?:-M\s*|--clusters?[=\s]\s*)(\S+)")
"""Pattern of the sbatch option that sends a job to another cluster, with the cluster's name."""


def check_mpi_plugin(facts: Facts) -> Iterator[Finding]:
    """Check that srun has the plugin that the site key mpi names, and that it fits the ranks' MPI library."""
    asked, site, title = facts.slurm, facts.site, "MPI plugin"
    if asked is None or (facts.config and not facts.config.one_world):
        return
    there = ", ".join(sorted(asked.mpi - {"none"})) or "none"
    fits, library = (facts.library.plugin, facts.library.version) if facts.library else ("", "")
    default = asked.settings.get("MpiDefault", "none")
    if site.mpi is None and fits not in default:
        found = (
            f"the site sets no mpi, and MpiDefault={default} does not fit {library}, which mpi4py loads here"
        )
        remedy = f"set mpi: {fits} in the site file, unless SLURM_MPI_TYPE is set for all users"
        yield warning(title, found, remedy)
    elif site.mpi is None:
        yield ok(title, f"left to the cluster (MpiDefault={default})")
    elif site.mpi not in asked.mpi:
        better = fits if fits in asked.mpi else "one of them"
        found = f"srun has no --mpi={site.mpi}, only: {there}"
        yield problem(title, found, f"set mpi: {better} in the site file")
    elif fits not in site.mpi:  # pmix_v5 and pspmix are PMIx, too
        found = f"mpi: {site.mpi} does not fit {library}, which mpi4py loads here: each rank would be alone"
        others = "" if fits in asked.mpi else f" (srun has: {there})"
        yield problem(title, found, f"set mpi: {fits} in the site file{others}")
    else:
        yield ok(title, f"srun has --mpi={site.mpi}" + (f", which fits {library}" if fits else ""))


def check_gpu_request(facts: Facts) -> Iterator[Finding]:
    """Check that a job that uses GPUs also requests their number."""
    site = facts.site
    requests = [own.gpu_request or site.gpu_request or "" for own in (site.trainer, site.searcher)]
    alone = site.exclusive or any("--exclusive" in option for option in (*site.sbatch_options, *requests))
    if site.gpus_per_node and not alone and not all("{gpus}" in request for request in requests):
        found = (
            f"gpu_request: {site.gpu_request or 'null'} asks for no number of GPUs, but a job uses all "
            f"{site.gpus_per_node} of each node (gpus_per_node)"
        )
        yield warning("GPU request", found, "set exclusive: true, unless jobs always get whole nodes")


def check_options(facts: Facts) -> Iterator[Finding]:
    """Check that sbatch_options replace no option by which tba finds, stops or requeues the job."""
    for option in facts.site.sbatch_options:
        if OURS.match(option):
            found = (
                f"{option} under sbatch_options replaces an option by which tba finds, stops or requeues jobs"
            )
            yield warning("options", found, "leave it out; for --no-requeue, set requeue: false instead")


def check_cluster(facts: Facts) -> Iterator[Finding]:
    """Check that squeue and scancel will ask the cluster to which sbatch sends the job."""
    options = [match[1] for option in facts.site.sbatch_options if (match := CLUSTERS.match(option))]
    named = (options or [os.environ.get("SBATCH_CLUSTERS", "")])[-1]
    here = os.environ.get("SLURM_CLUSTERS") or (facts.slurm and facts.slurm.settings.get("ClusterName"))
    if named and here != named:
        found = f"jobs go to the cluster {named} (--clusters), but squeue, scontrol and scancel ask this one"
        yield warning("cluster", found, f"type 'export SLURM_CLUSTERS={named}' instead, which all obey")


def check_time(facts: Facts) -> Iterator[Finding]:
    """Check that a job does not end before its engines are ready."""
    site = facts.site
    if site.seconds_to_train < SHORT_SECONDS:
        found = f"time={site.time} leaves only {site.seconds_to_train:.0f} s to start engines and train"
        yield warning("time", found, "ask for more: the run is given up if several starts seal no shard")


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Warn about unset variables in the values of site keys. The nodes may have other variables."""
    for key, names in facts.site.variables.items():
        for name in names:
            if name not in os.environ and not name.startswith("SLURM_"):
                found = f"{name} is not set here, but the site key {key} uses it"
                remedy = "unless setup, a module or the nodes set it, the job will end when it starts"
                yield warning("environment", found, remedy)


def check_het_jobs(facts: Facts) -> Iterator[Finding]:
    """Check that this cluster can start het jobs."""
    if facts.slurm is None or not facts.site.hetjob or (facts.split and facts.split.form != "het"):
        return
    scheduler = facts.slurm.settings.get("SchedulerType", "")
    switch = re.search(r"disable_het(?:ero|job)_steps", facts.slurm.settings.get("SchedulerParameters", ""))
    remedy = "set hetjob: false in the site file"
    if scheduler != "sched/backfill":
        found = f"SchedulerType={scheduler}, but only sched/backfill starts het jobs"
        yield problem("het jobs", found, remedy)
    elif switch:
        found = f"SchedulerParameters has {switch[0]}, so that no srun spans two components"
        yield problem("het jobs", found, remedy)
    else:
        yield ok("het jobs", "this cluster starts them (jobs with two kinds of nodes)")


def check_requeue(facts: Facts) -> Iterator[Finding]:
    """Check whether the cluster allows jobs to requeue themselves."""
    if facts.slurm is None:
        return
    if not facts.site.requeue:
        yield ok("requeue", "not used (requeue: false): submit again to resume after a stop")
    elif facts.slurm.settings.get("JobRequeue") == "0":
        yield warning(
            "requeue",
            "JobRequeue=0: only jobs submitted with --requeue may requeue, and some sites forbid this option",
            "tba uses this option; if 'scontrol show job' still says Requeue=0, set requeue: false in the "
            "site file and submit again after each stop",
        )
    else:
        yield ok("requeue", "allowed")


def judge_job_requeue(site: Site, job: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if Slurm does not let a submitted job requeue itself, although the job requested it.

    job: fields of the job, as ``scontrol show job`` names them.
    """
    if site.requeue and job.get("Requeue") == "0":
        yield warning(
            "requeue",
            "Slurm has set Requeue=0 for a job submitted with --requeue, so that its first stop ends it",
            "set requeue: false in the site file if the site forbids it; then submit again after a stop",
        )


# --- Partitions ---


def check_partitions(facts: Facts) -> Iterator[Finding]:
    """Check that partitions are up and allow the site's time and memory. Larger jobs stay queued for ever."""
    site = facts.site
    for partition in facts.partitions:
        name, longest = partition["PartitionName"], partition.get("MaxTime", "UNLIMITED")
        most = partition.get("MaxMemPerNode", "UNLIMITED")
        if partition.get("State", "UP") != "UP":
            found = f"partition {name} is {partition['State']}, so that jobs stay queued"
            yield warning("partition", found, "wait, or choose another partition")
        elif site.seconds > slurm_seconds(longest):
            found = f"time: {site.time} is more than MaxTime={longest} of partition {name}"
            shorter = f"set time: {longest} in the site file, without --time among its sbatch_options"
            if "time" in facts.given:
                shorter = f"give {facts.given['time']}{longest} or less"
            remedy = f"{shorter}, or choose another partition"
            yield problem("partition", f"{found}; jobs would wait for ever", remedy)
        elif most.isdigit() and mebibytes(site.memory or "0") > int(most):
            found = f"memory: {site.memory} is more than MaxMemPerNode={most} (MiB) of partition {name}"
            remedy = f"set memory: {most}M in the site file, or choose another partition"
            yield problem("partition", found, remedy)
        else:
            yield ok("partition", f"{name}: {partition.get('TotalNodes', '?')} nodes, jobs up to {longest}")


def check_nodes(facts: Facts) -> Iterator[Finding]:
    """Check that partitions have enough nodes. A het job that is too large would stay queued for ever."""
    asked, split, site = facts.slurm, facts.split, facts.site
    if asked is None or split is None:
        return
    shares = [(split.trainer.nodes, site.trainer), (split.searcher.nodes, site.searcher)]
    if split.form == "homogeneous":
        shares = [(split.nodes, site.trainer)]
    wanted: dict[str, list[int]] = {}
    for nodes, own in shares:
        if partition := asked.partition(own.partition or site.partition):
            wanted.setdefault(partition["PartitionName"], []).append(nodes)
    for name, components in wanted.items():
        for key, nodes in (("TotalNodes", sum(components)), ("MaxNodes", max(components))):
            most = asked.partitions[name].get(key, "")
            if most.isdigit() and nodes > int(most):
                found = f"the job needs {nodes} nodes of partition {name}, which has {key}={most}"
                where = facts.given.get("partition", "the site key partition").rstrip("= ")
                remedy = f"ask for fewer --nodes, or change {where}"
                yield problem("nodes", f"{found}; the job would stay queued for ever", remedy)


def check_preemption(facts: Facts) -> Iterator[Finding]:
    """Report what happens to the run's job if a job of higher priority gets its nodes."""
    for partition in facts.partitions if facts.slurm else ():
        yield _preemption(facts.slurm.settings if facts.slurm else {}, partition, facts.site.signal_seconds)


def _preemption(settings: Mapping[str, str], partition: Mapping[str, str], wanted: int) -> Finding:
    """Return the finding about preemption in a partition.

    settings: Slurm's settings. wanted: seconds before the time limit at which a job is asked to checkpoint.
    """
    title, name, mode = "preemption", partition["PartitionName"], partition.get("PreemptMode", "OFF")
    kind, grace = settings.get("PreemptType", "preempt/none"), int(partition.get("GraceTime", "0"))
    if kind == "preempt/none" or mode == "OFF":
        return ok(title, f"{name}: jobs are never preempted")
    if "SUSPEND" in mode or mode == "GANG":
        found = f"{name}: PreemptMode={mode} suspends the ranks of a job, perhaps not all of them"
        remedy = "choose a partition that requeues; ranks that wait for a suspended one fail after a timeout"
        return warning(title, found, remedy)
    if kind == "preempt/qos":
        return ok(title, f"{name}: by QOS; see sacctmgr show qos format=name,preemptmode,gracetime")
    if grace < wanted:
        late = "ends the job for good" if mode == "CANCEL" else "is lost, and its steps are repeated"
        found = (
            f"{name}: a preempted job has {grace} s (GraceTime) for a checkpoint, but {wanted} s at its time "
            f"limit (signal_seconds); a checkpoint that takes longer {late}"
        )
        remedy = "set checkpoint.every so that little is lost, or choose another partition"
        return warning(title, found, remedy)
    return ok(title, f"{name}: PreemptMode={mode}, {grace} s of grace for a checkpoint")
