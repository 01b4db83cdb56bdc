"""Reads rows of a data set from a local JSONL file or the Hugging Face hub, and divides them into splits."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.types import Resource, ResourceKind, Split
from tba_hpc.core.wording import first_few
from tba_hpc.tasks.fields import LackingError, Unusable

log = logging.getLogger(__name__)

HELD_OUT: tuple[Split, ...] = ("validation", "test")
T = TypeVar("T")

MOST_SET_ASIDE = 0.01
"""Largest share of rows that may be unusable. With more, all the data are refused."""

MOST_LEVELS = 100
"""Deepest nesting of lists and objects in a row that every thread of every rank can handle."""

BLANK = b" \t\r\xef\xbb\xbf"
"""Bytes of which a blank line may consist, including those of a byte-order mark."""


@dataclass(frozen=True, slots=True)
class HubData:
    """A split of a data set on the hub. config: name of its configuration; None if there is only one."""

    name: str
    config: str | None
    split: str


@dataclass(kw_only=True)
class Table(Generic[T]):
    """A task's rows by split. Each source is read once, when its rows are first needed.

    A held-out split without a source of its own takes ``held_out`` rows from the end of the usable training
    rows, which are then not trained on. If both validation and test need such rows, the last ones are for
    validation, and those before them for test.

    parse, wanted: see ``usable_rows``. key: config key of ``held_out``, for errors. identity: function from a
    row to a string that is equal for rows with the same question.
    """

    sources: Mapping[Split, str | HubData]
    parse: Callable[[Mapping[str, object]], T | None]
    wanted: str
    held_out: int
    key: str
    identity: Callable[[T], str] = repr
    _read: dict[Split, list[T]] = field(default_factory=dict, init=False)

    def rows(self, split: Split) -> Sequence[T]:
        """Return the rows of a split. Raises ConfigError if the data cannot be used.

        Logs a warning if the split is held out and shares rows with training rows that were read before.
        """
        found = self._rows(split)
        if split != "train" and "train" in self._read:
            self._tell_shared(split, found)
        return found

    def _rows(self, split: Split) -> Sequence[T]:
        if split != "train" and split in self.sources:
            return self._source(split)
        slices = [part for part in HELD_OUT if part not in self.sources]
        return split_rows(self._source("train"), slices, size=self.held_out, key=self.key)[split]

    def _tell_shared(self, split: Split, held_out: Sequence[T]) -> None:
        times = Counter(map(self.identity, held_out))
        trained = {key for row in self._rows("train") if (key := self.identity(row)) in times}
        if trained:
            log.warning(
                "%d of %d %s rows are also trained on, so their score shows what was memorised: leave them "
                "out of the training data",
                *(sum(times[key] for key in trained), len(held_out), split),
            )

    def _source(self, split: Split) -> list[T]:
        if split not in self._read:
            where = self.sources[split]
            self._read[split] = usable_rows(where, split, parse=self.parse, wanted=self.wanted)
        return self._read[split]


def sources_of(
    train_file: str | None, test_file: str | None, hub: Mapping[Split, HubData]
) -> dict[Split, str | HubData]:
    """Return the source of each split: the given files, or the hub's data if there is no training file.

    A test file replaces the hub's test split. A held-out split may have no source.
    """
    found: dict[Split, str | HubData] = {**hub} if train_file is None else {"train": train_file}
    if test_file:
        found["test"] = test_file
    return found


def hub_resources(task: TaskSection, sources: Mapping[Split, str | HubData]) -> list[Resource]:
    """Return the hub data sets among the sources of a task, each once."""
    parts = [source for source in sources.values() if isinstance(source, HubData)]
    key = f"task.name={task.name}, data"
    return list(dict.fromkeys(Resource("data set", key, part.name, part.config) for part in parts))


def refuse_files(task: str, *files: str | None, remedy: str) -> None:
    """Raise ConfigError, with the ``remedy``, if a file is given to the task ``task``, which reads none."""
    for file in filter(None, files):
        raise ConfigError(
            f"task.train_file and task.test_file ({file}) are not used by the task {task}: {remedy}"
        )


def named_in_options(task: TaskSection, kind: ResourceKind, *options: str) -> list[Resource]:
    """Return a resource of this ``kind`` for each of the ``options`` that a task sets."""
    values = {f"task.options.{option}": task.options.get(option) for option in options}
    return [Resource(kind, key, str(value)) for key, value in values.items() if value]


def download(data: Resource) -> None:
    """Download all splits of a hub data set into the cache. Raises the library's errors."""
    import datasets

    datasets.load_dataset(data.name, data.subset)


def usable_rows(
    where: str | HubData, split: Split, *, parse: Callable[[Mapping[str, object]], T | None], wanted: str
) -> list[T]:
    """Parse the rows of a local JSONL file or a hub data set, and return the usable ones.

    A row is set aside if ``parse`` returns None or raises Unusable, or if its line is not a JSON object. The
    log names such rows. Blank lines are skipped. wanted: description of a good row, for errors. Raises
    ConfigError if the data cannot be read or are empty, or if more than MOST_SET_ASIDE of the rows are
    unusable.
    """
    rows = _file_rows(Path(where), f"task.{split}_file") if isinstance(where, str) else _hub_rows(where)
    parsed = {line: _parsed(row, parse) for line, row in rows}
    faults = {line: item for line, item in parsed.items() if isinstance(item, Unusable)}
    if faults:
        name = where if isinstance(where, str) else where.name
        _refuse_lack(name, [*parsed.values()])
        lines = f"line{'s' * (len(faults) > 1)} {first_few([*faults])}"
        problem = f"{name}, {lines}: cannot be used ({next(iter(faults.values()))})"
        share = f"{len(faults)} of {len(parsed)} rows"
        if len(faults) > MOST_SET_ASIDE * len(parsed):
            raise ConfigError(
                f"{problem}; write {wanted} ({share}; up to {MOST_SET_ASIDE:.0%} are set aside)"
            )
        log.warning("%s; set aside, %s: each must be %s", problem, share, wanted)
    return [item for item in parsed.values() if not isinstance(item, Unusable)]


def _refuse_lack(source: str, parsed: Sequence[object]) -> None:
    """Raise ConfigError if every row lacks the same field, which a reward function takes.

    source: name of the data. parsed: what ``_parsed`` returned for each row.
    """
    lacking = [row for row in parsed if isinstance(row, LackingError)]
    if len(lacking) == len(parsed) and len({row.field for row in lacking}) == 1:
        first = lacking[0]
        raise ConfigError(f"{first.key} takes {first.field!r}, which no row of {source} has: {first.remedy}")


def split_rows(
    rows: Sequence[T], held_out: Sequence[Split], *, size: int, key: str
) -> dict[Split, Sequence[T]]:
    """Divide rows between training and the held-out splits; return them by split.

    Each held-out split gets ``size`` rows from the end, the first of these splits the very last rows. The
    rest is for training. key: config key of ``size``, for errors. Raises ConfigError if no rest is left.
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


def _parsed(
    row: bytes | Mapping[str, object], parse: Callable[[Mapping[str, object]], T | None]
) -> T | Unusable:
    """Parse a row, or a line of a file. If that fails, return Unusable with the reason."""
    try:
        fields = _object(row) if isinstance(row, bytes) else row
        parsed = parse(fields)
    except Unusable as fault:
        return fault
    return Unusable(f"found {', '.join(fields) or 'no field'}") if parsed is None else parsed


def _file_rows(path: Path, key: str) -> Iterable[tuple[int, bytes]]:
    """Return the number, from 1, and the bytes of each line that is not blank. Lines end with LF or CRLF.

    Raises ConfigError, which names ``key``, if the file cannot be read or has only blank lines.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {key}={path} ({error.strerror}): check the path") from None
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip(BLANK)]
    if not rows:
        raise ConfigError(f"{key}={path} is empty: it must hold one JSON object per line")
    return rows


def _object(line: bytes) -> Mapping[str, object]:
    """Parse a line that holds a JSON object.

    Raises Unusable if the line holds anything else, or if the object has half of a surrogate pair, a number
    with too many digits, a key twice, or too deep nesting.
    """
    array = ": one row a line, not an array" if line.lstrip().startswith(b"[") else ""
    try:
        row = _DECODER.decode(line.decode("utf-8-sig"))
        if b"\\u" in line:  # perhaps half of a surrogate pair, which tokenizers refuse
            json.dumps(row, ensure_ascii=False).encode()
        deep = len(line) > 2 * MOST_LEVELS and _is_deep(row, MOST_LEVELS)
    except UnicodeDecodeError:
        raise Unusable("it is not UTF-8 text") from None
    except UnicodeEncodeError:
        raise Unusable("it holds half of a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        raise Unusable(f"no JSON: {error.msg} at column {error.colno}{array}") from None
    except Unusable:
        raise
    except ValueError:
        raise Unusable(f"it holds a number with over {sys.get_int_max_str_digits()} digits") from None
    except RecursionError:
        deep = True
    if deep:
        raise Unusable(f"its lists and objects are nested over {MOST_LEVELS} deep")
    if not isinstance(row, dict):
        raise Unusable(f"it holds no JSON object{array}")
    return row


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object with these keys and values. Raises Unusable if a key occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise Unusable(f"it has the key {twice!r} twice in one object")
    return made


def _constant(name: str) -> float | None:
    """Convert a JSON constant. NaN, which pandas writes for a missing value, becomes None; Infinity stays."""
    return None if name == "NaN" else float(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_constant)
"""Decoder of a row. Python's default takes the last of several values of a key, and lets NaN pass."""


def _is_deep(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested more than ``levels`` deep."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return items is not None and (levels == 0 or any(_is_deep(item, levels - 1) for item in items))


def _hub_rows(data: HubData) -> Iterable[tuple[int, dict[str, Any]]]:
    import datasets  # slow to import, and not needed for local files

    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(data.name, data.config, split=data.split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load {data.name} from the hub ({type(error).__name__}): check the network, "
            "or give local JSONL files with task.train_file and task.test_file"
        ) from None
    return enumerate(rows, start=1)
