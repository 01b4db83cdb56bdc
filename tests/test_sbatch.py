"""The batch scripts: golden texts for every site and form, and the shell that they rely on."""

import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch.plan import Site, load_site, plan
from tba_hpc.launch.sbatch import SUPERVISOR, Job, batch_script

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
    "path", [*sorted(GOLDEN.glob("*.sbatch")), *SHIPPED, SUPERVISOR], ids=lambda path: path.name
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


WATCHED = """
say() { :; }; SLURM_JOB_ID=1 SECONDS=0
mkdir -p "$RUN/owners" "$RUN/slurm"; cd "$RUN"
now=0  # time goes by in the fakes alone
sleep() { now=$((now + $1)) SECONDS=$now; command sleep 0.01; rank; [ $now -lt 600 ]; }
squeue() { echo $now >> asked; echo 1.batch; step; true; }
command sleep 60 & srun=$!
watch_step "$srun"
echo $now; kill "$srun" 2>/dev/null; true
"""


@pytest.mark.parametrize(
    ("rank", "step", "seconds"),
    [
        ("touch owners/trainer", "echo 1.3", 600),
        (":", "echo 1.3", 600),
        ("touch owners/trainer", ":", 600),
        ("[ $now -gt 200 ] || touch owners/trainer", ":", 230),
        ("[ $now -gt 200 ] || touch owners/trainer", "[ $now -gt 300 ] || echo 1.3", 350),
        (":", ":", 150),
        (":", "[ $now -gt 300 ] || echo 1.3", 390),
    ],
    ids=[
        "ranks-at-work",
        "silent-ranks",
        "a-glitch",
        "its-step-ended",
        "its-silent-step-ended",
        "it-never-had-one",
        "its-silent-step-ended-late",
    ],
)
def test_an_srun_that_outlives_its_step_is_ended(tmp_path: Path, rank: str, step: str, seconds: int) -> None:
    """rank, step: what leaves a sign of life, and what squeue shows. At most a question in two minutes."""
    program = f"source {SUPERVISOR}; rank() {{ {rank}; }}; step() {{ {step}; }}; {WATCHED}"
    assert int(_bash(program, RUN=str(tmp_path))) == seconds
    asked = tmp_path / "asked"
    times = [int(time) for time in asked.read_text().split()] if asked.exists() else []
    assert all(later - before >= 120 for before, later in pairwise(times))
    assert bool(times) != (rank == "touch owners/trainer"), (
        "ranks that give signs of life are not asked after"
    )


FAKES = """
say() { :; }; event() { :; }; ending() { false; }; refuse() { echo "refused: $1"; exit 2; }
allocated() { case ${1:-} in 0) echo node2 ;; 1) seq -f node%g 3 4 ;; *) seq -f node%g 2 4 ;; esac; }
lines() { tr , '\\n' <<< "$1"; }
scontrol() { if [ $2 = hostnames ]; then lines "$3"; else lines "$3" | sort | paste -sd,; fi; }
timeout() { shift 3; "$@"; }
"""


@pytest.mark.parametrize(
    ("answers", "placed"),
    [
        ("node2 node3 node4", "yes 2"),
        ("node2 node4", "no answer came from node3 4"),
        ("node2 !node3 node4", "refused: node3 does not see"),
        ("", "no answer came from node2 node3 node4 4"),
    ],
)
def test_one_step_of_a_component_tells_which_nodes_answer(tmp_path: Path, answers: str, placed: str) -> None:
    """srun says who answers, whom it was not asked for left out; two steps a look, and at most two looks."""
    program = f"""
    source {SUPERVISOR}; {FAKES}
    srun() {{ echo x >> "$RUN/sruns"; printf "%s\n" {answers}; }}
    if place_components; then echo "yes $(wc -l < "$RUN/sruns")"; else echo "$WHY $(wc -l < "$RUN/sruns")"; fi
    """
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "RUN": str(tmp_path), "SLURM_JOB_ID": "1"},
    )
    assert done.stdout.strip().startswith(placed), done.stderr


def test_a_homogeneous_job_does_without_a_node_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    program = f"""
    source {SUPERVISOR}; {FAKES} NODES=3 TRAINER_NODES=1 TRAINERS=1 SEARCHERS_PER_NODE=2
    srun() {{ echo x >> "$RUN/sruns"; printf "%s\n" node2 node4; }}
    place_ranks && echo $NODES_LEFT $SEARCHERS $(wc -l < "$RUN/sruns") $(cat "$RUN/slurm/hosts")
    """
    assert _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="1") == "2 2 1 node2 node4 node4\n"


@pytest.mark.parametrize(
    ("sealed", "said", "status"),
    [
        (True, "this site does not requeue: submit the same run again to go on", 0),
        (False, "nothing was sealed (no answer came from node3), and this site does not requeue", 2),
    ],
)
def test_a_job_that_may_not_requeue_succeeds_only_with_work_done(
    tmp_path: Path, sealed: bool, said: str, status: int
) -> None:
    for folder in ("slurm", "shards", "checkpoints"):
        (tmp_path / folder).mkdir()
    (tmp_path / "slurm/allocated").touch()
    os.utime(tmp_path / "slurm/allocated", (1, 1))
    if sealed:
        (tmp_path / "shards/000000.h5").touch()
    program = f"""
    source {SUPERVISOR}; REQUEUE=no WHY="no answer came from node3"; state_of() {{ echo RUNNING; }}
    requeue
    """
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "RUN": str(tmp_path), "SLURM_JOB_ID": "1"},
    )
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr
