"""Reads a config from YAML and ``--set`` overrides, and turns every bad input into a one-sentence error."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tba_hpc.config import shipped
from tba_hpc.config.plain_yaml import AmbiguousNumber, read_yaml, write_yaml
from tba_hpc.config.rules import flat
from tba_hpc.config.sections import MAY_CHANGE, Config, RewardSection
from tba_hpc.config.variants import OWN, choices


class ConfigError(ValueError):
    """Error for any input that the user must change. Its message is one sentence for the user."""


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply ``a.b=value`` overrides, and validate the result.

    path: a file, or the name of a shipped config. Raises ConfigError for an unreadable file, an unknown key
    (suggesting a similar valid one), a wrong type or an impossible combination.
    """
    return parse_config(read_tree(path, "configs"), overrides)


def read_tree(path: Path, kind: shipped.Kind) -> dict[str, Any]:
    """Read the keys of a YAML file, or of the shipped file with that name. Raises ConfigError."""
    try:
        tree = read_yaml(shipped.find(path, kind).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"cannot read the {kind.removesuffix('s')} {path}: {error.strerror}; check the path, or name one "
            f"of those shipped: {', '.join(shipped.files(kind))}"
        ) from None
    except AmbiguousNumber as error:
        raise ConfigError(f"{path}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(tree).__name__}")
    return tree


def parse_config(tree: dict[str, Any], overrides: list[str] | None = None) -> Config:
    """Apply ``overrides`` to a tree of plain values, in place, and validate it. Raises ConfigError."""
    for override in overrides or []:
        _override(tree, override)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
    _refuse_switches(tree, config)
    return config


def dump_config(config: Config) -> str:
    """Return YAML text that ``load_config`` reads back to an equal Config."""
    return write_yaml(config.model_dump(mode="json"))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, as (old, new) by dotted key, in the order of the sections.

    None stands for the value of a key that one config lacks.
    """
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: (was, now) for key, (was, now) in pairs.items() if was != now}


def may_change(key: str) -> bool:
    """Return whether a resume may change the value of a dotted key; see ``MayChange``."""
    model: type[BaseModel] | None = Config
    for name in key.split("."):
        field = model.model_fields.get(name) if model else None
        if field is not None and MAY_CHANGE in field.metadata:
            return True
        if field is not None:
            model = _section(field.annotation)
        elif model is not RewardSection:  # the user chooses the names of rewards
            model = None
    return False


def is_local(value: str) -> bool:
    """Return whether a value has the form of a path, and not of a hub name such as ``org/model``."""
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or Path(value).suffix == ".jsonl"


CHOICES = frozenset(
    key
    for section in Config.model_fields.values()
    for key, field in getattr(section.annotation, "model_fields", {}).items()
    if choices(field.annotation)
)
"""Names of keys whose values are variants (``config.variants``), without their sections."""


def _refuse_switches(tree: dict[str, Any], config: Config) -> None:
    """Raise ConfigError if a number is given as true or false, which pydantic would read as 1 or 0."""
    numbers = {key for key, value in flat(config.model_dump()).items() if type(value) in (int, float)}
    for key, value in flat(tree).items():
        if isinstance(value, bool) and key in numbers:
            raise ConfigError(
                f"config key {key!r} has the value {value}, but must be a number: write one, or null"
            )


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text} is not of the form a.b=value: write for example --set train.steps=5")
    *sections, leaf = key.split(".")
    for section in sections:
        if section in CHOICES and isinstance(tree.get(section), str):
            tree[section] = {"name": tree[section]}
        if tree.get(section) is None:  # the saved config of a run has null for a section that was left out
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {text}: {section} is a value, not a section; remove what follows it")
    try:
        tree[leaf] = read_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value is not valid YAML; put it in quotes") from None
    if isinstance(tree[leaf], dict) and tree[leaf] and ":" not in value:
        raise ConfigError(f"--set {text}: YAML reads {value} as a mapping; write '{key}=\"{value}\"'")


OBJECTIVES_ELSEWHERE = {
    "dapo": "its loss is grpo with train.loss_normaliser=batch_tokens",
    "ppo": "grpo has its clip, but there is no critic",
    "reinforce": "rloo is REINFORCE with a baseline",
}
"""Remedies for the names of objectives of other RL systems."""


def explain(error: ValidationError, model: type[BaseModel], noun: str = "config") -> str:
    """Explain a pydantic error in one sentence: value, rule, remedy.

    noun: word for what the keys belong to. Only one problem is explained: the first unknown key, since a
    misspelt key also makes another key seem missing, or else the first problem.
    """
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    names, section = _place(problem["loc"], model)
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        found = _foreign(problems) if model is Config and _elsewhere(names, problem["input"]) else ""
        found = found or (_in_a_section(names[-1]) if model is Config and len(names) < 3 else "")
        found = found or (_nearly_elsewhere(names[-1]) if model is Config else "")
        return f"unknown {noun} key {key!r}{found or _nearest(names, section)}"
    if problem["type"] == "missing":
        by_option = f" or with --set {key}=…" if model is Config else ""
        return f"{noun} key {key!r} is missing: set it in the file{by_option}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"].startswith("union_tag"):
        assert section is not None, "a union is always a field of a section"
        valid = list(choices(section.model_fields[names[-1]].annotation))
        names_of = ", ".join(valid).replace(OWN, f"{OWN} of your own (docs/own-task.md)")
        given = problem["input"].get("name") if isinstance(problem["input"], dict) else problem["input"]
        return (
            f"{noun} key {key!r} has the value {given!r}, but is one of {names_of}{_meant(str(given), valid)}"
        )
    rule = problem["msg"][0].lower() + problem["msg"][1:]
    field = section.model_fields.get(names[-1]) if section else None
    if problem["type"] == "model_type" and field and (below := _section(field.annotation)):
        rule = f"is a section: {_key_below(key, below, problem['input'])}"
    if problem["type"] == "string_pattern_mismatch":
        rule = _form(field)
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        rule += ": put it in quotes"
    return f"{noun} key {key!r} has the value {problem['input']!r}, but {rule}"


def _meant(given: str, valid: Sequence[str]) -> str:
    """Return the end of an error about an unknown variant: the one that may be meant, or "" if unclear."""
    close = difflib.get_close_matches(given, valid, n=1)
    if not close and given in OBJECTIVES_ELSEWHERE:
        return f": {OBJECTIVES_ELSEWHERE[given]}"
    return f": did you mean {close[0]!r}?" if close else ""


def _key_below(key: str, section: type[BaseModel], given: object) -> str:
    """Return the end of an error about a value given for a section: the key that is meant, or all keys."""
    if not isinstance(given, str) or given not in section.model_fields:
        return f"set {key}.KEY, where KEY is one of {', '.join(section.model_fields)}"
    return f"set {key}.{given}={'true' if section.model_fields[given].annotation is bool else '…'}"


def _form(field: FieldInfo | None) -> str:
    """Return the end of an error about a text of the wrong form: the form that it must have.

    field: the key's field; None for a name that the user chose.
    """
    if field is None or not field.examples:
        return "a name has only letters, digits and _, and does not begin with a digit"
    return f"must be of the form of {' or '.join(field.examples)}"


def _place(
    location: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None]:
    """Return the names that make up the key at ``location``, and the section that holds the key.

    location: location in a pydantic error, which also contains tags of variants; these are left out. The
    section is None if the key is in no section, such as an option of a task.
    """
    names: list[str] = []
    holder: type[BaseModel] | None = model
    below: type[BaseModel] | None = model
    parts = iter(map(str, location))
    for part in parts:
        names.append(part)
        holder = below
        if below is not None and part in below.model_fields:  # else the user chose the name
            annotation = below.model_fields[part].annotation
            among = choices(annotation)
            below = among.get(next(parts, "")) if among else _section(annotation)
    return names, holder


@functools.cache
def elsewhere() -> dict[str, dict[str, Any]]:
    """Return what ``elsewhere.yaml`` says about TRL, verl and prime-rl, by name.

    Each system's ``keys`` are triples: their key, our key, and what differs.
    """
    found: dict[str, dict[str, Any]] = read_yaml(
        Path(__file__).with_name("elsewhere.yaml").read_text("utf-8")
    )
    return found


def _foreign(problems: Sequence[ErrorDetails]) -> str:
    """Return the end of an error about unknown keys: our equivalents of TRL's, verl's or prime-rl's keys."""
    ours: dict[str, dict[str, None]] = {}  # each phrase once, even if several sections have the key
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            for system, keys in _elsewhere(_place(problem["loc"], Config)[0], problem["input"]).items():
                ours.setdefault(system, {}).update(dict.fromkeys(keys))
    named = "; ".join(f"{system}'s {', '.join(keys)}" for system, keys in ours.items())
    return f": {named} here, and docs/coming-from.md says what differs"


def _elsewhere(names: list[str], value: object) -> dict[str, list[str]]:
    """Return phrases that name our keys for an unknown key, by the first system of ``elsewhere`` with it.

    Returns {} if no system has the key. names: path of the unknown key. value: value of the unknown key; if
    it is a dict, its keys are looked up, too.
    """
    given = [f"{path}." for path in flat({".".join(names): value})]
    for system, about in elsewhere().items():
        found = [
            f"{theirs} has no counterpart" if ours == "nothing" else f"{theirs} is {ours}"
            for theirs, ours, _ in about["keys"]
            if theirs == names[-1] or any(path.startswith(f"{theirs}.") for path in given)
        ]
        if found:
            return {system: found}
    return {}


def _nearly_elsewhere(name: str) -> str:
    """Return the end of an error message about an unknown key whose name resembles another library's key.

    The text names the library's key and our equivalent. It is "" if no key in ``elsewhere`` is similar.
    """
    for system, about in elsewhere().items():
        ours = {theirs: key for theirs, key, _ in about["keys"]}
        if close := difflib.get_close_matches(name, ours, n=1, cutoff=0.9):
            key = "without a counterpart" if ours[close[0]] == "nothing" else ours[close[0]]
            return f": did you mean {system}'s {close[0]}? It is {key} here"
    return ""


def _in_a_section(name: str) -> str:
    """Return the end of an error: the sections that have a key of this name; empty if none has."""
    sections = {key: _section(field.annotation) for key, field in Config.model_fields.items()}
    there = [f"{key}.{name}" for key, section in sections.items() if section and name in section.model_fields]
    return f": did you mean {' or '.join(map(repr, there))}?" if there else ""


def _nearest(names: list[str], section: type[BaseModel] | None) -> str:
    """Return the end of an error message: the key of ``section`` nearest to the last of ``names``.

    It lists all keys of the section if none is near, and is empty if ``section`` is None.
    """
    if section is None:
        return ""
    valid = list(section.model_fields)
    close = difflib.get_close_matches(names[-1], valid, n=1)
    return (
        f": did you mean {'.'.join([*names[:-1], close[0]])!r}?"
        if close
        else f": valid are {', '.join(valid)}"
    )


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in a field's annotation, such as Container in ``Container | None``."""
    types = [annotation, *get_args(annotation)]
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
