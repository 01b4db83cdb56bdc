"""The doctor and the checks before a submission on a real cluster: a good set-up, and broken ones."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from known_models import make_empty_model
from slurm_testbed.cluster import Cluster
from typed import tba

from tba_hpc.config import parse_config
from tba_hpc.run.directory import RunDir

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]

TBA = str(Path(sys.executable).parent / "tba")

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
            [*command, *options], env=cluster.environment, capture_output=True, text=True, timeout=600
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
        "found": "srun --mpi=pmix joined 4 ranks on node1 and node4 (het job)",
        "remedy": "",
    }
    assert re.fullmatch(r"128 MiB to each of 2 nodes in [\d.]+ s", findings["MPI between nodes"]["found"])
    assert re.fullmatch(r"Open MPI v5[\d.]+, .*/lib/libmpi\.so\.40", findings["MPI library"]["found"])
    assert findings["GPUs"]["found"].startswith("node1, node4: ")
    assert findings["file system"]["level"] == "ok", "whatever it is, both nodes have seen it"
    assert findings["partition"]["found"].startswith("low: 6 nodes, jobs up to UNLIMITED")
    assert "low: a preempted job has 30 s (GraceTime)" in findings["preemption"]["found"]
    assert findings["requeue"]["level"] == "ok"
    problems = [found for found in findings.values() if found["level"] == "problem"]
    assert (status, problems) == (0, []) and "setup" not in findings
    assert list((tmp_path / "runs").iterdir()) == [], "the trial leaves nothing"


def test_a_setup_line_that_fails_is_quoted(cluster: Cluster, doctor: Doctor) -> None:
    status, findings = doctor(cluster, "--launch", setup=["no_such_command load foo/1.0"])
    assert (status, findings["one MPI world"]["level"]) == (0, "ok"), findings["one MPI world"]
    assert findings["setup"]["level"] == "warning"
    assert findings["setup"]["found"].endswith(": no_such_command: command not found")


def test_the_wrong_plugin_is_named(cluster: Cluster, doctor: Doctor) -> None:
    status, findings = doctor(cluster, "--launch", mpi="pmi2", hetjob=False)
    assert status == 1
    assert "mpi: pmi2 does not fit Open MPI" in findings["MPI plugin"]["found"]
    world = findings["one MPI world"]
    assert world["level"] == "problem"
    assert world["found"] == "srun --mpi=pmi2 started 4 ranks, each in an MPI world of its own"
    assert world["remedy"] == "set mpi: pmix in the site file"


DEBIAN = Path("/usr/lib/x86_64-linux-gnu")


@pytest.mark.parametrize(
    ("file", "package", "version", "keys"),
    [
        ("libmpi.so.40", "openmpi-bin", "Open MPI v4.", {"mpi_library": f"{DEBIAN}/libmpi.so.40"}),
        ("libmpich.so.12", "mpich", "MPICH Version: 4.", {"mpi": "pmi2", "mpi_library": "site"}),
    ],
)
def test_the_sites_own_library_makes_the_world(
    file: str,
    package: str,
    version: str,
    keys: dict[str, object],
    cluster: Cluster,
    doctor: Doctor,
    tmp_path: Path,
) -> None:
    if not (DEBIAN / file).exists():
        pytest.skip(f"{DEBIAN / file} is missing: apt-get install {package}")
    (tmp_path / "libmpi.so.12").symlink_to(DEBIAN / "libmpich.so.12")
    environment = {"LD_LIBRARY_PATH": str(tmp_path)} if package == "mpich" else {}
    status, findings = doctor(cluster, "--launch", environment=environment, **keys)
    assert findings["MPI library"]["found"].startswith(version)
    assert (status, findings["one MPI world"]["level"]) == (0, "ok"), findings["one MPI world"]
    assert findings["MPI between nodes"]["level"] == "ok"


def test_a_store_of_pmix_that_fails_is_named(cluster: Cluster, doctor: Doctor) -> None:
    status, findings = doctor(cluster, "--launch", environment={"PMIX_MCA_gds": "none_such"})
    world = findings["one MPI world"]
    assert (status, world["level"]) == (1, "problem")
    assert "PMIX_MCA_gds: hash under environment in the site file may help" in world["remedy"]


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


def test_a_trial_that_no_node_could_run_is_not_waited_for(
    cluster: Cluster, tmp_path: Path, doctor: Doctor
) -> None:
    status, findings = doctor(cluster, "--launch", cpus_per_node=32)
    world = findings["one MPI world"]
    assert (status, world["level"]) == (1, "problem")
    assert "Requested node configuration is not available" in world["found"]
    assert "cpus_per_node" in world["found"]
    assert not cluster.run("squeue", "--noheader") and list((tmp_path / "runs").iterdir()) == []


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
def submit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``submit(option, …)``, of a small config, whose model is in the cache."""
    site = _write(tmp_path / "site.yaml", SITE)
    tree = {
        "run": {"root": str(tmp_path / "runs")},
        "model": {"path": "org/model"},
        "task": {"name": "arithmetic"},
    }
    snapshot = tmp_path / "cache/hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    make_empty_model(snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    config = _write(tmp_path / "config.yaml", tree)
    return partial(tba, "submit", "--config", config, "--site", site, "--nodes", 3)


@contextmanager
def main_partition(cluster: Cluster, changed: str, usual: str) -> Iterator[None]:
    """Change a setting of the partition for a while."""
    cluster.run("scontrol", "update", "PartitionName=main", changed)
    try:
        yield
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", usual)


def test_what_would_fail_is_refused_in_a_sentence(
    cluster: Cluster,
    submit: Callable[..., subprocess.CompletedProcess[str]],
    read_only: Path,
    tmp_path: Path,
) -> None:
    refusals = {
        ("--set", "model.path=/no/model"): "model.path=/no/model does not exist",
        ("--nodes", "7"): "the job needs 7 nodes of partition main, which has TotalNodes=6",
        ("--run-root", str(read_only)): f"cannot write to {read_only}: Read-only file system",
        ("--time", "2-00:00:00"): "time: 2-00:00:00 is more than MaxTime=1-00:00:00 of partition main",
        ("--sbatch", "time=2-0"): "give --sbatch time=1-00:00:00 or less, or choose another partition",
        ("--set", "task.name=gsm8k"): (
            f"{tmp_path}/cache (HF_HOME), where ranks look, has no complete copy of task.name=gsm8k, "
            "data=openai/gsm8k (main), and HF_HUB_OFFLINE=1 forbids them to download anything: "
            f"where there is a network, type: tba fetch {tmp_path}/config.yaml --site {tmp_path}/site.yaml "
            "--set task.name=gsm8k"
        ),
    }
    large = _write(tmp_path / "large.yaml", SITE | {"gpus_per_node": 8})
    refusals["--site", str(large)] = (
        "Requested node configuration is not available; change the site key (or --sbatch option) gpus"
    )
    with main_partition(cluster, "MaxTime=1-0", "MaxTime=UNLIMITED"):
        for options, words in refusals.items():
            done = submit(*options)
            assert done.returncode == 2, done.stdout
            assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not cluster.run("squeue", "--noheader") and not (tmp_path / "runs").exists()


def test_what_may_fail_is_said_with_the_job(
    cluster: Cluster,
    submit: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")  # as a profile may
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    done = submit("--json", "--set", "model.path=org/another")  # its job may ask the hub for it
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    warnings = "\n".join(answer["warnings"])
    assert "SBATCH_NO_REQUEUE of this shell would override the batch script" in warnings
    assert cluster.jobs(int(answer["job"]))[0]["Requeue"] == "1", "as the script asks"


def test_elastic_jobs_are_checked_before_submission(
    cluster: Cluster,
    submit: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """As of a run's own job, but of the searchers' partition alone."""
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"launch": {"elastic": 8}}
    run = RunDir.create(parse_config(tree))

    lend = partial(tba, "submit", "--elastic", run.path, "--site", tmp_path / "site.yaml")
    weights = tmp_path / "cache/hub/models--org--model/snapshots/abc/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    refused = lend("--nodes", "1")
    assert refused.returncode == 2 and "has no complete copy of model.path=org/model" in refused.stderr
    assert f"type: tba fetch {run.path} --site {tmp_path}/site.yaml" in refused.stderr
    (tmp_path / "elsewhere").rename(weights)
    with main_partition(cluster, "MaxTime=1-0", "MaxTime=UNLIMITED"):
        refused = lend("--nodes", "1", "--time", "2-00:00:00")
    assert refused.returncode == 2 and "is more than MaxTime=1-00:00:00 of partition main" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not cluster.run("squeue", "--noheader")
    with main_partition(cluster, "State=DOWN", "State=UP"):
        lent = lend("--nodes", "1", "--json")
    assert lent.returncode == 0, lent.stderr
    answer = json.loads(lent.stdout)
    assert any("partition main is DOWN, so that jobs stay queued" in said for said in answer["warnings"])
    cluster.run("scancel", str(answer["job"]))
