"""The command ``tba``. Each subcommand imports what is slow only when it runs.

An error that the user can fix is reported as one sentence on stderr, with exit status 2. Ranks leave such
errors as notes in their attempt's folder, where ``tba run`` finds them.
"""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from tba_hpc.config import ConfigError, dump_config, load_config
from tba_hpc.core.ports import EngineError, ExchangeError
from tba_hpc.core.types import Role, Split
from tba_hpc.core.wording import output_is_lost, print_in_any_encoding, printable, though_output_is_lost
from tba_hpc.launch import LaunchError
from tba_hpc.report.track.follow import require_login, require_trackers
from tba_hpc.run import modules
from tba_hpc.run.caches import keep_caches_private
from tba_hpc.run.changes import changes, consequences, is_done, refuse_steps_behind, resume_notice
from tba_hpc.run.changes import create as create_run
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event, read_events, run_command
from tba_hpc.run.files import DiskFullError, refused_file
from tba_hpc.run.notes import Exit, write_note
from tba_hpc.run.owners import OwnedError, owned, refuse_owned
from tba_hpc.run.slurm_queue import SlurmError


class _Commands(TyperGroup):
    """The commands of ``tba``. An invalid command line ends with one sentence, like every other error."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed. Raises ConfigError for an unknown command or wrong arguments."""
        try:
            return super().invoke(ctx)
        except TyperException as error:
            name, said = ctx.invoked_subcommand, error.format_message().rstrip(".")
            said = f"{said[0].lower()}{said[1:].replace('. Did', ': did').replace('Value error, ', '')}"
            raise ConfigError(said if said.endswith("?") else f"{said}: {_call(name, said)}") from None


def _call(name: str | None, said: str) -> str:
    """Return a hint on how to call a command.

    name: name of the command; None if there is no such command. said: Typer's message about the error.
    """
    if name is None:
        return "tba status RUN shows a run, such as runs/quickstart-seed0; all commands: tba --help"
    if name == "submit" and "extra argument" in said:
        return "a run or a config is given by --config, as in tba submit --config RUN --nodes 4"
    run = "a run is a folder, such as runs/quickstart-seed0; " if "'RUN'" in said else ""
    return f"{run}see tba {name} --help"


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

TRAINING = "Train"
RESULTS = "Results"
BEFORE = "Before a run"
SCRIPTS = "For batch scripts"

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override one key; repeatable.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML config, or the name of a shipped one.")
]
ConfigOrRun = Annotated[
    Path,
    typer.Argument(metavar="CONFIG|RUN", help="A config, the name of a shipped one, or a run directory."),
]
SitePath = Annotated[Path | None, typer.Option(help="The cluster: a site file or the name of a shipped one.")]
RunRoot = Annotated[Path | None, typer.Option(help="Folder of run directories; all nodes must see it.")]
Subject = Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model's folder or hub name.")]
TaskConfig = Annotated[Path | None, typer.Option(help="For a MODEL: the config with its task.")]
Index = Annotated[int | None, typer.Option(help="Rank within the role, if no MPI launcher sets it.")]
VERBS: dict[str, Role] = {"train": "trainer", "search": "searcher"}
EXITS = (
    "Exit status: 0 finished, or stopped on request; 2 an error that only you can fix; 4 given up, because "
    "restarts made no progress; 75 stopped inside a Slurm job, with a checkpoint: run the same command again."
)
AGAIN = "to train again, add --set run.name=…; to continue to more steps, add --set train.steps=…"
WaitSeconds = Annotated[
    float | None,
    typer.Option(
        "--wait", min=0, metavar="SECONDS", help="Wait until RUN has ended; fail after this many seconds."
    ),
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tba-hpc {version('tba-hpc')}")
        raise typer.Exit


@app.callback()
def _tba(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trajectory Balance with Asynchrony: post-train language models with reinforcement learning."""


@app.command(rich_help_panel=TRAINING, epilog=EXITS)
def run(
    config: ConfigOrRun,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check config, task and rows, try judges and reward functions, and print the config and the "
            "commands; start nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train on this machine, from the start or from where the run stopped."""
    from tba_hpc.checks.facts import Facts, passed
    from tba_hpc.checks.lists import FILES, RUN, START
    from tba_hpc.commands.submission import file_and_overrides, load_anchored
    from tba_hpc.launch import local
    from tba_hpc.report.notify import notified, require_addresses, require_command
    from tba_hpc.report.tables import Terminal

    resolved = load_anchored(*file_and_overrides(config, overrides or []))
    require_trackers(resolved)
    require_addresses(resolved)
    require_command(resolved)
    run_dir = RunDir.check(resolved)
    refuse_steps_behind(run_dir, resolved)
    done = is_done(run_dir, resolved)
    said: list[str] = []
    if not done:
        require_login(resolved)
        refuse_owned(run_dir)
        facts = Facts(config=resolved, beside=modules.folder_of(config))
        findings = passed([*FILES, *(RUN if dry_run else START)], facts)
        if dry_run:
            said = [one.sentence for one in findings if one.name == "task" and one.level == "ok"]
        said += [f"warning: {finding.sentence}" for finding in findings if finding.level == "warning"]
        said += filter(None, [consequences(run_dir, resolved), resume_notice(run_dir)])
    if dry_run:
        commands = [shlex.join(command) for command in local.commands(run_dir, resolved).values()]
        remarks = "".join(f"# {line}\n" for line in [*said, *commands])
        typer.echo(dump_config(resolved) + remarks, nl=False)
        return
    if done:
        ignored = "".join(f"; {key} is not changed" for key in changes(run_dir, resolved))
        typer.echo(f"{run_dir.path} is finished, so this is its summary{ignored}; {AGAIN}", err=True)
        with though_output_is_lost():
            _show_results(run_dir, anew=False, as_json=as_json)
        return
    # Owned until the results are written, so that tba stop --wait waits for them.
    with owned(run_dir, listens=True):
        with though_output_is_lost():
            typer.echo("".join(f"{sentence}\n" for sentence in said), nl=False, err=as_json)
        modules.keep(create_run(resolved), resolved, modules.folder_of(config))
        with notified(run_dir, resolved):
            code = local.launch(run_dir, resolved, console=Terminal(stderr=as_json))
        if code:
            raise typer.Exit(code)
        with though_output_is_lost():
            steps = _show_results(run_dir, anew=not run_dir.finished, as_json=as_json)
            _say_unfinished(run_dir, f"{steps}/{resolved.train.steps}", as_json=as_json)


@app.command(rich_help_panel=TRAINING)
def submit(
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes; may be left out with --print inside a Slurm job.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CONFIG|RUN", help="As for tba run; default: math_gsm8k. Repeatable: one job for each."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Submit a job for each of these values of run.seed: 0-4 or 0,2,7.")
    ] = None,
    after: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Start when that run's job has ended.")
    ] = None,
    trainer_nodes: Annotated[
        int | None, typer.Option(help="Nodes that train; default: one in four, at least one.")
    ] = None,
    site: SitePath = None,
    time: Annotated[str | None, typer.Option(help="Wall time of the job, as for sbatch.")] = None,
    homogeneous: Annotated[
        bool, typer.Option("--homogeneous", help="Put both roles into one allocation, without a het job.")
    ] = False,
    overrides: Overrides = None,
    run_root: RunRoot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; make and submit nothing.")
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Make the run directory and print the batch script, for sbatch.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job's end; exit 1 if the run is not finished.")
    ] = False,
    as_json: AsJson = False,
    chain: Annotated[
        int, typer.Option(min=1, help="Submit this many jobs, each after the previous one; none requeues.")
    ] = 1,
    time_min: Annotated[
        str | None, typer.Option(help="Shortest acceptable wall time, as for sbatch.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Another option of sbatch; repeatable.")
    ] = None,
    elastic: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Submit elastic searchers for RUN, one job per node.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Partition of elastic searchers; default: the site's.")
    ] = None,
) -> None:
    """Submit a run to Slurm, or resume one; the job requeues itself until the run is finished."""
    from tba_hpc.commands import submission as submissions

    options = submissions.sbatch_options([*([f"time-min={time_min}"] if time_min else []), *(sbatch or [])])
    configs = config or ([] if elastic else [submissions.default("configs", "math_gsm8k")])
    job = submissions.Submission(
        config=elastic or configs[0],
        site=site or submissions.default("sites", "generic"),
        nodes=submissions.nodes_of_this_job(print_only=print_only) if nodes is None else nodes,
        trainer_nodes=trainer_nodes,
        time=time,
        homogeneous=homogeneous,
        overrides=overrides or [],
        run_root=run_root,
        after=after,
        options=options,
        chain=chain,
        here=os.environ["SLURM_JOB_ID"] if print_only and nodes is None else "",
    )
    if elastic:
        from tba_hpc.commands.submit import submit_elastic

        own = {
            **{"--config": config, "--seeds": seeds, "--after": after, "--trainer-nodes": trainer_nodes},
            **{"--homogeneous": homogeneous, "--set": overrides, "--run-root": run_root, "--wait": wait},
            "--chain": chain > 1,
        }
        _refuse_idle(own, "has no effect on elastic searchers (--elastic): leave it out")
        submit_elastic(job, partition=partition, show=dry_run, make=print_only, as_json=as_json)
        return
    _refuse_idle(
        {"--partition": partition},
        "is only for elastic searchers (--elastic RUN): for a run, set partition in the site file, or give "
        f"--sbatch partition={partition}",
    )
    if print_only:
        _refuse_idle(
            {"--chain": chain > 1, "--wait": wait},
            "has no effect with --print, which submits no job: leave it out",
        )
    jobs = submissions.spread(job, configs, seeds)
    if print_only and len(jobs) > 1:
        raise ConfigError(f"--print prints one script, but these are {len(jobs)} runs: print one at a time")
    if dry_run or print_only:
        typer.echo("\n".join(submissions.script(one, make=print_only) for one in jobs), nl=False)
        if dry_run:
            typer.echo("Slurm and this machine were not checked; without --dry-run they are", err=True)
        return
    from tba_hpc.commands import submit as slurm_job

    if not slurm_job.submit(jobs, wait=wait, as_json=as_json):
        raise typer.Exit(1)


def _refuse_idle(options: Mapping[str, object], why: str) -> None:
    """Raise ConfigError with ``why`` if any of ``options``, which would have no effect, was given."""
    if given := next((option for option, value in options.items() if value), None):
        raise ConfigError(f"{given} {why}")


@app.command(rich_help_panel=BEFORE)
def fetch(
    config: ConfigOrRun,
    site: SitePath = None,
    overrides: Overrides = None,
) -> None:
    """Download a config's models and data into the Hugging Face cache, or that of the site's HF_HOME."""
    from tba_hpc.commands import fetch as hub
    from tba_hpc.commands.submission import file_and_overrides
    from tba_hpc.launch.plan import load_site

    hub.fetch(load_config(*file_and_overrides(config, overrides or [])), load_site(site) if site else None)


@app.command(rich_help_panel=TRAINING)
def search(run: RunPath, index: Index = None) -> None:
    """Join RUN as an elastic searcher, or run one searcher rank if mpiexec or srun starts it."""
    gc.disable()
    keep_caches_private(os.environ)
    from tba_hpc import runtime
    from tba_hpc.loops.elastic import NoSlotError

    try:
        runtime.search(_open(run, "searcher", index), index)
    except NoSlotError as error:
        print(f"tba: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(Exit.NO_SLOT) from None
    gc.freeze()


@app.command("replay", rich_help_panel=RESULTS)
def replay_run(
    run: RunPath,
    overrides: Overrides = None,
    delay: Annotated[int, typer.Option(min=0, help="Let shards arrive this many steps later.")] = 0,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Let all shards arrive before the first step.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Use the shards that are left if some are gone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train again on RUN's recorded shards, without engines, for example with --set train.objective=oapl."""
    from tba_hpc.commands.replay import replay

    logging.basicConfig(level=logging.WARNING, format="tba: %(message)s")
    made, config = replay(run, overrides or [], delay=delay, at_once=at_once, partial=partial)
    steps = _show_results(made, anew=True, as_json=as_json)
    _say_unfinished(made, f"{steps}/{config.train.steps}", as_json=as_json)


@app.command(rich_help_panel=RESULTS)
def track(
    run: RunPath,
    overrides: Overrides = None,
    go_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new metrics until RUN is finished.")
    ] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
) -> None:
    """Send RUN's metrics to W&B or TensorBoard, for example with --set track.wandb=PROJECT."""
    from tba_hpc.report.track import follow

    run_dir = RunDir.open(run)
    config = load_config(run_dir.config_file, overrides)
    if not until_eof:
        follow.require_login(config)
    goes_on = follow.until_eof if until_eof else follow.until_interrupted if go_on else lambda _: False
    follow.follow(run_dir, config, goes_on=goes_on)


@app.command(rich_help_panel=TRAINING)
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a folder of several.")],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show RUN's progress live, on any machine that sees its directory; of a folder's runs, a line each."""
    from tba_hpc.report.status import follow, print_each, print_status
    from tba_hpc.run.slurm_queue import job_states

    if not as_json and (inside := RunDir.inside(run)):
        print_each(inside, job_states)
        return
    run_dir = RunDir.open(run)
    if once or as_json:
        print_status(run_dir, job_states, as_json=as_json)
    else:
        follow(run_dir, job_states)


@app.command(rich_help_panel=TRAINING)
def watch(run: RunPath, beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False) -> None:
    """Send RUN's starts, alerts, silences and end to the addresses in run.notify, until it is finished."""
    from tba_hpc.report import notify
    from tba_hpc.run.slurm_queue import job_states

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    notify.watch(RunDir.open(run), job_states, beside=beside)


@app.command(rich_help_panel=TRAINING)
def logs(
    run: RunPath,
    rank: Annotated[
        str | None,
        typer.Option(help="Show one log: trainer-0, searcher-3, mpiexec, batch or elastic; default: all."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines, also after requeues, until the run ends.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(help="Show the logs of this start of the ranks; default: the newest.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Show this many lines from the end of each log.")
    ] = 20,
) -> None:
    """Show the logs of RUN's ranks and batch script, each under its path."""
    from tba_hpc.report.logs import show_logs

    show_logs(RunDir.open(run), rank, attempt, lines=lines, follow=follow)


@app.command(rich_help_panel=TRAINING)
def stop(run: RunPath, wait: WaitSeconds = None) -> None:
    """Ask RUN, on this machine or as a Slurm job, to write a checkpoint and end."""
    from tba_hpc.launch import stop as launched

    run_dir = RunDir.open(run)
    typer.echo(printable(launched.stop(run_dir)))
    if wait is not None and (how := launched.await_end(run_dir, seconds=wait)):
        typer.echo(printable(how))


@app.command(rich_help_panel=TRAINING)
def cancel(run: RunPath, wait: WaitSeconds = None) -> None:
    """End RUN at once, on this machine or as a Slurm job, without waiting for a checkpoint."""
    from tba_hpc.launch import stop as launched

    run_dir = RunDir.open(run)
    typer.echo(printable(launched.cancel(run_dir)))
    if wait is not None and (how := launched.await_end(run_dir, seconds=wait)):
        typer.echo(printable(how))


@app.command(rich_help_panel=RESULTS)
def report(run: RunPath, as_json: AsJson = False) -> None:
    """Rewrite RUN/summary.json and RUN/report.html and print the summary."""
    _show_results(RunDir.open(run), anew=True, as_json=as_json)


@app.command(rich_help_panel=BEFORE)
def doctor(
    site: SitePath = None,
    config: Annotated[
        Path | None, typer.Option(help="Also check this config's models, task and chat template.")
    ] = None,
    run_root: RunRoot = None,
    launch: Annotated[bool, typer.Option("--launch", help="Also run a short job on two nodes.")] = False,
    wait: Annotated[float, typer.Option(help="Longest wait for the job of --launch, in seconds.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Check this cluster or machine; exit 1 if a run would fail."""
    from tba_hpc.checks import doctor as doctor_checks
    from tba_hpc.checks.facts import Facts, job_environment, run_checks
    from tba_hpc.checks.lists import DOCTOR
    from tba_hpc.launch.plan import load_site

    if launch and site is None:
        raise ConfigError("--launch starts a job: name the cluster with --site")
    settings, cluster = load_config(config) if config else None, load_site(site) if site else None
    findings = doctor_checks.examine(
        cluster,
        run_root or Path(settings.run.root if settings else "runs"),
        settings.model.path if settings else None,
        seconds=wait if launch else None,
    )
    if config and settings:
        fetch = ["tba", "fetch", str(config), *(["--site", str(site)] if site else [])]
        beside = modules.folder_of(config)
        facts = Facts(config=settings, fetched_by=shlex.join(fetch), beside=beside)
        if cluster:
            facts = replace(facts, site=cluster, environment=job_environment(cluster))
        findings += run_checks(DOCTOR, facts)
    doctor_checks.print_findings(findings, as_json=as_json)
    raise typer.Exit(int(any(finding.level == "problem" for finding in findings)))


@app.command(hidden=True)
def trial_rank(verb: str, run: RunPath) -> None:
    """Run one rank of the job that ``tba doctor --launch`` starts. VERB: train or search."""
    from tba_hpc.checks import rank

    role = VERBS[verb]
    run_dir = _open(run, role, None)
    try:
        rank.join_trial(run_dir, role)
    except (ConfigError, ExchangeError) as error:
        write_note(run_dir, role, 0, str(error), "refused")
        raise typer.Exit(Exit.REFUSED) from None


@app.command("plan", rich_help_panel=BEFORE)
def plan_run(
    config: ConfigOrRun,
    site: SitePath = None,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU, such as a100-40 or h100-80.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of this machine; default: one per trainer and engine.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes, as for tba submit.")] = None,
    trainer_nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes that train.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="Mean length of a prompt.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Estimate whether a run fits in GPU memory; if not, say which keys would help, and exit 1."""
    from tba_hpc.checks import planner
    from tba_hpc.commands.submission import file_and_overrides

    fits = planner.plan_run(
        load_config(*file_and_overrides(config, overrides or [])),
        overrides or [],
        site=site,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        trainer_nodes=trainer_nodes,
        prompt_tokens=prompt_tokens,
        as_json=as_json,
    )
    raise typer.Exit(int(not fits))


@app.command(rich_help_panel=RESULTS)
def audit(run: RunPath, as_json: AsJson = False) -> None:
    """Verify from RUN's files that no trajectory was lost, counted twice or skipped; exit 1 if one was."""
    from tba_hpc.report.audit import audit, print_audit

    verdict = audit(RunDir.open(run))
    print_audit(verdict, as_json=as_json)
    raise typer.Exit(int(not verdict.clean))


@app.command(rich_help_panel=RESULTS)
def evaluate(
    what: Subject,
    config: TaskConfig = None,
    task: Annotated[
        str | None, typer.Option(help="For a MODEL without --config: the task; --set gives its options.")
    ] = None,
    overrides: Overrides = None,
    split: Annotated[Split, typer.Option(help="Answer the prompts of this split.")] = "test",
    samples: Annotated[
        int, typer.Option(min=0, help="Completions to sample per prompt, for pass@k; 0: greedy answers only.")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=1e-3, help="Temperature of --samples; default: as in training.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of prompts; default: all.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="Measure the answers' perplexity under this model.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print the answers to the first N prompts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a model's score, with confidence intervals, and its answers' perplexity under the reference."""
    from tba_hpc.evaluate import find_target, measure, print_result

    target = find_target(what, config=config, task=task, overrides=overrides or [], reference=reference)
    result = measure(target, split=split, samples=samples, temperature=temperature, limit=limit, show=show)
    print_result(result, as_json=as_json)


@app.command(rich_help_panel=RESULTS)
def ask(
    what: Subject,
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION",
            help="A question; it is formatted like the task's prompts. For a task with rows of your own also "
            "a whole row, as JSON.",
        ),
    ],
    config: TaskConfig = None,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of answers.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0: greedy. Default: greedy; for several answers, as in training."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; default: as in training.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--plain", help="Use the chat template or not; default: as the task does."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model a question, with transformers instead of an engine."""
    from tba_hpc.commands import ask as asking

    modules.use_here()
    asked = asking.ask(
        what,
        question,
        config=config,
        overrides=overrides or [],
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        chat=chat,
    )
    asking.print_answers(asked, as_json=as_json)


@app.command("compare", rich_help_panel=RESULTS)
def compare_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Run directories.")],
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare the configs and results of runs, with 95 % intervals."""
    from tba_hpc.commands import compare

    compared = compare.compare(runs)
    if html:
        compare.write_comparison(html, compared)
    compare.print_comparison(compared, as_json=as_json)


@app.command(rich_help_panel=RESULTS)
def samples(
    run: RunPath,
    by: Annotated[
        Literal["newest", "oldest", "best", "worst", "changed"],
        typer.Option(
            help="Order: newest, oldest: by the weights' age; best, worst: by reward; changed: by mean log "
            "π/π_ref per token."
        ),
    ] = "newest",
    prompt: Annotated[int | None, typer.Option(help="Show only answers to the prompt of this id.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="Show only what the weights of these steps sampled.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="Show only what has this text in question or answer; case is ignored.")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Number of different ones to show; 0: all, repeated or not.")
    ] = 10,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Read RUN's completions: prompt, text, reward, and how often each was learned from."""
    from tba_hpc.report.samples.select import Query, run_decoder, select
    from tba_hpc.report.samples.show import print_samples, write_page

    run_dir = RunDir.open(run)
    query = Query(order=by, limit=limit or None, prompt=prompt, versions=_span(steps), text=text)
    decode = run_decoder(run_dir)
    selection = select(run_dir, query, decode)
    if html:
        write_page(html, run_dir, selection, decode)
        typer.echo(html, err=as_json)
    if as_json or not html:
        print_samples(selection, as_json=as_json)


@app.command(rich_help_panel=SCRIPTS)
def create(config: ConfigPath, overrides: Overrides = None) -> None:
    """Make the run directory of a config, or prepare the run in it for a resume; print its path."""
    from tba_hpc.checks.facts import Facts, refuse
    from tba_hpc.checks.lists import FILES
    from tba_hpc.commands.submission import file_and_overrides, load_anchored

    resolved = load_anchored(*file_and_overrides(config, overrides or []))
    refuse(FILES, Facts(config=resolved))
    refuse_owned(RunDir.check(resolved))  # creating would change the config of a run at work
    made = create_run(resolved)
    modules.keep(made, resolved, modules.folder_of(config))
    typer.echo(made.path)


@app.command(rich_help_panel=SCRIPTS)
def prepare(run: RunPath, overrides: Overrides = None) -> None:
    """Set RUN's numbers of ranks and begin a new attempt; a batch script calls it before each start."""
    run_dir = RunDir.open(run)
    refuse_owned(run_dir)
    run_dir.adapt(overrides or [])
    launch, logs = run_dir.config().launch, run_dir.begin_attempt()
    log_event(run_dir, "start", attempt=logs.name, trainers=launch.trainers, searchers=launch.searchers)


@app.command(rich_help_panel=SCRIPTS)
def train(run: RunPath, index: Index = None) -> None:
    """Run one trainer rank of RUN; mpiexec or srun starts it."""
    gc.disable()  # until training begins: imported modules stay, and scanning them takes seconds
    keep_caches_private(os.environ)
    from tba_hpc import runtime

    runtime.train(_open(run, "trainer", index), index)
    gc.freeze()  # else the interpreter scans all imported modules at its end, for seconds


def _span(text: str | None) -> tuple[int, int] | None:
    """Parse a span of steps, such as ``3-8`` or ``3``, to its first and last step. Raises ConfigError."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()):
        raise ConfigError(
            f"--steps {text} is not a span of steps: write for example --steps 0-20, or --steps 20"
        )
    return int(first), int(last)


def _open(path: Path, role: Role, index: int | None) -> RunDir:
    """Open the run directory for a rank, and send the rank's log messages to stderr.

    Raises ConfigError if ``path`` is not a run directory, or if another version of this package made the run.
    The error is also left as a note for the launcher.
    """
    from tba_hpc.launch.rank import noting

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    with noting(RunDir(path), role, index):  # fails if another version was installed since the launch
        return RunDir.open(path)


def _say_unfinished(run_dir: RunDir, reached: str, *, as_json: bool) -> None:
    """Say why a run has ended before its last step, or how to resume it; say nothing if it is finished."""
    if not run_dir.finished:
        why = [event["sentence"] for event in read_events(run_dir)[-1:] if "sentence" in event]
        then = f": {why[0]}" if why else f"; to resume: {run_command(run_dir)}"
        typer.echo(f"stopped at step {reached}{then}", err=as_json)


def _show_results(run_dir: RunDir, *, anew: bool, as_json: bool) -> int:
    """Write and print the run's summary, and write its report; return the number of optimizer steps done.

    anew: whether to replace an existing report. If this user may not write to the run directory, the summary
    is only printed.
    """
    from tba_hpc.report.summary import print_summary, summarise, write_summary

    if not os.access(run_dir.path, os.W_OK):
        print(
            f"you may not write to {run_dir.path}: its summary and report stay as they are", file=sys.stderr
        )
        summary = summarise(run_dir)
    elif anew or not run_dir.report.exists():
        from tba_hpc.report.page import write_report  # matplotlib costs a second

        summary = write_report(run_dir)
    else:
        summary = summarise(run_dir)
        write_summary(run_dir, summary)
    print_summary(run_dir, summary, as_json=as_json)
    return summary.steps


def main(command: Callable[[], None] = app, name: str = "tba") -> None:
    """Run ``command``. If it fails in a way that the user can fix, print ``NAME: sentence`` and exit."""
    print_in_any_encoding()
    try:
        try:
            command()
        finally:
            if sys.stdout:
                sys.stdout.flush()  # at exit, where the interpreter would flush, a failure is not caught
    except (
        ConfigError,
        OwnedError,
        StateError,
        DiskFullError,
        EngineError,
        LaunchError,
        SlurmError,
    ) as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        sys.exit(Exit.REFUSED)
    except OSError as error:
        if output_is_lost():
            if not isinstance(error, BrokenPipeError):  # whatever read the output has seen enough
                remedy = "redirect it elsewhere, or free space there"
                print(f"{name}: cannot write standard output ({error.strerror}): {remedy}", file=sys.stderr)
            sys.exit(Exit.FAILED)
        if not (sentence := refused_file(error)):
            raise
        print(f"{name}: {printable(sentence)}", file=sys.stderr)
        sys.exit(Exit.REFUSED)
