"""The copy of the package that a job uses: whole, one for each content, and before all other code."""

import os
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

from tba_hpc.commands.submission import script_of
from tba_hpc.config import parse_config
from tba_hpc.launch import snapshot
from tba_hpc.launch.plan import Container, Site, plan
from tba_hpc.launch.sbatch import Job, batch_script

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of ours, with a link and a cache, as a clone has them."""
    folder = tmp_path / "clone/tba_hpc"
    (folder / "launch/__pycache__").mkdir(parents=True)
    (folder / "launch/__pycache__/x.pyc").write_text("cache")
    (folder / "launch/x.py").write_text("one")
    (tmp_path / "clone/sites").mkdir()
    (tmp_path / "clone/sites/generic.yaml").write_text("{}")
    (folder / "sites").symlink_to("../sites")
    monkeypatch.setattr(snapshot, "PACKAGE", folder)
    return folder


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_whole_and_an_edit_makes_another(package: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = snapshot.take(run)
    assert first == run / "code" / first.name
    assert _files(first) == {"tba_hpc/launch/x.py": "one", "tba_hpc/sites/generic.yaml": "{}"}
    (package / "launch/__pycache__/x.pyc").write_text("another cache")
    (first / "tba_hpc/launch/__pycache__").mkdir()  # Python leaves one where a job has run
    assert snapshot.take(run) == first == snapshot.place(run)
    (package / "launch/x.py").write_text("two")
    second = snapshot.take(run)
    assert second != first and _files(second)["tba_hpc/launch/x.py"] == "two"
    assert _files(first)["tba_hpc/launch/x.py"] == "one"
    (second / "tba_hpc/launch/x.py").unlink()  # a machine went down in the midst
    assert _files(snapshot.take(run)) == {"tba_hpc/launch/x.py": "two", "tba_hpc/sites/generic.yaml": "{}"}
    assert sorted(path.name for path in (run / "code").iterdir()) == sorted([first.name, second.name])
    (package / "launch/x.py").write_text("three")
    third = snapshot.take(run)
    kept = [first.name, second.name, third.name]  # jobs in the queue may start with any of them
    assert sorted(path.name for path in (run / "code").iterdir()) == sorted(kept)


def test_a_job_has_the_same_copy_at_each_of_its_starts(package: Path, tmp_path: Path) -> None:
    first = snapshot.take(tmp_path, job="7")
    (package / "launch/x.py").write_text("edited while it was in the queue again")
    assert snapshot.take(tmp_path, job="7") == first
    assert snapshot.take(tmp_path, job="8") != first


def _script(site: Site, code: Path) -> str:
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 2}})
    return batch_script(Job(name="x", run=Path("/r"), code=code), plan(config, site, 2), site)


def test_a_job_imports_its_copy_though_it_was_submitted_from_a_clone(tmp_path: Path) -> None:
    code = snapshot.take(tmp_path)
    lines = _script(Site(), code).splitlines()
    (line,) = [line for line in lines if "PYTHONPATH" in line]
    show = "import tba_hpc, tests; print(tba_hpc.__file__, *tests.__path__)"
    command = [sys.executable, "-P", "-c", f"from tba_hpc.run import modules; modules.use_here(); {show}"]
    for before in ({}, {"PYTHONPATH": str(tmp_path)}):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | before
        done = subprocess.run(
            ["bash", "-uc", f'{line}; "$@"', "bash", *command],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        # What the user has beside the package, such as a task, is found all the same.
        assert done.stdout == f"{code}/tba_hpc/__init__.py {REPOSITORY}/tests\n"


def test_an_image_brings_code_of_its_own(tmp_path: Path) -> None:
    """Only what runs outside is of the copy: the shell library."""
    site = Site(container=Container(image="/x.sif"))
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 2}})
    script = script_of(config, plan(config, site, 2), site, after=None, code=tmp_path)
    assert "PYTHONPATH" not in script
    assert f"source {quote(f'{tmp_path}/tba_hpc/launch/job_supervisor.sh')} ||" in script
