"""The pins: each has its digests, takes every Python that is promised, and no group needs another's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import hash_lock
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LINE = re.compile(r"([\w.-]+)==([\w.+]+)((?: --hash=sha256:[0-9a-f]{64})+)  # python (\S+)")
GROUPS = {
    "cpu": ["tba-hpc[cpu,wandb]"],
    "test": PROJECT["optional-dependencies"]["test"],
    "docs": PROJECT["optional-dependencies"]["docs"],
}
"""What each lock is for."""

ABSENT = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""What vLLM asks for and no text model needs."""


def lines(group: str) -> list[str]:
    return (REPOSITORY / f"tools/requirements-{group}.lock").read_text().splitlines()


def pins(group: str) -> dict[str, tuple[str, str]]:
    """Package → its version, its Requires-Python."""
    found = [LINE.fullmatch(line) for line in lines(group)]
    return {canonicalize_name(one[1]): (one[2], one[4]) for one in found if one}


@pytest.mark.parametrize("group", GROUPS)
def test_every_pin_has_digests_and_the_pythons_that_it_takes(group: str) -> None:
    assert [line for line in lines(group) if not LINE.fullmatch(line)] == []
    assert len(pins(group)) == len(lines(group)) > 10, "a package stands there twice"


@pytest.mark.parametrize("group", GROUPS)
def test_every_pin_takes_the_oldest_python_that_is_promised(group: str) -> None:
    (oldest,) = re.findall(r"^>=(\d+\.\d+)$", PROJECT["requires-python"])
    assert hash_lock.PYTHONS[0] == f"{oldest}.0"
    refused = [
        f"{name} {version} needs Python {takes}, not {python}"
        for name, (version, takes) in pins(group).items()
        for python in hash_lock.PYTHONS
        if takes != "any" and python not in SpecifierSet(takes)
    ]
    assert refused == []


def test_the_interpreter_that_make_looks_for_is_one_of_the_locks() -> None:
    script = (REPOSITORY / "tools/preflight.sh").read_text()
    first, last = re.findall(r"not \((3, \d+)\) <= .* <= \((3, \d+)\)", script)[0]
    assert [first, last] == [", ".join(hash_lock.PYTHONS[n].split(".")[:2]) for n in (0, -1)]


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_lock_says_of_pythons_is_what_the_packages_say(group: str) -> None:
    compared = 0
    for name, (version, takes) in pins(group).items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.version == version:
            compared += 1
            said = package.metadata["Requires-Python"]
            assert takes == (said or "any").replace(" ", ""), name
    assert compared > 10 or group == "docs", "the environment is not the one that make installs"


def test_a_package_of_two_groups_has_one_version() -> None:
    every = [item for group in GROUPS for item in pins(group).items()]
    assert {item for item in every if item[1] != dict(every)[item[0]]} == set()


def needed(requirement: Requirement) -> Iterator[Requirement]:
    """What a package that is installed needs itself."""
    for text in distribution(requirement.name).requires or []:
        needs = Requirement(text)
        if needs.marker is None or any(
            needs.marker.evaluate({"extra": x}) for x in requirement.extras | {""}
        ):
            yield needs


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_lacks_nothing_that_it_needs(group: str) -> None:
    """The others are left out by those who do not need them."""
    if group == "docs":
        pytest.importorskip("mkdocs", reason="mkdocs-material is not installed: type make docs")
    locked = {**pins("cpu"), **pins(group)}
    todo, seen = [Requirement(text) for text in GROUPS[group]], set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in seen or name in ABSENT:
            continue
        seen.add((name, *sorted(one.extras)))
        assert name == "tba-hpc" or locked[name][0] in one.specifier, f"{one} is not what is locked"
        todo.extend(needed(one))
    assert len(seen) > 10
