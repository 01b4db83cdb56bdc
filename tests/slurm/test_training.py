"""The main job as a heterogeneous Slurm job: real engines, a real trainer, to the end though preempted."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tba_hpc.metrics import read_metrics
from tba_hpc.state import RunDir
from tests.slurm.cluster import Cluster
from tests.system.test_run import SETTINGS, assert_whole, steps_done

pytestmark = [pytest.mark.mpi, pytest.mark.system]

REPOSITORY = Path(__file__).parents[2]
SITE = {
    "partition": "low",
    "gpus_per_node": 1,
    "cpus_per_node": 2,
    "memory": "3000",
    "time": "20",
    "signal_seconds": 60,
}


def submit(model: Path, root: Path, *, form: str = "--no-homogeneous") -> int:
    """Type tools/submit.py; the job's id."""
    (root / "site.yaml").write_text(yaml.safe_dump(SITE))
    settings = [f"model.path={model}", *SETTINGS]
    command = [
        *(sys.executable, "tools/submit.py", "--config", "configs/quickstart.yaml", "--nodes", "3", form),
        *("--site", f"{root}/site.yaml", "--run-root", str(root), "--json"),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["job"])


def said(root: Path) -> str:
    """All logs of the job and its ranks."""
    run = root / "quickstart-seed0"
    logs = [*run.glob("slurm/job-*.log"), *run.glob("logs/*/*.log"), *run.glob("logs/*/error-*.txt")]
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs))


def test_a_preempted_het_job_is_requeued_resumes_and_finishes(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    job = submit(model, tmp_path)
    cluster.until(lambda: steps_done(tmp_path) >= 5, "five steps", 240, seen=lambda: said(tmp_path))
    high = cluster.submit(
        "#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1\n", "-phigh", "-N6", "--exclusive"
    )
    asked = time.monotonic()
    assert cluster.wait(high, seconds=60) == "COMPLETED"
    assert time.monotonic() - asked < 30, "the run left its nodes within the grace time"
    assert cluster.wait(job, seconds=300) == "COMPLETED", said(tmp_path)

    run = RunDir.open(tmp_path / "quickstart-seed0")
    assert_whole(run)
    events = [record["event"] for record in read_metrics(run.metrics_file("trainer")) if "event" in record]
    assert events.count("resumed") == 1 and "stopped" in events and events[-1] == "finished"
