"""Random damage to any file of a run: it goes on, or one sentence says what is wrong; none is believed.

``TBA_DAMAGES=200 pytest tests/test_damage.py`` tries more of them.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import tabular_run
from forks import fork
from test_hdf5_shards import of_another_record, of_another_schema
from typer.testing import CliRunner

from tba_hpc.cli import app
from tba_hpc.config import ConfigError
from tba_hpc.core.types import LIVE_RECORD, as_record
from tba_hpc.exchange.hdf5_shards import ShardError, read_arrays, read_shard, with_image, write_arrays
from tba_hpc.launch import LaunchError
from tba_hpc.launch.rank import FAILURES, REFUSALS
from tba_hpc.report import page
from tba_hpc.report.audit import Audit, audit
from tba_hpc.run.checkpoints import BUFFER_FILE, StateError, latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import DiskFullError
from tba_hpc.run.inventory import COMPLETE, inventory, with_checksum
from tba_hpc.run.owners import OwnedError

DAMAGES = int(os.environ.get("TBA_DAMAGES", "25"))

OWN_MODEL = "lab.tabular:Tabular"
"""Of which nothing is asked of the hub."""

COMMANDS = ("status --json", "audit --json", "samples", "compare", "report")

SENTENCES = (ConfigError, OwnedError, StateError, DiskFullError, LaunchError)
"""Errors that ``cli.main`` prints as one sentence."""

Harm = Callable[[Path, np.random.Generator], None]


def flip(path: Path, random: np.random.Generator) -> None:
    data = np.fromfile(path, np.uint8)
    data[random.integers(len(data), size=3)] ^= np.uint8(1 << random.integers(8))
    data.tofile(path)


def truncate(path: Path, random: np.random.Generator) -> None:
    os.truncate(path, random.integers(path.stat().st_size))


def empty(path: Path, _: np.random.Generator) -> None:
    os.truncate(path, 0)


def remove(path: Path, _: np.random.Generator) -> None:
    path.unlink()


def become_a_folder(path: Path, _: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


def become_a_pipe(path: Path, _: np.random.Generator) -> None:
    path.unlink()
    os.mkfifo(path)


HARMS: tuple[Harm, ...] = (flip, truncate, empty, remove, become_a_folder, become_a_pipe)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that was killed between two checkpoints, and one that has finished."""
    found = {}
    for name, sent in (("killed", SIGKILL), ("finished", None)):
        run = RunDir.create(
            tabular_run.make_config(
                tmp_path_factory.mktemp(name), model={"path": OWN_MODEL}, launch={"timeout_seconds": 20}
            )
        )
        tabular_run.start(run, searchers=2, sent=sent, nth=20).join(240)
        found[name] = run.path
        shutil.copytree(run.path, run.path.with_name("whole"), symlinks=True)
    return found


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(DAMAGES))
def test_a_damaged_run_goes_on_or_says_why(
    seed: int, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    path = runs[name := ("killed", "killed", "finished")[seed % 3]]
    shutil.rmtree(path)
    shutil.copytree(path.with_name("whole"), path, symlinks=True)
    kinds: dict[str, list[Path]] = {}  # as many of each, though most files are shards
    for file in sorted(path.rglob("*")):
        if file.is_file() and not file.is_symlink() and file.stat().st_size:
            kinds.setdefault(file.relative_to(path).parts[0], []).append(file)
    files = list(kinds.values())[random.integers(len(kinds))]
    file, harm = files[random.integers(len(files))], HARMS[random.integers(len(HARMS))]
    harm(file, random)
    what = f"{harm.__name__} {file.relative_to(path)} of a {name} run"

    monkeypatch.setattr(page, "render", lambda *_: "")
    verb, *options = COMMANDS[random.integers(len(COMMANDS))].split()
    done = CliRunner().invoke(app, [verb, str(path), *options])
    if not isinstance(done.exception, (SystemExit, *SENTENCES, type(None))):
        pytest.fail(f"{what}: tba {verb}: " + "".join(traceback.format_exception(done.exception)))
    if file.parent.parent.name == "shards":
        _refuse_belief(file, path.with_name("whole") / file.relative_to(path))
    if name == "finished":
        return
    said = _resume(path, tmp_path / "said")
    assert "Traceback" not in said, f"{what}: {said}"
    if not said:
        verdict = audit(RunDir.open(path))
        assert verdict.finished, what
        assert verdict.clean or file.is_relative_to(path / "shards") or _proves_less(verdict, file), (
            f"{what}: {verdict.problems}"
        )


def _widened(folder: Path) -> None:
    """The buffer of a checkpoint as of a version whose LIVE_RECORD has one field more."""
    arrays = read_arrays(folder / BUFFER_FILE)
    wider = as_record(arrays["record"], np.dtype([*LIVE_RECORD.descr, ("of_another_version", "<f4")]))
    write_arrays(folder / BUFFER_FILE, {**arrays, "record": wider})
    (folder / COMPLETE).write_text(with_checksum(inventory(folder)))


ANOTHER_VERSION = {
    "schema": lambda run: of_another_schema(run.shard_file(0, max(run.shard_indices(0)))),
    "record": lambda run: of_another_record(run.shard_file(0, max(run.shard_indices(0)))),
    "buffer": lambda run: _widened(latest_checkpoint(run)),
}


@pytest.mark.parametrize("what", ANOTHER_VERSION)
def test_a_resume_leaves_data_of_another_version_as_it_is(
    what: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    path = runs["killed"]
    shutil.rmtree(path)
    shutil.copytree(path.with_name("whole"), path, symlinks=True)
    ANOTHER_VERSION[what](run := RunDir(path))
    kept = [file for place in (run.shards, run.checkpoints) for file in place.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in kept}
    said = _resume(path, tmp_path / "said")
    assert "of another version of tba-hpc (" in said and "use the version that wrote it" in said
    assert "\n" not in said
    assert {file: file.read_bytes() for file in kept} == before
    assert not list(run.shards.rglob("*.refused"))


def _proves_less(verdict: Audit, file: Path) -> bool:
    """The records of what was done are damaged: no loss is made of that, nor is it passed over."""
    return file.suffix == ".jsonl" and (verdict.lost, verdict.doubled) == (0, 0)


def _refuse_belief(shard: Path, whole: Path) -> None:
    """A damaged shard cannot be read, or is as it was."""
    try:
        found = read_shard(shard)
    except (ShardError, OSError):
        return
    assert with_image(found).image == with_image(read_shard(whole)).image


def _resume(path: Path, said: Path) -> str:
    """Start the run again; the sentence that it ended with, empty if it has finished."""
    process = fork(_live, path, said)
    process.join(120)
    if process.is_alive():
        process.kill()
        return "Traceback: it hangs"
    text = said.read_text() if said.exists() else ""
    return text or (f"Traceback: exit {process.exitcode}" if process.exitcode else "")


def _live(path: Path, said: Path) -> None:
    """All ranks; the first error ends them, with its sentence if it has one."""

    def end(error: BaseException | None) -> None:
        known = isinstance(error, (*REFUSALS, *FAILURES, *SENTENCES))
        said.write_text(str(error) if known else "".join(traceback.format_exception(error)))
        os._exit(2)

    faulthandler.enable()
    threading.excepthook = lambda hook: end(hook.exc_value)
    try:
        run = RunDir.open(path)
        run.adapt(["launch.searchers=2"])
        run.begin_attempt()
        tabular_run._live(path, None, 0)
    except BaseException as error:
        end(error)
