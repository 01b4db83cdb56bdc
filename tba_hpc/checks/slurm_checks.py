"""What Slurm says of a cluster, and what of that would hurt a run.

Apart from ``SlurmFacts.ask`` it runs nothing: the rules are functions of the recorded texts and a site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tba_hpc.checks.commands import ask
from tba_hpc.checks.findings import Finding, ok, problem, warning
from tba_hpc.launch.plan import ComponentSite, Plan, Site, slurm_seconds
from tba_hpc.launch.scontrol import fields, mebibytes

OLDEST = (20, 2)
"""First version of Slurm that knows ``--het-group``."""

CRED_EXPIRE = 120
"""Seconds that a requeued job waits at least, where the cluster does not say."""

BACKFILL_SECONDS = 30
"""Seconds between two looks of the backfill scheduler, where the cluster does not say."""


class SlurmError(RuntimeError):
    """Slurm does not answer; the message is one sentence with its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """What a cluster says of itself.

    settings: ``scontrol show config``. partitions: their fields by name. mpi: ``srun --mpi=`` plugins.
    """

    settings: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    mpi: frozenset[str]

    @classmethod
    def ask(cls) -> SlurmFacts:
        """Ask the cluster that this machine belongs to. Raises SlurmError."""
        return cls(
            settings=parse_settings(_ask("scontrol", "show", "config")),
            partitions=parse_partitions(_ask("scontrol", "--oneliner", "--all", "show", "partition")),
            mpi=parse_mpi(_ask("srun", "--mpi=list")),
        )

    def partition(self, name: str | None) -> Mapping[str, str] | None:
        """A partition, or the default one; None where there is none of that name."""
        if name:
            return self.partitions.get(name)
        return next((p for p in self.partitions.values() if p.get("Default") == "YES"), None)

    def used(self, site: Site) -> list[Mapping[str, str]]:
        """The partitions that a job on ``site`` would use; Slurm itself refuses those that there are not."""
        roles = (site.trainer, site.searcher) if site.hetjob else (site.trainer,)
        names = dict.fromkeys(role.partition or site.partition for role in roles)
        return [found for name in names if (found := self.partition(name))]

    def number(self, setting: str, key: str, default: int) -> int:
        """``key=7`` among the comma-separated words of a setting."""
        match = re.search(rf"\b{key}=(\d+)", self.settings.get(setting, ""))
        return int(match[1]) if match else default


def _ask(*command: str) -> str:
    """What a command of Slurm prints; old versions list plugins on standard error. Raises SlurmError."""
    answer = ask(*command)
    if answer.failed:
        raise SlurmError(f"'{' '.join(command)}' failed: {' '.join(answer.text.split())}")
    return answer.text


def parse_settings(text: str) -> dict[str, str]:
    """``Key   = value`` lines."""
    return {key: value.strip() for key, value in re.findall(r"^(\S+)\s*=(.*)$", text, re.MULTILINE)}


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """One line per partition."""
    found = [fields(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {partition["PartitionName"]: partition for partition in found}


def parse_mpi(text: str) -> frozenset[str]:
    """The plugins, one a line, and the versions of pmix, which are plugins too."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    versions = [line.partition("available:")[2].replace(",", " ").split() for line in lines]
    return frozenset(line for line in lines if re.fullmatch(r"\w+", line)).union(*versions)


# --- Rules that need no partition ---


def check_version(facts: SlurmFacts, site: Site) -> Finding:
    """Whether this Slurm knows the form in which we start het jobs."""
    text = facts.settings.get("SLURM_VERSION", "0")
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if site.hetjob and version < OLDEST:
        found = f"version {text} has no srun --het-group"
        return problem("Slurm version", found, "set hetjob: false in the site file")
    return ok("Slurm version", f"{text}, cluster {facts.settings.get('ClusterName', '?')}")


def check_mpi(facts: SlurmFacts, site: Site, library: str) -> Finding:
    """Whether the site's ``mpi`` is there, and fits the MPI library that ranks load (empty: not known)."""
    there = ", ".join(sorted(facts.mpi - {"none"})) or "none"
    fits = plugin_for(library)
    if site.mpi is None:
        return _check_default_mpi(facts, library, fits)
    if site.mpi not in facts.mpi:
        better = fits if fits in facts.mpi else "one of them"
        return problem(
            "MPI plugin",
            f"srun has no --mpi={site.mpi}, only: {there}",
            f"set mpi: {better} in the site file",
        )
    if fits and fits not in site.mpi:  # pmix_v5 and pspmix speak PMIx, too
        return problem(
            "MPI plugin",
            f"mpi: {site.mpi} is not for {library}, which mpi4py loads here: every rank would be alone",
            f"set mpi: {fits} in the site file" + ("" if fits in facts.mpi else f" (srun has: {there})"),
        )
    return ok("MPI plugin", f"srun has --mpi={site.mpi}" + (f", as {library} wants it" if library else ""))


def _check_default_mpi(facts: SlurmFacts, library: str, fits: str) -> Finding:
    """Whether the plugin that srun takes by itself fits the MPI library."""
    default = facts.settings.get("MpiDefault", "none")
    if fits and fits not in default:
        return warning(
            "MPI plugin",
            f"the site names no mpi, and MpiDefault={default} is not for {library}, which mpi4py loads here",
            f"set mpi: {fits} in the site file, unless SLURM_MPI_TYPE is set for all users",
        )
    return ok("MPI plugin", f"left to the cluster (MpiDefault={default})")


def check_gpu_request(site: Site) -> list[Finding]:
    """What to know where a job counts on GPUs without asking for a number of them."""
    requests = [own.gpu_request or site.gpu_request or "" for own in (site.trainer, site.searcher)]
    if not site.gpus_per_node or all("{gpus}" in request for request in requests):
        return []
    found = (
        f"gpu_request: {site.gpu_request or 'null'} asks for no number of GPUs: a job counts on all "
        f"{site.gpus_per_node} of each node (gpus_per_node)"
    )
    if site.exclusive or any("--exclusive" in option for option in (*site.sbatch_options, *requests)):
        return [ok("GPU request", f"{found}, which it has alone")]
    return [warning("GPU request", found, "set exclusive: true, unless nodes are given whole anyway")]


def check_variables(site: Site, environment: Mapping[str, str]) -> list[Finding]:
    """Whether a job will know the variables that values of the site hold; the nodes may know others."""
    return [
        warning(
            "environment",
            f"{name} is not set here, but the site key {key} holds it",
            "unless a line of setup, a module or the nodes set it, the job will refuse to start",
        )
        for key, names in site.variables.items()
        for name in names
        if name not in environment and not name.startswith("SLURM_")
    ]


def plugin_for(library: str) -> str:
    """The plugin by which ranks with this MPI library find each other; empty for no library."""
    families = {"Open MPI": "pmix", "CRAY": "cray_shasta", "": "pmi2"}
    return next(plugin for name, plugin in families.items() if name in library) if library else ""


def check_het_jobs(facts: SlurmFacts, site: Site) -> Finding:
    """Whether het jobs would ever start."""
    if not site.hetjob:
        return ok("het jobs", "not used (hetjob: false): one allocation holds both roles")
    scheduler = facts.settings.get("SchedulerType", "")
    if scheduler != "sched/backfill":
        return problem(
            "het jobs",
            f"SchedulerType={scheduler}, and only sched/backfill starts them",
            "set hetjob: false in the site file",
        )
    if switch := re.search(r"disable_het(?:ero|job)_steps", facts.settings.get("SchedulerParameters", "")):
        return problem(
            "het jobs",
            f"SchedulerParameters has {switch[0]}, so that no srun spans two components",
            "set hetjob: false in the site file",
        )
    pause = facts.number("SchedulerParameters", "bf_interval", BACKFILL_SECONDS)
    return ok("het jobs", f"started by backfill, which looks every {pause} s")


def check_requeue(facts: SlurmFacts, site: Site) -> Finding:
    """Whether a job may go back to the queue by itself."""
    if not site.requeue:
        return ok("requeue", "not used (requeue: false): submit again to go on after a stop")
    if facts.settings.get("JobRequeue") == "0":
        return warning(
            "requeue",
            "JobRequeue=0: this cluster requeues only jobs that ask for it, which some sites forbid",
            "ours ask; if 'scontrol show job' still says Requeue=0, set requeue: false in the site file and "
            "submit again after each stop",
        )
    wait = facts.number("AuthInfo", "cred_expire", CRED_EXPIRE)
    return ok("requeue", f"allowed; a requeued job starts again after {wait} s at the earliest (cred_expire)")


def check_taken(job: Mapping[str, str], site: Site) -> list[Finding]:
    """Whether Slurm took a job, given its fields, with the leave to requeue that it asked for."""
    if not site.requeue or job.get("Requeue") != "0":
        return []
    return [
        warning(
            "requeue",
            "Slurm took the job with Requeue=0 although it asks to be requeued, so its first stop ends it",
            "set requeue: false in the site file where the site forbids it; then submit again after a stop",
        )
    ]


def tell_settings(facts: SlurmFacts) -> Finding:
    """What is good to know when something else goes wrong; scripts of ours rely on none of it."""
    names = ("KillWait", "KillOnBadExit", "MpiDefault", "PrologFlags", "MaxMemPerNode")
    values = [f"{name} {facts.settings[name]}" for name in names if name in facts.settings]
    return ok("settings", ", ".join(values).replace("(null)", "none"))


# --- Rules about a partition ---


def check_partition(partition: Mapping[str, str], site: Site) -> Finding:
    """Whether it takes jobs as long and as large as the site asks for; Slurm would queue others for ever."""
    name, longest = partition["PartitionName"], partition.get("MaxTime", "UNLIMITED")
    title = f"partition {name}"
    if partition.get("State", "UP") != "UP":
        found = f"partition {name} is {partition['State']}, so that jobs stay queued"
        return warning(title, found, "wait, or choose another partition")
    if site.seconds > slurm_seconds(longest):
        return problem(
            title,
            f"time: {site.time} is beyond MaxTime={longest} of partition {name}; jobs would wait for ever",
            f"set time: {longest} in the site file, or choose another partition",
        )
    most = partition.get("MaxMemPerNode", "UNLIMITED")
    if most.isdigit() and mebibytes(site.memory or "0") > int(most):
        return problem(
            title,
            f"memory: {site.memory} is beyond MaxMemPerNode={most} (MiB) of partition {name}",
            f"set memory: {most}M in the site file, or choose another partition",
        )
    return ok(title, f"{partition.get('TotalNodes', '?')} nodes, jobs up to {longest}")


def check_nodes(facts: SlurmFacts, site: Site, plan: Plan) -> list[Finding]:
    """Whether the partitions have as many nodes; Slurm would take a het job all the same, and queue it."""
    asked: dict[str, list[int]] = {}
    for nodes, own in _shares(site, plan):
        if partition := facts.partition(own.partition or site.partition):
            asked.setdefault(partition["PartitionName"], []).append(nodes)
    checked = [_check_size(facts.partitions[name], shares) for name, shares in asked.items()]
    return [finding for finding in checked if finding]


def _shares(site: Site, plan: Plan) -> list[tuple[int, ComponentSite]]:
    """Nodes of each component of the job, and what the component says for itself."""
    if plan.form == "homogeneous":
        return [(plan.nodes, site.trainer)]
    return [(plan.trainer.nodes, site.trainer), (plan.searcher.nodes, site.searcher)]


def _check_size(partition: Mapping[str, str], shares: list[int]) -> Finding | None:
    """MaxNodes holds for each component, TotalNodes for all of them at once."""
    for key, nodes in (("TotalNodes", sum(shares)), ("MaxNodes", max(shares))):
        if partition.get(key, "").isdigit() and nodes > int(partition[key]):
            return problem(
                f"partition {partition['PartitionName']}",
                f"{nodes} nodes are asked of partition {partition['PartitionName']}, but it has "
                f"{key}={partition[key]}; the job would stay queued for ever",
                "ask for fewer --nodes, or change the site key partition",
            )
    return None


def check_preemption(facts: SlurmFacts, partition: Mapping[str, str], site: Site) -> Finding:
    """What happens to a job of ours when a more important one wants its nodes."""
    title = f"preemption in {partition['PartitionName']}"
    kind = facts.settings.get("PreemptType", "preempt/none")
    mode = partition.get("PreemptMode", "OFF")
    if kind == "preempt/none" or mode == "OFF":
        return ok(title, "jobs are never preempted")
    if "SUSPEND" in mode or mode == "GANG":
        return warning(
            title,
            f"PreemptMode={mode} stops the ranks of a job where they stand, maybe not all of them",
            "choose a partition that requeues; a rank that stays silent ends the step after "
            "launch.timeout_seconds",
        )
    if kind == "preempt/qos":
        return ok(title, "by QOS; its grace: sacctmgr show qos format=name,preemptmode,gracetime")
    return _check_grace(facts, title, mode, int(partition.get("GraceTime", "0")), site)


def _check_grace(facts: SlurmFacts, title: str, mode: str, grace: int, site: Site) -> Finding:
    """Whether a preempted job has the time for a checkpoint."""
    if grace < site.signal_seconds:
        late = "ends the job for good" if mode == "CANCEL" else "is lost, and steps are done again"
        return warning(
            title,
            f"a preempted job has {grace} s (GraceTime) for its checkpoint, a time limit leaves it "
            f"{site.signal_seconds} s (signal_seconds); a checkpoint that takes longer {late}",
            "set checkpoint.every so that little is lost, or choose another partition",
        )
    if "preempt_send_user_signal" not in facts.settings.get("SlurmctldParameters", ""):
        return warning(
            title,
            "SlurmctldParameters lacks preempt_send_user_signal, so preemption comes as SIGTERM to all ranks",
            "they take that too once they are up; ask the administrators for the parameter",
        )
    return ok(title, f"PreemptMode={mode}, {grace} s of grace for a checkpoint")


def examine(facts: SlurmFacts, site: Site, library: str) -> list[Finding]:
    """Every rule. library: the MPI that ranks load, as it calls itself; empty where it is not known."""
    partitions = facts.used(site)
    return [
        check_version(facts, site),
        check_mpi(facts, site, library),
        check_het_jobs(facts, site),
        check_requeue(facts, site),
        *check_gpu_request(site),
        *(check_partition(partition, site) for partition in partitions),
        *(check_preemption(facts, partition, site) for partition in partitions),
        tell_settings(facts),
    ]
