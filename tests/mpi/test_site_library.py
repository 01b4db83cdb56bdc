"""MPI libraries of a site in the place of the wheel's: Debian's Open MPI 4 and MPICH."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_local_launch import Launched

from mpi.launch import ENVIRONMENT, OPTIONS, WHEEL, Mpi, run_world
from tba_hpc.checks.library import LOOK, Library
from tba_hpc.launch import local, mpi_library
from tba_hpc.launch.plan import Site

PROGRAM = Path(__file__).with_name("site_library_program.py")
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


CASES = {
    "wheel": ("Open MPI v5.", True),
    "open_mpi_4": ("Open MPI v4.", False),
    "mpich": ("MPICH Version: 4.", False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_library_carries_weights_and_shards(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mpi = WHEEL if name == "wheel" else request.getfixturevalue(name)
    environment = local.environment_of(tmp_path, mpi.environment)  # as on a laptop
    outcome = run_world(3, [PROGRAM, tmp_path], mpi=mpi, environment=environment)
    assert outcome.code == 0, outcome.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    version, own = CASES[name]
    assert facts["library"]["version"].startswith(version)
    assert facts["library"]["own"] is own
    assert Path(facts["library"]["path"]).is_file()


def _loaded(**environment: str) -> Library:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**ENVIRONMENT, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Library(**json.loads(done.stdout))


def test_the_wheel_is_loaded_unless_somebody_chooses() -> None:
    library = _loaded(**mpi_library.variables(Site().mpi_library))
    assert library.version.startswith("Open MPI v5.") and library.own and library.pmix


def test_a_library_is_known_before_mpi_starts(open_mpi_4: Mpi, mpich: Mpi) -> None:
    found = [_loaded(**mpi.environment) for mpi in (open_mpi_4, mpich)]
    assert [library.version[:13] for library in found] == ["Open MPI v4.1", "MPICH Version"]
    assert not any(library.own for library in found)


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
