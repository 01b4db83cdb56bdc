"""Code of the user's that a config names: it lies beside the config, and a run keeps a copy.

With it go the files of that folder that it names, such as a list of words. So every rank finds the same code
on whatever machine, and what is edited later changes no running job.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tba_hpc.config import Config, shipped
from tba_hpc.core.own_code import is_own
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import remove

LARGEST_FILE = 64 << 20
"""Bytes of a file beside a module that goes with it."""

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
    found, large = needed(config, beside)
    if not found or beside.resolve() == run.modules.resolve():
        return
    for path in large:
        print(
            f"{path.name}, which code of the run names, is {path.stat().st_size >> 20} MiB, and files beyond "
            f"{LARGEST_FILE >> 20} MiB are not copied with the code: give it by its whole path",
            file=sys.stderr,
        )
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
    copy(found, beside, part)
    if run.modules.exists():
        remove(run.modules)
    part.rename(run.modules)


def needed(config: Config, folder: Path) -> tuple[list[Path], list[Path]]:
    """What ``config`` names of a folder, what that imports of it, and what files of it all these name.

    And the files that are named, but larger than LARGEST_FILE.
    """
    code = set(_named(config, folder))
    files = {file for path in code for file in _files(path, folder)} - code
    large = {file for file in files if file.stat().st_size > LARGEST_FILE}
    return sorted(code | files - large), sorted(large)


def copy(paths: Iterable[Path], folder: Path, to: Path) -> None:
    """Copy files and packages of a folder to the same places below another."""
    for path in paths:
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=LEFT_OUT)
        else:
            shutil.copyfile(path, target)


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
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _files(path: Path, folder: Path) -> Iterator[Path]:
    """Files of the folder that a module, or a package's modules, name by a text, or by several in a row.

    As in ``with_name("a.txt")``, ``HERE / "lists" / "a.txt"`` or ``join(HERE, "lists", "a.txt")``.
    """
    for node in _nodes(path):
        words = _words(node)
        hidden = any(part.startswith(".") for part in Path(words).parts)
        with suppress(OSError, ValueError):  # a text of any kind, also longer than a name may be
            file = folder / words
            if not (hidden or Path(words).is_absolute()) and file.is_file() and os.access(file, os.R_OK):
                yield file


def _words(node: ast.AST) -> str:
    """The texts of a constant, of operands of ``/``, or of a call's arguments, as a path."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.BinOp(op=ast.Div()):
            return "/".join(filter(None, map(_words, (node.left, node.right))))
        case ast.Call():
            return "/".join(filter(None, map(_words, node.args)))
    return ""


def _nodes(path: Path) -> Iterator[ast.AST]:
    """The syntax of a module, or of a package's modules; none of a file of another kind."""
    for file in path.rglob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []:
        with suppress(SyntaxError, ValueError):  # who imports it will say so
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))
