"""What of a Slurm cluster would hurt a run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.facts import Facts
from tba_hpc.checks.findings import Finding, ok, problem, warning, worst
from tba_hpc.launch.plan import ComponentSite, Plan, Site, slurm_seconds
from tba_hpc.launch.slurm_queue import mebibytes

OLDEST = (20, 2)
"""First version of Slurm that knows ``--het-group``."""

CRED_EXPIRE, BACKFILL_SECONDS = 120, 30
"""Seconds that a requeued job waits at least, and between two looks of the backfill scheduler, if the cluster
does not say."""


def check_version(facts: Facts) -> Finding | None:
    """Whether this Slurm knows the form in which we start het jobs."""
    if facts.slurm is None:
        return None
    text = facts.slurm.settings.get("SLURM_VERSION", "0")
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if facts.site.hetjob and version < OLDEST:
        found = f"version {text} has no srun --het-group"
        return problem("Slurm version", found, "set hetjob: false in the site file")
    return ok("Slurm version", f"{text}, cluster {facts.slurm.settings.get('ClusterName', '?')}")


def check_mpi_plugin(facts: Facts) -> Finding | None:
    """Whether the site's ``mpi`` exists, and fits the MPI library that ranks load."""
    asked, site = facts.slurm, facts.site
    if asked is None or (facts.config and not facts.config.one_world):
        return None
    there = ", ".join(sorted(asked.mpi - {"none"})) or "none"
    library = facts.library.needs_plugin if facts.library else ""
    fits = plugin_for(library)
    if site.mpi is None:
        default = asked.settings.get("MpiDefault", "none")
        if fits and fits not in default:
            return warning(
                "MPI plugin",
                f"the site names no mpi, and MpiDefault={default} is not for {library}, which mpi4py loads "
                "here",
                f"set mpi: {fits} in the site file, unless SLURM_MPI_TYPE is set for all users",
            )
        return ok("MPI plugin", f"left to the cluster (MpiDefault={default})")
    if site.mpi not in asked.mpi:
        better = fits if fits in asked.mpi else "one of them"
        found = f"srun has no --mpi={site.mpi}, only: {there}"
        return problem("MPI plugin", found, f"set mpi: {better} in the site file")
    if fits and fits not in site.mpi:  # pmix_v5 and pspmix speak PMIx, too
        return problem(
            "MPI plugin",
            f"mpi: {site.mpi} is not for {library}, which mpi4py loads here: every rank would be alone",
            f"set mpi: {fits} in the site file" + ("" if fits in asked.mpi else f" (srun has: {there})"),
        )
    return ok("MPI plugin", f"srun has --mpi={site.mpi}" + (f", as {library} wants it" if library else ""))


def plugin_for(library: str) -> str:
    """The plugin by which ranks with this MPI library find each other; empty for no library."""
    families = {"Open MPI": "pmix", "CRAY": "cray_shasta", "": "pmi2"}
    return next(plugin for name, plugin in families.items() if name in library) if library else ""


def check_gpu_request(facts: Facts) -> Finding | None:
    """What to know if a job counts on GPUs without asking for a number of them."""
    site = facts.site
    requests = [own.gpu_request or site.gpu_request or "" for own in (site.trainer, site.searcher)]
    if not site.gpus_per_node or all("{gpus}" in request for request in requests):
        return None
    found = (
        f"gpu_request: {site.gpu_request or 'null'} asks for no number of GPUs: a job counts on all "
        f"{site.gpus_per_node} of each node (gpus_per_node)"
    )
    if site.exclusive or any("--exclusive" in option for option in (*site.sbatch_options, *requests)):
        return ok("GPU request", f"{found}, which it has alone")
    return warning("GPU request", found, "set exclusive: true, unless nodes are given whole anyway")


def check_variables(facts: Facts) -> Finding | None:
    """Whether a job will know the variables that values of the site hold; the nodes may know others."""
    remedy = "unless a line of setup, a module or the nodes set it, the job will refuse to start"
    return worst(
        [
            warning("environment", f"{name} is not set here, but the site key {key} holds it", remedy)
            for key, names in facts.site.variables.items()
            for name in names
            if name not in facts.shell and not name.startswith("SLURM_")
        ]
    )


def check_het_jobs(facts: Facts) -> Finding | None:
    """Whether het jobs would ever start."""
    if facts.slurm is None or (facts.split and facts.split.form != "het"):
        return None
    if not facts.site.hetjob:
        return ok("het jobs", "not used (hetjob: false): one allocation holds both roles")
    scheduler = facts.slurm.settings.get("SchedulerType", "")
    parameters = facts.slurm.settings.get("SchedulerParameters", "")
    if scheduler != "sched/backfill":
        found = f"SchedulerType={scheduler}, and only sched/backfill starts them"
        return problem("het jobs", found, "set hetjob: false in the site file")
    if switch := re.search(r"disable_het(?:ero|job)_steps", parameters):
        found = f"SchedulerParameters has {switch[0]}, so that no srun spans two components"
        return problem("het jobs", found, "set hetjob: false in the site file")
    pause = facts.slurm.number("SchedulerParameters", "bf_interval", BACKFILL_SECONDS)
    return ok("het jobs", f"started by backfill, which looks every {pause} s")


def check_requeue(facts: Facts) -> Finding | None:
    """Whether a job may go back to the queue by itself."""
    if facts.slurm is None:
        return None
    if not facts.site.requeue:
        return ok("requeue", "not used (requeue: false): submit again to go on after a stop")
    if facts.slurm.settings.get("JobRequeue") == "0":
        return warning(
            "requeue",
            "JobRequeue=0: this cluster requeues only jobs that ask for it, which some sites forbid",
            "ours ask; if 'scontrol show job' still says Requeue=0, set requeue: false in the site file and "
            "submit again after each stop",
        )
    wait = facts.slurm.number("AuthInfo", "cred_expire", CRED_EXPIRE)
    return ok("requeue", f"allowed; a requeued job starts again after {wait} s at the earliest (cred_expire)")


def check_job_requeue(facts: Facts) -> Finding | None:
    """Whether Slurm took a job with the leave to requeue that it asked for."""
    if not facts.site.requeue or facts.job.get("Requeue") != "0":
        return None
    return warning(
        "requeue",
        "Slurm took the job with Requeue=0 although it asks to be requeued, so its first stop ends it",
        "set requeue: false in the site file if the site forbids it; then submit again after a stop",
    )


def tell_settings(facts: Facts) -> Finding | None:
    """What is good to know when something else goes wrong; scripts of ours rely on none of it."""
    if facts.slurm is None:
        return None
    settings = facts.slurm.settings
    names = ("KillWait", "KillOnBadExit", "MpiDefault", "PrologFlags", "MaxMemPerNode")
    values = [f"{name} {settings[name]}" for name in names if name in settings]
    return ok("settings", ", ".join(values).replace("(null)", "none"))


# --- Partitions ---


def check_partitions(facts: Facts) -> Finding | None:
    """Whether they take jobs as long and large as the site asks for; Slurm would queue others for ever."""
    return worst([_partition(partition, facts.site) for partition in facts.partitions])


def _partition(partition: Mapping[str, str], site: Site) -> Finding:
    name, longest = partition["PartitionName"], partition.get("MaxTime", "UNLIMITED")
    if partition.get("State", "UP") != "UP":
        found = f"partition {name} is {partition['State']}, so that jobs stay queued"
        return warning("partition", found, "wait, or choose another partition")
    if site.seconds > slurm_seconds(longest):
        return problem(
            "partition",
            f"time: {site.time} is beyond MaxTime={longest} of partition {name}; jobs would wait for ever",
            f"set time: {longest} in the site file, or choose another partition",
        )
    most = partition.get("MaxMemPerNode", "UNLIMITED")
    if most.isdigit() and mebibytes(site.memory or "0") > int(most):
        return problem(
            "partition",
            f"memory: {site.memory} is beyond MaxMemPerNode={most} (MiB) of partition {name}",
            f"set memory: {most}M in the site file, or choose another partition",
        )
    return ok("partition", f"{name}: {partition.get('TotalNodes', '?')} nodes, jobs up to {longest}")


def check_nodes(facts: Facts) -> Finding | None:
    """Whether the partitions have as many nodes; Slurm would take a het job all the same, and queue it."""
    if facts.slurm is None or facts.split is None:
        return None
    asked: dict[str, list[int]] = {}
    for nodes, own in _shares(facts.site, facts.split):
        if partition := facts.slurm.partition(own.partition or facts.site.partition):
            asked.setdefault(partition["PartitionName"], []).append(nodes)
    checked = [_size(facts.slurm.partitions[name], shares) for name, shares in asked.items()]
    return worst([finding for finding in checked if finding])


def _shares(site: Site, plan: Plan) -> list[tuple[int, ComponentSite]]:
    """Nodes of each component of the job, and what the component says for itself."""
    if plan.form == "homogeneous":
        return [(plan.nodes, site.trainer)]
    return [(plan.trainer.nodes, site.trainer), (plan.searcher.nodes, site.searcher)]


def _size(partition: Mapping[str, str], shares: list[int]) -> Finding | None:
    """MaxNodes holds for each component, TotalNodes for all of them at once."""
    for key, nodes in (("TotalNodes", sum(shares)), ("MaxNodes", max(shares))):
        if partition.get(key, "").isdigit() and nodes > int(partition[key]):
            return problem(
                "nodes",
                f"{nodes} nodes are asked of partition {partition['PartitionName']}, but it has "
                f"{key}={partition[key]}; the job would stay queued for ever",
                "ask for fewer --nodes, or change the site key partition",
            )
    return None


def check_preemption(facts: Facts) -> Finding | None:
    """What happens to a job of ours when a more important one wants its nodes."""
    asked = facts.slurm
    if asked is None:
        return None
    return worst([_preemption(asked, partition, facts.site) for partition in facts.partitions])


def _preemption(asked: SlurmFacts, partition: Mapping[str, str], site: Site) -> Finding:
    title, name = "preemption", partition["PartitionName"]
    kind, mode = asked.settings.get("PreemptType", "preempt/none"), partition.get("PreemptMode", "OFF")
    grace = int(partition.get("GraceTime", "0"))
    if kind == "preempt/none" or mode == "OFF":
        return ok(title, f"{name}: jobs are never preempted")
    if "SUSPEND" in mode or mode == "GANG":
        return warning(
            title,
            f"{name}: PreemptMode={mode} stops the ranks of a job where they stand, maybe not all of them",
            "choose a partition that requeues; a rank that stays silent ends the step after a timeout",
        )
    if kind == "preempt/qos":
        return ok(title, f"{name}: by QOS; grace: sacctmgr show qos format=name,preemptmode,gracetime")
    if grace < site.signal_seconds:
        late = "ends the job for good" if mode == "CANCEL" else "is lost, and steps are done again"
        return warning(
            title,
            f"{name}: a preempted job has {grace} s (GraceTime) for its checkpoint, a time limit leaves it "
            f"{site.signal_seconds} s (signal_seconds); a checkpoint that takes longer {late}",
            "set checkpoint.every so that little is lost, or choose another partition",
        )
    if "preempt_send_user_signal" not in asked.settings.get("SlurmctldParameters", ""):
        return warning(
            title,
            "SlurmctldParameters lacks preempt_send_user_signal, so preemption comes as SIGTERM to all ranks",
            "they take that too once they are up; ask the administrators for the parameter",
        )
    return ok(title, f"{name}: PreemptMode={mode}, {grace} s of grace for a checkpoint")
