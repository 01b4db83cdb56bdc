"""The batch scripts: golden texts for every site and form, and the shell that they rely on."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from tba_hpc.commands.submission import HEADER_SIGNAL, Submission
from tba_hpc.commands.submit import submit_elastic
from tba_hpc.config import ConfigError, parse_config, shipped
from tba_hpc.launch.plan import Container, Site, load_site, plan, searchers_of_a_node
from tba_hpc.launch.sbatch import GONE, SUPERVISOR, TBA, Job, batch_script, elastic_script
from tba_hpc.run.directory import RunDir

REPOSITORY = Path(__file__).parents[1]
SOURCED = quote(str(SUPERVISOR))
GOLDEN = Path(__file__).parent / "slurm" / "golden"
SITES = shipped.files("sites")
FORMS = {"het": (8, False), "homogeneous": (8, True), "one-node": (1, False)}

MAIN = {site: "het" if load_site(SITES[site]).hetjob else "homogeneous" for site in SITES}
CASES = [(site, form) for site in SITES for form in FORMS if form == MAIN[site] or site == "generic"]
"""Of sites the form that they will use: the forms differ alike everywhere."""


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


@pytest.mark.parametrize("name", ["generic", "lumi", "pyxis-cloud"])
def test_scripts_of_elastic_searchers_are_as_accepted(name: str) -> None:
    site = load_site(SITES[name])
    config = parse_config({"model": {"path": "none"}, "launch": {"elastic": 32}})
    searcher = searchers_of_a_node(config, site)
    code = Path("/shared/runs/math-seed0/code/tba_hpc/launch/job_supervisor.sh")
    job = Job(name="tba-search-math", run=Path("/shared/runs/math-seed0"), supervisor=code, rank=TBA)
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
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" > words; echo "$PYTHONPATH" > path; exit 2\n')
    (tmp_path / "python").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", REPOSITORY / f"slurm/tba_{script}.sbatch"], env=environment, timeout=30)
    assert done.returncode == 2
    wanted = f"submit --print --config configs/{config}.yaml --site slurm/sites/generic.yaml --run-root"
    assert (tmp_path / "words").read_text() == f"-P -m tba_hpc {wanted} {tmp_path}/runs\n"
    assert (tmp_path / "path").read_text() == f"{tmp_path}\n", "the package need not be installed"


def test_hostile_names_stay_words() -> None:
    run = '/runs/it\'s; $(touch x) "here"'
    site = Site(environment={"GREETING": 'a "b" `c` $(d) $[1+1] $HOME'})
    script = _script(site, 2, run=run)
    settings = script[script.index("export RUN") : script.index("set -u")]
    supervised = settings.replace("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh", SOURCED)
    assert (
        _bash(supervised + 'printf "%s|" "$RUN" "$GREETING"', HOME="/h") == f'{run}|a "b" `c` $(d) $[1+1] /h|'
    )


def test_percents_of_a_path_are_none_of_slurms_patterns() -> None:
    for form in (2, 8):
        assert "#SBATCH --output='/runs/100%%util a%%j/slurm/job-%j.log'\n" in _script(
            Site(), form, run="/runs/100%util a%j"
        )
    with pytest.raises(ConfigError, match=r"/runs/a\\b contains a backslash, and then Slurm does not put"):
        _script(Site(), 2, run="/runs/a\\b")


@pytest.mark.parametrize(
    "keys", [{"partition": "gpu\nrm -rf ~"}, {"sbatch_options": ["--exclude=a\rb"]}, {"account": "a\x1bb"}]
)
def test_a_value_that_would_leave_its_line_is_refused(keys: dict[str, Any]) -> None:
    """It would be a command of the script."""
    with pytest.raises(
        ConfigError, match=r"cannot be written to a batch script: remove the control character"
    ):
        _script(Site(**keys), 8)
    with pytest.raises(
        ConfigError, match=r"'--comment=/runs/a\\nreboot' cannot be written to a batch script"
    ):
        _script(Site(), 8, run="/runs/a\nreboot")


def test_the_name_of_a_variable_is_a_name(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("environment: {'A=1; reboot; B': x}")
    with pytest.raises(
        ConfigError, match=r"site key 'environment\.A=1; reboot; B.*but a name has only letters"
    ):
        load_site(site)


@pytest.mark.parametrize(
    ("runtime", "keys", "words"),
    [
        ("apptainer", {}, 'apptainer exec --nv --bind /data --bind "$RUN" a.sif'),
        (
            "podman-hpc",
            {},
            'podman-hpc run --rm --env-host --gpu --volume=/data:/data "--volume=$RUN:$RUN" a.sif',
        ),
        ("shifter", {"binds": ["/d:/e"]}, "shifter --module=gpu --volume=/d:/e --image=a.sif"),
        ("plain", {"arguments": ["my", "in $X"], "binds": [], "image": None}, 'my "in $X"'),
    ],
)
def test_a_runtime_is_a_way_to_start_programs(runtime: str, keys: dict[str, Any], words: str) -> None:
    container = {"runtime": runtime, "image": "a.sif", "binds": ["/data"]} | keys
    script = _script(Site.model_validate({"container": container}), 2)
    assert f"\nTBA=({words} python -P -m tba_hpc)\n" in script
    assert f"\nRANK=({words} python -P -m mpi4py -m tba_hpc)\n" in script
    assert "\nCACHES_IN=/tmp\n" in script, "what TMPDIR names may not be there inside"


def test_no_driver_is_asked_for_where_there_are_no_gpus() -> None:
    script = _script(Site.model_validate({"gpus_per_node": 0, "container": {"image": "a.sif"}}), 2)
    assert '\nTBA=(apptainer exec --bind "$RUN" a.sif python -P -m tba_hpc)\n' in script


def test_pyxis_gets_the_programs_of_both_components_inside_by_their_steps() -> None:
    container = {"runtime": "pyxis", "image": "/a.sqsh", "binds": ["/data"], "arguments": ["--x"]}
    script = _script(Site.model_validate({"container": container}), 2)
    inside = '--container-image=/a.sqsh "--container-mounts=/data:/data,$RUN:$RUN" --x'
    assert f'--nodelist="$SLURMD_NODENAME" {inside} python -P -m tba_hpc)\n' in script
    assert "\nRANK=(python -P -m mpi4py -m tba_hpc)\n" in script
    ranks = script[script.index("ranks() {") :]
    assert ranks.count(inside) == 2, "each component has an image of its own"


def test_a_plugin_that_is_not_named_is_left_to_the_cluster() -> None:
    assert "exec srun --kill-on-bad-exit=1" in _script(Site(mpi=None), 2)


def test_one_allocation_is_asked_for_as_the_trainers_nodes() -> None:
    site = Site.model_validate({"trainer": {"partition": "h100", "memory": "1G"}, "searcher": {"qos": "low"}})
    script = _script(site, 2, homogeneous=True)
    assert "#SBATCH --partition=h100\n" in script and "#SBATCH --mem=1G\n" in script
    assert "#SBATCH --qos" not in script and "as searcher.qos=low needs a het job" in script.replace(
        "\n# ", " "
    )


def _surrounded(site: Site, tmp_path: Path, check: str, status: int = 0, **environment: str) -> str:
    """What ``check`` prints where the ranks would start; the run is in ``tmp_path``."""
    script = _script(site, 2, run=str(tmp_path / "run"))
    script = script.replace("/shared/tba-hpc/tba_hpc/launch/job_supervisor.sh", SOURCED)
    (tmp_path / "run/slurm").mkdir(parents=True, exist_ok=True)
    return _bash(script[: script.index("ranks()")] + check, status, SLURM_JOB_ID="7", **environment)


BREAKS = '() {  : "$LMOD_SETTARG"; loaded="$loaded $*"; }'
"""A ``module`` as some sites have it: under ``set -u`` it fails."""


def test_set_up_modules_and_activation_are_not_under_set_u(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / "bin/activate").write_text('[ -n "$CONDA_BACKUP" ] || NAME="from $loaded"\n')
    site = Site(setup=('loaded="setup$NOWHERE"',), modules=("CUDA", "it's"), venv="$VENV")
    said = _surrounded(
        site, tmp_path, 'echo "$NAME"; echo "${-//[!u]/}"', **{"BASH_FUNC_module%%": BREAKS}, VENV=str(venv)
    )
    assert said == "from setup load CUDA it's\nu\n", "and what follows is"


@pytest.mark.parametrize(
    ("loaded", "status"), [("a:cuda/12.1:mpi", 0), ("cuda:mpi/5", 0), ("cudatoolkit:mpi", 2), ("", 2)]
)
def test_modules_that_are_loaded_may_have_a_status(loaded: str, status: int, tmp_path: Path) -> None:
    site = Site(setup=(f"module() {{ export LOADEDMODULES={loaded}; false; }}",), modules=("cuda", "mpi"))
    said = _surrounded(site, tmp_path, "echo at work", status)
    assert (said == "at work\n") == (status == 0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"environment": {"HF_HOME": "$SCRATCH/hf"}},
            "SCRATCH is not set on n1, but the site key environment.HF_HOME uses it: set it under setup",
        ),
        ({"venv": "$SCRATCH/venv"}, "SCRATCH is not set on n1, but the site key venv uses it: set it"),
        (
            {"container": {"image": "${SCRATCH}/a.sif"}},
            "SCRATCH is not set on n1, but the site key container",
        ),
        ({"venv": "/no/such"}, "the site key venv leads to /no/such, which is no virtual environment on n1"),
        ({"venv": "$RUN/../venv"}, "venv/bin/python leads to a Python that n1 lacks: make the virtual"),
        (
            {"setup": ["module() { false; }"], "modules": ["cuda", "mpi"]},
            "module load cuda mpi fails on n1, see the log of the job: correct the site key modules",
        ),
    ],
)
def test_what_cannot_be_filled_in_is_one_sentence(
    keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    (tmp_path / "venv/bin/python").symlink_to("/usr/bin/python-of-the-login-node")
    site = Site.model_validate({"setup": ["unset SCRATCH"], **keys})
    said = _surrounded(site, tmp_path, "echo not refused", 2, SLURMD_NODENAME="n1")
    assert sentence in said and len(said.splitlines()) == 1
    event = json.loads((tmp_path / "run/events.jsonl").read_text())
    assert event["event"] == "refused" and sentence in event["sentence"]


@pytest.mark.parametrize("main", ["run_to_the_end", "search_for_a_while"])
def test_a_node_without_the_jobs_python_is_one_sentence(main: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    (tmp_path / "python").symlink_to("/usr/bin/python-of-the-login-node")
    said = _surrounded(Site(), tmp_path, f"TBA=({tmp_path}/python); {main}", 2, SLURMD_NODENAME="n1")
    assert f"n1 lacks {tmp_path}/python, or what it leads to" in said and len(said.splitlines()) == 1


def test_a_copy_of_the_code_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_script(Site(), 2))
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith(f"\n{GONE}\n")


def test_a_container_does_not_take_packages_of_the_home() -> None:
    boxed = Site(container=Container(image="/x.sif"))
    assert 'export PYTHONNOUSERSITE="1"\n' in _script(boxed, 2)
    own = boxed.model_copy(update={"environment": {"PYTHONNOUSERSITE": ""}})
    assert 'export PYTHONNOUSERSITE=""\n' in _script(own, 2)
    assert "PYTHONNOUSERSITE" not in _script(Site(), 2)


def test_limits_of_the_login_node_do_not_hold_in_the_job() -> None:
    small = "ulimit -S -v 8000000 -l 32 -t 3600 -f 1000000"
    assert _bash(f"{small}; source {SOURCED}; for x in v l t f; do ulimit -S -$x; done") == _bash(
        "for x in v l t f; do ulimit -H -$x; done"
    )


def test_a_default_in_a_value_needs_no_variable(tmp_path: Path) -> None:
    site = Site(environment={"LD_LIBRARY_PATH": "/my/lib:${LD_LIBRARY_PATH_OF_NOBODY:-}", "B": "$HOME/b"})
    assert _surrounded(site, tmp_path, 'echo "$LD_LIBRARY_PATH $B"', HOME="/h") == "/my/lib: /h/b\n"


# --- job_supervisor.sh ---


IN_SUBSHELLS = ("draining", "kept_waiting", "watch_nodes", "watch_step", "allocated", "probe")
"""Functions that the shell which listens to Slurm never runs by itself."""


def test_the_shell_that_listens_parses_no_substitution() -> None:
    """bash 5.2 loses a signal that comes while it parses ``$(…)``: one of 4,874, sent to a loop of them."""
    code = SUPERVISOR.read_text()
    for script in SHIPPED:
        assert "$(" not in script.read_text()
    for name in IN_SUBSHELLS:
        code, removed = re.subn(rf"^{name}\(\) {{.*?^}}$", "", code, flags=re.MULTILINE | re.DOTALL)
        assert removed == 1
    code = re.sub(r"#.*|`[^`]*`|'[^']*'", "", code)
    assert not re.findall(r".*(?:\$|<)\((?!\().*", code)


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


def _caches(**environment: str) -> list[str]:
    unset, show = " ".join({*CACHES} - {*environment}), "; ".join(f"echo ${name}" for name in CACHES)
    return _bash(f"unset {unset}; source {SOURCED}; place_caches tba-name; {show}", **environment).split()


def test_caches_lie_on_the_node_where_one_can_write(tmp_path: Path) -> None:
    assert _caches(TMPDIR=str(tmp_path)) == [f"{tmp_path}/tba-name/{name}" for name in CACHES]
    mine = _caches(TRITON_CACHE_DIR="/my/triton", TMPDIR=str(tmp_path / "none"))
    assert mine[1] == "/my/triton" and Path(mine[0]).parents[1] == Path("/tmp")


@pytest.mark.parametrize("trainers", [1, 0])
def test_awaiting_survives_signals_and_returns_the_childs_status(tmp_path: Path, trainers: int) -> None:
    program = f"""
    source {SOURCED}; say() {{ :; }}; SAVE_SECONDS=60 SLURM_JOB_ID=1
    (trap 'exit 7' USR1; for i in $(seq 100); do sleep 0.05; done) & step=$!
    (sleep 0.3; kill -USR1 $$) &
    await_step $step; echo "$? $STOP"
    """
    (tmp_path / "slurm").mkdir()
    assert _bash(program, RUN=str(tmp_path), TRAINERS=str(trainers)) == "7 1\n"
    for mark in ("slurm/asked", "events.jsonl"):
        assert (tmp_path / mark).exists() == bool(trainers), "those of elastic searchers are not the run's"


def test_slurms_term_to_all_processes_of_a_job_leaves_no_stray_line(tmp_path: Path) -> None:
    """It ends the sleep of each watcher, on which bash remarks."""
    program = f"""
    source {SOURCED}; await_folder() {{ :; }}; ask() {{ echo "$2"; }}; ranks() {{ command sleep 0.5; }}
    sleep() {{ bash -c 'kill $$'; }}
    go_once ended 2>&1
    """
    (tmp_path / "slurm").mkdir()
    assert _bash(program, 1, RUN=str(tmp_path), SLURM_JOB_ID="1") == "code=0\n"


WATCHED = """
say() { :; }; SLURM_JOB_ID=1 now=0 STEP_SECONDS=20; mkdir -p "$RUN/owners" "$RUN/slurm"; cd "$RUN"
sleep() { now=$((now + $1)); command sleep 0.02; rank; [ $now -lt 600 ]; }  # time passes in the fakes alone
squeue() { echo 1.batch; step; true; }
command sleep 60 & srun=$!
watch_step "$srun"
echo $now; kill "$srun" 2>/dev/null; true
"""


@pytest.mark.parametrize(
    ("rank", "step", "seconds"),
    [
        ("touch owners/trainer", ":", 600),
        (":", "echo 1.3", 600),
        ("[ $now -gt 200 ] || touch owners/trainer", ":", 240),
        ("touch owners/searcher-5000.000001; [ $now -gt 200 ] || touch owners/trainer", ":", 240),
        (":", "[ $now -gt 300 ] || echo 1.3", 340),
        (":", "[ $now -lt 100 ] || echo 1.3", 600),
        (":", ":", 120),
        ("[ $now = 120 ] || touch owners/trainer", "[ $now -gt 300 ] || echo 1.3", 600),
        (":", "[ $now = 120 ] || echo 1.3", 600),
    ],
    ids=[
        "at-work",
        "silent",
        "ended",
        "ended-others-search-on",
        "ended-late",
        "starts-late",
        "never",
        "silent-once",
        "hidden-once",
    ],
)
def test_an_srun_that_outlives_its_step_is_ended(tmp_path: Path, rank: str, step: str, seconds: int) -> None:
    """rank, step: what leaves a sign of life, and what squeue shows."""
    program = f"source {SOURCED}; rank() {{ {rank}; }}; step() {{ {step}; }}; {WATCHED}"
    assert int(_bash(program, RUN=str(tmp_path))) == seconds


@pytest.mark.parametrize(
    ("states", "requeue", "found"),
    [
        ("MIXED IDLE", "yes", ""),
        ("ALLOCATED ALLOCATED+DRAIN", "yes", "n2"),
        ("ALLOCATED DOWN*+DRAIN", "yes", ""),  # it is lost already
        ("ALLOCATED MIXED+DRAIN", "no", ""),  # nothing would go on elsewhere
    ],
)
def test_nodes_that_are_being_drained_are_found_in_one_call(
    tmp_path: Path, states: str, requeue: str, found: str
) -> None:
    program = f"""
    source {SOURCED}; timeout() {{ shift; "$@"; }}
    scontrol() {{ number=0; echo "$4" >> "$RUN/asked"; for state in {states}; do
        echo "NodeName=n$((++number)) Arch=x86_64 Comment=(null) State=$state ThreadsPerCore=1"; done; }}
    draining; [ "$REQUEUE" = no ] || cat "$RUN/asked"
    """
    nodes = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}
    nodes |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    said = _bash(program, RUN=str(tmp_path), REQUEUE=requeue, **nodes)
    assert said.split() == [*found.split(), *(["n1,n[2-3]"] if requeue == "yes" else [])]


@pytest.mark.parametrize(("job", "found"), [("7", "n1"), ("8", ""), ("9", "")])
def test_a_drained_node_is_left_only_to_a_later_job_of_the_chain(
    tmp_path: Path, job: str, found: str
) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/chain").write_text("7\n8\n")
    program = f"source {SOURCED}; timeout() {{ echo 'NodeName=n1 x State=MIXED+DRAIN'; }}; draining"
    facts = {"RUN": str(tmp_path), "REQUEUE": "no", "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n1"}
    assert _bash(program, **facts).strip() == found


@pytest.mark.parametrize(
    ("queue", "facts", "found"),
    [
        (["Resources 7+0 low node[2-4]", "Resources 7+1 low node1"], ":", "7+0"),
        (["Resources 7+1 low node1"], ":", ""),  # it could not use this node
        (["Resources 7+0 high (null)"], ":", ""),  # nor in its partition
        (["Resources 7 low (null)"], ":", "7"),
        (["Priority 7 low (null)", "BeginTime 7 low (null)"], ":", ""),  # the node would go to others
        ([], ":", ""),  # it has its nodes
        (["Resources 7 low (null)"], "TRAINERS=1", ""),
        (["Resources 7 low (null)"], "REQUEUE=no", ""),  # this job could not come back
        (["Resources 7 low (null)"], 'touch "$RUN/owners/trainer-0000.1"', ""),
        (["Resources 7 low (null)"], 'rm "$RUN/slurm/job"', ""),
        (["Resources 7 low (null)"], 'newest_attempt > "$RUN/slurm/left-$ME"', ""),  # it left one in vain
        (["Resources 7 low (null)"], 'echo attempt-001 > "$RUN/slurm/left-$ME"', "7"),
    ],
)
def test_elastic_searchers_see_that_the_runs_own_job_waits_for_their_node(
    tmp_path: Path, queue: list[str], facts: str, found: str
) -> None:
    for folder in ("slurm", "owners"):
        (tmp_path / folder).mkdir()
    (tmp_path / "slurm/job").write_text("7\n")
    program = f"""
    source {SOURCED}; HERE=node1 TRAINERS=0 REQUEUE=yes; {facts}
    timeout() {{ shift; "$@"; }}
    squeue() {{ [[ " $* " = *" --jobs=7 "* ]] && cat "$RUN/queue"; }}
    scontrol() {{ [ "$3" = node1 ] && echo node1 || printf 'node%s\\n' 2 3 4; }}
    sinfo() {{ [[ $* != *--partition=low* ]] || echo node1; }}
    kept_waiting
    """
    (tmp_path / "queue").write_text("".join(f"{line}\n" for line in queue))
    assert _bash(program, RUN=str(tmp_path)).strip() == found


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [(":", 300), ("TBA_JOB_END=$((`date +%s` + 160))", 100), ("TBA_JOB_END=1", 0), ("STOP=1", 10)],
)
def test_a_run_directory_is_awaited_as_long_as_the_job_can_be_queued_again(
    tmp_path: Path, facts: str, seconds: int
) -> None:
    program = f"source {SOURCED}; SECONDS=0; sleep() {{ SECONDS=$((SECONDS + $1)); }}; {facts}"
    waited = int(_bash(f"{program}; await_folder; echo $SECONDS", RUN=str(tmp_path)))
    assert seconds <= waited <= seconds + 7


def test_a_stop_that_came_while_the_script_was_made_is_heard() -> None:
    assert _bash(f"source {SOURCED}; echo $STOP") == "0\n"
    for path in SHIPPED:
        assert f"#SBATCH --signal=B:USR1@{HEADER_SIGNAL}\n" in path.read_text()
    for script in ("math", "search"):
        (trap,) = re.findall(r"^trap \S+ USR1", (REPOSITORY / f"slurm/tba_{script}.sbatch").read_text(), re.M)
        assert _bash(f"{trap}; kill -USR1 $$; source {SOURCED}; echo $STOP") == "1\n"


@pytest.mark.parametrize(
    ("trainers", "said"),
    [
        (1, "the ranks have up to 9 s, or the GraceTime of a preemption, for a checkpoint"),
        (0, "the searchers have up to 9 s, or the GraceTime of a preemption, to seal what is finished"),
    ],
)
def test_who_is_asked_to_stop_is_told_what_for(tmp_path: Path, trainers: int, said: str) -> None:
    """Before there are ranks, nobody gets time for a checkpoint."""
    (tmp_path / "slurm").mkdir()
    program = f"""
    source {SOURCED}; say() {{ echo "$1"; }}; repeat_stop() {{ :; }}; TRAINERS={trainers} SAVE_SECONDS=9
    kill -USR1 $$; echo no ranks yet; sleep 0 & await_step $!
    """
    lines = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="1").splitlines()
    assert lines[:2] == ["asked to stop", "no ranks yet"] and lines[2].endswith(said)


FAKES = """
say() { :; }; ending() { false; }; TRAINERS=1 SEARCHERS=4 SAVE_SECONDS=60 RELAUNCHES=2
allocated() { case ${1:-} in 0) echo node2 ;; 1) seq -f node%g 3 4 ;; *) seq -f node%g 2 4 ;; esac; }
lines() { tr , '\\n' <<< "$1"; }
scontrol() { if [ $2 = hostnames ]; then lines "$3"; else lines "$3" | sort | paste -sd,; fi; }
timeout() { shift 3; "$@"; }
srun() { echo x >> "$RUN/sruns"; printf 'checked %s\\n' node2 node4; }
tba() { printf '%s|' "${@//$'\\n'/ }" >> "$RUN/asked"; echo >> "$RUN/asked"; echo noise; echo "$ANSWER"; }
TBA=(tba)
"""


@pytest.mark.parametrize(
    ("het", "answer", "result"),
    [
        ("2", "go 3 4 attempt-001", "0 go 2"),
        ("1", "go 2 2 attempt-001", "0 go 1"),
        ("2", "look", "1 look 4"),
        ("1", "queue", "1 queue 1"),
    ],
)
def test_one_step_of_a_component_tells_which_nodes_answer(
    tmp_path: Path, het: str, answer: str, result: str
) -> None:
    """What srun says is passed on; two steps a look in a het job, and at most two looks."""
    show = 'place; echo "$? $NEXT $(wc -l < "$RUN/sruns")"'
    said = _bash(
        f"source {SOURCED}; {FAKES} {show}",
        RUN=str(tmp_path),
        SLURM_JOB_ID="1",
        SLURM_HET_SIZE=het,
        ANSWER=answer,
    )
    assert said == f"{result}\n"
    asked = (tmp_path / "asked").read_text().splitlines()[0]
    first, second = ("node2", "node3 node4") if het == "2" else ("node2 node3 node4", "")
    assert asked.startswith(f"supervise|start|{tmp_path}|")
    told = dict(word.partition("=")[::2] for word in asked.split("|"))
    assert (told["hosts"], told["others"]) == (first, second)
    assert sorted(told["answers"].split()) == sorted(["node2", "node4"] * int(het))


def test_nodes_that_fail_their_check_or_lost_the_run_are_left(tmp_path: Path) -> None:
    program = f"source {SOURCED}; {FAKES} probe() {{ echo node2 '?node3' '!node4'; }}"
    facts = {"RUN": str(tmp_path), "SLURM_JOB_ID": "1", "ANSWER": "go 1 1 a"}
    assert _bash(f'{program}; place; echo "${{SICK[@]}}"', **facts) == "node3 node4\n"


WATCHDOG = """
say() { :; }; allocated() { printf 'n1\\nn2\\n'; }; WATCH_SECONDS=0.05
squeue() { echo "n[$FIRST-3]"; }; scancel() { echo "scancel $1" >> "$RUN/done"; }
scontrol() { if [ $1 = show ]; then seq -f n%g "$FIRST" 3; else echo "requeue $2" >> "$RUN/done"; fi; }
srun() { while [ "$1" != bash ]; do shift; done; timeout 0.6 "$@"; }
export RUN FIRST; export -f squeue scontrol scancel
watch_leader; watch_leader; wait; sort -u "$RUN/done" 2>/dev/null; true
"""


@pytest.mark.parametrize(
    ("first", "requeue", "het", "done"),
    [
        ("2", "yes", "1", "requeue 7\n"),
        ("2", "no", "1", "scancel 7\n"),
        ("1", "yes", "1", ""),  # the first node is there
        ("2", "yes", "2", ""),  # Slurm itself requeues a het job
    ],
)
def test_a_watchdog_requeues_a_job_that_has_lost_its_first_node(
    tmp_path: Path, first: str, requeue: str, het: str, done: str
) -> None:
    facts = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": het, "FIRST": first, "REQUEUE": requeue}
    facts["RUN"] = str(tmp_path)
    assert _bash(f"source {SOURCED}; {WATCHDOG}", **facts) == done


def test_a_watchdog_that_has_lost_its_own_node_is_replaced(tmp_path: Path) -> None:
    program = f"""
    source {SOURCED}; say() {{ :; }}; allocated() {{ echo "$NODES"; }}
    srun() {{ [[ $* =~ nodelist=(n.) ]]; echo "${{BASH_REMATCH[1]}} $BASHPID" >> "$RUN/done"; exec sleep 9; }}
    for NODES in $'n1\nn2\nn3' $'n1\nn2\nn3' $'n1\nn3' $'n1\nn3' n1; do watch_leader; sleep 0.1; done
    while read -r host pid; do kill "$pid" && echo "$host there" || echo "$host gone"; done < "$RUN/done"
    """
    assert _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="7") == "n2 gone\nn3 there\n"


QUEUE = """
say() { echo "$1"; }; event() { :; }; ANSWER_SECONDS=9 ANSWER_PAUSE=0
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
        ("echo PENDING", "exit 9", "Slurm has put this job back into the queue (PENDING)\n0\n"),
        ("echo RUNNING", "nth b 3 || { echo 'Unable to contact slurm controller'; false; }", "back …\n0\n"),
        ("echo RUNNING", "echo 'Job violates policy'; false", "back …\nSlurm refused to requeue: …\n1\n"),
        ("ANSWER_SECONDS=0; :", "exit 9", "Slurm does not answer: submit the same run again to resume\n1\n"),
    ],
)
def test_a_controller_that_is_silent_for_a_while_costs_no_requeue(
    squeue: str, scontrol: str, ends: str, tmp_path: Path
) -> None:
    """No answer is no end; a job that is ended already must not run again."""
    program = f"""
    source {SOURCED}; {QUEUE}
    squeue() {{ {squeue}; }}; scontrol() {{ {scontrol}; }}
    (refuse_end; queue_again); echo $?
    """
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="1")
    assert fnmatch(said, ends.replace("…", "*").replace("[", "[[]"))


def test_of_an_array_one_job_is_looked_at_and_queued_again(tmp_path: Path) -> None:
    """The last of an array to start has the number of them all."""
    program = f"""
    source {SOURCED}; event hung; say left; {QUEUE}
    squeue() {{ echo "$@" >> "$RUN/asked"; echo RUNNING; }}; scontrol() {{ echo "$@" >> "$RUN/asked"; }}
    (refuse_end; queue_again); cat "$RUN/asked"
    """
    array = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "2"}
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="36", **array)
    assert "--jobs=36_2 " in said and said.endswith("requeue 36_2\n")
    assert "job 36_2 restart 0] left\n" in said
    assert '"event": "hung", "job": "36_2"' in (tmp_path / "events.jsonl").read_text()


def test_a_sick_node_is_let_back_only_where_it_was_not_excluded_before(tmp_path: Path) -> None:
    """Each component of a het job excludes the nodes of the other's side, for good."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "7+0").write_text("n4,n5,n6")
    (tmp_path / "7+1").write_text("n1,n2")
    program = f"""
    source {SOURCED}; cd "$RUN"
    scontrol() {{
        case "$*" in
            *"show job "*) echo "JobId=7 ExcNodeList=$(< "${{!#}}") Features=(null)" ;;
            *hostnames*) tr , "\\n" <<< "$3" ;;
            *) echo "${{3#*=}}" > "${{2#*=}}" ;;
        esac
    }}
    for SICK in "n5" "n1 n3" ""; do
        SICK=($SICK); exclude_sick; echo "$(< 7+0) $(< 7+1)"
    done
    """
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="7", SLURM_HET_SIZE="2")
    assert said == "n4,n5,n6 n1,n2,n5\nn4,n5,n6,n1,n3 n1,n2,n3\nn4,n5,n6 n1,n2\n"


LIFE = """
say() { :; }; event() { :; }; place_caches() { :; }; job_end() { :; }; ending() { false; }
SLURM_NTASKS=1 RELAUNCHES=2 SAVE_SECONDS=60 TRAINERS=1 SEARCHERS=1
squeue() { echo "7 n1"; }
state() { echo RUNNING; }; sleep() { command sleep 0.01; }
scontrol() { [ "$1" != requeue ] || echo "requeued $2" > "$RUN/said"; }
scancel() { echo "cancelled $*" > "$RUN/said"; }
tba() { [[ $* != *"answers=?n1"* ]] || echo -n sick- >> "$RUN/turns"
    echo -n "$2 " >> "$RUN/turns"; read -r answer < "$RUN/answers"; sed -i 1d "$RUN/answers"
    [ "$answer" != crash ] && echo "$answer"; }
TBA=(tba)
ranks() { return 9; }
"""


@pytest.mark.parametrize(
    ("life", "answers", "turns", "ends"),
    [
        ("run_to_the_end", "exit 2", "begin", "2"),
        ("run_to_the_end", "exit 4 8 9", "begin", "4 cancelled 8 9"),
        ("run_to_the_end", "go x, go 1 1 a, exit 0", "begin start ended", "0"),
        ("run_to_the_end", "go x, go 1 1 a, again 1, go 1 1 b, exit 9", "begin start ended start ended", "9"),
        ("run_to_the_end", "go x, go 1 1 a, queue, queue", "begin start ended leave", "0 requeued 7"),
        ("run_to_the_end", "go x, look, queue, queue", "begin start start leave", "0 requeued 7"),
        ("run_to_the_end", "go x, go 1 1 a, crash, crash", "begin start ended leave", "0 requeued 7"),
        ("REQUEUE=no run_to_the_end", "go x, go 1 1 a, crash, crash", "begin start ended leave", "1"),
        ("run_to_the_end", "crash", "begin", "1"),
        ("search_for_a_while", "go x, queue", "join searched", "0 requeued 7"),
        ("search_for_a_while", "go x, exit 3", "join searched", "3"),
        ("search_for_a_while", "go x, crash", "join searched", "0 requeued 7"),
        ("search_for_a_while", "go x, again 1, again 2, exit 9", "join searched searched searched", "9"),
        ("sleep() { STOP=1; }; search_for_a_while", "go x, again 1", "join searched", "0 requeued 7"),
        ("STOP=1; search_for_a_while", "queue", "join", "0 requeued 7"),
        ("HERE=n1; healthy() { false; }; search_for_a_while", "queue", "sick-join", "0 requeued 7"),
    ],
)
def test_a_job_does_what_it_is_told_at_every_turn(
    tmp_path: Path, life: str, answers: str, turns: str, ends: str
) -> None:
    """Where nobody answers, a job goes back to the queue rather than to ruin."""
    (tmp_path / "answers").write_text(answers.replace(", ", "\n") + "\n")
    for name in ("turns", "said", "config.yaml"):
        (tmp_path / name).touch()
    program = f"source {SOURCED}; {LIFE}\n({life}); echo $?"
    code = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="7").strip()
    assert (tmp_path / "turns").read_text().split() == turns.split()
    assert f"{code} {(tmp_path / 'said').read_text()}".strip() == ends


@pytest.mark.parametrize(
    ("owner", "seen", "code"),
    [
        ("6", "RUNNING $RUN", 2),
        ("6", "SUSPENDED $RUN", 2),
        ("6", "RUNNING another", 1),
        ("6", "PENDING $RUN", 1),
        ("6", "", 1),
        ("7", "RUNNING $RUN", 1),
        ("", "RUNNING $RUN", 1),
    ],
)
def test_a_second_job_is_refused_before_anything_is_asked_inside_a_container(
    tmp_path: Path, owner: str, seen: str, code: int
) -> None:
    """A container without squeue cannot know that the other job is at work, whose ranks are starting."""
    (tmp_path / "slurm").mkdir()
    if owner:
        (tmp_path / "slurm/job").write_text(f"{owner}\n")
    (tmp_path / "answers").write_text("crash\n")
    squeue = f'squeue() {{ [[ $* != *--jobs=6* ]] || echo "{seen}"; }}'
    program = f"source {SOURCED}; {LIFE}\n{squeue}; say() {{ echo $*; }}; (run_to_the_end); echo $?"
    said = _bash(program, RUN=str(tmp_path), SLURM_JOB_ID="7")
    assert said.splitlines()[-1] == str(code) and (tmp_path / "turns").exists() == (code == 1)
    assert (f"{tmp_path} is already in use: Slurm job {owner};" in said) == (code == 2)


# --- Elastic searchers ---


def test_elastic_searchers_are_an_array_of_jobs_with_as_many_as_fit_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"model": {"path": "none"}, "run": {"root": str(tmp_path)}, "launch": {"elastic": 8}}
    before = os.umask(0o022)
    run = RunDir.create(parse_config(tree))
    os.umask(before)
    site = REPOSITORY / "slurm/sites/generic.yaml"
    with pytest.raises(ConfigError, match=r"--nodes 3 with .* ask for --nodes 2, or .*launch\.elastic=12"):
        submit_elastic(Submission(config=run.path, site=site, nodes=3))
    submission = Submission(config=run.path, site=site, nodes=2, time="1:00:00", options=["--exclude=node7"])
    submit_elastic(submission, partition="preemptible", show=True)
    text = capsys.readouterr().out
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ("--array=0-1", "--partition=preemptible", "--time=1:00:00", "--exclude=node7")
    assert {*wanted} <= {*directives}
    assert not (run.path / "slurm").exists()

    run.mark_finished()
    submit_elastic(submission, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"job": None, "run": str(run.path)}


@pytest.mark.parametrize(
    ("smi", "mark"),
    [
        ("echo '0, No'; echo '[N/A], [N/A]'", ""),
        ("echo '0, No'; echo '12, No'", "?"),
        ("echo '0, Yes'", "?"),
        ("echo 'No devices were found'; exit 6", ""),  # of a step without GPUs, or a node without
        ("echo 'GPU is lost'; exit 15", "?"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "?"),
        ("echo 'Unable to determine the device handle for GPU 0000:BA:00.0: Unknown Error'; exit 255", "?"),
        ("echo 'Failed to initialize NVML: Unknown Error'; exit 255", ""),
        ("rm \"$RUN/config.yaml\"; echo '1, No'", "!"),
    ],
)
def test_check_of_a_node(tmp_path: Path, smi: str, mark: str) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    facts = {"RUN": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1"}
    assert _bash(f'source {SOURCED}; bash -c "$CHECK" "$RUN" | checked', **facts) == f"{mark}n1\n"


def test_what_the_shells_of_a_site_print_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "greeting").write_text("echo '!!! home at 98 %'; echo ?n2; printf 'welcome to n1'\n")
    facts = {"RUN": str(tmp_path), "SLURMD_NODENAME": "n1", "GREETING": f"{tmp_path}/greeting"}
    program = f"""
    source {SOURCED}; srun() {{ while [ "$1" != bash ]; do shift; done; BASH_ENV=$GREETING "$@"; }}
    timeout() {{ shift 3; "$@"; }}; probe '' n1; BASH_ENV=$GREETING healthy && echo healthy
    """
    assert _bash(program, **facts).split() == ["n1", "healthy"]


SEARCHER = """
import os, signal, sys
from pathlib import Path
codes = Path(sys.argv[1])
code, *rest = codes.read_text().split()
codes.write_text(" ".join(rest))
if code.startswith("asked"):
    os.kill(os.getppid(), signal.SIGUSR1)
    code = code.removeprefix("asked-")
os.kill(os.getpid(), signal.SIGKILL) if code == "kill" else sys.exit(int(code))
"""


@pytest.mark.parametrize(
    ("codes", "code", "left"),
    [
        ("long 1 1 1 1 0 9", 0, 1),  # each lived for long
        ("0 9", 0, 1),
        ("2 0", 2, 1),  # what only the user can fix
        ("3 0", 3, 1),  # no slot
        ("kill 1 0 9", 0, 1),
        ("1 1 kill 0", 137, 1),
        ("asked-1 0", 1, 1),  # it was asked to leave, and crashed on its way
        ("asked-143 0", 0, 1),  # or did not listen yet
        ("pause 1 0", 0, 1),  # asked between two starts
    ],
)
def test_an_elastic_searcher_that_crashes_is_started_again(
    tmp_path: Path, codes: str, code: int, left: int
) -> None:
    how, *_ = codes.split()
    (tmp_path / "codes").write_text(codes.removeprefix("long ").removeprefix("pause "))
    (tmp_path / "searcher.py").write_text(SEARCHER)
    pause = "kill -USR1 $$" if how == "pause" else ":"
    long = "KEEP=${KEEP/-lt 300/-lt 0};" if how == "long" else ""
    keep = f'bash -c "$KEEP" 2 "{sys.executable}" "$RUN/searcher.py" "$RUN/codes"'
    program = f"source {SOURCED}; sleep() {{ {pause}; }}; export -f sleep; {long} {keep}"
    _bash(program, code, RUN=str(tmp_path))
    assert len((tmp_path / "codes").read_text().split()) == left
