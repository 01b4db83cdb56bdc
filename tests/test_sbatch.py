"""The batch scripts: golden texts for every site and form, and the shell that they rely on."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.commands.lend import lend
from tba_hpc.config import ConfigError, parse_config, shipped
from tba_hpc.launch.plan import Site, load_site, plan, searchers_of_a_node
from tba_hpc.launch.sbatch import SUPERVISOR, Job, batch_script, elastic_script
from tba_hpc.run.directory import RunDir

REPOSITORY = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "slurm" / "golden"
SITES = shipped.files("sites")
FORMS = {"het": (8, False), "homogeneous": (8, True), "one-node": (1, False)}

CASES = [(site, form) for site in SITES for form in FORMS if form != "het" or load_site(SITES[site]).hetjob]


def _script(
    site: Site, nodes: int, *, homogeneous: bool = False, run: str = "/shared/runs/math-seed0"
) -> str:
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 8}})
    job = Job(
        name="tba-math", run=Path(run), supervisor=Path("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh")
    )
    return batch_script(job, plan(config, site, nodes, homogeneous=homogeneous), site)


def _bash(program: str, status: int = 0, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, timeout=30
    )
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.parametrize(("site", "form"), CASES)
def test_scripts_are_as_accepted(site: str, form: str) -> None:
    nodes, homogeneous = FORMS[form]
    _assert_as_accepted(f"{site}.{form}", _script(load_site(SITES[site]), nodes, homogeneous=homogeneous))


@pytest.mark.parametrize("name", SITES)
def test_scripts_of_elastic_searchers_are_as_accepted(name: str) -> None:
    site = load_site(SITES[name])
    config = parse_config({"model": {"path": "none"}, "launch": {"elastic": 32}})
    searcher = searchers_of_a_node(config, site)
    code = Path("/shared/runs/math-seed0/code/tba_hpc/launch/elastic_supervisor.sh")
    job = Job(name="tba-search-math", run=Path("/shared/runs/math-seed0"), supervisor=code)
    _assert_as_accepted(f"{name}.elastic", elastic_script(job, 4, searcher, site))


def _assert_as_accepted(name: str, text: str) -> None:
    golden = GOLDEN / f"{name}.sbatch"
    if "ACCEPT_GOLDEN" in os.environ:
        golden.write_text(text)
    assert golden.exists() and text == golden.read_text(), (
        f"the script differs from {golden}: look at it, and if it is meant, accept "
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
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(': "$CONDA_BACKUP"\n')  # as conda's, not for `set -u`
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
    settings = script[script.index("export RUN") : script.index("set -u")]
    supervised = settings.replace("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh", str(SUPERVISOR))
    assert _bash(supervised + 'printf "%s|" "$RUN" "$GREETING"', HOME="/h") == f'{run}|a "b" `c` $(d) /h|'


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
        '--bind "$RUN" /project/tba-hpc.sif'
    )
    assert f"TBA{wrapped} python -m tba_hpc)" in script
    assert f"RANK{wrapped} python -m mpi4py -m tba_hpc)" in script


@pytest.mark.parametrize(
    ("runtime", "keys", "words"),
    [
        ("apptainer", {}, 'apptainer exec --nv --bind /data --bind "$RUN" a.sif'),
        (
            "singularity",
            {"arguments": ["--rocm"]},
            'singularity exec --rocm --bind /data --bind "$RUN" a.sif',
        ),
        (
            "podman-hpc",
            {},
            'podman-hpc run --rm --env-host --gpu --volume=/data:/data "--volume=$RUN:$RUN" a.sif',
        ),
        ("shifter", {"binds": ["/d:/e"]}, "shifter --module=gpu --volume=/d:/e --image=a.sif"),
        ("plain", {"arguments": ["my", "in $X"], "binds": [], "image": None}, 'my "in $X"'),
    ],
)
def test_each_runtime_is_a_way_to_start_programs(runtime: str, keys: dict[str, Any], words: str) -> None:
    container = {"runtime": runtime, "image": "a.sif", "binds": ["/data"]} | keys
    script = _script(Site.model_validate({"container": container}), 2)
    assert f"\nTBA=({words} python -m tba_hpc)\n" in script
    assert f"\nRANK=({words} python -m mpi4py -m tba_hpc)\n" in script
    assert "\nCACHES_IN=/tmp\n" in script, "what TMPDIR names may not be there inside"


def test_no_driver_is_asked_for_where_there_are_no_gpus() -> None:
    script = _script(Site.model_validate({"gpus_per_node": 0, "container": {"image": "a.sif"}}), 2)
    assert '\nTBA=(apptainer exec --bind "$RUN" a.sif python -m tba_hpc)\n' in script


@pytest.mark.parametrize("homogeneous", [False, True])
def test_pyxis_gets_every_program_inside_by_its_step(homogeneous: bool) -> None:
    container = {"runtime": "pyxis", "image": "/a.sqsh", "binds": ["/data"], "arguments": ["--x"]}
    script = _script(Site.model_validate({"container": container}), 2, homogeneous=homogeneous)
    inside = '--container-image=/a.sqsh "--container-mounts=/data:/data,$RUN:$RUN" --x'
    assert f'--nodelist="$SLURMD_NODENAME" {inside} python -m tba_hpc)\n' in script
    assert "\nRANK=(python -m mpi4py -m tba_hpc)\n" in script
    ranks = script[script.index("ranks() {") :]
    assert ranks.count(inside) == (1 if homogeneous else 2), "each component has an image of its own"
    assert "TBA=(srun --mpi=none " in script


def test_memory_that_is_not_asked_for_is_asked_of_no_step() -> None:
    script = _script(Site(memory=None), 2)
    assert "--mem" not in script and "\nSTEP_MEMORY=\n" in script
    assert "--mem=0" in _script(Site(memory_per_cpu="2G"), 2) and "STEP_MEMORY" not in _script(Site(), 2)


def test_a_plugin_that_is_not_named_is_left_to_the_cluster() -> None:
    assert "exec srun --kill-on-bad-exit=1" in _script(Site(mpi=None), 2)
    assert "exec srun --mpi=pspmix --kill" in _script(Site(mpi="pspmix"), 2)


def test_one_allocation_is_asked_for_as_the_trainers_nodes() -> None:
    site = Site.model_validate({"trainer": {"partition": "h100", "memory": "1G"}, "searcher": {"qos": "low"}})
    script = _script(site, 2, homogeneous=True)
    assert "#SBATCH --partition=h100\n" in script and "#SBATCH --mem=1G\n" in script
    assert "#SBATCH --qos" not in script and "without searcher.qos=low" in script.replace("\n# ", " ")


def _surrounded(site: Site, tmp_path: Path, check: str, status: int = 0, **environment: str) -> str:
    """What ``check`` prints where the ranks would start; the run is in ``tmp_path``."""
    script = _script(site, 2, run=str(tmp_path / "run"))
    script = script.replace("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh", str(SUPERVISOR))
    (tmp_path / "run/slurm").mkdir(parents=True, exist_ok=True)
    return _bash(script[: script.index("ranks()")] + check, status, SLURM_JOB_ID="7", **environment)


BREAKS = '() {  : "$LMOD_SETTARG"; loaded="$loaded $*"; }'
"""A ``module`` as some sites have it: under ``set -u`` it fails."""


def test_set_up_modules_and_activation_are_not_under_set_u(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/activate").write_text('[ -n "$CONDA_BACKUP" ] || NAME="from $loaded"\n')
    site = Site(setup=('loaded="setup$NOWHERE"',), modules=("CUDA", "it's"), venv="$VENV")
    said = _surrounded(
        site, tmp_path, 'echo "$NAME"; echo "${-//[!u]/}"', **{"BASH_FUNC_module%%": BREAKS}, VENV=str(venv)
    )
    assert said == "from setup load CUDA it's\nu\n", "and what follows is"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"environment": {"HF_HOME": "$SCRATCH/hf"}},
            "SCRATCH is not set on n1, but the site key environment.HF_HOME holds it: set it under setup",
        ),
        ({"venv": "$SCRATCH/venv"}, "SCRATCH is not set on n1, but the site key venv holds it: set it"),
        (
            {"container": {"image": "${SCRATCH}/a.sif"}},
            "SCRATCH is not set on n1, but the site key container",
        ),
        ({"venv": "/no/such"}, "the site key venv leads to /no/such, which is no virtual environment on n1"),
    ],
)
def test_what_cannot_be_filled_in_is_one_sentence(
    keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    site = Site.model_validate({"setup": ["unset SCRATCH"], **keys})
    said = _surrounded(site, tmp_path, "echo not refused", 2, SLURMD_NODENAME="n1")
    assert sentence in said and len(said.splitlines()) == 1
    event = json.loads((tmp_path / "run/events.jsonl").read_text())
    assert event["event"] == "refused" and sentence in event["sentence"]


def test_a_default_in_a_value_needs_no_variable(tmp_path: Path) -> None:
    site = Site(environment={"LD_LIBRARY_PATH": "/my/lib:${LD_LIBRARY_PATH_OF_NOBODY:-}", "B": "$HOME/b"})
    assert _surrounded(site, tmp_path, 'echo "$LD_LIBRARY_PATH $B"', HOME="/h") == "/my/lib: /h/b\n"


# --- job_supervisor.sh ---


CACHES = [
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TVM_FFI_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "CUDA_CACHE_PATH",
    "HF_MODULES_CACHE",
    "MPLCONFIGDIR",
]


def _caches(run: Path, **environment: str) -> list[str]:
    run.mkdir(exist_ok=True)
    show = f"source {SUPERVISOR}; place_caches; for name in {' '.join(CACHES)}; do echo ${{!name}}; done"
    return _bash(f"unset {' '.join({*CACHES} - {*environment})}; {show}", RUN=str(run), **environment).split()


def test_what_engines_compile_is_kept_on_the_node_under_a_name_of_the_run(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    first = _caches(tmp_path / "a", TMPDIR=str(local))
    (place,) = {Path(path).parent for path in first}
    assert [Path(path).name for path in first] == CACHES and place.parent == local
    assert len(place.name) > 16, "nobody can make it before us"
    assert _caches(tmp_path / "a", TMPDIR=str(local)) == first, "a requeued job finds it again"
    assert not {*_caches(tmp_path / "b", TMPDIR=str(local))} & {*first}
    assert (tmp_path / "a/slurm/caches").stat().st_mode & 0o077 == 0


def test_jobs_that_place_their_caches_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        placed = list(pool.map(lambda _: tuple(_caches(tmp_path, TMPDIR=str(tmp_path))), range(24)))
    assert len({*placed}) == 1 and [path.name for path in (tmp_path / "slurm").iterdir()] == ["caches"]


def test_caches_that_were_placed_stay_and_others_lie_where_one_can_write(tmp_path: Path) -> None:
    mine = _caches(tmp_path, TRITON_CACHE_DIR="/my/triton", TMPDIR=str(tmp_path / "none"))
    assert mine[1] == "/my/triton" and Path(mine[0]).parents[1] == Path("/tmp")
    assert Path(_caches(tmp_path, CACHES_IN="/tmp", TMPDIR=str(tmp_path))[0]).parents[1] == Path("/tmp")


def test_steps_get_the_environment_of_the_script_and_no_options_of_a_shell() -> None:
    program = (
        f"source {SUPERVISOR}; env | grep -E '^(SRUN_|SQUEUE_|SCANCEL_|SLURM_EXPORT)'; echo \"$STEP_MEMORY\""
    )
    environment = {"SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "NONE", "SRUN_CPUS_PER_TASK": "9"}
    environment |= {"SQUEUE_PARTITION": "cpu", "SQUEUE_STATES": "PENDING", "SCANCEL_STATE": "PENDING"}
    assert _bash(program, **environment) == "SLURM_EXPORT_ENV=ALL\n--mem=0\n"
    assert _bash(program, STEP_MEMORY="") == "SLURM_EXPORT_ENV=ALL\n\n"


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
    (tmp_path / "finished").touch()
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
    (tmp_path / "shards/searcher-5000").mkdir()
    (tmp_path / "shards/searcher-5000/000000.h5").touch()
    assert _bash(check, RUN=str(tmp_path)) == "no\n", "searchers of other jobs work on"
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
say() { :; }; SLURM_JOB_ID=1; unset SECONDS; SECONDS=0  # bash counts it no more
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
        ("touch owners/searcher-5000.000001; [ $now -gt 200 ] || touch owners/trainer", ":", 230),
        ("[ $now -gt 200 ] || touch owners/trainer", "[ $now -gt 300 ] || echo 1.3", 350),
        (":", ":", 150),
        (":", "[ $now -gt 300 ] || echo 1.3", 390),
    ],
    ids=[
        "ranks-at-work",
        "silent-ranks",
        "a-glitch",
        "its-step-ended",
        "its-step-ended-others-search-on",
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


def test_a_job_of_trainers_alone_ends_with_a_lost_node_and_is_queued_again() -> None:
    """Unlike one that goes on with fewer searchers."""
    config = parse_config(
        {"model": {"path": "none"}, "train": {"prompts_per_step": 12}, "launch": {"elastic": 4}}
    )
    job = Job(name="tba-math", run=Path("/shared/runs/math-seed0"))
    text = batch_script(job, plan(config, Site(), 3, 3), Site())
    assert "trainers alone" in text and "--no-kill" not in text and "#SBATCH --requeue" in text


@pytest.mark.parametrize(
    ("answers", "placed"),
    [
        ("node2 node4 node5", "3 node2 node2 node4 node4 node5 node5"),
        ("node2 node4", "no answer came from node5"),
    ],
)
def test_a_job_of_trainers_alone_needs_all_its_nodes(tmp_path: Path, answers: str, placed: str) -> None:
    (tmp_path / "slurm").mkdir()
    program = f"""
    source {SUPERVISOR}; {FAKES} NODES=3 TRAINER_NODES=3 TRAINERS=6 SEARCHERS=0 SEARCHERS_PER_NODE=0
    allocated() {{ printf "%s\n" node2 node4 node5; }}
    srun() {{ printf "%s\n" {answers}; }}
    if place_ranks; then echo $NODES_LEFT $(cat "$RUN/slurm/hosts"); else echo "$WHY"; fi
    """
    assert _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="1").splitlines()[-1] == placed


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


QUEUE = """
say() { echo "$1"; }; event() { :; }; for_good() { false; }; count_idle() { :; }; choose_sides() { :; }
ANSWER_SECONDS=9 ANSWER_PAUSE=0 REQUEUE=yes
nth() { echo x >> "$RUN/$1"; [ "$(wc -l < "$RUN/$1")" -ge "$2" ]; }
"""
"""``nth NAME N``: whether it was called so often under that name."""


@pytest.mark.parametrize(
    ("squeue", "scontrol", "ends"),
    [
        ("nth a 3 && echo RUNNING", "echo requeued >&2", "back to the queue\n0\n"),
        (
            "nth a 3 && echo COMPLETING",
            "exit 9",
            "Slurm is ending this job (COMPLETING); nothing more …\n0\n",
        ),
        ("echo RUNNING", "nth b 3 || { echo 'Unable to contact slurm controller'; false; }", "back …\n0\n"),
        ("echo RUNNING", "echo 'Job violates policy'; false", "back …\nSlurm refused to requeue: …\n1\n"),
        ("ANSWER_SECONDS=0; :", "exit 9", "Slurm does not answer: submit the same run again to go on\n1\n"),
    ],
)
def test_a_controller_that_is_silent_for_a_while_costs_no_requeue(
    squeue: str, scontrol: str, ends: str, tmp_path: Path
) -> None:
    """No answer is no end; a job that is ended already must not run again."""
    program = f"""
    source {SUPERVISOR}; {QUEUE}
    squeue() {{ {squeue}; }}; scontrol() {{ {scontrol}; }}
    (requeue); echo $?
    """
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="1")
    assert fnmatch(said, ends.replace("…", "*").replace("[", "[[]"))


def test_of_an_array_one_job_is_looked_at_and_queued_again(tmp_path: Path) -> None:
    """The last of an array to start has the number of them all."""
    program = f"""
    source {SUPERVISOR}; {QUEUE}
    squeue() {{ echo "$@" >> "$RUN/asked"; echo RUNNING; }}; scontrol() {{ echo "$@" >> "$RUN/asked"; }}
    (requeue); cat "$RUN/asked"
    """
    array = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "2"}
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="36", **array)
    assert "--jobs=36_2 " in said and said.endswith("requeue 36_2\n")


# --- Nodes lent to a run ---


def test_elastic_searchers_are_an_array_of_jobs_with_as_many_as_fit_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"model": {"path": "none"}, "run": {"root": str(tmp_path)}, "launch": {"elastic": 8}}
    before = os.umask(0o022)
    run = RunDir.create(parse_config(tree))
    os.umask(before)
    site = REPOSITORY / "slurm/sites/generic.yaml"
    with pytest.raises(ConfigError, match=r"--nodes 3 with .* ask for --nodes 2, or .*launch\.elastic=12"):
        lend(run.path, site, 3)
    lend(run.path, site, 2, partition="preemptible", time="1:00:00", dry_run=True)
    text = capsys.readouterr().out
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ("--array=0-1", "--partition=preemptible", "--nodes=1", "--ntasks-per-node=4", "--time=1:00:00")
    assert {*wanted, "--gres=gpu:4", "--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= {
        *directives
    }
    assert text.endswith("\nsearch_for_a_while\n") and "elastic_supervisor.sh" in text
    assert '--ntasks="$1" --cpus-per-task=8 --kill-on-bad-exit=0 ' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not (run.path / "slurm").exists()


# --- elastic_supervisor.sh ---


@pytest.mark.parametrize(
    ("asked", "codes", "finished", "ends"),
    [
        (True, "0", False, "requeued 7\n0\n"),
        (True, "0", True, "0\n"),
        (False, "0", True, "0\n"),
        (False, "0", False, "requeued 7\n0\n"),  # preempted by TERM, of which only the searchers heard
        (False, "3", False, "0\n"),  # no place
        (False, "137 1 0", False, "requeued 7\n0\n"),  # two failures that another start mends
        (False, "137 1 3", False, "0\n"),
        (False, "1 1 137 0", False, "137\n"),  # more than RELAUNCHES
        (False, "2 0", False, "2\n"),  # what only the user can mend
    ],
)
def test_a_job_that_searches_comes_back_until_the_run_is_finished(
    asked: bool, codes: str, finished: bool, ends: str, tmp_path: Path
) -> None:
    assert _searched(tmp_path, codes, asked=asked, finished=finished) == ends


def test_searchers_that_were_there_for_long_have_not_failed_at_once(tmp_path: Path) -> None:
    assert _searched(tmp_path, "1 1 137 0", long_seconds=0) == "requeued 7\n0\n"


def test_searchers_that_slurm_ends_with_their_job_are_not_started_again(tmp_path: Path) -> None:
    assert _searched(tmp_path, "137 0", state="COMPLETING") == "0\n"
    assert (tmp_path / "codes").read_text() == "0\n", "the second start never was"


def _searched(
    run: Path,
    codes: str,
    *,
    asked: bool = False,
    finished: bool = False,
    long_seconds: int = 300,
    state: str = "RUNNING",
) -> str:
    """What a job did, and its status; its searchers end with these codes, start by start.

    asked: to stop, while they are there. finished: the run, when they end. state: of the job, for Slurm.
    """
    (run / "config.yaml").touch()
    (run / "slurm").mkdir()
    (run / "codes").write_text(codes.replace(" ", "\n") + "\n")
    over = 'touch "$RUN/finished"' if finished else ":"
    ask = "(command sleep 0.3; kill -USR1 $me) &" if asked else ""
    program = f"""
    exec 3>&1
    (
        SLURM_JOB_ID=7 SLURM_NTASKS=1 REQUEUE=yes RELAUNCHES=2 SAVE_SECONDS=60
        source {SUPERVISOR.with_name("elastic_supervisor.sh")}; say() {{ :; }}
        LONG_SECONDS={long_seconds}
        squeue() {{ echo {state}; }}
        sleep() {{ command sleep 0.05; }}
        scontrol() {{ echo "$1d" "$2" >&3; }}
        insist() {{ kill -USR1 "$1"; }}
        ranks() {{
            local asked=0 code; trap 'asked=1' USR1
            for i in $(seq 100); do [ $asked = {int(asked)} ] && break; sleep; done
            read -r code < "$RUN/codes"; sed -i 1d "$RUN/codes"
            {over}; exit "$code"
        }}
        me=$BASHPID; {ask}
        search_for_a_while
    )
    echo $?
    """
    return _bash(program, RUN=str(run))


# --- keep_searching.sh ---


@pytest.mark.parametrize(
    ("codes", "ends", "starts"),
    [
        ("0", 0, 1),
        ("2 0", 2, 1),  # what only the user can mend
        ("3 0", 3, 1),  # no place
        ("137 1 0", 0, 3),
        ("1 1 137 0", 137, 3),  # more than twice in a row
    ],
)
def test_an_elastic_searcher_is_started_again_by_itself(
    codes: str, ends: int, starts: int, tmp_path: Path
) -> None:
    assert _kept(tmp_path, codes, status=ends) == starts


def test_of_a_searcher_that_was_there_for_long_no_crash_is_counted(tmp_path: Path) -> None:
    assert _kept(tmp_path, "1 1 1 1 0", LONG_SECONDS="0") == 5


def test_a_searcher_that_was_asked_to_go_is_not_started_again(tmp_path: Path) -> None:
    """Though it crashed on its way, as one that is still importing does."""
    assert _kept(tmp_path, "138 0", before="kill -USR1 $PPID; sleep 0.3") == 1
    assert (tmp_path / "said").read_text() == "", "that was no crash"


def _kept(folder: Path, codes: str, *, before: str = ":", status: int = 0, **variables: str) -> int:
    """How often a searcher that ends with these codes, start by start, is started."""
    (folder / "codes").write_text(codes.replace(" ", "\n") + "\n")
    searcher = folder / "searcher"
    searcher.write_text(
        f'#!/bin/bash\necho >> "{folder}/starts"\n{before}\n'
        f'read -r code < "{folder}/codes"; sed -i 1d "{folder}/codes"; exit "$code"\n'
    )
    searcher.chmod(0o700)
    names = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "node1"}
    kept = SUPERVISOR.with_name("keep_searching.sh")
    program = f'sleep() {{ :; }}; export -f sleep; bash "{kept}" 2 "{searcher}"'
    (folder / "said").write_text(_bash(program, status, **names, **variables))
    return len((folder / "starts").read_text().splitlines())
