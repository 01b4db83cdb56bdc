"""What engines compile on a node lies in a folder of this user alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba_hpc.run.caches import keep_caches_private, pack_caches


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
    environment = variables(tmp_path / "local/job/tba-1") | {"TBA_COMPILED": f"{tmp_path}/compiled.tar"}
    (tmp_path / "compiled.tar").touch(mode=0o600)
    keep_caches_private(environment)
    assert Path(environment["TBA_CACHES"]).is_dir()
    assert (environment["TBA_CACHES"] == str(tmp_path / "local/job/tba-1")) == (parent == "is made")


def on_node(tmp_path: Path, name: str) -> dict[str, str]:
    """The variables of a node of a run."""
    return {"TBA_CACHES": f"{tmp_path}/{name}/tba-1", "TBA_COMPILED": f"{tmp_path}/compiled.tar"}


def test_what_one_node_has_compiled_another_begins_with(tmp_path: Path) -> None:
    first, second = on_node(tmp_path, "first"), on_node(tmp_path, "second")
    keep_caches_private(first)
    pack_caches(first)
    assert not (tmp_path / "compiled.tar").exists(), "nothing is compiled"
    model = "VLLM_CACHE_ROOT/torch_compile_cache/hash/model"
    Path(first["TBA_CACHES"], model).parent.mkdir(parents=True)
    Path(first["TBA_CACHES"], model).write_bytes(b"kernels")
    pack_caches(first)
    assert (tmp_path / "compiled.tar").stat().st_mode & 0o777 == 0o600
    keep_caches_private(second)
    folder = Path(second["TBA_CACHES"])
    assert (folder / model).read_bytes() == b"kernels" and folder.stat().st_mode & 0o777 == 0o700
    (folder / model).write_bytes(b"newer")
    keep_caches_private(second)
    pack_caches(second)
    assert (folder / model).read_bytes() == b"newer", "what a node has stays"
    assert [path.name for path in folder.parent.iterdir()] == ["tba-1"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["compiled.tar"]


@pytest.mark.parametrize("damage", ["others may write it", "it is torn"])
def test_an_archive_that_is_not_to_be_trusted_is_left_alone(damage: str, tmp_path: Path) -> None:
    first, second = on_node(tmp_path, "first"), on_node(tmp_path, "second")
    Path(first["TBA_CACHES"], "VLLM_CACHE_ROOT/torch_compile_cache").mkdir(parents=True)
    Path(first["TBA_CACHES"], "kernel").write_bytes(bytes(1 << 20))
    pack_caches(first)
    archive = tmp_path / "compiled.tar"
    if damage == "it is torn":
        archive.write_bytes(archive.read_bytes()[: 1 << 19])
    else:
        archive.chmod(0o620)
    keep_caches_private(second)
    folder = Path(second["TBA_CACHES"])
    assert [*folder.iterdir()] == [] and [path.name for path in folder.parent.iterdir()] == ["tba-1"]


def test_without_a_batch_script_there_is_nothing_to_keep() -> None:
    environment: dict[str, str] = {}
    keep_caches_private(environment)
    pack_caches(environment)
    assert environment == {}
