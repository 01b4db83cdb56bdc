"""Rows of a data set, from a local JSONL file or from the Hugging Face hub.

It must not know what a row means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tba_hpc.config import ConfigError

Source = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True)
class HubData:
    """A split of a data set on the hub."""

    name: str
    config: str | None
    split: str


def numbered_rows(file: str | None, data: HubData, source: Source) -> Iterable[tuple[str, object]]:
    """(place, row) of all lines of a local JSONL ``file``, or of the hub's ``data`` where there is none.

    ``place`` names file and line, for a sentence about it. A line that is not JSON is a row None.
    Raises ConfigError where the file or the data cannot be read, or is empty.
    """
    rows = _hub_rows(data) if file is None else _file_rows(Path(file), f"task.{source}_file")
    return ((f"{file or data.name}, line {i}", row) for i, row in enumerate(rows, start=1))


def malformed(place: str, row: object, wanted: str) -> ConfigError:
    """The sentence about a row that is not of the form ``wanted``."""
    found = f" (found {', '.join(map(str, row)) or 'no field'})" if isinstance(row, dict) else ""
    return ConfigError(f"{place}: cannot be used{found}; write {wanted}")


def _file_rows(path: Path, key: str) -> Iterable[object]:
    try:
        lines = path.read_text(encoding="utf-8").strip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {key}={path} ({reason}): check the path") from None
    if lines == [""]:
        raise ConfigError(f"{key}={path} is empty: it must hold one JSON object a line")
    return map(_json, lines)


def _json(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _hub_rows(data: HubData) -> Iterable[dict[str, Any]]:
    import datasets  # slow to import, and local files need it not

    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(data.name, data.config, split=data.split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load {data.name} from the hub ({type(error).__name__}): check the network, "
            "or give local JSONL files with task.train_file and task.test_file"
        ) from None
    return rows
