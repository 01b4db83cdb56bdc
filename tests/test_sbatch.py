"""The batch scripts: golden texts for every site and form, and the shell that they rely on."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch.plan import Site, load_site, plan
from tba_hpc.launch.sbatch import SUPERVISOR, Job, batch_script
from tba_hpc.run.directory import RunDir
from tba_hpc.submit import lend

REPOSITORY = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "slurm" / "golden"
SITES = ("generic", "a100x4-pmix", "cray-homogeneous")
FORMS = {"het": (8, False), "homogeneous": (8, True), "one-node": (1, False)}

CASES = [
    (site, form)
    for site in SITES
    for form in FORMS
    if (site, form) != ("cray-homogeneous", "het")  # it has none
]


def _script(
    site: Site, nodes: int, *, homogeneous: bool = False, run: str = "/shared/runs/math-seed0"
) -> str:
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 8}})
    job = Job(
        name="tba-math", run=Path(run), supervisor=Path("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh")
    )
    return batch_script(job, plan(config, site, nodes, homogeneous=homogeneous), site)


def _bash(program: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("site", "form"), CASES)
def test_scripts_are_as_accepted(site: str, form: str) -> None:
    nodes, homogeneous = FORMS[form]
    text = _script(load_site(REPOSITORY / f"slurm/sites/{site}.yaml"), nodes, homogeneous=homogeneous)
    golden = GOLDEN / f"{site}.{form}.sbatch"
    if "ACCEPT_GOLDEN" in os.environ:
        golden.write_text(text)
    assert golden.exists() and text == golden.read_text(), (
        f"the script for {site}, {form} differs from {golden}: look at it, and if it is meant, accept "
        "it with ACCEPT_GOLDEN=1 python -m pytest tests/test_sbatch.py"
    )


SHIPPED = sorted((REPOSITORY / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize(
    "path",
    [*sorted(GOLDEN.glob("*.sbatch")), *SHIPPED, *sorted(SUPERVISOR.parent.glob("*.sh"))],
    ids=lambda path: path.name,
)
def test_bash_can_read_it(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


TWINS = {"math": "math_gsm8k", "tldr": "tldr_pythia410m", "redteam": "redteam_gpt2"}


@pytest.mark.parametrize(("script", "config"), TWINS.items())
def test_a_script_to_edit_by_hand_makes_the_run_of_its_config(
    script: str, config: str, tmp_path: Path
) -> None:
    """Up to the first command, where a stand-in for Python notes its words and refuses."""
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" > words; exit 2\n')
    (tmp_path / "python").chmod(0o700)
    counts = {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "3"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **counts}
    done = subprocess.run(["bash", REPOSITORY / f"slurm/tba_{script}.sbatch"], env=environment, timeout=30)
    assert done.returncode == 2
    wanted = f"-m tba_hpc create configs/{config}.yaml --set launch.trainers=1 --set launch.searchers=3"
    assert (tmp_path / "words").read_text().startswith(wanted)


def test_directives_come_before_the_first_command() -> None:
    """sbatch reads none after it."""
    lines = [line for line in _script(Site(), 8).splitlines() if line]
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_component_1_says_for_itself_what_it_does_not_inherit() -> None:
    site = load_site(REPOSITORY / "slurm/sites/a100x4-pmix.yaml")
    before, after = _script(site, 8).split("#SBATCH hetjob\n")
    for option in (
        "--partition=",
        "--account=",
        "--nodes=",
        "--cpus-per-task=",
        "--mem=",
        "--gres=",
        "--signal=",
    ):
        assert f"#SBATCH {option}" in before and f"#SBATCH {option}" in after, option


def test_a_het_job_never_asks_for_no_kill() -> None:
    """With it, the loss of a searcher node leaves component 0 pending for ever and component 1 failed."""
    assert "--no-kill" not in _script(Site(), 8)
    assert "--no-kill" in _script(Site(), 8, homogeneous=True)


def test_hostile_names_stay_words() -> None:
    run = '/runs/it\'s; $(touch x) "here"'
    site = Site(environment={"GREETING": 'a "b" `c` $(d) $HOME'})
    script = _script(site, 2, run=run)
    settings = script[script.index("set -u") : script.index("source ")]
    assert _bash(settings + 'printf "%s|" "$RUN" "$GREETING"', HOME="/h") == f'{run}|a "b" `c` $(d) /h|'


@pytest.mark.parametrize(
    "keys", [{"partition": "gpu\nrm -rf ~"}, {"sbatch_options": ["--exclude=a\rb"]}, {"account": "a\x1bb"}]
)
def test_a_value_that_would_leave_its_line_is_refused(keys: dict[str, Any]) -> None:
    """It would be a command of the script."""
    with pytest.raises(ConfigError, match=r"cannot stand in a batch script: take the control character out"):
        _script(Site(**keys), 8)
    with pytest.raises(ConfigError, match=r"'--comment=/runs/a\\nreboot' cannot stand in a batch script"):
        _script(Site(), 8, run="/runs/a\nreboot")


def test_the_name_of_a_variable_is_a_name(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("environment: {'A=1; reboot; B': x}")
    with pytest.raises(ConfigError, match=r"site key 'environment\.A=1; reboot; B.*should match pattern"):
        load_site(site)


def test_the_container_wraps_both_commands() -> None:
    script = _script(load_site(REPOSITORY / "slurm/sites/cray-homogeneous.yaml"), 8)
    wrapped = (
        "=(singularity exec --rocm --bind /scratch --bind /project --bind /var/spool/slurmd "
        "/project/tba-hpc.sif"
    )
    assert f"TBA{wrapped} python -m tba_hpc)" in script
    assert f"RANK{wrapped} python -m mpi4py -m tba_hpc)" in script


# --- job_supervisor.sh ---


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        (4, "a b", "a a b b"),
        (7, "a b", "a a a a b b b"),
        (2, "a b c", "a b"),
        (3, "a", "a a a"),
        (3, "a b c", "a b c"),
    ],
)
def test_ranks_are_spread_in_blocks(ranks: int, hosts: str, expected: str) -> None:
    assert _bash(f"source {SUPERVISOR}; spread {ranks} {hosts}").split() == expected.split()


def test_only_the_leaders_word_makes_a_run_finished(tmp_path: Path) -> None:
    check = f"source {SUPERVISOR}; finished && echo yes || echo no"
    assert _bash(check, RUN=str(tmp_path)) == "no\n"
    (tmp_path / "summary.json").write_text('{\n  "finished": false\n}')
    assert _bash(check, RUN=str(tmp_path)) == "no\n"
    (tmp_path / "summary.json").write_text('{\n  "finished": true\n}')
    assert _bash(check, RUN=str(tmp_path)) == "yes\n"


def test_progress_is_a_shard_or_a_checkpoint_sealed_since_the_start(tmp_path: Path) -> None:
    check = f"source {SUPERVISOR}; progress && echo yes || echo no"
    for folder in ("slurm", "shards/searcher-0000", "checkpoints/step-000002"):
        (tmp_path / folder).mkdir(parents=True)
    old = tmp_path / "shards/searcher-0000/000000.h5"
    old.touch()
    os.utime(old, (1, 1))
    (tmp_path / "slurm/start").touch()
    os.utime(tmp_path / "slurm/start", (2, 2))
    assert _bash(check, RUN=str(tmp_path)) == "no\n"
    (tmp_path / "checkpoints/step-000002/state.json").touch()
    assert _bash(check, RUN=str(tmp_path)) == "no\n", "a checkpoint without COMPLETE is none"
    (tmp_path / "checkpoints/step-000002/COMPLETE").touch()
    assert _bash(check, RUN=str(tmp_path)) == "yes\n"


def test_ranks_that_were_asked_before_they_listened_have_stopped_not_failed(tmp_path: Path) -> None:
    check = f"source {SUPERVISOR}; STOP=1; for code in 14 137 138; do unheard $code && echo $code; done; true"
    for folder in ("slurm", "logs/latest"):
        (tmp_path / folder).mkdir(parents=True)
    assert _bash(check, RUN=str(tmp_path)) == "14\n138\n", "137: they hung, and were ended"
    (tmp_path / "logs/latest/at-work").touch()
    assert _bash(check, RUN=str(tmp_path)) == "", "the trainer was at work"
    (tmp_path / "logs/latest/at-work").unlink()
    (tmp_path / "logs/latest/refused-trainer-0000.txt").write_text("there is no such model\n")
    assert _bash(check, RUN=str(tmp_path)) == "", "one met what only the user can mend"


def test_awaiting_survives_signals_and_returns_the_childs_status() -> None:
    program = f"""
    source {SUPERVISOR}; say() {{ :; }}; SAVE_SECONDS=60
    (trap 'exit 7' USR1; for i in $(seq 100); do sleep 0.05; done) & STEP=$!
    (sleep 0.3; kill -USR1 $$) &
    await $STEP; echo "$? $STOP"; kill $GUARD
    """
    assert _bash(program) == "7 1\n"


@pytest.mark.parametrize(
    ("steps", "ended"),
    [("1.3 none none", "yes"), ("none", "yes"), ("1.3", "no"), ("1.3 none 1.3 none 1.3", "no")],
    ids=["its-step-ended", "it-never-had-one", "its-step-runs", "a-glitch"],
)
def test_an_srun_that_outlives_its_step_is_ended(steps: str, ended: str) -> None:
    """The step as squeue shows it, look by look; after the last look it stays as it is, for 20 looks."""
    program = f"""
    source {SUPERVISOR}; say() {{ :; }}; SLURM_JOB_ID=1
    looks=({steps}); file=$(mktemp); echo 0 > "$file"
    sleep() {{ command sleep 0.01; [ "$(cat "$file")" -lt 20 ]; }}
    squeue() {{
        local look; read -r look < "$file"; echo $((look + 1)) > "$file"
        [ "$look" -lt ${{#looks[@]}} ] || look=$((${{#looks[@]}} - 1))
        echo 1.batch; [ "${{looks[look]}}" = none ] || echo "${{looks[look]}}"
    }}
    command sleep 60 & srun=$!
    watch_step "$srun"
    command sleep 0.1; kill -0 "$srun" 2>/dev/null && echo no || echo yes
    kill "$srun" 2>/dev/null; rm "$file"
    """
    assert _bash(program) == f"{ended}\n"


# --- Nodes lent to a run ---


def test_nodes_are_lent_by_an_array_of_jobs_with_as_many_searchers_as_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"model": {"path": "none"}, "run": {"root": str(tmp_path)}, "launch": {"elastic": 8}}
    before = os.umask(0o022)
    run = RunDir.create(parse_config(tree))
    os.umask(before)
    site = REPOSITORY / "slurm/sites/generic.yaml"
    with pytest.raises(ConfigError, match=r"--nodes 3 with 4 searchers each is more .*launch\.elastic=8"):
        lend(run.path, site, 3)
    lend(run.path, site, 2, partition="preemptible", time="1:00:00", dry_run=True)
    text = capsys.readouterr().out
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ("--array=0-1", "--partition=preemptible", "--nodes=1", "--ntasks-per-node=4", "--time=1:00:00")
    assert {*wanted, "--gres=gpu:4", "--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= {
        *directives
    }
    assert text.endswith("\nsearch_for_a_while\n") and "elastic_supervisor.sh" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not (run.path / "slurm").exists()


# --- elastic_supervisor.sh ---


@pytest.mark.parametrize(
    ("asked", "code", "finished", "ends"),
    [
        (True, 0, False, "requeued 7\n0\n"),
        (True, 0, True, "0\n"),
        (False, 0, True, "0\n"),
        (False, 3, False, "0\n"),  # no place
        (False, 1, False, "1\n"),
        (False, 2, False, "2\n"),
    ],
)
def test_a_job_that_searches_comes_back_until_the_run_is_finished(
    asked: bool, code: int, finished: bool, ends: str, tmp_path: Path
) -> None:
    """Its searchers end with ``code``, before it was asked to stop or when it was."""
    (tmp_path / "config.yaml").touch()
    over = 'touch "$RUN/finished"' if finished else ":"
    ask = "(sleep 0.3; kill -USR1 $me) &" if asked else ""
    program = f"""
    (
        SLURM_JOB_ID=7 SLURM_NTASKS=1 REQUEUE=yes SAVE_SECONDS=60 TBA=(tba)
        source {SUPERVISOR.with_name("elastic_supervisor.sh")}; say() {{ :; }}
        squeue() {{ echo RUNNING; }}
        scontrol() {{ echo "$1d" "$2"; }}
        insist() {{ kill -USR1 "$1"; }}
        srun() {{
            local asked=0; trap 'asked=1' USR1
            for i in $(seq 100); do [ $asked = {int(asked)} ] && break; sleep 0.05; done
            {over}; exit {code}
        }}
        me=$BASHPID; {ask}
        search_for_a_while
    )
    echo $?
    """
    assert _bash(program, RUN=str(tmp_path)) == ends
