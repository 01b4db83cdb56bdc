"""``tba plan``: whether a run fits on given GPUs, how fast it is, and what it costs; estimated in advance.

Arithmetic on a config: it starts nothing and imports neither torch nor a model.
``launch.plan`` is something else: which nodes of a job do what.
"""

from __future__ import annotations

from pathlib import Path

from tba_hpc.checks.planner.estimate import estimate, suggestions
from tba_hpc.checks.planner.hardware import GPUS, Gpu, find_gpu, gpus_named
from tba_hpc.checks.planner.show import print_estimate
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.launch.plan import Site, load_site, plan

DEFAULT_GPU = "h100-80"


def plan_run(
    config: Config,
    *,
    site: Path | None,
    gpu: str | None,
    gpus: int | None,
    nodes: int | None,
    prompt_tokens: float | None,
    completion_tokens: float | None,
    as_json: bool,
) -> bool:
    """Print the estimate of a run; whether it fits.

    site: the cluster, with roles on nodes of their own where it is more than one. gpu: None: as the site asks
    for, else DEFAULT_GPU. gpus: of this machine. nodes: of the job, whose split then gives the ranks. Raises
    ConfigError.
    """
    if site is None and nodes is not None:
        raise ConfigError(f"--nodes {nodes} says nothing without a cluster: name it with --site")
    cluster = load_site(site) if site else None
    if cluster and gpus:
        raise ConfigError(f"--gpus {gpus} contradicts --site, whose gpus_per_node says it: leave one out")
    if cluster and not cluster.gpus_per_node:
        raise ConfigError(f"the site {site} has gpus_per_node=0: there is no GPU to plan for")
    if cluster and nodes:
        split = plan(config, cluster, nodes)
        config = parse_config(config.model_dump(mode="json", exclude_unset=True), split.overrides)
    kind = find_gpu(gpu) if gpu else _gpu_of(cluster)
    per_node, spread = cluster.gpus_per_node if cluster else gpus, _spread(config, cluster)
    found = estimate(
        config,
        kind,
        gpus=per_node,
        spread=spread,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    others = suggestions(config, found, spread=spread) if found.problems else []
    print_estimate(found, others, as_json=as_json)
    return not found.problems


def _spread(config: Config, site: Site | None) -> bool:
    """Whether the roles have nodes of their own: where one node has too few GPUs for all ranks."""
    asked = config.launch.trainers + config.launch.searchers * config.generator.tensor_parallel
    return site is not None and asked > site.gpus_per_node


def _gpu_of(site: Site | None) -> Gpu:
    """The largest kind that the site's way to ask for GPUs names; DEFAULT_GPU where it names none."""
    named = gpus_named(site.gpu_request or "") if site else []
    return max(named, key=lambda gpu: gpu.memory, default=GPUS[DEFAULT_GPU])
