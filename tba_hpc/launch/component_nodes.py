"""Chooses the nodes that each component of a het job may get, so that all ranks form one MPI world.

srun and PMIx both number the nodes of a het job's step. Their numbers agree only if all nodes of component 0
come before those of component 1 in Slurm's order of names (``docs/slurm.md``). Before a job is submitted, the
list of nodes in this order is therefore cut in two. Component 0 excludes the nodes after the cut, and
component 1 those before it. Either role may be component 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tba_hpc.config import ConfigError
from tba_hpc.core.wording import count
from tba_hpc.launch.plan import Component, ComponentSite, Plan, Site
from tba_hpc.run.slurm_queue import ask, fields, mebibytes

LAYOUT = "%N|%R|%t|%c|%m|%f|%G"
"""Format of sinfo's output: name, partition, state, cores, memory in MiB, features and GPUs of a node."""

GONE = re.compile(r"down|drain|drng|fail|err|unk|inval|\*$")
"""Pattern of the states of nodes that are unavailable for long."""

CHOOSES_NODES = re.compile(r"^(-w|--nodelist|-F|--nodefile|-C|--constraint|--contiguous)\b")
"""Pattern of the sbatch options with which users choose nodes themselves."""

EXCLUDES = re.compile(r"^(?:-x\s*|--exclude[=\s]\s*)(\S+)")
"""Pattern of the sbatch option that excludes nodes, with the list of these nodes."""

GPU_TYPE = re.compile(r"(?:gpu:|gpus-per-node=|gpus=)([A-Za-z]\w*):")
"""Pattern of a request for GPUs, with their type."""

RESERVES = re.compile(r"^--reservation[=\s]\s*(\S+)")
"""Pattern of the sbatch option that names a reservation, with the name."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a partition, as sinfo lists it.

    up: whether the node is in service, be it idle or busy. idle: whether a job can get it at once. cpus:
    number of cores. memory: size in MiB. gpus: number of GPUs by type; the type is "" if sinfo names none.
    """

    name: str
    partition: str
    up: bool
    idle: bool
    cpus: int
    memory: int
    features: frozenset[str]
    gpus: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of an ordered list of nodes between two roles, 0 (trainer) and 1 (searcher).

    first: the role that gets the nodes before the cut. leave: for each role, the nodes on the other side of
    the cut that it must exclude, in the order of the list.
    """

    first: int
    leave: tuple[tuple[str, ...], tuple[str, ...]]


def cut(
    order: Sequence[str],
    needed: tuple[int, int],
    fit: tuple[frozenset[str], frozenset[str]],
    *,
    up: frozenset[str],
    idle: frozenset[str],
) -> Cut | None:
    """Divide the nodes in ``order`` between two roles; return None if no cut leaves enough for both.

    needed: number of nodes that each role needs. fit: nodes that suit each role. up: nodes in service. idle:
    nodes that a job can get at once.

    A cut that lets both roles start at once is preferred. Cuts that are equal in this are compared by a ratio
    for each role: nodes in service on its side of the cut, divided by nodes that it needs. The cut whose
    smaller ratio is the largest is chosen. Ties are decided by the same ratio of all nodes, then by the
    number of nodes that can be used, and at last in favour of role 0 before the cut.
    """
    best: tuple[tuple[float, ...], int, int] = ((), 0, 0)
    for first in (0, 1):
        roles = (first, 1 - first)
        # For each position of the cut, the numbers of nodes on both sides: idle ones, those up, and all.
        sides = [
            _sides(order, *(fit[role] & kind for role in roles)) for kind in (idle, up, frozenset(order))
        ]
        for place in range(len(order) + 1):
            idle_ratio, up_ratio, ratio = (
                min(here / needed[role] for here, role in zip(side[place], roles, strict=True))
                for side in sides
            )
            score = (idle_ratio >= 1, up_ratio, ratio, sum(sides[-1][place]))
            if ratio >= 1 and score > best[0]:
                best = (score, first, place)
    if not best[0]:
        return None
    _, first, place = best
    beyond = (order[place:], order[:place])
    leave = [tuple(node for node in beyond[role != first] if node in fit[role]) for role in (0, 1)]
    return Cut(first, (leave[0], leave[1]))


def _sides(order: Sequence[str], first: frozenset[str], second: frozenset[str]) -> list[tuple[int, int]]:
    """Count, for each position of a cut, the nodes of ``first`` before and those of ``second`` after it."""
    before = accumulate((node in first for node in order), initial=0)
    total = sum(node in second for node in order)
    gone = accumulate((node in second for node in order), initial=0)
    return [(here, total - there) for here, there in zip(before, gone, strict=True)]


def _has(features: frozenset[str], constraint: str) -> bool:
    """Return whether a node with these features meets an sbatch constraint.

    Only names joined by ``&``, ``,`` or ``|`` are understood. For any other constraint the result is True.
    """
    if not re.fullmatch(r"[\w.:-]+([&,|][\w.:-]+)*", constraint):
        return True
    return any(set(re.split("[&,]", choice)) <= features for choice in constraint.split("|"))


# --- Slurm ---


def separate_nodes(plan: Plan, site: Site) -> Plan:
    """Return the plan, with the nodes that each component of a het job must exclude.

    The plan is returned unchanged if its job is not a het job, if the site's sbatch_options choose nodes, or
    if sinfo lists too few nodes. Raises ConfigError if no division of the nodes leaves enough for both
    components, and SlurmError if Slurm does not answer.
    """
    if plan.form != "het" or any(map(CHOOSES_NODES.match, site.sbatch_options)):
        return plan
    nodes, default = _nodes(ask("sinfo", "--noheader", "--Node", "--all", f"--format={LAYOUT}|%P"))
    fit = (
        _fit(nodes, plan.trainer, site, site.trainer, default),
        _fit(nodes, plan.searcher, site, site.searcher, default),
    )
    needed, order = (plan.trainer.nodes, plan.searcher.nodes), _in_order(fit[0] | fit[1])
    if len(order) < sum(needed) or any(len(fit[role]) < needed[role] for role in (0, 1)):
        return plan  # too few, as far as is known here; Slurm decides
    up, idle = (frozenset(node.name for node in nodes if getattr(node, kind)) for kind in ("up", "idle"))
    found = cut(order, needed, fit, up=up, idle=idle)
    if found is None:
        names = [own.partition or site.partition or "default" for own in (site.trainer, site.searcher)]
        raise ConfigError(
            f"{count(plan.trainer.nodes, 'trainer node')} of partition {names[0]} and "
            f"{count(plan.searcher.nodes, 'searcher node')} of partition {names[1]} cannot be chosen so that "
            "the names of one role all come before those of the other, as one MPI world over a het job needs:"
            " ask for fewer --nodes, or use one partition and --homogeneous"
        )
    leave = [_excluded(site, names) for names in found.leave]
    return replace(
        plan,
        trainer=replace(plan.trainer, exclude=leave[0]),
        searcher=replace(plan.searcher, exclude=leave[1]),
        first="searcher" if found.first else "trainer",
    )


def _excluded(site: Site, beyond: Sequence[str]) -> str:
    """Return the value of a component's ``--exclude``: the nodes ``beyond`` the cut and the site's own.

    It is "" if ``beyond`` is empty, since the site's own option then suffices.
    """
    if not beyond:
        return ""
    names = ask("scontrol", "show", "hostlist", ",".join(beyond)).strip()
    return ",".join(filter(None, (_option(EXCLUDES, site.sbatch_options), names)))


def _option(pattern: re.Pattern[str], options: Sequence[str]) -> str:
    """Return the value of the last matching option, which is the one that sbatch obeys; "" for none."""
    return next((match[1] for option in reversed(options) if (match := pattern.match(option))), "")


def _fit(
    nodes: Sequence[Node], component: Component, site: Site, own: ComponentSite, default: str
) -> frozenset[str]:
    """Return the names of the nodes that a component may get, as far as sinfo and the site's options show.

    own: the component's part of the site file. default: name of the cluster's default partition.
    """
    partitions = (own.partition or site.partition or default).split(",")
    cpus = component.ranks_per_node * component.cpus_per_rank
    memory = mebibytes(own.memory or site.memory or "0")
    request = own.gpu_request or site.gpu_request or ""
    kind, gpus = re.search(GPU_TYPE, request), site.gpus_per_node if request else 0
    names = {
        node.name
        for node in nodes
        if node.partition in partitions
        and node.cpus >= cpus
        and node.memory >= memory
        and (node.gpus.get(kind[1], 0) if kind else sum(node.gpus.values())) >= gpus
        and _has(node.features, own.constraint or site.constraint or "")
    }
    if reservation := _option(RESERVES, site.sbatch_options):
        shown = fields(ask("scontrol", "--oneliner", "show", "reservation", reservation))
        names &= {*_expanded(shown.get("Nodes", ""))}
    excluded = _option(EXCLUDES, site.sbatch_options)
    return frozenset(names) - frozenset(_expanded(excluded) if excluded else ())


def _in_order(names: frozenset[str]) -> list[str]:
    """Sort names of nodes in Slurm's order."""
    return _expanded(ask("scontrol", "show", "hostlistsorted", ",".join(names)).strip()) if names else []


def _expanded(listed: str) -> list[str]:
    """Expand a node list in Slurm's notation, such as ``node[1-3]``, to names."""
    return ask("scontrol", "show", "hostnames", listed).split()


def _nodes(text: str) -> tuple[list[Node], str]:
    """Parse sinfo's output; return the nodes, and the name of the default partition or "".

    Each line holds the fields of LAYOUT and then the partition's name once more, with "*" if it is the
    default.
    """
    rows = [line.rsplit("|", 7) for line in text.splitlines() if line.count("|") >= 7]
    default = next((row[1] for row in rows if row[7].endswith("*")), "")
    return [_node(row) for row in rows], default


def _node(row: Sequence[str]) -> Node:
    name, partition, state, cpus, memory, features, gres, _ = row
    gpus: dict[str, int] = {}
    for kind, number in re.findall(r"gpu:(?:([A-Za-z][^:,()]*):)?(\d+)", gres):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    return Node(
        name=name,
        partition=partition,
        up=not GONE.search(state),
        idle=state.rstrip("~#!%$@^-+") == "idle",
        cpus=int(cpus.rstrip("+")),
        memory=int(memory.rstrip("+")),
        features=frozenset(features.split(",")),
        gpus=gpus,
    )
