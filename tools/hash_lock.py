"""Writes digests and Requires-Python beside each pin of tools/requirements-*.lock, for Linux on x86_64.

After a change of a pin, install it (pip install --no-deps NAME==VERSION), and run this with uv on PATH. It
fails if a pin does not support one of PYTHONS. CPU torch is not on PyPI: its digests stay as they are in the
lock, and are edited by hand from https://download.pytorch.org/whl/cpu/torch/.
"""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

LOCKS = sorted(Path(__file__).parent.glob("requirements-*.lock"))
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
COMPILE = "uv pip compile --quiet --no-deps --format pylock.toml --python-platform x86_64-manylinux_2_40"


def digests(pins: Iterable[str]) -> dict[str, set[str]]:
    """Return the digests of PyPI's files for each pin: of wheels, or of the source if there are none."""
    found: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        wanted.write_text("\n".join(pins))
        for python in PYTHONS:
            words = [*COMPILE.split(), "--python-version", python, "--output-file", str(lock), str(wanted)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            for package in tomllib.loads(lock.read_text())["packages"]:
                files = package.get("wheels") or [package["sdist"]]
                found[package["name"]].update(file["hashes"]["sha256"] for file in files)
    return found


def requires_python(pin: str) -> str:
    """Return Requires-Python of the installed package; ``any`` if it has none."""
    name, _, version = pin.partition("==")
    package = distribution(name)
    assert package.version == version, f"{name} {package.version} is installed: pip install --no-deps {pin}"
    return (package.metadata["Requires-Python"] or "any").replace(" ", "")


def main() -> None:
    """Rewrite all locks."""
    for lock in LOCKS:
        lines = [line.partition("  # ")[0].split() for line in lock.read_text().splitlines()]
        known = digests(pin for pin, *_ in lines if not pin.startswith("torch=="))
        for words in lines:
            pin = words[0]
            if hashes := known.get(pin.partition("==")[0].lower().replace("_", "-").replace(".", "-")):
                words[1:] = [f"--hash=sha256:{digest}" for digest in sorted(hashes)]
            words.append(f" # python {requires_python(pin)}")
        lock.write_text("\n".join(" ".join(words) for words in lines) + "\n")


if __name__ == "__main__":
    main()
