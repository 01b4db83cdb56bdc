"""The dialect of YAML in configs and site files, and the paths in them.

The dialect differs from PyYAML's: ``1e-2`` is a number, numbers in base 8 (``010``) or 60 (``1:30``) are
refused, dates are strings, and a mapping may not repeat a key.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

_NUMBER = "!number"
"""Our YAML tag for numbers that PyYAML would read as strings."""

_WRITTEN = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
"""Pattern of numbers with an exponent, ``1e-2`` or ``1e5``. PyYAML would read most of them as strings."""

_OTHER_BASE = re.compile(r"[-+]?(?:0[\d_]+$|[\d_]+:)")
"""Pattern of the beginning of a number that YAML 1.1 reads in base 8 or 60."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


class AmbiguousNumber(yaml.YAMLError):
    """Error for a number in base 8 or 60. Its message begins with the line number."""


class _Loader(yaml.SafeLoader):
    """Loader of the dialect that the module describes."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping's node as PyYAML does. Raises YAMLError if the mapping repeats a key."""
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
    """Dumper that puts strings in quotes if ``_Loader`` would read them as numbers."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Read a number such as ``1e3``. A whole number becomes an int, which float keys accept, too."""
    number = float(loader.construct_scalar(node).replace("_", ""))
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Read a number as YAML 1.1 does. Raises AmbiguousNumber for a number in base 8 or 60."""
    read = loader.construct_yaml_int if node.tag.endswith("int") else loader.construct_yaml_float
    number: int | float = read(node)
    if _OTHER_BASE.match(node.value):
        remedy = (
            "put it in quotes" if ":" in node.value else "leave out the leading zeros, or put it in quotes"
        )
        line = node.start_mark.line + 1
        raise AmbiguousNumber(f"line {line}: {node.value} would be read as the number {number}: {remedy}")
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
    """Return YAML text from which ``read_yaml`` gets the same value. options: those of yaml.dump."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options)


def expanded(path: str) -> str:
    """Replace ``~`` and ``$NAME`` in a path, unless the path exists with a literal ``$``.

    Raises ValueError if the user in ``~user`` has no home, or if a variable is unset or empty.
    """
    if not path.startswith("~") and ("$" not in path or os.path.lexists(path)):
        return path
    for name in ("".join(found) for found in _VARIABLE.findall(path)):
        if not os.environ.get(name):
            raise ValueError(
                f"the path {path} holds ${name}, which is unset or empty in the environment: export it, or "
                "write the path without it"
            )
    full = os.path.expanduser(path)  # noqa: PTH111, as Path would change hub names
    if full.startswith("~"):
        raise ValueError(f"the path {path} begins with a user who has no home here: write the folder itself")
    return os.path.expandvars(full)


UserPath = Annotated[str, AfterValidator(expanded)]
"""A path given by the user, with ``~`` and ``$NAME`` expanded; or a hub name, unchanged."""
