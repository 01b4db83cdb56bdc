"""Commands that batch scripts and people on login nodes type; none of them needs torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from shlex import quote

import pytest
from typed import tba

from tba_hpc.cli import _say_unfinished
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsWriter

REPOSITORY = Path(__file__).parents[1]
CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")


def submit_script(*words: object) -> subprocess.CompletedProcess[str]:
    """Run tools/submit.py to its end."""
    command = [sys.executable, REPOSITORY / "tools/submit.py", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run as ``tba create`` makes it, from a model that is a name on a hub."""
    made = tba("create", CONFIG, "--set", "model.path=org/model", "--set", f"run.root={tmp_path}")
    assert made.returncode == 0 and made.stdout == f"{tmp_path}/quickstart-seed0\n", made
    return RunDir.open(tmp_path / "quickstart-seed0")


def test_prepare_sets_the_ranks_of_a_start_and_nothing_else(run: RunDir) -> None:
    done = tba("prepare", run.path, "--set", "launch.trainers=2", "--set", "launch.searchers=6")
    assert done.returncode == 0 and done.stdout == ""
    assert (run.config().launch.trainers, run.config().launch.searchers) == (2, 6)
    assert run.attempt.name == "attempt-001"

    refused = tba("prepare", run.path, "--set", "train.prompts_per_step=4")
    assert refused.returncode == 2 and "may not change it to train.prompts_per_step=4" in refused.stderr
    uneven = tba("prepare", run.path, "--set", "launch.trainers=3")
    assert uneven.returncode == 2 and "use a multiple of the second" in uneven.stderr
    assert run.config().launch.trainers == 2 and run.attempt.name == "attempt-001"


def test_status_tells_how_a_run_stands(run: RunDir) -> None:
    MetricsWriter(run.metrics_file("trainer")).log({"step": 7, "train/reward": 0.25, "buffer/size": 1234})
    shown = json.loads(tba("status", run.path, "--json").stdout)
    assert (shown["state"], shown["step"], shown["steps"]) == ("training", 7, 80)
    assert (shown["last_step"]["train/reward"], shown["summary"]["figures"]["buffer/size"]) == (0.25, 1234)
    table = tba("status", run.path, "--once")
    assert table.returncode == 0 and "7/80" in table.stdout


def test_a_finished_run_says_which_keys_it_does_not_change(run: RunDir) -> None:
    MetricsWriter(run.metrics_file("trainer")).log({"step": 80, "train/reward": 0.25})
    run.mark_finished()
    shown = tba("run", run.path, "--set", "train.learning_rate.peak=1e-6")
    assert shown.returncode == 0
    assert "so this is its summary; train.learning_rate.peak is not changed; to train again" in shown.stderr
    assert run.config().train.learning_rate.peak != 1e-6


def test_a_run_whose_events_a_full_disk_has_lost_is_resumed_all_the_same(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_unfinished(run, "7/80", as_json=False)
    assert capsys.readouterr().out == f"stopped at step 7/80; to resume: tba run {run.path}\n"


def test_somebody_elses_run_is_summed_up() -> None:
    """As far as its files may be read; nothing is written."""
    with tempfile.TemporaryDirectory() as root:  # pytest's own folders are closed to others
        tba("create", CONFIG, "--set", "model.path=org/model", "--set", f"run.root={root}")
        run = RunDir.open(Path(root) / "quickstart-seed0")
        assert tba("report", run.path).stderr == ""
        run.summary.unlink()
        run.report.unlink()
        for path in (Path(root), run.path, *run.path.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        with somebody_else(run.path):
            shown = tba("report", run.path, "--json")
        assert shown.returncode == 0 and json.loads(shown.stdout)["steps"] == 0, shown
        assert shown.stderr == f"you may not write to {run.path}: its summary and report stay as they are\n"
        assert not run.summary.exists() and not run.report.exists()


@contextmanager
def somebody_else(folder: Path) -> Iterator[None]:
    """Act as a user who cannot write there."""
    if os.geteuid():
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_file_without_room_is_a_sentence(tmp_path: Path) -> None:
    """A limit on files, which the copy of the user's own code is the first to meet."""
    (tmp_path / "own.py").write_text("#" * 100_000)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "c.yaml").write_text(
        "model: {path: org/model}\ntask: {name: jsonl, train_file: rows.jsonl, reward: 'own:right'}\n"
    )
    program = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    program += "runpy.run_module('tba_hpc', run_name='__main__')"
    command = [sys.executable, "-c", program, "create", "c.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("tba: ") and done.stderr.count("\n") == 1, done
    assert "own.py cannot be written (File too large): free space, or raise the quota" in done.stderr


def test_a_finished_run_says_so_and_is_not_started_again(run: RunDir, tmp_path: Path) -> None:
    assert not run.finished
    run.mark_finished()
    assert run.finished
    again = tba("run", run.path, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["steps"] == 0
    assert f"{run.path} is finished" in again.stderr and "--set run.name=" in again.stderr
    assert not list(run.logs.iterdir())


@pytest.mark.parametrize(
    "command", [("ask", "runs/absent", "2 + 2?"), ("evaluate", "runs/absent", "--task=math")]
)
def test_a_run_that_does_not_exist_is_refused_at_once(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asking a hub for a model of that name."""
    monkeypatch.chdir(tmp_path)
    done = tba(*command)
    said = "tba: runs/absent does not exist, as a run or a model's folder: check the path\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list", "no such command 'list': tba status RUN shows a run, such as runs/quickstart-seed0; all"),
        ("stats RUN", "no such command 'stats': did you mean 'status'?\n"),
        (
            "status",
            "missing argument 'RUN': a run is a folder, such as runs/quickstart-seed0; see tba status",
        ),
        (
            "submit runs/it",
            "extra argument(s) (runs/it): a run or a config is given by --config, as in tba su",
        ),
        ("evaluate m --split tset", "'--split': 'tset' is not one of 'train', 'validation', 'test': see tba"),
        ("submit --node 4", "option: --node (Possible options: --nodes): see tba submit --help\n"),
    ],
)
def test_a_wrong_call_is_one_sentence_with_the_command_that_helps(words: str, said: str) -> None:
    done = tba(*words.split())
    assert done.returncode == 2 and done.stderr.startswith("tba: ") and done.stderr.count("\n") == 1
    assert said in done.stderr, done.stderr


def test_version() -> None:
    """Of the program that is installed."""
    program = Path(sys.executable).parent / "tba"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    assert said == f"tba-hpc {version('tba-hpc')}\n"


def test_the_doctor_names_the_fetch_of_this_config_and_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (site := tmp_path / "site.yaml").write_text("partition: gpu\n")
    words = ("doctor", "--config", "math_gsm8k", "--run-root", tmp_path, "--json")
    for more in ((), ("--site", site)):
        remedies = [finding["remedy"] for finding in json.loads(tba(*words, *more).stdout)]
        command = " ".join(map(str, ("tba fetch math_gsm8k", *more)))
        assert [one for one in remedies if one.endswith(f"type: {command}")], remedies


# --- Submit, without Slurm ---


def test_submit_needs_no_more_than_nodes_and_says_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = tba("submit", "--nodes", 8, "--dry-run")
    config, site = REPOSITORY / "configs/math_gsm8k.yaml", REPOSITORY / "slurm/sites/generic.yaml"
    chosen = f"no --config given, using {config}\nno --site given, using {site}\n"
    named = tba("submit", "--nodes", 8, "--dry-run", "--config", config, "--site", site)
    assert done.stderr == chosen + named.stderr and named.stdout == done.stdout
    assert tba("submit", "--nodes", 8, "--print", "--run-root", tmp_path).returncode == 0
    (run,) = (path for path in tmp_path.iterdir() if (path / "config.yaml").exists())
    assert f"submit --config {run} --site" in tba("status", run, "--once").stdout
    assert (
        f"type: tba fetch {quote(str(config))} --site {quote(str(site))}\n" in named.stderr
        and named.stderr.endswith("\nSlurm and this machine were not checked; without --dry-run they are\n")
        and named.stderr.count("\n") == 2
    )
    assert "#SBATCH --job-name=tba-math-gsm8k\n" in done.stdout


def test_shipped_files_go_by_name() -> None:
    options = ("--nodes", 8, "--dry-run", "--homogeneous")
    config, site = REPOSITORY / "configs/tldr_pythia2.8b.yaml", REPOSITORY / "slurm/sites/a100x4-pmix.yaml"
    by_path = tba("submit", *options, "--config", config, "--site", site)
    assert by_path.returncode == 0 and "--gres=gpu:a100:4" in by_path.stdout
    assert (
        tba("submit", *options, "--config", "tldr_pythia2.8b", "--site", "a100x4-pmix").stdout
        == by_path.stdout
    )
    unknown = tba("submit", *options, "--config", "tldr_pythia")
    assert (
        unknown.returncode == 2
        and "shipped: math_gsm8k, math_gsm8k_one_gpu, math_gsm8k_one_gpu_lora, " in unknown.stderr
    )
    refused = tba("doctor", "--site", "generik")
    assert refused.returncode == 2 and "shipped: a100x4-pmix, cray-homogeneous, " in refused.stderr


def test_the_script_submits_as_the_command_does_and_signs_its_sentences() -> None:
    named = ("--config", "math_gsm8k", "--site", "cray-homogeneous", "--nodes", 8, "--dry-run")
    for options in ((), ("--time", "tomorrow")):
        command, script = tba("submit", *named, *options), submit_script(*named, *options)
        assert (script.returncode, script.stdout) == (command.returncode, command.stdout)
        assert script.stderr == command.stderr.replace("tba: ", "submit: ")
    assert script.returncode == 2 and script.stderr.startswith(
        "submit: --time tomorrow is no wall time: give"
    )


def test_the_script_outside_the_environment_says_what_to_activate() -> None:
    words = [sys.executable, "-I", "-S", str(REPOSITORY / "tools/submit.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "submit: No module named 'typer': activate .venv, or use tba submit\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--partition", "h100", "--dry-run"), "--partition is only for elastic searchers"),
        (("--partition", "h100", "--dry-run"), "or give --sbatch partition=h100"),
        (("--seeds", "0-1", "--print"), "--print prints one script, but these are 2 runs"),
        (("--elastic", "RUN", "--wait"), "--wait has no effect on elastic searchers"),
        (("--elastic", "RUN", "--set", "train.steps=9"), "--set has no effect on elastic searchers"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...], said: str) -> None:
    done = tba("submit", "--nodes", 8, *options)
    assert done.returncode == 2 and said in done.stderr


# --- On a login node ---

LOGIN_COMMANDS = {
    "dry run": ("submit", "--nodes", 8, "--dry-run", "--config", "math_gsm8k", "--site", "generic"),
    "stop": ("stop", "RUN"),
    "status": ("status", "RUN", "--json"),
}

PROGRAM = """
import sys
from tba_hpc.cli import main
sys.argv = ["tba", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *sorted({"torch", "transformers", "vllm", "deepspeed"} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", LOGIN_COMMANDS)
def test_a_login_node_waits_for_no_torch(run: RunDir, name: str) -> None:
    (run.begin_attempt() / "trainer-0000.log").write_text("a line\n")
    words = [run.path if word == "RUN" else word for word in LOGIN_COMMANDS[name]]
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert done.stdout.endswith("\nloaded:\n"), done.stdout
