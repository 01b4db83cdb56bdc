"""What a submission leaves to type; what needs Slurm for it is in slurm/test_submit.py."""

import sys
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import new_run

from tba_hpc.checks.facts import Facts, SlurmFacts
from tba_hpc.checks.slurm_checks import check_time
from tba_hpc.commands import submit
from tba_hpc.commands.submission import Submission, again
from tba_hpc.commands.submit import (
    Ready,
    _left_out,
    _require_partition,
    _slots_in_use,
    _submit,
    _why,
    submit_elastic,
)
from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Site
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import take_lease

GENERIC = Path(__file__).parents[1] / "slurm/sites/generic.yaml"
PYTHON = quote(sys.executable)


@pytest.mark.parametrize(
    ("nodes", "elastic", "said"),
    [
        (1, 0, "as split"),
        (1, 2, "as split, 2 slots for elastic searchers"),
        (2, 0, "as split; launch.trainers and .searchers do not count on several nodes"),
    ],
)
def test_a_submission_names_the_slots_and_the_keys_without_effect(
    tmp_path: Path, nodes: int, elastic: int, said: str
) -> None:
    tree = {"run": {"root": str(tmp_path)}, "model": {"path": "models/tiny"}, "launch": {"elastic": elastic}}
    split = SimpleNamespace(nodes=nodes, why="as split")
    ready = SimpleNamespace(run=RunDir.create(parse_config(tree)), split=split)
    assert _why(ready) == said  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/env/bin/tba", "/env/bin/tba submit"),
        ("/clone/tools/submit.py", f"{PYTHON} /clone/tools/submit.py"),
        ("/env/tba_hpc/__main__.py", f"{PYTHON} -P -m tba_hpc submit"),
    ],
)
def test_what_submits_a_run_again_is_what_was_typed(
    program: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    submission = Submission(
        config=Path("mine.yaml"), site=Path("generic"), nodes=3, trainer_nodes=1, time="10"
    )
    options = (
        f"--config '{tmp_path}/a run' --site {quote(str(GENERIC))} --nodes 3 --trainer-nodes 1 --time 10"
    )
    assert again(submission, RunDir(tmp_path / "a run")) == f"{command} {options}"


def test_a_run_that_slurm_refused_is_to_be_submitted_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = Submission(
        config=Path("math_gsm8k"), site=Path("generic"), nodes=2, overrides=[f"run.root={tmp_path}"]
    )
    site = submission.load_site()
    config, split = submission.resolve(site)
    run = RunDir.check(config)
    ready = Ready(
        submission=submission, site=site, config=config, split=split, run=run, warnings=[], after=None
    )

    def send(_: RunDir, script: str) -> str:
        raise slurm.SubmitError("Slurm refused the job: no")

    monkeypatch.setattr(slurm, "send", send)
    with pytest.raises(slurm.SubmitError):
        _submit(ready)
    found = run_state(_monitor(run))
    assert (found.state, found.command) == ("created", again(submission, run))
    assert [event["event"] for event in read_events(run)] == ["prepared"], "no job was submitted"


def _monitor(run: RunDir) -> RunMonitor:
    monitor = RunMonitor(run)
    monitor.update()
    return monitor


def test_a_chain_that_slurm_cuts_short_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm").mkdir()

    def send(_: RunDir, script: str) -> str:
        if script == "after 8":
            raise slurm.SubmitError("Slurm refused the job: too many")
        return "8"

    monkeypatch.setattr(slurm, "send", send)
    warning = slurm.chain(RunDir(tmp_path), "7", "after {}".format, length=4)
    assert warning == "the chain has 2 of 4 jobs: Slurm refused the job: too many"
    assert (tmp_path / "slurm/chain").read_text() == "7\n8\n"


def test_what_a_shell_says_of_jobs_is_said_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SRUN_NTASKS"):
        monkeypatch.setenv(name, "x")
    (finding,) = _left_out("#!/bin/bash\n#SBATCH --partition=gpu\n")
    assert finding.level == "warning"
    assert finding.sentence.startswith("SBATCH_PARTITION of this shell would override the batch script")
    monkeypatch.delenv("SBATCH_PARTITION")
    assert _left_out("#!/bin/bash\n#SBATCH --partition=gpu\n") == [], "the account is left open"


def test_a_time_that_is_short_for_a_start_is_said_so() -> None:
    (finding,) = check_time(Facts(site=Site(time="5", signal_seconds=60)))
    assert finding.sentence.startswith("time=5 leaves only 180 s to start engines and train: ask for more")
    assert list(check_time(Facts(site=Site(time="10", signal_seconds=60)))) == []


def test_searchers_that_would_find_no_slot_are_counted(tmp_path: Path) -> None:
    tree = {"run": {"root": str(tmp_path)}, "model": {"path": "none"}, "launch": {"elastic": 3}}
    run = RunDir.create(parse_config(tree))
    assert _slots_in_use(run, run.config(), 3) == []
    lease = take_lease(run, [rank_name("searcher", index) for index in run.config().launch.elastic_searchers])
    assert lease
    (finding,) = _slots_in_use(run, run.config(), 3)
    assert finding.sentence.startswith(
        "1 of 3 searchers would find no slot if all started now: 1 of launch.elastic=3 are in use: a job that"
    )
    assert _slots_in_use(run, run.config(), 2) == []
    lease.release()
    assert _slots_in_use(run, run.config(), 3) == []


def test_a_partition_that_is_none_is_the_options_fault() -> None:
    facts = Facts(slurm=SlurmFacts.of("", "PartitionName=main\nPartitionName=low", ""))
    for known in (None, "low", "low,main"):
        _require_partition(known, facts)
    with pytest.raises(
        ConfigError, match="--partition gpuu is no partition of this cluster: give main or low"
    ):
        _require_partition("gpuu", facts)


def test_a_finished_run_takes_no_searchers_however_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    run.finished_file.touch()
    submit_elastic(Submission(config=run.path, site=GENERIC, nodes=9))
    assert capsys.readouterr().out.startswith("finished already, so it takes no searchers: ")
    with pytest.raises(ConfigError, match="--nodes 9 with 4 searchers each is more than the run takes"):
        submit_elastic(Submission(config=run.path, site=GENERIC, nodes=9), show=True)


def test_a_login_is_asked_for_once_for_the_unfinished_seeds_of_a_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the first seed is finished; not where the job itself may bring a login."""
    asked: list[object] = []
    monkeypatch.setattr(submit, "require_login", lambda config, *_: asked.append(config))
    monkeypatch.setattr(submit, "is_done", lambda run, _: run == "finished")

    def ready(file: str, run: str, **keys: object) -> Any:
        site, submission = Site.model_validate({"gpus_per_node": 0, **keys}), SimpleNamespace(config=file)
        return SimpleNamespace(submission=submission, run=run, config=f"{file} {run}", site=site)

    runs = [ready("a", "finished"), ready("a", "one"), ready("a", "two"), ready("b", "one")]
    submit._require_logins([*runs, ready("c", "one", setup=["source login"]), ready("d", "finished")])
    assert asked == ["a two", "b one"]
