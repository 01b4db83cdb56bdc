"""Copies the user's own code, if a config names any, from the config's folder into the run directory.

Files in that folder that the code names, such as a word list, are copied, too. Thus every rank finds the same
code on any machine, and later edits change no running job.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from tba_hpc.config import Config, shipped
from tba_hpc.core.own_code import is_own
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.files import replacing

LARGEST_FILE = 64 << 20
"""Size in bytes above which a file that the code names is not copied."""

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
"""Argument ``ignore`` of ``shutil.copytree``: the files of a package that are not copied."""


def folder_of(config: Path) -> Path:
    """Return the folder with the user's code: that of a config file, or the copy in a run directory."""
    return RunDir(config).modules if config.is_dir() else shipped.find(config, "configs").parent


def use(folder: Path) -> None:
    """Have ``import`` and ``find_file`` look into a folder, if it exists, before all others."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def use_here() -> None:
    """Have ``import`` and ``find_file`` look into the working directory, after all other folders.

    The working directory comes last because it may be one, like /tmp, into which anybody may write.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def find_file(name: str) -> Path | None:
    """Find a file by its relative path in the folders from which Python imports; None if none has it."""
    files = (Path(folder or ".") / name for folder in sys.path)
    return next((file.absolute() for file in files if file.is_file()), None)


def keep(run: RunDir, config: Config, beside: Path) -> None:
    """Replace the run's copy of the user's code by what ``config`` needs from the folder ``beside``.

    If the config needs nothing from that folder, the earlier copy stays. Messages on stderr name files that
    differ from the earlier copy, unless the run has produced nothing, and files that are too large to copy.
    Files that differ are also logged, as an event ``changed``.
    """
    found, large = needed(config, beside)
    if not found or beside.resolve() == run.modules.resolve():
        return
    for path in large:
        print(
            f"{path.name}, which code of the run names, is {path.stat().st_size >> 20} MiB, and files beyond "
            f"{LARGEST_FILE >> 20} MiB are not copied: let the code name it by its absolute path",
            file=sys.stderr,
        )
    with replacing(run.modules) as part:
        copy(found, beside, part)
        changed = differing(run.modules, part)
    if changed and not run.came_to_nothing:
        print(
            f"{', '.join(changed)} changed since the run began: scores and trajectories so far are of the "
            "old code; to start afresh choose another run.name",
            file=sys.stderr,
        )
        log_event(run, "changed", keys={}, files=changed)


def differing(old: Path, new: Path) -> list[str]:
    """Return the relative paths of the files in both folders whose contents differ."""
    paths = (path.relative_to(new) for path in sorted(new.rglob("*")) if path.is_file())
    both = (path for path in paths if (old / path).is_file())
    return [str(path) for path in both if (old / path).read_bytes() != (new / path).read_bytes()]


def needed(config: Config, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the paths in a folder that ``config`` needs, and separately those of files too large to copy.

    The config needs the modules and programs that it names, the modules that they import, and the files that
    their code names. Paths outside the folder are left out.
    """
    return _with_files(set(_named(config, folder)), folder)


def needed_by_loss(config: Config, folder: Path) -> list[Path]:
    """Return the paths in a folder that the objective of ``config`` needs; see ``needed``."""
    name = config.train.objective.name
    return _with_files({*_modules({name.partition(":")[0]}, folder)}, folder)[0] if is_own(name) else []


def _with_files(code: set[Path], folder: Path) -> tuple[list[Path], list[Path]]:
    """Return modules and programs with the files that they name, and separately those of files too large."""
    files = {file for path in code for file in _files(path, folder)} - code
    large = {file for file in files if file.stat().st_size > LARGEST_FILE}
    return sorted(code | files - large), sorted(large)


def copy(paths: Iterable[Path], folder: Path, to: Path) -> None:
    """Copy files and packages of ``folder`` to the same relative paths below ``to``."""
    for path in paths:
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=LEFT_OUT, copy_function=shutil.copy)  # with new timestamps
        else:
            shutil.copyfile(path, target)


def _named(config: Config, folder: Path) -> Iterator[Path]:
    """Yield the modules and programs of a folder that ``config`` names, and the modules that they import."""
    task = config.task
    names = [
        config.model.path,
        task.name,
        config.train.objective.name,
        str(task.options.get("environment", "")),
        *(reward.function for reward in task.reward.values() if reward.function),
    ]
    yield from _modules({name.partition(".")[0].partition(":")[0] for name in names if is_own(name)}, folder)
    commands = [reward.program or () for reward in task.reward.values()]
    for word in chain(*commands, map(str, task.options.get("command") or ())):
        path = folder / word
        if not Path(word).is_absolute() and ".." not in Path(word).parts and path.is_file():
            yield path
            if path.suffix == ".py":
                yield from _modules(_imports(path), folder)


def _modules(names: Iterable[str], folder: Path) -> list[Path]:
    """Return the modules and packages in a folder that have these names or are imported by them in turn."""
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
    """Return the top-level names that a module, or any module of a package, imports."""
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _files(path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in ``folder`` whose relative paths occur as strings in a module or package ``path``.

    Examples are ``with_name("a.txt")``, ``HERE / "lists" / "a.txt"`` and ``join(HERE, "lists", "a.txt")``.
    """
    for node in _nodes(path):
        words = _words(node)
        hidden = any(part.startswith(".") for part in Path(words).parts)
        with suppress(OSError, ValueError):  # most strings are not paths, and some are too long for one
            file = folder / words
            if not (hidden or Path(words).is_absolute()) and file.is_file() and os.access(file, os.R_OK):
                yield file


def _words(node: ast.AST) -> str:
    """Return the path that a syntax node may stand for; "" if it can stand for none.

    A string constant stands for its text. An expression with ``/`` stands for the paths of its operands,
    joined by "/"; a call stands for those of its arguments, joined likewise.
    """
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.BinOp(op=ast.Div()):
            return "/".join(filter(None, map(_words, (node.left, node.right))))
        case ast.Call():
            return "/".join(filter(None, map(_words, node.args)))
    return ""


def _nodes(path: Path) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a module, or of a package's modules; none for files that are not Python."""
    for file in path.rglob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []:
        with suppress(SyntaxError, ValueError):  # a module with such an error fails when it is imported
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))
