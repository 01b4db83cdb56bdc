"""The doctor and the checks before a submission on a real cluster: a good set-up, and broken ones."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from slurm_testbed.cluster import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]

REPOSITORY = Path(__file__).parents[2]
TBA = str(Path(sys.executable).parent / "tba")
SUBMIT = (sys.executable, str(REPOSITORY / "tools/submit.py"))

SITE = {"gpus_per_node": 0, "cpus_per_node": 4, "memory": "1000", "time": "10", "signal_seconds": 60}
"""Nodes of the test cluster without their make-believe GPUs, of which no driver knows."""

Findings = dict[str, dict[str, str]]
Doctor = Callable[..., tuple[int, Findings]]


def _write(path: Path, tree: object) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """``doctor(cluster, option, …, site_key=value)``: its exit status, and its findings by name."""

    def ask(cluster: Cluster, *options: str, **keys: object) -> tuple[int, Findings]:
        site = _write(tmp_path / "site.yaml", SITE | keys)
        command = [TBA, "doctor", "--site", str(site), "--run-root", str(tmp_path / "runs"), "--json"]
        done = subprocess.run(
            [*command, *options], env=cluster.environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout, done.stderr
        return done.returncode, {found["name"]: found for found in json.loads(done.stdout)}

    return ask


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that even root cannot write to."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_good_set_up_is_one_world(cluster: Cluster, tmp_path: Path, doctor: Doctor) -> None:
    status, findings = doctor(cluster, "--launch", searcher={"partition": "low"})
    world = findings["one MPI world"]
    assert world == {
        "name": "one MPI world",
        "level": "ok",
        "found": "srun --mpi=pmix joined 3 ranks on node1 and node4 (het job)",
        "remedy": "",
    }
    assert findings["GPUs"]["found"].startswith("node1, node4: ")
    assert findings["file system"]["level"] == "ok", "whatever it is, both nodes have seen it"
    assert findings["partition main"]["found"] == "6 nodes, jobs up to UNLIMITED"
    assert "30 s (GraceTime)" in findings["preemption in low"]["found"]
    assert findings["requeue"]["level"] == "ok"
    problems = [found for found in findings.values() if found["level"] == "problem"]
    assert (status, problems) == (0, [])
    assert list((tmp_path / "runs").iterdir()) == [], "the trial leaves nothing"


def test_the_wrong_plugin_is_named_and_the_right_one_is_tried(cluster: Cluster, doctor: Doctor) -> None:
    status, findings = doctor(cluster, "--launch", mpi="pmi2", hetjob=False)
    assert status == 1
    assert "mpi: pmi2 is not for Open MPI" in findings["MPI plugin"]["found"]
    world = findings["one MPI world"]
    assert world["level"] == "problem"
    assert world["found"] == "srun --mpi=pmi2 started 3 ranks, each in a world of its own"
    assert world["remedy"].startswith("set mpi: pmix in the site file: srun --mpi=pmix joined 3 ranks")


def test_a_job_that_finds_no_scontrol_says_so(cluster: Cluster, tmp_path: Path, doctor: Doctor) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for command in Path("/usr/bin").iterdir():
        if command.name != "scontrol":
            (commands / command.name).symlink_to(command)
    status, findings = doctor(cluster, "--launch", environment={"PATH": str(commands)})
    assert status == 1
    assert "scontrol: command not found" in findings["one MPI world"]["found"], findings["one MPI world"]


def test_a_trial_that_stays_queued_is_cancelled(cluster: Cluster, tmp_path: Path, doctor: Doctor) -> None:
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    status, findings = doctor(cluster, "--launch", "--wait", "1")
    world = findings["one MPI world"]
    assert (status, world["level"]) == (0, "warning")
    assert "was still pending after 1 s" in world["found"] and "--wait" in world["remedy"]
    cluster.until(lambda: "tba-doctor" not in cluster.run("squeue", "-h", "-o", "%j"), "the cancellation")
    assert list((tmp_path / "runs").iterdir()) == []


def test_no_requeue_is_a_warning(doctor: Doctor, running_cluster: Cluster) -> None:
    with Cluster(nodes=2, gpus=0, settings={"JobRequeue": "0"}) as other:
        status, findings = doctor(other)
    assert status == 0
    assert findings["requeue"]["level"] == "warning"
    assert "JobRequeue=0" in findings["requeue"]["found"]
    assert "requeue: false" in findings["requeue"]["remedy"]
    assert findings["request"]["level"] == "ok"


def test_a_read_only_run_root_is_a_problem_and_starts_no_job(
    cluster: Cluster, read_only: Path, doctor: Doctor
) -> None:
    status, findings = doctor(cluster, "--launch", "--run-root", str(read_only), partition="gpuu")
    assert status == 1
    assert findings["run root"]["level"] == "problem"
    assert f"cannot write to {read_only}: Read-only file system" in findings["run root"]["found"]
    assert "one MPI world" not in findings
    assert "invalid partition specified: gpuu" in findings["request"]["found"]


# --- Before a submission ---


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``submit(option, …)``: tools/submit.py with a small config."""
    site = _write(tmp_path / "site.yaml", SITE)
    tree = {"run": {"root": str(tmp_path / "runs")}, "model": {"path": "org/model"}}
    config = _write(tmp_path / "config.yaml", tree)
    command = [*SUBMIT, "--config", str(config), "--site", str(site), "--nodes", "3"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)

    return run


def test_what_would_fail_is_refused_in_a_sentence(
    cluster: Cluster,
    submit: Callable[..., subprocess.CompletedProcess[str]],
    read_only: Path,
    tmp_path: Path,
) -> None:
    refusals = {
        ("--set", "model.path=/no/model"): "model.path=/no/model does not exist",
        ("--nodes", "7"): "7 nodes are asked of partition main, but it has TotalNodes=6",
        ("--run-root", str(read_only)): f"cannot write to {read_only}: Read-only file system",
        ("--time", "2-00:00:00"): "time: 2-00:00:00 is beyond MaxTime=1-00:00:00 of partition main",
    }
    cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=1-0")
    try:
        for options, words in refusals.items():
            done = submit(*options)
            assert done.returncode == 2, done.stdout
            assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=UNLIMITED")
    assert not cluster.run("squeue", "--noheader") and not (tmp_path / "runs").exists()


def test_what_may_fail_is_said_with_the_job(
    cluster: Cluster,
    submit: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")  # as a site's profile or plugin may
    monkeypatch.setenv("HF_HOME", "/no/cache")
    done = submit("--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    warnings = "\n".join(answer["warnings"])
    assert "Slurm took the job with Requeue=0" in warnings
    assert "model.path=org/model is not in /no/cache/hub" in warnings
    assert cluster.jobs(int(answer["job"]))[0]["Requeue"] == "0"
