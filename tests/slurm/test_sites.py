"""Batch scripts of shipped sites, run on the test cluster with stand-ins for what the site has.

One of each way in which Python is found there (a container by a word before the command, one by options of
srun, conda, a venv); of the others the golden scripts say that they differ in header lines alone. Only what
the cluster cannot give is asked for otherwise: nodes, memory, GPUs, partition, plugin of MPI.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_testbed.cluster import Cluster

from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Site, load_site, plan, searchers_of_a_node
from tba_hpc.launch.sbatch import Job, batch_script, elastic_script
from tba_hpc.run.directory import RunDir
from tests.slurm import stand_ins
from tests.slurm.test_submit import HELLO, REPOSITORY, _config, _finished, _ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]

RUN = ("delftblue", "juwels-booster", "perlmutter", "pyxis-cloud")
ELASTIC = ("lumi", "pyxis-cloud")

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


@dataclass(frozen=True)
class Place:
    """A site as the cluster of the tests can be it, with its stand-ins; how it is found on PATH is set."""

    original: Site
    site: Site
    program: tuple[str, ...]
    environment: dict[str, str]

    @property
    def said(self) -> list[str]:
        """What its commands were called for."""
        return stand_ins.log(self.environment) if Path(self.environment["STAND_INS"], "log").exists() else []

    @property
    def where(self) -> str | None:
        """The word of the Python that must be found there."""
        return "inside" if self.site.container else "venv" if self.site.venv else None

    def assert_set_up(self) -> None:
        """Its modules are loaded, once, in order."""
        loads = [line for line in self.original.setup if line.startswith("module ")]
        loads += [f"module load {' '.join(self.original.modules)}"] if self.original.modules else []
        assert [line for line in self.said if line.startswith("module ")] == loads


def _place(
    name: str, program: Path, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """program: what the image has, or what runs beside the code."""
    folder.mkdir()
    seen = [REPOSITORY, cluster.root, *(Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix))]
    srun = str(shutil.which("srun", path=cluster.environment["PATH"]))
    environment = stand_ins.make(folder, program, srun, seen)
    path = f"{folder}/bin:{cluster.environment['PATH']}"
    for key, value in (environment | SHELL | {"PATH": path, "PYTHONPATH": str(REPOSITORY)}).items():
        monkeypatch.setenv(key, value)
    original = load_site(Path(name))
    site = _here(original, folder / "image")
    words = ("python", "/opt/image/program.py") if site.container else (*site.python, str(program))
    return Place(original, site, words, environment)


@pytest.mark.parametrize("name", RUN)
def test_the_script_of_a_site_runs(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _place(name, Path(HELLO[1]), cluster, tmp_path / "stand-ins", monkeypatch)
    run = RunDir.create(_config(tmp_path / "runs"))
    (run.path / "slurm").mkdir()
    job = Job(name="tba-hello", run=run.path, rank=place.program, tba=place.program)
    script = batch_script(job, plan(_config(tmp_path), place.site, 2), place.site)
    _finished(cluster, run, slurm.submit(run, script))

    assert [(rank["role"], rank["size"]) for rank in _ranks(run, 1)] == [("train", 2), ("search", 2)]
    assert place.said.count(place.where) == (5 if place.where else 0), "begin, start, ended and both ranks"
    place.assert_set_up()


SEARCHER = """
import os, sys, time
from pathlib import Path
if sys.argv[1] == "supervise":
    from tba_hpc.launch import supervise
    sys.exit(supervise.main(sys.argv[2:]))
run = Path(sys.argv[2])
(run / f"{sys.argv[1]}-{os.environ['SLURM_PROCID']}").write_text(os.environ.get("OMPI_COMM_WORLD_SIZE", ""))
while len(list(run.glob("search-*"))) < 2:
    time.sleep(0.1)
(run / "finished").touch()
"""
"""A searcher that comes by itself, and whose run is finished once there are two."""


@pytest.mark.parametrize("name", ELASTIC)
def test_elastic_searchers_run_on_a_site(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two searchers on it, each for itself, in the site's container where it has one."""
    program = tmp_path / "searcher.py"
    program.write_text(SEARCHER)
    place = _place(name, program, cluster, tmp_path / "stand-ins", monkeypatch)
    site = place.site.model_copy(update={"gpus_per_node": 2})
    run = RunDir.create(_config(tmp_path / "runs"))
    (run.path / "slurm").mkdir()
    job = Job(name="searchers", run=run.path, rank=place.program, tba=place.program)
    script = elastic_script(job, 1, searchers_of_a_node(run.config(), site), site)
    array = int(slurm.send(run, script))
    assert cluster.wait(array) == "COMPLETED", _said(run)
    assert "the run is finished" in _said(run)
    assert sorted(file.name for file in run.path.glob("search-*")) == ["search-0", "search-1"]
    assert not any(file.read_text() for file in run.path.glob("search-*")), "no MPI world of theirs"
    assert place.said.count(place.where) == (4 if place.where else 0), "join, searched and two searchers"
    place.assert_set_up()


def _said(run: RunDir) -> str:
    return "".join(file.read_text() for file in (run.path / "slurm").glob("searchers-*.log"))
