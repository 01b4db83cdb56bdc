"""The layers of the house: imports go downward only, one heavy library lives in one module.

A login node without torch can import what it needs.
"""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "tba_hpc"

ROOMS = list(tomllib.loads((REPOSITORY / "docs/rooms.toml").read_text()))
"""From the ground up; a name is a package or a module of tba_hpc."""

HEAVY = {"vllm", "deepspeed", "mpi4py", "h5py", "submitit", "peft", "wandb"}

TORCH_IS_THEIRS = (
    *("objectives", "learner", "engine.vllm"),
    "tasks.text_models",
)
"""What computes. Everything else a login node may import, where neither torch nor an MPI library is."""

MPI_IS_THEIRS = ("exchange.mpi_", "checks.rank")
VERIFIERS_IS_ITS = "environments.verifiers_host"
"""A program for another Python."""


@cache
def _imports(path: Path) -> set[str]:
    """Every module named by an import statement of a file, however deep inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name[0] != "_")


def _room(module: str) -> str:
    """Top-level name below tba_hpc."""
    return module.split(".")[1]


def test_every_room_is_listed() -> None:
    """And the roots apart no file lies loose."""
    found = {path.parts[0] for path in (file.relative_to(PACKAGE) for file in _modules())}
    loose = {name.removesuffix(".py") for name in found if name.endswith(".py")}
    assert {name.removesuffix(".py") for name in found} == {*ROOMS} and loose == {"cli", "runtime"}


def test_imports_go_downward_only() -> None:
    for path in _modules():
        file = path.relative_to(PACKAGE)
        room = file.with_suffix("").parts[0]
        for module in _imports(path):
            if module.startswith("tba_hpc.") and _room(module) != room:
                assert ROOMS.index(_room(module)) < ROOMS.index(room), f"{file} imports {module}"


@pytest.mark.parametrize("library", sorted({*HEAVY, "aiohttp"}))
def test_one_heavy_library_one_module(library: str) -> None:
    users = [path.name for path in _modules() if any(m.split(".")[0] == library for m in _imports(path))]
    assert len(users) == 1, f"{library} is imported in {users}"


def test_a_login_node_needs_neither_torch_nor_mpi() -> None:
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in _modules()]
    light = [
        name for name in names if not name.startswith((*TORCH_IS_THEIRS, *MPI_IS_THEIRS, VERIFIERS_IS_ITS))
    ]
    assert _heavy_below([name.removesuffix(".__init__") for name in light]) == ["h5py", "submitit"]


def test_commands_that_look_and_loops_need_no_heavy_library() -> None:
    assert _heavy_below(["cli", "loops.trainer", "loops.searcher", "launch.local", "report.status"]) == []


def _heavy_below(modules: list[str]) -> list[str]:
    """Heavy libraries that importing some modules of the package loads."""
    heavy = HEAVY | {"torch", "transformers"}
    program = (
        f"import sys, {', '.join(f'tba_hpc.{name}' for name in modules)}; "
        f"print(*sorted({{name.split('.')[0] for name in sys.modules}} & {heavy!r}))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return loaded.stdout.split()
