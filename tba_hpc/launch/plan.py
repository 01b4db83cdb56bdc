"""Plans a Slurm job: how many of its nodes and ranks train, and how many search. Reads site files.

A site file describes a Slurm cluster in YAML. ``sbatch.py`` turns a Plan into a batch script. This module
neither calls Slurm nor writes files.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tba_hpc.config import Config, ConfigError, Section, explain, read_tree
from tba_hpc.core.types import Role
from tba_hpc.core.wording import count

Form = Literal["het", "homogeneous"]
"""Form of a job: a het job, in which each component has one role, or one allocation for both roles."""

Runtime = Literal["apptainer", "singularity", "podman-hpc", "shifter", "pyxis", "plain"]

COUNTED = re.compile(r"--(gres|gpus)\b|-G\b")
"""Pattern of options that request a number of GPUs. If they name no number, they request one GPU."""

NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
"""Pattern of ``$NAME`` and ``${NAME}``. ``${NAME:-default}`` does not match, since NAME may be unset."""

WALL_TIME, WALL_TIMES = r"^(\d+-)?\d+(:\d{2}){0,2}$", ["24:00:00", "1-0"]
"""Pattern of Slurm's wall times, and examples: one day, written in two ways."""

REQUESTS = {"partition": "p", "time": "t", "qos": "q", "account": "A"}
"""Options of sbatch that are site keys, too, with their short forms."""

REQUEUE_SECONDS = 30
"""Seconds before the end of a job that are reserved for its requeue."""

EARLY_SIGNAL_SECONDS = 60
"""Seconds by which Slurm may ask for a checkpoint earlier than requested."""


class Container(Section):
    """Container in which all programs of this project run, for clusters without a suitable environment.

    Its programs are the ranks, and the commands ``tba`` in the batch script. The batch script itself,
    ``scontrol``, ``squeue`` and ``srun`` run outside. ``$NAME`` in a value is expanded on the first node.
    """

    runtime: Runtime = "apptainer"
    """Runtime that starts programs in the container. ``pyxis`` adds options to srun. ``plain`` puts the words
    of ``arguments`` before each command. The other runtimes put their own command there."""
    image: str | None = Field(None, min_length=1)
    """Path of the image, which every node must be able to read, or its name if the runtime knows images by
    name. Not with ``plain``."""
    binds: tuple[str, ...] = ()
    """Folders to mount in the container, for models and data: ``SOURCE:TARGET``, or ``SOURCE`` alone (not
    with ``shifter``) to keep its path. The run directory is always mounted, except with ``plain``, and with
    ``shifter``, which mounts what its administrators chose."""
    arguments: tuple[str, ...] | None = None
    """Further arguments of the runtime. null: on nodes with GPUs, the ones that make NVIDIA's driver
    available in the container, ``--nv``, ``--gpu`` (podman-hpc) or ``--module=gpu`` (shifter). For AMD's GPUs
    write ``--rocm``."""

    @model_validator(mode="after")
    def _possible(self) -> Container:
        if self.runtime == "plain" and (self.image or self.binds or not self.arguments):
            raise ValueError(
                "container.runtime=plain only puts the words of container.arguments before each command: set "
                "container.arguments, and write the image and the binds there"
            )
        if self.runtime != "plain" and not self.image:
            raise ValueError(f"container.runtime={self.runtime} needs an image: set container.image")
        return self


class ComponentSite(Section):
    """Requests for the nodes of one role that differ from the site's. null: the site's value."""

    partition: str | None = None
    """Partition (queue)."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features (``sbatch --constraint``)."""
    memory: str | None = None
    """Memory per node (``sbatch --mem``)."""
    memory_per_cpu: str | None = None
    """Memory per core (``sbatch --mem-per-cpu``)."""
    gpu_request: str | None = None
    """Option that requests GPUs."""


class Site(Section):
    """Settings of a Slurm cluster. Each file in ``slurm/sites`` describes a cluster."""

    partition: str | None = None
    """Partition (queue); null: the cluster's default."""
    account: str | None = None
    """Account (project) to charge; null: your default account."""
    qos: str | None = None
    """Quality of service; null: the cluster's default."""
    constraint: str | None = None
    """Node features (``sbatch --constraint``)."""
    gpus_per_node: int = Field(4, ge=0)
    """GPUs per node. A job uses all GPUs of its nodes. 0: a cluster without GPUs."""
    ranks_per_node: int = Field(2, ge=1)
    """Ranks per node on a cluster without GPUs. For both roles on one node, at least 2."""
    gpu_request: str | None = "--gres=gpu:{gpus}"
    """Option that requests GPUs, such as ``--gres=gpu:a100:{gpus}`` or ``--gpus-per-node={gpus}``, where
    ``{gpus}`` stands for gpus_per_node. null: jobs get all GPUs of their nodes without requesting them."""
    cpus_per_node: int = Field(8, ge=1)
    """CPU cores that a job requests per node. The ranks of a node share them equally."""
    memory: str | None = "0"
    """Memory per node (``sbatch --mem``). 0: all memory. null: the cluster's default, also for job steps."""
    memory_per_cpu: str | None = None
    """Memory per core, instead of ``memory`` (``sbatch --mem-per-cpu``)."""
    exclusive: bool = False
    """Request whole nodes (``sbatch --exclusive``)."""
    time: str = Field("24:00:00", pattern=WALL_TIME, examples=WALL_TIMES)
    """Wall time of a job. The job of a run that needs more time requeues itself."""
    signal_seconds: int = Field(300, ge=2 * REQUEUE_SECONDS)
    """Seconds before the end of the wall time at which the run is asked to checkpoint, at least 60. The last
    30 s are reserved for the requeue. Slurm may ask up to 60 s earlier."""
    requeue: bool = True
    """Let jobs requeue themselves. If false, submit the run again to resume it."""
    hetjob: bool = True
    """Use heterogeneous jobs, with separate nodes for each role. If false, one allocation holds both
    roles."""
    mpi: str | None = Field("pmix", pattern=r"^\w+$", examples=["pmix", "pmi2"])
    """Plugin with which srun starts MPI (``srun --mpi``): pmix (or pmix_v5, pspmix) for Open MPI, pmi2 for
    MPICH, cray_shasta for Cray MPICH. null: the cluster's default."""
    mpi_library: str = Field(
        "wheel", pattern=r"^(wheel|site|[/$].+)$", examples=["wheel", "site", "/path/of/libmpi.so"]
    )
    """MPI library that ranks load: ``wheel`` (the Open MPI that pip installed), ``site`` (the libmpi that the
    nodes find, for example through ``modules``), or the path of a library, which may contain ``$NAME``."""
    srun_arguments: tuple[str, ...] = ()
    """Additional arguments of the srun that starts the ranks."""
    sbatch_options: tuple[str, ...] = ()
    """Additional options of sbatch for the nodes of both roles, such as ``--exclude=node13``."""
    network_interface: str | None = None
    """Interface of the fast network, such as ib0 or hsn0, for NCCL, gloo and Open MPI's TCP. null: NCCL
    and gloo choose one. Open MPI then listens on all interfaces, or on none in a job of one node."""
    setup: tuple[str, ...] = ()
    """Shell lines that the batch script runs first, such as ``module use /my/modules`` or ``source
    /opt/conda/etc/profile.d/conda.sh``. All ranks get the variables that these lines export."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, in order."""
    venv: str | None = None
    """Virtual environment that all nodes see. The path may contain ``$NAME``. null: the Python that submits
    the job."""
    container: Container | None = None
    """Container in which all programs run; null: none."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict
    )
    """Environment variables of the job. ``$NAME`` in a value is expanded on the first node, where the
    variable must be set. Write ``${NAME:-}`` if it may be unset."""
    relaunches: int = Field(3, ge=0)
    """Number of restarts in a row, with neither a shard nor a checkpoint sealed between them, after which the
    job gives up."""
    trainer: ComponentSite = ComponentSite()
    """Requests for trainer nodes, or for all nodes if one allocation holds both roles."""
    searcher: ComponentSite = ComponentSite()
    """Requests for searcher nodes of het jobs, and for elastic searchers."""

    @property
    def seconds(self) -> float:
        """Wall time of the job, in seconds."""
        return slurm_seconds(self.time)

    @property
    def python(self) -> list[str]:
        """Command of the Python that jobs use: the site's venv's or container's, else this process's own."""
        return [sys.executable] if self.venv is None and self.container is None else ["python"]

    @property
    def mpi_option(self) -> list[str]:
        """Option of srun that names the MPI plugin; empty if the site names none."""
        return [f"--mpi={self.mpi}"] if self.mpi else []

    def memory_option(self, own: ComponentSite) -> list[str]:
        """Return the sbatch option that requests memory for a role, or none. own: the role's requests."""
        for part in (own, self):
            if part.memory_per_cpu:
                return [f"--mem-per-cpu={part.memory_per_cpu}"]
            if part.memory is not None:
                return [f"--mem={part.memory}"]
        return []

    def gpu_option(self, own: ComponentSite) -> list[str]:
        """Return the sbatch option that requests GPUs for a role, or none. own: the role's requests."""
        request = own.gpu_request or self.gpu_request
        return [request.format(gpus=self.gpus_per_node)] if request and self.gpus_per_node else []

    @property
    def unused(self) -> list[str]:
        """Requests for searcher nodes that a shared allocation ignores, such as ``searcher.qos=high``."""
        names = ComponentSite.model_fields
        ours = {name: getattr(self.trainer, name) or getattr(self, name) for name in names}
        theirs = self.searcher.model_dump(exclude_none=True)
        return [f"searcher.{name}={value}" for name, value in theirs.items() if value != ours[name]]

    @property
    def variables(self) -> dict[str, list[str]]:
        """Names of the variables in the values of site keys, by key. The first node must have all of them."""
        values = {f"environment.{key}": value for key, value in self.environment.items()}
        values |= {"venv": self.venv or "", "mpi_library": self.mpi_library}
        if box := self.container:
            values["container"] = " ".join([box.image or "", *box.binds, *(box.arguments or ())])
        names = {key: ["".join(found) for found in NAME.findall(value)] for key, value in values.items()}
        return {key: list(dict.fromkeys(found)) for key, found in names.items() if found}

    @property
    def seconds_to_train(self) -> float:
        """Wall time until the earliest moment at which the job may be asked to checkpoint, in seconds."""
        return self.seconds - self.signal_seconds - EARLY_SIGNAL_SECONDS

    @field_validator("time", mode="before")
    @classmethod
    def _not_a_number(cls, time: object) -> object:
        if isinstance(time, int):
            raise ValueError(f"time={time} is a number: quote it, as '1:20:00'")
        return time

    @model_validator(mode="after")
    def _possible(self) -> Site:
        if self.mpi == "cray_shasta" and self.hetjob:
            raise ValueError("mpi: cray_shasta does not support het jobs: set hetjob: false")
        if self.seconds_to_train <= 0:
            raise ValueError(
                f"signal_seconds={self.signal_seconds} leaves no time to train in a job of time={self.time}, "
                f"since Slurm may ask for a checkpoint {EARLY_SIGNAL_SECONDS} s earlier: raise time, or "
                f"lower signal_seconds (at least {2 * REQUEUE_SECONDS})"
            )
        if self.container and self.venv:
            raise ValueError(
                "container and venv exclude each other: remove venv, as an image has its own Python"
            )
        for request in (self.gpu_request, self.trainer.gpu_request, self.searcher.gpu_request):
            if self.gpus_per_node and request and "{gpus}" not in request and COUNTED.search(request):
                raise ValueError(
                    f"gpu_request={request} does not contain {{gpus}}: write {{gpus}} in place of the number"
                )
        if self.memory_per_cpu and self.memory is not None and "memory" in self.model_fields_set:
            raise ValueError(
                f"memory={self.memory} and memory_per_cpu={self.memory_per_cpu} exclude each other: drop one"
            )
        return self


def load_site(path: Path, options: Sequence[str] = (), **keys: object) -> Site:
    """Read a site file, or a shipped site by its name. ``keys`` override the values of the file.

    options: further options of sbatch, which override the file and ``keys``. They are added to the site key
    sbatch_options. Options of REQUESTS instead set the site keys of their names, even if the file has them
    under sbatch_options, so that checks see what the job requests. Raises ConfigError if the file is missing
    or a value is wrong.
    """
    tree = read_tree(path, "sites")
    try:
        site = Site.model_validate({**tree, **keys})
        given = site.sbatch_options
        changed = {**tree, **requested(given), **keys, **requested(options)}
        changed["sbatch_options"] = [*(option for option in given if not requested([option])), *options]
        # Like any option of sbatch, those that set site keys hold for both roles.
        both = dict.fromkeys(requested([*given, *options]).keys() & ComponentSite.model_fields.keys())
        for role in ("trainer", "searcher"):
            changed[role] = getattr(site, role).model_copy(update=both)
        return Site.model_validate(changed)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Site, noun='site')}") from None


def requested(options: Sequence[str]) -> dict[str, str]:
    """Return the site keys that options of sbatch set. ``--partition=low`` and ``-p low`` set partition.

    The last of several options for the same key counts. A wall time without a limit, such as UNLIMITED or 0,
    is left to sbatch.
    """
    found = {}
    for option in options:
        for key, short in REQUESTS.items():
            match = re.fullmatch(rf"(?:--{key}[=\s]\s*|-{short}\s*)(\S+)", option)
            if match and (key != "time" or _is_limit(match[1])):
                found[key] = match[1]
    return found


def _is_limit(time: str) -> bool:
    return bool(re.search(WALL_TIME, time)) and slurm_seconds(time) > 0


def slurm_seconds(time: str) -> float:
    """Convert a time limit of Slurm to seconds; infinity if it is not a number, such as ``UNLIMITED``.

    time: text of the form ``M`` (minutes), ``M:S``, ``H:M:S`` or ``D-H[:M[:S]]``.
    """
    if not time[:1].isdigit():
        return math.inf
    days, dash, clock = time.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return float(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Nodes and ranks of one role in a job.

    ranks_per_node: maximum number of ranks on a node. cpus_per_rank: number of CPU cores of each rank.
    exclude: nodes that this component of a het job must not get (``component_nodes.py``), as the value of
    ``sbatch --exclude``; "" for none.
    """

    role: Role
    nodes: int
    ranks: int
    ranks_per_node: int
    cpus_per_rank: int
    exclude: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Nodes and ranks of a job.

    nodes: number of all nodes. why: a description of the split, for the user. first: role of component 0 of a
    het job, whose nodes come first by name (``component_nodes.py``). remarks: empty, or a sentence on how
    many GPUs (on a cluster without GPUs: ranks) stay idle, and why.
    """

    form: Form
    nodes: int
    trainer: Component
    searcher: Component
    why: str
    first: Role = "trainer"
    remarks: tuple[str, ...] = ()

    @property
    def components(self) -> tuple[Component, Component]:
        """Components 0 and 1 of a het job: that of the role ``first``, then the other."""
        both = (self.trainer, self.searcher)
        return both if self.first == "trainer" else both[::-1]

    @property
    def overrides(self) -> list[str]:
        """Overrides of the run's config that set its numbers of ranks."""
        return [f"launch.trainers={self.trainer.ranks}", f"launch.searchers={self.searcher.ranks}"]


def refuse_rank_overrides(overrides: Sequence[str], config: Config, site: Site, split: Plan) -> None:
    """Raise ConfigError if overrides set numbers of ranks that are not those of the plan ``split``."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in ("launch.trainers", "launch.searchers") or override in split.overrides:
            continue
        if split.nodes > 1:
            raise ConfigError(
                f"--set {override} has no effect under Slurm, where the number of ranks follows from that of "
                "nodes: use --nodes and --trainer-nodes; the site file sets the number of ranks on a node"
            )
        units, engine = _units(config, site)
        each = f"; a searcher takes {engine}" if engine > 1 else ""
        raise ConfigError(
            f"--set {override} has no effect: on one node launch.trainers and launch.searchers count only if "
            f"they take all of its {count(units, _unit(site))}{each}: set both, so that they do"
        )


def plan(
    config: Config, site: Site, nodes: int, trainer_nodes: int | None = None, *, homogeneous: bool = False
) -> Plan:
    """Split the nodes of a job between the roles: ``trainer_nodes`` train, the rest search.

    nodes: number of nodes; both roles share a single one (``_within_a_node``). trainer_nodes: None means one
    node in four, as in the paper, but at least one. It may equal ``nodes`` if elastic searchers can join
    (launch.elastic). homogeneous: use one allocation even if the site has het jobs. Raises ConfigError for an
    impossible split.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is too few: ask for at least 1")
    units, engine = _units(config, site)
    alone = trainer_nodes == nodes and config.launch.elastic > 0
    if nodes == 1 and not alone:
        return _within_a_node(config, site, trainer_nodes, units, engine)
    how = "one in four, at least one" if trainer_nodes is None else "as asked"
    train = max(1, nodes // 4) if trainer_nodes is None else trainer_nodes
    if not (1 <= train < nodes or alone):
        raise ConfigError(
            f"--trainer-nodes {train} of --nodes {nodes} leaves no node for one of the roles: "
            f"use 1 to {nodes - 1}, or train on all nodes and let elastic searchers join (launch.elastic)"
        )
    trainer = _trainers(config, site, train, units)
    engines, search = units // engine, nodes - train
    searcher = replace(trainer, role="searcher", nodes=0, ranks=0, ranks_per_node=0)
    others = f"{count(config.launch.elastic, 'slot')} for elastic searchers"
    if search:
        searcher = _component("searcher", site, search, search * engines, engines)
        others = f"{count(search, 'node')} to search"
    most, prompts = train * units, config.train.prompts_per_step
    return _explained(
        Plan(
            form="het" if site.hetjob and search and not homogeneous else "homogeneous",
            nodes=nodes,
            trainer=trainer,
            searcher=searcher,
            why=f"{count(train, 'node')} to train ({how}) and {others}",
        ),
        site,
        idle=most - trainer.ranks,
        because=f"the trainer ranks must divide train.prompts_per_step={prompts}: --set "
        f"train.prompts_per_step={-(-prompts // most) * most} leaves none idle",
    )


def _trainers(config: Config, site: Site, nodes: int, units: int) -> Component:
    """Return the trainers' component, with as many ranks as can share the prompts of a step equally.

    Raises ConfigError if the ranks are fewer than the nodes. units: number of units of a node (``_units``).
    """
    ranks = _divisor(config, nodes * units)
    if ranks < nodes:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step} can be split over at most "
            f"{count(ranks, 'rank')}, fewer than the {nodes} trainer nodes: use --trainer-nodes {ranks}, or "
            f"a multiple of {nodes} for train.prompts_per_step"
        )
    return _component("trainer", site, nodes, ranks, units)


def _within_a_node(config: Config, site: Site, trainer_nodes: int | None, units: int, engine: int) -> Plan:
    """Split a single node between both roles.

    The config's numbers of ranks count if they take all units of the node. Otherwise at most one unit in four
    trains, but at least one.

    units, engine: as ``_units`` returns them. Raises ConfigError if the node is too small or
    ``trainer_nodes`` is not None.
    """
    if trainer_nodes is not None:
        raise ConfigError(
            f"--trainer-nodes {trainer_nodes} does not go with --nodes 1, where both roles share the node: "
            "remove the option, or let elastic searchers alone search (launch.elastic)"
        )
    ranks, searchers = config.launch.trainers, config.launch.searchers
    if ranks + searchers * engine != units or not searchers:
        ranks = _divisor(config, max(1, units // 4))
        searchers = (units - ranks) // engine
    if searchers < 1:
        more = ", or raise ranks_per_node in the site file"
        if site.gpus_per_node:
            more = ", or let both share it, by tba run in a batch script of your own (docs/slurm.md)"
        raise ConfigError(
            f"one node has room for {count(units, _unit(site))}, too few for a trainer and an engine of "
            f"generator.tensor_parallel={engine}: use --nodes 2{more}"
        )
    split = Plan(
        form="homogeneous",
        nodes=1,
        trainer=_component("trainer", site, 1, ranks, ranks + searchers),
        searcher=_component("searcher", site, 1, searchers, ranks + searchers),
        why="one node for both roles",
    )
    because = f"an engine takes {engine}: generator.tensor_parallel=1 leaves none idle"
    return _explained(split, site, idle=units - ranks - searchers * engine, because=because)


def _explained(split: Plan, site: Site, *, idle: int, because: str) -> Plan:
    """Return the plan with a longer description: its ranks, its idle units, and the requests it ignores.

    idle: number of units (see ``_units``) that stay idle. because: the reason why they do.
    """
    words = [f"{split.why}: {count(split.trainer.ranks, 'trainer rank')}"]
    words[0] += f", {count(split.searcher.ranks, 'searcher')}" if split.searcher.ranks else ""
    remarks = [f"{count(idle, _unit(site))} {'stays' if idle == 1 else 'stay'} idle, since {because}"]
    words += remarks if idle else []
    if split.form == "homogeneous" and split.searcher.ranks and site.unused:
        without = ", ".join(site.unused)
        words.append(f"searcher nodes are requested like trainer nodes, as {without} needs a het job")
    return replace(split, why="; ".join(words), remarks=tuple(remarks) if idle else ())


def _units(config: Config, site: Site) -> tuple[int, int]:
    """Return the number of units of a node, and the number that an engine takes.

    A unit is a GPU, or a rank on a cluster without GPUs. Raises ConfigError if an engine does not fit.
    """
    engine, gpus = config.generator.tensor_parallel, site.gpus_per_node
    if gpus == 0:
        if engine > 1:
            raise ConfigError(
                f"generator.tensor_parallel={engine} needs GPUs, but the site has gpus_per_node=0: set "
                "generator.tensor_parallel=1"
            )
        return site.ranks_per_node, 1
    if engine > gpus:
        raise ConfigError(
            f"generator.tensor_parallel={engine} is more than gpus_per_node={gpus}, and an engine "
            f"uses the GPUs of one node: use at most {gpus}"
        )
    if gpus % engine:
        raise ConfigError(
            f"generator.tensor_parallel={engine} does not divide gpus_per_node={gpus}: "
            f"use {' or '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}"
        )
    return gpus, engine


def _divisor(config: Config, most: int) -> int:
    """Return the largest number of ranks, up to ``most``, that divides train.prompts_per_step."""
    prompts = config.train.prompts_per_step
    return max(ranks for ranks in range(1, most + 1) if prompts % ranks == 0)


def _component(role: Role, site: Site, nodes: int, ranks: int, ranks_per_node: int) -> Component:
    per_node = min(ranks_per_node, -(-ranks // nodes)) if nodes > 1 else ranks_per_node
    cpus = max(1, site.cpus_per_node // per_node)
    return Component(role=role, nodes=nodes, ranks=ranks, ranks_per_node=per_node, cpus_per_rank=cpus)


def _unit(site: Site) -> str:
    return "GPU" if site.gpus_per_node else "rank"


def searchers_of_a_node(config: Config, site: Site) -> Component:
    """Return a component of one node with as many searchers as fit. Raises ConfigError if none fits."""
    units, engine = _units(config, site)
    return _component("searcher", site, 1, units // engine, units // engine)
