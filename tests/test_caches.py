"""What engines compile on a node lies in a folder of this user alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba_hpc.run.caches import keep_caches_private


def variables(folder: Path) -> dict[str, str]:
    return {"TBA_CACHES": str(folder), "TRITON_CACHE_DIR": f"{folder}/triton", "HF_HOME": f"{folder}-hub"}


def test_a_folder_is_made_once_and_found_again(tmp_path: Path) -> None:
    environment = variables(tmp_path / "tba-1")
    for _ in range(2):
        keep_caches_private(environment)
        assert environment == variables(tmp_path / "tba-1")
        assert (tmp_path / "tba-1").stat().st_mode & 0o777 == 0o700


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where new folders are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("elsewhere")))


@pytest.mark.parametrize("planted", ["open to all", "a link", "a file"])
def test_what_somebody_else_may_have_put_there_is_not_run(planted: str, tmp_path: Path) -> None:
    folder = tmp_path / "tba-1"
    if planted == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif planted == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.touch()
    environment = variables(folder)
    keep_caches_private(environment)
    fresh = Path(environment["TBA_CACHES"])
    assert fresh != folder and fresh.is_dir() and fresh.stat().st_mode & 0o777 == 0o700
    assert environment["TRITON_CACHE_DIR"] == f"{fresh}/triton"
    assert environment["HF_HOME"] == f"{folder}-hub"


@pytest.mark.parametrize("parent", ["is made", "cannot be made", "is a file"])
def test_a_folder_of_the_first_node_may_not_be_there_on_another(parent: str, tmp_path: Path) -> None:
    if parent == "cannot be made":
        (tmp_path / "local").touch()
    elif parent == "is a file":
        (tmp_path / "local").mkdir()
        (tmp_path / "local/job").touch()
    environment = variables(tmp_path / "local/job/tba-1")
    keep_caches_private(environment)
    assert Path(environment["TBA_CACHES"]).is_dir()
    assert (environment["TBA_CACHES"] == str(tmp_path / "local/job/tba-1")) == (parent == "is made")


def test_without_a_batch_script_there_is_nothing_to_keep() -> None:
    environment: dict[str, str] = {}
    keep_caches_private(environment)
    assert environment == {}
