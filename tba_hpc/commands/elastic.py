"""``tba submit --elastic``: submits elastic searchers for a run, as an array of one-node Slurm jobs."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from tba_hpc.checks.facts import refuse
from tba_hpc.checks.lists import ELASTIC, job_facts
from tba_hpc.commands.submission import Submission
from tba_hpc.commands.submit import tell
from tba_hpc.config import Config, ConfigError
from tba_hpc.core.wording import count
from tba_hpc.launch import slurm, snapshot
from tba_hpc.launch.plan import Component, Site, searchers_of_a_node
from tba_hpc.launch.sbatch import elastic_script, job_of
from tba_hpc.run.directory import RunDir


def submit_elastic(
    submission: Submission,
    *,
    partition: str | None = None,
    show: bool = False,
    make: bool = False,
    as_json: bool = False,
) -> None:
    """Submit an array of ``submission.nodes`` one-node jobs, whose searchers join ``submission.config``.

    partition: the jobs' partition; None: the site's. show: print the batch script instead of submitting it.
    make: print the script and copy the code for it, so that sbatch can take it. as_json: print the outcome as
    JSON. Raises ConfigError or LaunchError with one sentence.
    """
    run, site, nodes = RunDir.open(submission.config), submission.load_site(), submission.nodes
    own = site.searcher.model_copy(update={"partition": partition or site.searcher.partition})
    config, site = run.config(), site.model_copy(update={"searcher": own})
    searcher = _searchers(config, site, nodes)
    code = snapshot.take(run.path, submission.here) if make else snapshot.place(run.path)
    job = job_of(f"tba-search-{config.run.name}", run.path, site, code, mpi=False)
    text = elastic_script(job, nodes, searcher, site)
    if show or make:
        print(text, end="")
        return
    slurm.require_slurm()
    if run.finished:
        print(f"finished already, nothing to search for: {run.summary}")
        return
    facts = replace(job_facts(config, site), fetched_by=submission.fetched_by)
    warnings = [finding.sentence for finding in refuse(ELASTIC, facts)]  # now, not after hours in the queue
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
    """Return how many searchers a node runs, and with what. Raises ConfigError for too few or many nodes.

    Too many are those whose searchers would exceed ``launch.elastic``.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} starts nothing: ask for at least 1")
    searcher, most = searchers_of_a_node(config, site), config.launch.elastic
    if nodes * searcher.ranks > most:
        raise ConfigError(
            f"--nodes {nodes} with {count(searcher.ranks, 'searcher')} each is more than the run takes "
            f"(launch.elastic={most}): "
            + (f"ask for --nodes {most // searcher.ranks}, or " if most >= searcher.ranks else "")
            + f"stop the run and resume it with --set launch.elastic={nodes * searcher.ranks}"
        )
    return searcher
