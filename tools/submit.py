"""Submits a run to Slurm: trainer and searcher nodes in one job, which goes on by itself until it is done.

    python tools/submit.py --config configs/math_gsm8k.yaml --nodes 8 --site slurm/sites/a100x4-pmix.yaml

Submitting again with the same config goes on where the run stopped. Needs no torch: made for a login node.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tba_hpc.config import Config, ConfigError, load_config, require_files
from tba_hpc.doctor import slurm_checks
from tba_hpc.doctor.examine import preflight
from tba_hpc.doctor.findings import Finding
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Plan, Site, load_site, plan
from tba_hpc.launch.sbatch import RANK, TBA, Job, batch_script
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.notes import REFUSED

HOME = Path(__file__).resolve().parents[1]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def submit(
    config: Annotated[Path, typer.Option(help="A YAML config, or the directory of a run to go on with.")],
    nodes: Annotated[int, typer.Option(help="Nodes in all.")],
    trainer_nodes: Annotated[int | None, typer.Option(help="Nodes that train; default: one in four.")] = None,
    site: Annotated[Path, typer.Option(help="The cluster.")] = HOME / "slurm/sites/generic.yaml",
    time: Annotated[
        str | None, typer.Option(help="Wall time of the job, as for sbatch; it requeues itself.")
    ] = None,
    homogeneous: Annotated[bool, typer.Option(help="One allocation for both roles, no het job.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=value", help="Override one config key; repeatable."),
    ] = None,
    run_root: Annotated[
        Path | None, typer.Option(help="Folder for run directories; all nodes must see it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the batch script; submit nothing.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the job has ended, with its success.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Submit a run, or go on with one."""
    cluster = load_site(site)
    if time:
        cluster = Site.model_validate({**cluster.model_dump(), "time": time})
    resolved, split = _resolve(config, overrides or [], run_root, cluster, nodes, trainer_nodes, homogeneous)
    run = RunDir(resolved.run_dir.absolute())
    script = batch_script(_job(resolved, run, cluster), split, cluster)
    if dry_run:
        typer.echo(script, nl=False)
        return
    slurm.require_slurm()
    warnings = _check(resolved, split, cluster)
    run = RunDir.create(resolved)
    if run.finished:
        _tell(run, split, None, "", [], as_json)
        return
    job = slurm.submit(run, script)
    again = _again(run, site, nodes, trainer_nodes, time, homogeneous)
    log_event(run, "submitted", job=job.job_id, restarts=0, command=again)
    warnings += slurm_checks.check_taken(slurm.job_fields(job.job_id), cluster)
    _tell(run, split, job.job_id, again, warnings, as_json)
    if wait:
        job.wait()
        if not run.finished:
            print(f"job {job.job_id} ended as {job.state}: see {run.logs}/latest", file=sys.stderr)
            raise typer.Exit(1)


def _resolve(
    path: Path,
    overrides: list[str],
    run_root: Path | None,
    site: Site,
    nodes: int,
    trainer_nodes: int | None,
    homogeneous: bool,
) -> tuple[Config, Plan]:
    """The config of the run and its nodes; ranks follow from the nodes, and paths hold on all of them."""
    if path.is_dir():
        run_root, path = path.absolute().parent, RunDir.open(path).config_file
    # One trainer fits every config: how many there will be is not known before the plan.
    first = load_config(path, [*overrides, "launch.trainers=1"])
    split = plan(first, site, nodes, trainer_nodes, homogeneous=homogeneous)
    root = (run_root or Path(first.run.root)).absolute()
    return load_config(path, [*overrides, *split.overrides, f"run.root={json.dumps(str(root))}"]), split


def _check(config: Config, split: Plan, site: Site) -> list[Finding]:
    """What may go wrong. Raises ConfigError or SubmitError for what will, before hours in the queue."""
    if site.container is None:  # inside it paths may be others
        require_files(config)
    findings = preflight(config, split, site)
    if problem := next((finding for finding in findings if finding.level == "problem"), None):
        raise slurm.SubmitError(problem.sentence)
    return [finding for finding in findings if finding.level == "warning"]


def _job(config: Config, run: RunDir, site: Site) -> Job:
    return Job(
        name=f"tba-{config.run.name}",
        run=run.path,
        rank=[*site.python, *RANK[1:]],
        tba=[*site.python, *TBA[1:]],
    )


def _again(
    run: RunDir, site: Path, nodes: int, trainer_nodes: int | None, time: str | None, homogeneous: bool
) -> str:
    """What submits the run again, typed in any folder; the run's frozen config knows the settings."""
    words: list[object] = [sys.executable, __file__, "--config", run.path, "--site", site.absolute()]
    words += ["--nodes", nodes]
    words += ["--trainer-nodes", trainer_nodes] if trainer_nodes else []
    words += ["--time", time] if time else []
    words += ["--homogeneous"] if homogeneous else []
    return shlex.join(map(str, words))


def _tell(
    run: RunDir, split: Plan, job: str | None, again: str, warnings: list[Finding], as_json: bool
) -> None:
    """What was done, what to know about it, and the commands that come next."""
    commands = {
        "watch": f"tba status {run.path}",
        "log": f"tail -F {run.path}/slurm/job-{job}.log",
        "queue": f"squeue --job {job}",
        "cancel": f"scancel {job}",
        "stop": f"scancel --batch --signal=USR1 {job}",
        "resume": again,
    }
    sentences = [warning.sentence for warning in warnings]
    if as_json:
        done = {"job": job, "run": str(run.path), "commands": commands if job else {}, "warnings": sentences}
        print(json.dumps({**done, **asdict(split)}))
    elif job is None:
        print(f"finished already, nothing to submit: {run.summary}\nanother run: --set run.name=…")
    else:
        print(f"{split.why}\njob {job}, run directory {run.path}")
        for name, command in commands.items():
            print(f"  {name:7} {command}")
        for sentence in sentences:
            print(f"warning: {sentence}", file=sys.stderr)


def main() -> None:
    """Entry point: print a user's error as one sentence."""
    try:
        app()
    except (ConfigError, StateError, DiskFullError, slurm.SubmitError, slurm_checks.SlurmError) as error:
        print(f"submit: {error}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
