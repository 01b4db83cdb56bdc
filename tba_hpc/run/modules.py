"""Code of the user's that a config names: it lies beside the config, and a run keeps a copy.

So every rank finds the same code on whatever machine, and what is edited later changes no running job.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tba_hpc.config import Config, shipped
from tba_hpc.core.own_code import is_own
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import remove

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def folder_of(config: Path) -> Path:
    """Where the code that a config, or a run, names lies."""
    return RunDir(config).modules if config.is_dir() else shipped.find(config, "configs").parent


def use(folder: Path) -> None:
    """Put a folder first among those where modules and files are looked for."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def use_here() -> None:
    """Have modules of the working directory found after all others: anybody may write in one like /tmp."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def find_file(name: str) -> Path | None:
    """A file of a relative path, where modules are looked for."""
    files = (Path(folder or ".") / name for folder in sys.path)
    return next((file.absolute() for file in files if file.is_file()), None)


def keep(run: RunDir, config: Config, beside: Path) -> None:
    """Copy what ``config`` names of a folder, and what that imports of it, over the run's earlier copy.

    If the folder has nothing of it, that copy stays. Says on stderr if the run has begun with other code.
    """
    found = sorted(set(_named(config, beside)))
    if not found or beside.resolve() == run.modules.resolve():
        return
    kept = [(path, run.modules / path.relative_to(beside)) for path in found]
    changed = [path.name for path, copy in kept if copy.is_file() and copy.read_bytes() != path.read_bytes()]
    if changed and not run.came_to_nothing:
        print(
            f"{', '.join(changed)} changed since the run began: scores and trajectories so far are of the "
            "old code; to start afresh choose another run.name",
            file=sys.stderr,
        )
    part = run.modules.with_name(f".{run.modules.name}.{os.getpid()}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    for path in found:
        target = part / path.relative_to(beside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=LEFT_OUT)
        else:
            shutil.copyfile(path, target)
    if run.modules.exists():
        remove(run.modules)
    part.rename(run.modules)


def _named(config: Config, folder: Path) -> Iterator[Path]:
    task = config.task
    names = [
        config.model.path,
        task.name,
        config.train.objective.name,
        str(task.options.get("environment", "")),
        *(reward.function for reward in task.reward.values() if reward.function),
    ]
    yield from _modules({name.partition(".")[0].partition(":")[0] for name in names if is_own(name)}, folder)
    for word in (word for reward in task.reward.values() for word in reward.program or ()):
        path = folder / word
        if not Path(word).is_absolute() and ".." not in Path(word).parts and path.is_file():
            yield path
            if path.suffix == ".py":
                yield from _modules(_imports(path), folder)


def _modules(names: Iterable[str], folder: Path) -> list[Path]:
    """Modules and packages of a folder by these names, and all that they import of it."""
    found: dict[str, Path] = {}
    new = set(names)
    while new:
        there = {}
        for name in new - sys.stdlib_module_names - {"tba_hpc"}:
            if (file := folder / f"{name}.py").is_file():
                there[name] = file
            elif (folder / name / "__init__.py").is_file():
                there[name] = folder / name
        found |= there
        new = {name for path in there.values() for name in _imports(path)} - found.keys()
    return list(found.values())


def _imports(path: Path) -> set[str]:
    """Top-level names of all that a module, or a package's modules, import."""
    names: set[str] = set()
    for file in [path] if path.is_file() else path.rglob("*.py"):
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (SyntaxError, ValueError):  # who imports it will say so
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names
