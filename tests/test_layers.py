"""The layers of the house: imports go downward only, one heavy library lives in one module.

A login node without torch can import what it needs.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tba_hpc"

LAYERS = [
    {"shipped", "variants"},
    {"types", "config", "orphans", "wording"},
    {"own_code"},
    {"objectives", "schedules", "tuned", "ports", "store", "batch"},
    {"run", "prompts", "task_contract", "skipped_steps", "buffer"},
    {"metrics", "freshness", "token_budget"},
    {"merger", "step_log", "search_log"},
    {"trainer", "searcher", "scorer", "online_evaluation", "backends", "tasks", "launch", "report"},
    {"ending", "placement", "resources", "order", "elastic", "track"},
    {"runtime", "audit", "evaluate", "samples", "doctor", "planner", "task_check"},
    {"submit", "lend", "fetch", "ask", "compare", "frames", "replay"},
    {"cli"},
]
"""From the ground up; a name is a module or a package of tba_hpc."""

SIBLINGS_THAT_MEET = {
    ("searcher", "online_evaluation"),  # the searcher's loop holds the evaluator
    ("searcher", "scorer"),  # and the scorer
    ("launch", "report"),  # the local launcher shows the live display
}

HEAVY = {"vllm", "deepspeed", "mpi4py", "h5py", "submitit", "peft", "wandb"}

WITHOUT_TORCH = [
    *(
        "config",
        "types",
        "ports",
        "schedules",
        "tuned",
        "buffer",
        "batch",
        "token_budget",
        "metrics",
        "freshness",
        "trainer",
        "searcher",
        "search_log",
    ),
    *(
        "ending",
        "online_evaluation",
        "cli",
        "doctor.slurm_checks",
        "doctor.findings",
        "doctor.loaded",
        "doctor.mpi_checks",
        "launch.local",
        "launch.mpi_library",
        "doctor.machine_checks",
        "launch.plan",
        "launch.sbatch",
        "launch.sides",
        "launch.snapshot",
        "planner",
        "report.attempts",
        "report.curves",
        "report.page",
        "report.plots",
        "report.run_state",
        "report.status",
        "report.summary",
        "report.tables",
        "report.monitor",
        "report.worries",
        "scorer",
        "task_contract",
        "task_check",
        "order",
        "resources",
        "ask",
        "compare",
        "report.logs",
        "tasks.gsm8k",
        "backends.vllm_generator",
    ),
    "track.beside",
    "track.follow",
    "tasks.arithmetic",
    "tasks.jsonl",
    "tasks.reasoning_gym",
    "tasks.math",
    "tasks.redteam",
    "tasks.tldr",
]

WITH_A_LITTLE = {
    "launch.slurm": "submitit",
    "doctor.examine": "submitit",
    "submit": "submitit",
    "fetch": "submitit",
    "launch.stop": "submitit",
    "audit": "h5py",
    "samples": "h5py",
}
"""What else a login node runs, and the one library of HEAVY that it needs."""


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
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))


def _room(module: str) -> str:
    """Top-level name below tba_hpc."""
    return module.split(".")[1]


def _height(room: str) -> int:
    return next(level for level, rooms in enumerate(LAYERS) if room in rooms)


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward_only(path: Path) -> None:
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for module in _imports(path):
        if not module.startswith("tba_hpc.") or _room(module) == room:
            continue
        below = _height(_room(module)) < _height(room)
        assert below or (room, _room(module)) in SIBLINGS_THAT_MEET, f"{path.name} imports {module}"


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_one_heavy_library_one_module(library: str) -> None:
    users = [path.name for path in _modules() if any(m.split(".")[0] == library for m in _imports(path))]
    assert len(users) == 1, f"{library} is imported in {users}"


def test_a_login_node_needs_no_heavy_library() -> None:
    assert _heavy_below(WITHOUT_TORCH) == []


def test_what_a_login_node_runs_needs_no_torch() -> None:
    assert _heavy_below(list(WITH_A_LITTLE)) == sorted(set(WITH_A_LITTLE.values()))


def _heavy_below(modules: list[str]) -> list[str]:
    """Heavy libraries that importing some modules of the package loads."""
    heavy = HEAVY | {"torch", "transformers"}
    program = (
        f"import sys, {', '.join(f'tba_hpc.{name}' for name in modules)}; "
        f"print(*sorted({{name.split('.')[0] for name in sys.modules}} & {heavy!r}))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return loaded.stdout.split()
