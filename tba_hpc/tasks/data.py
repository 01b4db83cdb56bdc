"""Rows of a data set, from a local JSONL file or from the Hugging Face hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.types import Resource, ResourceKind, Split
from tba_hpc.core.wording import first_few

log = logging.getLogger(__name__)

HELD_OUT: tuple[Split, ...] = ("validation", "test")
T = TypeVar("T")

MOST_SET_ASIDE = 0.01
"""Share of the rows that may be of no use; with more of them the data are taken for others than meant."""


@dataclass(frozen=True, slots=True)
class HubData:
    """A split of a data set on the hub."""

    name: str
    config: str | None
    split: str


@dataclass(kw_only=True)
class Table(Generic[T]):
    """A task's rows by split; each source is read once.

    Validation is the end of the training rows and never trained on, so that no choice looks at the test; so
    is test, before it, if there is no source of its own. Unusable rows are set aside before that. parse,
    wanted: as for ``usable_rows``. held_out: rows of a held-out slice; key: the config key of that.
    """

    sources: Mapping[Split, str | HubData]
    parse: Callable[[Mapping[str, object]], T | None]
    wanted: str
    held_out: int
    key: str
    _read: dict[Split, list[T]] = field(default_factory=dict, init=False)

    def rows(self, split: Split) -> Sequence[T]:
        """Of a split. Raises ConfigError."""
        if split != "train" and split in self.sources:
            return self._source(split)
        slices = [part for part in HELD_OUT if part not in self.sources]
        return split_rows(self._source("train"), slices, size=self.held_out, key=self.key)[split]

    def _source(self, split: Split) -> list[T]:
        if split not in self._read:
            where = self.sources[split]
            self._read[split] = usable_rows(where, split, parse=self.parse, wanted=self.wanted)
        return self._read[split]


def sources_of(
    train_file: str | None, test_file: str | None, hub: Mapping[Split, HubData]
) -> dict[Split, str | HubData]:
    """Where a task's rows are read: its files, or the hub's data in their place."""
    found: dict[Split, str | HubData] = {**hub} if train_file is None else {"train": train_file}
    if test_file:
        found["test"] = test_file
    return found


def hub_resources(task: TaskSection, sources: Mapping[Split, str | HubData]) -> list[Resource]:
    """The data sets of the hub among the sources of a task, each once."""
    parts = [source for source in sources.values() if isinstance(source, HubData)]
    key = f"task.name={task.name}, data"
    return list(dict.fromkeys(Resource("data set", key, part.name, part.config) for part in parts))


def refuse_files(task: str, *files: str | None, remedy: str) -> None:
    """Raise ConfigError if a task that reads none is given a file."""
    for file in filter(None, files):
        raise ConfigError(
            f"task.train_file and task.test_file ({file}) have no use in the task {task}: {remedy}"
        )


def named_in_options(task: TaskSection, kind: ResourceKind, *options: str) -> list[Resource]:
    """What those options name that are set."""
    values = {f"task.options.{option}": task.options.get(option) for option in options}
    return [Resource(kind, key, str(value)) for key, value in values.items() if value]


def download(data: Resource) -> None:
    """Bring a data set of the hub, all its splits, into the cache. Raises what the library raises."""
    import datasets

    datasets.load_dataset(data.name, data.subset)


def usable_rows(
    where: str | HubData, split: Split, *, parse: Callable[[Mapping[str, object]], T | None], wanted: str
) -> list[T]:
    """What ``parse`` makes of the rows of a local JSONL file, or of data of the hub.

    Rows of which it makes None are set aside, and so are lines that hold no JSON object; one line of the log
    counts and names them. wanted: what a row must be. Raises ConfigError where the file or the data cannot be
    read, is empty, or has more than MOST_SET_ASIDE of such rows.
    """
    rows = list(_file_rows(Path(where), f"task.{split}_file") if isinstance(where, str) else _hub_rows(where))
    parsed = [parse(row) if isinstance(row, dict) else None for row in rows]
    unusable = [line for line, item in enumerate(parsed, start=1) if item is None]
    if unusable:
        found = _fields(rows[unusable[0] - 1])
        name = where if isinstance(where, str) else where.name
        lines = f"line{'s' * (len(unusable) > 1)} {first_few(unusable)}"
        problem = f"{name}, {lines}: cannot be used{found}"
        share = f"{len(unusable)} of {len(rows)} rows"
        if len(unusable) > MOST_SET_ASIDE * len(rows):
            raise ConfigError(
                f"{problem}; write {wanted} ({share}; up to {MOST_SET_ASIDE:.0%} are set aside)"
            )
        log.warning("%s; set aside, %s: each must be %s", problem, share, wanted)
    return [item for item in parsed if item is not None]


def split_rows(
    rows: Sequence[T], held_out: Sequence[Split], *, size: int, key: str
) -> dict[Split, Sequence[T]]:
    """Take ``size`` rows off the end for each held-out split; the rest is for training.

    key: the config key of ``size``, for errors. Raises ConfigError where nothing would be left.
    """
    rest = len(rows) - size * len(held_out)
    if rest <= 0:
        raise ConfigError(
            f"the training data has {len(rows)} problems, but {' and '.join(held_out)} take {size} each: "
            f"give more problems or lower {key}"
        )
    starts = {split: len(rows) - size * (i + 1) for i, split in enumerate(held_out)}
    parts = {split: rows[start : start + size] for split, start in starts.items()}
    return {"train": rows[:rest], **parts}


def _fields(row: object) -> str:
    if isinstance(row, json.JSONDecodeError):
        return f" (no JSON: {row.msg} at column {row.colno})"
    return f" (found {', '.join(map(str, row)) or 'no field'})" if isinstance(row, dict) else ""


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
    except json.JSONDecodeError as error:
        return error


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
