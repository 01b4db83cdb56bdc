"""Copies the user's code that a config names, if it lies beside the config, into the run.

Files in the same folder that the code names, such as a word list, are copied, too. Every rank thus finds the
same code on any machine, and later edits change no running job.
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
from tba_hpc.run.files import remove

LARGEST_FILE = 64 << 20
"""Largest size of a file that is copied along with code, bytes."""

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def folder_of(config: Path) -> Path:
    """Return the folder that holds the code of a config, or of a run."""
    return RunDir(config).modules if config.is_dir() else shipped.find(config, "configs").parent


def use(folder: Path) -> None:
    """Search a folder, if it exists, before all others for modules and files."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def use_here() -> None:
    """Search the working directory for modules last, because anybody may write in one like /tmp."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def find_file(name: str) -> Path | None:
    """Find a file by its relative path in the folders where modules are looked for."""
    files = (Path(folder or ".") / name for folder in sys.path)
    return next((file.absolute() for file in files if file.is_file()), None)


def keep(run: RunDir, config: Config, beside: Path) -> None:
    """Replace the run's copy of code by the code that ``config`` needs from the folder ``beside``.

    If that folder has none, the earlier copy stays. A message on stderr says if the code differs from that of
    the run's beginning, and which files are too large to be copied.
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
    """Return the paths in a folder that ``config`` needs, and needed files that are too large to copy.

    They are the modules that the config names, the modules that these import from the folder, and the files
    in it that any of them names.
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
    commands = [reward.program or () for reward in task.reward.values()]
    for word in chain(*commands, map(str, task.options.get("command") or ())):
        path = folder / word
        if not Path(word).is_absolute() and ".." not in Path(word).parts and path.is_file():
            yield path
            if path.suffix == ".py":
                yield from _modules(_imports(path), folder)


def _modules(names: Iterable[str], folder: Path) -> list[Path]:
    """Return the modules and packages of a folder with ``names``, and all that these import from it."""
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
    """Return the top-level names of all that a module, or a package's modules, import."""
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _files(path: Path, folder: Path) -> Iterator[Path]:
    """Yield files of the folder that a module, or a package's modules, name by one or several strings.

    Examples are ``with_name("a.txt")``, ``HERE / "lists" / "a.txt"`` and ``join(HERE, "lists", "a.txt")``.
    """
    for node in _nodes(path):
        words = _words(node)
        hidden = any(part.startswith(".") for part in Path(words).parts)
        with suppress(OSError, ValueError):  # any string, also one longer than a name may be
            file = folder / words
            if not (hidden or Path(words).is_absolute()) and file.is_file() and os.access(file, os.R_OK):
                yield file


def _words(node: ast.AST) -> str:
    """Return the path that a syntax node spells; "" if it spells none.

    It is a string constant, or the paths of the operands of ``/`` or of a call's arguments, joined by "/".
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
    """Yield the syntax nodes of a module, or of a package's modules; none for another kind of file."""
    for file in path.rglob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []:
        with suppress(SyntaxError, ValueError):  # its import will say so
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))
