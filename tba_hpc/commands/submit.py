"""``tba submit``: submits runs to Slurm, and elastic searchers for runs.

A run is one job with trainer and searcher nodes, which requeues itself until the run is finished. Submitting
a run again with the same config resumes it where it stopped. Elastic searchers are an array of one-node jobs.
This module needs no torch, so that it works on a login node.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tba_hpc.checks.facts import Facts, Finding, SlurmFacts, job_environment, login_python, refuse, warning
from tba_hpc.checks.lists import ELASTIC, SUBMIT
from tba_hpc.checks.mpi_checks import find_library
from tba_hpc.checks.slurm_checks import judge_job_requeue
from tba_hpc.commands.submission import Submission, again, last_job, prepare, script_of
from tba_hpc.config import Config, ConfigError
from tba_hpc.core.wording import count
from tba_hpc.launch import LaunchError, slurm, snapshot
from tba_hpc.launch.component_nodes import separate_nodes
from tba_hpc.launch.plan import Component, Plan, Site, searchers_of_a_node
from tba_hpc.launch.sbatch import elastic_script, job_of
from tba_hpc.report.notify import require_addresses, require_command
from tba_hpc.report.track.follow import require_login
from tba_hpc.run import slurm_queue
from tba_hpc.run.changes import consequences, is_done, refuse_steps_behind
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import holders, refuse_owned

NOT_SUBMITTED = "finished"
"""Text instead of a job's id for a finished run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Submission that has passed all checks.

    after: id of the job that must end first, or None. at_work: id of a job that the run already has, or None.
    """

    submission: Submission
    site: Site
    config: Config
    split: Plan
    run: RunDir
    warnings: Sequence[Finding]
    after: str | None
    at_work: str | None = None

    def script(self, link: str | None = None) -> str:
        """Return the batch script. link: id of the previous job of the run's chain, or None."""
        code, after = snapshot.place(self.run.path), link or self.after
        return script_of(self.config, self.split, self.site, after=after, chained=link is not None, code=code)


def submit(submissions: Sequence[Submission], *, wait: bool, as_json: bool) -> bool:
    """Submit all runs that are not finished, and print what was done. Checks all before it submits any.

    Of several runs, those with a job keep it and are skipped; a single run with a job is refused.

    wait: whether to wait until the jobs have ended. as_json: whether to print JSON. Returns False if, after
    waiting, some run is not finished, and else True. Raises ConfigError, StateError, DiskFullError,
    LaunchError or SlurmError with one sentence.
    """
    slurm.require_slurm()
    found: dict[Path, list[Finding]] = {}
    several = len(submissions) > 1
    ready = [_check(submission, found, several=several) for submission in submissions]
    _require_logins(ready)
    paths = [one.run.path for one in ready]
    if twin := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"two of these would be the run {twin}: give one config another run.name")
    done: list[dict[str, Any]] = []
    try:
        for place, one in enumerate(ready):
            job = _submit_one_of(ready, place) if several else _submit_unless_done(one)
            done.append(_done(one, job))
            if several and not as_json:
                _tell_row(done)
    finally:  # if Slurm refuses one of several, the earlier ones are in the queue and must be reported
        if as_json and done:
            print(json.dumps(done if several else done[0]))
        elif several and done:
            _tell_warnings(list(dict.fromkeys(said for one in done for said in one["warnings"])))
            _tell_commands(done)
    if not (as_json or several):
        tell(done[0])
    if not wait:
        return True
    ended = [_ends_well(one.run, told["job"]) for one, told in zip(ready, done, strict=True)]
    return all(ended)


def _require_logins(ready: Sequence[Ready]) -> None:
    """Raise ConfigError if a run wants W&B, which has no login. Seeds of a config are checked once."""
    unfinished = {one.submission.config: one for one in ready if not is_done(one.run, one.config)}
    for one in unfinished.values():
        site = one.site
        if not (site.setup or site.modules or site.container):  # each may bring a login of its own
            require_login(one.config, job_environment(site), login_python(site))


def _check(submission: Submission, found: dict[Path, list[Finding]], *, several: bool) -> Ready:
    """Check a submission, and return it with its site, config, plan and warnings. Raises ConfigError.

    found: warnings about configs, by config file. If it lacks this submission's file, the config is checked,
    and its warnings are added; each config is thus checked once for all seeds. several: whether there are
    other submissions, in which case the run may already have a job.
    """
    site = submission.load_site()
    config, split = submission.resolve(site)
    if not (site.setup or site.modules):  # either may set the required variables in the job
        require_addresses(config, job_environment(site))
        if not (site.venv or site.container):  # either may hold commands of its own
            require_command(config, job_environment(site))
    if new := submission.config not in found:
        found[submission.config] = refuse(SUBMIT, _facts(config, split, site, submission))
    run = RunDir.check(config)
    refuse_steps_behind(run, config)
    if not several:
        slurm.refuse_active(run)
    job = slurm_queue.active_job(run) if several else None
    if job is None:
        refuse_owned(run)
    after, remarks = _awaited(submission.after) if submission.after else (None, [])
    split = split if is_done(run, config) else separate_nodes(split, site)
    ready = Ready(
        submission=submission,
        site=site,
        config=config,
        split=split,
        run=run,
        warnings=remarks,
        after=after,
        at_work=job.number if job else None,
    )
    if new and not is_done(run, config) and (doubt := slurm.refuse_impossible(ready.script())):
        remedy = "compare the site file with sinfo -N -o '%N %T %c %m %G'; if no node fits, type tba stop"
        found[submission.config].append(warning("nodes", doubt, remedy))
    return replace(ready, warnings=[*found[submission.config], *remarks])


def _facts(config: Config, split: Plan | None, site: Site, submission: Submission) -> Facts:
    """Return the facts about a run's job or, if ``split`` is None, about jobs of elastic searchers.

    Raises SlurmError if Slurm does not answer.
    """
    asked = SlurmFacts.look()
    searchers = asked.partition(site.searcher.partition or site.partition)
    return Facts(
        site=site,
        config=config,
        split=split,
        root=Path(config.run.root),
        shared=split is not None,
        slurm=asked,
        partitions=asked.used(site) if split else (searchers,) if searchers else (),
        library=find_library(site)[0] if split else None,
        environment=job_environment(site),
        given=submission.given,
        fetched_by=submission.fetched_by,
        beside=submission.beside,
    )


def _left_out(script: str) -> list[Finding]:
    """Return a warning about SBATCH_ variables of this shell, which are not passed on to sbatch."""
    names = [name for name in slurm.foreign(script, os.environ) if name.startswith("SBATCH_")]
    found = f"{', '.join(names)} of this shell would override the batch script, so it is not passed on"
    return [warning("shell", found, "put what you need into the site file")] if names else []


def _awaited(path: Path) -> tuple[str | None, list[Finding]]:
    """Return the id of the last job of the run at ``path``; None and a warning if that job has ended."""
    last = last_job(path)
    if slurm_queue.active_job(RunDir.open(path)):
        return last, []
    found = f"--after {path}: no job of that run is queued or running, so there is nothing to wait for"
    return None, [warning("after", found, "submit that run first if this one is to follow it")]


def _submit_unless_done(ready: Ready) -> str | None:
    return None if is_done(ready.run, ready.config) else _submit(ready)


def _submit_one_of(ready: Sequence[Ready], place: int) -> str | None:
    """Submit the run at ``place`` unless it has a job or is finished.

    Returns the id of its job, new or not; None if the run is finished.

    Raises SubmitError, which names the run and the later runs not submitted, if Slurm refuses the job.
    """
    one = ready[place]
    if one.at_work:
        said = f"job {one.at_work} of {one.run.path} is queued or running already: not submitted again"
        print(said, file=sys.stderr)
        return one.at_work
    try:
        return _submit_unless_done(one)
    except LaunchError as error:
        later = [each for each in ready[place + 1 :] if not (each.at_work or is_done(each.run, each.config))]
        rest = f" (nor {', '.join(each.run.path.name for each in later)})" if later else ""
        raise slurm.SubmitError(f"{one.run.path} is not submitted{rest}; {error}") from None


def _submit(ready: Ready) -> str:
    """Make or resume the run directory, submit the job, or its chain of jobs, and return the first id."""
    text, changes = ready.script(), consequences(ready.run, ready.config)
    prepare(ready.submission, ready.config)
    job = slurm.submit(ready.run, text)
    if shorter := slurm.chain(ready.run, job, ready.script, length=ready.submission.chain):
        print(f"warning: {shorter}", file=sys.stderr)
    log_event(ready.run, "submitted", job=job, restarts=0)
    print(changes, file=sys.stderr, end="\n" if changes else "")
    return job


def _ends_well(run: RunDir, job: str | None) -> bool:
    """Wait until the run's job has ended; return whether the run is finished.

    job: id of the job; None if nothing was submitted, since the run was finished already.
    """
    if job is None:
        return True
    state = slurm_queue.await_job(run)
    told = f"{run.path} is finished" if run.finished else f"job {job} ended as {state}: see {run.logs}/latest"
    print(told, file=sys.stderr)
    return run.finished


def _done(ready: Ready, job: str | None) -> dict[str, Any]:
    """Return what ``--json`` prints: job, jobs, run, commands, warnings, and the plan's fields.

    job: id of the job, which in a chain is the first of ``jobs``; None if nothing was submitted, since the
    run was finished already.
    """
    warnings = [*ready.warnings, *_left_out(ready.script())]
    if job:
        warnings += judge_job_requeue(ready.site, slurm_queue.job_fields(job))
    return {
        "job": job,
        "jobs": slurm_queue.jobs_of(ready.run) if job else [],
        "run": str(ready.run.path),
        "commands": _commands(ready) if job else {},
        "warnings": [*ready.split.remarks, *(finding.sentence for finding in warnings)] if job else [],
        **asdict(ready.split),
        "why": _why(ready),
    }


def _why(ready: Ready) -> str:
    """Describe the split, with the slots for elastic searchers and the keys that do not count."""
    slots = ready.run.config().launch.elastic
    words = f"{ready.split.why}, {count(slots, 'slot')} for elastic searchers" if slots else ready.split.why
    several = ready.split.nodes > 1
    return f"{words}; launch.trainers and .searchers do not count on several nodes" if several else words


def _commands(ready: Ready) -> dict[str, str]:
    """Return the commands that the user may want next, by purpose."""
    run, jobs = str(ready.run.path), slurm_queue.jobs_of(ready.run)
    return {
        "watch": shlex.join(["tba", "status", run]),
        "log": shlex.join(["tba", "logs", run, "-f"]),
        "queue": f"squeue --jobs {','.join(jobs)}",
        "cancel": f"scancel {' '.join(jobs)}",
        "stop": shlex.join(["tba", "stop", run]),
        "resume": again(ready.submission, ready.run),
    }


def tell(done: dict[str, Any]) -> None:
    """Print what a submission did: the job, commands that the user may want next, and (to stderr) warnings.

    done: ``job``, ``run``, ``why``, ``commands`` and ``warnings``. If ``job`` is None, the run was finished
    already, and only that is printed.
    """
    if done["job"] is None:
        print(
            f"finished already, nothing to submit: {done['run']}/summary.json\n"
            "more steps: --set train.steps=…; another run: --set run.name=…"
        )
        return
    print(f"{done['why']}\njob {done['job']}, run directory {done['run']}")
    for name, command in done["commands"].items():
        print(f"  {name:7} {command}")
    _tell_warnings(done["warnings"])


def _tell_row(done: Sequence[dict[str, Any]]) -> None:
    """Print the last of several submissions as a row of a table of jobs and runs.

    A chain is listed as ``7,8,9``, as squeue and scancel take it.
    """
    if len(done) == 1:
        print("job       run")
    print(f"{','.join(done[-1]['jobs']) or NOT_SUBMITTED:9} {done[-1]['run']}", flush=True)


def _tell_commands(done: Sequence[dict[str, Any]]) -> None:
    """Print to stderr the commands that the user may want next for several submissions."""
    jobs = [job for one in done for job in one["jobs"]]
    print("  each    tba status RUN, tba logs RUN -f, tba stop RUN", file=sys.stderr)
    if jobs:
        print(f"  queue   squeue --jobs {','.join(jobs)}", file=sys.stderr)
    if len(done) > 1:
        print(f"  compare {shlex.join(['tba', 'compare', *(one['run'] for one in done)])}", file=sys.stderr)


def _tell_warnings(sentences: Sequence[str]) -> None:
    """Print each sentence to stderr as a warning."""
    for sentence in sentences:
        print(f"warning: {sentence}", file=sys.stderr)


# --- Elastic searchers ---


def submit_elastic(
    submission: Submission,
    *,
    partition: str | None = None,
    show: bool = False,
    make: bool = False,
    as_json: bool = False,
) -> None:
    """Submit an array of ``submission.nodes`` one-node jobs, whose searchers join the run of ``submission``.

    partition: the jobs' partition; None: the site's. show: print the batch script instead of submitting it.
    make: print the script and copy the code for it, so that sbatch can take it. as_json: print the outcome as
    JSON. Raises ConfigError or LaunchError with one sentence.
    """
    run, site, nodes = RunDir.open(submission.config), submission.load_site(), submission.nodes
    own = site.searcher.model_copy(update={"partition": partition or site.searcher.partition})
    config, site = run.config(), site.model_copy(update={"searcher": own})
    if run.finished and not (show or make):
        said = f"finished already, so it takes no searchers: {run.summary}"
        print(json.dumps({"job": None, "run": str(run.path)}) if as_json else said)
        return
    searcher = _searchers(config, site, nodes)
    code = snapshot.take(run.path, submission.here) if make else snapshot.place(run.path)
    job = job_of(f"tba-search-{config.run.name}", run.path, site, code, mpi=False)
    text = elastic_script(job, nodes, searcher, site)
    if show or make:
        print(text, end="")
        return
    slurm.require_slurm()
    facts = _facts(config, None, site, submission)
    _require_partition(partition, facts)
    # Checked now, because the jobs may start after hours in the queue.
    findings = [*refuse(ELASTIC, facts), *_slots_in_use(run, config, nodes * searcher.ranks)]
    snapshot.take(run.path)
    number = slurm.send(run, text)
    done = {
        "job": number,
        "run": str(run.path),
        "commands": {
            "watch": shlex.join(["tba", "status", str(run.path)]),
            "logs": shlex.join(["tail", "-F", f"{run.path}/slurm/searchers-{number}_0.log"]),
            "queue": f"squeue --jobs {number}",
            "cancel": f"scancel {number}",
        },
        "warnings": [finding.sentence for finding in findings],
        "why": f"up to {count(nodes, 'node')}, {count(searcher.ranks, 'searcher')} on each",
    }
    if as_json:
        print(json.dumps(done))
    else:
        tell(done)


def _require_partition(name: str | None, facts: Facts) -> None:
    """Raise ConfigError if ``--partition`` names a partition that the cluster does not have."""
    known = facts.slurm.partitions if facts.slurm else {}
    if name and not {*name.split(",")} <= {*known}:
        raise ConfigError(f"--partition {name} is no partition of this cluster: give {' or '.join(known)}")


def _slots_in_use(run: RunDir, config: Config, asked: int) -> list[Finding]:
    """Return a warning if too few slots are free now. asked: number of new searchers."""
    most = config.launch.elastic
    used = len(holders(run, [rank_name("searcher", index) for index in config.launch.elastic_searchers]))
    if used + asked <= most:
        return []
    late = f"{used + asked - most} of {count(asked, 'searcher')} would find no slot if all started now"
    found = f"{late}: {used} of launch.elastic={most} are in use"
    remedy = "a job that finds none ends, so submit it once others have left"
    return [warning("slots", found, remedy)]


def _searchers(config: Config, site: Site, nodes: int) -> Component:
    """Return the component of one node, with as many searchers as fit on it.

    Raises ConfigError if no node is requested, or more searchers than ``launch.elastic``.
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
