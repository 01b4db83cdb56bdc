"""Plan of a job: reads a site's YAML and splits the job's nodes into trainers and searchers.

This module is pure: it neither calls Slurm nor writes files. ``sbatch.py`` turns a Plan into a batch script.
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

Runtime = Literal["apptainer", "singularity", "podman-hpc", "shifter", "pyxis", "plain"]

COUNTED = re.compile(r"--(gres|gpus)\b|-G\b")
"""Options in which Slurm expects a number of GPUs, by default 1."""

NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
"""Pattern of ``$NAME`` or ``${NAME}``; ``${NAME:-default}`` needs no variable."""


REQUEUE_SECONDS = 30
"""Seconds reserved between signal and end of the job for the requeue itself."""

EARLY_SIGNAL_SECONDS = 60
"""Seconds by which Slurm may send the signal earlier than requested."""


class Container(Section):
    """Container in which programs start if modules and a virtual environment are not enough.

    All programs of this project run inside: ranks, and those that the batch script calls. ``scontrol``,
    ``squeue`` and ``srun`` stay outside. ``$NAME`` is expanded on the first node.
    """

    runtime: Runtime = "apptainer"
    """Runtime that starts a program inside: a command before it, options of srun (``pyxis``), or any words
    in ``arguments`` (``plain``)."""
    image: str | None = Field(None, min_length=1)
    """Path of the image, readable on every node, or its name if the runtime knows images by name. Not with
    ``plain``."""
    binds: tuple[str, ...] = ()
    """``SOURCE:TARGET`` folders to mount inside, for models and data. The run directory is mounted without
    being named, except with ``plain``, and with ``shifter``, which mounts what its administrators chose."""
    arguments: tuple[str, ...] | None = None
    """Further arguments of the runtime. None: those that bring in NVIDIA's driver on nodes with GPUs:
    ``--nv`` (on AMD's GPUs, write ``--rocm``), ``--gpu`` (podman-hpc), ``--module=gpu`` (shifter)."""

    @model_validator(mode="after")
    def _possible(self) -> Container:
        if self.runtime == "plain" and (self.image or self.binds or not self.arguments):
            raise ValueError(
                "container.runtime=plain puts the words of container.arguments before each command and knows "
                "nothing else: set arguments, and write image and binds among them"
            )
        if self.runtime != "plain" and not self.image:
            raise ValueError(f"container.runtime={self.runtime} has nothing to start: set container.image")
        return self


class ComponentSite(Section):
    """Requests of one component that differ from the site's; null: the site's value."""

    partition: str | None = None
    """Partition of the component."""
    qos: str | None = None
    """Quality of service of the component."""
    constraint: str | None = None
    """Node features of the component."""
    memory: str | None = None
    """Memory per node of the component (``sbatch --mem``)."""
    memory_per_cpu: str | None = None
    """Memory per core of the component."""
    gpu_request: str | None = None
    """Option that requests GPUs for the component."""


class Site(Section):
    """Settings of a Slurm cluster. There is one file in ``slurm/sites`` per cluster."""

    partition: str | None = None
    """Partition (queue); null: the cluster's default."""
    account: str | None = None
    """Account (project) to charge; null: yours."""
    qos: str | None = None
    """Quality of service; null: the default."""
    constraint: str | None = None
    """Node features (``sbatch --constraint``)."""
    gpus_per_node: int = Field(4, ge=0)
    """GPUs per node; the job takes all of them. 0: a CPU cluster."""
    ranks_per_node: int = Field(2, ge=1)
    """Ranks per node of a CPU cluster."""
    gpu_request: str | None = "--gres=gpu:{gpus}"
    """Option that requests GPUs, such as ``--gres=gpu:a100:{gpus}`` or ``--gpus-per-node={gpus}``; ``{gpus}``
    is gpus_per_node. null: nodes come with their GPUs."""
    cpus_per_node: int = Field(8, ge=1)
    """CPU cores the job takes per node, split evenly among ranks."""
    memory: str | None = "0"
    """Memory per node (``sbatch --mem``); 0: all. null: the cluster's default, also for steps."""
    memory_per_cpu: str | None = None
    """Memory per core, instead of ``memory`` (``sbatch --mem-per-cpu``)."""
    exclusive: bool = False
    """Request whole nodes."""
    time: str = Field("24:00:00", pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$")
    """Wall time of a job; a run that needs more requeues itself."""
    signal_seconds: int = Field(300, ge=2 * REQUEUE_SECONDS)
    """Seconds before the end of the wall time at which the run is asked to checkpoint; 30 of them are
    reserved for the requeue. Slurm may ask 60 s earlier."""
    requeue: bool = True
    """Let jobs requeue themselves; if false, submit again to resume."""
    hetjob: bool = True
    """Use heterogeneous jobs; if false, one allocation holds both roles."""
    mpi: str | None = Field("pmix", pattern=r"^\w+$")
    """``srun --mpi=``: pmix (also pmix_v5, pspmix) for Open MPI, pmi2 for MPICH, cray_shasta for Cray MPICH.
    null: the cluster's default."""
    mpi_library: str = Field("wheel", pattern=r"^(wheel|site|[/$].+)$")
    """The MPI library of the ranks: ``wheel`` (pip's Open MPI), ``site`` (the libmpi found on the nodes, as
    by ``modules``), or a path, which may contain ``$NAME``."""
    srun_arguments: tuple[str, ...] = ()
    """Additional arguments for the ranks' srun."""
    sbatch_options: tuple[str, ...] = ()
    """Additional ``#SBATCH`` options of every component, such as ``--exclude=node13``."""
    network_interface: str | None = None
    """Interface of the fast network, such as ib0 or hsn0, for MPI's TCP, gloo and NCCL. null: gloo and NCCL
    choose one. MPI's TCP then listens on all interfaces, or on none in a job of one node."""
    setup: tuple[str, ...] = ()
    """Shell lines that run first on the first node, such as ``module use /my/modules`` or ``source
    /opt/conda/etc/profile.d/conda.sh``; their exports reach all ranks."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, in order."""
    venv: str | None = None
    """Virtual environment on the nodes; may contain ``$NAME``. null: the Python that submits."""
    container: Container | None = None
    """Container for all programs; null: none."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict
    )
    """Environment variables of the job. ``$NAME`` in a value is expanded on the first node, where it must be
    set (else write ``${NAME:-}``)."""
    relaunches: int = Field(3, ge=0)
    """Restarts in a row without a sealed shard after which the job gives up."""
    trainer: ComponentSite = ComponentSite()
    """Overrides for trainer nodes; with one allocation, for all nodes."""
    searcher: ComponentSite = ComponentSite()
    """Overrides for searcher nodes (het jobs)."""

    @property
    def seconds(self) -> float:
        """Wall time of the job until it ends or is requeued, s."""
        return slurm_seconds(self.time)

    @property
    def python(self) -> list[str]:
        """Command of the nodes' Python: the one that submits, unless the site has its own."""
        return [sys.executable] if self.venv is None and self.container is None else ["python"]

    @property
    def mpi_option(self) -> list[str]:
        """Option of srun that names the MPI plugin; empty if none is named."""
        return [f"--mpi={self.mpi}"] if self.mpi else []

    def memory_option(self, own: ComponentSite) -> list[str]:
        """Return the option with which a component requests memory; empty if it requests none."""
        for part in (own, self):
            if part.memory_per_cpu:
                return [f"--mem-per-cpu={part.memory_per_cpu}"]
            if part.memory is not None:
                return [f"--mem={part.memory}"]
        return []

    def gpu_option(self, own: ComponentSite) -> list[str]:
        """Return the option with which a component requests GPUs; empty if it requests none."""
        request = own.gpu_request or self.gpu_request
        return [request.format(gpus=self.gpus_per_node)] if request and self.gpus_per_node else []

    @property
    def unused(self) -> list[str]:
        """Searcher settings that one allocation cannot honour, such as ``searcher.qos=low``."""
        names = ComponentSite.model_fields
        ours = {name: getattr(self.trainer, name) or getattr(self, name) for name in names}
        theirs = self.searcher.model_dump(exclude_none=True)
        return [f"searcher.{name}={value}" for name, value in theirs.items() if value != ours[name]]

    @property
    def variables(self) -> dict[str, list[str]]:
        """Site keys whose values contain ``$NAME``, with the names; each must be set where the job starts."""
        values = {f"environment.{key}": value for key, value in self.environment.items()}
        values |= {"venv": self.venv or "", "mpi_library": self.mpi_library}
        if box := self.container:
            values["container"] = " ".join([box.image or "", *box.binds, *(box.arguments or ())])
        names = {key: ["".join(found) for found in NAME.findall(value)] for key, value in values.items()}
        return {key: list(dict.fromkeys(found)) for key, found in names.items() if found}

    @property
    def seconds_to_train(self) -> float:
        """Wall time of the job before it may be asked to checkpoint, s."""
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
            raise ValueError("mpi: cray_shasta knows no het jobs: set hetjob: false")
        if self.seconds_to_train <= 0:
            raise ValueError(
                f"signal_seconds={self.signal_seconds} leaves nothing of time={self.time} to train in, since "
                f"Slurm may ask {EARLY_SIGNAL_SECONDS} s earlier: ask for more time, or reserve less of it"
            )
        if self.container and self.venv:
            raise ValueError(
                "container and venv exclude each other: activate nothing inside an image, drop venv"
            )
        for request in (self.gpu_request, self.trainer.gpu_request, self.searcher.gpu_request):
            if self.gpus_per_node and request and "{gpus}" not in request and COUNTED.search(request):
                raise ValueError(
                    f"gpu_request={request} never says how many: write {{gpus}} where the number belongs"
                )
        if self.memory_per_cpu and self.memory is not None and "memory" in self.model_fields_set:
            raise ValueError(
                f"memory={self.memory} and memory_per_cpu={self.memory_per_cpu} exclude each other: drop one"
            )
        return self


def load_site(path: Path, **keys: object) -> Site:
    """Read a site file, or a shipped site by its name; ``keys`` override the values in it.

    Raises ConfigError with one sentence: value, rule, remedy.
    """
    tree = read_tree(path, "sites")
    try:
        return Site.model_validate({**tree, **keys})
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Site, noun='site')}") from None


def slurm_seconds(time: str) -> float:
    """Convert a Slurm time to seconds: ``M``, ``M:S``, ``H:M:S``, ``D-H[:M[:S]]`` or ``UNLIMITED``."""
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
    """One role's share of the job.

    ranks_per_node: maximum number of ranks on a node. cpus_per_rank: cores. exclude: nodes left to the other
    component, in the form of ``sbatch --exclude`` (``component_nodes.py``).
    """

    role: Role
    nodes: int
    ranks: int
    ranks_per_node: int
    cpus_per_rank: int
    exclude: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Nodes and ranks of a job, with the split in words in ``why``.

    first: role whose nodes come first by name, in the het form (``component_nodes.py``). remarks: sentences
    for the user about the split.
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
        """Components of a het job, in its order."""
        both = (self.trainer, self.searcher)
        return both if self.first == "trainer" else both[::-1]

    @property
    def overrides(self) -> list[str]:
        """Overrides with the numbers of ranks, for the run's config."""
        return [f"launch.trainers={self.trainer.ranks}", f"launch.searchers={self.searcher.ranks}"]


def refuse_rank_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides of the numbers of ranks, which under Slurm follow from the nodes."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in ("launch.trainers", "launch.searchers"):
            raise ConfigError(
                f"--set {override} has no effect under Slurm, since ranks follow from nodes: use "
                "--nodes and --trainer-nodes; the site file sets the number of ranks on a node"
            )


def plan(
    config: Config, site: Site, nodes: int, trainer_nodes: int | None = None, *, homogeneous: bool = False
) -> Plan:
    """Split ``nodes``: the first ``trainer_nodes`` train, the rest search.

    trainer_nodes: by default one in four, as in the paper. It may equal ``nodes`` if searchers come by
    themselves (launch.elastic). A single node is shared by both roles. homogeneous: use one allocation even
    if the site has het jobs. Raises ConfigError with one sentence.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} is too few: ask for at least 1")
    slots, engine = _slots(config, site)
    alone = trainer_nodes == nodes and config.launch.elastic > 0
    if nodes == 1 and not alone:
        return _within_a_node(config, site, trainer_nodes, slots, engine)
    how = "one node in four, as in the paper" if trainer_nodes is None else "as asked"
    train = max(1, nodes // 4) if trainer_nodes is None else trainer_nodes
    if not (1 <= train < nodes or alone):
        raise ConfigError(
            f"--trainer-nodes {train} of --nodes {nodes} leaves no node for one of the roles: "
            f"use 1 to {nodes - 1}, or let searchers come by themselves (launch.elastic) and all nodes train"
        )
    trainer = _trainers(config, site, train, slots)
    engines, search = slots // engine, nodes - train
    searcher = replace(trainer, role="searcher", nodes=0, ranks=0, ranks_per_node=0)
    others = f"{count(config.launch.elastic, 'slot')} for elastic searchers"
    if search:
        searcher = _component("searcher", site, search, search * engines, engines)
        others = f"{count(search, 'node')} to search"
    places, prompts = train * slots, config.train.prompts_per_step
    return _explained(
        Plan(
            form="het" if site.hetjob and search and not homogeneous else "homogeneous",
            nodes=nodes,
            trainer=trainer,
            searcher=searcher,
            why=f"{count(train, 'node')} to train ({how}) and {others}",
        ),
        site,
        idle=places - trainer.ranks,
        because=f"the trainer ranks must divide train.prompts_per_step={prompts}: --set "
        f"train.prompts_per_step={-(-prompts // places) * places} has work for all",
    )


def _trainers(config: Config, site: Site, nodes: int, slots: int) -> Component:
    """Make a component of as many trainer ranks as can share a step's prompts evenly. Raises ConfigError."""
    ranks = _divisor(config, nodes * slots)
    if ranks < nodes:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step} gives work to at most {ranks} ranks of "
            f"{nodes} trainer nodes: use --trainer-nodes {ranks} or a multiple of {nodes} prompts"
        )
    return _component("trainer", site, nodes, ranks, slots)


def _within_a_node(config: Config, site: Site, trainer_nodes: int | None, slots: int, engine: int) -> Plan:
    """Split a single node between both roles; one GPU in four trains. Raises ConfigError."""
    if trainer_nodes is not None:
        raise ConfigError(
            f"--trainer-nodes {trainer_nodes} of --nodes 1: a single node is shared; drop the option"
        )
    ranks = _divisor(config, max(1, slots // 4))
    searchers = (slots - ranks) // engine
    if searchers < 1:
        raise ConfigError(
            f"one node has room for {count(slots, _unit(site))}, too few for a trainer and an engine of "
            f"generator.tensor_parallel={engine}: use --nodes 2"
        )
    split = Plan(
        form="homogeneous",
        nodes=1,
        trainer=_component("trainer", site, 1, ranks, ranks + searchers),
        searcher=_component("searcher", site, 1, searchers, ranks + searchers),
        why="one node for both roles",
    )
    because = f"an engine takes {engine}: generator.tensor_parallel=1 leaves none idle"
    return _explained(split, site, idle=slots - ranks - searchers * engine, because=because)


def _explained(split: Plan, site: Site, *, idle: int, because: str) -> Plan:
    """Complete a plan's words: its ranks, idle places, and settings that one allocation cannot honour."""
    words = [f"{split.why}: {count(split.trainer.ranks, 'trainer rank')}"]
    words[0] += f", {count(split.searcher.ranks, 'searcher')}" if split.searcher.ranks else ""
    remarks = [f"{count(idle, _unit(site))} {'stays' if idle == 1 else 'stay'} idle, since {because}"]
    words += remarks if idle else []
    if split.form == "homogeneous" and split.searcher.ranks and site.unused:
        without = ", ".join(site.unused)
        words.append(f"asked for as the trainer's, without {without}, which takes a het job")
    return replace(split, why="; ".join(words), remarks=tuple(remarks) if idle else ())


def _slots(config: Config, site: Site) -> tuple[int, int]:
    """Count the places for ranks on a node, and those that an engine takes. Raises ConfigError."""
    engine, gpus = config.generator.tensor_parallel, site.gpus_per_node
    if gpus == 0:
        if engine > 1:
            raise ConfigError(
                f"generator.tensor_parallel={engine} needs GPUs, but the site has gpus_per_node=0: use 1"
            )
        return site.ranks_per_node, 1
    if engine > gpus:
        raise ConfigError(
            f"generator.tensor_parallel={engine} is larger than a node with gpus_per_node={gpus}: "
            f"an engine lives on one node; use at most {gpus}"
        )
    if gpus % engine:
        raise ConfigError(
            f"gpus_per_node={gpus} cannot be shared out in engines of generator.tensor_parallel={engine}: "
            f"use {' or '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}"
        )
    return gpus, engine


def _divisor(config: Config, most: int) -> int:
    """Return the largest number of ranks up to ``most`` that divides the prompts of a step."""
    prompts = config.train.prompts_per_step
    return max(ranks for ranks in range(1, most + 1) if prompts % ranks == 0)


def _component(role: Role, site: Site, nodes: int, ranks: int, ranks_per_node: int) -> Component:
    per_node = min(ranks_per_node, -(-ranks // nodes)) if nodes > 1 else ranks_per_node
    cpus = max(1, site.cpus_per_node // per_node)
    return Component(role=role, nodes=nodes, ranks=ranks, ranks_per_node=per_node, cpus_per_rank=cpus)


def _unit(site: Site) -> str:
    return "GPU" if site.gpus_per_node else "rank"


def searchers_of_a_node(config: Config, site: Site) -> Component:
    """Make a component of as many searchers as fit on a node. Raises ConfigError."""
    slots, engine = _slots(config, site)
    return _component("searcher", site, 1, slots // engine, slots // engine)
