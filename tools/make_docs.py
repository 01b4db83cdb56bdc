"""Writes the pages of docs/ that are made from the code: every key, metric and command.

    python tools/make_docs.py    # writes docs/{config,metrics,commands,design}.md

In docs/coming-from.md only the lists of keys are replaced. All other pages are written by hand.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
import typer.main
import yaml
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperGroup

from tba_hpc.cli import app
from tba_hpc.config import Config, Section, may_change
from tba_hpc.config.loading import elsewhere
from tba_hpc.config.variants import choices
from tba_hpc.launch.plan import ComponentSite, Container, Site
from tba_hpc.run import metric_table
from tba_hpc.run.metrics import RECORDS_PER_SECOND

DOCS = Path(__file__).resolve().parents[1] / "docs"
PACKAGE = DOCS.parent / "tba_hpc"

HEAD = "<!-- Made by tools/make_docs.py from the code: change it there. -->"
LISTS = "<!-- What follows is made by tools/make_docs.py from the code: change it there. -->"


def config_page() -> str:
    """Return the page of all keys of configs and site files."""
    parts = [
        HEAD,
        "# Every key",
        "A config is a YAML file of these sections. `--set section.key=value` overrides one key; `tba run "
        "CONFIG --dry-run` prints them all. Defaults are in brackets; a resume may change keys with ↻.",
        *(text for name, field in Config.model_fields.items() for text in _section(name, _model(field))),
        "## Site files",
        "What `--site` names, one for each cluster: see [Slurm](slurm.md).",
        _list(Site),
        "### container",
        _list(Container),
        "### trainer, searcher",
        _list(ComponentSite),
    ]
    return "\n\n".join(parts) + "\n"


def _section(name: str, model: type[Section]) -> Iterator[str]:
    yield f"## {name}"
    yield _list(model, prefix=f"{name}.")
    for key, field in model.model_fields.items():
        if among := choices(field.annotation):
            yield f"### {name}.{key}"
            yield _list_of_choices(among)
        elif inner := sections_in(field):
            yield f"### {name}.{key}"
            yield _list(inner[0], prefix=f"{name}.{key}.")


def _list_of_choices(among: dict[str, type[Section]]) -> str:
    rows, said = [], set[str]()
    for tag, model in among.items():
        fields = dict(model.model_fields)
        rows.append(f"- `{tag}`: {_words(fields.pop('name'))}")
        for key, field in fields.items():
            meaning = _meaning(field)
            rows.append(f"    - `{key}` {_default(field)}: {'as above.' if meaning in said else meaning}")
            said.add(meaning)
    return "\n".join(rows)


def _list(model: type[Section], prefix: str = "") -> str:
    rows = []
    for key, field in model.model_fields.items():
        mark = "↻" if prefix and may_change(f"{prefix}{key}") else ""
        rows.append(f"- `{key}`{mark} {_default(field)}: {_meaning(field)}")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    if choices(field.annotation):
        return f"({field.default.name}, below)"
    if sections_in(field):
        return "(below)" if field.default is not None else "(null, below)"
    if field.default_factory is not None:
        if field.default_factory_takes_validated_data:
            return "(follows from others)"
        return f"({_text(field.get_default(call_default_factory=True))})"
    return f"({_text(field.default)})"


def _text(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _meaning(field: FieldInfo) -> str:
    words, values = _words(field), [_text(value) for value in _values(field.annotation)]
    if all(value in words for value in values):
        return words
    return f"{words} One of {', '.join(f'`{value}`' for value in values)}."


def _words(field: FieldInfo) -> str:
    return _code_in(" ".join((field.description or "").split()))


SECTIONS = "|".join(Config.model_fields)
KINDS = "|".join(sorted({name.partition("/")[0] for name in metric_table.STEP} - {"step"}))
CODE = re.compile(
    rf"""``?[^`]+``?  # what is marked already
    |(?<![\w./-])(?:
        (?:--set\ )?(?:{SECTIONS})(?:\.[a-z_]+)+(?:=\w+)?  # a key
        |(?:{KINDS}|search)/[a-z_]+  # a metric
        |--[a-z-]+  # an option
    )""",
    re.VERBOSE,
)


def _code_in(text: str) -> str:
    """Mark the keys, metrics and options in a text as code, and link the pages that it names."""
    linked = re.sub(r"docs/([a-z-]+)\.md", r"[\1](\1.md)", text)
    return CODE.sub(lambda found: f"`{found[0].strip('`')}`", linked)


def _values(annotation: Any) -> list[object]:
    """Return the values that a Literal allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return [value for part in get_args(annotation) for value in _values(part)]
    return []


def _model(field: FieldInfo) -> type[Section]:
    (model,) = sections_in(field)
    return model


def sections_in(field: FieldInfo) -> list[type[Section]]:
    """Return the sections that a field may hold."""
    if among := choices(field.annotation):
        return list(among.values())
    parts = get_args(field.annotation) or (field.annotation,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def metrics_page() -> str:
    """Return the page of all metrics and events in ``metric_table``."""
    parts = [
        HEAD,
        "# Every metric",
        "A JSON line per record in `RUN/metrics`, one file per role and rank: `trainer.jsonl`, "
        "`searcher-0003.jsonl`. Every record has `time` (unix seconds). Shares lie in 0…1, seconds are wall "
        "time, log and nats are natural.",
        "## trainer.jsonl, a record per optimizer step",
        _metrics_list(metric_table.STEP),
        "### Its events",
        "Each has `event`, `step`, `buffer/size` and `revision`.",
        _names_list(metric_table.TRAINER_EVENTS),
        "## searcher-NNNN.jsonl, a record per second",
        f"With more than {RECORDS_PER_SECOND} searchers each logs less often: together they write "
        f"{RECORDS_PER_SECOND} records per second. Counts are since the previous record.",
        _metrics_list(metric_table.SEARCH),
        "### Its events",
        _names_list(metric_table.SEARCHER_EVENTS),
        "## Fields of events",
        _names_list(metric_table.FIELDS),
    ]
    return "\n\n".join(parts) + "\n"


def _metrics_list(table: dict[str, metric_table.Metric]) -> str:
    return "\n".join(f"- `{name}` ({one.unit}): {_code_in(one.meaning)}" for name, one in table.items())


def _names_list(table: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {_code_in(meaning)}" for name, meaning in table.items())


def commands_page() -> str:
    """Return the page of all commands that ``tba --help`` shows, by group, with arguments and options."""
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    groups: dict[str, list[Any]] = {}
    for command in program.commands.values():
        if isinstance(command, TyperCommand) and not command.hidden:
            groups.setdefault(str(command.rich_help_panel), []).append(command)
    parts = [
        HEAD,
        "# Every command",
        "`tba COMMAND --help` says the same. CONFIG is a YAML file or the name of a shipped one, RUN a run "
        "directory, MODEL a folder or hub name. `--site` names the cluster: a site file or the "
        "name of a shipped one. `--set a.b=value` overrides one key of the config and may be repeated; "
        "`--json` prints JSON.",
    ]
    for group, commands in groups.items():
        parts += [f"## {group}", *(_command(command) for command in commands)]
    return "\n\n".join(parts) + "\n"


SHARED = {"site": "`--site <path>`", "overrides": "`--set a.b=value`", "as_json": "`--json`"}
"""Options of many commands, which the beginning of the page explains."""
TOLD = {"RUN", "CONFIG", "CONFIG|RUN", "RUN|MODEL", "RUN RUN …"}
"""Arguments that the beginning of the page explains."""


def _command(command: TyperCommand) -> str:
    context = typer.Context(command)
    arguments = [one.metavar or one.name for one in command.params if one.param_type_name == "argument"]
    told = [one for one in command.params if one.metavar not in TOLD or one.param_type_name == "option"]
    records = [one.get_help_record(context) for one in told if one.name not in SHARED]
    rows = [
        f"- `{names}`: {_code_in(meaning.removesuffix('  [required]'))}"
        for names, meaning in filter(None, records)
    ]
    if shared := [SHARED[str(one.name)] for one in told if one.name in SHARED]:
        rows.append(f"- {', '.join(shared)}")
    heading = " ".join(["### tba", str(command.name), *map(str, arguments)])
    return (
        "\n\n".join([heading, _code_in(command.help or ""), "\n".join(rows)]).replace(" range>", ">").rstrip()
    )


def coming_from_page() -> str:
    """Return docs/coming-from.md with new lists, one per system; the text before them stays as it is."""
    written, _, _ = (DOCS / "coming-from.md").read_text().partition(LISTS)
    lists = []
    for system, about in elsewhere().items():
        rows = [
            f"- {_code(theirs)} → {_code(ours)}: {differs}".removesuffix(": ")
            for theirs, ours, differs in about["keys"]
        ]
        lists.append(f"## {system}\nRead: {about['read']}.\n\n" + "\n".join(rows))
    return "\n\n".join([written + LISTS, *lists]) + "\n"


def _code(keys: str) -> str:
    """Format keys as code, but not the words between them."""
    marked = " and ".join(key if "`" in key else f"`{key}`" for key in keys.split(" and "))
    return marked.replace("`nothing`", "nothing")


def design_page() -> str:
    """Return the page of all packages, lowest first, each with its purpose."""
    rooms = tomllib.loads((DOCS / "rooms.toml").read_text())
    head = (
        "# Design: where things are\n"
        "The packages of `tba_hpc/`, lowest first. Each imports only from those above it and from itself, "
        "which `tests/test_layers.py` enforces. A module's first line says what it is for. How they work "
        "together: [one step](one-step.md). Why: [decisions](decisions.md)."
    )
    rows = [f"- **{room}**: {what}." for room, what in rooms.items()]
    return "\n\n".join([HEAD, head, "\n".join(rows)]) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "design.md": design_page,
    "coming-from.md": coming_from_page,
}


def outdated() -> list[str]:
    """Return the names of pages that differ from what the code says."""
    return [name for name, make in PAGES.items() if (DOCS / name).read_text() != make()]


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
