"""``tba submit --elastic``: elastic searchers for a run, as an array of one-node Slurm jobs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tba_hpc.checks.facts import refuse
from tba_hpc.checks.lists import ELASTIC, job_facts
from tba_hpc.commands.submit import tell
from tba_hpc.config import Config, ConfigError
from tba_hpc.core.wording import count
from tba_hpc.launch import slurm, snapshot
from tba_hpc.launch.plan import Component, Site, load_site, searchers_of_a_node
from tba_hpc.launch.sbatch import elastic_script, job_of
from tba_hpc.run.directory import RunDir


def submit_elastic(
    path: Path,
    site_file: Path,
    nodes: int,
    *,
    partition: str | None = None,
    time: str | None = None,
    options: Sequence[str] = (),
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Submit up to ``nodes`` one-node jobs of elastic searchers for the run in ``path``.

    Raises ConfigError or LaunchError with one sentence.
    """
    run = RunDir.open(path)
    config, site = run.config(), _searchers_site(site_file, partition, time, options)
    searcher = _searchers(config, site, nodes)
    code = snapshot.place(run.path)
    job = job_of(f"tba-search-{config.run.name}", run.path, site, code, mpi=False)
    text = elastic_script(job, nodes, searcher, site)
    if dry_run:
        print(text, end="")
        return
    slurm.require_slurm()
    if run.finished:
        print(f"finished already, nothing to search for: {run.summary}")
        return
    warnings = _warnings(run, config, site, site_file)
    snapshot.take(run.path)
    number = slurm.send(run, text)
    done = {
        "job": number,
        "run": str(run.path),
        "commands": {
            "watch": shlex.join(["tba", "status", str(run.path)]),
            "logs": shlex.join(["tail", "-F", f"{run.path}/slurm/searchers-{number}_0.log"]),
            "cancel": f"scancel {number}",
        },
        "warnings": warnings,
        "why": f"up to {count(nodes, 'node')}, {count(searcher.ranks, 'searcher')} on each",
    }
    if as_json:
        print(json.dumps(done))
    else:
        tell(done)


def _searchers(config: Config, site: Site, nodes: int) -> Component:
    """The searchers of a node. Raises ConfigError if those of all nodes are more than the run takes."""
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} starts nothing: ask for at least 1")
    searcher, most = searchers_of_a_node(config, site), config.launch.elastic
    if nodes * searcher.ranks > most:
        raise ConfigError(
            f"--nodes {nodes} with {count(searcher.ranks, 'searcher')} each is more than the run takes, "
            f"launch.elastic={most}: "
            + (f"ask for --nodes {most // searcher.ranks}, or " if most >= searcher.ranks else "")
            + f"stop the run and go on with --set launch.elastic={nodes * searcher.ranks}"
        )
    return searcher


def _warnings(run: RunDir, config: Config, site: Site, site_file: Path) -> list[str]:
    """What may go wrong. Raises ConfigError for what will, before hours in the queue."""
    fetch = shlex.join(["tba", "fetch", str(run.config_file), "--site", str(site_file)])
    facts = replace(job_facts(config, site), fetched_by=fetch)
    return [finding.sentence for finding in refuse(ELASTIC, facts)]


def _searchers_site(site_file: Path, partition: str | None, time: str | None, options: Sequence[str]) -> Site:
    site = load_site(site_file, **({"time": time} if time else {}))
    own = site.searcher.model_copy(update={"partition": partition or site.searcher.partition})
    return site.model_copy(update={"searcher": own, "sbatch_options": (*site.sbatch_options, *options)})
