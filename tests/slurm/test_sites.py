"""The batch script of every shipped site, run on the test cluster with stand-ins for what the site has.

Only what the cluster cannot give is asked for otherwise: nodes, memory, GPUs, partition, plugin of MPI.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_testbed.cluster import Cluster

from tba_hpc import shipped
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Site, load_site, plan
from tba_hpc.launch.sbatch import Job, batch_script
from tba_hpc.run.directory import RunDir
from tests.slurm import stand_ins
from tests.slurm.test_submit import HELLO, REPOSITORY, _config, _finished, _ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]

HERE: dict[str, Any] = {
    "partition": "main",
    "account": None,
    "qos": None,
    "constraint": None,
    "gpus_per_node": 1,
    "cpus_per_node": 2,
    "time": "10",
    "signal_seconds": 60,
    "mpi": "pmix",
    "network_interface": None,
    "trainer": {},
    "searcher": {},
}

SHELL = {
    "SBATCH_PARTITION": "nowhere",
    "SBATCH_ARRAY_INX": "0-9",
    "SLURM_NTASKS": "99",
    "SLURM_MEM_PER_GPU": "1",
    "SRUN_EXPORT_ENV": "NONE",
}
"""What a shell may bring along that would keep a job from starting, or its steps."""


def _here(site: Site, image: Path) -> Site:
    """The site as the cluster of the tests can be it."""
    as_after_export_none = "export SLURM_EXPORT_ENV=NONE"
    keys = HERE | {"setup": [*site.setup, as_after_export_none]}
    keys["gpu_request"] = str(site.gpu_request).replace(":a100", "")
    keys |= {"memory": "1000"} if site.memory not in (None, "0") else {}
    keys |= {"memory_per_cpu": "300M"} if site.memory_per_cpu else {}
    if site.container:
        keys["container"] = site.container.model_dump() | {"image": str(image)}
    # The cluster's MPI is Open MPI, whatever the site's.
    environment = {key: value for key, value in site.environment.items() if key != "MPI4PY_MPIABI"}
    keys["environment"] = environment | {"HELLO_STEPS": "1"}
    return Site.model_validate(site.model_dump(exclude_unset=True) | keys)


@pytest.mark.parametrize("name", shipped.files("sites"))
def test_the_script_of_every_site_runs(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    seen = [REPOSITORY, cluster.root, *(Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix))]
    srun = str(shutil.which("srun", path=cluster.environment["PATH"]))
    environment = stand_ins.make(folder, Path(HELLO[1]), srun, seen)
    path = f"{folder}/bin:{cluster.environment['PATH']}"
    for key, value in (environment | SHELL | {"PATH": path, "PYTHONPATH": str(REPOSITORY)}).items():
        monkeypatch.setenv(key, value)

    original = load_site(Path(name))
    site = _here(original, folder / "image")
    program = ("python", "/opt/image/program.py") if site.container else (*site.python, HELLO[1])
    run = RunDir.create(_config(tmp_path / "runs"))
    (run.path / "slurm").mkdir()
    job = Job(name="tba-hello", run=run.path, rank=program, tba=program)
    script = batch_script(job, plan(_config(tmp_path), site, 2), site)
    _finished(cluster, run, slurm.submit(run, script))

    assert [(rank["role"], rank["size"]) for rank in _ranks(run, 1)] == [("train", 2), ("search", 2)]
    said = stand_ins.log(environment) if Path(folder, "log").exists() else []
    where = "inside" if site.container else "venv" if site.venv else None
    assert said.count(where) == (4 if where else 0), "claim, prepare and both ranks"
    loads = [line for line in original.setup if line.startswith("module ")]
    loads += [f"module load {' '.join(original.modules)}"] if original.modules else []
    assert [line for line in said if line.startswith("module ")] == loads
