"""Choice of the nodes that each component of a het job may have, so that they always form one MPI world.

srun and PMIx number the nodes of a het step alike only if all nodes of component 0 come before those of
component 1 in Slurm's own order of names (``docs/slurm.md``). Before a job is submitted, the nodes are
therefore cut in two by name, and each component excludes those beyond the cut. Either role may come first.
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
"""Fields that sinfo prints per node and partition: name, partition, state, cores, MiB, features, GPUs."""

GONE = re.compile(r"down|drain|drng|fail|err|unk|inval|\*$")
"""Pattern of the states of nodes that no job will get soon."""

CHOOSES_NODES = re.compile(r"^(-w|--nodelist|-F|--nodefile|-C|--constraint|--contiguous)\b")
"""Options of sbatch with which users choose nodes themselves."""

EXCLUDES = re.compile(r"^(?:-x\s*|--exclude[=\s]\s*)(\S+)")
GPU_TYPE = re.compile(r"(?:gpu:|gpus-per-node=|gpus=)([A-Za-z]\w*):")
RESERVES = re.compile(r"^--reservation[=\s]\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Node:
    """A node as sinfo lists it in one partition. up: whether a job may get it soon; idle: at once."""

    name: str
    partition: str
    up: bool
    idle: bool
    cpus: int
    memory: int
    features: frozenset[str]
    gpus: Mapping[str, int]
    """Number of GPUs by type."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of the nodes in two. first: index of the request with the nodes before the cut, as component 0.
    leave: nodes that each request must not get, in Slurm's order."""

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
    """Find the best place to cut nodes in Slurm's ``order``; None if no place leaves enough.

    needed: number of nodes of each of two requests. fit: nodes that each could have. The best cut lets both
    requests start at once on idle nodes. Next come cuts that leave both sides the most spare nodes, as a
    multiple of those needed. Of equal cuts, one with the first request first wins.
    """
    best: tuple[tuple[float, ...], int, int] = ((), 0, 0)
    for first in (0, 1):
        roles = (first, 1 - first)
        # Nodes on each side for every place of the cut: idle ones, those that are up, and all.
        sides = [
            _sides(order, *(fit[role] & kind for role in roles)) for kind in (idle, up, frozenset(order))
        ]
        for place in range(len(order) + 1):
            spare = [
                min(here / needed[role] for here, role in zip(side[place], roles, strict=True))
                for side in sides
            ]
            score = (float(spare[0] >= 1), *spare[1:], sum(sides[-1][place]))
            if spare[-1] >= 1 and score > best[0]:
                best = (score, first, place)
    if not best[0]:
        return None
    _, first, place = best
    beyond = (order[place:], order[:place])
    leave = [tuple(node for node in beyond[role != first] if node in fit[role]) for role in (0, 1)]
    return Cut(first, (leave[0], leave[1]))


def _sides(order: Sequence[str], first: frozenset[str], second: frozenset[str]) -> list[tuple[int, int]]:
    """Count, for each place of a cut, the first set's nodes before it and the second set's nodes after it."""
    before = accumulate((node in first for node in order), initial=0)
    total = sum(node in second for node in order)
    gone = accumulate((node in second for node in order), initial=0)
    return [(here, total - there) for here, there in zip(before, gone, strict=True)]


def _has(features: frozenset[str], constraint: str) -> bool:
    """Return whether features meet a constraint of names joined by & and |; True if it has another form."""
    if not re.fullmatch(r"[\w.:-]+([&,|][\w.:-]+)*", constraint):
        return True
    return any(set(re.split("[&,]", choice)) <= features for choice in constraint.split("|"))


# --- Slurm ---


def separate_nodes(plan: Plan, site: Site) -> Plan:
    """Return the plan, with the nodes that each component of a het job must exclude.

    If the site's sbatch_options choose nodes, the plan stays as it is. Raises ConfigError if no cut of the
    possible nodes leaves enough for both components, and SlurmError if Slurm does not answer.
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
        return plan  # too few for any cut: Slurm itself refuses that, or knows better
    up, idle = (frozenset(node.name for node in nodes if getattr(node, kind)) for kind in ("up", "idle"))
    found = cut(order, needed, fit, up=up, idle=idle)
    if found is None:
        names = [own.partition or site.partition or "default" for own in (site.trainer, site.searcher)]
        raise ConfigError(
            f"{count(plan.trainer.nodes, 'trainer node')} of partition {names[0]} and "
            f"{count(plan.searcher.nodes, 'searcher node')} of partition {names[1]} cannot be chosen so that "
            "the names of one role all come before those of the other, as one MPI world over a het job needs:"
            " ask for fewer --nodes, or for one partition and --homogeneous"
        )
    leave = [_excluded(site, names) for names in found.leave]
    return replace(
        plan,
        trainer=replace(plan.trainer, exclude=leave[0]),
        searcher=replace(plan.searcher, exclude=leave[1]),
        first="searcher" if found.first else "trainer",
    )


def _excluded(site: Site, beyond: Sequence[str]) -> str:
    """Return all nodes that a component excludes, the site's included; empty if none lie beyond the cut."""
    if not beyond:
        return ""
    names = ask("scontrol", "show", "hostlist", ",".join(beyond)).strip()
    return ",".join(filter(None, (_option(EXCLUDES, site.sbatch_options), names)))


def _option(pattern: re.Pattern[str], options: Sequence[str]) -> str:
    """Return the value of an option; the last one counts, as for sbatch."""
    return next((match[1] for option in reversed(options) if (match := pattern.match(option))), "")


def _fit(
    nodes: Sequence[Node], component: Component, site: Site, own: ComponentSite, default: str
) -> frozenset[str]:
    """Return the names of nodes that satisfy a component's known requirements."""
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
    """Sort names in Slurm's own order."""
    return _expanded(ask("scontrol", "show", "hostlistsorted", ",".join(names)).strip()) if names else []


def _expanded(listed: str) -> list[str]:
    """Expand a node list in Slurm's notation to names."""
    return ask("scontrol", "show", "hostnames", listed).split()


def _nodes(text: str) -> tuple[list[Node], str]:
    """Parse sinfo's output in LAYOUT; return the nodes and the name of the default partition, or ""."""
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
