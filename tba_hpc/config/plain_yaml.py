"""YAML as in configs and site files, and the paths in them.

Unlike in PyYAML, a number needs no decimal point (``1e-2``), and none is read in base 8 or 60 (``010``,
``1:30``). Dates are texts, and a key may not occur twice in a mapping.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

_NUMBER = "!number"
"""YAML tag of numbers that PyYAML would read as text."""

_WRITTEN = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
"""Pattern of such numbers."""

_OTHER_BASE = re.compile(r"[-+]?(?:0[\d_]+$|[\d_]+:)")
"""Beginning of a number that YAML 1.1 reads in base 8 or 60."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


class _Loader(yaml.SafeLoader):
    """Loader that reads numbers without a point, and refuses those in base 8 or 60, and a key given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Make a mapping's node as the base class does. Raises YAMLError if a key is given twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, object], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in seen:
                lines = f"lines {seen[name]} and {line}" if seen[name] < line else f"line {line}"
                raise yaml.YAMLError(f"{key.value!r} is given twice, in {lines}: leave one out")
            seen[name] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes texts that would be read as numbers."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Read a number; a whole number becomes an int, which is valid for keys of either type."""
    number = float(loader.construct_scalar(node).replace("_", ""))
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """A number as YAML 1.1 reads it, which must be as people read it. Raises YAMLError."""
    read = loader.construct_yaml_int if node.tag.endswith("int") else loader.construct_yaml_float
    number: int | float = read(node)
    if _OTHER_BASE.match(node.value):
        raise yaml.YAMLError(
            f"{node.value} in line {node.start_mark.line + 1} would be read as {number}: write a number "
            "without leading zeros or colons, and a text in quotes"
        )
    return number


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_NUMBER, _WRITTEN, [*"-+.0123456789"])
_Loader.add_constructor(_NUMBER, _number)
_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
_Loader.add_constructor("tag:yaml.org,2002:float", _decimal)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)


def read_yaml(text: str) -> Any:
    """Parse YAML into plain values. Raises YAMLError."""
    return yaml.load(text, _Loader)


def write_yaml(value: object, **options: Any) -> str:
    """Return text that ``read_yaml`` reads back. options: those of yaml.dump."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options)


def expanded(path: str) -> str:
    """Replace ``~`` and ``$NAME`` in a path, but leave a path with a ``$`` that exists as it stands.

    Raises ValueError for a user without a home, or a variable that is unset or empty.
    """
    if not path.startswith("~") and ("$" not in path or os.path.lexists(path)):
        return path
    for name in ("".join(found) for found in _VARIABLE.findall(path)):
        if not os.environ.get(name):
            raise ValueError(
                f"the path {path} holds ${name}, which is unset or empty in the environment: export it, or "
                "write the path without it"
            )
    full = os.path.expanduser(path)  # noqa: PTH111, the other way makes a path of a hub's name
    if full.startswith("~"):
        raise ValueError(f"the path {path} begins with a user who has no home here: write the folder itself")
    return os.path.expandvars(full)


UserPath = Annotated[str, AfterValidator(expanded)]
"""A path, or another name, that a user gives."""
