"""Which MPI library is chosen and what the doctor says of it: rules, texts and scripts, without MPI."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tba_hpc.checks import loaded, mpi_checks
from tba_hpc.checks.findings import Finding
from tba_hpc.checks.loaded import Library
from tba_hpc.checks.machine_checks import Folder, Gpus, Machine, Model, SharedMemory, find_fabric
from tba_hpc.checks.mpi_checks import Fabric, Sums, World
from tba_hpc.config import parse_config
from tba_hpc.launch import mpi_library
from tba_hpc.launch.plan import Site, plan
from tba_hpc.launch.sbatch import Job, batch_script

WHEEL = Library(version="Open MPI v5.0.11", path="/venv/lib/libmpi.so.40", own=True, pmix="5.0.11rc1")
SITES = Library(version="Open MPI v4.1.4", path="/opt/openmpi/lib/libmpi.so.40.30.4", pmix="4.2.2")
FABRIC = Fabric(hosts=("node1", "node2"), latency=2.1e-6, bandwidth=24.2e9, spread=20e9)
NODE = Machine(
    host="node1",
    cores=64,
    memory=1 << 38,
    gpus=Gpus(),
    folder=Folder(path="/runs"),
    shm=SharedMemory(free=1 << 36),
    interfaces=(),
    model=Model(name="org/model", place="/models", nbytes=16_000_000_000),
    fabric=("mlx5_0",),
)

DISPLAY = """Host 0 [node1] ranks 0 - 1
Host 1 [node2] ranks 2 - 3

 host | 0   1
======|==========
    0 : sm   tcp
    1 : tcp  sm

Connection summary: (off-host)
  on-host:  all connections are sm or self
  off-host: all connections are tcp

"""

MAPS = """55d0c0000000-55d0c0001000 r--p 00000000 08:01 1 /venv/bin/python3.11
7f10a0000000-7f10a0001000 r--p 00000000 08:01 2 /venv/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so
7f10a0002000-7f10a0003000 r--p 00000000 08:01 3 /my libraries/libmpi.so.40
7f10a0003000-7f10a0004000 r-xp 00001000 08:01 3 /my libraries/libmpi.so.40
7f10a0004000-7f10a0005000 rw-p 00000000 00:00 0
7f10a0006000-7f10a0007000 r--p 00000000 08:01 4 /opt/lib/libpmix.so.2.5.2
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0 [vdso]
"""


def _says(finding: Finding, level: str, *words: str) -> None:
    assert finding.level == level, finding
    assert all(word in finding.sentence for word in words), finding.sentence
    assert "\n" not in finding.sentence
    assert bool(finding.remedy) == (level != "ok"), finding


# --- The choice ---


def _script(nodes: int = 2, **keys: object) -> str:
    site = Site.model_validate({"gpus_per_node": 0, **keys})
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 8}})
    return batch_script(Job(name="tba", run=Path("/runs/a")), plan(config, site, nodes), site)


def test_ranks_are_told_which_library_to_load() -> None:
    assert "MPI4PY" not in _script()
    assert 'export MPI4PY_LIBMPI=""\n' in _script(mpi_library="site")
    assert 'export MPI4PY_LIBMPI="$MPI_HOME/lib/libmpi.so"\n' in _script(
        mpi_library="$MPI_HOME/lib/libmpi.so"
    )
    own = _script(mpi_library="site", modules=["openmpi"], environment={"MPI4PY_LIBMPI": "/mine"})
    assert own.index("module load openmpi") < own.index('MPI4PY_LIBMPI="/mine"')
    assert 'MPI4PY_LIBMPI=""' not in own


@pytest.mark.parametrize("value", ["openmpi", "", "lib/libmpi.so", "/lib/libmpi.so\nrm -r x"])
def test_a_library_is_wheel_site_or_a_path(value: str) -> None:
    with pytest.raises(ValidationError):
        Site(mpi_library=value)


def test_on_one_node_every_open_mpi_stays_off_the_network() -> None:
    """Release 4 calls its way through memory by another name, so the others are excluded by theirs."""
    assert 'export OMPI_MCA_btl="self,sm"\n' in _script(nodes=1)
    for keys in ({"mpi_library": "site"}, {"environment": {"MPI4PY_LIBMPI": "/mine"}}):
        assert 'export OMPI_MCA_btl="^tcp,ofi,' in _script(nodes=1, **keys)
    assert "OMPI_MCA_btl=" not in _script(nodes=2, mpi_library="site")


def test_a_library_in_a_folder_of_its_own_has_its_mpiexec_there(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for library in ("lib", "lib/libmpi.so.40"):
        assert mpi_library.mpiexec_of(str(tmp_path / library)) == tmp_path / "bin/mpiexec"


# --- What is loaded ---


def test_a_process_is_described_by_what_it_has_mapped() -> None:
    files = loaded.mapped_files(MAPS)
    assert len(files) == 4 and Path("/my libraries/libmpi.so.40") in files
    assert loaded.version_in("OpenPMIx 5.0.11rc1, repo rev: v5.0.11rc1") == "5.0.11rc1"
    assert loaded.pmix_server({"PMIX_VERSION": "4.2.2"}) == "4.2.2" and loaded.pmix_server({}) == ""
    assert Library.from_json(WHEEL.to_json()) == WHEEL


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("libmpi.so.40.30.4", True),
        ("libmpi.so.12", True),
        ("libmpich.so.12.2.2", True),
        ("libmpi_gnu_123.so.12", True),
        ("libmpi_cray.so.12", True),
        ("libmpi_cxx.so.40", False),
        ("libmpifort.so.12", False),
        ("MPI.openmpi.cpython-311-x86_64-linux-gnu.so", False),
    ],
)
def test_names_of_mpi_libraries(name: str, known: bool) -> None:
    assert bool(loaded.LIBRARY.fullmatch(name)) is known


@pytest.mark.parametrize(
    ("library", "keys", "level", "words"),
    [
        (WHEEL, {}, "ok", ("Open MPI v5.0.11, /venv/lib",)),
        (WHEEL, {"modules": ["compiler/gcc", "cuda/12.8"]}, "ok", ()),
        (
            WHEEL,
            {"modules": ["gcc/13", "openmpi/4.1.5"]},
            "warning",
            ("openmpi/4.1.5 has no effect", "mpi_library: site"),
        ),
        (SITES, {"modules": ["openmpi/4.1.5"]}, "ok", ()),
        (SITES, {"modules": ["openmpi/4.1.5"], "mpi_library": "site"}, "ok", ("/opt/openmpi/lib",)),
        (WHEEL, {"mpi_library": "site"}, "warning", ("Python's own", "modules", "mpi_library: /")),
    ],
)
def test_the_library_is_the_one_that_the_site_means(
    library: Library, keys: dict[str, object], level: str, words: tuple[str, ...]
) -> None:
    _says(mpi_checks.check_library(library, Site.model_validate(keys)), level, *words)


@pytest.mark.parametrize(
    ("said", "choice", "remedy"),
    [
        ("RuntimeError: cannot load MPI library", "wheel", "pip install openmpi"),
        ("libmpi.so: cannot open shared object file", "site", "mpicc -show"),
        (
            "ImportError: libmpi.so.12: cannot open shared object file",
            "/opt/libmpich.so.12",
            "cray-mpich-abi",
        ),
    ],
)
def test_a_library_that_cannot_be_loaded_has_a_remedy(said: str, choice: str, remedy: str) -> None:
    _says(mpi_checks.cannot_load(said, Site(mpi_library=choice)), "problem", said, choice, remedy)


@pytest.mark.parametrize(
    ("mpi", "plugins", "level", "words"),
    [
        ("pmix", {"pmix", "pmix_v4", "pmi2"}, "ok", ("client 5.0.11rc1", "server v4")),
        ("pmix", {"pmix", "pmix_v2", "pmix_v5"}, "ok", ("server v5", "PMIX_MCA_gds: hash")),
        ("pmix_v2", {"pmix", "pmix_v2", "pmix_v5"}, "warning", ("server v2", "2.1.1", "mpi_library: site")),
        ("pmix", {"pmix"}, "ok", ("does not say",)),
    ],
)
def test_which_pmix_meets_which(mpi: str, plugins: set[str], level: str, words: tuple[str, ...]) -> None:
    (finding,) = mpi_checks.check_pmix(WHEEL, Site(mpi=mpi), plugins)
    _says(finding, level, *words)


def test_without_pmix_nothing_is_said_of_it() -> None:
    assert mpi_checks.check_pmix(replace(WHEEL, pmix=""), Site(), {"pmix_v4"}) == []
    assert mpi_checks.check_pmix(WHEEL, Site(mpi="pmi2"), {"pmix_v4"}) == []


# --- What was measured ---


def test_open_mpi_tells_its_way_between_nodes() -> None:
    assert mpi_checks.transport(DISPLAY) == "tcp"
    assert mpi_checks.transport("no such text") == ""


def test_the_figures_are_judged_by_what_the_nodes_have() -> None:
    slow = replace(FABRIC, bandwidth=1.1e9, spread=1e9, latency=35e-6)
    fast = mpi_checks.check_fabric(FABRIC, Site(), ["mlx5_0"], NODE.model, by="ucx")
    _says(fast, "ok", "node1 to node2 by ucx: 24.2 GB/s, 2 µs", "16.0 GB of org/model take about 0.8 s")
    _says(
        mpi_checks.check_fabric(slow, Site(), [], None),
        "ok",
        "node1 to node2: 1.1 GB/s, 35 µs",
        "nodes 1 GB/s",
    )
    wheel = mpi_checks.check_fabric(slow, Site(), ["cxi0"], NODE.model, by="tcp")
    _says(wheel, "warning", "take about 16.0 s", "not cxi0", "mpi_library: site")
    other = mpi_checks.check_fabric(slow, Site(mpi_library="site"), ["cxi0"], None)
    _says(other, "warning", "ask which module")


def test_sums_are_judged_likewise() -> None:
    sums = Sums(backend="nccl", ranks=8, bandwidth=92.1e9)
    _says(mpi_checks.check_sums(sums, ["mlx5_0"]), "ok", "nccl, 8 ranks: 92.1 GB/s")
    _says(mpi_checks.check_sums(replace(sums, bandwidth=1e9), ["cxi0"]), "warning", "not cxi0", "NCCL_DEBUG")


def test_a_trial_that_broke_off_says_where() -> None:
    def judged(world: World, *, gpus: bool = True) -> dict[str, Finding]:
        found = mpi_checks.judge(world, Site(), [NODE], by="tcp", gpus=gpus, trouble="it hangs; see /runs/d")
        return {finding.name: finding for finding in found}

    world = World(library=WHEEL, server="4.2.2")
    cut = judged(world)
    assert list(cut) == ["MPI library", "PMIx", "MPI between nodes"]
    _says(cut["PMIx"], "ok", "client 5.0.11rc1 met server 4.2.2")
    _says(cut["MPI between nodes"], "problem", "it hangs; see /runs/d", "network_interface")
    world = replace(world, fabric=FABRIC)
    _says(judged(world)["all-reduce"], "problem", "did not come to an end")
    assert "all-reduce" not in judged(world, gpus=False)
    whole = judged(replace(world, sums=Sums(backend="nccl", ranks=2, bandwidth=20e9)))
    assert {finding.level for finding in whole.values()} == {"ok"}


def test_fabrics_are_what_is_more_than_ethernet(tmp_path: Path) -> None:
    for adapter, layer in (("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet"), ("rdmap0s6", "Unspecified")):
        port = tmp_path / "infiniband" / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(layer + "\n")
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert find_fabric(tmp_path) == ("cxi0", "mlx5_0", "rdmap0s6")
    assert find_fabric(tmp_path / "none") == ()
