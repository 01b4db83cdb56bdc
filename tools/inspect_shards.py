"""Shows what lies in a run's shards, or in one shard, and whether it is whole. Changes nothing.

    python tools/inspect_shards.py RUN                                    a line per shard
    python tools/inspect_shards.py RUN/shards/searcher-0003/000017.h5     one shard and its first trajectories

Takes ``--json``. Exit code 1 where a file is broken.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from tba_hpc.core.types import Shard
from tba_hpc.exchange.hdf5_shards import ShardError, read_shard
from tba_hpc.run.directory import REFUSED, RunDir

Row = dict[str, str | int | float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One file of a run; ``broken`` says why it cannot be used."""

    file: str
    broken: str | None = None
    count: int | None = None
    prompts: int | None = None
    tokens: int | None = None
    reward: float | None = None
    truncated: float | None = None
    versions: str | None = None


def main(
    path: Annotated[Path, typer.Argument(help="A run directory, or one shard.")],
    rows: Annotated[int, typer.Option(min=0, help="Trajectories shown of one shard.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Counts, mean reward, weight versions and checksum state of shards."""
    if not path.exists():
        raise typer.BadParameter(f"{path} does not exist: give a run directory or a shard")
    is_shard = path.is_file()
    lines = [_line(path.name, path)] if is_shard else _lines(path)
    if not lines:
        raise typer.BadParameter(_no_shards(path))
    whole = all(line.broken is None for line in lines)
    head = _head(read_shard(path), rows) if is_shard and whole else []
    if as_json:
        print(json.dumps({"shards": [asdict(line) for line in lines], "head": head}))
    else:
        _report(lines, head, path)
    raise typer.Exit(int(not whole))


def _no_shards(path: Path) -> str:
    """Why there is nothing to show, and what helps."""
    if not RunDir(path).config_file.is_file():
        return f"{path} holds no shards: give the run directory, the one with config.yaml"
    return (
        f"{path} has no shard any more: merged ones are deleted once a checkpoint holds them; keep those of "
        "the next run with --set exchange.keep_shards=1"
    )


def _report(lines: list[Line], head: list[Row], path: Path) -> None:
    """Tables for people; the reasons below, where they have room."""
    columns = [name for name in Line.__annotations__ if name != "broken"]
    _show(
        f"{len(lines)} shards of {path}", [{name: asdict(line)[name] for name in columns} for line in lines]
    )
    _show(f"first {len(head)} trajectories", head)
    for line in lines:
        if line.broken:
            print(f"{line.file} {line.broken}")


def _lines(path: Path) -> list[Line]:
    """Of all shards of a run directory."""
    run = RunDir(path)
    files = [*run.shard_files().values(), *run.shard_files(".h5" + REFUSED).values()]
    lines = [_line(str(file.relative_to(run.shards)), file) for file in files]
    return lines + [_line(str(file.relative_to(run.path)), file) for file in run.kept_files().values()]


def _line(name: str, path: Path) -> Line:
    try:
        trajectories = read_shard(path).trajectories
    except ShardError as error:
        return Line(name, str(error).removeprefix(f"{path} "))
    record = trajectories.record
    return Line(
        file=name,
        count=len(record),
        prompts=len(trajectories.prompts),
        tokens=len(trajectories.completions.values),
        reward=float(record["reward"].mean()) if len(record) else None,
        truncated=float(record["truncated"].mean()) if len(record) else None,
        versions=f"{record['version_oldest'].min()}–{record['version_newest'].max()}"
        if len(record)
        else None,
    )


def _head(shard: Shard, rows: int) -> list[Row]:
    """The first records, with token counts and the sum of the log-probabilities under both policies."""
    trajectories, head = shard.trajectories, []
    names = ("uid", "prompt_id", "request_id", "reward", "truncated", "reference")
    for i, record in enumerate(trajectories.record[:rows]):
        span = slice(*trajectories.completions.offsets[i : i + 2])
        row: Row = {name: record[name].item() for name in names}
        row["versions"] = f"{record['version_oldest']}–{record['version_newest']}"
        row["tokens"] = int(span.stop - span.start)
        row["logprob"] = float(trajectories.logprobs[span].sum())
        row["ref_logprob"] = float(trajectories.ref_logprobs[span].sum())
        head.append(row)
    return head


def _show(title: str, rows: list[Row]) -> None:
    if not rows:
        return
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in rows[0]:
        justify: JustifyMethod = "left" if name == "file" else "right"
        table.add_column(name.replace("_", " "), justify=justify, no_wrap=name == "file")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def _cell(value: str | int | float | None) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
