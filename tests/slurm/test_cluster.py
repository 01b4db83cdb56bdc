"""The cluster itself: it is real, its nodes crash and come back, and nothing of it stays."""

import time
from pathlib import Path

import pytest
from slurm_testbed.cluster import Cluster

pytestmark = pytest.mark.slurm

REPORT = 'srun bash -c \'echo "$(hostname) $CUDA_VISIBLE_DEVICES $(getent hosts node6 | cut -d" " -f1)"\''


def test_each_node_has_its_own_name_and_gpus(cluster: Cluster, tmp_path: Path) -> None:
    script = f"#!/bin/bash\n#SBATCH -N3 -n3 --gres=gpu:2 --output={tmp_path}/out\n{REPORT}\n"
    job = cluster.submit(script)
    assert cluster.wait(job) == "COMPLETED"
    expected = [f"node{i} 0,1 {cluster.address(6)}" for i in (1, 2, 3)]
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected


def test_a_crashed_node_takes_everything_on_it_along_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(f"#!/bin/bash\n#SBATCH -wnode2 --output={tmp_path}/out\nsleep 600\n")
    cluster.wait(job, "RUNNING")
    on_node = cluster.until(
        lambda: [p for p in cluster.pids("node2") if "sleep" in _name(p)], "the job's process"
    )
    cluster.crash("node2")
    assert not any(_name(pid) for pid in on_node)
    cluster.run("scancel", str(job))
    cluster.start("node2")
    again = cluster.submit(f"#!/bin/bash\n#SBATCH -wnode2 --output={tmp_path}/out\nhostname\n")
    assert cluster.wait(again) == "COMPLETED"
    assert (tmp_path / "out").read_text() == "node2\n"


def test_a_higher_partition_preempts_a_lower_one(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    script = f"#!/bin/bash\n#SBATCH -N6 --exclusive --open-mode=append --output={tmp_path}/out\n"
    (tmp_path / "out").touch()
    low = cluster.submit(script + "echo start; sleep 600\n", "-plow")
    cluster.until(lambda: (tmp_path / "out").read_text().count("start") == 1, "the first start", 40)
    high = cluster.submit("#!/bin/bash\n#SBATCH --output=/dev/null\ntrue\n", "-phigh", "-N6", "--exclusive")
    assert cluster.wait(high) == "COMPLETED"
    cluster.until(lambda: (tmp_path / "out").read_text().count("start") == 2, "the second start", 40)
    assert cluster.jobs(low)[0]["Restarts"] == "1"
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=30")


def test_two_clusters_live_side_by_side_and_leave_nothing(cluster: Cluster) -> None:
    with Cluster(nodes=1, gpus=0) as other:
        assert other.wait(other.submit("#!/bin/bash\n#SBATCH --output=/dev/null\ntrue\n")) == "COMPLETED"
        assert other.run("sinfo", "-h", "-o", "%D").split()[0] == "1"
        assert cluster.run("sinfo", "-h", "-o", "%D").split()[0] == "6"
        assert other.processes()
    assert not other.processes()
    assert not other.root.exists()


def test_a_job_that_has_ended_is_seen_at_once_by_who_waits_for_its_work(cluster: Cluster) -> None:
    fails = cluster.submit("#!/bin/bash\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n1\necho its words; exit 3\n")
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"no job is left, waiting for steps: (?s:.*)FAILED\nits words"):
        cluster.until(lambda: False, "steps", 100, by_jobs=True)
    with pytest.raises(AssertionError, match=rf"job {fails} is FAILED.*, not RUNNING\nits words"):
        cluster.wait(fails, "RUNNING", seconds=100)
    assert time.monotonic() - began < 30
    assert cluster.state(fails + 1000) == cluster.wait(fails + 1000) == "GONE"


def _name(pid: int) -> str:
    """Name of a process, empty when it is gone or a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    return "" if "State:\tZ" in status else status.split()[1]
