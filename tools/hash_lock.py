"""Put the digests of each pin's wheels into tools/requirements-cpu.lock, for Linux on x86_64 and PYTHONS.

Run it after a pin has changed, with uv on PATH (pip install uv). CPU torch is not on PyPI: its digests stay
as they are in the lock, and are edited by hand from https://download.pytorch.org/whl/cpu/torch/.
"""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

LOCK = Path(__file__).parent / "requirements-cpu.lock"
PYTHONS = ("3.11.9", "3.12.9", "3.13.9")
COMPILE = "uv pip compile --quiet --no-deps --format pylock.toml --python-platform x86_64-manylinux_2_40"


def digests(pins: str) -> dict[str, set[str]]:
    """Of the files that PyPI has for each pin: wheels, or the source where there are none."""
    found: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        wanted.write_text(pins)
        for python in PYTHONS:
            words = [*COMPILE.split(), "--python-version", python, "--output-file", str(lock), str(wanted)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            for package in tomllib.loads(lock.read_text())["packages"]:
                files = package.get("wheels") or [package["sdist"]]
                found[package["name"]].update(file["hashes"]["sha256"] for file in files)
    return found


def main() -> None:
    """Rewrite the lock."""
    lines = LOCK.read_text().splitlines()
    known = digests("\n".join(line.split()[0] for line in lines if not line.startswith(("#", "torch=="))))
    for number, line in enumerate(lines):
        pin = line.split()[0]
        if hashes := known.get(pin.partition("==")[0].lower().replace("_", "-").replace(".", "-")):
            lines[number] = " ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])
    LOCK.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
