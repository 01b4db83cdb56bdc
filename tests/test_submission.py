"""Orders: one for each seed and config, what is to end before them, and how their ranks are numbered."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from shlex import quote

import pytest
from recorded import happen, new_run

from tba_hpc.checks import folders
from tba_hpc.commands.submission import (
    Submission,
    again,
    load_anchored,
    nodes_of_this_job,
    parse_seeds,
    sbatch_options,
    script,
    spread,
)
from tba_hpc.config import ConfigError
from tba_hpc.launch import snapshot
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events, resume_command

SUBMISSION = Submission(config=Path("math_gsm8k"), site=Path("generic"), nodes=4, overrides=["train.steps=5"])


def test_a_submission_that_is_repeated_begins_at_once(tmp_path: Path) -> None:
    delayed = replace(SUBMISSION, options=["--begin=now+4minutes", "--mail-type=END"])
    assert again(delayed, new_run(tmp_path)).endswith(" --nodes 4 --sbatch mail-type=END")


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("7", [7]), ("0,2,7-9,2", [0, 2, 7, 8, 9])]
)
def test_seeds_are_spans_and_numbers(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-0", "1,,2", "-1", "0..4"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--seeds {text} is no list of seeds: give for example 0-4"):
        parse_seeds(text)


def test_so_many_seeds_are_no_submission() -> None:
    with pytest.raises(ConfigError, match="--seeds 0-5000 would be more than 500 runs: submit them in parts"):
        parse_seeds("0-5000")


def test_a_config_is_frozen_with_paths_that_hold_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "my.yaml").write_text("{model: {path: model}, task: {train_file: train.jsonl}}")
    monkeypatch.chdir(tmp_path)
    config = load_anchored(Path("my.yaml"), [])
    assert (config.run.root, config.model.path, config.task.train_file) == (
        *(f"{tmp_path}/runs", f"{tmp_path}/model", f"{tmp_path}/train.jsonl"),
    )
    assert load_anchored(Path("math_gsm8k"), []).model.path == "realtreetune/rho-1b-sft-GSM8K"


def test_a_run_goes_on_where_it_lies_if_its_folder_has_its_name(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = run.path.rename(tmp_path / "elsewhere/known-seed0")
    submission = replace(SUBMISSION, config=moved, overrides=[])
    assert submission.resolve(submission.load_site())[0].run_dir == moved
    renamed = moved.rename(tmp_path / "another")
    with pytest.raises(ConfigError, match="another holds the run known-seed0: rename the folder to that"):
        replace(SUBMISSION, config=renamed, overrides=[]).resolve(submission.load_site())


def test_a_script_for_a_run_is_refused_as_its_submission_is(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.shards / "searcher-0000").mkdir()
    (run.shards / "searcher-0000/shard-00000000.h5").touch()
    resume = replace(SUBMISSION, config=run.path, overrides=["model.context_length=77"])
    with pytest.raises(ConfigError, match=r"model\.context_length"):
        script(resume)


def test_each_config_runs_with_each_seed(tmp_path: Path) -> None:
    submissions = spread(SUBMISSION, [Path("math_gsm8k"), Path("tldr_pythia410m")], "3,5")
    runs = [submission.resolve(submission.load_site())[0] for submission in submissions]
    assert [run.run_dir.name for run in runs] == [
        *("math-gsm8k-seed3", "math-gsm8k-seed5"),
        *("tldr-pythia410m-seed3", "tldr-pythia410m-seed5"),
    ]
    assert {run.train.steps for run in runs} == {5}
    assert spread(SUBMISSION, [SUBMISSION.config], None) == [SUBMISSION]
    run = new_run(tmp_path)
    with pytest.raises(ConfigError, match=f"--seeds makes new runs, but {run.path} is one already"):
        spread(SUBMISSION, [run.path], "0-1")


def test_a_job_waits_for_that_of_another_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    submission = Submission(config=SUBMISSION.config, site=SUBMISSION.site, nodes=4, after=run.path)
    with pytest.raises(ConfigError, match="that run was never submitted"):
        script(submission)
    (run.path / "slurm").mkdir()
    (run.path / "slurm/job").write_text("17\n")
    text = script(submission)
    assert text.index("#SBATCH --dependency=afterany:17\n") < text.index("#SBATCH hetjob")
    assert text.count("dependency") == 1


def test_options_of_sbatch_and_a_chain_are_those_of_the_site(tmp_path: Path) -> None:
    options = sbatch_options(["--exclude=n1", "time-min=60", "contiguous"])
    assert options == ["--exclude=n1", "--time-min=60", "--contiguous"]
    site = replace(SUBMISSION, options=options, chain=2).load_site()
    assert site.sbatch_options == tuple(options) and not site.requeue
    for bad in ("-x n1", "x", "a b=c"):
        with pytest.raises(ConfigError, match=f"--sbatch {bad} is no option of sbatch"):
            sbatch_options([bad])


def test_options_of_sbatch_that_are_site_keys_change_what_is_checked_and_submitted(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(
        "{partition: one, qos: q, time: '0:30:00', sbatch_options: [-A me, -x n1], "
        "trainer: {partition: big, qos: t}, searcher: {partition: small}}"
    )
    asked = replace(SUBMISSION, site=file, time="0:40:00", options=["--partition=main", "--time-min=60"])
    site = asked.load_site()
    assert (site.partition, site.time, site.account) == ("main", "0:40:00", "me")
    assert site.sbatch_options == ("-x n1", "--partition=main", "--time-min=60")
    assert (site.trainer.partition, site.searcher.partition, site.trainer.qos) == (None, None, "t")
    assert asked.given == {"time": "--time ", "partition": "--sbatch partition="}
    text = script(replace(asked, config=Path("quickstart"), run_root=tmp_path))
    assert text.count("#SBATCH --partition=main\n") == text.count("partition=") == 4, (
        "each role: key and option"
    )
    assert replace(asked, options=["--time=0:50:00"]).load_site().time == "0:50:00"
    left = replace(asked, options=["--time=UNLIMITED"]).load_site()
    assert left.time == "0:40:00" and left.sbatch_options[-1] == "--time=UNLIMITED", "sbatch's own word"
    with pytest.raises(ConfigError, match=r"leaves no time to train in a job of time=0:05:00"):
        replace(asked, options=["--time=0:05:00"]).load_site()
    assert replace(asked, options=["--time=0"]).load_site().time == "0:40:00", "no limit"
    file.write_text("{sbatch_options: [--time=UNLIMITED, -p low -A acct]}")
    site = replace(asked, time=None, options=["--time=1:00:00", "--partition=high"]).load_site()
    assert (site.time, site.partition) == ("1:00:00", "high")
    assert site.sbatch_options[-2:] == ("--time=1:00:00", "--partition=high"), "the last ones count"


def test_a_wall_time_that_is_none_is_the_options_fault() -> None:
    for bad in ("1d", "24h", "1:2:3:4"):
        with pytest.raises(
            ConfigError, match=f"^--time {bad} is no wall time: give for example 24:00:00 or 1-0$"
        ):
            replace(SUBMISSION, time=bad).load_site()
    assert replace(SUBMISSION, time="1-0").load_site().seconds == 86_400


def test_script_in_a_job_takes_what_the_job_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": 7, "JOB_NUM_NODES": 1, "GPUS_ON_NODE": 2, "CPUS_ON_NODE": 6}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    (tmp_path / "two sites.yaml").write_text("gpus_per_node: 4")
    assert nodes_of_this_job(print_only=True) == 1
    with pytest.raises(ConfigError, match="--nodes is missing"):
        nodes_of_this_job(print_only=False)
    submission = Submission(
        config=Path("quickstart"), site=SUBMISSION.site, nodes=1, run_root=tmp_path, here="7"
    )
    text = script(submission, make=True)
    assert "TRAINERS=1\nSEARCHERS=1\n" in text and "--gres=gpu:2 " in text and "--cpus-per-task=3" in text
    (code,) = (tmp_path / "quickstart-seed0/code").glob("*/tba_hpc")
    assert f"source {quote(f'{code}/launch/job_supervisor.sh')}" in text
    assert script(submission, make=True) == text, "after a requeue"
    with monkeypatch.context() as salloc:
        salloc.delenv("SLURM_CPUS_ON_NODE")
        with pytest.raises(ConfigError, match=r"^this shell is not on a node of its job: submit the script"):
            script(submission, make=True)
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        there.setenv("SLURM_JOB_PARTITION", "gpu")
        there.setenv("TBA_SCRIPT", "slurm/tba_tldr.sbatch")
        script(replace(submission, site=Path("two sites.yaml")), make=True)
    run = RunDir(tmp_path / "quickstart-seed0")
    happen(run, time.time(), "allocated", job="7", nodes="n1")
    assert resume_command(run, read_events(run)) == (
        f"cd {tmp_path} && RUN={run.path} SITE='{tmp_path}/two sites.yaml' "
        "sbatch --nodes=1 --partition=gpu slurm/tba_tldr.sbatch"
    )
    without = tmp_path / "cpu.yaml"
    without.write_text("{gpus_per_node: 0, ranks_per_node: 3}")
    text = script(replace(submission, site=without, run_root=tmp_path / "of-cpus"))
    assert "TRAINERS=1\nSEARCHERS=2\n" in text and "--gres" not in text, "as the site says"


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_no_script_puts_a_run_of_several_nodes_into_the_memory_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "mount_kind", lambda _: kind)
    monkeypatch.delenv(folders.NODES_SHARE_MEMORY, raising=False)
    with pytest.raises(ConfigError, match=f"{tmp_path} is on {kind}, which other nodes do not see: put runs"):
        script(replace(SUBMISSION, run_root=tmp_path))
    assert "TRAINERS=" in script(replace(SUBMISSION, run_root=tmp_path, nodes=1))
    monkeypatch.setenv(folders.NODES_SHARE_MEMORY, "1")
    assert "TRAINERS=" in script(replace(SUBMISSION, run_root=tmp_path))


def test_ranks_that_exchange_files_need_no_mpi() -> None:
    files = Submission(
        config=SUBMISSION.config, site=SUBMISSION.site, nodes=4, overrides=["exchange.transport=files"]
    )
    text, mpi = script(files), script(SUBMISSION)
    assert "srun --mpi=none " in text and "mpi4py" not in text
    assert "srun --mpi=pmix " in mpi and "-m mpi4py -m tba_hpc" in mpi


def test_copies_of_code_look_new_to_a_clusters_cleaning(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    old = package / "__init__.py"
    old.touch()
    os.utime(old, (1e9, 1e9))
    began = time.time()
    modules.copy([package], tmp_path, tmp_path / "modules")
    copies = [path for path in snapshot.take(tmp_path).rglob("*") if path.is_file()]
    assert len(copies) > 100
    for copied in (*copies, tmp_path / "modules/mine/__init__.py"):
        assert copied.stat().st_mtime > began - 1
