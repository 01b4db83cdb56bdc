"""MPI libraries of a site in the place of the wheel's: Debian's Open MPI 4 and MPICH."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from contracts.exchange_program import SCENARIOS
from test_local_launch import Launched

from mpi.launch import ENVIRONMENT, OPTIONS, WHEEL, Mpi, run_world
from tba_hpc.launch import local, mpi_library
from tba_hpc.launch.mpi_library import LOOK, Library
from tba_hpc.launch.plan import Site

CONTRACT = Path(__file__).parents[1] / "contracts/exchange_program.py"
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

pytestmark = pytest.mark.mpi


def _needs(file: Path, package: str) -> Path:
    if not file.exists():
        pytest.skip(f"{file} is missing: apt-get install {package}")
    return file


@pytest.fixture
def open_mpi_4() -> Mpi:
    mpiexec = _needs(Path("/usr/bin/mpiexec.openmpi"), "openmpi-bin")
    return Mpi(mpiexec, OPTIONS, mpi_library.variables(str(LIBRARIES / "libmpi.so.40")))


@pytest.fixture
def mpich(tmp_path: Path) -> Mpi:
    """Debian's calls itself libmpich.so.12; mpi4py wants the name that all others have."""
    mpiexec = _needs(Path("/usr/bin/mpiexec.mpich"), "mpich")
    (tmp_path / "libmpi.so.12").symlink_to(LIBRARIES / "libmpich.so.12")
    return Mpi(mpiexec, environment={**mpi_library.variables("site"), "LD_LIBRARY_PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "version"), [("open_mpi_4", "Open MPI v4.1"), ("mpich", "MPICH Version: 4.")]
)
def test_every_library_is_known_before_mpi_starts_and_keeps_the_contract(
    name: str, version: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As the wheel's does in contracts/; between emulated nodes, a rank each."""
    mpi = request.getfixturevalue(name)
    library = _loaded(**mpi.environment)
    assert library.version.startswith(version) and not library.own and Path(library.path).is_file()
    environment = local.environment_of(tmp_path, mpi.environment)  # as on a laptop
    arguments = [CONTRACT, "mpi-nodes", tmp_path]
    outcome = run_world(3, arguments, mpi=mpi, environment=environment, timeout=180)
    for scenario in SCENARIOS:
        for rank in range(3):
            assert f"{scenario} holds at rank {rank}" in outcome.output, outcome.output


def _loaded(**environment: str) -> Library:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**ENVIRONMENT, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Library(**json.loads(done.stdout))


def test_the_wheel_is_loaded_unless_somebody_chooses() -> None:
    library = _loaded(**mpi_library.variables(Site().mpi_library))
    assert library.version.startswith("Open MPI v5.") and library.own and library.pmix


def test_a_laptop_uses_the_mpiexec_of_the_library_that_it_names(
    open_mpi_4: Mpi, mpich: Mpi, tmp_path: Path
) -> None:
    """Of one that has no folder of its own, the first on PATH."""
    for mpi in (open_mpi_4, mpich):
        folder = tmp_path / mpi.mpiexec.name
        folder.mkdir()
        (folder / "mpiexec").symlink_to(mpi.mpiexec)
        assert local.find_mpiexec(str(folder), mpi.environment) == folder / "mpiexec"
        assert local.find_mpiexec(str(folder), {}) == WHEEL.mpiexec, "which nobody has chosen against"
    local.refuse_other_mpiexec(open_mpi_4.mpiexec)
    local.refuse_other_mpiexec(WHEEL.mpiexec)
    with pytest.raises(local.LaunchError, match=r"mpich is not Open MPI's .*unset MPI4PY_LIBMPI"):
        local.refuse_other_mpiexec(mpich.mpiexec)


def test_a_run_on_this_machine_ends_well_under_open_mpi_4(
    open_mpi_4: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").symlink_to(open_mpi_4.mpiexec)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name, value in open_mpi_4.environment.items():
        monkeypatch.setenv(name, value)
    launched = Launched(tmp_path, "finish", "mpi")
    code, _, err = launched.end()
    assert (code, err, len(launched.hits())) == (0, "", 3)
